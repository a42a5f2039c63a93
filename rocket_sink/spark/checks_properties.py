"""The user properties' part of the row checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rocket_sink.errors import MessageError
from rocket_sink.message_rules import RESERVED_PROPERTIES, check_property
from rocket_sink.spark.contract_rows import RowBatch, text_at
from rocket_sink.spark.text_columns import all_blank, invalid_utf8, with_separator
from rocket_sink.wire.columns_buffers import Int64s, Mask, is_text, lengths_of, nulls_of
from rocket_sink.wire.columns_properties import (
    EVENT_TIME_PROPERTY,
    entries_of,
    map_sizes,
    property_pieces,
)
from rocket_sink.wire.properties import UNIQ_KEY

_ID_BYTES: Final = len(UNIQ_KEY) + 2 + 32
"""A message id that the producer makes, as a property."""
_OTHERS_BYTES: Final = 400
"""More than the names, separators, numbers and the WAIT of a row's other properties can take."""


@dataclass(frozen=True, eq=False)
class SuspectEntries:
    """Entries of a property map that may be illegal: their mask, and that of their rows."""

    entries: Mask
    rows: Mask


def suspect_entries(batch: RowBatch) -> SuspectEntries:
    """Every illegal property is among them; there may be legal ones."""
    names, values, offsets = entries_of(batch.properties)
    found = np.zeros(len(names), np.bool_)
    for part in (names, values):
        found |= with_separator(part) | invalid_utf8(part) | all_blank(part)
    reserved = [*sorted(RESERVED_PROPERTIES)]
    if batch.event_time_ms is not None:
        reserved.append(EVENT_TIME_PROPERTY)
    found |= pc.is_in(names, value_set=pa.array(reserved, names.type)).to_numpy(
        zero_copy_only=False
    )
    return SuspectEntries(found, _rows_of(found, offsets))


def _rows_of(entries: Mask, offsets: Int64s) -> Mask:
    rows = np.zeros(len(offsets) - 1, np.bool_)
    rows[np.searchsorted(offsets, np.flatnonzero(entries), side="right") - 1] = True
    return rows


def drop_illegal(batch: RowBatch) -> RowBatch:
    """The batch without the user properties that a message may not have."""
    if batch.properties is None:
        return batch
    suspects = suspect_entries(batch).entries
    names, values, offsets = entries_of(batch.properties)
    places = np.flatnonzero(suspects)
    rows = np.searchsorted(offsets, places, side="right") - 1
    illegal = [
        entry
        for entry, row in zip(places.tolist(), rows.tolist(), strict=True)
        if _is_illegal(text_at(names, entry) or "", text_at(values, entry) or "")
        or (text_at(names, entry) == EVENT_TIME_PROPERTY and batch.has_event_time(row))
    ]
    if not illegal:
        return batch
    keep = np.ones(len(names), np.bool_)
    keep[illegal] = False
    ends = np.concatenate(([0], np.cumsum(keep)))[offsets]
    kept = pa.array(keep)
    properties = pa.MapArray.from_arrays(
        pa.array(ends, pa.int32()), names.filter(kept), values.filter(kept)
    )
    return batch.with_(properties=properties)


def _is_illegal(name: str, value: str) -> bool:
    try:
        check_property(name, value)
    except MessageError:
        return True
    return False


def property_bytes_over(batch: RowBatch, limit: int) -> Int64s:
    """Bytes of the wire property string of each row where they are more than `limit`, else 0.

    Exact, with the id that the producer adds where the row has none; as a rule the longest values
    together are under the limit, and then no row needs to be measured.
    """
    longest = _OTHERS_BYTES
    if batch.properties is not None:
        longest += int(map_sizes(batch.properties).max())
    for text in (batch.tags, batch.sharding_key, batch.message_id):
        longest += 0 if text is None else int(lengths_of(text).max())
    longest += 0 if batch.keys is None else _longest_keys(batch.keys)
    if longest <= limit:
        return np.zeros(len(batch), np.int64)
    sizes = property_pieces(len(batch), **batch.property_columns()).sizes
    made = np.ones(len(batch), np.bool_) if batch.message_id is None else nulls_of(batch.message_id)
    sizes = sizes + np.where(made, _ID_BYTES, 0)
    over: Int64s = np.where(sizes > limit, sizes, 0)
    return over


def _longest_keys(keys: pa.Array) -> int:
    """At least the bytes of the longest KEYS value."""
    if is_text(keys.type):
        return int(lengths_of(keys).max())
    flat = pc.list_flatten(keys)
    each = int(lengths_of(flat).max(initial=0)) + 1
    return each * int(pc.max(pc.list_value_length(keys)).as_py() or 0)
