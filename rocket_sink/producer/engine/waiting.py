"""Attempts that wait before they are sent: until a time at the latest, or for an event before it.

An event is a topic whose look-up ends, a question to a broker that ends, or room at a broker. Who
causes an event adds it to `events`. A change of the brokers' ranks wakes all attempts that wait for
a certain broker, because another broker may be the best one now."""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict, deque
from collections.abc import Hashable
from typing import Final, TypeAlias

from rocket_sink.message import MessageQueue
from rocket_sink.producer.engine.attempt import SendAttempt, Wait
from rocket_sink.producer.engine.brokers import Broker, Brokers
from rocket_sink.producer.engine.routes import Routes

_OLD_TIMES_MAX: Final = 1024
"""Limit of entries in the heap of attempts that no longer wait, beyond the number that do."""
_AT_BROKERS: Final = frozenset((Wait.BROKER, Wait.VERSION, Wait.POLICY))
_Lines: TypeAlias = "dict[Hashable, OrderedDict[SendAttempt, None]]"


class OrderedQueues:
    """The lines of requests for ordered queues. Only the first request of a line may be in flight.
    A request stays in its first line, even if a later attempt is sent to another queue."""

    def __init__(self) -> None:
        self._queues: dict[MessageQueue, deque[SendAttempt]] = {}

    def clear(self) -> None:
        self._queues.clear()

    def enter(self, attempt: SendAttempt, queue: MessageQueue) -> bool:
        """Append the attempt to the queue's line if it is in none; return whether it is first."""
        if attempt.turn is not None:
            return self._queues[attempt.turn][0] is attempt
        attempt.turn = queue
        line = self._queues.setdefault(queue, deque())
        line.append(attempt)
        return len(line) == 1

    def replace(self, old: SendAttempt, new: SendAttempt) -> None:
        """Replace a request's old attempt in its line by the new one."""
        if old.turn is not None:
            line = self._queues[old.turn]
            line[line.index(old)] = new

    def leave(self, attempt: SendAttempt) -> SendAttempt | None:
        """Remove an ended request. Return the first request in line now; None if there is none."""
        assert attempt.turn is not None
        line = self._queues[attempt.turn]
        line.remove(attempt)
        if not line:
            del self._queues[attempt.turn]
            return None
        return line[0]


class WaitingRequests:
    """`size` attempts that wait, in one heap of times and one dictionary of events."""

    def __init__(self, events: set[Hashable], routes: Routes, brokers: Brokers) -> None:
        self.ordered = OrderedQueues()
        self.events = events
        self.size = 0
        self._routes = routes
        self._brokers = brokers
        self._ranks = brokers.ranks
        self._waits: dict[SendAttempt, tuple[int, _Lines, Hashable]] = {}
        """{attempt: (the wait's number, its lines, and its event)}"""
        self._attempts: dict[int, SendAttempt] = {}
        """{number of a wait: attempt}"""
        self._times: list[tuple[float, int]] = []
        """A heap of (time, number of a wait), also of waits that have ended before."""
        self._sequence = itertools.count()
        self._lines: _Lines = {}
        self._rooms: _Lines = {}
        """The lines of attempts that wait for room. The event is a broker, or a topic with False
        (room at its best brokers) or True (room at any usable broker)."""
        self._ready: list[SendAttempt] = []

    def add(self, attempt: SendAttempt, wait: Wait, due_s: float) -> None:
        """Keep an attempt until its event, or until `due_s` or its deadline. If `due_s` is
        infinite, an attempt that waits for room waits for any usable broker, not only for the best
        ones."""
        attempt.waits = wait
        self.size += 1
        lines, event = self._lines, self._event_of(attempt, wait, due_s)
        if wait is Wait.BROKER:
            lines = self._rooms
        number = next(self._sequence)
        self._waits[attempt] = number, lines, event
        self._attempts[number] = attempt
        lines.setdefault(event, OrderedDict())[attempt] = None
        if len(self._times) > 2 * len(self._waits) + _OLD_TIMES_MAX:
            self._times = [entry for entry in self._times if entry[1] in self._attempts]
            heapq.heapify(self._times)
        heapq.heappush(self._times, (min(due_s, attempt.deadline_s), number))

    def _event_of(self, attempt: SendAttempt, wait: Wait, due_s: float) -> Hashable:
        topic, target = attempt.request.topic, attempt.target
        if wait is Wait.ROUTE:
            return topic
        if wait is Wait.VERSION:
            return attempt.address
        if wait is Wait.POLICY:
            return topic, attempt.home
        if wait is Wait.BROKER:
            return (topic, due_s > attempt.deadline_s) if target is None else target.broker
        return None

    def _release(self, attempt: SendAttempt) -> None:
        """End the attempt's wait; the next `pop_due` returns it."""
        number, lines, event = self._waits.pop(attempt)
        del self._attempts[number]
        del lines[event][attempt]
        if not lines[event]:
            del lines[event]
        self._ready.append(attempt)

    def leave(self, attempt: SendAttempt) -> None:
        """Remove an ended request from its ordered queue, and make the next request there due."""
        following = self.ordered.leave(attempt)
        if following in self._waits and following.waits is Wait.TURN:
            self._release(following)

    def pop_due(self, now_s: float) -> list[SendAttempt]:
        """Remove and return the attempts whose wait has ended."""
        while self.events:
            for waiting in list(self._lines.get(self.events.pop(), ())):
                self._release(waiting)
        while self._times and self._times[0][0] <= now_s:
            attempt = self._attempts.get(heapq.heappop(self._times)[1])
            if attempt is not None:
                self._release(attempt)
        # Retries go before requests in line, so that they take the room of the failed attempts.
        if not self._ready:
            self._give_out_room(now_s)
        ready, self._ready = self._ready, []
        self.size -= len(ready)
        return ready

    def wait_s(self, longest_s: float, now_s: float) -> float:
        """Return how long the engine may wait for its connections, at most `longest_s`."""
        if self._ready or self.events:
            return 0.0
        until_s = self._times[0][0] if self._times else float("inf")
        return min(longest_s, max(0.0, until_s - now_s))

    def drain_all(self) -> list[SendAttempt]:
        for attempt in list(self._waits):
            self._release(attempt)
        attempts, self._ready = self._ready, []
        self.size = 0
        return attempts

    def _give_out_room(self, now_s: float) -> None:
        """Release attempts for which a broker has room."""
        brokers = self._brokers
        if self._ranks is not brokers.ranks:
            self._ranks = brokers.ranks
            for attempt in [other for other in self._waits if other.waits in _AT_BROKERS]:
                self._release(attempt)
            return
        for event in list(self._rooms):
            watched: list[Broker] = []
            if isinstance(event, Broker):
                watched = [event]
            elif isinstance(event, tuple) and (info := self._routes.get(event[0], now_s)):
                watched = brokers.open_to(info, event[1], now_s)
            for broker in watched:
                reserved, line = 0, self._rooms.get(event)
                while line and (room := next(iter(line)).room_at(broker, reserved)):
                    reserved += room
                    self._release(next(iter(line)))
