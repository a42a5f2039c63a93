"""The queues to which a backfill sends dead letters, so that a sharding key keeps its order.

A key's hash is an index into a list of queues (`task.queue_snapshot`). While a broker is away the
route has fewer queues, and keys would move unnoticed. So a dead letter uses its query's list and
hash, and waits while its queue's broker is in no route. A query without an order has noted no list;
its dead letters use the task's first route. A table's rows use the first backfill's list."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rocket_sink.errors import NoRouteError
from rocket_sink.message_rules import with_namespace
from rocket_sink.options import SinkOptions
from rocket_sink.producer.engine.engine import SendEngine
from rocket_sink.routing.sharding import queues_for_keys
from rocket_sink.routing.topic_publish_info import QueueList, TopicPublishInfo
from rocket_sink.task.queue_snapshot import Pinned, Queues, QueueSnapshots, queues_of, with_queues

Lists = Mapping[str, Pinned]
"""{topic: its queues and the hash that finds a key's queue}"""


class HomeQueues:
    """Finds the queues to which one task's dead letters belong. All methods raise a LedgerError if
    a list cannot be read, or a NameServerUnavailableError.

    Args:
        options: the backfill's options; a `topic` among them replaces the dead letters' topics.
        pin_new: for rows of a table: note the queues of a topic that has no note yet.
    """

    def __init__(self, options: SinkOptions, engine: SendEngine, *, pin_new: bool = False) -> None:
        self._options = options
        self._engine = engine
        self._pin_new = pin_new
        self._pinned: dict[tuple[str | None, str], Pinned | None] = {}
        self._first: dict[str, Pinned] = {}
        self._asked: frozenset[str] = frozenset()

    def runs(self, letters: pa.RecordBatch) -> Iterator[tuple[pa.RecordBatch, Lists]]:
        """Split the letters where a topic's list of queues changes; yield (part, its lists)."""
        start, lists = 0, dict[str, Pinned]()
        pairs = zip(letters["query_id"].to_pylist(), letters["topic"].to_pylist(), strict=True)
        before: tuple[Any, Any] = (None, None)
        for row, (query, origin) in enumerate(pairs):
            if (query, origin) == before:
                continue
            before = query, origin
            topic = self.topic_of(origin)
            pinned = self._list(query, topic)
            if pinned is None:
                continue
            # A `TaskSender` takes one list per topic, and one hash for all topics.
            hashes = {other.sharding_hash for other in lists.values()}
            if lists.get(topic, pinned) != pinned or hashes - {pinned.sharding_hash}:
                yield letters.slice(start, row - start), lists
                start, lists = row, {}
            lists[topic] = pinned
        yield letters.slice(start), lists

    def absent(self, letters: pa.RecordBatch, lists: Lists) -> pa.Array:
        """Return each letter's absent broker (or queue), for which the letter waits, or null."""
        absences = np.full(letters.num_rows, None, object)
        topics = letters["topic"]
        for topic in pc.unique(topics).to_pylist():
            # Use `is_in`, which finds null, too: rows that take the option's topic have none.
            same = pc.is_in(topics, value_set=pa.array([topic], pa.string()))
            rows = np.flatnonzero(same.to_numpy(zero_copy_only=False))
            topic_letters, name = letters.take(pa.array(rows)), self.topic_of(topic)
            info = self._route(name)
            if pinned := lists.get(name):
                absences[rows] = absent_homes(topic_letters["sharding_key"], pinned, info)
            has_queue = has_own_queue(topic_letters)
            if has_queue.any():
                # A static topic's rows name a logical broker.
                brokers = dict(queues_of(info).spans) if info is not None else {}
                own = topic_letters["broker_name"].filter(pa.array(has_queue)).to_pylist()
                absences[rows[has_queue]] = [None if b in brokers else b for b in own]
        return pa.array(absences, pa.string())

    def queues(self, lists: Lists | None = None) -> Queues:
        """Return the lists for a `TaskSender`; None: the queues that this task saw first."""
        pinned = self._first if lists is None else lists
        return lambda info: pinned[info.topic].queues if info.topic in pinned else queues_of(info)

    def topic_of(self, topic: str) -> str:
        """Return the topic to which a dead letter of `topic` is sent."""
        return with_namespace(self._options.namespace, self._options.topic or topic)

    def _list(self, query_id: str | None, topic: str) -> Pinned | None:
        key = (query_id, topic)
        if key not in self._pinned:
            info, pinned = self._route(topic), None
            redirected = bool(self._options.topic) and not self._pin_new
            if query_id and not redirected:
                pins = QueueSnapshots(self._options, query_id)
                pinned = pins.load(topic)
                if pinned is None and self._pin_new and info is not None:
                    pinned = pins.pin(info)
            self._pinned[key] = pinned or self._first.get(topic)
        return self._pinned[key]

    def _route(self, topic: str) -> TopicPublishInfo | None:
        was_asked, self._asked = topic in self._asked, self._asked | {topic}
        try:
            info = (self._engine.publish_info if was_asked else self._engine.fresh_route)(topic)
        except NoRouteError:
            return None
        if info.ok and topic not in self._first:
            self._first[topic] = Pinned(queues_of(info), self._options.sharding_hash)
        return info


def absent_homes(keys: pa.Array, pinned: Pinned, info: TopicPublishInfo | None) -> Any:
    """Return for each key the broker (or queue) that the route lacks; None if it lacks nothing."""
    queues: QueueList = pinned.queues
    names = np.array([_absence(queue, info) for queue in queues], object)
    by_list = with_queues(TopicPublishInfo(queues.topic, queues, {}, False, {}), queues)
    homes = queues_for_keys(by_list, keys, pinned.sharding_hash)
    absences = names[homes]
    absences[keys.is_null().to_numpy(zero_copy_only=False)] = None
    return absences


def _absence(queue: Any, info: TopicPublishInfo | None) -> str | None:
    broker = str(queue.broker_name)
    if info is None:
        return broker
    has_host = not info.static or info.broker_of(queue) in info.masters
    if has_host and info.index_of(queue) is not None:
        return None
    has_broker = info.static or broker in info.queues_by_broker
    return f"{broker} (queue {queue.queue_id})" if has_broker else broker


def has_own_queue(letters: pa.RecordBatch) -> Any:
    """Return a mask of the rows that name broker and queue."""
    if not {"queue_id", "broker_name"} <= set(letters.schema.names):
        return np.zeros(letters.num_rows, bool)
    has_queue = pc.and_(pc.is_valid(letters["queue_id"]), pc.is_valid(letters["broker_name"]))
    return has_queue.to_numpy(zero_copy_only=False)
