"""Stored messages as Arrow rows, for the reader and exports of dead-letter topics. The contract's
columns come first, so that rows can be sent again. `system_properties` has RocketMQ's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import pyarrow as pa

from rocket_sink.message_rules import RESERVED_PROPERTIES
from rocket_sink.wire.columns.properties import EVENT_TIME_PROPERTY
from rocket_sink.wire.properties import KEYS, SHARDING_KEY, TAGS, UNIQ_KEY, split_keys
from rocket_sink.wire.stored import StoredMessage

_TYPES: Final = {
    "BIGINT": pa.int64(),
    "BINARY": pa.binary(),
    "INT": pa.int32(),
    "STRING": pa.string(),
    "TIMESTAMP": pa.timestamp("us", tz="UTC"),
    "ARRAY<STRING>": pa.list_(pa.string()),
    "MAP<STRING,STRING>": pa.map_(pa.string(), pa.string()),
}

STORED_DDL: Final = (
    "topic STRING, body BINARY, tags STRING, keys ARRAY<STRING>, sharding_key STRING, "
    "properties MAP<STRING,STRING>, flag BIGINT, message_id STRING, event_time TIMESTAMP, "
    "broker_name STRING, queue_id BIGINT, queue_offset BIGINT, store_timestamp TIMESTAMP, "
    "born_timestamp TIMESTAMP, offset_message_id STRING, reconsume_times INT, "
    "system_properties MAP<STRING,STRING>"
)
STORED_SCHEMA: Final = pa.schema(
    (name, _TYPES[kind]) for name, kind in map(str.split, STORED_DDL.split(", "))
)
_FIRST_MS: Final = -62_135_596_800_000
_LAST_MS: Final = 253_402_300_799_999
"""The last millisecond of the year 9999. Spark's TIMESTAMP holds the years 1 to 9999."""
_FIELDS: Final = frozenset({KEYS, TAGS, UNIQ_KEY, SHARDING_KEY})
"""Properties that have columns of their own."""


def stored_batch(messages: Sequence[tuple[str, StoredMessage]]) -> pa.RecordBatch:
    """Return (broker name, message) pairs as rows of STORED_SCHEMA."""
    rows = [_row(broker_name, message) for broker_name, message in messages]
    columns = zip(*rows, strict=True) if rows else [()] * len(STORED_SCHEMA)
    arrays = map(pa.array, columns, STORED_SCHEMA.types)
    return pa.RecordBatch.from_arrays(list(arrays), schema=STORED_SCHEMA)


def _row(broker_name: str, message: StoredMessage) -> tuple[Any, ...]:
    """Return the values in the order of STORED_SCHEMA."""
    properties = message.properties
    event_us = _event_time(properties)
    user, system = [], []
    for item in properties.items():
        name = item[0]
        if name in RESERVED_PROPERTIES:
            if name not in _FIELDS:
                system.append(item)
        elif event_us is None or name != EVENT_TIME_PROPERTY:
            user.append(item)
    return (
        message.topic,
        message.body,
        properties.get(TAGS),
        list(split_keys(properties)) or None,
        properties.get(SHARDING_KEY),
        user or None,
        message.flag,
        properties.get(UNIQ_KEY),
        event_us,
        broker_name,
        message.queue_id,
        message.queue_offset,
        _time_us(message.store_ms),
        _time_us(message.born_ms),
        message.offset_message_id,
        message.reconsume_times,
        system or None,
    )


def _event_time(properties: Mapping[str, str]) -> int | None:
    """Return the event time in microseconds; None if the property is missing, or is no time."""
    try:
        return _time_us(int(properties[EVENT_TIME_PROPERTY]))
    except (KeyError, ValueError):
        return None


def _time_us(ms: int) -> int | None:
    """Return a time in microseconds; None if Spark has no such time (producers choose it)."""
    return ms * 1000 if _FIRST_MS <= ms <= _LAST_MS else None
