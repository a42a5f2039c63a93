"""The order of a route's brokers, and the choice among brokers of equal rank.

A `Ranking` groups the brokers of a route by rank. Ranks are computed when something changes, not
per message. Requests go to the best group. Load matters only inside the group: if the chosen broker
is full, or has far more requests in flight than its equals, the least loaded broker is used. While
all brokers of the group are full, the request waits (`take` returns None).

The queues of each broker are used in turn. Java skips an excluded broker's queues in a list of all
queues, so the first queue behind them gets all their messages (apache/rocketmq#5672)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, Protocol, TypeVar

from rocket_sink.errors import ConfigurationError
from rocket_sink.message import MessageQueue
from rocket_sink.routing.fault import FAR, LAST, SILENT, UNREACHABLE
from rocket_sink.routing.rate_limit import AimdWindow
from rocket_sink.routing.topic_publish_info import TopicPublishInfo

FREE_IN_FLIGHT: Final = 16
"""Number of requests that a broker may have in flight however slow it is."""
LOAD_FACTOR: Final = 1.25
"""A broker may have `FREE_IN_FLIGHT` requests in flight, plus this factor times its fair share: as
many as the other brokers have, in proportion to the shares. This keeps a broker that stops
answering from filling the engine's window before it is suspect."""
EXPLORE: Final = 1 / 32
"""Share of `least_latency`'s choices that are round robin, to measure every broker's latency."""
LATENCY_FLOOR_S: Final = 0.0001

Target = TypeVar("Target")


class Rng(Protocol):
    """The part of random.Random that selectors use."""

    def random(self) -> float:
        """Return a number in [0, 1)."""

    def randrange(self, stop: int, /) -> int:
        """Return a whole number in [0, stop)."""

    def choices(self, population: Sequence[Target], weights: Sequence[float]) -> list[Target]:
        """Return a list of one item, drawn in proportion to the weights."""


class Load(Protocol):
    """The load of one broker."""

    in_flight: int
    """Unanswered requests."""
    latency_s: float
    """The recent latency; 0 if unknown."""
    window: AimdWindow | None
    """The limit of requests in flight; None if the broker is not busy."""

    def room_for(self, requests: int) -> int:
        """Return how many of these requests fit into the window."""


@dataclass(slots=True, eq=False)
class RouteBroker(Generic[Target]):
    """A broker of a route, with its queues (`targets`).

    Attributes:
        share: the broker's fair share of the route's messages, relative to other brokers.
        turn: the index of the queue that `take` returns next.
    """

    name: str
    targets: Sequence[Target]
    load: Load
    share: float
    turn: int

    def take(self) -> Target:
        """Return the next queue."""
        turn, targets = self.turn, self.targets
        self.turn = turn + 1 if turn + 1 < len(targets) else 0
        return targets[turn]


class Equals(Generic[Target]):
    """Brokers of one rank.

    Attributes:
        slots: the brokers, each once per queue.
        turn: the index of the slot that `round_robin` takes next.
    """

    __slots__ = ("_choices", "_most", "brokers", "rank", "slots", "turn")

    def __init__(self, rank: int, brokers: list[RouteBroker[Target]], rng: Rng) -> None:
        self._choices = 0
        """Number of choices until `_most`, the limits per broker, is computed again."""
        self._most: dict[str, float] = {}
        self.rank = rank
        self.brokers = brokers
        self.slots = [broker for broker in brokers for _ in broker.targets]
        self.turn = rng.randrange(len(self.slots))

    def by_load(self, chosen: RouteBroker[Target], requests: int) -> RouteBroker[Target] | None:
        """Return the chosen broker if it has room and is within its limit. Otherwise return the
        least loaded broker with room, or None if all are full. The limits for n brokers are
        computed only every n / 4 choices, to save time."""
        self._choices -= 1
        load = chosen.load
        is_within = load.in_flight <= FREE_IN_FLIGHT
        if not is_within:
            if self._choices <= 0:
                self._choices, self._most = len(self.brokers) // 4, self._limits()
            is_within = load.in_flight <= self._most[chosen.name]
        if is_within and load.room_for(requests):
            return chosen
        return min(
            (broker for broker in self.brokers if broker.load.room_for(requests)),
            key=lambda broker: broker.load.in_flight / broker.share,
            default=None,
        )

    def _limits(self) -> dict[str, float]:
        """Return {broker name: number of requests that the broker may have in flight}."""
        loads = {
            broker.name: (broker.load.in_flight, broker.share)
            if broker.load.room_for(1)
            else (0, 0.0)
            for broker in self.brokers
        }
        in_flight = sum(requests for requests, _ in loads.values())
        share = sum(part for _, part in loads.values())
        limits = {}
        for broker in self.brokers:
            own, part = loads[broker.name]
            others = share - part
            fair = broker.share * (in_flight - own) / others if others > 0 else float("inf")
            limits[broker.name] = FREE_IN_FLIGHT + LOAD_FACTOR * fair
        return limits


Selector = Callable[[Equals[Any], Rng], RouteBroker[Any]]
"""A function that chooses among brokers of equal rank (option `queueSelector`)."""


def round_robin(equals: Equals[Any], rng: Rng) -> RouteBroker[Any]:
    """Choose the brokers in turn, each once per queue (Java: ThreadLocalIndex)."""
    turn, slots = equals.turn, equals.slots
    equals.turn = turn + 1 if turn + 1 < len(slots) else 0
    return slots[turn]


def random_queue(equals: Equals[Any], rng: Rng) -> RouteBroker[Any]:
    """Choose the broker of a random queue (Java: SelectMessageQueueByRandom)."""
    return equals.slots[rng.randrange(len(equals.slots))]


def least_latency(equals: Equals[Any], rng: Rng) -> RouteBroker[Any]:
    """Choose the better of two random brokers, by latency times requests in flight. If all
    producers chose the best broker, they would overload it (Mitzenmacher, "The Power of Two Choices
    in Randomized Load Balancing", 2001)."""
    if rng.random() < EXPLORE:
        return round_robin(equals, rng)
    brokers = equals.brokers
    first = rng.randrange(len(brokers))
    second = (first + 1 + rng.randrange(len(brokers) - 1)) % len(brokers) if brokers[1:] else first
    return min(brokers[first], brokers[second], key=_cost)


def _cost(broker: RouteBroker[Any]) -> float:
    return (broker.load.in_flight + 1) * max(broker.load.latency_s, LATENCY_FLOOR_S)


def by_share(equals: Equals[Any], rng: Rng) -> RouteBroker[Any]:
    """Choose brokers in proportion to their shares."""
    return rng.choices(equals.brokers, [broker.share for broker in equals.brokers])[0]


def by_latency(equals: Equals[Any], rng: Rng) -> RouteBroker[Any]:
    """Choose brokers in proportion to share / latency."""
    brokers = equals.brokers
    weights = [broker.share / max(broker.load.latency_s, LATENCY_FLOOR_S) for broker in brokers]
    return rng.choices(brokers, weights)[0]


def weights_of(value: str) -> dict[str, float]:
    """Return {broker: weight} of a value of `queueSelector`; empty if the value is a name."""
    pairs = (pair.partition("=") for pair in value.split(",") if "=" in pair)
    return {name: float(weight) for name, _, weight in pairs}


def selector_named(value: str) -> Selector:
    """Return the selector of a value of `queueSelector`, a name or weights."""
    selectors: dict[str, Selector] = {
        "round_robin": round_robin,
        "random": random_queue,
        "weighted": by_latency,
        "least_latency": least_latency,
    }
    return by_share if weights_of(value) else selectors[value]


class Ranking(Generic[Target]):
    """The brokers of one route, from best to worst. Not thread-safe.

    Args:
        brokers: the brokers with a master and a queue.
        ranks: {broker name: rank}.
        rng: chooses the first queue, so that many producers do not begin with the same one.
    """

    def __init__(
        self, brokers: Sequence[RouteBroker[Target]], ranks: Mapping[str, int], selector: Selector,
        rng: Rng,
    ) -> None:  # fmt: skip
        self.brokers = brokers
        self.ranks = ranks
        self._selector = selector
        self._rng = rng
        self._least = least = min(ranks.values(), default=0) & ~FAR
        self.best = [broker for broker in brokers if ranks[broker.name] & ~FAR == least]
        """The brokers of the best rank; `FAR` makes no difference."""
        self.usable = [b for b in brokers if b in self.best or ranks[b.name] < UNREACHABLE]
        """The brokers that `take` may choose if `worse` is set."""
        self._groups: dict[str | None, list[Equals[Target]]] = {}

    @property
    def is_silent(self) -> bool:
        return bool(self._least & SILENT)

    def take(self, requests: int, *, last: str | None = None, worse: bool = False) -> Target | None:
        """Return a queue for a group of `requests`; None if the brokers are full.

        Args:
            last: the broker of the failed attempt. It ranks behind all reachable brokers, but is
                used if the other best brokers are full.
            worse: if the best brokers are full, use a worse one that is reachable.
        """
        groups = self._groups.get(last)
        if groups is None:
            groups = self._groups[last] = self._groups_by_rank(last)
        for group in groups:
            is_best = group is groups[0] or group.rank & ~(FAR | LAST) == self._least
            if not is_best and (not worse or group.rank >= UNREACHABLE):
                continue
            chosen = self._selector(group, self._rng)
            is_free = chosen.load.in_flight <= FREE_IN_FLIGHT and chosen.load.window is None
            broker = chosen if is_free else group.by_load(chosen, requests)
            if broker is not None:
                return broker.take()
        return None

    def _groups_by_rank(self, last: str | None) -> list[Equals[Target]]:
        groups: dict[int, list[RouteBroker[Target]]] = {}
        for broker in self.brokers:
            rank = self.ranks[broker.name] | (LAST if broker.name == last else 0)
            groups.setdefault(rank, []).append(broker)
        return [Equals(rank, groups[rank], self._rng) for rank in sorted(groups)]


def select_by(
    function: Callable[[Sequence[MessageQueue], Any, Any], MessageQueue | None],
    info: TopicPublishInfo,
    message: Any,
    arg: Any,
    named: Callable[[MessageQueue], MessageQueue],
) -> MessageQueue:
    """Return the queue that a user's selector chooses (Java: MessageQueueSelector). `named` adds
    the namespace to the topic of a queue that the selector has made itself. Raise
    ConfigurationError if the selector did not return a queue of the route."""
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
