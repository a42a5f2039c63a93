"""Queues dealt out in turn while every broker is well: the fast path before QueueChooser.

It deals as `selectors.RoundRobin` does, from a table made once per route, so that a message costs
an index instead of a choice. Whatever is not well is the chooser's business.
"""

from __future__ import annotations

from random import Random
from typing import NamedTuple

from rocket_sink.message import MessageQueue
from rocket_sink.producer.brokers import FREE_IN_FLIGHT, Broker, Brokers
from rocket_sink.routing.publish import PublishInfo


class Place(NamedTuple):
    """Where a request goes: `home` is the real broker (a static topic's queue names a logical
    one), `address` its master's, empty when there is none."""

    queue: MessageQueue
    home: str
    address: str
    broker: Broker


def place_of(info: PublishInfo, queue: MessageQueue, brokers: Brokers) -> Place:
    home = info.broker_of(queue)
    return Place(queue, home, info.masters.get(home, ""), brokers.of(home))


class Deal:
    """The queues of one route that can be sent to, and whose turn it is."""

    __slots__ = ("_next", "_places", "info")

    def __init__(self, info: PublishInfo, brokers: Brokers, rng: Random) -> None:
        self.info = info
        places = [place_of(info, queue, brokers) for queue in info.queues]
        self._places = [place for place in places if place.address]
        self._next = rng.randrange(len(self._places)) if self._places else 0

    def take(self, brokers: Brokers) -> Place | None:
        """The next one whose broker has not too much in flight; None when there is none."""
        places = self._places
        for _ in range(len(places)):
            place = places[self._next]
            self._next = self._next + 1 if self._next + 1 < len(places) else 0
            broker = place.broker
            may_be = broker.in_flight > FREE_IN_FLIGHT or broker.window is not None
            if not (may_be and brokers.overloaded(broker)):
                return place
        return None
