"""Leader and followers: one of the threads that wait drives the engine for all of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from rocket_sink.net import log
from rocket_sink.net.pump import TICK_S
from rocket_sink.producer.chores import Chores
from rocket_sink.producer.engine import SendEngine
from rocket_sink.producer.inbox import Inbox
from rocket_sink.producer.send_future import SendFuture
from rocket_sink.producer.ticket import Ticket
from rocket_sink.producer.values import Completion

_LOG: Final = log.logger(__name__)
STEP_S: Final = 0.05
"""Longest sleep of a follower whose request is not in flight."""


class Leading:
    """An engine, its lock, who drives it, and who sleeps meanwhile."""

    def __init__(self, engine: SendEngine) -> None:
        self.engine = engine
        self.chores = Chores()
        self._lock = threading.Lock()
        self._leader: int | None = None
        self._sleepers: dict[Ticket, None] = {}
        self._room_seekers: dict[Ticket, None] = {}
        self._inbox = Inbox(engine)
        self._asleep = False
        """The leader has looked into the inbox, or is about to, and waits then."""
        self._waits_long = False
        """He waits longer than is good while something is in flight."""

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
            sleeper.sleep(min(timeout_s, STEP_S) if ticket is None else timeout_s)
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
                self._asleep = True
                self._inbox.take_in()
                left_s = until_s - engine.clock()
                wait_s = engine.prepare(self.chores.wait_s(max(0.0, left_s), engine.clock))
                engine.pump.waiting = True
                self._waits_long = wait_s > TICK_S
            ready = engine.pump.wait(0.0 if engine.has_ended else wait_s)
            self._asleep = False
            with self._lock:
                engine.pump.waiting = False
                if self._closed():
                    return
                engine.process(ready)
                done = self._settle()
                stop = over() or engine.clock() >= until_s
            call_back(done)
            self.chores.run(engine.clock)
            if stop:
                return

    def _write_posted(self) -> None:
        """Take in and write in a sender's thread, under the lock: the brokers have work while he
        goes on, and nobody had to switch threads for it."""
        pump = self.engine.pump
        waited, pump.waiting = pump.waiting, False
        self._inbox.take_in()
        pump.write()
        pump.waiting = waited
        if self._asleep and (self._waits_long or self.engine.has_ended):
            self._asleep = False
            pump.wake()

    def _closed(self) -> bool:
        return self.engine.closed

    def _settle(self) -> list[tuple[Ticket | SendFuture, Completion]]:
        """Note what is complete and wake who sleeps for it; those with a callback are returned."""
        called = []
        ended = self.engine.take()
        if self._inbox.refused:
            ended += self._inbox.refused
            self._inbox.refused.clear()
        for completion in ended:
            ticket = completion.token
            if ticket.on_done is not None:
                called.append((ticket, completion))
            if type(ticket) is Ticket:
                ticket.completion = completion
                ticket.wake()
        if self._room_seekers and self.engine.window.is_roomy:
            for seeker in self._room_seekers:
                seeker.wake()
        return called

    def _name_successor(self) -> None:
        for ticket in self._sleepers:
            if ticket.asleep:
                ticket.wake()
                return


def call_back(done: list[tuple[Ticket | SendFuture, Completion]]) -> None:
    """Call those who asked for it, outside the lock."""
    for ticket, completion in done:
        assert ticket.on_done is not None
        try:
            ticket.on_done(completion)
        except Exception:
            _LOG.exception("a callback of a send raised")
