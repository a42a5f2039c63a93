"""Stored messages as Arrow rows, for the reader and exports of dead-letter topics. The contract's
columns come first, so that rows can be sent again. `system_properties` has RocketMQ's own.

`stored_batches` makes rows of the answers to pulls, by columns. `stored_batch` makes rows of
messages; `stored_batches` uses it for messages that are not regular."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rocket_sink.message_rules import RESERVED_PROPERTIES
from rocket_sink.wire.columns.buffers import Int64s, Mask, bytes_of, lengths_of
from rocket_sink.wire.columns.properties import EVENT_TIME_PROPERTY
from rocket_sink.wire.columns.stored import StoredColumns
from rocket_sink.wire.properties import (
    KEY_SEPARATOR,
    KEYS,
    SHARDING_KEY,
    TAGS,
    UNIQ_KEY,
    split_keys,
)
from rocket_sink.wire.stored import StoredMessage, iter_stored, memory_bytes

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
SYSTEM_PROPERTIES: Final = RESERVED_PROPERTIES - {KEYS, TAGS, UNIQ_KEY, SHARDING_KEY}
"""RocketMQ's own properties, except those that have columns of their own."""
_NOT_USERS: Final = RESERVED_PROPERTIES | {EVENT_TIME_PROPERTY}
_MS: Final = "-?[0-9]{1,15}"
"""The texts of event times that columns can read; other times are read one by one."""
_BODY: Final = STORED_SCHEMA.get_field_index("body")
_SINGLE: Final = 2
"""The kind of a message that is decoded apart from the columns; 1 and 0: taken, or left out."""
_BATCH_ROWS: Final = 2000
_BATCH_BYTES: Final = 8 << 20
_FEW: Final = 64
"""If one in so many messages is irregular, all are decoded one by one: each of them would end a
batch, and a batch costs as much time as a hundred messages."""


def stored_batches(
    answers: Sequence[bytes],
    broker_name: str,
    takes: Callable[[Any, Any], Any],
    on_single: Callable[[StoredMessage], None],
) -> Iterator[pa.RecordBatch]:
    """Yield the messages in the bodies of a queue's pull answers, in their order, as rows of
    STORED_SCHEMA.

    Args:
        answers: the bodies of the answers; each ends with a whole message.
        takes: says by queue offset and store time (ms) whether to take a message; it gets integers,
            or arrays of integers.
        on_single: is called for each message that is decoded apart from the columns.

    Raises: like `iter_stored`.
    """
    data = b"".join(answers)
    stored = StoredColumns.of(data)
    if not np.isin(np.cumsum([len(answer) for answer in answers]), stored.bounds).all():
        # A malformed message, or an answer that ends inside a message: this raises the error.
        for answer in answers:
            yield from _single_batches(answer, broker_name, takes, on_single)
    batch, regular = _columns(stored, broker_name)
    if np.count_nonzero(~regular) * _FEW > len(regular):
        regular[:] = False
    is_taken = takes(stored.fixed["queue_offset"], stored.fixed["store_ms"])
    kinds = np.where(regular, is_taken, _SINGLE)
    edges = np.flatnonzero(np.diff(kinds, prepend=-1, append=-1)).tolist()
    for begin, end in pairwise(edges):
        if kinds[begin] == _SINGLE:
            span = slice(*stored.bounds[[begin, end]].tolist())
            yield from _single_batches(data[span], broker_name, takes, on_single)
        elif kinds[begin]:
            while begin < end:
                bodies, until = stored.bodies(begin, end)
                part = batch.slice(begin, until - begin)
                yield part.set_column(_BODY, STORED_SCHEMA.field(_BODY), bodies)
                begin = until


def _single_batches(
    data: bytes,
    broker_name: str,
    takes: Callable[[int, int], bool],
    on_single: Callable[[StoredMessage], None],
) -> Iterator[pa.RecordBatch]:
    rows: list[tuple[str, StoredMessage]] = []
    size = 0
    for message in iter_stored(data):
        if takes(message.queue_offset, message.store_ms):
            on_single(message)
            rows.append((broker_name, message))
            size += memory_bytes(message)
        if len(rows) >= _BATCH_ROWS or size >= _BATCH_BYTES:
            yield stored_batch(rows)
            rows, size = [], 0
    if rows:
        yield stored_batch(rows)


def _columns(stored: StoredColumns, broker_name: str) -> tuple[pa.RecordBatch, Mask]:
    """Return the rows without their bodies, and whether the row holds its message."""
    fixed, properties, count = stored.fixed, stored.properties, len(stored)
    event_time, is_time = _event_times(properties.texts(EVENT_TIME_PROPERTY))
    arrays = {
        "topic": stored.topics,
        "body": pa.nulls(count, pa.binary()),
        "tags": properties.texts(TAGS),
        "keys": _key_lists(properties.texts(KEYS)),
        "sharding_key": properties.texts(SHARDING_KEY),
        "properties": properties.maps(lambda name: name not in _NOT_USERS),
        "flag": pa.array(fixed["flag"].astype(np.int64)),
        "message_id": properties.texts(UNIQ_KEY),
        "event_time": event_time,
        "broker_name": pa.repeat(broker_name, count),
        "queue_id": pa.array(fixed["queue_id"].astype(np.int64)),
        "queue_offset": pa.array(fixed["queue_offset"].astype(np.int64)),
        "store_timestamp": _times(fixed["store_ms"].astype(np.int64)),
        "born_timestamp": _times(fixed["born_ms"].astype(np.int64)),
        "offset_message_id": stored.offset_message_ids(),
        "reconsume_times": pa.array(fixed["reconsume_times"].astype(np.int32)),
        "system_properties": properties.maps(SYSTEM_PROPERTIES.__contains__),
    }
    return pa.RecordBatch.from_pydict(arrays, STORED_SCHEMA), stored.regular & is_time


def _times(ms: Int64s) -> pa.Array:
    """Return times of Spark; null where Spark has no such time."""
    is_none = (ms < _FIRST_MS) | (ms > _LAST_MS)
    return pa.array(ms * 1000, mask=is_none).cast(STORED_SCHEMA.field("event_time").type)


def _event_times(texts: pa.Array) -> tuple[pa.Array, Mask]:
    """Return the event times, and whether columns can read each text."""
    is_read = np.ones(len(texts), np.bool_)
    if texts.null_count == len(texts):
        return pa.nulls(len(texts), STORED_SCHEMA.field("event_time").type), is_read
    is_number = pc.match_substring_regex(texts, f"^{_MS}$")
    ms = pc.if_else(is_number, texts, pa.scalar(None, pa.string())).cast(pa.int64())
    times = _times(ms.fill_null(_LAST_MS + 1).to_numpy(zero_copy_only=False))
    is_read = pc.equal(times.is_valid(), texts.is_valid()).to_numpy(zero_copy_only=False)
    return times, is_read


def _key_lists(texts: pa.Array) -> pa.Array:
    """Return the index keys as lists (`split_keys`), null where a message has none."""
    if ord(KEY_SEPARATOR) not in bytes_of(texts):
        # No text has a separator, so each text is one key.
        bounds = np.concatenate(([0], np.cumsum(texts.is_valid().to_numpy(zero_copy_only=False))))
        keys = texts.drop_null()
    else:
        lists = pc.split_pattern(texts, KEY_SEPARATOR)
        keys = lists.flatten()
        is_key = lengths_of(keys) > 0
        bounds = np.concatenate(([0], np.cumsum(is_key)))[lists.offsets.to_numpy()]
        keys = keys.filter(pa.array(is_key))
    is_none = np.append(np.diff(bounds) == 0, [False])
    return pa.ListArray.from_arrays(pa.array(bounds.astype(np.int32), mask=is_none), keys)


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
    not_users = RESERVED_PROPERTIES if event_us is None else _NOT_USERS
    user = [item for item in properties.items() if item[0] not in not_users]
    system = [item for item in properties.items() if item[0] in SYSTEM_PROPERTIES]
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
