"""Choosing a queue for a message without a sharding key.

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

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

from rocket_sink.errors import ConfigurationError
from rocket_sink.message import MessageQueue
from rocket_sink.routing.publish import PublishInfo
from rocket_sink.routing.selectors import Load, Rng, Selector, View

Predicate = Callable[[str], bool]
Degree = Callable[[str], int]

TOPICS_MAX: Final = 1024
VIEWS_MAX: Final = 64
"""Sets of brokers with cursors of their own, per topic. Few occur: brokers fail now and then."""


def _always(broker_name: str) -> bool:
    return True


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
        info: PublishInfo,
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

    def _views(self, info: PublishInfo) -> _TopicViews:
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

    def __init__(self, info: PublishInfo, rng: Rng) -> None:
        self._info = info
        self._rng = rng
        self._by_brokers: dict[tuple[str, ...], View] = {}
        self.whole = self.of(_sendable(info))

    def renew(self, info: PublishInfo) -> bool:
        """Take the route's newer form; False when these cursors do not fit it."""
        if info is self._info:
            return True
        same = info.fingerprint == self._info.fingerprint and info.homes == self._info.homes
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


def _sendable(info: PublishInfo) -> tuple[str, ...]:
    return tuple(name for name in info.homes if name in info.masters)


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
    info: PublishInfo,
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
