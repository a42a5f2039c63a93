"""A topic's route in name server answers (TopicRouteData), decoded strictly and within limits.

Counts are limited, because Java's client runs out of memory if a broken name server claims two
billion queues. Unprintable names are refused: names appear in logs, ledgers and terminals."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from rocket_sink.errors import RemoteProtocolError
from rocket_sink.text import clean
from rocket_sink.wire.codes import PermName
from rocket_sink.wire.headers import (
    INT32_MAX,
    INT32_MIN,
    INT64_MAX,
    Limits,
    dump_json,
    load_json,
    quote_numeric_keys,
)

NAME_MAX_CHARACTERS: Final = 255
"""Longest name of a broker, cluster or scope. Java has no limit. By default a broker has its host's
name (BrokerIdentity), of at most 255 characters."""


def checked_name(what: str, name: str) -> str:
    """Return the name; raise RemoteProtocolError if it is too long or not printable."""
    if len(name) > NAME_MAX_CHARACTERS:
        raise RemoteProtocolError(
            f"{what} {clean(name, 40)!r} has {len(name)} characters; the limit is "
            f"{NAME_MAX_CHARACTERS}"
        )
    return checked_text(what, name)


def checked_text(what: str, text: str) -> str:
    """Return the text; raise RemoteProtocolError if it is not printable."""
    if not text.isprintable():
        raise RemoteProtocolError(
            f"the name server sends a {what} with characters that cannot be printed: "
            f"{clean(text, 80)}; look for a broker that should not be there (mqadmin clusterList)"
        )
    return text


@dataclass(frozen=True)
class QueueData:
    """The numbers of read and write queues of a topic on one broker."""

    broker_name: str
    read: int
    write: int
    perm: int = PermName.READ | PermName.WRITE

    @property
    def writable(self) -> bool:
        return bool(self.perm & PermName.WRITE)


@dataclass(frozen=True)
class BrokerData:
    """A broker's name and addresses: {broker id: address of the master (0) or a slave}.

    `registered` has the addresses that the broker registered, if `addressMap` may have changed
    them in `addresses`."""

    cluster: str
    name: str
    addresses: Mapping[int, str] = field(default_factory=dict)
    registered: Mapping[int, str] = field(default_factory=dict)

    @property
    def master(self) -> str | None:
        return self.addresses.get(0)  # MixAll.MASTER_ID


@dataclass(frozen=True)
class QueueMapping:
    """The queues of a static topic on one broker (TopicQueueMappingInfo). `queue_ids`: {the topic's
    queue number: the broker's queue number}."""

    broker_name: str
    total_queues: int
    epoch: int
    scope: str = "__global__"
    queue_ids: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class TopicRoute:
    """A topic's queues and brokers. Only static topics have `mappings` (by broker name)."""

    queues: tuple[QueueData, ...] = ()
    brokers: tuple[BrokerData, ...] = ()
    order_topic_conf: str | None = None
    mappings: Mapping[str, QueueMapping] | None = None


def broker_addresses(brokers: Mapping[str, Mapping[int, str]]) -> set[tuple[str, str]]:
    """Return (name, address) of each broker. Brokers of two clusters may share a name."""
    return {(name, address) for name in brokers for address in brokers[name].values()}


def decode_route(body: bytes | memoryview | None) -> TopicRoute:
    """Decode the route in the body of a GET_ROUTEINFO_BY_TOPIC answer. Raise RemoteProtocolError if
    the body is not a route, or exceeds a limit."""
    data = bytes(body or b"")
    if not data:
        raise RemoteProtocolError("the route answer has no body")
    if len(data) > Limits.ROUTE_BYTES:
        raise RemoteProtocolError(
            f"a route of {len(data)} bytes; the limit is {Limits.ROUTE_BYTES}"
        )
    value = load_json(quote_numeric_keys(data), "the route")
    if not isinstance(value, dict):
        raise RemoteProtocolError("the route is no JSON object")
    brokers = _list(value, "brokerDatas", Limits.ROUTE_BROKERS)
    queues = tuple(_queue_data(item) for item in _list(value, "queueDatas", Limits.ROUTE_BROKERS))
    for count in (sum(data.write for data in queues), sum(data.read for data in queues)):
        if count > Limits.ROUTE_QUEUES:
            raise RemoteProtocolError(
                f"the route has {count} queues; the limit is {Limits.ROUTE_QUEUES}"
            )
    mappings = _optional(value, "topicQueueMappingByBroker", dict)
    return TopicRoute(
        queues,
        tuple(_broker_data(item) for item in brokers),
        checked_text("orderTopicConf", _optional(value, "orderTopicConf", str) or "") or None,
        None
        if mappings is None
        else {checked_name("bname", name): _mapping(name, item) for name, item in mappings.items()},
    )


def _queue_data(item: Any) -> QueueData:
    return QueueData(
        checked_name("brokerName", _required_value(item, "brokerName", str)),
        _count(item, "readQueueNums"),
        _count(item, "writeQueueNums"),
        _int32(item, "perm", 0),
    )


def _broker_data(item: Any) -> BrokerData:
    addresses = _required_value(item, "brokerAddrs", dict)
    if len(addresses) > Limits.ROUTE_BROKERS:
        raise RemoteProtocolError("a broker has too many addresses in the route")
    return BrokerData(
        checked_name("cluster", _optional(item, "cluster", str) or ""),
        checked_name("brokerName", _required_value(item, "brokerName", str)),
        {_key(number): _address(address) for number, address in addresses.items()},
    )


def _mapping(name: str, item: Any) -> QueueMapping:
    queue_ids = _optional(item, "currIdMap", dict) or {}
    if len(queue_ids) > Limits.ROUTE_QUEUES:
        raise RemoteProtocolError(f"the static topic mapping of {clean(name, 60)} is too large")
    return QueueMapping(
        checked_name("bname", _optional(item, "bname", str) or name),
        _count(item, "totalQueues"),
        _optional(item, "epoch", int) or 0,
        checked_name("scope", _optional(item, "scope", str) or "__global__"),
        {_key(logic): _int32({"": physical}, "") for logic, physical in queue_ids.items()},
    )


def _list(value: dict[str, Any], name: str, limit: int) -> list[Any]:
    items: list[Any] = _optional(value, name, list) or []
    if len(items) > limit:
        raise RemoteProtocolError(f"the route's {name} has {len(items)} entries; limit {limit}")
    return items


def _optional(item: Any, name: str, kind: type) -> Any:
    if not isinstance(item, dict):
        raise RemoteProtocolError(f"an entry of the route is no JSON object with the field {name}")
    value = item.get(name)
    if value is None or (isinstance(value, kind) and value is not True):
        return value
    raise RemoteProtocolError(
        f"the route's {name} is not of type {kind.__name__}: {clean(repr(value), 40)}"
    )


def _required_value(item: Any, name: str, kind: type) -> Any:
    value = _optional(item, name, kind)
    if value is None or value == "":
        raise RemoteProtocolError(f"an entry of the route has no {name}")
    return value


def _int32(item: Any, name: str, default: int | None = None) -> int:
    value = _optional(item, name, int)
    if value is None:
        value = default
    if type(value) is not int or not INT32_MIN <= value <= INT32_MAX:
        raise RemoteProtocolError(f"the route's {name} is no 32-bit integer")
    return value


def _count(item: Any, name: str) -> int:
    value = _int32(item, name)
    if not 0 <= value <= Limits.ROUTE_QUEUES:
        raise RemoteProtocolError(
            f"the route's {name} is {value}; 0 to {Limits.ROUTE_QUEUES} are possible"
        )
    return value


def _key(text: str) -> int:
    if len(text) <= 19 and text.isascii() and text.isdigit() and int(text) <= INT64_MAX:
        return int(text)
    raise RemoteProtocolError(f"{clean(text, 40)!r} is no number of a broker or queue")


def _address(address: Any) -> str:
    if not isinstance(address, str) or not address or len(address) > 300:
        raise RemoteProtocolError("a broker's address in the route is no text")
    return checked_text("broker address", address)


def encode_route(route: TopicRoute, *, legacy_keys: bool = False) -> bytes:
    """Return the body of a fake name server's answer; `legacy_keys`: bare integer keys."""
    value: dict[str, Any] = {
        "brokerDatas": [
            {
                "brokerAddrs": {str(key): address for key, address in broker.addresses.items()},
                "brokerName": broker.name,
                "cluster": broker.cluster,
            }
            for broker in route.brokers
        ],
        "filterServerTable": {},
        "queueDatas": [
            {
                "brokerName": queue.broker_name,
                "perm": queue.perm,
                "readQueueNums": queue.read,
                "writeQueueNums": queue.write,
            }
            for queue in route.queues
        ],
    }
    if route.order_topic_conf is not None:
        value["orderTopicConf"] = route.order_topic_conf
    if route.mappings is not None:
        value["topicQueueMappingByBroker"] = {
            name: {
                "bname": mapping.broker_name,
                "currIdMap": {str(key): number for key, number in mapping.queue_ids.items()},
                "epoch": mapping.epoch,
                "scope": mapping.scope,
                "totalQueues": mapping.total_queues,
            }
            for name, mapping in route.mappings.items()
        }
    text = dump_json(value)
    if legacy_keys:
        # Remove the quotes of integer keys; only maps of addresses and queues have such keys.
        text = re.sub(r'"(\d+)":', r"\1:", text)
    return text.encode()
