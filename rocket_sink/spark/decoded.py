"""Encoded messages back to the row contract's columns, for dead letters only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import pyarrow as pa

from rocket_sink.spark.pending import DecodedMessage
from rocket_sink.wire.properties import decode_properties

_COLUMNS: Final = {
    "TAGS": "tags",
    "__SHARDINGKEY": "sharding_key",
    "UNIQ_KEY": "message_id",
    "DELAY": "delay_level",
    "TIMER_DELAY_MS": "delay_ms",
    "TIMER_DELIVER_MS": "delivery_timestamp",
}
_TYPES: Final = {
    "tags": pa.string(),
    "sharding_key": pa.string(),
    "message_id": pa.string(),
    "delay_level": pa.int32(),
    "delay_ms": pa.int64(),
    "delivery_timestamp": pa.int64(),
    "body": pa.binary(),
    "flag": pa.int32(),
    "wait_store": pa.bool_(),
    "keys": pa.list_(pa.string()),
    "properties": pa.map_(pa.string(), pa.string()),
}


def letter_columns(messages: Sequence[DecodedMessage]) -> dict[str, pa.Array]:
    """{column: array} of messages that this process encoded, ready for `dead_letter_rows`."""
    values: dict[str, list[Any]] = {name: [] for name in _TYPES}
    for message in messages:
        row = _row(message)
        for name, column in values.items():
            column.append(row.get(name))
    return {name: pa.array(column, _TYPES[name]) for name, column in values.items()}


def _row(message: DecodedMessage) -> dict[str, Any]:
    given = dict(decode_properties(message.properties))
    row: dict[str, Any] = {"body": message.body, "flag": message.flag}
    for name, column in _COLUMNS.items():
        text = given.pop(name, None)
        if text is not None:
            row[column] = int(text) if pa.types.is_integer(_TYPES[column]) else text
    row["wait_store"] = given.pop("WAIT", "true") == "true"
    keys = given.pop("KEYS", None)
    row["keys"] = keys.split(" ") if keys else None
    row["properties"] = list(given.items()) or None
    return row
