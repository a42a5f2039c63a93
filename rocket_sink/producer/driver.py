"""One engine, many threads: leader and followers.

A caller who waits for an answer drives the engine himself if nobody does (the leader); the others
sleep until their request is complete or until the leader has his and names them. So a synchronous
producer has no thread of its own but a sleeping one, which leads for a moment when heartbeats are
due and nobody else does. The first asynchronous send starts one that leads from then on.

The lock guards the engine; it is free while the leader waits for the peers, so that others submit
meanwhile. Callbacks run outside it, on the leading thread, and may send themselves.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final

from rocket_sink.errors import ProducerClosedError, SendError, WindowFullError
from rocket_sink.net.rpc import Call
from rocket_sink.producer.chores import Chores
from rocket_sink.producer.engine import SendEngine
from rocket_sink.producer.keeper import Keeper
from rocket_sink.producer.ticket import Ticket
from rocket_sink.producer.values import Completion, SendRequest
from rocket_sink.wire.frame import Frame

_LOG: Final = logging.getLogger(__name__)
_STEP_S: Final = 0.05
_IDLE_S: Final = 1.0
_KEEP_S: Final = 0.5
"""Longest wait for the answers to heartbeats; others are read the next time."""


class Driver:
    """Shares an engine between threads."""

    def __init__(self, engine: SendEngine) -> None:
        self.engine = engine
        self._lock = threading.Lock()
        self._leader: int | None = None
        self.chores = Chores()
        self._sleepers: dict[Ticket, None] = {}
        self._thread: threading.Thread | None = None
        self._closing = False
        interval_s = engine.options.heartbeat_broker_interval_ms / 1000
        self.keeper = Keeper(self._keep_alive, interval_s)

    @property
    def lock(self) -> threading.Lock:
        """Guards the engine."""
        return self._lock

    def submit(self, request: SendRequest, ticket: Ticket, deadline_s: float) -> None:
        """Hand a request over; waits for a place in the window until `deadline_s`.

        Raises:
            WindowFullError, ProducerClosedError
        """
        request.token = ticket
        while True:
            with self._lock:
                if self._closing:
                    raise ProducerClosedError("the producer is closed")
                # With a callback more may follow, and be written together by the leader.
                self.engine.pump.hurried = ticket.on_done is None
                if self.engine.try_submit(request):
                    return
            if self.engine.clock() >= deadline_s:
                raise WindowFullError(
                    "no place in the window before the deadline: "
                    f"{self.engine.pending} requests are in flight (options "
                    "backPressureForAsyncSendNum, backPressureForAsyncSendSize, "
                    "maxMessagesPerSecond, maxBytesPerSecond)",
                    topic=request.topic,
                )
            self._drive_until(lambda: self._has_room(request), None, _STEP_S)

    def _has_room(self, request: SendRequest) -> bool:
        return self.engine.has_room(request)

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
        """Send one request that is no send and wait for its answer, whatever its code.

        Raises:
            NotSentError, UnknownOutcomeError: of the connection.
        """
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
        while self.engine.pending and self.engine.clock() < deadline_s:
            self._drive_until(lambda: not self.engine.pending, None, _STEP_S)
        with self._lock:
            self.engine.close()
            done = self._settle()
            for ticket in self._sleepers:
                ticket.wake()
        _call_back(done)

    def _keep_alive(self) -> bool:
        """Heartbeats that are due, when nobody else drives; False: never needed again."""
        with self._lock:
            if self._closing or self._thread is not None or self.engine.broken:
                return False
            if self._leader is not None or self.engine.pending:
                return True
            self.engine.errands.run(self.engine.clock())
        pump = self.engine.pump
        self._drive_until(lambda: self.engine.pending > 0 or not pump.in_flight, None, _KEEP_S)
        return True

    def _lead_always(self) -> None:
        while not (self._closing and not self.engine.pending):
            if self.engine.broken and self._closing:
                return
            self._drive_until(lambda: self._closing and not self.engine.pending, None, _IDLE_S)

    def _drive_until(
        self, over: Callable[[], bool], ticket: Ticket | None, timeout_s: float
    ) -> None:
        """Lead until `over`, or for about `timeout_s`; or sleep while somebody else leads."""
        me = threading.get_ident()
        with self._lock:
            if over():
                return
            nested = self._leader == me
            lead = nested or self._leader is None
            if lead:
                self._leader = me
            else:
                sleeper = ticket or Ticket()
                sleeper.lie_down()
                self._sleepers[sleeper] = None
        if not lead:
            sleeper.sleep(min(timeout_s, _STEP_S) if ticket is None else timeout_s)
            with self._lock:
                sleeper.asleep = False
                self._sleepers.pop(sleeper, None)
            return
        try:
            self._lead(over, timeout_s)
        finally:
            if not nested:
                with self._lock:
                    self._leader = None
                    self._name_successor()

    def _lead(self, over: Callable[[], bool], timeout_s: float) -> None:
        engine = self.engine
        until_s = engine.clock() + timeout_s
        while True:
            with self._lock:
                if self._closed():
                    return
                left_s = until_s - engine.clock()
                wait_s = engine.prepare(self.chores.wait_s(max(0.0, left_s), engine.clock))
                engine.pump.waiting = True
            ready = engine.pump.wait(wait_s)
            with self._lock:
                engine.pump.waiting = False
                if self._closed():
                    return
                engine.process(ready)
                done = self._settle()
                stop = over() or engine.clock() >= until_s
            _call_back(done)
            self.chores.run(engine.clock)
            if stop:
                return

    def _closed(self) -> bool:
        return self.engine.closed

    def _settle(self) -> list[tuple[Ticket, Completion]]:
        """Note what is complete and wake who sleeps for it; those with a callback are returned."""
        called = []
        for completion in self.engine.take():
            ticket = completion.token
            ticket.completion = completion
            if ticket.on_done is not None:
                called.append((ticket, completion))
            ticket.wake()
        return called

    def _name_successor(self) -> None:
        for ticket in self._sleepers:
            if ticket.asleep:
                ticket.wake()
                return


def _call_back(done: list[tuple[Ticket, Completion]]) -> None:
    for ticket, completion in done:
        assert ticket.on_done is not None
        try:
            ticket.on_done(completion)
        except Exception:
            _LOG.exception("a callback of a send raised")
