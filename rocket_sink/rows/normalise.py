"""Conversion of record batches to `RowBatch`es, by casts of whole columns.

All forms that Spark and Arrow users send are converted: strings, large strings, views,
dictionaries, slices, chunks, lists of any form. No row is refused: Spark's strings may have bytes
that are not UTF-8, and `rocket_sink.rows.checks` finds these."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rocket_sink.errors import ColumnError
from rocket_sink.message_rules import TAG_BLANKS
from rocket_sink.rows.checks import TRACE_CONTEXT, empty, only_printable_ascii
from rocket_sink.rows.contract import ColumnPlan
from rocket_sink.rows.row_batch import RowBatch
from rocket_sink.wire.columns.buffers import INT32_MAX, Int64s, as_binary, lengths_of, nulls_of
from rocket_sink.wire.columns.properties import entries_of

_PER_MS: Final = {"ms": 1, "us": 1_000, "ns": 1_000_000}
_MOST_S: Final = (1 << 63) // 1000 - 1


def normalise(batch: pa.RecordBatch | pa.Table, plan: ColumnPlan) -> RowBatch:
    """Return the rows of `batch` in the standard form. Raises ColumnError if the batch lacks a
    column of the plan, or has it twice."""
    columns = {name: _plain(_column(batch, source, plan)) for name, source in plan.sources}
    body = columns.pop("body")
    topic = plan.topic or _text(columns.pop("topic"))
    fields = {
        _FIELD_NAMES.get(name, name): _CASTS.get(name, _text)(array)
        for name, array in columns.items()
        if not _all_null(array) or name == _KEPT
    }
    context = {name: fields[name] for name in TRACE_CONTEXT if fields.get(name) is not None}
    if context:
        fields["properties"] = _with_context(fields.get("properties"), context, len(body))
    if plan.context:
        properties = fields.get("properties")
        missing = _missing_context(properties, plan.context, len(body))
        fields["properties"] = _with_context(properties, missing, len(body))
    return RowBatch(
        body=_body(body),
        topic=topic,
        body_is_text=_is_string(body.type),
        **{
            n: array
            for n, array in fields.items()
            if array is not None and (not _all_null(array) or n == _KEPT)
        },
    )


def _column(
    batch: pa.RecordBatch | pa.Table, source: str, plan: ColumnPlan
) -> pa.Array | pa.ChunkedArray:
    index = batch.schema.get_field_index(source)
    if index >= 0:
        return batch.column(index)
    hint = (
        "option bodyFormat=json packs the frame on the driver: use write_batch or write, or "
        "select a column body with to_json and formats for its times yourself"
        if source == "body" and plan.needs_to_json
        else f"it has {', '.join(map(repr, batch.schema.names))}"
    )
    raise ColumnError(f"the batch has no column {source!r}; {hint}", column=source)


def _plain(array: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Return the column as one array without dictionary, extension or view types."""
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if isinstance(array, pa.DictionaryArray):
        array = array.dictionary_decode()
    if pa.types.is_string_view(array.type):
        small, large = pa.string(), pa.large_string()
    elif pa.types.is_binary_view(array.type) or pa.types.is_fixed_size_binary(array.type):
        small, large = pa.binary(), pa.large_binary()
    else:
        return array
    # `nbytes` of views raises with pyarrow 18.
    return array.cast(large if array.get_total_buffer_size() > INT32_MAX else small)


def _all_null(array: pa.Array) -> bool:
    return bool(array.null_count == len(array))


def _is_string(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _body(array: pa.Array) -> pa.Array:
    return _narrow(array.cast(pa.binary()) if pa.types.is_null(array.type) else as_binary(array))


def _text(array: pa.Array) -> pa.Array:
    return array.cast(pa.string()) if pa.types.is_null(array.type) else _narrow(_plain(array))


def _narrow(array: pa.Array) -> pa.Array:
    """Return the array with 32-bit offsets if they suffice: Arrow's kernels refuse mixed sizes."""
    small = {pa.large_string(): pa.string(), pa.large_binary(): pa.binary()}.get(array.type)
    if small is None or array.nbytes > INT32_MAX:
        return array
    try:
        return array.cast(small)
    except pa.ArrowInvalid:
        # The array is a slice of a longer one, so its offsets do not begin at 0.
        return array.take(np.arange(len(array))).cast(small)


def _tags(array: pa.Array) -> pa.Array | None:
    """Return the tags, trimmed as in `Message`. Empty tags become null; blank tags stay illegal."""
    tags = _text(array)
    none = empty(tags)
    if none.any():
        tags = pc.if_else(pa.array(none), pa.scalar(None, tags.type), tags)
    if only_printable_ascii(tags):
        return tags
    trimmed = pc.ascii_trim(tags, characters=TAG_BLANKS)
    return pc.if_else(pc.equal(pc.binary_length(trimmed), 0), tags, trimmed)


def _keys(array: pa.Array) -> pa.Array | None:
    if _is_string(array.type):
        return _text(array)
    flat = _text(pc.list_flatten(array))
    offsets, kept = _without(flat, nulls_of(flat), _list_offsets(array))
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), kept) if len(kept) else None


def _list_offsets(array: pa.Array) -> Int64s:
    """Return the n + 1 offsets of n lists into `pc.list_flatten(array)`."""
    lengths = pc.list_value_length(array).fill_null(0).to_numpy(zero_copy_only=False)
    return np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))


def _without(
    flat: pa.Array, dropped: np.ndarray[tuple[int], np.dtype[np.bool_]], offsets: Int64s
) -> tuple[Int64s, pa.Array]:
    """Drop items of lists; return the new offsets of the lists, and the other items."""
    if not dropped.any():
        return offsets, flat
    kept = np.concatenate(([0], np.cumsum(~dropped)))
    return kept[offsets], flat.filter(pa.array(~dropped))


def _key_text(keys: pa.Array) -> pa.Array:
    """Return sharding keys as text, decimals with plain digits. Arrow's own cast writes a decimal
    as `BigDecimal.toString` does (0E-10), but a backfill and other producers write all its digits,
    and a key's text chooses its queue."""
    if _is_string(keys.type):
        return _text(keys)
    if not pa.types.is_decimal(keys.type):
        return keys.cast(pa.string())
    scale = max(0, keys.type.scale)
    unscaled = keys.cast(pa.decimal256(76, scale)).view(pa.decimal256(76, 0)).cast(pa.string())
    if not scale:
        return unscaled
    sign = pc.if_else(pc.starts_with(unscaled, "-"), "-", "")
    digits = pc.ascii_lpad(pc.ascii_ltrim(unscaled, "-"), scale + 1, "0")
    integer = pc.utf8_slice_codeunits(digits, 0, -scale)
    fraction = pc.utf8_slice_codeunits(digits, -scale)
    return pc.binary_join_element_wise(sign, integer, ".", fraction, "")


def _integers(array: pa.Array) -> pa.Array:
    return array.cast(pa.int64())


def _millis(array: pa.Array) -> pa.Array:
    """Return times or whole numbers as milliseconds since 1970, rounded down."""
    if not pa.types.is_timestamp(array.type):
        return _integers(array)
    values = array.cast(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False)
    if array.type.unit == "s":
        # Clip seconds whose milliseconds need more than 64 bits; such times are refused later.
        values = np.clip(values, -_MOST_S, _MOST_S) * 1000
    else:
        values = values // _PER_MS[array.type.unit]
    return pa.array(values, pa.int64(), mask=nulls_of(array))


def _properties(array: pa.Array) -> pa.MapArray | None:
    """Return a map without null values. If a row repeats a name, the last value counts."""
    if pa.types.is_map(array.type):
        entry = pa.struct([("key", array.type.key_type), ("value", array.type.item_type)])
        array = array.view(pa.list_(entry))
    names, values = (_entry_text(part) for part in pc.list_flatten(array).flatten())
    offsets = _list_offsets(array)
    dropped = nulls_of(values)
    _, names = _without(names, dropped, offsets)
    offsets, values = _without(values, dropped, offsets)
    if names.null_count:
        names = names.fill_null("")
    if not len(names):
        return None
    offsets, names, values = _last_wins(offsets, names, values)
    return pa.MapArray.from_arrays(pa.array(offsets, pa.int32()), names, values)


def _with_context(
    properties: pa.MapArray | None, context: Mapping[str, pa.Array], count: int
) -> pa.MapArray | None:
    """Add the columns `traceparent` and `tracestate` to the properties, without empty values."""
    names, values, rows = [], [], []
    if properties is not None:
        own_names, own_values, offsets = entries_of(properties)
        names, values = [own_names], [own_values]
        rows = [np.repeat(np.arange(count), np.diff(offsets))]
    for name, column in context.items():
        rows.append(np.flatnonzero(lengths_of(column)))
        names.append(pa.repeat(pa.scalar(name), len(rows[-1])))
        values.append(column.take(pa.array(rows[-1])))
    row_of = np.concatenate(rows)
    if not len(row_of):
        return None
    order = pa.array(np.argsort(row_of, kind="stable"))
    ends = np.cumsum(np.bincount(row_of, minlength=count))
    entries = (pa.concat_arrays(part).take(order) for part in (names, values))
    offsets, *parts = _last_wins(np.concatenate(([0], ends)), *entries)
    return pa.MapArray.from_arrays(pa.array(offsets, pa.int32()), *parts)


def _missing_context(
    properties: pa.MapArray | None, context: Sequence[tuple[str, str]], count: int
) -> dict[str, pa.Array]:
    """Return `context` as columns, with null in rows that have the property or a `traceparent`."""
    names, row_of = pa.array([], pa.string()), np.arange(0)
    if properties is not None:
        names, _, offsets = entries_of(properties)
        row_of = np.repeat(np.arange(count), np.diff(offsets))
    columns = {}
    for name, value in context:
        own = pc.is_in(names, value_set=pa.array([name, "traceparent"], names.type))
        is_missing = np.ones(count, np.bool_)
        is_missing[row_of[np.flatnonzero(own)]] = False
        columns[name] = pc.if_else(pa.array(is_missing), value, None)
    return columns


def _entry_text(array: pa.Array) -> pa.Array:
    """Return names or values as strings. Binary values (Kafka headers) need not be UTF-8."""
    array = _text(array)
    return array.view(pa.string()) if pa.types.is_binary(array.type) else array


def _last_wins(
    offsets: Int64s, names: pa.Array, values: pa.Array
) -> tuple[Int64s, pa.Array, pa.Array]:
    """Keep each name once per row, at its first position with its last value, as a dict does."""
    counts = np.diff(offsets)
    if counts.max() < 2:
        return offsets, names, values
    words = as_binary(names).dictionary_encode()
    rows = np.repeat(np.arange(len(counts)), counts)
    pairs = rows * len(words.dictionary) + words.indices.to_numpy()
    _, first = np.unique(pairs, return_index=True)
    if len(first) == len(pairs):
        return offsets, names, values
    last = len(pairs) - 1 - np.unique(pairs[::-1], return_index=True)[1]
    order = np.argsort(first)
    kept = np.zeros(len(pairs) + 1, np.int64)
    kept[first + 1] = 1
    return (
        np.cumsum(kept)[offsets],
        names.take(pa.array(first[order])),
        values.take(pa.array(last[order])),
    )


_KEPT: Final = "order_by"
"""A column that is kept even if it is all null, so that the rows of the batch are sorted, too."""
_FIELD_NAMES: Final = {"delivery_timestamp": "delivery_timestamp_ms", "event_time": "event_time_ms"}
_CASTS: Final[dict[str, Callable[[pa.Array], pa.Array | None]]] = {
    "tags": _tags,
    "keys": _keys,
    "sharding_key": _key_text,
    "properties": _properties,
    **dict.fromkeys(("delay_level", "delay_ms", "queue_id", "flag", "priority"), _integers),
    **dict.fromkeys(("delivery_timestamp", "event_time"), _millis),
    **dict.fromkeys(("wait_store", "order_by"), lambda array: array),
}
"""{column: conversion} of the columns that are not plain text."""
