"""The calls of a producer's threads: they submit requests, and wait for the thread that owns the
engine (`engine_thread`)."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Final, Protocol, TypeVar, cast

from rocket_sink.errors import (
    AuthenticationError,
    NotSentError,
    Outcome,
    ProducerClosedError,
    RequestTimeoutError,
    SendError,
    WindowFullError,
)
from rocket_sink.message import Message, SendResult
from rocket_sink.net import log
from rocket_sink.net.client import Call
from rocket_sink.producer.engine.attempt import Completion, SendRequest, buffers_of
from rocket_sink.producer.engine.engine import SendEngine
from rocket_sink.producer.engine_thread import EngineThread, State
from rocket_sink.producer.future import SendFuture
from rocket_sink.producer.hooks import Hooks
from rocket_sink.producer.worker import Waiter
from rocket_sink.routing.retry import error_for_answer
from rocket_sink.routing.topic_publish_info import TopicPublishInfo
from rocket_sink.wire.headers import Frame
from rocket_sink.wire.properties import decode_properties, split_keys

_LOG: Final = log.logger(__name__)
_T = TypeVar("_T")
_GRACE_S: Final = 1.0
"""Time that the engine may need to end a request after its deadline."""
_LOST_S: Final = 5.0
"""A request counts as lost if it has not ended this long after its deadline."""


class Token(Protocol):
    """The owner of a request."""

    def on_done(self, completion: Completion) -> None:
        """Take the completion. The driving thread calls this, so it must not wait."""


class Driver:
    """Submits requests to the engine's thread; calls the hooks of synchronous sends."""

    def __init__(self, engine: SendEngine, hooks: Hooks) -> None:
        self.engine = engine
        self.thread = EngineThread(engine)
        self.futures = self.thread.futures
        self.workers = self.thread.workers
        self._queue = self.thread.queue
        self._hooks = hooks
        self._timeout_s = engine.options.send_msg_timeout_ms / 1000

    # --- sending -----------------------------------------------------------------------------

    def send(self, request: SendRequest, messages: Sequence[Message], mode: str) -> SendResult:
        """Submit a request of one message, and return its result; raises SendError."""
        return result_of(self._complete(request, messages, mode))

    def send_oneway(self, request: SendRequest, messages: Sequence[Message]) -> None:
        """Submit a request that gets no answer; return when the frame is written.

        Raises:
            NotSentError: no route, no connection, a broker too old for the message, no room in the
                window or the rate limits, or no byte written before the time-out.
            RequestTimeoutError: only a part of the frame was written before the time-out.
        """
        request.oneway, request.attempts, request.timeout_s = True, 1, self._timeout_s
        error = self._complete(request, messages, "oneway").error
        if error is not None:
            raise error

    def _complete(self, request: SendRequest, messages: Sequence[Message], mode: str) -> Completion:
        """Submit a request, wait for its end, and call the send hooks before and after."""
        hooks, context = self._hooks, None
        if hooks.hooks:
            context = hooks.before(mode, request.topic, messages, (request.message_id,))
        request.token = waiter = Waiter()
        since_s = request.since_s or self.engine.clock()
        timeout_s = request.timeout_s or self._timeout_s
        try:
            self.check_open()
            self._queue.requests.append(request)
            self.thread.wake()
            if not self.thread.wait(waiter, timeout_s) and self._queue.withdraw(request):
                request.since_s = since_s
                raise self._no_room(request)
        except NotSentError as error:
            hooks.after(context, None, error)
            raise
        completion = self.completion(waiter)
        if context is not None:
            hooks.after(context, completion.result, completion.error)
        return completion

    def submit(self, request: SendRequest, token: Token) -> None:
        """Submit a request; wait for room in the window until the request's time-out. Raises
        WindowFullError or ProducerClosedError."""
        request.token = token
        since_s = request.since_s or self.engine.clock()
        self.check_open()
        waiter = self._queue.put_if_room(request)
        self.thread.wake()
        if waiter is None and self.thread.state is State.OPEN:
            return
        if waiter is not None:
            timeout_s = since_s + (request.timeout_s or self._timeout_s) - self.engine.clock()
            if not self.thread.wait(waiter, timeout_s) and self._queue.withdraw(request):
                request.since_s = since_s
                raise self._no_room(request)
        if self.thread.state is State.CLOSED and self._queue.withdraw(request):
            raise ProducerClosedError("the producer is closed")

    def has_room(self) -> bool:
        """Return whether the window has room for more requests."""
        return self._queue.has_room()

    def await_room(self, request: SendRequest) -> None:
        """Wait until the window has room for more requests. Raises WindowFullError."""
        deadline_s = self.engine.clock() + self._timeout_s
        has_room = self._queue.has_room
        self.call(lambda: has_room() or self.engine.clock() >= deadline_s)
        if self.engine.clock() >= deadline_s:
            raise self._no_room(request)

    def submit_again(self, request: SendRequest, token: Token) -> None:
        """Submit a request of the driving thread itself, even while the producer closes."""
        request.token, request.since_s = token, self.engine.clock()
        self._queue.put(request)

    def completion(self, waiter: Waiter) -> Completion:
        """Wait for the completion. If there is none long after the deadline, return UNKNOWN."""
        if self.thread.wait(waiter, self.engine.longest_s + _GRACE_S + _LOST_S):
            return cast(Completion, waiter.value)
        return Completion(waiter, Outcome.UNKNOWN, None, _overdue_error(), maybe_duplicate=True)

    def settle(self) -> None:
        """Wait for asynchronous sends if the process ends, or no thread can be started."""
        if self.thread.state is State.ENDING or not (self.thread.is_running or self.thread.start()):
            deadline_s = self.engine.clock() + self.engine.longest_s + _GRACE_S
            self.flush(deadline_s - self.engine.clock())
            if self.thread.tasks:
                self.call(lambda: self._has_ended(deadline_s))

    def flush(self, timeout_s: float | None) -> bool:
        """Send open batches, and wait for all asynchronous sends so far and for their callbacks.
        Return whether they have ended before `timeout_s`."""
        deadline_s = math.inf if timeout_s is None else self.engine.clock() + timeout_s
        futures: list[SendFuture] | None = None

        def step() -> bool:
            nonlocal futures
            if futures is None:
                self.thread.run_tasks(math.inf)
                futures = self.futures.undone()
            while futures and futures[-1].done():
                futures.pop()
            return not futures or self.engine.clock() >= deadline_s

        self.call(step)
        return self._flush_workers(deadline_s) and not futures

    def _flush_workers(self, deadline_s: float) -> bool:
        remaining_s = None if deadline_s == math.inf else deadline_s - self.engine.clock()
        notices, callbacks = (worker.flush(remaining_s) for worker in reversed(self.workers))
        return notices and callbacks

    # --- other requests ----------------------------------------------------------------------

    def call(self, step: Callable[[], _T | None]) -> _T:
        """Make the driving thread call `step` until its value is true, and return this value.
        Raise the errors of `step`, or ProducerClosedError."""
        return cast(_T, self.thread.call(step))

    def read(self, step: Callable[[], list[_T]]) -> list[_T]:
        """Return the value of `step`, called by the driving thread, if there is one."""
        with contextlib.suppress(ProducerClosedError):
            return self.call(lambda: (step(),))[0]
        return step()

    def publish_info(self, topic: str, *, timeout_s: float | None = None) -> TopicPublishInfo:
        """Return the topic's route. If it is not cached, wait until a name server has answered.
        Raises NoRouteError or NameServerUnavailableError."""
        deadline_s = self.engine.clock() + (timeout_s or self._timeout_s)
        return self.call(lambda: self.engine.known_route(topic, deadline_s))

    def invoke(self, address: str, frame: Frame) -> Frame:
        """Send an administrative request, and return the answer, whatever its code. If the broker
        refuses the credentials, read them again. If they have changed, repeat the request once.
        Raises NotSentError or UnknownOutcomeError if the connection fails."""
        began_s = self.engine.clock()
        answer = self._invoke_once(address, frame)
        if not isinstance(error_for_answer(answer.code, answer.remark), AuthenticationError):
            return answer
        has_changed = self.call(lambda: (self.engine.reread_credentials(began_s),))[0]
        return self._invoke_once(address, frame) if has_changed else answer

    def _invoke_once(self, address: str, frame: Frame) -> Frame:
        ends: list[tuple[Frame | None, SendError | None]] = []
        lost_s: list[float] = []

        def step() -> bool:
            now_s, client = self.engine.clock(), self.engine.client
            if not lost_s:
                lost_s.append(now_s + self._timeout_s + _LOST_S)
                on_end = Call(lambda answer, error, at_s: ends.append((answer, error)))
                deadline_s = now_s + self._timeout_s
                client.call(address, frame, on_end, deadline_s=deadline_s, now_s=now_s)
            return bool(ends) or now_s >= lost_s[0]

        self.call(step)
        answer, error = ends[0] if ends else (None, _overdue_error())
        if answer is None:
            assert error is not None
            raise error
        return answer

    def oneway(self, address: str, frame: Frame) -> None:
        """Send a oneway request. If the kernel does not take all of it, the rest is written later.
        Raises NotSentError if there is no connection, or the producer is closed."""

        def step() -> bool:
            self.engine.client.oneway(address, frame, self.engine.clock())
            return True

        self.call(step)

    def stay_connected(self, until_s: float = 0.0) -> None:
        """Stay connected to all brokers, so that they can send transaction checks and replies. Wait
        until `until_s` (engine's clock) for a heartbeat to each."""
        heartbeats = self.engine.heartbeats
        if heartbeats.stays_connected and not until_s:
            return
        is_asked = False

        def step() -> bool:
            nonlocal is_asked
            if not is_asked:
                is_asked = heartbeats.stays_connected = True
                heartbeats.look_now()
            return self.engine.clock() >= until_s or heartbeats.all_sent()

        self.call(step)

    # --- end ---------------------------------------------------------------------------------

    def close(self, timeout_s: float | None) -> None:
        """Accept no more requests, wait for pending ones at most `timeout_s`, close the engine."""
        if self.thread.state >= State.REFUSING:
            return
        self.thread.state = State.REFUSING
        if self.thread.is_caller:
            self.thread.is_abandoned = True  # An RPC hook closes the producer, and cannot wait.
            return
        clock = self.engine.clock
        close_s = math.inf if timeout_s is None else clock() + timeout_s
        self.thread.close_s = close_s
        with contextlib.suppress(ProducerClosedError):
            self.flush(timeout_s)
            self.thread.state = State.CLOSING
            self.call(lambda: False)
        self._flush_workers(max(close_s, clock() + _GRACE_S))
        self.thread.join(_GRACE_S)
        for worker in self.workers:
            worker.stop()

    def finish(self) -> None:
        """Send all accepted messages at the end of the process. Log how many were not delivered,
        and how many of the last earlier ones, unless somebody has asked for their ends. This takes
        no longer than the requests' deadlines. Afterwards an asynchronous send returns when its
        message has ended."""
        longest_s = self.engine.longest_s + _GRACE_S
        if self.thread.state >= State.REFUSING or self.thread.is_abandoned:
            self.thread.join(longest_s)
            return
        self.thread.state = State.ENDING
        if not (self.thread.is_running or self.thread.tasks):
            return
        deadline_s = self.engine.clock() + longest_s
        futures = self.call(lambda: (self.futures.undone(),))[0]
        try:
            self.flush(longest_s)
            self.call(lambda: self._has_ended(deadline_s))
        finally:
            last = dict.fromkeys((*self.futures.unseen, *futures))
            undone = [each for each in last if not each.done() or each.is_unseen_failure]
            if undone:
                why = undone[0].exception() if undone[0].done() else "there was no time"
                _LOG.error(
                    "at least %d messages of asynchronous sends were not delivered before the "
                    "process ended: %s. Close the producer, and look at the futures' results",
                    len(undone), why,
                )  # fmt: skip

    def _has_ended(self, deadline_s: float) -> bool:
        """Send the traces of the last requests, too; return whether nothing is pending."""
        self.thread.run_tasks(math.inf)
        return not self.thread.has_pending() or self.engine.clock() >= deadline_s

    @property
    def closing(self) -> bool:
        return self.thread.state >= State.REFUSING

    def check_open(self) -> None:
        if self.thread.state >= State.REFUSING:
            raise ProducerClosedError("the producer is closed")

    def _no_room(self, request: SendRequest) -> WindowFullError:
        size = buffers_of(request.body)[1]
        keys = split_keys(decode_properties(request.properties))
        named = f" keys {', '.join(keys)}" if keys else ""
        error = WindowFullError(
            f"no room in the window before the deadline for {size} bytes to {request.topic!r}"
            f"{named}: {self.engine.pending} requests are in flight (options "
            "backPressureForAsyncSendNum, backPressureForAsyncSendSize, maxMessagesPerSecond, "
            "maxBytesPerSecond)",
            topic=request.topic, keys=keys, size=size, message_id=request.message_id,
        )  # fmt: skip
        self.engine.flow.measure_failure(request, error)
        return error


def _overdue_error() -> RequestTimeoutError:
    return RequestTimeoutError("the request has not ended, and its deadline is long past")


def result_of(completion: Completion) -> SendResult:
    """Return the result, or raise the error (SendError)."""
    if completion.result is None:
        assert completion.error is not None
        raise completion.error
    return completion.result
