"""How messages are spread over the queues of the brokers that will do.

A selector sees only such queues (a View) and picks a position among them; which brokers those
are is choice.py's business. All state is in the views' cursors.

Where chance comes from: an argument, so that a test can fix it (random.Random fits).
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Mapping
from typing import Final, Protocol

from rocket_sink.message import MessageQueue
from rocket_sink.routing.publish import PublishInfo


class Rng(Protocol):
    """The part of random.Random that the routing layer uses."""

    def random(self) -> float:
        """In [0, 1)."""

    def randrange(self, stop: int, /) -> int:
        """In [0, stop)."""


EXPLORE: Final = 1 / 32
"""Share of LeastLatency's choices made blindly: latency is known only of brokers in use."""
LATENCY_FLOOR_MS: Final = 0.1


Accept = Callable[[str], bool]
"""Whether a broker, by name, will do."""


def _always(broker_name: str) -> bool:
    return True


class Load(Protocol):
    """What the weighing selectors ask about brokers."""

    def latency_ms(self, broker_name: str) -> float:
        """Recent latency; 0 when not known."""

    def in_flight(self, broker_name: str) -> int:
        """Requests sent and not answered."""


class Cursor:
    """Round robin from a random start (Java: ThreadLocalIndex)."""

    __slots__ = ("_count", "next")

    def __init__(self, count: int, start: int) -> None:
        self._count = count
        self.next = start % count if count else 0
        """The position that `take` will give; each of the `count` comes up once per round."""

    def take(self) -> int:
        """The next position."""
        taken = self.next
        self.next = taken + 1 if taken + 1 < self._count else 0
        return taken


class View:
    """The queues of some brokers of a route, as positions 0 to len - 1, and their cursors."""

    def __init__(self, info: PublishInfo, brokers: tuple[str, ...], rng: Rng) -> None:
        self.brokers = brokers
        self._queues = info.queues
        self._homes = tuple(info.homes[name] for name in brokers)
        self._ends = tuple(itertools.accumulate(len(home) for home in self._homes))
        self._cursor = Cursor(len(self), rng.randrange(len(self)) if len(self) else 0)
        self._own = tuple(Cursor(len(home), rng.randrange(len(home))) for home in self._homes)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def broker_at(self, position: int) -> str:
        """The broker on which the queue lives."""
        return self.brokers[bisect.bisect_right(self._ends, position)]

    def queue_at(self, position: int) -> MessageQueue:
        """The queue."""
        broker = bisect.bisect_right(self._ends, position)
        home = self._homes[broker]
        return self._queues[home[position - self._ends[broker] + len(home)]]

    def count_of(self, broker: int) -> int:
        """Queues of the broker of that number."""
        return len(self._homes[broker])

    def deal(self, accept: Accept = _always) -> int | None:
        """Positions in turn, over all queues; None, and no turn lost, when it is not accepted."""
        if not accept(self.broker_at(self._cursor.next)):
            return None
        return self._cursor.take()

    def deal_on(self, broker: int, accept: Accept = _always) -> int | None:
        """As `deal`, over the queues of the broker of that number."""
        if not accept(self.brokers[broker]):
            return None
        return self._ends[broker] - len(self._homes[broker]) + self._own[broker].take()


class Selector(Protocol):
    """A way to spread messages."""

    def select(
        self, view: View, load: Load | None, rng: Rng, accept: Accept = _always
    ) -> int | None:
        """A position of a view that is not empty; None when its broker is not accepted.

        What is not accepted must not use up a queue's turn: whether a broker is well depends on
        what was sent to it, so that the same queue would lose its turn each time.
        """


class RoundRobin:
    """Each queue in turn."""

    def select(
        self, view: View, load: Load | None, rng: Rng, accept: Accept = _always
    ) -> int | None:
        return view.deal(accept)


class RandomQueue:
    """Each queue with the same chance (Java: SelectMessageQueueByRandom)."""

    def select(
        self, view: View, load: Load | None, rng: Rng, accept: Accept = _always
    ) -> int | None:
        position = rng.randrange(len(view))
        return position if accept(view.broker_at(position)) else None


class Weighted:
    """Brokers by weight, then their queues in turn.

    Args:
        weights: {broker name: weight >= 0}; a broker that is not named weighs 1. Without weights
            a broker weighs its number of queues over its latency: twice as slow, half as many.
    """

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = dict(weights) if weights is not None else None
        if self._weights and min(self._weights.values()) < 0:
            raise ValueError("a broker's weight cannot be negative")

    def select(
        self, view: View, load: Load | None, rng: Rng, accept: Accept = _always
    ) -> int | None:
        weights = [self._weight(view, number, load) for number in range(len(view.brokers))]
        ends = list(itertools.accumulate(weights))
        if not ends[-1]:  # the brokers that are left all weigh nothing
            return view.deal(accept)
        chosen = bisect.bisect_right(ends, rng.random() * ends[-1])
        return view.deal_on(min(chosen, len(ends) - 1), accept)

    def _weight(self, view: View, broker: int, load: Load | None) -> float:
        name = view.brokers[broker]
        if self._weights is not None:
            return self._weights.get(name, 1.0)
        latency_ms = load.latency_ms(name) if load is not None else 0.0
        return view.count_of(broker) / max(latency_ms, LATENCY_FLOOR_MS)


class LeastLatency:
    """The better of two random brokers, by latency times requests in flight; its queues in turn.

    Two choices and not the minimum of all: many producers that all see one broker as the fastest
    would make it the slowest (Mitzenmacher, "The Power of Two Choices", 2001).
    """

    def select(
        self, view: View, load: Load | None, rng: Rng, accept: Accept = _always
    ) -> int | None:
        if load is None or rng.random() < EXPLORE:
            return view.deal(accept)
        count = len(view.brokers)
        one = rng.randrange(count)
        other = (one + 1 + rng.randrange(count - 1)) % count if count > 1 else one
        best = min((one, other), key=lambda broker: _cost(view.brokers[broker], load))
        return view.deal_on(best, accept)


def _cost(name: str, load: Load) -> float:
    return (load.in_flight(name) + 1) * max(load.latency_ms(name), LATENCY_FLOOR_MS)


def selector_named(name: str, weights: Mapping[str, float] | None = None) -> Selector:
    """The selector of option `queueSelector`: round_robin, random, weighted, least_latency.

    Raises:
        KeyError: no such selector.
    """
    if name == "weighted":
        return Weighted(weights)
    plain: dict[str, type[RoundRobin | RandomQueue | LeastLatency]] = {
        "round_robin": RoundRobin,
        "random": RandomQueue,
        "least_latency": LeastLatency,
    }
    return plain[name]()
