"""The send engine: many requests in flight over all brokers, one retry loop for every mode.

Single-threaded: the caller's thread drives it (`submit`, `poll`, `drain`); only names are looked up
by threads of their own. A request is in exactly one place until it is complete: parked (no route
yet), behind another in its ordered lane, on a connection, or in the heap of delayed attempts; each
place knows its deadline.
"""

from __future__ import annotations

import heapq
import os
import time
from collections.abc import Callable, Iterable
from random import Random
from typing import Any, Final

from rocket_sink.errors import NoRouteError, ProducerClosedError, SendError, UnwrittenError
from rocket_sink.net.link import Link
from rocket_sink.options import SinkOptions
from rocket_sink.producer.attempts import AttemptEnds
from rocket_sink.producer.core import STEP_S
from rocket_sink.producer.credentials import CredentialsProvider
from rocket_sink.producer.errand import Errands
from rocket_sink.producer.flight import Flight
from rocket_sink.producer.inquiry import Inquiries
from rocket_sink.producer.placing import Placing
from rocket_sink.producer.shared import SharedHealth
from rocket_sink.producer.values import Attempt, Completion, SendRequest
from rocket_sink.producer.window import measured
from rocket_sink.routing.fault import Isolation
from rocket_sink.routing.publish import PublishInfo

_TICK_S: Final = 0.01


class SendEngine(Placing, AttemptEnds):
    """Sends requests and completes each exactly once.

    Args:
        options: name servers, limits, time-outs, credentials.
        shared: the executor's health store; None: this engine's own.
        clock: monotonic seconds.
        on_attempt: called after each attempt, in the thread that drives the engine.
        record_attempts: keep each attempt in its Completion.
        credentials: gives the credentials in the options' place; asked again once when refused.
    """

    def __init__(
        self,
        options: SinkOptions,
        *,
        shared: SharedHealth | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_attempt: Callable[[Attempt], None] | None = None,
        record_attempts: bool = True,
        rng: Random | None = None,
        credentials: CredentialsProvider | None = None,
    ) -> None:
        """Raises OptionError; connects to nobody yet."""
        super().__init__(
            options,
            shared=shared,
            clock=clock,
            on_attempt=on_attempt,
            record_attempts=record_attempts,
            rng=rng,
            credentials=credentials,
        )
        self.errands = Errands(self)
        self.inquiries = Inquiries(self)
        self._next_tick_s = 0.0

    def __repr__(self) -> str:
        return f"<SendEngine {self.options.name_server}, {self.pending} pending>"

    # --- the caller's side -------------------------------------------------------------------

    def submit(self, request: SendRequest) -> None:
        """Take a request; blocks (driving the engine) while window or rate limit are full.

        Never raises for what happens to the request: its Completion says so.

        Raises:
            ProducerClosedError: the engine is closed.
        """
        while not self.try_submit(request):
            self._round(STEP_S)

    def try_submit(self, request: SendRequest) -> bool:
        """As `submit`, but False at once when window or rate limit have no place for it."""
        if self._closing:
            raise ProducerClosedError("the producer is closed")
        body, size = measured(request.body)
        now_s, pace = self.clock(), self._pace
        if pace is not None and not pace.allows(request.message_count, size, now_s):
            return False
        if not self.window.take(size):
            return False
        if pace is not None:
            pace.spend(request.message_count, size, now_s)
        ordering, timeout_s = self._bounds.of_request(request)
        since_s = request.since_s or now_s
        flight = Flight(self, request, body, size, ordering, since_s, since_s + timeout_s)
        self._dispatch(flight, now_s)
        return True

    def has_room(self, request: SendRequest) -> bool:
        """Window and rate limit have a place for it now."""
        size = measured(request.body)[1]
        return self._closing or (
            self.window.has_room(size) and self.allows(request.message_count, size, self.clock())
        )

    def allows(self, messages: int, size: int, now_s: float) -> bool:
        """The rate limits let so much pass now."""
        return self._pace is None or self._pace.allows(messages, size, now_s)

    def spend(self, messages: int, size: int, now_s: float) -> None:
        """So much passes; `allows` has said yes."""
        if self._pace is not None:
            self._pace.spend(messages, size, now_s)

    def poll(self, timeout_s: float = 0.0) -> list[Completion]:
        """Drive the engine for at most `timeout_s`; returns as soon as something is complete."""
        until_s = self.clock() + timeout_s
        self._round(0.0 if self._done else min(timeout_s, STEP_S))
        while not self._done and self.pending:
            left_s = until_s - self.clock()
            if left_s <= 0:
                break
            self._round(min(left_s, STEP_S))
        return self.take()

    def drive(self, timeout_s: float = STEP_S) -> None:
        """One round of at most so long; what completes waits for `take` or `poll`."""
        self._round(timeout_s)

    def take(self) -> list[Completion]:
        """What is complete, without driving."""
        done, self._done = self._done, []
        return done

    def drain(self, deadline_s: float | None = None) -> list[Completion]:
        """Drive until nothing is pending, or until `deadline_s` on the engine's clock.

        At the deadline what is left completes too (NOT_SENT or UNKNOWN), so that no request is
        ever without a Completion.
        """
        while self.pending and (deadline_s is None or self.clock() < deadline_s):
            self._round(STEP_S)
        if self.pending:
            self._abandon_pending(UnwrittenError("given up before it was sent: time is over"))
        return self.take()

    @property
    def pending(self) -> int:
        """Requests submitted and not completed yet."""
        return self.window.requests

    @property
    def has_ended(self) -> bool:
        """Something is complete, and waits for `take`."""
        return bool(self._done)

    @property
    def is_paced(self) -> bool:
        """There is a rate limit."""
        return self._pace is not None

    def publish_info(self, topic: str, *, timeout_s: float | None = None) -> PublishInfo:
        """The topic's writable queues; asks the name servers when the route is not cached.

        Raises:
            NoRouteError, NameServerUnavailableError
        """
        until_s = self.clock() + (self._bounds.timeout_s if timeout_s is None else timeout_s)
        while (info := self.known_route(topic, until_s)) is None:
            self._round(STEP_S)
        return info

    def known_route(self, topic: str, until_s: float) -> PublishInfo | None:
        """One step of `publish_info`: the route, or None while it is being asked for."""
        now_s = self.clock()
        info = self.routes.get(topic, now_s)
        if info is not None:
            return info
        error = self.routes.error(topic)
        final = not isinstance(error, NoRouteError) or self.routes.hopeless(topic)
        final = final and not self.routes.fetching(topic)
        if error is not None and (final or now_s >= until_s):
            raise type(error)(error.text, **error.facts)
        if now_s >= until_s:
            raise NoRouteError(f"no route of topic {topic!r} within the time", topic=topic)
        return None

    def isolations(self) -> list[Isolation]:
        """Isolation events since the last call."""
        events = list(self.brokers.events)
        self.brokers.events.clear()
        return events

    @property
    def late_answers(self) -> int:
        """Answers that came after their request was given up."""
        return self.pump.late_answers + sum(k.connection.late_answers for k in self.pump.links)

    @property
    def closed(self) -> bool:
        return self._closing

    @property
    def broken(self) -> bool:
        """True when the engine must not be used again (closed, fatal error, other process)."""
        return self._closing or self._fatal or self.identity.of_pid != os.getpid()

    def close(self, timeout_s: float = 1.0) -> None:
        """Unregister (waiting for the brokers at most so long) and close the connections.

        What is pending completes first: not sent, or unknown. Closing twice is nothing.
        """
        if self._closing:
            return
        if self.identity.of_pid != os.getpid():
            self.abandon()
            return
        self._abandon_pending(ProducerClosedError("the producer was closed before it was sent"))
        self._closing = True
        self.errands.say_goodbye(timeout_s)
        self.pump.close()
        self._shared.close()

    def abandon(self) -> None:
        """In a forked child: let go of the parent's connections without a word to the peers."""
        self._closing = True
        self.pump.abandon()

    # --- driving -----------------------------------------------------------------------------

    def _round(self, timeout_s: float) -> None:
        self.process(self.pump.wait(self.prepare(timeout_s)))

    def prepare(self, timeout_s: float) -> float:
        """Before the wait (under the caller's lock): write; how long the wait may be."""
        wait_s = self.pump.prepare(timeout_s)
        if self._delayed:
            wait_s = min(wait_s, max(0.0, self._delayed[0][0] - self.clock()))
        return wait_s if self._pace is None else self._pace.wait_s(wait_s, self.clock())

    def process(self, ready: Iterable[tuple[Link, int]]) -> None:
        """After the wait (under the caller's lock): read, and do what is due."""
        self.pump.process(ready)
        now_s = self.clock()
        while self._delayed and self._delayed[0][0] <= now_s:
            flight = heapq.heappop(self._delayed)[2]
            if not flight.done:
                self._dispatch(flight, now_s)
        if now_s >= self._next_tick_s:
            self._next_tick_s = now_s + _TICK_S
            self._tick(now_s)

    def _tick(self, now_s: float) -> None:
        self._wall_offset_s = time.time() - now_s
        self.brokers.view(now_s)
        for name in self.brokers.judge(self.errands.connections(), now_s):
            self._move_unsent(name, now_s)
        for topic in list(self._parked):
            self._unpark(topic, now_s)
        for flight in self._lanes.behind(now_s):
            self._failed(flight, UnwrittenError("its turn in the queue did not come"), None, now_s)
        for broker in self.brokers.holding():
            self._let_go(broker, now_s)
        self.inquiries.step(now_s)
        self.errands.run(now_s)
        # The caller may have his answer by now, and drive no more for a while.
        self.pump.write()

    def _inquire(self, flight: Flight, error: SendError, now_s: float) -> None:
        self.inquiries.begin(flight, error, now_s)

    def _abandon_pending(self, error: SendError) -> None:
        """Complete everything now."""
        now_s, self._stopping = self.clock(), True
        waiting: list[Any] = [item[2] for item in self._delayed]
        waiting += [flight for flights in self._parked.values() for flight in flights]
        waiting += self._lanes.behind()
        for broker in self.brokers.holding():
            waiting += broker.held
            broker.held.clear()
        self._delayed.clear()
        self._parked.clear()
        self.inquiries.abandon(now_s)
        for flight in waiting:
            if not flight.done:
                self._failed(flight, type(error)(error.text), None, now_s)
        for link in self.pump.links:
            if link.connection.in_flight:
                self.pump.fail(link, type(error)(error.text), now_s)
        self._stopping = False
