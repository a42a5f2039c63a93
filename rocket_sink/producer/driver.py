"""Sharing one engine between threads: leader and followers.

A thread that waits for an answer leads, that is, drives the engine, if no other thread leads. Other
threads follow: each sleeps until its request is complete, or until the leader has its own answer
and wakes a follower to lead. The producer's own thread sends heartbeats while no caller drives;
from the first asynchronous send on, this thread leads.

The lock guards the engine. It is released while the leader waits for sockets, so that other threads
can submit. Callbacks run on the leading thread without the lock, and may send.

An exception (Ctrl-C, or a signal handler that raises) may come between any two steps of a thread.
So each thread sets a mark while it uses the engine. If the next thread sees a mark, the marking
thread was interrupted: the next thread resets the engine, and ends the requests that the engine has
lost (`Token.in_engine`). No thread waits without a deadline. A future whose request was lost before
it was queued, for example in an automatic batch, ends after its deadline.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Final, Protocol

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
from rocket_sink.wire.frame import Frame
from rocket_sink.wire.properties import keys_of

_LOG: Final = log.logger(__name__)
_IDLE_S: Final = 1.0
STEP_S: Final = 0.05
"""Longest wait of a thread whose request the engine has not taken yet."""
_HEARTBEATS_S: Final = 0.5
"""Longest wait for the answers to heartbeats; later answers are read the next time."""
_CHECKS_PER_INTERVAL: Final = 3
"""Checks for due heartbeats per interval, so a heartbeat is late by at most a third of it."""
_GRACE_S: Final = 1.0
"""Longest time from the deadline of a request to its end."""
_LOST_S: Final = 5.0
"""Time after the latest regular end of a request at which the request counts as lost."""
_FUTURES: Final = 4096
"""Number of futures above which ended ones are dropped at once, instead of every `_IDLE_S`."""
SUBMITTED_BYTES: Final = 16 * 1024
"""Larger bodies bypass the submission queue, which limits the number, not the size."""


class Waiter:
    """A thread that waits for one completion; also the token (owner) of its request."""

    __slots__ = ("_gate", "asleep", "completion", "in_engine", "on_done")

    def __init__(self, on_done: Callable[[Completion], None] | None = None) -> None:
        self.completion: Completion | None = None
        self.in_engine: bool | None = None
        self.on_done = on_done
        self.asleep = False
        self._gate: threading.Lock | None = None

    def done(self) -> bool:
        return self.completion is not None

    def prepare_wait(self) -> None:
        """Prepare for `wait`, under the driver's lock."""
        self._gate = threading.Lock()
        self._gate.acquire()
        self.asleep = True

    def wait(self, timeout_s: float) -> None:
        """Wait until `wake` or the time-out; called without the lock."""
        assert self._gate is not None
        self._gate.acquire(timeout=timeout_s)

    def wake(self) -> None:
        """End the wait, under the driver's lock."""
        if self.asleep and self._gate is not None:
            self.asleep = False
            self._gate.release()


class Token(Protocol):
    """The owner of a request, who gets its completion.

    Attributes:
        in_engine: None while the request is queued, False while a thread hands it to the engine,
            True once the engine has it. So an interrupt between two steps cannot hide the request.
    """

    in_engine: bool | None

    @property
    def on_done(self) -> Callable[[Completion], None] | None:
        """The callback that takes the completion, or None. The leading thread calls it without the
        driver's lock, and once more if an interrupt (Ctrl-C) stopped the call."""

    def done(self) -> bool:
        """Return whether the request has ended."""


class TimerTask(Protocol):
    """A task that the leader runs when it is due, without the lock. The task may send."""

    def due_s(self) -> float | None:
        """Return the time of the next run (monotonic seconds); None if not scheduled."""

    def run(self, now_s: float) -> None: ...

    def flush(self) -> None:
        """Run now, because the producer closes."""


class SubmissionQueue:
    """Requests of asynchronous sends that the engine has not taken yet.

    Threads append without a lock. The leader drains the queue under the driver's lock.
    """

    def __init__(self, engine: SendEngine) -> None:
        self._engine = engine
        self.requests: deque[SendRequest] = deque()
        self.append = self.requests.append
        self.refused: list[Completion] = []
        """Completions of requests that the engine did not take, or has lost in an interrupt."""

    def takes(self, request: SendRequest) -> bool:
        """Return whether the request may be queued: it is small, the window has room, and there is
        no rate limit."""
        engine = self._engine
        return (
            len(request.body) < SUBMITTED_BYTES
            and not engine.has_rate_limit
            and engine.window.has_room(len(request.body), len(self.requests))
        )

    def drain(self) -> None:
        """Submit as many requests to the engine as its window has room for, in groups where
        possible."""
        requests, window = self.requests, self._engine.window
        # RPC hooks see each request by itself, so they exclude groups.
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
        """Submit requests as a group or in order; put requests without room back into the queue."""
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
        """Submit a request; return whether the engine had room."""
        try:
            return self._engine.try_submit(request)
        except Exception as error:
            # Give the error to the future, because the submitting thread has returned.
            failed = error if isinstance(error, SendError) else UnwrittenError(repr(error))
            self._refuse(request, failed)
            return True

    def close(self) -> None:
        """Fail the remaining requests."""
        while self.requests:
            text = "the producer was closed before it was sent"
            self._refuse(self.requests.popleft(), ProducerClosedError(text))

    def take_back(self, request: SendRequest) -> bool:
        """Remove a request; return whether it was in the queue."""
        # Copy the queue, because other threads append meanwhile.
        for position, waiting in enumerate(list(self.requests)):
            if waiting is request:
                del self.requests[position]
                return True
        return False

    def _refuse(self, request: SendRequest, error: SendError) -> None:
        tokens: Sequence[Token] = (request.token,)
        if type(request.token) is SendGroup:
            tokens = request.token.tokens
        self.refused += [Completion(token, Outcome.NOT_SENT, None, error) for token in tokens]


class Driver:
    """Shares an engine between threads; calls the hooks of synchronous sends."""

    def __init__(self, engine: SendEngine, hooks: Hooks) -> None:
        self.engine = engine
        self.lock = threading.Lock()
        """Guards the engine."""
        self._hooks = hooks
        self._wakeup = engine.client.wakeup
        self._timeout_s = engine.options.send_msg_timeout_ms / 1000
        self._submissions = SubmissionQueue(engine)
        self._tasks: tuple[TimerTask, ...] = ()
        self._leader: int | None = None
        self._leadership = 0
        """Number of the latest leadership; a thread ends only its own leadership."""
        self._leading = threading.Lock()
        """Held while a thread leads. `_leader` may still name an interrupted thread."""
        self._in_step = False
        """Mark of a thread that uses the engine; if set while the lock is free, that thread was
        interrupted."""
        self._followers: dict[Waiter, None] = {}
        self._window_waiters: dict[Waiter, float] = {}
        """Threads that wait for room in the window, in the order of arrival, each with the end of
        its wait (engine's clock)."""
        self.is_started = False
        """Whether the producer's thread was started, or the system refused to start one."""
        self._thread: threading.Thread | None = None
        self._thread_leads = False
        self._end_of_rest = threading.Event()
        """Wakes the producer's thread for work other than heartbeats."""
        self.closing = False
        self._finishing = False
        """Whether the producer's thread ends as soon as nothing is pending."""
        self._is_abandoned = False
        self._completions: deque[Completion] = deque()
        """Completions that `_take_completions` has not given to their owners yet."""
        self.futures: deque[SendFuture] = deque()
        """Futures of new asynchronous sends; callers append to this without the lock."""
        self._older_futures: list[tuple[float, SendFuture]] = []
        """Futures that have not ended, each with the time at which the driver first saw it
        (engine's clock)."""
        self._next_look_s = 0.0
        self._rest_s = engine.options.heartbeat_broker_interval_ms / 1000 / _CHECKS_PER_INTERVAL
        if engine.heartbeats.detects:
            self._rest_s = min(self._rest_s, engine.options.detect_interval_ms / 1000)
        engine.heartbeats.reconnects = True

    # --- sending -----------------------------------------------------------------------------

    def send(self, request: SendRequest, messages: Sequence[Message], mode: str) -> SendResult:
        """Submit a request of one message, and wait for its result.

        Raises:
            SendError
        """
        return result_of(self._sent(request, messages, mode))

    def send_oneway(self, request: SendRequest, messages: Sequence[Message]) -> None:
        """Submit a request without an answer; return when the frame is written.

        Java 5.x loses the message silently when it cannot connect; here an error is raised.

        Raises:
            NotSentError: no route, no connection, a broker too old for the message, no room in the
                window or the rate limits, or no byte written before the time-out.
            RequestTimeoutError: a part of the frame was written before the time-out.
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
        """Submit a request; wait for room in the window until the request's time-out.

        Raises:
            WindowFullError, ProducerClosedError
        """
        engine, submissions = self.engine, self._submissions
        request.token = waiter
        timeout_s = request.timeout_s or self._timeout_s
        deadline_s = (request.since_s or engine.clock()) + timeout_s
        window_waiter: Waiter | None = None
        try:
            while True:
                with self.lock:
                    if self.closing:
                        raise ProducerClosedError("the producer is closed")
                    # Write large and synchronous requests at once; the leader writes small
                    # asynchronous ones together.
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
        finally:
            if window_waiter is not None:
                self._window_waiters.pop(window_waiter, None)
                with self.lock:
                    self._wake_first_in_line()
                    self._wake_next()

    def submit_nowait(self, request: SendRequest, waiter: Token) -> None:
        """Submit a request of an asynchronous send, without the lock while the window has room.

        The first call starts the producer's thread. If the system starts no thread, because the
        process ends, drive until the request has ended.

        Raises:
            WindowFullError, ProducerClosedError
        """
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
            # Drive here: the thread that drained the request may stop when its own request ends.
            self._drive_to_end(waiter)

    def _drive_to_end(self, waiter: Token) -> None:
        """Drive until a request has ended, or is long past its deadline."""
        until_s = self._last_deadline_s()
        while not waiter.done() and self.engine.clock() < until_s:
            self._drive_until(waiter.done, None, STEP_S)

    def _last_deadline_s(self) -> float:
        """Return the latest deadline of the engine's present requests (engine's clock)."""
        return self.engine.clock() + self.engine.longest_s + _GRACE_S

    def submit_again(self, request: SendRequest, waiter: Token) -> None:
        """Submit a message of a refused batch, or a trace; allowed while the producer closes.

        Raises:
            ProducerClosedError: the producer is closed.
        """
        with self.lock:
            self._check_open()
            request.token, request.since_s = waiter, self.engine.clock()
            waiter.in_engine = None
            self._submissions.append(request)
        self.engine.client.wake()

    def wait(self, waiter: Waiter) -> Completion:
        """Wait until the request is complete, at the latest soon after its deadline."""
        until_s = self._last_deadline_s() + _LOST_S
        while waiter.completion is None:
            self._drive_until(waiter.done, waiter, _IDLE_S)
            if waiter.completion is None and self.engine.clock() >= until_s:
                return Completion(waiter, Outcome.UNKNOWN, None, _lost(), maybe_duplicate=True)
        return waiter.completion

    # --- other requests ----------------------------------------------------------------------

    def call(self, step: Callable[[], bool]) -> None:
        """Drive until `step` returns True. Each round calls `step` under the lock."""
        while True:
            with self.lock:
                self._check_open()
                self._begin_step()
                try:
                    is_over = step()
                except SendError:
                    self._in_step = False
                    raise
                self._in_step = False
                if is_over:
                    self._wake_next()
                    return
            self._drive_until(lambda: False, None, 0.01)

    @property
    def is_leading(self) -> bool:
        """Whether the calling thread drives the engine; then the call comes from a callback."""
        return self._leader == threading.get_ident() and self._leading.locked()

    def publish_info(self, topic: str, *, timeout_s: float | None = None) -> TopicPublishInfo:
        """Return the topic's route; drive while the name servers are asked.

        Raises:
            NoRouteError, NameServerUnavailableError
        """
        routes: list[TopicPublishInfo] = []
        deadline_s = self.engine.clock() + (timeout_s or self._timeout_s)

        def step() -> bool:
            info = self.engine.known_route(topic, deadline_s)
            if info is not None:
                routes.append(info)
            return info is not None

        self.call(step)
        return routes[0]

    def invoke(self, address: str, frame: Frame) -> Frame:
        """Send an administrative request, and return the answer, whatever its code. If the broker
        refuses the credentials and they have changed since, repeat the request once.

        Raises:
            NotSentError, UnknownOutcomeError: the connection failed.
        """
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

        with self.lock:
            self._check_open()
            self._begin_step()
            now_s = self.engine.clock()
            self.engine.client.call(
                address, frame, Call(on_end), deadline_s=now_s + self._timeout_s, now_s=now_s
            )
            self._in_step = False
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

        Raises:
            NotSentError: no connection, or the producer is closed.
        """
        with self.lock:
            self._check_open()
            self._begin_step()
            try:
                self.engine.client.oneway(address, frame, self.engine.clock())
            except SendError:
                self._in_step = False
                raise
            self._in_step = False

    def stay_connected(self) -> None:
        """Keep connections to all brokers, which send transaction checks and replies on them."""
        heartbeats = self.engine.heartbeats
        if not heartbeats.stays_connected:
            heartbeats.stays_connected = True
            heartbeats.look_now()
        self.start_thread()

    # --- timer tasks, thread, end ------------------------------------------------------------

    def add_task(self, task: TimerTask) -> None:
        self._tasks = (*self._tasks, task)

    def reschedule(self) -> None:
        """Make the leader read the tasks' due times again; run the tasks now if no thread leads."""
        self.start_thread()
        if not self._thread_leads and not self.closing:
            self._run_tasks(float("inf"))
            return
        with self.lock:
            if self._wakeup.waiting:
                self.engine.client.wake()

    def start_thread(self, *, leads: bool = True) -> None:
        """Start the producer's thread, or let it lead from now on.

        Brokers close a connection without heartbeats after 120 s (ClientChannelManager), and forget
        the group. Java's client sends heartbeats and probes in scheduled tasks
        (MQClientInstance.startScheduledTask, LatencyFaultToleranceImpl.startDetector).

        The system may refuse a thread, and Python starts none while it ends. Then the next
        asynchronous send tries again.
        """
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
        """Accept no more requests, wait for pending ones until the time-out, close the engine."""
        if not self.closing:
            for task in self._tasks:
                task.flush()
        with self.lock:
            already, self.closing = self.closing, True
        if already:
            return
        deadline_s = self.engine.clock() + timeout_s
        self._finish_pending(deadline_s)
        for task in self._tasks:
            task.flush()  # send the traces of the last requests
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
        delivered. This takes no longer than the requests' deadlines. Afterwards no thread runs in
        the background, so a later asynchronous send blocks its thread until the send has ended."""
        thread = self._thread
        if self.closing:
            if thread is not None:  # The thread may be closing the producer.
                thread.join(self.engine.longest_s + _GRACE_S)
            return
        with self.lock:
            self._look_at_futures()
            futures = [future for _, future in self._older_futures]
        try:
            self._run_tasks(float("inf"))
            with self.lock:
                self._begin_step()
                self._submissions.drain()
                self._in_step = False
            self._finish_pending(self._last_deadline_s())
            self._run_tasks(float("inf"))  # send the traces of the last requests
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
        """Let the producer's thread, if it runs, send all accepted messages, close the producer,
        and end. A thread that only sends heartbeats notices at the next heartbeat. The garbage
        collector calls this, perhaps in a thread that has the lock."""
        self._is_abandoned = True
        self.engine.client.wake()

    def _finish_pending(self, deadline_s: float) -> None:
        """Wait until nothing is pending, and the producer's thread has ended."""
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
        """Lead until `is_over()`, for about `timeout_s` at most; follow if another thread leads."""
        me = threading.get_ident()
        with self.lock:
            if is_over():
                return
            nested = self.is_leading
            if self._leader == me and not nested:
                self._leader = None  # The thread led before, and was interrupted.
            lead = nested or self._leader is None
            if lead and not nested:
                self._leader, self._leadership = me, self._leadership + 1
            elif not lead:
                follower = waiter or Waiter()
                follower.prepare_wait()
                self._followers[follower] = None
            leadership = self._leadership
        if not lead:
            try:
                follower.wait(min(timeout_s, STEP_S) if waiter is None else timeout_s)
            finally:  # An interrupt may end the wait.
                with self.lock:
                    is_unled = leadership == self._leadership and not self._leading.locked()
                    if follower.asleep and is_unled:
                        self._leader = None  # The leader was interrupted before it set this.
                    follower.asleep = False
                    self._followers.pop(follower, None)
            return
        if nested:
            self._lead(is_over, timeout_s)
            return
        try:
            with self._leading:
                if leadership != self._leadership:
                    return  # The leadership has passed to another thread in the meantime.
                if self.engine.clock() >= self._next_look_s:
                    self._end_lost()
                self._lead(is_over, timeout_s)
        finally:
            with self.lock:
                if leadership == self._leadership:
                    self._leader = None
                self._wake_next()

    def _begin_step(self) -> None:
        """Mark the engine as in use, under the lock. If a mark is left, its thread was interrupted:
        reset the engine, and end the requests that the engine has lost."""
        if self._in_step:
            self.engine.reset()
            self._look_at_futures()
            # `_take_completions` takes the engine's completions first, so a request that the engine
            # still knows keeps its own result.
            self._submissions.refused += [
                _interrupted(future)
                for _, future in self._older_futures
                if future.in_engine is not None
            ]
        self._in_step = True

    def _wake_next(self) -> None:
        """Wake a follower if no thread leads: the last woken follower may have ended instead."""
        if self._leader is None:
            for follower in self._followers:
                if follower.asleep:
                    follower.wake()
                    break

    def _lead(self, is_over: Callable[[], bool], timeout_s: float) -> None:
        done: deque[tuple[Token, Completion]] = deque()
        try:
            self._take_steps(is_over, timeout_s, done)
        finally:
            if done:  # An interrupt left callbacks uncalled.
                _call_back(done)

    def _take_steps(
        self, is_over: Callable[[], bool], timeout_s: float, done: deque[tuple[Token, Completion]]
    ) -> None:
        engine, wakeup = self.engine, self._wakeup
        until_s = engine.clock() + timeout_s
        while True:
            with self.lock:
                if self._closed():
                    return
                self._begin_step()
                wakeup.asleep = True
                if self._submissions.requests:
                    self._submissions.drain()
                left_s = until_s - engine.clock()
                wait_s = engine.prepare(self._until_task_s(max(0.0, left_s)))
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
            if self._tasks:
                self._run_tasks(engine.clock())
            if stop or (called_back and is_over()):
                return

    def _take_completions(self, called: deque[tuple[Token, Completion]]) -> None:
        """Take completions, and wake their waiters; append those with a callback to `called`."""
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
        """Collect new futures, and drop those that have ended; called with the lock."""
        futures, older, now_s = self.futures, self._older_futures, self.engine.clock()
        for _ in range(len(futures)):
            # Append first: after an interrupt between the two steps a future is in both lists.
            older.append((now_s, futures[0]))
            futures.popleft()
        self._older_futures = [entry for entry in older if not entry[1].done()]

    def _end_lost(self) -> None:
        """End futures whose deadlines are long past: an interrupt has lost their requests."""
        now_s, options = self.engine.clock(), self.engine.options
        # Allow the time-out twice: a request may first wait for the window, or be in a batch and
        # then be sent alone.
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

    def _until_task_s(self, wait_s: float) -> float:
        """Return the time until the next timer task, at most `wait_s`."""
        for task in self._tasks:
            due_s = task.due_s()
            if due_s is not None:
                wait_s = min(wait_s, max(0.0, due_s - self.engine.clock()))
        return wait_s

    def _run_tasks(self, now_s: float) -> None:
        """Run the tasks that are due."""
        for task in self._tasks:
            due_s = task.due_s()
            if due_s is not None and due_s <= now_s:
                try:
                    task.run(now_s)
                except Exception:
                    _LOG.exception("a timer task of the producer failed")

    def _keep_alive(self) -> None:
        """Send due heartbeats and probes and read their answers, unless another thread drives."""
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
        """Return whether this thread (None: a new request) is the first in line for the window.

        Without the line the leading thread would take every free place: it sees places first.
        """
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
        size, keys = buffers_of(request.body)[1], keys_of(request.properties)
        named = f" keys {', '.join(keys)}" if keys else ""
        return WindowFullError(
            f"no place in the window before the deadline for {size} bytes to {request.topic!r}"
            f"{named}: {self.engine.pending} requests are in flight (options "
            "backPressureForAsyncSendNum, backPressureForAsyncSendSize, maxMessagesPerSecond, "
            "maxBytesPerSecond)",
            topic=request.topic, keys=keys, size=size, message_id=request.message_id,
        )  # fmt: skip


def _call_back(done: deque[tuple[Token, Completion]]) -> None:
    """Call the callbacks, without the lock. Raise an interrupt (Ctrl-C) after all of them."""
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
                done.popleft()  # The callback has raised this twice, so it is not Ctrl-C.
            repeated = entry
        except BaseException:
            _LOG.exception("a callback of a send raised")
            done.popleft()
    if interrupt is not None:
        raise interrupt


def _interrupted(future: SendFuture) -> Completion:
    """Return the completion of a request that the engine has lost in an interrupt."""
    text = "given up: a thread that sent was interrupted"
    error = UnknownOutcomeError(text) if future.in_engine else UnwrittenError(text)
    return Completion(future, error.outcome, None, error, maybe_duplicate=bool(future.in_engine))


def _lost() -> RequestTimeoutError:
    return RequestTimeoutError(
        "the request has not ended long after its deadline: the thread that drove it was "
        "interrupted, or a callback blocks"
    )


def result_of(completion: Completion) -> SendResult:
    """Return the result, or raise the error (SendError)."""
    if completion.result is None:
        assert completion.error is not None
        raise completion.error
    return completion.result
