"""Who owns an open spool file or a lock, and whether that process still lives.

The name of a process is host, pid and start time: a pid alone is used again by others.
"""

from __future__ import annotations

import functools
import os
import re
import socket
from dataclasses import dataclass

import psutil


@dataclass(frozen=True)
class Owner:
    """A process. `start_ms` is its start in milliseconds since 1970."""

    host: str
    pid: int
    start_ms: int

    def __str__(self) -> str:
        return f"{self.host}~{self.pid}~{self.start_ms}"

    @classmethod
    def parse(cls, text: str) -> Owner | None:
        """The inverse of `str`; None for other text."""
        parts = text.split("~")
        if len(parts) != 3 or not (parts[1].isdigit() and parts[2].isdigit()):
            return None
        return cls(parts[0], int(parts[1]), int(parts[2]))

    def is_alive(self) -> bool | None:
        """None: on another host, where nobody here can tell."""
        if self.host != host_name():
            return None
        try:
            # Clocks are set while processes run: a start within two seconds is the same one.
            return abs(_start_ms(self.pid) - self.start_ms) < 2000
        except psutil.NoSuchProcess:
            return False
        except psutil.AccessDenied:
            return True


@functools.cache
def host_name() -> str:
    """This host's name, fit for a file name."""
    return re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname()) or "localhost"


def this_process() -> Owner:
    """The owner that this process is."""
    return Owner(host_name(), os.getpid(), _own_start_ms())


@functools.cache
def _own_start_ms() -> int:
    return _start_ms(os.getpid())


os.register_at_fork(after_in_child=_own_start_ms.cache_clear)


def _start_ms(pid: int) -> int:
    process = psutil.Process(pid)
    if process.status() == psutil.STATUS_ZOMBIE:
        raise psutil.NoSuchProcess(pid)
    return int(process.create_time() * 1000)
