"""A thread that calls functions in order, and a wait that signal handlers may interrupt.

Callers share no lock with the producer's threads: a signal handler may run while its thread holds a
lock, and then wait for a producer's thread, which would wait for the lock."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, Final

from rocket_sink.net import log

_LOG: Final = log.logger(__name__)
_STOP_S: Final = 0.2
"""Longest wait for the end of a thread, which may be in a callback that blocks."""


class Waiter:
    """A wait for one event; also the token of a request whose sender waits for the completion."""

    __slots__ = ("_gate", "value")

    def __init__(self) -> None:
        self.value: Any = None
        """The value of `finish`; None before."""
        self._gate = threading.Lock()
        self._gate.acquire()

    def finish(self, value: Any = True) -> None:
        """End the wait with a value other than None. Call this once."""
        self.value = value
        self.open()

    def open(self) -> None:
        """End the wait after a value was set. Call this once."""
        self._gate.release()

    def on_done(self, completion: Any) -> None:
        completion.token = None  # Break the reference cycle, which only a collection would free.
        self.finish(completion)

    def wait(self, timeout_s: float | None) -> bool:
        """Wait for `finish`, at most `timeout_s`; return whether there is a value."""
        if self.value is None:
            self._gate.acquire(timeout=seconds(timeout_s))
        return self.value is not None


def seconds(timeout_s: float | None) -> float:
    """Return a time-out for `threading.Lock.acquire`, where -1 means no limit."""
    return -1 if timeout_s is None else min(max(0.0, timeout_s), threading.TIMEOUT_MAX)


class Worker:
    """Calls functions on a daemon thread, in the order of `put`. The thread starts when the first
    function comes. If the system refuses the thread, the functions wait for `run_here`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._threads: dict[str, threading.Thread] = {}
        """The running thread. `dict.setdefault` decides which of two new threads runs."""

    def put(self, job: Callable[[], object]) -> None:
        self._jobs.put(job)
        if not self._threads:
            self._start()

    @property
    def is_idle(self) -> bool:
        return self._jobs.empty()

    @property
    def is_caller(self) -> bool:
        """Whether the calling thread is the worker's."""
        return threading.current_thread() in self._threads.values()

    def flush(self, timeout_s: float | None) -> bool:
        """Wait until the functions of earlier `put` calls have returned, at most `timeout_s`.
        Return whether they have; True on the worker's own thread, which cannot wait for itself."""
        if self.is_caller or not (self._threads or self._jobs.qsize()):
            return True
        waiter = Waiter()
        self.put(waiter.finish)
        if not self._threads:
            self.run_here()
        return waiter.wait(timeout_s)

    def run_here(self) -> None:
        """Call the waiting functions on the calling thread, if the system refused the worker's."""
        with contextlib.suppress(Empty):
            while not self._threads:
                job = self._jobs.get_nowait()
                if job is not None:
                    job()

    def stop(self) -> None:
        """End the thread after the functions of earlier `put` calls."""
        thread = self._threads.get("runs")
        if thread is not None:
            self._jobs.put(None)
            if thread is not threading.current_thread():
                thread.join(_STOP_S)

    def _start(self) -> None:
        with contextlib.suppress(RuntimeError):
            threading.Thread(target=self._run, name=self._name, daemon=True).start()

    def _run(self) -> None:
        me = threading.current_thread()
        if self._threads.setdefault("runs", me) is not me:
            return
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except BaseException:  # asyncio.CancelledError is not an Exception.
                _LOG.exception("a callback of a send raised")
            del job
        self._threads.clear()
        if not self._jobs.empty():  # `put` saw this thread, and started no other.
            self._start()
