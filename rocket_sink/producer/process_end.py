"""Sending of all accepted messages before the process ends.

`finish_all` runs when the last non-daemon thread has ended, and before `multiprocessing` ends a
child by `os._exit`. It does not run if the process is killed, or calls `os._exit` itself."""

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
"""Exit priority in `multiprocessing`: last, because other finalizers may send messages."""


class Sender(Protocol):
    """A producer, a query listener or a sender of lineage events."""

    of_pid: int

    def finish(self) -> None:
        """Finish accepted work. Later calls of `send_async` block until their message has ended."""


_LOG: Final = log.logger(__name__)
_senders: Final[WeakSet[Sender]] = WeakSet()
_registered: Final[set[int]] = set()
"""Ids of the processes that have registered `finish_all` with `multiprocessing`."""
_lock: Final = ForkLock()
_CALLS_S: Final = 60.0
"""Longest wait of `Calls.finish`."""
_SILENT_S: Final = 1.0
"""A longer wait of `Calls.finish` is logged."""


class Calls:
    """Calls in daemon threads that must return before the process ends. Spark calls functions of
    streams in daemon threads. When Python ends, it stops such a thread as soon as native code
    returns to Python. Inside pyarrow or delta-rs this crashes the process."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._threads: set[int] = set()
        self._is_over = False
        os.register_at_fork(after_in_child=self._threads.clear)

    @contextlib.contextmanager
    def uninterrupted(self) -> Iterator[None]:
        """Delay the process's end until the `with` block ends. After `finish`, sleep instead."""
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
        """Wait for the running calls, at most `_CALLS_S`; let no other call begin."""
        with _lock:
            self._is_over = True
        began_s, is_silent = time.monotonic(), True
        while self._threads and (waited_s := time.monotonic() - began_s) < _CALLS_S:
            if waited_s > _SILENT_S and is_silent:
                _LOG.warning(
                    "the process is ending; it waits for %s, at most %.0f s", self._what, _CALLS_S
                )
                is_silent = False
            time.sleep(0.01)


micro_batches: Final = Calls("a micro-batch to be sent")
"""Micro-batches may send and write, so `finish_all` waits for them before it ends the senders."""
native_calls: Final = Calls("a commit to the ledger")
"""Calls of delta-rs. `finish_all` waits for them last, because senders may make such calls."""


def is_ending() -> bool:
    """Return whether functions of `atexit` run: a function that is registered now is not called."""
    main = threading.main_thread()
    return threading.current_thread() is main and not main.is_alive()


def finish_at_end(sender: Sender) -> None:
    with _lock:
        _senders.add(sender)
        _register()


def _register() -> None:
    # Register this last: `atexit` then calls it first, before Spark's JVM ends.
    atexit.unregister(finish_all)
    atexit.register(finish_all)
    processes = sys.modules.get("multiprocessing.process")
    is_child = processes is not None and processes.parent_process() is not None
    if is_child and os.getpid() not in _registered:
        from multiprocessing.util import Finalize

        # A child calls no functions of `atexit`, and drops its parent's finalizers.
        Finalize(None, finish_all, exitpriority=_LAST)
        _registered.add(os.getpid())


def finish_all() -> None:
    """Wait for micro-batches, finish all senders of this process, then wait for native calls."""
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
