"""The end of a process: messages that its producers accepted are sent first.

Python ends with its last non-daemon thread; a child of `multiprocessing` ends by `os._exit`. Both
call `finish_all` before. A process that is killed, or calls `os._exit` itself, does not.
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
"""Priority among the finalizers of `multiprocessing`; the program's own finalizers run first, and
may send.
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
_CALLS_S: Final = 60.0
"""Longest wait of the end for calls of daemon threads."""
_SILENT_S: Final = 1.0
"""A wait for daemon threads that is longer than this is logged."""


class Calls:
    """Calls in daemon threads that the end of this process waits for.

    Spark calls functions of streams in daemon threads. Python stops such a thread where it comes
    back from native code; below functions of pyarrow or delta-rs that crashes the process.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._threads: set[int] = set()
        self._is_over = False
        os.register_at_fork(after_in_child=self._threads.clear)

    @contextlib.contextmanager
    def uninterrupted(self) -> Iterator[None]:
        """Let the end of this process wait for a call, and begin none after it."""
        thread = threading.current_thread()
        if not thread.daemon or thread.ident in self._threads:
            yield
            return
        with _lock:
            if not (_senders or self._is_over):
                _register()
            if not self._is_over:
                self._threads.add(threading.get_ident())
        while thread.ident not in self._threads:
            time.sleep(_CALLS_S)
        try:
            yield
        finally:
            self._threads.discard(threading.get_ident())

    def finish(self) -> None:
        """Wait for the calls under way. A thread that begins another call sleeps until the process
        ends."""
        with _lock:
            self._is_over = True
        began_s, is_silent = time.monotonic(), True
        while self._threads and (waited_s := time.monotonic() - began_s) < _CALLS_S:
            if waited_s > _SILENT_S and is_silent:
                _LOG.warning(
                    "the process has ended, and waits for %s, at most %.0f s", self._what, _CALLS_S
                )
                is_silent = False
            time.sleep(0.01)


micro_batches: Final = Calls("a micro-batch to be sent")
"""Micro-batches may send and write, so they end before the senders."""
native_calls: Final = Calls("a commit to the ledger")
"""The senders' last messages and folds need native calls, which therefore end after the senders."""


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
    """Let micro-batches end, then all senders of this process, then calls of native code."""
    micro_batches.finish()
    with _lock:
        senders = list(_senders)
    for sender in senders:
        if sender.of_pid == os.getpid():
            try:
                sender.finish()
            except Exception:
                _LOG.exception("messages of %r were not sent before the process ended", sender)
    native_calls.finish()
