"""One engine, many threads: leader and followers.

A caller who waits for an answer drives the engine himself if nobody does (the leader); the others
sleep until their request is complete or until the leader has his and names them. So a synchronous
producer has no thread of its own but a sleeping one, which leads for a moment when heartbeats are
due and nobody else does. The first asynchronous send starts one that leads from then on.

The lock guards the engine; it is free while the leader waits for the peers, so that others submit
meanwhile. Callbacks run outside it, on the leading thread, and may send themselves.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from rocket_sink.errors import AuthenticationError, ProducerClosedError, SendError, WindowFullError
from rocket_sink.net import log
from rocket_sink.net.rpc import Call
from rocket_sink.producer.engine import SendEngine
from rocket_sink.producer.inbox import POSTED_BYTES, POSTED_TOGETHER
from rocket_sink.producer.keeper import Keeper
from rocket_sink.producer.leading import STEP_S, Leading, call_back
from rocket_sink.producer.send_future import SendFuture
from rocket_sink.producer.ticket import Ticket
from rocket_sink.producer.values import Completion, SendRequest
from rocket_sink.producer.window import measured
from rocket_sink.routing.verdict import error_for_answer
from rocket_sink.wire.frame import Frame
from rocket_sink.wire.properties import keys_of

_LOG: Final = log.logger(__name__)
_IDLE_S: Final = 1.0
_KEEP_S: Final = 0.5
"""Longest wait for the answers to heartbeats; others are read the next time."""
_LOOKS: Final = 3
"""Per interval of heartbeats: one that has just missed its time is a third late at most."""


class Driver(Leading):
    """Shares an engine between threads."""

    def __init__(self, engine: SendEngine) -> None:
        super().__init__(engine)
        self._thread: threading.Thread | None = None
        self._closing = False
        every_s = engine.options.heartbeat_broker_interval_ms / 1000 / _LOOKS
        if engine.errands.detects:
            every_s = min(every_s, engine.options.detect_interval_ms / 1000)
        self.keeper = Keeper(self._keep_alive, every_s)

    @property
    def lock(self) -> threading.Lock:
        """Guards the engine."""
        return self._lock

    def submit(self, request: SendRequest, ticket: Ticket | SendFuture, deadline_s: float) -> None:
        """Hand a request over; waits for a place in the window until `deadline_s`.

        Raises:
            WindowFullError, ProducerClosedError
        """
        request.token = ticket
        while True:
            with self._lock:
                if self._closing:
                    raise ProducerClosedError("the producer is closed")
                # Small ones with a callback may be written together by the leader.
                large = len(request.body) >= POSTED_BYTES
                self.engine.pump.hurried = large or ticket.on_done is None
                self._inbox.take_in()
                if not self._inbox and self.engine.try_submit(request):
                    return
            if self.engine.clock() >= deadline_s:
                raise self._no_room(request)
            seeker = Ticket()
            self._room_seekers[seeker] = None
            self._drive_until(lambda: self._has_room(request), seeker, STEP_S)
            self._room_seekers.pop(seeker, None)

    def _no_room(self, request: SendRequest) -> WindowFullError:
        size, keys = measured(request.body)[1], keys_of(request.properties)
        named = f" keys {', '.join(keys)}" if keys else ""
        return WindowFullError(
            f"no place in the window before the deadline for {size} bytes to {request.topic!r}"
            f"{named}: {self.engine.pending} requests are in flight (options "
            "backPressureForAsyncSendNum, backPressureForAsyncSendSize, maxMessagesPerSecond, "
            "maxBytesPerSecond)",
            topic=request.topic, keys=keys, size=size, message_id=request.message_id,
        )  # fmt: skip

    def _has_room(self, request: SendRequest) -> bool:
        return not self._inbox and self.engine.has_room(request)

    def post(self, request: SendRequest, ticket: Ticket | SendFuture, deadline_s: float) -> None:
        """As `submit`, for one who does not wait for the end: while there is room he waits for
        nothing, not even the lock. Somebody must lead (`start_thread`).

        Raises:
            WindowFullError, ProducerClosedError
        """
        if not self._inbox.takes(request):
            self.submit(request, ticket, deadline_s)
            return
        request.token, request.since_s = ticket, self.engine.clock()
        self._inbox.append(request)
        if len(self._inbox) >= POSTED_TOGETHER and self._lock.acquire(blocking=False):
            try:
                self._write_posted()
            finally:
                self._lock.release()
        elif self._asleep:
            self._asleep = False
            self.engine.pump.wake()
        if self._closing:
            with self._lock:
                if self._inbox.take_back(request):
                    raise ProducerClosedError("the producer is closed")

    def wait(self, ticket: Ticket) -> Completion:
        """Until the request is complete; it always is some time after its deadline."""
        while ticket.completion is None:
            self._drive_until(lambda: ticket.completion is not None, ticket, _IDLE_S)
        return ticket.completion

    def call(self, step: Callable[[], bool]) -> None:
        """Drive until `step`, called under the lock, says True. For rare, synchronous things."""
        while True:
            with self._lock:
                if step():
                    return
            self._drive_until(lambda: False, None, 0.01)

    def invoke(self, address: str, frame: Frame, timeout_s: float) -> Frame:
        """Send one request that is no send and wait for its answer, whatever its code; once more
        when credentials that have changed meanwhile were refused.

        Raises:
            NotSentError, UnknownOutcomeError: of the connection.
        """
        began_s = self.engine.clock()
        answer = self._invoke_once(address, frame, timeout_s)
        if isinstance(error_for_answer(answer.code, answer.remark), AuthenticationError):
            with self._lock:
                again = self.engine.reread_credentials(began_s)
            if again:
                return self._invoke_once(address, frame, timeout_s)
        return answer

    def _invoke_once(self, address: str, frame: Frame, timeout_s: float) -> Frame:
        ticket, ended = Ticket(), list[tuple[Frame | None, SendError | None]]()

        def on_end(answer: Frame | None, error: SendError | None, now_s: float) -> None:
            ended.append((answer, error))
            ticket.wake()

        with self._lock:
            if self.engine.closed:
                raise ProducerClosedError("the producer is closed")
            now_s = self.engine.clock()
            self.engine.pump.call(
                address, frame, Call(on_end), deadline_s=now_s + timeout_s, now_s=now_s
            )
        while not ended:
            self._drive_until(lambda: bool(ended), ticket, _IDLE_S)
        answer, error = ended[0]
        if answer is None:
            assert error is not None
            raise error
        return answer

    def oneway(self, address: str, frame: Frame) -> None:
        """Send one request that is not answered; it goes with the next round.

        Raises:
            NotSentError: no connection, or the producer is closed.
        """
        with self._lock:
            if self.engine.closed:
                raise ProducerClosedError("the producer is closed")
            pump, now_s = self.engine.pump, self.engine.clock()
            pump.oneway(address, frame, now_s)
            link = pump.peek(address)
            if link is not None:
                pump.flush(link, now_s)

    def start_thread(self) -> None:
        """Lead from a background thread from now on."""
        if self._thread is not None:
            return
        with self._lock:
            if self._thread is not None or self._closing:
                return
            self._thread = threading.Thread(
                target=self._lead_always, name="rocket-sink-producer", daemon=True
            )
            # Under the lock: `close` joins what it finds here.
            self._thread.start()

    def attend(self) -> None:
        """A chore has a new due time: somebody must lead, and look at it before he waits on."""
        self.start_thread()
        with self._lock:
            if self.engine.pump.waiting:
                self.engine.pump.wake()

    def close(self, timeout_s: float) -> None:
        """Take no more requests, give those in flight until the time-out, close the engine."""
        if not self._closing:
            self.chores.flush()
        with self._lock:
            already, self._closing = self._closing, True
        if already:
            return
        self.keeper.stop()
        deadline_s = self.engine.clock() + timeout_s
        own = self._thread is threading.current_thread()
        if self._thread is not None and not own:
            self.engine.pump.wake()
            self._thread.join(timeout_s)
        while self._has_left() and self.engine.clock() < deadline_s:
            self._drive_until(lambda: not self._has_left(), None, STEP_S)
        with self._lock:
            self.engine.close()
            self._inbox.close()
            done = self._settle()
            for ticket in self._sleepers:
                ticket.wake()
        call_back(done)

    def _keep_alive(self) -> bool:
        """Heartbeats and probes that are due, and their answers, when nobody else drives; False:
        never needed again."""
        with self._lock:
            if self._closing or self._thread is not None or self.engine.closed:
                return False
            if self._leader is not None or self.engine.pending:
                return True
            self.engine.errands.run(self.engine.clock())
        pump = self.engine.pump
        self._drive_until(lambda: self.engine.pending > 0 or not pump.in_flight, None, _KEEP_S)
        return True

    def _lead_always(self) -> None:
        while not (self._closing and not self._has_left()):
            if self.engine.broken and self._closing:
                return
            self._drive_until(lambda: self._closing and not self._has_left(), None, _IDLE_S)

    def _has_left(self) -> bool:
        return bool(self.engine.pending or self._inbox)
