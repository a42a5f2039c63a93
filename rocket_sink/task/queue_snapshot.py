"""The queue list that an ordered query keeps, even if the topic's route changes.

A key's queue is an index into the topic's list of queues. A dead broker leaves the route at once,
and new queues join it. If the list changed with the route, keys would move unnoticed. So the query
pins the list of its first task: in memory for the task, and in a note beside the ledger (of the
kind `queues`) for other tasks and epochs. All batch writes of an `appId` share a note, as the
epochs of a query do. Without a ledger each task pins the list of its own route.

If a pinned broker is missing, its keys wait (strict order, `orderWaitMs`), or move to other brokers
and are counted (`best_effort`). If there are new queues, another number of queues on a present
broker, or another `shardingHash`, `onRouteChange` decides: `allow` pins the present list. Otherwise
strict order fails the task, and `best_effort` keeps the pinned list, with a warning. A static
topic's queues are on a logical broker, so a move to another real broker is no change."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Final, NamedTuple
from urllib.parse import quote

from rocket_sink.errors import DeliveryError, LedgerError
from rocket_sink.ledger.notes import NoteStore
from rocket_sink.ledger.path import failing, folder_part, resolve_path
from rocket_sink.net import log
from rocket_sink.options import SinkOptions
from rocket_sink.routing.topic_publish_info import QueueList, TopicPublishInfo
from rocket_sink.text import UUID

_KIND: Final = "queues"
_LOG: Final = log.logger(__name__)
_WRITE: Final = re.compile(rf"/{UUID}\Z")
"""The end of the query id of a batch write with an `appId`: `<appId>/<id of the write>`."""

_STAYS: Final = (
    "ordering=best_effort: the queues of the topic %s changed under the query (%s); its keys stay "
    "in their %d queues. To use the present queues, let the consumers drain the topic, and set "
    "onRouteChange=allow"
)


class Pinned(NamedTuple):
    """A pinned list of a topic's queues, and the `shardingHash` that it was pinned with."""

    queues: QueueList
    sharding_hash: str


Queues = Callable[[TopicPublishInfo], QueueList]
"""Returns a topic's queues for ordered rows; the argument is the topic's present route."""


class QueueSnapshots:
    """Pinned queue lists of one task. All methods raise a LedgerError if the note cannot be read or
    written.

    Args:
        shares: share the lists with other tasks of the query, by notes, if there is a ledger.
    """

    def __init__(self, options: SinkOptions, query_id: str, *, shares: bool = True) -> None:
        self._allow = options.on_route_change == "allow"
        self._ordering = options.ordering
        self._hash = options.sharding_hash
        self._place = resolve_path(options.ledger) if options.ledger and shares else None
        self._folder = _folder(query_id)
        self._pinned: dict[str, Pinned] = {}
        self._warned: set[str] = set()

    def queues(self, info: TopicPublishInfo) -> QueueList:
        """Return the pinned list of the topic's queues. If the queues have changed, pin the present
        list first with `onRouteChange=allow`. Otherwise raise a DeliveryError, or with
        `best_effort` order and the same hash warn once."""
        topic = info.topic
        pinned = self._pinned[topic] = self._pinned.get(topic) or self.pin(info)
        present = Pinned(queues_of(info), self._hash)
        change = _change(pinned, present)
        if not change:
            return pinned.queues
        stays = self._ordering == "best_effort" and pinned.sharding_hash == self._hash
        if stays and not self._allow:
            if topic not in self._warned:
                _LOG.warning(_STAYS, topic, change, len(pinned.queues))
            self._warned.add(topic)
            return pinned.queues
        if not self._allow:
            raise DeliveryError(
                f"ordering={self._ordering}: the queues of the topic {topic!r} changed under the "
                f"query ({change}), so keys would move to other queues and lose their order. "
                "Restore the former queues; or let the consumers drain the topic, and set "
                "onRouteChange=allow"
            )
        if self._place is not None:
            NoteStore(self._place, _KIND).write(self._name(topic), self._note(info))
        self._pinned[topic] = present
        return present.queues

    def load(self, topic: str) -> Pinned | None:
        """Return the topic's queues from the ledger; None if no task has pinned any."""
        if self._place is None:
            return None
        store, name = NoteStore(self._place, _KIND), self._name(topic)
        with self._reading(topic, store):
            note = store.read(name)
            return None if note is None else _pinned_of(topic, note)

    def pin(self, info: TopicPublishInfo) -> Pinned:
        """Return the topic's queues from the ledger; pin the present queues if it has none. If
        several tasks pin at once, the first write counts."""
        if self._place is None:
            return Pinned(queues_of(info), self._hash)
        store = NoteStore(self._place, _KIND)
        with self._reading(info.topic, store):
            note, _ = store.agree(self._name(info.topic), self._note(info))
            return _pinned_of(info.topic, note)

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
        return f"{self._folder}/{quote(topic, safe='')}"


def forget_queues(options: SinkOptions, query_id: str, counts: Mapping[str, Any]) -> None:
    """Remove the lists of a batch write that nobody needs any more: a write without an `appId` that
    left no dead letters (`counts`; empty if it failed and left no rows in the ledger), and that
    cannot be repeated under a `batchId`. If that fails, only warn, because the rows are sent."""
    can_go_on = options.batch_id and not counts
    is_needed = options.app_id or can_go_on or counts.get("dead") or counts.get("unknown")
    if is_needed or not options.ledger or options.ordering == "none":
        return
    try:
        NoteStore(resolve_path(options.ledger), _KIND).remove_folder(_folder(query_id))
    except (LedgerError, OSError) as error:
        _LOG.warning("cannot remove the pinned queues of the write %s: %s", query_id, error)


def _folder(query_id: str) -> str:
    return folder_part(_WRITE.sub("", query_id))


def _pinned_of(topic: str, note: Any) -> Pinned:
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
