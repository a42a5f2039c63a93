"""Stored messages as Arrow rows, for the reader and the export of dead-letter topics.

The columns of the row contract come first, so that rows can be sent again. `system_properties` has
the properties that RocketMQ reserves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import pyarrow as pa

from rocket_sink.message_rules import RESERVED_PROPERTIES
from rocket_sink.wire.columns.properties import EVENT_TIME_PROPERTY
from rocket_sink.wire.properties import KEYS, SHARDING_KEY, TAGS, UNIQ_KEY, split_keys
from rocket_sink.wire.stored import StoredMessage

_MILLIS: Final = pa.timestamp("ms", tz="UTC")
_TIME: Final = pa.timestamp("us", tz="UTC")
_MAP: Final = pa.map_(pa.string(), pa.string())

STORED_SCHEMA: Final = pa.schema(
    [
        pa.field("topic", pa.string()),
        pa.field("body", pa.binary()),
        pa.field("tags", pa.string()),
        pa.field("keys", pa.list_(pa.string())),
        pa.field("sharding_key", pa.string()),
        pa.field("properties", _MAP),
        pa.field("flag", pa.int64()),
        pa.field("message_id", pa.string()),
        pa.field("event_time", _TIME),
        pa.field("broker_name", pa.string()),
        pa.field("queue_id", pa.int64()),
        pa.field("queue_offset", pa.int64()),
        pa.field("store_timestamp", _TIME),
        pa.field("born_timestamp", _TIME),
        pa.field("offset_message_id", pa.string()),
        pa.field("reconsume_times", pa.int32()),
        pa.field("system_properties", _MAP),
    ]
)
STORED_DDL: Final = (
    "topic STRING, body BINARY, tags STRING, keys ARRAY<STRING>, sharding_key STRING, "
    "properties MAP<STRING,STRING>, flag BIGINT, message_id STRING, event_time TIMESTAMP, "
    "broker_name STRING, queue_id BIGINT, queue_offset BIGINT, store_timestamp TIMESTAMP, "
    "born_timestamp TIMESTAMP, offset_message_id STRING, reconsume_times INT, "
    "system_properties MAP<STRING,STRING>"
)
_FIRST_MS: Final = -62_135_596_800_000
_LAST_MS: Final = 253_402_300_799_999
"""The last millisecond of the year 9999. Spark's TIMESTAMP holds the years 1 to 9999."""
_FIELDS: Final = frozenset({KEYS, TAGS, UNIQ_KEY, SHARDING_KEY})
"""Properties that have columns of their own."""


def stored_batch(messages: Sequence[tuple[str, StoredMessage]]) -> pa.RecordBatch:
    """Return (broker name, message) pairs as rows of STORED_SCHEMA."""
    rows = [_row(broker_name, message) for broker_name, message in messages]
    arrays = [
        _array([row[field.name] for row in rows], field.type) for field in STORED_SCHEMA
    ]  # fmt: skip
    return pa.RecordBatch.from_arrays(arrays, schema=STORED_SCHEMA)


def user_properties(properties: Mapping[str, str]) -> dict[str, str]:
    """Return the properties that are neither reserved nor a readable event time."""
    return {
        name: value
        for name, value in properties.items()
        if name not in RESERVED_PROPERTIES
        and (name != EVENT_TIME_PROPERTY or _event_time(properties) is None)
    }


def _row(broker_name: str, message: StoredMessage) -> dict[str, Any]:
    properties = message.properties
    system = {
        name: value
        for name, value in properties.items()
        if name in RESERVED_PROPERTIES and name not in _FIELDS
    }
    return {
        "topic": message.topic,
        "body": message.body,
        "tags": properties.get(TAGS),
        "keys": list(split_keys(properties)) or None,
        "sharding_key": properties.get(SHARDING_KEY),
        "properties": list(user_properties(properties).items()) or None,
        "flag": message.flag,
        "message_id": properties.get(UNIQ_KEY),
        "event_time": _event_time(properties),
        "broker_name": broker_name,
        "queue_id": message.queue_id,
        "queue_offset": message.queue_offset,
        "store_timestamp": message.store_ms,
        "born_timestamp": message.born_ms,
        "offset_message_id": message.offset_message_id,
        "reconsume_times": message.reconsume_times,
        "system_properties": list(system.items()) or None,
    }


def _array(values: Iterable[Any], kind: pa.DataType) -> pa.Array:
    if pa.types.is_timestamp(kind):
        return pa.array(values, pa.int64()).cast(_MILLIS).cast(kind)
    return pa.array(values, kind)


def _event_time(properties: Mapping[str, str]) -> int | None:
    """Return the event time in ms; None if the property is missing, or is no time."""
    try:
        ms = int(properties[EVENT_TIME_PROPERTY])
    except (KeyError, ValueError):
        return None
    return ms if _FIRST_MS <= ms <= _LAST_MS else None
