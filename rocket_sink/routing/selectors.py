"""How messages are spread over the queues of the brokers that will do.

A selector sees only such queues (a View) and picks a position among them; which brokers those
are is choice.py's business. All state is in the views' cursors.

Where chance comes from: an argument, so that a test can fix it (random.Random fits).

Choosing a queue for a message without a sharding key.

Brokers are tried in tiers: available, then reachable, then any; never the one that just failed
while another will do; and none without a master. A broker under suspicion (an old unanswered
request, which nothing has failed on yet) is skipped like an unavailable one; when all are under
suspicion, the least suspected ones are taken: half of the requests to a frozen broker, each time
that a slow one is late, would put them all there in the end.

Within a tier every selector gives each queue its share: while the turn is at a broker that will
not do, messages are dealt out over the remaining queues by a cursor of their own, and the turn is
kept. Walking on along the list, as Java does, gives the first queue after a bad broker all of
that broker's messages, and the first queue of a broker that recovers one message each time
(apache/rocketmq#5672).

Cost: constant when the brokers are well, whatever their number; else one pass over the brokers.
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

    def __init__(self, info: TopicPublishInfo, brokers: tuple[str, ...], rng: Rng) -> None:
        self.brokers = brokers
        self._queues = info.queues
        self._homes = tuple(info.queues_by_broker[name] for name in brokers)
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


Predicate = Callable[[str], bool]
Degree = Callable[[str], int]

TOPICS_MAX: Final = 1024
VIEWS_MAX: Final = 64
"""Sets of brokers with cursors of their own, per topic. Few occur: brokers fail now and then."""


def _none(broker_name: str) -> int:
    return 0


class QueueChooser:
    """Chooses queues; holds one set of cursors per topic. For one thread.

    Args:
        selector: how to spread messages (`selectors.selector_named`).
        rng: random starts (so that many producers do not begin on one queue) and choices.
        near: these brokers first inside each tier (`MachineRoom`).
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

        Predicates take broker names, and so does `suspicion`: 0 is none, more is worse.
        `last_broker` is the one whose attempt just failed.
        """
        views = self._views(info)
        whole = views.whole
        if not len(whole):
            return None

        near = self._near

        def well(name: str) -> bool:
            return name != last_broker and available(name) and not suspicion(name)

        def best(name: str) -> bool:
            return well(name) and (near is None or near(name))

        position = self._selector.select(whole, load, self._rng, best)
        if position is not None:
            return whole.queue_at(position)
        for tier in _tiers(whole.brokers, well, reachable, suspicion, last_broker):
            brokers = [name for name in whole.brokers if tier(name)]
            if near is not None:
                brokers = [name for name in brokers if near(name)] or brokers
            if brokers:
                view = views.of(tuple(brokers))
                position = self._selector.select(view, load, self._rng)
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
    well: Predicate,
    reachable: Predicate,
    suspicion: Degree,
    last_broker: str | None,
) -> Iterator[Predicate]:
    """From the best to the last resort.

    A reachable broker that just failed comes before others that are not: those cost a connect
    time-out, and a failure may have been one busy answer.
    """
    yield well
    degrees = {name: suspicion(name) for name in names if name != last_broker and reachable(name)}
    least = min(degrees.values(), default=0)
    yield lambda name: degrees.get(name) == least
    yield reachable
    yield lambda name: name != last_broker
    yield _always


class _TopicViews:
    """The views of one topic; they outlive a refresh of the route that changes no queue."""

    def __init__(self, info: TopicPublishInfo, rng: Rng) -> None:
        self._info = info
        self._rng = rng
        self._by_brokers: dict[tuple[str, ...], View] = {}
        self.whole = self.of(_sendable(info))

    def renew(self, info: TopicPublishInfo) -> bool:
        """Take the route's newer form; False when these cursors do not fit it."""
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


class MachineRoom:
    """`near` of a QueueChooser: brokers in our machine room first, the others when none will do.

    Java's SelectMessageQueueByMachineRoom is a stub that returns null; the naming `room@broker`
    is that of its consumers (AllocateMessageQueueByMachineRoom).
    """

    def __init__(self, room: str, room_of: Callable[[str], str | None] | None = None) -> None:
        self.room = room
        self._room_of = room_of or _room_in_name

    def __call__(self, broker_name: str) -> bool:
        return self._room_of(broker_name) == self.room


def _room_in_name(broker_name: str) -> str | None:
    room, at, _ = broker_name.partition("@")
    return room if at else None


def select_by(
    function: Callable[[Sequence[MessageQueue], Any, Any], MessageQueue | None],
    info: TopicPublishInfo,
    message: Any,
    arg: Any,
) -> MessageQueue:
    """A user's selector (Java: MessageQueueSelector): called with all queues of the route.

    Raises:
        ConfigurationError: it returned None, or a queue that the route does not have.
    """
    queue = function(info.queues, message, arg)
    if not isinstance(queue, MessageQueue) or info.index_of(queue) is None:
        raise ConfigurationError(
            f"the queue selector {getattr(function, '__name__', function)!r} returned {queue!r}; "
            f"it must return one of the {len(info.queues)} queues of topic {info.topic!r} that it "
            "is given",
            topic=info.topic,
        )
    return queue
