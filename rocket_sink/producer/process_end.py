"""The end of a process, which first sends the messages that its producers have accepted.

Python ends with its last non-daemon thread; a child of `multiprocessing` ends by `os._exit`. In
both cases `finish_all` runs first, but not if a process is killed, or calls `os._exit` itself.
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
"""Priority among the finalizers of `multiprocessing`: after those of the program, which may send.
"""


class Sender(Protocol):
    """A background sender: a producer, the listener of queries, an emitter of lineage events."""

    of_pid: int

    def finish(self) -> None:
        """Finish the accepted work. Afterwards `send_async` blocks until the send has ended."""


_LOG: Final = log.logger(__name__)
_senders: Final[WeakSet[Sender]] = WeakSet()
_registered: Final[set[int]] = set()
"""Process ids in which `finish_all` is among the finalizers of `multiprocessing`."""
_lock: Final = ForkLock()
_CALLS_S: Final = 60.0
"""Longest wait for calls of daemon threads at the end of the process."""
_SILENT_S: Final = 1.0
"""Longest wait for calls of daemon threads that is not logged."""


class Calls:
    """Calls in daemon threads for which the end of the process waits.

    Spark calls functions of streams in daemon threads. At the end Python stops such a thread on
    its return from native code, which crashes the process inside pyarrow or delta-rs.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._threads: set[int] = set()
        self._is_over = False
        os.register_at_fork(after_in_child=self._threads.clear)

    @contextlib.contextmanager
    def uninterrupted(self) -> Iterator[None]:
        """Run a call for which the end of the process waits. A call that would begin after
        `finish` never runs: its thread sleeps."""
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
        """Wait for the calls under way, and let no other call begin."""
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
"""Native calls end after the senders, because the listener's last fold of a ledger needs them."""


def finish_at_end(sender: Sender) -> None:
    """Call `finish` when this process ends."""
    with _lock:
        _senders.add(sender)
        _register()


def _register() -> None:
    """Let `finish_all` run at the end of this process."""
    # Register last: `atexit` calls the last function first, so this runs before Spark's JVM ends.
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
