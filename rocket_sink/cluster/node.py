"""A process of a cluster, name server or broker: start, stop, freeze, kill."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from rocket_sink.cluster.conf import LOG_FILE, LOOPBACK, properties_text, write_private
from rocket_sink.cluster.probe import Probe, ProbeFailed, accepts
from rocket_sink.errors import ClusterError

_POLL_S = 0.1
_GRACE_S = 25.0
_REGISTERS_WITHIN_S = 0.5
_READ_AND_WRITE = 6
_LOG_LINES = 20
_TAIL_BYTES = 32_768
_CONSOLE = "console.log"
"""The file of the process's output."""


@dataclass(frozen=True)
class NodeSpec:
    """The settings of a process and the command that starts it."""

    name: str
    port: int
    folder: Path
    command: tuple[str, ...]
    class_path: str
    settings: Mapping[str, str] = field(repr=False)
    host: str = LOOPBACK
    """The name or address by which clients reach the process."""

    @property
    def settings_file(self) -> Path:
        """The properties file with `settings`; written at each start, because brokers change it."""
        return self.folder / "settings.conf"

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"


class PortTakenError(ClusterError):
    """Another process has bound a port between its choice and its use; try other ports."""


@dataclass(eq=False, repr=False)
class Node:
    """A process of the cluster. `popen_options` is called at each start and returns further
    arguments for Popen: the process's group or session."""

    spec: NodeSpec
    popen_options: Callable[[], dict[str, Any]]
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    _earlier_cpu_s: float = field(default=0.0, init=False)

    def __repr__(self) -> str:
        state = "running" if self.alive else "not running"
        return f"<{type(self).__name__} {self.name} {self.address} {state}>"

    @property
    def name(self) -> str:
        """The name: name-server, broker-a, broker-b, ..."""
        return self.spec.name

    @property
    def address(self) -> str:
        """The host:port that clients use; the same after a restart."""
        return self.spec.address

    @property
    def pid(self) -> int:
        """The pid of the latest start; ClusterError before the first start."""
        return self._require_process().pid

    @property
    def alive(self) -> bool:
        """Whether the process exists, frozen or not."""
        return self._process is not None and self._process.poll() is None

    def cpu_s(self) -> float:
        """Return the CPU seconds (user and system) of all starts so far."""
        if self.alive:
            with suppress(psutil.Error):
                times = psutil.Process(self.pid).cpu_times()
                return float(self._earlier_cpu_s + times.user + times.system)
        return self._earlier_cpu_s

    def freeze(self) -> None:
        """Send SIGSTOP: sockets stay open, nothing is answered."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """Send SIGKILL; do nothing if the process has ended."""
        if self.alive:
            self._earlier_cpu_s = self.cpu_s()
            self._signal(signal.SIGKILL)
            self._require_process().wait()

    def stop(self, grace_s: float = _GRACE_S) -> None:
        """Send SIGTERM, and SIGKILL after `grace_s`; idempotent."""
        if not self.alive:
            return
        cpu_s = self.cpu_s()
        self._signal(signal.SIGTERM)
        self.thaw()
        try:
            self._require_process().wait(grace_s)
            self._earlier_cpu_s = cpu_s
        except subprocess.TimeoutExpired:
            self.kill()

    def spawn(self) -> None:
        """Start the process and return at once; raise ClusterError if it runs already."""
        if self.alive:
            raise ClusterError(f"{self.name} runs already (pid {self.pid}).")
        self.spec.folder.mkdir(parents=True, exist_ok=True)
        environ = {**os.environ, "CLASSPATH": self.spec.class_path}
        # A user's options for Java programs must not change the cluster.
        for name in ("JAVA_TOOL_OPTIONS", "_JAVA_OPTIONS", "JDK_JAVA_OPTIONS", "NAMESRV_ADDR"):
            environ.pop(name, None)
        write_private(self.spec.settings_file, properties_text(self.spec.settings))
        with (self.spec.folder / _CONSOLE).open("wb") as console:
            self._process = subprocess.Popen(
                [*self.spec.command, "-c", str(self.spec.settings_file)],
                cwd=self.spec.folder,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                # The process's files contain credentials and messages.
                umask=0o077,
                **self.popen_options(),
            )

    def wait_for(self, check: Callable[[], None], timeout_s: float) -> None:
        """Repeat `check` until it raises no ProbeFailed. Raise ClusterError with the last log lines
        if the process ends, or after `timeout_s`; PortTakenError if a port was in use."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return check()
            except ProbeFailed as failed:
                if not self.alive:
                    code = self._require_process().returncode
                    raise self._start_error(f"ended with code {code}") from failed
                if time.monotonic() > deadline:
                    reason = f"was not ready after {timeout_s:.0f} s: {failed}"
                    raise self._start_error(reason) from failed
            time.sleep(_POLL_S)

    def restart(self, timeout_s: float = 120) -> None:
        """Restart with the same ports and store, and wait until ready. A restarted name server has
        no routes until the brokers register again, within 30 s."""
        self.stop()
        self.spawn()
        self.wait_ready(timeout_s)

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until the process serves; errors as `wait_for`."""
        raise NotImplementedError

    def release(self) -> None:
        """Detach from the process, which goes on running."""
        if self._process is not None:
            # Without a return code, Popen would warn about the running child.
            self._process.returncode = 0

    def _signal(self, number: signal.Signals) -> None:
        if not self.alive:
            raise ClusterError(f"{self.name} is not running: start it with restart().")
        self._require_process().send_signal(number)

    def _require_process(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise ClusterError(f"{self.name} was not started: call start() of its cluster.")
        return self._process

    def _start_error(self, what: str) -> ClusterError:
        lines = self.log_tail()
        kind = PortTakenError if "Address already in use" in lines else ClusterError
        return kind(
            f"{self.name} ({self.address}) {what}. Its logs are in {self.spec.folder}; read them, "
            "and check free memory and disk, or give it more time (timeout_s). The last lines:\n"
            + lines
        )

    def log_tail(self) -> str:
        """Return the last lines of the process's output and log."""
        lines: list[str] = []
        for name in (_CONSOLE, LOG_FILE):
            file = self.spec.folder / name
            with suppress(OSError), file.open("rb") as log:
                log.seek(max(0, file.stat().st_size - _TAIL_BYTES))
                text = log.read().decode("utf-8", errors="replace")
                lines += text.splitlines()[-_LOG_LINES:]
        return "\n".join(lines)


class NameServer(Node):
    def wait_ready(self, timeout_s: float) -> None:
        """Wait until the name server has bound its port; errors as `wait_for`.

        Its own output says so (`NamesrvStartup`, 4.9 to 5.5): whichever process has the port would
        accept a connection.
        """

        def check() -> None:
            if b"The Name Server boot success" not in (self.spec.folder / _CONSOLE).read_bytes():
                raise ProbeFailed(f"the name server at {self.address} has not said that it serves")

        self.wait_for(check, timeout_s)


@dataclass(eq=False, repr=False)
class Broker(Node):
    """A broker of a cluster. `probe` asks the name server at the address `name_server`."""

    name_server: str
    probe: Probe

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until the broker is registered and has stored a message; errors as `wait_for`."""
        check = partial(self.probe.check_broker, self.name_server, self.name, self.address)
        self._wait_registered(check, timeout_s)

    def wait_routed(self, topic: str, timeout_s: float) -> None:
        """Wait until the topic's route has the broker; errors as `wait_for`."""
        check = partial(self.probe.check_route, self.name_server, topic, self.address)
        self._wait_registered(check, timeout_s)

    def _wait_registered(self, check: Callable[[], None], timeout_s: float) -> None:
        """Wait until `check` passes. Register a broker that listens while `check` keeps failing."""
        listens_since_s = 0.0

        def check_or_register() -> None:
            nonlocal listens_since_s
            try:
                check()
            except ProbeFailed:
                if accepts(self.address):
                    listens_since_s = listens_since_s or time.monotonic()
                    if time.monotonic() - listens_since_s > _REGISTERS_WITHIN_S:
                        listens_since_s = 0.0
                        permission = self.spec.settings.get("brokerPermission", _READ_AND_WRITE)
                        self.probe.register_now(self.address, int(permission))
                raise

        self.wait_for(check_or_register, timeout_s)
