"""The queue list that a strictly ordered query keeps, even if the topic's route changes.

A key's queue is an index into the topic's list of queues. A dead broker leaves the route at once.
The list would become shorter, and every key would move unnoticed. So the query pins the list of its
first task: in memory for the task, and in a note beside the ledger (of the kind `queues`) for other
tasks and epochs. Without a ledger each task pins the list of its own route.

If a pinned broker is missing, its keys wait (`orderWaitMs`). If there are new queues, another
number of queues on a present broker, or another `shardingHash`, `onRouteChange` decides. A static
topic's queues are on a logical broker, so a move to another real broker is no change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Final, NamedTuple
from urllib.parse import quote

from rocket_sink.errors import DeliveryError
from rocket_sink.ledger.notes import NoteStore
from rocket_sink.ledger.path import failing, folder_part, resolve_path
from rocket_sink.options import SinkOptions
from rocket_sink.routing.topic_publish_info import QueueList, TopicPublishInfo

_KIND: Final = "queues"


class Pinned(NamedTuple):
    """A pinned list of a topic's queues, and the `shardingHash` that it was pinned with."""

    queues: QueueList
    sharding_hash: str


Queues = Callable[[TopicPublishInfo], QueueList]
"""Returns a topic's queues for strict order; the argument is the topic's present route."""


class QueueSnapshots:
    """Pinned queue lists of one task, shared with other tasks of the query (or batch) if there is a
    ledger. All methods raise a LedgerError if the note cannot be read or written."""

    def __init__(self, options: SinkOptions, query_id: str) -> None:
        self._allow = options.on_route_change == "allow"
        self._hash = options.sharding_hash
        self._place = resolve_path(options.ledger) if options.ledger else None
        self._query_id = query_id
        self._pinned: dict[str, Pinned] = {}

    def queues(self, info: TopicPublishInfo) -> QueueList:
        """Return the pinned list of the topic's queues. If the queues have changed, pin the present
        list first with `onRouteChange=allow`, else raise a DeliveryError."""
        pinned = self._pinned.get(info.topic) or self.pin(info)
        self._pinned[info.topic] = pinned
        present = Pinned(queues_of(info), self._hash)
        change = _change(pinned, present)
        if not change:
            return pinned.queues
        if not self._allow:
            raise DeliveryError(
                f"ordering=strict: the queues of the topic {info.topic!r} changed under the query "
                f"({change}), so keys would move to other queues and lose their order. Restore the "
                "former queues; or let the consumers drain the topic, and set onRouteChange=allow"
            )
        if self._place is not None:
            NoteStore(self._place, _KIND).write(self._name(info.topic), self._note(info))
        self._pinned[info.topic] = present
        return present.queues

    def load(self, topic: str) -> Pinned | None:
        """Return the topic's queues from the ledger; None if no task has pinned any."""
        if self._place is None:
            return None
        store, name = NoteStore(self._place, _KIND), self._name(topic)
        with self._reading(topic, store):
            note = store.read(name)
            return None if note is None else _parsed(topic, note)

    def pin(self, info: TopicPublishInfo) -> Pinned:
        """Return the topic's queues from the ledger; pin the present queues if it has none. If
        several tasks pin at once, the first write counts."""
        if self._place is None:
            return Pinned(queues_of(info), self._hash)
        store = NoteStore(self._place, _KIND)
        with self._reading(info.topic, store):
            note, _ = store.agree(self._name(info.topic), self._note(info))
            return _parsed(info.topic, note)

    def _reading(self, topic: str, store: NoteStore) -> AbstractContextManager[None]:
        where = store.where(self._name(topic))
        return failing(
            f"the pinned queues of the topic {topic!r} cannot be read", where,
            f". Delete {where} if the topic's queues are what they were",
            (OSError, ValueError, KeyError, TypeError, AttributeError),
        )  # fmt: skip

    def _note(self, info: TopicPublishInfo) -> dict[str, Any]:
        return {"topic": info.topic, "queues": queues_of(info).spans, "shardingHash": self._hash}

    def _name(self, topic: str) -> str:
        return f"{folder_part(self._query_id)}/{quote(topic, safe='')}"


def _parsed(topic: str, note: Any) -> Pinned:
    spans = [(str(name), int(count)) for name, count in note["queues"]]
    return Pinned(QueueList(topic, spans), str(note["shardingHash"]))


def with_queues(info: TopicPublishInfo, queues: QueueList) -> TopicPublishInfo:
    """Return the route with these queues, even if their brokers are missing from it."""
    return replace(info, queues=queues, queues_by_broker=queues.by_broker)


def queues_of(info: TopicPublishInfo) -> QueueList:
    """Return the queues of a route as a list, in which a static topic has logical brokers."""
    if isinstance(info.queues, QueueList):
        return info.queues
    counts = Counter(queue.broker_name for queue in info.queues)
    return QueueList(info.topic, tuple(counts.items()))


def _change(pinned: Pinned, present: Pinned) -> str:
    """Describe the changes of the queues, except missing brokers; empty if there are none."""
    pinned_counts, counts = dict(pinned.queues.spans), dict(present.queues.spans)
    new = [
        f"{name} has {count} queues" for name, count in counts.items() if name not in pinned_counts
    ]
    other = [
        f"{name} has {counts[name]} queues, not {count}"
        for name, count in pinned_counts.items()
        if name in counts and counts[name] != count
    ]
    if pinned.sharding_hash != present.sharding_hash:
        other.append(f"shardingHash is {present.sharding_hash}, not {pinned.sharding_hash}")
    return "; ".join(new + other)
