"""Attempts that wait before they are sent: for a time, a route, a broker, or earlier requests."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from typing import Final

from rocket_sink.message import MessageQueue
from rocket_sink.producer.engine.attempt import SendAttempt, Wait
from rocket_sink.producer.engine.brokers import Broker, Brokers
from rocket_sink.producer.engine.routes import Routes

_LOOK_S: Final = 0.01
"""Time between two checks of routes and deadlines for attempts that wait for an event."""


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
        """Remove an ended request. Return the next request in line if it may go now."""
        assert attempt.turn is not None
        line = self._queues[attempt.turn]
        first = line[0] is attempt
        line.remove(attempt)
        if not line:
            del self._queues[attempt.turn]
            return None
        return line[0] if first else None


class WaitingRequests:
    """`size` attempts that wait, each in one collection until it is due or out of time."""

    def __init__(self, routes: Routes, brokers: Brokers) -> None:
        self.ordered = OrderedQueues()
        self.size = 0
        self._routes = routes
        self._brokers = brokers
        self._delayed: list[tuple[float, int, SendAttempt]] = []
        self._sequence = itertools.count()
        self._awaiting_route: dict[str, deque[SendAttempt]] = {}
        self._throttled: dict[Broker | tuple[str, bool], deque[tuple[float, SendAttempt]]] = {}
        """Attempts that wait for room, each with its deadline. A key is a broker, or a topic with
        False (room at its best brokers) or True (room at any usable broker)."""
        self._ranks = brokers.ranks
        """The ranks by which the attempts in `_throttled` wait."""
        self._awaiting_turn: dict[SendAttempt, None] = {}
        self._next_look_s = 0.0
        self._look_ups = 0

    def add(self, attempt: SendAttempt, wait: Wait, due_s: float) -> None:
        """Keep an attempt until its wait ends, or `due_s` (not with Wait.ROUTE and Wait.TURN)."""
        attempt.waits = wait
        self.size += 1
        if wait is Wait.ROUTE:
            self._awaiting_route.setdefault(attempt.request.topic, deque()).append(attempt)
        elif wait is Wait.BROKER:
            target, is_last = attempt.target, due_s >= attempt.deadline_s
            place = (attempt.request.topic, is_last) if target is None else target.broker
            self._throttled.setdefault(place, deque()).append((due_s, attempt))
        elif wait is Wait.TURN:
            self._awaiting_turn[attempt] = None
        else:
            due_s = min(due_s, attempt.deadline_s)
            heapq.heappush(self._delayed, (due_s, next(self._sequence), attempt))

    def leave(self, attempt: SendAttempt, now_s: float) -> None:
        """Remove an ended request from its ordered queue, and make the next request there due."""
        following = self.ordered.leave(attempt)
        if following is not None and following in self._awaiting_turn:
            del self._awaiting_turn[following]
            self.size -= 1
            self.add(following, Wait.DELAY, now_s)

    def pop_due(self, now_s: float) -> list[SendAttempt]:
        """Remove and return the attempts that are due or out of time."""
        due: list[SendAttempt] = []
        while self._delayed and self._delayed[0][0] <= now_s:
            due.append(heapq.heappop(self._delayed)[2])
        if due:
            # Retries take the places of the attempts that failed before requests in line do.
            self.size -= len(due)
            return due
        ranks = self._brokers.ranks
        for place in list(self._throttled):
            due += self._unthrottled(place, now_s)
        self._ranks = ranks  # An update in the loop counts for the next call.
        if now_s >= self._next_look_s or self._look_ups != self._routes.look_ups:
            self._next_look_s, self._look_ups = now_s + _LOOK_S, self._routes.look_ups
            for topic in list(self._awaiting_route):
                due += self._routed(topic, now_s)
            for attempt in [other for other in self._awaiting_turn if now_s >= other.deadline_s]:
                del self._awaiting_turn[attempt]
                due.append(attempt)
        self.size -= len(due)
        return due

    def wait_s(self, longest_s: float, now_s: float) -> float:
        """Return how long the engine may wait for its connections, at most `longest_s`."""
        until_s = self._delayed[0][0] if self._delayed else float("inf")
        if self.size > len(self._delayed):
            until_s = min(until_s, max(self._next_look_s, now_s + _LOOK_S))
        return min(longest_s, max(0.0, until_s - now_s))

    def drain_all(self) -> list[SendAttempt]:
        attempts = [attempt for _, _, attempt in self._delayed]
        for line in self._throttled.values():
            attempts += [attempt for _, attempt in line]
        attempts += itertools.chain.from_iterable(self._awaiting_route.values())
        attempts += self._awaiting_turn
        self._awaiting_turn.clear()
        self._delayed.clear()
        self._awaiting_route.clear()
        self._throttled.clear()
        self.size = 0
        return attempts

    def _unthrottled(self, place: Broker | tuple[str, bool], now_s: float) -> list[SendAttempt]:
        """Remove and return attempts for which a broker has room, or whose wait is over."""
        brokers, line = self._brokers, self._throttled[place]
        if self._ranks is not brokers.ranks:
            # Return all attempts, because another broker may be the best now.
            del self._throttled[place]
            return [attempt for _, attempt in line]
        if not isinstance(place, Broker) and now_s >= self._next_look_s:
            info = self._routes.get(place[0], now_s)
            if info is not None:
                brokers.ranking(info, now_s)  # `open_to` needs the ranking of a new route
        due = []
        watched = [place] if isinstance(place, Broker) else brokers.open_to(*place, now_s)
        for broker in watched:
            reserved = 0
            while line and (room := line[0][1].room_at(broker, reserved)):
                reserved += room
                due.append(line.popleft()[1])
        if now_s >= self._next_look_s:
            due += [attempt for due_s, attempt in line if now_s >= due_s]
            line = deque(waiting for waiting in line if now_s < waiting[0])
        if line:
            self._throttled[place] = line
        else:
            del self._throttled[place]
        return due

    def _routed(self, topic: str, now_s: float) -> list[SendAttempt]:
        routes = self._routes
        is_resolved = routes.get(topic, now_s) is not None and not routes.fetching(topic)
        is_resolved = is_resolved or routes.is_unresolvable(topic)
        line = self._awaiting_route.pop(topic)
        kept = deque(other for other in line if not is_resolved and now_s < other.deadline_s)
        if kept:
            self._awaiting_route[topic] = kept
        return [other for other in line if is_resolved or now_s >= other.deadline_s]
