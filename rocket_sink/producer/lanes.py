"""One request in flight per queue, the others behind it in the order of their submission."""

from __future__ import annotations

from collections import deque

from rocket_sink.message import MessageQueue
from rocket_sink.producer.flight import Flight


class Lanes:
    """The ordered queues of an engine. A flight's lane is that of its first choice of queue."""

    def __init__(self) -> None:
        self._lanes: dict[MessageQueue, deque[Flight]] = {}

    def enter(self, flight: Flight, queue: MessageQueue) -> bool:
        """Take a place in the queue's lane; True when it is the first there: go."""
        if flight.lane is not None:
            return self._lanes[flight.lane][0] is flight
        flight.lane = queue
        lane = self._lanes.setdefault(queue, deque())
        lane.append(flight)
        return len(lane) == 1

    def replace(self, old: Flight, new: Flight) -> None:
        """The next attempt keeps its predecessor's place."""
        if old.lane is not None:
            lane = self._lanes[old.lane]
            lane[lane.index(old)] = new

    def leave(self, flight: Flight) -> Flight | None:
        """The request has ended; returns the one whose turn it is now, if its was the first."""
        if flight.lane is None:
            return None
        lane = self._lanes[flight.lane]
        first = lane[0] is flight
        lane.remove(flight)
        if not lane:
            del self._lanes[flight.lane]
            return None
        return lane[0] if first else None

    def behind(self, now_s: float | None = None) -> list[Flight]:
        """Those that wait behind others: all, or those whose deadline has passed at `now_s`."""
        return [
            flight
            for lane in self._lanes.values()
            for flight in list(lane)[1:]
            if now_s is None or now_s >= flight.deadline_s
        ]
