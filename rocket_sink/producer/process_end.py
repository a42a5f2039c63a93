"""The end of a process: messages that its producers accepted are sent first.

Python ends when its last thread that is no daemon does, and a child of `multiprocessing` by
`os._exit`. Both call `finish_all` before. A process that is killed, or calls `os._exit` itself,
runs no Python code any more.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Final, Protocol
from weakref import WeakSet

from rocket_sink.forks import ForkLock
from rocket_sink.net import log

_LAST: Final = -100
"""Priority among the finalizers of `multiprocessing`; a program's own ones run first, and may send.
"""


class Sender(Protocol):
    """A producer that sends in the background."""

    of_pid: int

    def finish(self) -> None:
        """Send all accepted messages. From now on `send_async` blocks until the send has ended."""


_LOG: Final = log.logger(__name__)
_senders: Final[WeakSet[Sender]] = WeakSet()
_registered: Final[set[int]] = set()
"""Process ids in which `finish_all` is among the finalizers of `multiprocessing`."""
_lock: Final = ForkLock()
_inside: Final[set[int]] = set()
"""The daemon threads within an `uninterrupted` call."""
os.register_at_fork(after_in_child=_inside.clear)
_is_over = False
_CALL_S: Final = 60.0
"""Longest wait of the end for such calls."""


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Let the end of this process wait for a call into native code, and begin none after it.

    Spark calls functions of streams in daemon threads.
    """
    thread = threading.current_thread()
    if not thread.daemon or thread.ident in _inside:
        yield
        return
    with _lock:
        if not (_senders or _is_over):
            _register()
        if not _is_over:
            _inside.add(threading.get_ident())
    while thread.ident not in _inside:
        time.sleep(_CALL_S)
    try:
        yield
    finally:
        _inside.discard(threading.get_ident())


def finish_at_end(sender: Sender) -> None:
    """Call `finish` when this process ends."""
    with _lock:
        _senders.add(sender)
        _register()


def _register() -> None:
    """Let `finish_all` run at the end of this process."""
    # Register again as the last one: the last one runs first, before the end of Spark's JVM.
    atexit.unregister(finish_all)
    atexit.register(finish_all)
    processes = sys.modules.get("multiprocessing.process")
    is_child = processes is not None and processes.parent_process() is not None
    if is_child and os.getpid() not in _registered:
        from multiprocessing.util import Finalize

        # A child of `multiprocessing` drops its parent's finalizers, and never calls those of
        # `atexit`.
        Finalize(None, finish_all, exitpriority=_LAST)
        _registered.add(os.getpid())


def finish_all() -> None:
    """Let all senders of this process finish, then all `uninterrupted` calls."""
    global _is_over
    with _lock:
        senders = list(_senders)
    for sender in senders:
        if sender.of_pid == os.getpid():
            try:
                sender.finish()
            except Exception:
                _LOG.exception("messages of %r were not sent before the process ended", sender)
    with _lock:
        _is_over = True
    until_s = time.monotonic() + _CALL_S
    while _inside and time.monotonic() < until_s:
        time.sleep(0.01)
