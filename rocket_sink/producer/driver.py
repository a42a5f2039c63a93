"""Threads that share one engine: one thread leads, the others follow.

The leader drives the engine: it writes, reads and handles answers. A thread that waits for an
answer becomes the leader if there is none. Otherwise it is a follower, and sleeps until its request
is complete, or until the leader has its own answer and wakes a follower to lead. The producer's own
thread sends heartbeats while no thread leads, and leads from the first asynchronous send on.

`Driver.lock` guards the engine. The leader releases it while it waits for sockets, so that other
threads can submit. The leader calls callbacks without the lock; they may send.

Ctrl-C, or a signal handler that raises, may interrupt a thread at any point. So a thread sets
`_in_step` while it uses the engine. A thread that gets the lock and finds `_in_step` set resets the
engine, and ends the requests that the engine has lost (`Token.in_engine`). No thread waits without
a deadline. The future of a request that is lost before it is queued, for example in an automatic
batch, ends after its deadline."""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol, TypeVar

from rocket_sink.errors import (
    AuthenticationError,
    NotSentError,
    Outcome,
    ProducerClosedError,
    RequestTimeoutError,
    SendError,
    UnknownOutcomeError,
    UnwrittenError,
    WindowFullError,
)
from rocket_sink.message import Message, SendResult
from rocket_sink.net import log
from rocket_sink.net.client import Call
from rocket_sink.producer.engine.attempt import Completion, SendRequest, buffers_of
from rocket_sink.producer.engine.engine import SendEngine
from rocket_sink.producer.engine.limits import is_limited
from rocket_sink.producer.future import SendFuture, end_all
from rocket_sink.producer.hooks import Hooks
from rocket_sink.producer.send_group import (
    GROUP_LEAST,
    GROUP_MOST,
    SendGroup,
    group_key,
    group_request,
)
from rocket_sink.routing.retry import error_for_answer
from rocket_sink.routing.topic_publish_info import TopicPublishInfo
from rocket_sink.wire.headers import Frame
from rocket_sink.wire.properties import decode_properties, split_keys

_LOG: Final = log.logger(__name__)
_T = TypeVar("_T")
_IDLE_S: Final = 1.0
STEP_S: Final = 0.05
"""Longest wait of a thread whose request the engine has not taken yet."""
_HEARTBEATS_S: Final = 0.5
"""Longest wait for answers to heartbeats. Later answers are read with the next heartbeats."""
_CHECKS_PER_INTERVAL: Final = 3
"""Checks per heartbeat interval: a heartbeat is late by at most a third of the interval."""
_GRACE_S: Final = 1.0
"""Time that the engine may need to end a request after its deadline."""
_LOST_S: Final = 5.0
"""A request counts as lost if it has not ended this long after `_last_deadline_s`."""
_FUTURES: Final = 4096
"""If there are more new futures, ended futures are dropped at once, otherwise every `_IDLE_S`."""
SUBMITTED_BYTES: Final = 16 * 1024
"""Bodies of this size or more bypass the submission queue, which does not limit its bytes."""


@dataclass(slots=True, eq=False)
class Waiter:
    """A thread that waits for one completion; also the token (owner) of its request."""

    on_done: Callable[[Completion], None] | None = None
    completion: Completion | None = None
    in_engine: bool | None = None
    asleep: bool = False
    _gate: threading.Lock | None = None

    def done(self) -> bool:
        return self.completion is not None

    def prepare_wait(self) -> None:
        """Prepare for `wait`; called under the driver's lock."""
        self._gate = threading.Lock()
        self._gate.acquire()
        self.asleep = True

    def wait(self, timeout_s: float) -> None:
        """Wait until `wake` or the time-out; called without the lock."""
        assert self._gate is not None
        self._gate.acquire(timeout=timeout_s)

    def wake(self) -> None:
        """End the wait; called under the driver's lock."""
        if self.asleep and self._gate is not None:
            self.asleep = False
            self._gate.release()


class Token(Protocol):
    """The owner of a request; gets the request's completion. `in_engine` is None while the request
    is queued, False while a thread hands it to the engine, True once the engine has it. After an
    interrupt `in_engine` tells which requests may be lost."""

    in_engine: bool | None

    @property
    def on_done(self) -> Callable[[Completion], None] | None:
        """The callback that gets the completion, or None. The leader calls it without the driver's
        lock. If Ctrl-C stops the call, the leader repeats it."""

    def done(self) -> bool: ...


class TimerTask(Protocol):
    """A task that the leader runs when it is due, without the lock. The task may send. `due_s` is
    the time of the next run in monotonic seconds; infinite if no run is due."""

    due_s: float

    def run(self, now_s: float) -> None:
        """Do the work that is due; all work if `now_s` is infinite."""


class SubmissionQueue:
    """Requests of asynchronous sends that the engine has not taken yet. Threads append without a
    lock, and drain the queue under the driver's lock."""

    def __init__(self, engine: SendEngine) -> None:
        self._engine = engine
        self._is_limited = is_limited(engine.options)
        self.requests: deque[SendRequest] = deque()
        self.append = self.requests.append
        self.refused: list[Completion] = []
        """Completions of requests that the engine refused, or lost by an interrupt."""

    def takes(self, request: SendRequest) -> bool:
        """Return whether the request is small, the window has room, and no rate limit is set."""
        engine = self._engine
        return (
            len(request.body) < SUBMITTED_BYTES
            and not self._is_limited
            and engine.window.has_room(len(request.body), len(self.requests))
        )

    def drain(self) -> None:
        """Submit requests until the engine's window is full, in groups where possible."""
        requests, window = self.requests, self._engine.window
        # RPC hooks have to see each request, so there are no groups with hooks.
        grouping = len(requests) >= GROUP_LEAST and not self._engine.client.rpc_hooks
        groups: dict[Hashable, list[SendRequest]] = {}
        count = size = 0
        while requests:
            request = requests[0]
            key = group_key(request) if grouping else None
            if key is not None and not window.has_room(size + len(request.body), count):
                break
            request.token.in_engine = False
            requests.popleft()
            if key is not None:
                groups.setdefault(key, []).append(request)
                count, size = count + 1, size + len(request.body)
            elif not self._submit(request):
                self._put_back(request)
                break
            else:
                request.token.in_engine = True
        for together in groups.values():
            for start in range(0, len(together), GROUP_MOST):
                self._submit_together(together[start : start + GROUP_MOST])

    def _submit_together(self, together: list[SendRequest]) -> None:
        """Submit requests as a group, or singly if they are few. Put requests back into the queue
        if the engine has no room for them."""
        if len(together) >= GROUP_LEAST:
            submitted = len(together) if self._submit(group_request(together)) else 0
        else:
            submitted = sum(1 for _ in itertools.takewhile(self._submit, together))
        for request in together[:submitted]:
            request.token.in_engine = True
        for request in reversed(together[submitted:]):
            self._put_back(request)

    def _put_back(self, request: SendRequest) -> None:
        self.requests.appendleft(request)
        request.token.in_engine = None

    def _submit(self, request: SendRequest) -> bool:
        """Submit a request; return False if the engine has no room."""
        places = self._engine.window.requests
        try:
            return self._engine.try_submit(request)
        except Exception as error:
            if not isinstance(error, SendError) and self._engine.window.requests != places:
                raise  # An interrupt by an Exception: the next step resets the engine.
            # The submitting thread has returned, so only the future can report the error.
            failed = error if isinstance(error, SendError) else UnwrittenError(repr(error))
            self._refuse(request, failed)
            return True

    def close(self) -> None:
        while self.requests:
            error = ProducerClosedError("the producer was closed before it was sent")
            self._refuse(self.requests.popleft(), error)

    def take_back(self, request: SendRequest) -> bool:
        """Remove a request; return whether it was in the queue."""
        with contextlib.suppress(ValueError):
            self.requests.remove(request)
            return True
        return False

    def _refuse(self, request: SendRequest, error: SendError) -> None:
        self._engine.measure_failure(request, error)
        token = request.token
        tokens = token.tokens if type(token) is SendGroup else [token]
        self.refused += [Completion(owner, Outcome.NOT_SENT, None, error) for owner in tokens]


class Driver:
    """Shares an engine between threads; calls the hooks of synchronous sends."""

    def __init__(self, engine: SendEngine, hooks: Hooks) -> None:
        self.engine = engine
        self.lock = threading.Lock()
        self._hooks = hooks
        self._wakeup = engine.client.wakeup
        self._timeout_s = engine.options.send_msg_timeout_ms / 1000
        self._submissions = SubmissionQueue(engine)
        self.tasks: list[TimerTask] = []
        self._leader: int | None = None
        self._leadership = 0
        """Counts new leaders: a former leader resets `_leader` only if no other has led since."""
        self._leading = threading.Lock()
        """Held while a thread leads, whereas `_leader` may name a thread that was interrupted."""
        self._in_step = False
        """Whether a thread uses the engine. If the lock is free, that thread was interrupted."""
        self._followers: dict[Waiter, None] = {}
        self._window_waiters: dict[Waiter, float] = {}
        """Threads that wait for room in the window, in the order of arrival, each with the end of
        its wait (engine's clock)."""
        self.is_started = False
        """Whether `start_thread` was called, even if the system refused the thread."""
        self._thread: threading.Thread | None = None
        self._thread_leads = False
        self._end_of_rest = threading.Event()
        """Set when the producer's thread has more to do than to send heartbeats."""
        self.closing = False
        self._finishing = False
        """Whether the producer's thread has to end as soon as nothing is pending."""
        self._is_abandoned = False
        self._completions: deque[Completion] = deque()
        """Completions that `_take_completions` has not given to their owners yet."""
        self.futures: deque[SendFuture] = deque()
        """Futures of new asynchronous sends; callers append to this without the lock."""
        self._older_futures: list[tuple[float, SendFuture]] = []
        """Futures that have not ended, each with the time when first seen (engine's clock)."""
        self._next_look_s = 0.0
        self._rest_s = engine.options.heartbeat_broker_interval_ms / 1000 / _CHECKS_PER_INTERVAL
        if engine.heartbeats.detects:
            self._rest_s = min(self._rest_s, engine.options.detect_interval_ms / 1000)
        engine.heartbeats.reconnects = True

    # --- sending -----------------------------------------------------------------------------

    def send(self, request: SendRequest, messages: Sequence[Message], mode: str) -> SendResult:
        """Submit a request of one message, and return its result; raises SendError."""
        return result_of(self._sent(request, messages, mode))

    def send_oneway(self, request: SendRequest, messages: Sequence[Message]) -> None:
        """Submit a request that gets no answer; return when the frame is written.

        Raises:
            NotSentError: no route, no connection, a broker too old for the message, no room in the
                window or the rate limits, or no byte written before the time-out.
            RequestTimeoutError: only a part of the frame was written before the time-out.
        """
        request.oneway, request.attempts, request.timeout_s = True, 1, self._timeout_s
        error = self._sent(request, messages, "oneway").error
        if error is not None:
            raise error

    def _sent(self, request: SendRequest, messages: Sequence[Message], mode: str) -> Completion:
        """Submit a request, wait for its end, and call the send hooks before and after."""
        hooks, context = self._hooks, None
        if hooks.hooks:
            context = hooks.before(mode, request.topic, messages, (request.message_id,))
        waiter = Waiter()
        try:
            self.submit(request, waiter)
        except NotSentError as error:
            hooks.ended(context, None, error)
            raise
        completion = self.wait(waiter)
        if context is not None:
            hooks.ended(context, completion.result, completion.error)
        return completion

    def submit(self, request: SendRequest, waiter: Token) -> None:
        """Submit a request; wait for room in the window until the request's time-out. Raises
        WindowFullError or ProducerClosedError."""
        engine, submissions = self.engine, self._submissions
        request.token = waiter
        timeout_s = request.timeout_s or self._timeout_s
        since_s = request.since_s or engine.clock()
        deadline_s = since_s + timeout_s
        window_waiter: Waiter | None = None
        try:
            while True:
                with self.lock:
                    if self.closing:
                        raise ProducerClosedError("the producer is closed")
                    # The leader writes small asynchronous requests together; others go at once.
                    large = len(request.body) >= SUBMITTED_BYTES
                    self._begin_step()
                    self._wakeup.flush_immediately = large or waiter.on_done is None
                    if submissions.requests:
                        submissions.drain()
                    waiter.in_engine = False
                    is_taken = self._is_first(window_waiter) and engine.try_submit(request)
                    waiter.in_engine, self._in_step = is_taken or None, False
                    if is_taken:
                        return
                if engine.clock() >= deadline_s:
                    raise self._no_room(request)
                if window_waiter is None:
                    window_waiter = Waiter()
                    self._window_waiters[window_waiter] = deadline_s
                may_enter = partial(self._may_enter, request, window_waiter)
                self._drive_until(may_enter, window_waiter, STEP_S)
        except NotSentError as error:
            request.since_s = since_s
            engine.measure_failure(request, error)
            raise
        finally:
            if window_waiter is not None:
                self._window_waiters.pop(window_waiter, None)
                with self.lock:
                    self._wake_first_in_line()
                    self._wake_next()

    def submit_nowait(self, request: SendRequest, waiter: Token) -> None:
        """Submit a request of an asynchronous send; wait only if the window is full. Raise
        WindowFullError or ProducerClosedError. The first call starts the producer's thread. If no
        thread can start, as at the process's end, drive the engine until the request has ended."""
        if not self._thread_leads:
            self.start_thread()
            if not self._thread_leads:
                self.submit(request, waiter)
                self._drive_to_end(waiter)
                return
        submissions, wakeup = self._submissions, self._wakeup
        if not submissions.takes(request):
            self.submit(request, waiter)
            return
        request.token, request.since_s = waiter, request.since_s or self.engine.clock()
        submissions.append(request)
        if wakeup.asleep:
            wakeup.asleep = False
            self.engine.client.wake()
        if self.closing or (self._finishing and not self.is_leading):
            with self.lock:
                is_back = submissions.take_back(request)
                if is_back and self.closing:
                    raise ProducerClosedError("the producer is closed")
            if is_back:
                self.submit(request, waiter)
            # Drive here: the thread that took this request may stop when its own request ends.
            self._drive_to_end(waiter)

    def _drive_to_end(self, waiter: Token) -> None:
        until_s = self._last_deadline_s()
        while not waiter.done() and self.engine.clock() < until_s:
            self._drive_until(waiter.done, None, STEP_S)

    def _last_deadline_s(self) -> float:
        """Return when all requests submitted so far should have ended (engine's clock)."""
        return self.engine.clock() + self.engine.longest_s + _GRACE_S

    def submit_again(self, request: SendRequest, waiter: Token) -> None:
        """Submit a message of a refused batch, or a trace, even while the producer closes. Raises
        ProducerClosedError if the engine is closed."""
        with self.lock:
            self._check_open()
            request.token, request.since_s = waiter, self.engine.clock()
            waiter.in_engine = None
            self._submissions.append(request)
        self.engine.client.wake()

    def wait(self, waiter: Waiter) -> Completion:
        """Wait for the completion. If there is none long after the deadline, return UNKNOWN."""
        until_s = self._last_deadline_s() + _LOST_S
        while waiter.completion is None:
            self._drive_until(waiter.done, waiter, _IDLE_S)
            if waiter.completion is None and self.engine.clock() >= until_s:
                return Completion(waiter, Outcome.UNKNOWN, None, _lost(), maybe_duplicate=True)
        return waiter.completion

    # --- other requests ----------------------------------------------------------------------

    def call(self, step: Callable[[], _T | None]) -> _T:
        """Call `step` under the lock until its value is true, and return it. Drive in between."""
        while True:
            with self.lock:
                self._check_open()
                self._begin_step()
                try:
                    value = step()
                except SendError:
                    self._in_step = False
                    raise
                self._in_step = False
                if value:
                    self._wake_next()
                    return value
            self._drive_until(lambda: False, None, 0.01)

    @property
    def is_leading(self) -> bool:
        """Whether the calling thread is the leader. Then the call comes from a callback, the only
        code of the caller that a leader runs."""
        return self._leader == threading.get_ident() and self._leading.locked()

    def publish_info(self, topic: str, *, timeout_s: float | None = None) -> TopicPublishInfo:
        """Return the topic's route. If it is not cached, drive until a name server has answered.
        Raises NoRouteError or NameServerUnavailableError."""
        deadline_s = self.engine.clock() + (timeout_s or self._timeout_s)
        return self.call(lambda: self.engine.known_route(topic, deadline_s))

    def invoke(self, address: str, frame: Frame) -> Frame:
        """Send an administrative request, and return the answer, whatever its code. If the broker
        refuses the credentials, read them again. If they have changed, repeat the request once.
        Raises NotSentError or UnknownOutcomeError if the connection fails."""
        began_s = self.engine.clock()
        answer = self._invoke_once(address, frame)
        if isinstance(error_for_answer(answer.code, answer.remark), AuthenticationError):
            with self.lock:
                again = self.engine.reread_credentials(began_s)
            if again:
                return self._invoke_once(address, frame)
        return answer

    def _invoke_once(self, address: str, frame: Frame) -> Frame:
        waiter, results = Waiter(), list[tuple[Frame | None, SendError | None]]()

        def on_end(answer: Frame | None, error: SendError | None, now_s: float) -> None:
            results.append((answer, error))
            waiter.wake()

        def step() -> float:
            now_s, call = self.engine.clock(), self.engine.client.call
            call(address, frame, Call(on_end), deadline_s=now_s + self._timeout_s, now_s=now_s)
            return now_s

        now_s = self.call(step)
        while not results:
            self._drive_until(lambda: bool(results), waiter, _IDLE_S)
            if not results and self.engine.clock() >= now_s + self._timeout_s + _LOST_S:
                raise _lost()
        answer, error = results[0]
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

    def stay_connected(self) -> None:
        """Stay connected to all brokers, so that they can send transaction checks and replies."""
        heartbeats = self.engine.heartbeats
        if not heartbeats.stays_connected:
            heartbeats.stays_connected = True
            heartbeats.look_now()
        self.start_thread()

    # --- timer tasks, thread, end ------------------------------------------------------------

    def reschedule(self) -> None:
        """Make the leader read the due times again. Run the tasks now if no thread can start."""
        self.start_thread()
        if not self._thread_leads and not self.closing:
            self._run_tasks(math.inf)
            return
        with self.lock:
            if self._wakeup.waiting:
                self.engine.client.wake()

    def start_thread(self, *, leads: bool = True) -> None:
        """Start the producer's thread, if it does not run. With `leads`, it leads from now on.
        Without heartbeats brokers close the connection after 120 s (ClientChannelManager), and
        forget the group. The system may refuse to start a thread, and so does Python while it ends.
        Then the next asynchronous send tries again."""
        self.is_started = True
        if self._thread_leads:
            return
        with self.lock:
            if self.closing or self._finishing:
                return
            if self._thread is None:
                thread = threading.Thread(
                    target=self._run_thread, name="rocket-sink-producer", daemon=True
                )
                # Start under the lock, because `close` cannot join a thread before its start.
                with contextlib.suppress(RuntimeError):
                    thread.start()
                    self._thread = thread
            if leads and self._thread is not None:
                self._thread_leads = True
                self._end_of_rest.set()

    def close(self, timeout_s: float) -> None:
        """Accept no more requests, wait for pending ones at most `timeout_s`, close the engine."""
        if not self.closing:
            self._run_tasks(math.inf)
        with self.lock:
            already, self.closing = self.closing, True
        if already:
            return
        deadline_s = self.engine.clock() + timeout_s
        self._finish_pending(deadline_s)
        self._run_tasks(math.inf)  # send the traces of the last requests
        self._finish_pending(deadline_s)
        with self.lock:
            self._begin_step()
            self.engine.close()
            self._in_step = False
            self.engine.identity.release()
            self._submissions.close()
            done = deque[tuple[Token, Completion]]()
            self._take_completions(done)
            for waiter in self._followers:
                waiter.wake()
        _call_back(done)

    def finish(self) -> None:
        """Send all accepted messages at the end of the process, and log how many were not
        delivered. This takes no longer than the requests' deadlines. Afterwards the producer has no
        thread, so a later asynchronous send blocks until it has ended."""
        thread = self._thread
        if self.closing:
            if thread is not None:  # The thread may be closing the producer (`abandon`).
                thread.join(self.engine.longest_s + _GRACE_S)
            return
        with self.lock:
            self._look_at_futures()
            futures = [future for _, future in self._older_futures]
        try:
            self._run_tasks(math.inf)
            with self.lock:
                self._begin_step()
                self._submissions.drain()
                self._in_step = False
            self._finish_pending(self._last_deadline_s())
            self._run_tasks(math.inf)  # send the traces of the last requests
        finally:
            undone = [
                send_future
                for send_future in futures
                if not send_future.done() or send_future.exception() is not None
            ]
            if undone:
                why = undone[0].exception() if undone[0].done() else "there was no time"
                _LOG.error(
                    "%d messages of asynchronous sends were not delivered before the process "
                    "ended: %s. Close the producer, and look at the futures' results",
                    len(undone), why,
                )  # fmt: skip

    def abandon(self) -> None:
        """Make the producer's thread, if it runs, send all accepted messages, close the producer,
        and end. A thread that only sends heartbeats notices this at its next check. Take no lock
        here: the garbage collector may call this in the thread that has the lock."""
        self._is_abandoned = True
        self.engine.client.wake()

    def _finish_pending(self, deadline_s: float) -> None:
        """Wait, at most until the deadline, for the producer's thread and all pending requests."""
        self._finishing, clock = True, self.engine.clock
        self._end_of_rest.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            self.engine.client.wake()
            thread.join(max(0.0, deadline_s - clock()))
            self._thread, self._thread_leads = None, False
        while self._has_pending() and clock() < deadline_s:
            self._drive_until(lambda: not self._has_pending(), None, STEP_S)

    # --- leading -----------------------------------------------------------------------------

    def _drive_until(
        self, is_over: Callable[[], bool], waiter: Waiter | None, timeout_s: float
    ) -> None:
        """Lead until `is_over()`, at most about `timeout_s`. If another thread leads, follow."""
        me = threading.get_ident()
        with self.lock:
            if is_over():
                return
            nested = self.is_leading
            # A thread that led before, and was interrupted, may still be named as the leader.
            lead = self._leader in (None, me)
            if not lead:
                follower = waiter or Waiter()
                follower.prepare_wait()
                self._followers[follower] = None
            elif not nested:
                self._leader, self._leadership = me, self._leadership + 1
            leadership = self._leadership
        if not lead:
            try:
                follower.wait(min(timeout_s, STEP_S) if waiter is None else timeout_s)
            finally:  # An interrupt may end the wait.
                with self.lock:
                    is_unled = leadership == self._leadership and not self._leading.locked()
                    if follower.asleep and is_unled:
                        self._leader = None  # The leader was interrupted before it reset this.
                    follower.asleep = False
                    self._followers.pop(follower, None)
            return
        if nested:
            self._lead(is_over, timeout_s)
            return
        try:
            with self._leading:
                if leadership != self._leadership:
                    return  # The leader is another thread by now.
                if self.engine.clock() >= self._next_look_s:
                    self._end_lost()
                self._lead(is_over, timeout_s)
        finally:
            with self.lock:
                if leadership == self._leadership:
                    self._leader = None
                self._wake_next()

    def _begin_step(self) -> None:
        """Set `_in_step`; called under the lock. If it is still set, a thread was interrupted:
        reset the engine, and end the requests that the engine has lost."""
        if self._in_step:
            self.engine.reset()
            self._look_at_futures()
            # A completed request keeps its result: `_take_completions` takes the engine's first.
            self._submissions.refused += [
                _interrupted(future)
                for _, future in self._older_futures
                if future.in_engine is not None
            ]
        self._in_step = True

    def _wake_next(self) -> None:
        """If no thread leads, wake a follower. One woken earlier may have ended without leading."""
        if self._leader is None:
            for follower in self._followers:
                if follower.asleep:
                    follower.wake()
                    break

    def _lead(self, is_over: Callable[[], bool], timeout_s: float) -> None:
        engine, wakeup = self.engine, self._wakeup
        until_s = engine.clock() + timeout_s
        done: deque[tuple[Token, Completion]] = deque()
        try:
            while True:
                with self.lock:
                    if self._closed():
                        return
                    self._begin_step()
                    wakeup.asleep = True
                    if self._submissions.requests:
                        self._submissions.drain()
                    next_s = until_s
                    for task in self.tasks:
                        next_s = min(next_s, task.due_s)
                    wait_s = engine.prepare(max(0.0, next_s - engine.clock()))
                    wakeup.waiting = True
                    self._in_step = False
                ready = engine.client.wait(0.0 if engine.has_completions else wait_s)
                wakeup.asleep = False
                with self.lock:
                    wakeup.waiting = False
                    if self._closed():
                        return
                    self._begin_step()
                    engine.process(ready)
                    self._take_completions(done)
                    self._in_step = False
                    stop = is_over() or engine.clock() >= until_s
                    if len(self.futures) > _FUTURES:
                        self._look_at_futures()
                called_back = bool(done)
                if done:
                    _call_back(done)
                if self.tasks:
                    self._run_tasks(engine.clock())
                if stop or (called_back and is_over()):
                    return
        finally:
            if done:  # An interrupt left callbacks uncalled.
                _call_back(done)

    def _take_completions(self, called: deque[tuple[Token, Completion]]) -> None:
        """Give completions to their waiters; append completions with a callback to `called`."""
        completions, refused = self._completions, self._submissions.refused
        completions += self.engine.take()
        if refused:
            completions += refused
            refused.clear()
        while completions:
            completion = completions[0]
            waiter = completion.token
            if waiter is not None and waiter.on_done is not None:
                called.append((waiter, completion))
            if type(waiter) is Waiter:
                waiter.completion = completion
                waiter.wake()
                # Break the reference cycle, which only the garbage collector would free.
                completion.token = None
            completions.popleft()
        if self._window_waiters and self.engine.window.is_roomy:
            self._wake_first_in_line()

    def _look_at_futures(self) -> None:
        """Move new futures to `_older_futures`, and drop ended ones; called under the lock."""
        futures, older, now_s = self.futures, self._older_futures, self.engine.clock()
        for _ in range(len(futures)):
            # Append first: after an interrupt in between, the future is in both lists, not in none.
            older.append((now_s, futures[0]))
            futures.popleft()
        self._older_futures = [entry for entry in older if not entry[1].done()]

    def _end_lost(self) -> None:
        """End futures that are long past their deadlines. An interrupt has lost their requests."""
        now_s, options = self.engine.clock(), self.engine.options
        # Time-out twice: a message may wait for the window, or be sent alone after a refused batch.
        longest_s = 2 * self.engine.longest_s + options.batch_max_delay_ms / 1000 + _LOST_S
        with self.lock:
            self._next_look_s = now_s + _IDLE_S
            self._look_at_futures()
            lost = [
                lost_future
                for since_s, lost_future in self._older_futures
                if now_s >= since_s + longest_s
            ]
        end_all((future, None, _lost()) for future in lost)

    def _run_tasks(self, now_s: float) -> None:
        for task in self.tasks:
            if task.due_s <= now_s:
                try:
                    task.run(now_s)
                except Exception:
                    _LOG.exception("a timer task of the producer failed")

    def _keep_alive(self) -> None:
        """Send due heartbeats and probes, and read the answers. Do nothing if a thread leads."""
        engine = self.engine
        with self.lock:
            if self._leader is not None or engine.pending:
                return
            self._begin_step()
            engine.heartbeats.run(engine.clock())
            self._in_step = False
        self._drive_until(
            lambda: engine.pending > 0 or not engine.client.in_flight, None, _HEARTBEATS_S
        )

    def _run_thread(self) -> None:
        while not self._is_finished():
            if self.closing and (self.engine.broken or not self._thread_leads):
                return
            try:
                if self._end_of_rest.wait(0.0 if self._thread_leads else self._rest_s):
                    self._drive_until(self._is_finished, None, _IDLE_S)
                else:
                    self._keep_alive()
            except BaseException:
                # Go on, because without this thread nothing drives the engine, and no future ends.
                _LOG.exception("the producer's thread goes on after an error")
                time.sleep(STEP_S)
        if self._is_abandoned:
            self.close(self.engine.longest_s + _GRACE_S)

    def _is_finished(self) -> bool:
        """Return whether the producer's thread has to end."""
        return self._is_abandoned or (self._finishing and not self._has_pending())

    def _has_pending(self) -> bool:
        return bool(self.engine.pending or self._submissions.requests)

    def _wake_first_in_line(self) -> None:
        for waiter in list(self._window_waiters)[:1]:
            waiter.wake()

    def _may_enter(self, request: SendRequest, window_waiter: Waiter) -> bool:
        return self._is_first(window_waiter) and self.engine.has_room(request)

    def _is_first(self, window_waiter: Waiter | None) -> bool:
        """Return whether this waiter (None: a new request) is first in line for the window. There
        is a line because else the leader, the first to see free room, would always win."""
        if self._submissions.requests:
            return False
        for other, deadline_s in list(self._window_waiters.items()):
            if other is window_waiter:
                return True
            if self.engine.clock() <= deadline_s:
                return False
            self._window_waiters.pop(other, None)  # remove the entry of an interrupted thread
        return True

    def _closed(self) -> bool:
        # Use a method, because mypy thinks that a second test of the attribute is unreachable.
        return self.engine.closed

    def _check_open(self) -> None:
        if self.engine.closed:
            raise ProducerClosedError("the producer is closed")

    def _no_room(self, request: SendRequest) -> WindowFullError:
        size = buffers_of(request.body)[1]
        keys = split_keys(decode_properties(request.properties))
        named = f" keys {', '.join(keys)}" if keys else ""
        return WindowFullError(
            f"no room in the window before the deadline for {size} bytes to {request.topic!r}"
            f"{named}: {self.engine.pending} requests are in flight (options "
            "backPressureForAsyncSendNum, backPressureForAsyncSendSize, maxMessagesPerSecond, "
            "maxBytesPerSecond)",
            topic=request.topic, keys=keys, size=size, message_id=request.message_id,
        )  # fmt: skip


def _call_back(done: deque[tuple[Token, Completion]]) -> None:
    """Call the callbacks, without the lock. If Ctrl-C interrupts one, raise it after the last."""
    interrupt: KeyboardInterrupt | None = None
    entry = repeated = None
    while done:
        try:
            while done:  # The loop is in `try`: an interrupt may come between two calls, too.
                entry = waiter, completion = done[0]
                assert waiter.on_done is not None
                waiter.on_done(completion)
                done.popleft()
        except KeyboardInterrupt as error:
            interrupt = error
            if entry is repeated and done and done[0] is entry:
                done.popleft()  # The callback has raised twice, so it is not Ctrl-C.
            repeated = entry
        except BaseException:
            _LOG.exception("a callback of a send raised")
            done.popleft()
    if interrupt is not None:
        raise interrupt


def _interrupted(future: SendFuture) -> Completion:
    """Return a completion for a request that was lost when a thread was interrupted."""
    text = "given up: a thread that sent was interrupted"
    error = UnknownOutcomeError(text) if future.in_engine else UnwrittenError(text)
    return Completion(future, error.outcome, None, error, maybe_duplicate=bool(future.in_engine))


def _lost() -> RequestTimeoutError:
    return RequestTimeoutError(
        "the request has not ended, and its deadline is long past: the thread that drove it was "
        "interrupted, or a callback blocks"
    )


def result_of(completion: Completion) -> SendResult:
    """Return the result, or raise the error (SendError)."""
    if completion.result is None:
        assert completion.error is not None
        raise completion.error
    return completion.result
