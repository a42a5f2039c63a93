"""Wire property strings (name 0x01 value 0x02, and so on) of columns of messages.

Source: MessageDecoder.messageProperties2String. The bytes equal those of
`rocket_sink.wire.properties`. `rocket_sink.rows.checks` has refused separators inside values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rocket_sink.wire.columns.buffers import (
    Int64s,
    Piece,
    as_binary,
    binary_array,
    is_text,
    join_pieces,
    lengths_of,
    offsets_of,
    uniform,
)
from rocket_sink.wire.properties import (
    DELAY,
    KEYS,
    LITE_TOPIC,
    PRIORITY,
    SHARDING_KEY,
    TAGS,
    TIMER_DELAY_MS,
    TIMER_DELIVER_MS,
    UNIQ_KEY,
    WAIT,
)

Column: TypeAlias = "pa.Array | None"

EVENT_TIME_PROPERTY: Final = "__event_time_ms"
"""The user property for a row's event time. The message's birth time is not used for it, because
that would change the message's retention (FLINK-31006)."""
_WAIT: Final = {True: b"WAIT\x01true\x02", False: b"WAIT\x01false\x02"}

_FIELDS: Final = {
    KEYS: "keys",
    TAGS: "tags",
    UNIQ_KEY: "message_ids",
    WAIT: "wait_store",
    DELAY: "delay_level",
    TIMER_DELAY_MS: "delay_ms",
    TIMER_DELIVER_MS: "delivery_timestamp_ms",
    SHARDING_KEY: "sharding_key",
    PRIORITY: "priority",
    LITE_TOPIC: "lite_topic",
    "": "properties",
    EVENT_TIME_PROPERTY: "event_time_ms",
}
"""{property: column} in the order of `properties_of`; "" stands for all user properties."""


@dataclass(frozen=True, eq=False)
class PropertyPieces:
    """The property strings of n rows in pieces, and the size of each string. `encode_columns` takes
    the pieces as they are, which saves a copy of each string."""

    pieces: tuple[Piece, ...]
    sizes: Int64s

    def strings(self) -> pa.Array:
        """Return the property strings (binary, without nulls)."""
        return join_pieces(self.pieces, len(self.sizes))


def property_pieces(count: int, **columns: Column) -> PropertyPieces:
    """Return the property strings of `count` messages.

    Args:
        message_ids, tags, sharding_key, lite_topic: string arrays; a null leaves the property out.
        keys: a string array, or a list of strings per row, joined with one blank.
        properties: map<string, string> without null maps or values; user properties.
        wait_store: booleans; null, or no array, is true.
        delay_level, delay_ms, delivery_timestamp_ms, priority: integers; null or level 0: left out.
        event_time_ms: integers, written as the user property `__event_time_ms`.
    """
    pieces: list[Piece] = []
    sizes = np.zeros(count, np.int64)
    for name, column in _FIELDS.items():
        if columns.get(column) is not None or name == WAIT:
            field_pieces, bytes_each = _field(name, columns.get(column))
            pieces += field_pieces
            sizes += bytes_each
    return PropertyPieces(tuple(pieces), sizes)


def property_strings(properties: pa.MapArray) -> pa.Array:
    """Return the user properties of each row as one binary value, in the map's order. The entries
    of all rows are joined at once; a row's string is a slice of the result."""
    names, values, rows = entries_of(properties)
    entries = join_pieces([names, b"\x01", values, b"\x02"], len(names))
    return binary_array(offsets_of(entries)[rows], entries.buffers()[2] or pa.py_buffer(b""))


def entries_of(properties: pa.MapArray) -> tuple[pa.Array, pa.Array, Int64s]:
    """Return (names, values, offsets); row r has the entries offsets[r] to offsets[r + 1]."""
    rows = properties.offsets.to_numpy().astype(np.int64)
    first, count = int(rows[0]), int(rows[-1] - rows[0])
    return (
        properties.keys.slice(first, count),
        properties.items.slice(first, count),
        rows - first,
    )


def _field(name: str, column: Column) -> tuple[list[Piece], Int64s | int]:
    """Return the pieces of a property, and its size in bytes in each row."""
    if name == WAIT:
        if column is None or not pc.any(pc.invert(column)).as_py():
            return [_WAIT[True]], len(_WAIT[True])
        wait = pc.if_else(column.fill_null(True), *(pa.scalar(_WAIT[w]) for w in (True, False)))
        return [wait], lengths_of(wait)
    if not name:
        strings = property_strings(column)
        return [strings], lengths_of(strings)
    before, after = f"{name}\x01".encode(), b"\x02"
    text = as_binary(_text(name, column))
    if text.null_count:
        strings = join_pieces([before, text, after], len(text), "emit_null")
        return [strings], lengths_of(strings)
    return [before, uniform(text), after], lengths_of(text) + (len(before) + len(after))


def _text(name: str, column: pa.Array) -> pa.Array:
    if is_text(column.type):
        return column
    if name == KEYS:
        return joined_keys(column)
    if name == DELAY:
        column = pc.if_else(pc.equal(column, 0), pa.scalar(None, column.type), column)
    return column.cast(pa.string())


def map_sizes(properties: pa.MapArray) -> Int64s:
    """Return the length in bytes of each string of `property_strings`."""
    names, values, rows = entries_of(properties)
    ends = np.concatenate(([0], np.cumsum(lengths_of(names) + lengths_of(values) + 2)))
    sizes: Int64s = np.diff(ends[rows])
    return sizes


def joined_keys(keys: pa.Array) -> pa.Array:
    """Join the keys of each row by blanks; an empty or null list gives null."""
    joined = pc.binary_join(keys, " ")
    empty = pc.equal(pc.list_value_length(keys), 0)
    return pc.if_else(empty, pa.scalar(None, joined.type), joined)
