"""Kills a cluster's processes when its owner process ends, even by SIGKILL.

`Guard` runs this file as a process that leads the process group of the cluster's JVMs. When the
owner ends, a pipe closes or this process gets another parent. Then this process kills the group and
itself. Unlike Linux's PR_SET_PDEATHSIG this does not depend on the thread that started a broker,
and works on macOS. A process group's number is not reused while a member lives."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from typing import Any

_POLL_S = 0.5
_WAIT_S = 10


class Guard:
    """The owner's handle of a process group that is killed when the owner ends."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def join(self) -> dict[str, Any]:
        """Start the guard if needed; return Popen's arguments for a process in the group."""
        if self._process is None or self._process.poll() is not None:
            command = [sys.executable, "-I", "-S", __file__, str(os.getpid())]
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, **_group(0)
            )
        return _group(self._process.pid)

    def close(self) -> None:
        """Kill the group. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        try:
            process.wait(_WAIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _group(leader: int) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        return {"process_group": leader}
    # One system call without new Python objects is safe between fork and exec.
    return {"preexec_fn": lambda: os.setpgid(0, leader)}


def watch(owner: int) -> None:
    """Kill the group when the owner's pipe closes or the owner is no longer the parent."""
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    # Check the parent's pid, too, because a forked child of the owner may hold the pipe open.
    while os.getppid() == owner:
        readable, _, _ = select.select([0], [], [], _POLL_S)
        if readable and not os.read(0, 1):
            break
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    watch(int(sys.argv[1]))
