"""One engine, many threads: leader and followers.

A caller who waits for an answer drives the engine itself if no thread does (the leader); the others
sleep until their request is complete or until the leader has its own and names one of them. So a
synchronous producer has no thread of its own but a sleeping one, which leads for a moment when
heartbeats are due and no other does. The first asynchronous send starts one that leads from then
on.

The lock guards the engine; it is free while the leader waits for the peers, so that others submit
meanwhile. Callbacks run outside it, on the leading thread, and may send themselves.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from rocket_sink.errors import (
    AuthenticationError,
    NotSentError,
    Outcome,
    ProducerClosedError,
    SendError,
    UnwrittenError,
    WindowFullError,
)
from rocket_sink.message import Message, SendResult
from rocket_sink.net import log
from rocket_sink.net.client import TICK_S, Call
from rocket_sink.producer.engine.attempt import Completion, SendRequest, buffers_of
from rocket_sink.producer.engine.engine import SendEngine
from rocket_sink.producer.future import SendFuture
from rocket_sink.producer.hooks import Hooks
from rocket_sink.routing.retry import error_for_answer
from rocket_sink.routing.topic_publish_info import TopicPublishInfo
from rocket_sink.wire.frame import Frame
from rocket_sink.wire.properties import keys_of

_LOG: Final = log.logger(__name__)
_IDLE_S: Final = 1.0
STEP_S: Final = 0.05
"""Longest sleep of a follower whose request is not in flight."""
_HEARTBEATS_S: Final = 0.5
"""Longest wait for the answers to heartbeats; others are read the next time."""
_LOOKS: Final = 3
"""Per interval of heartbeats: one that has just missed its time is a third late at most."""
SUBMITTED_BYTES: Final = 16 * 1024
"""Larger bodies are handed over under the lock: what waits without it is bounded by number only."""
SUBMITTED_TOGETHER: Final = 32
"""So many that wait without the lock are written by the sender that brought the last of them."""


class Waiter:
    """A thread's wait for one completion; the engine's token."""

    __slots__ = ("_gate", "asleep", "completion", "on_done")

    def __init__(self, on_done: Callable[[Completion], None] | None = None) -> None:
        self.completion: Completion | None = None
        self.on_done = on_done
        self.asleep = False
        self._gate: threading.Lock | None = None

    def prepare_wait(self) -> None:
        """Called under the driver's lock, before `wait`."""
        self._gate = threading.Lock()
        self._gate.acquire()
        self.asleep = True

    def wait(self, timeout_s: float) -> None:
        """Until `wake`, or for so long; called without the lock."""
        assert self._gate is not None
        self._gate.acquire(timeout=timeout_s)

    def wake(self) -> None:
        """Called under the driver's lock."""
        if self.asleep and self._gate is not None:
            self.asleep = False
            self._gate.release()


class TimerTask(Protocol):
    """Something to be done at a time by the thread that leads, outside the lock; it may send."""

    def due_s(self) -> float | None:
        """When it wants to run (monotonic seconds); None: not for now."""

    def run(self, now_s: float) -> None: ...

    def flush(self) -> None:
        """The producer closes: do at once what was put off."""


class SubmissionQueue:
    """Requests that asynchronous senders have handed over and the engine has not taken yet.

    Senders append without a lock, so that they and the thread that leads do not wait for each
    other; it, or the sender whose request makes it many, drains under the driver's lock what has
    come since, and writes it together.
    """

    def __init__(self, engine: SendEngine) -> None:
        self._engine = engine
        self.requests: deque[SendRequest] = deque()
        self.append = self.requests.append
        self.refused: list[Completion] = []
        """Requests that ended here."""

    def takes(self, request: SendRequest) -> bool:
        """There is room for it, and it needs no look at a rate limit or at the bytes in flight."""
        engine = self._engine
        return (
            len(request.body) < SUBMITTED_BYTES
            and not engine.has_rate_limit
            and engine.window.has_room(len(request.body), len(self.requests))
        )

    def drain(self) -> None:
        """Hand over to the engine what its window has room for."""
        requests, engine = self.requests, self._engine
        while requests:
            try:
                if not engine.try_submit(requests[0]):
                    return
            except Exception as error:
                # Its sender has gone on: only its future can tell it.
                failed = error if isinstance(error, SendError) else UnwrittenError(repr(error))
                self._refuse(requests[0], failed)
            requests.popleft()

    def close(self) -> None:
        """Refuse what is left."""
        while self.requests:
            text = "the producer was closed before it was sent"
            self._refuse(self.requests.popleft(), ProducerClosedError(text))

    def take_back(self, request: SendRequest) -> bool:
        """True when the request was still here; it is not any more."""
        for position, waiting in enumerate(self.requests):
            if waiting is request:
                del self.requests[position]
                return True
        return False

    def _refuse(self, request: SendRequest, error: SendError) -> None:
        self.refused.append(Completion(request.token, Outcome.NOT_SENT, None, error))


class HeartbeatThread:
    """Heartbeats and probes of a producer that no caller uses: a daemon thread.

    Between the calls of a synchronous caller a broker hears nothing of it, drops the channel after
    120 s (ClientChannelManager) and forgets the group: nothing is lost, but `producerConnection`
    does not list it any more, and the next send connects anew. Java's client has scheduled tasks
    for it (MQClientInstance.startScheduledTask, LatencyFaultToleranceImpl.startDetector).

    Args:
        look: a bound method, called now and then until it says False; its object is not kept
            alive, and the thread ends with it.
    """

    def __init__(self, look: Callable[[], bool], every_s: float) -> None:
        self._look = weakref.WeakMethod(look)
        self._every_s = every_s
        self._stop = threading.Event()
        self.started = False

    def start(self) -> None:
        """Begin; nothing the second time."""
        if self.started:
            return
        self.started = True
        # no new thread at the end of the interpreter: a last message may still be sent
        with contextlib.suppress(RuntimeError):
            threading.Thread(
                target=_look_now_and_then, args=(self._look, self._stop, self._every_s),
                name="rocket-sink-heartbeat", daemon=True,
            ).start()  # fmt: skip

    def stop(self) -> None:
        self._stop.set()


def _look_now_and_then(
    look: weakref.WeakMethod[Callable[[], bool]], stop: threading.Event, every_s: float
) -> None:
    while not stop.wait(every_s):
        found = look()
        if found is None or not found():
            return
        del found


class Driver:
    """Shares an engine between threads; its hooks hear of each synchronous send."""

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
        self._followers: dict[Waiter, None] = {}
        self._window_waiters: dict[Waiter, None] = {}
        self._thread: threading.Thread | None = None
        self.closing = False
        every_s = engine.options.heartbeat_broker_interval_ms / 1000 / _LOOKS
        if engine.heartbeats.detects:
            every_s = min(every_s, engine.options.detect_interval_ms / 1000)
        self.heartbeats = HeartbeatThread(self._keep_alive, every_s)

    # --- sending -----------------------------------------------------------------------------

    def send(self, request: SendRequest, messages: Sequence[Message], mode: str) -> SendResult:
        """Submit and wait.

        Raises:
            SendError
        """
        hooks, context = self._hooks, None
        if hooks.hooks:
            ids = tuple(request.message_id.split(","))
            context = hooks.before(mode, request.topic, messages, ids)
        waiter = Waiter()
        try:
            self.submit(request, waiter)
        except NotSentError as error:
            hooks.ended(context, None, error)
            raise
        completion = self.wait(waiter)
        if context is not None:
            hooks.ended(context, completion.result, completion.error)
        return result_of(completion)

    def send_oneway(self, request: SendRequest, messages: Sequence[Message]) -> None:
        """Returns when the frame has gone to the kernel.

        Java 5.x loses the message silently when the connection cannot be made; here the caller
        hears of it.

        Raises:
            NotSentError: no route, no connection, a broker that would ignore what the message asks
                for, no room in the rate limits, or no byte taken before the time-out.
        """
        engine = self.engine
        context = self._hooks.before("oneway", request.topic, messages, (request.message_id,))
        try:
            attempt = engine.begin_oneway(request, self._timeout_s)
            self.call(lambda: engine.step_oneway(attempt))
        except NotSentError as error:
            self._hooks.ended(context, None, error)
            raise
        self._hooks.ended(context, None, None)

    def submit(self, request: SendRequest, waiter: Waiter | SendFuture) -> None:
        """Hand a request over; waits for a place in the window until its time is over.

        Raises:
            WindowFullError, ProducerClosedError
        """
        engine, submissions = self.engine, self._submissions
        request.token = waiter
        deadline_s = engine.clock() + (request.timeout_s or self._timeout_s)
        while True:
            with self.lock:
                if self.closing:
                    raise ProducerClosedError("the producer is closed")
                # Small ones with a callback may be written together by the leader.
                large = len(request.body) >= SUBMITTED_BYTES
                self._wakeup.flush_immediately = large or waiter.on_done is None
                if submissions.requests:
                    submissions.drain()
                if not submissions.requests and engine.try_submit(request):
                    return
            if engine.clock() >= deadline_s:
                raise self._no_room(request)
            window_waiter = Waiter()
            self._window_waiters[window_waiter] = None
            self._drive_until(lambda: self._has_room(request), window_waiter, STEP_S)
            self._window_waiters.pop(window_waiter, None)

    def submit_nowait(self, request: SendRequest, waiter: Waiter | SendFuture) -> None:
        """As `submit`, for one who does not wait for the end: while there is room it waits for
        nothing, not even the lock. Starts the thread that leads.

        Raises:
            WindowFullError, ProducerClosedError
        """
        if self._thread is None:
            self.start_thread()
        submissions, wakeup = self._submissions, self._wakeup
        if not submissions.takes(request):
            self.submit(request, waiter)
            return
        request.token, request.since_s = waiter, self.engine.clock()
        submissions.append(request)
        if len(submissions.requests) >= SUBMITTED_TOGETHER and self.lock.acquire(blocking=False):
            try:
                self._write_submissions()
            finally:
                self.lock.release()
        elif wakeup.asleep:
            wakeup.asleep = False
            self.engine.client.wake()
        if self.closing:
            with self.lock:
                if submissions.take_back(request):
                    raise ProducerClosedError("the producer is closed")

    def wait(self, waiter: Waiter) -> Completion:
        """Until the request is complete; it always is some time after its deadline."""
        while waiter.completion is None:
            self._drive_until(lambda: waiter.completion is not None, waiter, _IDLE_S)
        return waiter.completion

    # --- other requests ----------------------------------------------------------------------

    def call(self, step: Callable[[], bool]) -> None:
        """Drive until `step`, called under the lock, says True. For rare, synchronous things."""
        while True:
            with self.lock:
                if step():
                    return
            self._drive_until(lambda: False, None, 0.01)

    def publish_info(self, topic: str) -> TopicPublishInfo:
        """The route.

        Raises:
            NoRouteError, NameServerUnavailableError
        """
        found: list[TopicPublishInfo] = []
        deadline_s = self.engine.clock() + self._timeout_s

        def step() -> bool:
            info = self.engine.known_route(topic, deadline_s)
            if info is not None:
                found.append(info)
            return info is not None

        self.call(step)
        return found[0]

    def invoke(self, address: str, frame: Frame) -> Frame:
        """Send one request that is no send and wait for its answer, whatever its code; once more
        when credentials that have changed meanwhile were refused.

        Raises:
            NotSentError, UnknownOutcomeError: of the connection.
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
        waiter, ended = Waiter(), list[tuple[Frame | None, SendError | None]]()

        def on_end(answer: Frame | None, error: SendError | None, now_s: float) -> None:
            ended.append((answer, error))
            waiter.wake()

        with self.lock:
            self._check_open()
            now_s = self.engine.clock()
            self.engine.client.call(
                address, frame, Call(on_end), deadline_s=now_s + self._timeout_s, now_s=now_s
            )
        while not ended:
            self._drive_until(lambda: bool(ended), waiter, _IDLE_S)
        answer, error = ended[0]
        if answer is None:
            assert error is not None
            raise error
        return answer

    def oneway(self, address: str, frame: Frame) -> None:
        """Send one request that is not answered; what the kernel does not take goes later.

        Raises:
            NotSentError: no connection, or the producer is closed.
        """
        with self.lock:
            self._check_open()
            self.engine.client.oneway(address, frame, self.engine.clock())

    def stay_connected(self) -> None:
        """Brokers may have something to ask or to tell, at any time."""
        heartbeats = self.engine.heartbeats
        if not heartbeats.stays_connected:
            heartbeats.stays_connected = True
            heartbeats.look_now()
        self.start_thread()

    # --- timer tasks, thread, end ------------------------------------------------------------

    def add_task(self, task: TimerTask) -> None:
        self._tasks = (*self._tasks, task)

    def reschedule(self) -> None:
        """A task has a new due time: a thread must lead, and look at it before it waits on."""
        self.start_thread()
        with self.lock:
            if self._wakeup.waiting:
                self.engine.client.wake()

    def start_thread(self) -> None:
        """Lead from a background thread from now on."""
        if self._thread is not None:
            return
        with self.lock:
            if self._thread is not None or self.closing:
                return
            self._thread = threading.Thread(
                target=self._lead_always, name="rocket-sink-producer", daemon=True
            )
            # Under the lock: `close` joins what it finds here.
            self._thread.start()

    def close(self, timeout_s: float) -> None:
        """Take no more requests, give those in flight until the time-out, close the engine."""
        if not self.closing:
            for task in self._tasks:
                task.flush()
        with self.lock:
            already, self.closing = self.closing, True
        if already:
            return
        self.heartbeats.stop()
        deadline_s = self.engine.clock() + timeout_s
        own = self._thread is threading.current_thread()
        if self._thread is not None and not own:
            self.engine.client.wake()
            self._thread.join(timeout_s)
        while self._has_left() and self.engine.clock() < deadline_s:
            self._drive_until(lambda: not self._has_left(), None, STEP_S)
        with self.lock:
            self.engine.close()
            self._submissions.close()
            done = self._take_completions()
            for waiter in self._followers:
                waiter.wake()
        _call_back(done)

    # --- leading -----------------------------------------------------------------------------

    def _drive_until(
        self, over: Callable[[], bool], waiter: Waiter | None, timeout_s: float
    ) -> None:
        """Lead until `over`, or for about `timeout_s`; or sleep while another thread leads."""
        me = threading.get_ident()
        with self.lock:
            if over():
                return
            nested = self._leader == me
            lead = nested or self._leader is None
            if lead:
                self._leader = me
            else:
                follower = waiter or Waiter()
                follower.prepare_wait()
                self._followers[follower] = None
        if not lead:
            follower.wait(min(timeout_s, STEP_S) if waiter is None else timeout_s)
            with self.lock:
                follower.asleep = False
                self._followers.pop(follower, None)
            return
        try:
            self._lead(over, timeout_s)
        finally:
            if not nested:
                with self.lock:
                    self._leader = None
                    for follower in self._followers:
                        if follower.asleep:
                            follower.wake()
                            break

    def _lead(self, over: Callable[[], bool], timeout_s: float) -> None:
        engine, wakeup = self.engine, self._wakeup
        until_s = engine.clock() + timeout_s
        while True:
            with self.lock:
                if self._closed():
                    return
                wakeup.asleep = True
                if self._submissions.requests:
                    self._submissions.drain()
                left_s = until_s - engine.clock()
                wait_s = engine.prepare(self._until_task_s(max(0.0, left_s)))
                wakeup.waiting, wakeup.long = True, wait_s > TICK_S
            ready = engine.client.wait(0.0 if engine.has_completions else wait_s)
            wakeup.asleep = False
            with self.lock:
                wakeup.waiting = False
                if self._closed():
                    return
                engine.process(ready)
                done = self._take_completions()
                stop = over() or engine.clock() >= until_s
            if done:
                _call_back(done)
            if self._tasks:
                self._run_tasks()
            if stop:
                return

    def _write_submissions(self) -> None:
        """Drain and write in a sender's thread, under the lock: the brokers have work while it
        goes on, and no other thread has to be switched to."""
        client, wakeup = self.engine.client, self._wakeup
        waited, wakeup.waiting = wakeup.waiting, False
        self._submissions.drain()
        client.write()
        wakeup.waiting = waited
        if wakeup.asleep and (wakeup.long or self.engine.has_completions):
            wakeup.asleep = False
            client.wake()

    def _take_completions(self) -> list[tuple[Waiter | SendFuture, Completion]]:
        """Note what is complete and wake those who wait for it; those with a callback are
        returned."""
        called = []
        ended = self.engine.take()
        if self._submissions.refused:
            ended += self._submissions.refused
            self._submissions.refused.clear()
        for completion in ended:
            waiter = completion.token
            if waiter.on_done is not None:
                called.append((waiter, completion))
            if type(waiter) is Waiter:
                waiter.completion = completion
                waiter.wake()
        if self._window_waiters and self.engine.window.is_roomy:
            for waiter in list(self._window_waiters):
                waiter.wake()
        return called

    def _until_task_s(self, wait_s: float) -> float:
        """How long a wait may be, at most `wait_s`."""
        for task in self._tasks:
            due_s = task.due_s()
            if due_s is not None:
                wait_s = min(wait_s, max(0.0, due_s - self.engine.clock()))
        return wait_s

    def _run_tasks(self) -> None:
        clock = self.engine.clock
        for task in self._tasks:
            due_s = task.due_s()
            if due_s is not None and due_s <= clock():
                try:
                    task.run(clock())
                except Exception:
                    _LOG.exception("a timer task of the producer failed")

    def _keep_alive(self) -> bool:
        """Heartbeats and probes that are due, and their answers, when no other thread drives;
        False: never needed again."""
        engine = self.engine
        with self.lock:
            if self.closing or self._thread is not None or engine.closed:
                return False
            if self._leader is not None or engine.pending:
                return True
            engine.heartbeats.run(engine.clock())
        self._drive_until(
            lambda: engine.pending > 0 or not engine.client.in_flight, None, _HEARTBEATS_S
        )
        return True

    def _lead_always(self) -> None:
        while not (self.closing and not self._has_left()):
            if self.engine.broken and self.closing:
                return
            self._drive_until(lambda: self.closing and not self._has_left(), None, _IDLE_S)

    def _has_left(self) -> bool:
        return bool(self.engine.pending or self._submissions.requests)

    def _has_room(self, request: SendRequest) -> bool:
        return not self._submissions.requests and self.engine.has_room(request)

    def _closed(self) -> bool:
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


def _call_back(done: list[tuple[Waiter | SendFuture, Completion]]) -> None:
    """Call those who asked for it, outside the lock."""
    for waiter, completion in done:
        assert waiter.on_done is not None
        try:
            waiter.on_done(completion)
        except Exception:
            _LOG.exception("a callback of a send raised")


def result_of(completion: Completion) -> SendResult:
    """
    Raises:
        SendError: the request failed.
    """
    if completion.result is None:
        assert completion.error is not None
        raise completion.error
    return completion.result
