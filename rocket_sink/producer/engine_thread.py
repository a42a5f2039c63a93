"""The thread that owns the engine of a producer.

One thread, the producer's, drives the engine: it takes requests, writes, reads and handles answers.
Callers append to queues without a lock, wake the thread, and wait for their own event. Users' code
runs on the callbacks' thread (`future.Workers`), so it may block, and may call everything. So may a
signal handler: while it runs, its thread is in no step of the engine, and holds no lock that the
producer's thread needs. Ctrl-C interrupts only a wait; the request goes on.

If the system refuses the thread, as Python does while it ends, each caller drives the engine until
its own request has ended (`EngineThread._drive_here`)."""

from __future__ import annotations

import contextlib
import enum
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

from rocket_sink.errors import ProducerClosedError, UnknownOutcomeError, UnwrittenError
from rocket_sink.net import log
from rocket_sink.producer.engine.engine import SendEngine
from rocket_sink.producer.future import OpenFutures, Workers
from rocket_sink.producer.process_end import is_ending
from rocket_sink.producer.request_queue import RequestQueue
from rocket_sink.producer.worker import Waiter, Worker

_LOG: Final = log.logger(__name__)
_IDLE_S: Final = 1.0
_STEP_S: Final = 0.01
"""Time between two attempts of a call that the engine cannot answer yet."""


class State(enum.IntEnum):
    """The life of a producer's engine."""

    OPEN = 0
    ENDING = 1
    """The process ends: `send_async` returns when its message has ended."""
    REFUSING = 2
    """`close` was called: no new requests."""
    CLOSING = 3
    """The driving thread closes the engine when nothing is pending, or at `close_s`."""
    CLOSED = 4


class TimerTask(Protocol):
    """Work of the driving thread at certain times."""

    def run(self, now_s: float) -> float:
        """Do the work that is due; all work if `now_s` is infinite. Return the next time at which
        work is due (engine's clock); infinite if there is none. It must not wait."""


class _Call(Waiter):
    """A function that the driving thread calls until its value is true."""

    __slots__ = ("error", "step")

    def __init__(self, step: Callable[[], object]) -> None:
        super().__init__()
        self.step = step
        self.error: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        self.error = error
        self.finish()


class EngineThread:
    """Drives an engine for all threads of a process."""

    def __init__(self, engine: SendEngine) -> None:
        self.engine = engine
        self.workers = Workers(Worker("rocket-sink-callbacks"), Worker("rocket-sink-notices"))
        self.tasks: list[TimerTask] = []
        self.futures = OpenFutures()
        self.queue = RequestQueue(engine)
        self.state = State.ENDING if is_ending() else State.OPEN
        self.is_abandoned = False
        """Whether nobody uses the producer any more: close it when nothing is pending."""
        self.close_s = math.inf
        """Time at which `State.CLOSING` ends requests that are still pending."""
        self._calls: deque[_Call] = deque()
        self._threads: dict[str, threading.Thread] = {}
        """The producer's thread. `dict.setdefault` decides which of two new threads drives."""
        self._drivers: deque[int] = deque()
        """Ids of threads that want to drive; the first one does."""
        self._completed: list[Waiter] = []
        """Waits that have ended, to be told so at the end of the step."""
        self._asleep = False
        """Whether the driving thread waits, or is about to: who appends has to wake it."""
        self._waits = False
        """Whether the driving thread waits for sockets, so that Ctrl-C interrupts no step."""
        self._has_skipped = False
        """Whether the last step began anew to take requests, before it handled what is due."""
        engine.heartbeats.reconnects = True

    # --- callers -----------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        return bool(self._threads)

    @property
    def is_caller(self) -> bool:
        """Whether the calling thread drives, and would wait for itself."""
        return threading.get_ident() in self._drivers

    def call(self, step: Callable[[], object]) -> object:
        """Make the driving thread call `step` until its value is true, and return this value.
        Raise the errors of `step`, or ProducerClosedError."""
        entry = _Call(step)
        self._calls.append(entry)
        self.wake()
        if self.state is State.CLOSED:
            raise ProducerClosedError("the producer is closed")
        self.wait(entry, None)
        if entry.error is not None:
            raise entry.error
        return entry.value

    def wait(self, waiter: Waiter, timeout_s: float | None) -> bool:
        """Wait for the driving thread; without one, drive until the end of the wait."""
        if not self._threads and not self.start():
            clock = self.engine.clock
            until_s = math.inf if timeout_s is None else clock() + timeout_s
            self._drive_here(lambda: waiter.value is not None or clock() >= until_s)
            return waiter.value is not None
        if self.is_caller:
            raise _nested_wait_error()
        return waiter.wait(timeout_s)

    def wake(self) -> None:
        """Make the driving thread look at the queues and timer tasks."""
        if self._asleep:
            self._asleep = False
            self.engine.client.wake()

    def abandon(self) -> None:
        """Make the producer's thread, if it runs, send all accepted messages, close the engine, and
        end. Take no lock here: the garbage collector may call this in any thread."""
        self.is_abandoned = True
        self.engine.client.wake()

    def start(self) -> bool:
        """Start the producer's thread unless it runs; return False if the system refuses it."""
        if not self._threads:
            if self.state >= State.REFUSING:
                return False
            thread = threading.Thread(target=self._run, name="rocket-sink-producer", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                return False
        return True

    def join(self, timeout_s: float) -> None:
        thread = self._threads.get("drives")
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)

    def _drive_here(self, is_over: Callable[[], bool]) -> None:
        """Drive the engine on the calling thread until `is_over()`, then run users' code here.
        If Ctrl-C interrupts a step, no later step can be relied on, so end all requests."""
        if self.is_caller:
            raise _nested_wait_error()
        me = threading.get_ident()
        try:
            self._drivers.append(me)
            while not is_over() and self.state is not State.CLOSED:
                self._step_in_turn(me, _STEP_S)
            self._open_gates()
        except BaseException:
            if not self._waits:
                self._give_up()
            raise
        finally:
            with contextlib.suppress(ValueError):
                self._drivers.remove(me)
        for worker in self.workers:
            worker.run_here()

    def _give_up(self) -> None:
        error = UnknownOutcomeError(
            "given up: an exception interrupted a thread that drove the producer, which could "
            "start no thread of its own; make a new Producer"
        )
        self.state = State.CLOSED
        self.engine.abandon()
        self.queue.close()
        for future in self.futures.undone():
            future.resolve(None, error.copy())
        while self._calls:
            self._calls.popleft().fail(error.copy())

    # --- driving -----------------------------------------------------------------------------

    def _run(self) -> None:
        thread, me = threading.current_thread(), threading.get_ident()
        if self._threads.setdefault("drives", thread) is not thread:
            return
        self._drivers.append(me)
        log.relay(self.workers.notices.put)
        while self.state is not State.CLOSED:
            try:
                self._step_in_turn(me, _IDLE_S)
            except BaseException:
                # Go on, because without this thread nothing drives the engine, and no future ends.
                _LOG.exception("the producer's thread goes on after an error")
                time.sleep(_STEP_S)
        self._open_gates()

    def _step_in_turn(self, me: int, longest_s: float) -> None:
        if self._drivers[0] == me:
            self._step(longest_s)
        else:
            time.sleep(_STEP_S)

    def _step(self, longest_s: float) -> None:
        """Take requests, write, wait for sockets at most `longest_s`, and handle what has come."""
        engine, queue = self.engine, self.queue
        self._asleep = True
        if queue.requests:
            queue.drain()
        if self.tasks:
            due_s = self.run_tasks(engine.clock())
            longest_s = max(0.0, min(longest_s, due_s - engine.clock()))
            if queue.requests:
                queue.drain()
        if self._calls:
            self._serve_calls()
            longest_s = min(longest_s, _STEP_S)
        if self.state is State.CLOSING or self.is_abandoned:
            self._close_if_idle()
            if self.state is State.CLOSED:
                return
        wait_s = engine.prepare(longest_s)
        if engine.has_completions or queue.refused:
            wait_s = 0.0
        # A woken thread needs the GIL, which the wait below releases.
        self._open_gates()
        self._waits = True
        ready = engine.client.wait(wait_s)
        self._waits = self._asleep = False
        if queue.requests and not ready and not self._has_skipped:
            self._has_skipped = True
            return
        self._has_skipped = False
        engine.process(ready)
        self._take_completions()

    def _take_completions(self) -> None:
        """Give completions to the owners of their requests."""
        completions, refused = self.engine.take(), self.queue.refused
        if refused:
            completions += refused
            refused.clear()
        for completion in completions:
            token = completion.token
            if type(token) is Waiter:
                completion.token = None  # Break the reference cycle.
                token.value = completion
                self._completed.append(token)
            elif token is not None:
                token.on_done(completion)
        self.futures.prune()

    def _open_gates(self) -> None:
        while self._completed:
            self._completed.pop().open()

    def _serve_calls(self) -> None:
        for _ in range(len(self._calls)):
            entry = self._calls.popleft()
            try:
                value = entry.step()
            except Exception as error:
                entry.fail(error)
                continue
            if value:
                entry.finish(value)
            else:
                self._calls.append(entry)

    def run_tasks(self, now_s: float) -> float:
        """Run the timer tasks, on the driving thread; return when the next work is due."""
        due_s = math.inf
        for task in self.tasks:
            try:
                due_s = min(due_s, task.run(now_s))
            except Exception:
                _LOG.exception("a timer task of the producer failed")
        return due_s

    def has_pending(self) -> bool:
        return bool(self.engine.pending or self.queue.requests)

    def _close_if_idle(self) -> None:
        """Close the engine if nothing is pending, or the time is over."""
        self.run_tasks(math.inf)
        is_busy = self.has_pending()
        if self.is_abandoned and not self.workers.callbacks.is_idle:
            is_busy = True  # Hooks may trace the last requests.
        if is_busy and self.engine.clock() < self.close_s:
            return
        self.engine.close()
        self.engine.identity.release()
        self.queue.close()
        self._take_completions()
        self.state = State.CLOSED
        while self._calls:
            self._calls.popleft().fail(ProducerClosedError("the producer is closed"))
        if self.is_abandoned:
            for worker in self.workers:
                worker.stop()


def _nested_wait_error() -> UnwrittenError:
    return UnwrittenError(
        "this thread drives the producer, so a wait for the producer would never end: an RPC hook "
        "or a function of credentials must not send; without threads, neither may a signal handler"
    )
