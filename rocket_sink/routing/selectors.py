"""Choosing a queue for a message without a sharding key.

`QueueChooser` tries brokers in tiers: available, then reachable, then any; the one that just failed
only if there is no other; never one without a master. A suspected broker (with an old unanswered
request) counts as unavailable; when all are suspected, the least suspected ones are taken, else
requests would pile up at a frozen broker whenever another one is slow.

Within a tier a `Selector` picks a queue. While the next queue's broker is excluded, messages go to
the other queues by a cursor of their own, and the queue keeps its turn. Java takes the next queue
in the list, which gives the first queue after an excluded broker all of that broker's messages
(apache/rocketmq#5672).

Cost: constant while no broker is excluded, else one pass over the brokers.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol

from rocket_sink.errors import ConfigurationError
from rocket_sink.message import MessageQueue
from rocket_sink.routing.topic_publish_info import TopicPublishInfo


class Rng(Protocol):
    """The used part of random.Random."""

    def random(self) -> float:
        """In [0, 1)."""

    def randrange(self, stop: int, /) -> int:
        """In [0, stop)."""


EXPLORE: Final = 1 / 32
"""Share of `least_latency`'s choices made round robin: latency is known only of brokers in use."""
LATENCY_FLOOR_MS: Final = 0.1


Accept = Callable[[str], bool]
"""Whether a broker, by name, is acceptable."""


def _always(broker_name: str) -> bool:
    return True


class Load(Protocol):
    """Load of brokers, for `Weighted` and `least_latency`."""

    def latency_ms(self, broker_name: str) -> float:
        """Recent latency; 0 when unknown."""

    def in_flight(self, broker_name: str) -> int:
        """Unanswered requests."""


class Cursor:
    """Round robin from a random start (Java: ThreadLocalIndex)."""

    __slots__ = ("_count", "next")

    def __init__(self, count: int, start: int) -> None:
        self._count = count
        self.next = start % count if count else 0
        """The position that `take` will return."""

    def take(self) -> int:
        """Return the next position and move on."""
        taken = self.next
        self.next = taken + 1 if taken + 1 < self._count else 0
        return taken


class View:
    """The queues of some brokers of a route, as positions 0 to len - 1, and their cursors."""

    def __init__(self, info: TopicPublishInfo, brokers: tuple[str, ...], rng: Rng) -> None:
        self.brokers = brokers
        self._queues = info.queues
        self._indices = tuple(info.queues_by_broker[name] for name in brokers)
        self._ends = tuple(itertools.accumulate(len(indices) for indices in self._indices))
        self._cursor = Cursor(len(self), rng.randrange(len(self)) if len(self) else 0)
        counts = [len(indices) for indices in self._indices]
        self._cursors = tuple(Cursor(count, rng.randrange(count)) for count in counts)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def broker_at(self, position: int) -> str:
        return self.brokers[bisect.bisect_right(self._ends, position)]

    def queue_at(self, position: int) -> MessageQueue:
        broker = bisect.bisect_right(self._ends, position)
        indices = self._indices[broker]
        return self._queues[indices[position - self._ends[broker] + len(indices)]]

    def count_of(self, broker: int) -> int:
        """Number of queues of `brokers[broker]`."""
        return len(self._indices[broker])

    def take(self, accept: Accept = _always) -> int | None:
        """The next position over all queues; None, and no turn lost, if it is not accepted."""
        if not accept(self.broker_at(self._cursor.next)):
            return None
        return self._cursor.take()

    def take_on(self, broker: int, accept: Accept = _always) -> int | None:
        """As `take`, over the queues of `brokers[broker]`."""
        if not accept(self.brokers[broker]):
            return None
        return self._ends[broker] - len(self._indices[broker]) + self._cursors[broker].take()


Selector = Callable[[View, Load | None, Rng, Accept], int | None]
"""A strategy of option `queueSelector`.

It returns a position of a view that is not empty; None when its broker is not accepted. A queue
that is not accepted must keep its turn: acceptance depends on earlier sends, so the same queue
would lose its turn each time.
"""


def round_robin(view: View, load: Load | None, rng: Rng, accept: Accept) -> int | None:
    """Each queue in turn."""
    return view.take(accept)


def random_queue(view: View, load: Load | None, rng: Rng, accept: Accept) -> int | None:
    """Each queue with the same chance (Java: SelectMessageQueueByRandom)."""
    position = rng.randrange(len(view))
    return position if accept(view.broker_at(position)) else None


def least_latency(view: View, load: Load | None, rng: Rng, accept: Accept) -> int | None:
    """The better of two random brokers, by latency times requests in flight; its queues in turn.

    Not the best of all: many producers would overload the same broker (Mitzenmacher, "The Power of
    Two Choices in Randomized Load Balancing", 2001).
    """
    if load is None or rng.random() < EXPLORE:
        return view.take(accept)
    count = len(view.brokers)
    one = rng.randrange(count)
    other = (one + 1 + rng.randrange(count - 1)) % count if count > 1 else one
    best = min((one, other), key=lambda broker: _cost(view.brokers[broker], load))
    return view.take_on(best, accept)


def _cost(name: str, load: Load) -> float:
    return (load.in_flight(name) + 1) * max(load.latency_ms(name), LATENCY_FLOOR_MS)


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

    def __call__(self, view: View, load: Load | None, rng: Rng, accept: Accept) -> int | None:
        weights = [self._weight(view, number, load) for number in range(len(view.brokers))]
        ends = list(itertools.accumulate(weights))
        if not ends[-1]:  # all remaining brokers weigh 0
            return view.take(accept)
        chosen = bisect.bisect_right(ends, rng.random() * ends[-1])
        return view.take_on(min(chosen, len(ends) - 1), accept)

    def _weight(self, view: View, broker: int, load: Load | None) -> float:
        name = view.brokers[broker]
        if self._weights is not None:
            return self._weights.get(name, 1.0)
        latency_ms = load.latency_ms(name) if load is not None else 0.0
        return view.count_of(broker) / max(latency_ms, LATENCY_FLOOR_MS)


def selector_named(name: str, weights: Mapping[str, float] | None = None) -> Selector:
    """The selector of option `queueSelector`: round_robin, random, weighted, least_latency.

    Raises:
        KeyError: no such selector.
    """
    if name == "weighted":
        return Weighted(weights)
    plain: dict[str, Selector] = {
        "round_robin": round_robin,
        "random": random_queue,
        "least_latency": least_latency,
    }
    return plain[name]


Predicate = Callable[[str], bool]
Degree = Callable[[str], int]

TOPICS_MAX: Final = 1024
VIEWS_MAX: Final = 64
"""Most sets of brokers with own cursors, per topic."""


def _none(broker_name: str) -> int:
    return 0


class QueueChooser:
    """Chooses queues; keeps cursors per topic. For one thread.

    Args:
        selector: the strategy (`selector_named`).
        rng: for random starts, so that many producers do not begin on one queue, and choices.
        near: brokers that come first inside each tier.
    """

    def __init__(self, selector: Selector, rng: Rng, *, near: Predicate | None = None) -> None:
        self._selector = selector
        self._rng = rng
        self._near = near
        self._topics: dict[str, _TopicViews] = {}

    def select(
        self,
        info: TopicPublishInfo,
        *,
        available: Predicate = _always,
        reachable: Predicate = _always,
        suspicion: Degree = _none,
        last_broker: str | None = None,
        load: Load | None = None,
    ) -> MessageQueue | None:
        """The next queue; None when no broker of the route has a queue and a master.

        Predicates and `suspicion` (0: none; more is worse) take broker names. `last_broker` is the
        broker of the failed attempt.
        """
        views = self._views(info)
        whole = views.whole
        if not len(whole):
            return None

        near = self._near

        def healthy(name: str) -> bool:
            return name != last_broker and available(name) and not suspicion(name)

        def best(name: str) -> bool:
            return healthy(name) and (near is None or near(name))

        position = self._selector(whole, load, self._rng, best)
        if position is not None:
            return whole.queue_at(position)
        for tier in _tiers(whole.brokers, healthy, reachable, suspicion, last_broker):
            brokers = [name for name in whole.brokers if tier(name)]
            if near is not None:
                brokers = [name for name in brokers if near(name)] or brokers
            if brokers:
                view = views.of(tuple(brokers))
                position = self._selector(view, load, self._rng, _always)
                assert position is not None
                return view.queue_at(position)
        raise AssertionError("the last tier takes every broker")

    def _views(self, info: TopicPublishInfo) -> _TopicViews:
        views = self._topics.get(info.topic)
        if views is None or not views.renew(info):
            if len(self._topics) >= TOPICS_MAX:
                self._topics.pop(next(iter(self._topics)))
            views = self._topics[info.topic] = _TopicViews(info, self._rng)
        return views


def _tiers(
    names: Iterable[str],
    healthy: Predicate,
    reachable: Predicate,
    suspicion: Degree,
    last_broker: str | None,
) -> Iterator[Predicate]:
    """From the best brokers to all.

    A reachable broker that just failed comes before unreachable ones: those cost a connect
    time-out, and the failure may have been one busy answer.
    """
    yield healthy
    degrees = {name: suspicion(name) for name in names if name != last_broker and reachable(name)}
    least = min(degrees.values(), default=0)
    yield lambda name: degrees.get(name) == least
    yield reachable
    yield lambda name: name != last_broker
    yield _always


class _TopicViews:
    """The views of one topic; kept while refreshed routes have the same queues."""

    def __init__(self, info: TopicPublishInfo, rng: Rng) -> None:
        self._info = info
        self._rng = rng
        self._by_brokers: dict[tuple[str, ...], View] = {}
        self.whole = self.of(_sendable(info))

    def renew(self, info: TopicPublishInfo) -> bool:
        """Take a refreshed route; False when its queues differ."""
        if info is self._info:
            return True
        same = (
            info.fingerprint == self._info.fingerprint
            and info.queues_by_broker == self._info.queues_by_broker
        )
        if same:
            self._info = info
            self.whole = self.of(_sendable(info))
        return same

    def of(self, brokers: tuple[str, ...]) -> View:
        view = self._by_brokers.get(brokers)
        if view is None:
            if len(self._by_brokers) >= VIEWS_MAX:
                self._by_brokers = {self.whole.brokers: self.whole}
            view = self._by_brokers[brokers] = View(self._info, brokers, self._rng)
        return view


def _sendable(info: TopicPublishInfo) -> tuple[str, ...]:
    return tuple(name for name in info.queues_by_broker if name in info.masters)


def select_by(
    function: Callable[[Sequence[MessageQueue], Any, Any], MessageQueue | None],
    info: TopicPublishInfo,
    message: Any,
    arg: Any,
    named: Callable[[MessageQueue], MessageQueue],
) -> MessageQueue:
    """The choice of a user's selector (Java: MessageQueueSelector) among all queues of the route.

    `named`: gives a queue of the selector's own making the topic's full name.

    Raises:
        ConfigurationError: it returned no queue of the route.
    """
    queue = function(info.queues, message, arg)
    chosen = named(queue) if isinstance(queue, MessageQueue) else None
    if chosen is None or info.index_of(chosen) is None:
        raise ConfigurationError(
            f"the queue selector {getattr(function, '__name__', function)!r} returned {queue!r}; "
            f"it must return one of the {len(info.queues)} queues of topic {info.topic!r} that it "
            "is given",
            topic=info.topic,
        )
    return chosen
