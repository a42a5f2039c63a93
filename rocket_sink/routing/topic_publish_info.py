"""The writable queues of a topic's route, in the order that all clients use.

Source: MQClientInstance.topicRouteData2TopicPublishInfo, and ClientMetadata for static topics. A
sharding key's queue is an index into this order. Values are immutable. If the `fingerprint`
changes, keys move to other queues. Queue objects are made on access, so that a broker that claims
very many queues costs no memory."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Final, TypeVar, overload

from rocket_sink.errors import RemoteProtocolError
from rocket_sink.message import MessageQueue
from rocket_sink.routing.hashing import sip_hash24

if TYPE_CHECKING:
    from rocket_sink.wire.route import QueueData, QueueMapping, TopicRoute

QUEUES_MAX: Final = 65_536
"""The largest number of queues of a topic; Java has no limit."""
TOPICS_MAX: Final = 10_000
"""Limit of topics whose routes and rankings a client keeps; Java has no limit. A topic takes 4 KiB
with two brokers of four queues, and 35 KiB with ten brokers of sixteen."""
LOGICAL_PREFIX: Final = "__syslo__"
NO_BROKER: Final = "__syslo__none__"
"""The broker name of a static topic's queues that have no broker (MixAll)."""
_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class TopicCache(dict[_Key, _Value]):
    """A dictionary of at most TOPICS_MAX entries. A full one drops its older half."""

    def __setitem__(self, key: _Key, value: _Value) -> None:
        if len(self) >= TOPICS_MAX and key not in self:
            for old_key in list(self)[: TOPICS_MAX // 2]:
                self.pop(old_key, None)
        super().__setitem__(key, value)


@dataclass(unsafe_hash=True)
class QueueList(Sequence[MessageQueue]):
    """The queues of several brokers, made on access. Lists are hashable, and equal by content.
    `spans` has (broker name, number of queues) for each broker; queue ids begin at 0."""

    topic: str
    spans: Sequence[tuple[str, int]]

    def __post_init__(self) -> None:
        self.spans = tuple((name, count) for name, count in self.spans if count > 0)
        self._ends = tuple(itertools.accumulate(count for _, count in self.spans))
        spans = zip(self.spans, self._ends, strict=True)
        self.by_broker = {name: range(end - count, end) for (name, count), end in spans}
        """{broker name: indices of its queues}"""
        self._queues: dict[int, MessageQueue] = {}
        """{index: queue} of the queues that were asked for: a task asks for each many times."""

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, index: int) -> MessageQueue: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[MessageQueue, ...]: ...
    def __getitem__(self, index: int | slice) -> MessageQueue | tuple[MessageQueue, ...]:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        if index < 0:
            index += len(self)
        queue = self._queues.get(index)
        if queue is None:
            if not 0 <= index < len(self):
                raise IndexError(f"queue {index} of {len(self)}")
            span = bisect.bisect_right(self._ends, index)
            name, count = self.spans[span]
            queue = MessageQueue(self.topic, name, index - self._ends[span] + count)
            self._queues[index] = queue
        return queue

    def position(self, queue: MessageQueue) -> int | None:
        """Return the queue's index; None if it is not in the list."""
        indices = self.by_broker.get(queue.broker_name, range(0))
        is_listed = queue.topic == self.topic and 0 <= queue.queue_id < len(indices)
        return indices[queue.queue_id] if is_listed else None

    def __contains__(self, queue: object) -> bool:
        return isinstance(queue, MessageQueue) and self.position(queue) is not None

    def __iter__(self) -> Iterator[MessageQueue]:
        for name, count in self.spans:
            for queue_id in range(count):
                yield MessageQueue(self.topic, name, queue_id)


@dataclass(frozen=True)
class TopicPublishInfo:
    """The writable queues of a topic; immutable, compared by content.

    Attributes:
        queues: all writable queues, in the order of the Java client.
        masters: {broker name: address of its master}, without brokers that have no master.
        order: whether the queues are those of `orderTopicConf`.
        queues_by_broker: {real broker name: indices in `queues`}. A static topic's queues name a
            logical broker instead.
    """

    topic: str
    queues: Sequence[MessageQueue]
    masters: Mapping[str, str] = field(hash=False)
    order: bool
    queues_by_broker: Mapping[str, Sequence[int]] = field(hash=False)
    fingerprint: str = field(default="", compare=False)
    """A text that is equal in all processes for the same queues in the same order."""
    static: Mapping[MessageQueue, tuple[int, str]] = field(
        default_factory=dict, compare=False, repr=False
    )
    """{queue of a static topic: (index, real broker)}, for quick look-ups."""
    is_system: bool = field(default=False, compare=False)
    """Whether the topic is named like its broker or cluster, as brokers name their own topics."""

    @classmethod
    def of(cls, topic: str, route: TopicRoute) -> TopicPublishInfo:
        """Return the publish info of a route. Raise RemoteProtocolError for too many queues, or an
        `orderTopicConf` that is not `name:count;...`."""
        masters = _masters(route)
        if route.order_topic_conf:
            spans = _order_spans(topic, route.order_topic_conf)
            info = cls._of_spans(topic, spans, masters, order=True)
        elif route.mappings and route.order_topic_conf is None:
            info = cls._of_static(topic, route.mappings.values(), masters)
        else:
            info = cls._of_spans(topic, _data_spans(route.queues, masters, None), masters)
        is_system = any(topic in (broker.name, broker.cluster) for broker in route.brokers)
        return replace(info, is_system=True) if is_system else info

    @classmethod
    def default(
        cls, topic: str, template: TopicRoute, default_topic_queue_nums: int
    ) -> TopicPublishInfo:
        """Return the publish info of a topic that does not exist yet, from the route of the
        template topic (TBW102). A broker creates the topic at its first message, with at most
        min(`default_topic_queue_nums`, readQueueNums) queues
        (MQClientInstance.updateTopicRouteInfoFromNameServer)."""
        masters = _masters(template)
        spans = _data_spans(template.queues, masters, default_topic_queue_nums)
        return cls._of_spans(topic, spans, masters)

    @classmethod
    def _of_spans(
        cls,
        topic: str,
        spans: Sequence[tuple[str, int]],
        masters: Mapping[str, str],
        *,
        order: bool = False,
    ) -> TopicPublishInfo:
        _check_count(topic, sum(count for _, count in spans))
        queues = QueueList(topic, spans)
        fingerprint = _fingerprint(topic, list(queues.spans))
        return cls(topic, queues, masters, order, queues.by_broker, fingerprint)

    @classmethod
    def _of_static(
        cls, topic: str, mappings: Iterable[QueueMapping], masters: Mapping[str, str]
    ) -> TopicPublishInfo:
        """Return a static topic's queues, sorted by id. If several mappings list a queue, the one
        with the newest epoch names its broker. A queue that no mapping lists stays among the
        queues, with the broker NO_BROKER, so that no sharding key moves."""
        totals: dict[str, int] = {}
        hosts: dict[tuple[int, str], str] = {}
        for mapping in sorted(mappings, key=lambda mapping: mapping.epoch):
            scope = "global__" if mapping.scope == "__global__" else mapping.scope
            name = LOGICAL_PREFIX + scope  # Java: getMockBrokerName
            totals[name] = max(totals.get(name, 0), mapping.total_queues)
            hosts.update({(queue_id, name): mapping.broker_name for queue_id in mapping.queue_ids})
        _check_count(topic, sum(totals.values()) + len(hosts))
        listed = {(queue_id, name) for name, total in totals.items() for queue_id in range(total)}
        ids = sorted(listed | hosts.keys())
        queues_by_broker: dict[str, list[int]] = {}
        static: dict[MessageQueue, tuple[int, str]] = {}
        for index, queue_key in enumerate(ids):
            host, (queue_id, name) = hosts.get(queue_key, NO_BROKER), queue_key
            queues_by_broker.setdefault(host, []).append(index)
            static[MessageQueue(topic, name, queue_id)] = index, host
        fingerprint = _fingerprint(topic, ids)
        return cls(topic, tuple(static), masters, False, queues_by_broker, fingerprint, static)

    @property
    def ok(self) -> bool:
        """Whether the topic has a writable queue."""
        return len(self.queues) > 0

    @cached_property
    def _shared_address(self) -> str:
        addresses = set(self.masters.values())
        return addresses.pop() if len(addresses) == 1 else ""

    def proxy(self, name_servers: Container[str]) -> str:
        """Return the address of the proxy that gave the route; empty if a name server gave it. A
        proxy names its own address as that of every broker."""
        address = self._shared_address
        return address if len(self.masters) > 1 or address in name_servers else ""

    def index_of(self, queue: MessageQueue) -> int | None:
        """Return the queue's index in `queues`; None if it is not in the route."""
        if isinstance(self.queues, QueueList):
            return self.queues.position(queue)
        return self.static[queue][0] if queue in self.static else None

    def broker_of(self, queue: MessageQueue) -> str:
        """Return the queue's real broker. A static topic's queue names a logical broker."""
        if isinstance(self.queues, QueueList):
            return queue.broker_name
        return self.static[queue][1] if queue in self.static else queue.broker_name


def _masters(route: TopicRoute) -> Mapping[str, str]:
    masters: dict[str, str] = {}
    for broker in route.brokers:
        # If two entries have the same name, the first counts, as in Java.
        if broker.master is not None:
            masters.setdefault(broker.name, broker.master)
    return masters


def _order_spans(topic: str, conf: str) -> list[tuple[str, int]]:
    """Return (broker name, number of queues) in the order of `conf`. Unlike `_data_spans`, include
    brokers without a master."""
    spans: dict[str, int] = {}
    for part in filter(None, conf.split(";")):
        name, _, count = part.partition(":")
        number = count.split(":")[0].strip()
        if not name or not number.isdecimal() or len(number) > 10:
            raise RemoteProtocolError(
                f"orderTopicConf of topic {topic!r} has {part[:80]!r} instead of broker:queues; "
                "correct it with mqadmin updateOrderConf",
                topic=topic,
            )
        spans.setdefault(name, int(number))
    return list(spans.items())


def _data_spans(
    queues: Iterable[QueueData], masters: Mapping[str, str], most: int | None
) -> list[tuple[str, int]]:
    """Return (broker name, number of writable queues) of the brokers with a master. For a template
    topic, `most` limits the number per broker."""
    spans: dict[str, int] = {}
    for data in sorted(queues, key=lambda data: data.broker_name):
        if data.writable and data.broker_name in masters:
            count = data.write if most is None else min(most, data.read)
            spans.setdefault(data.broker_name, max(count, 0))
    return list(spans.items())


def _fingerprint(topic: str, layout: object) -> str:
    return f"{sip_hash24(repr((topic, layout)).encode()) & (1 << 64) - 1:016x}"


def _check_count(topic: str, count: int) -> None:
    if count > QUEUES_MAX:
        raise RemoteProtocolError(
            f"the route of topic {topic!r} claims {count} queues; the limit is {QUEUES_MAX}",
            topic=topic,
        )
