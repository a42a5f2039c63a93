"""The queue list that a strictly ordered query goes by, whatever the route says today.

A key's queue is an index into the topic's list of queues. A dead broker leaves the route at once,
which makes the list shorter, and every key would move without a word. So the list of the first
task is kept: for the task in memory, for the query's other tasks and epochs in a small file beside
the ledger (`<ledger>/_pins`; Delta looks into no folder whose name starts with `_`). Without a
ledger each task goes by what it finds.

A pinned broker that is missing is an outage: its keys wait (`orderWaitMs`). New queues, or another
number of them on a broker that is there, are a change: `onRouteChange` decides.
"""

from __future__ import annotations

import json
from dataclasses import replace
from types import MappingProxyType
from urllib.parse import quote

from pyarrow import fs

from rocket_sink.errors import DeliveryError, LedgerError
from rocket_sink.ledger.place import Place, locate, path_part
from rocket_sink.ledger.small_file import write_bytes
from rocket_sink.options import SinkOptions
from rocket_sink.routing.publish import PublishInfo, QueueList

Spans = tuple[tuple[str, int], ...]


class RoutePins:
    """Pinned queue lists of one task, shared with the query's other tasks where there is a ledger.

    Args:
        query_id: names the query, or the batch.
    """

    def __init__(self, options: SinkOptions, query_id: str) -> None:
        self._allow = options.on_route_change == "allow"
        self._place = locate(options.ledger) if options.ledger else None
        self._folder = f"q-{path_part(query_id)}"
        self._pinned: dict[str, QueueList] = {}

    def queues(self, info: PublishInfo) -> QueueList:
        """The topic's queues as this query goes by them.

        Raises:
            DeliveryError: the topic's queues changed and `onRouteChange=fail`.
        """
        pinned = self._pinned.get(info.topic) or self._load(info.topic)
        spans = _spans(info)
        if pinned is None:
            # Tasks start together and each may see another route: the first one to write decides.
            pinned = self._pin(info.topic, spans, replace=False) or self._load(info.topic)
            assert pinned is not None
        self._pinned[info.topic] = pinned
        change = _change(pinned.spans, spans)
        if not change:
            return pinned
        if not self._allow:
            raise DeliveryError(_changed(info.topic, change))
        self._pin(info.topic, spans, replace=True)
        self._pinned[info.topic] = QueueList(info.topic, spans)
        return self._pinned[info.topic]

    def _pin(self, topic: str, spans: Spans, *, replace: bool) -> QueueList | None:
        """Write the list down; None when another task's is there and stays."""
        queues = QueueList(topic, spans)
        if self._place is None:
            return queues
        path = self._path(self._place, topic)
        filesystem = self._place.filesystem()
        filesystem.create_dir(path.rpartition("/")[0], recursive=True)
        data = json.dumps({"topic": topic, "queues": spans}).encode()
        local = self._place.is_local
        written = write_bytes(filesystem, path, data, is_local=local, replace=replace)
        return queues if written else None

    def _load(self, topic: str) -> QueueList | None:
        if self._place is None:
            return None
        path = self._path(self._place, topic)
        filesystem = self._place.filesystem()
        if filesystem.get_file_info(path).type != fs.FileType.File:
            return None
        try:
            with filesystem.open_input_stream(path) as file:
                spans = json.loads(file.read())["queues"]
            return QueueList(topic, [(str(name), int(count)) for name, count in spans])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise LedgerError(
                f"the pinned queues of the topic {topic!r} cannot be read: {error}. Delete "
                f"{path} if the topic's queues are what they were",
                path=path,
            ) from error

    def _path(self, place: Place, topic: str) -> str:
        return f"{place.root}/_pins/{self._folder}/{quote(topic, safe='')}.json"


def _changed(topic: str, change: str) -> str:
    return (
        f"ordering=strict: the queues of the topic {topic!r} changed under the query ({change}), "
        "so keys would move to other queues and overtake themselves. Set the old number of queues "
        "again; or let the consumers drain the topic, and set onRouteChange=allow"
    )


def with_queues(info: PublishInfo, queues: QueueList) -> PublishInfo:
    """The route with other queues: those of a missing broker are in it and cannot be reached."""
    homes: dict[str, range] = {}
    start = 0
    for name, count in queues.spans:
        homes[name] = range(start, start + count)
        start += count
    return replace(info, queues=queues, homes=MappingProxyType(homes))


def _spans(info: PublishInfo) -> Spans:
    return tuple((name, len(indices)) for name, indices in info.homes.items())


def _change(pinned: Spans, now: Spans) -> str:
    """What is new; empty when brokers are merely missing."""
    old, found = dict(pinned), dict(now)
    new = [f"{name} has {count} queues" for name, count in now if name not in old]
    other = [
        f"{name} has {found[name]} queues, not {count}"
        for name, count in pinned
        if name in found and found[name] != count
    ]
    return "; ".join(new + other)
