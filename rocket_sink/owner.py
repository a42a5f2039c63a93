"""The process that owns an open spool file or a lock, and whether it is alive.

Host, boot id, pid namespace, pid and start time identify a process: pids are reused, and containers
of one machine have equal pids. Without /proc (not Linux) boot id and namespace are empty, and the
host's name is compared instead."""

from __future__ import annotations

import functools
import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

_PROC: Final = Path("/proc")
_BOOT_ID: Final = _PROC / "sys/kernel/random/boot_id"
_SAME_START_MS: Final = 2000
"""Tolerance of start times without /proc: these are wall-clock times."""


@dataclass(frozen=True)
class Owner:
    """The identity of a process.

    Attributes:
        host: the host's name, not necessarily unique.
        boot: the kernel's boot id.
        pid_namespace: number of the namespace of `pid`.
        start: clock ticks from boot to the process's start; without /proc, ms since 1970.
    """

    host: str
    boot: str
    pid_namespace: str
    pid: int
    start: int

    def __str__(self) -> str:
        return f"{self.host}~{self.boot}~{self.pid_namespace}~{self.pid}~{self.start}"

    @classmethod
    def parse(cls, text: str) -> Owner | None:
        """Return the owner from the text that `str(owner)` gives; None for other texts."""
        parts = text.split("~")
        if len(parts) != 5 or not all(p.isascii() and p.isdigit() for p in parts[3:]):
            return None
        return cls(parts[0], parts[1], parts[2], int(parts[3]), int(parts[4]))

    def is_alive(self) -> bool | None:
        """Return whether the process lives; None if this cannot be seen from here, because the
        process is of another host, boot or pid namespace."""
        me = this_process()
        if (self.boot, self.pid_namespace) != (me.boot, me.pid_namespace):
            return None
        if not _sees_own_pids() if self.boot else self.host != me.host:
            return None
        try:
            start = _start_of(self.pid)
        except psutil.NoSuchProcess:
            return False
        except psutil.AccessDenied:
            return True
        return abs(start - self.start) <= (0 if self.boot else _SAME_START_MS)

    def describe(self) -> str:
        return f"process {self.pid} on {self.host}"


@functools.cache
def this_process() -> Owner:
    boot = _boot_id()
    start = _ticks(_PROC / "self/stat") if boot else _start_of(os.getpid())
    # Reduce the host's name to characters that file names may have.
    host = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname()) or "localhost"
    return Owner(host, boot, _pid_namespace(), os.getpid(), start)


os.register_at_fork(after_in_child=this_process.cache_clear)


@functools.cache
def _boot_id() -> str:
    try:
        return re.sub(r"[^0-9a-f]", "", _BOOT_ID.read_text())
    except OSError:
        return ""


def _pid_namespace() -> str:
    try:
        return re.sub(r"\D", "", str((_PROC / "self/ns/pid").readlink()))
    except OSError:
        return ""


def _sees_own_pids() -> bool:
    """Return False if /proc belongs to another pid namespace."""
    try:
        return str((_PROC / "self").readlink()) == str(os.getpid())
    except OSError:
        return False


def _start_of(pid: int) -> int:
    """Return the start of a process, as in `Owner.start`. Raise psutil.NoSuchProcess if the process
    has ended or is a zombie, psutil.AccessDenied if its start is not readable."""
    if not _boot_id():
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            raise psutil.NoSuchProcess(pid)
        return int(process.create_time() * 1000)
    try:
        # Do not use psutil's start: it is a wall-clock time, which moves when the clock is set.
        return _ticks(_PROC / str(pid) / "stat")
    except OSError as error:
        # /proc may hide other users' processes (hidepid).
        if not isinstance(error, ProcessLookupError) and psutil.pid_exists(pid):
            raise psutil.AccessDenied(pid) from error
        raise psutil.NoSuchProcess(pid) from error


def _ticks(path: Path) -> int:
    """Return field 22 of `stat` (proc(5)), counted from the last bracket. It ends the process's
    name, which may have blanks and brackets."""
    fields = path.read_bytes().rpartition(b")")[2].split()
    if fields[0] in (b"Z", b"X"):
        raise ProcessLookupError(f"{path}: a zombie")
    return int(fields[19])
