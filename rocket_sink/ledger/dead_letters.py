"""Dead letters: rows with everything that is needed to send them again, built from columns."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rocket_sink.ledger.records import RunContext, build_rows
from rocket_sink.ledger.schema import DEAD_LETTER, LEDGER_SCHEMA, MOMENTS_US, REASONS, columns_of
from rocket_sink.text import storable

_BATCH_BYTES: Final = 64 * 1024 * 1024
"""Bodies per record batch: well under the 2 GiB that a binary array can hold."""
_IGNORED: Final = frozenset({"order_by"})
"""Columns of the row contract that `ordinal` stands for."""
_TEXTS: Final = ("first_error", "last_error")


def dead_letter_rows(
    columns: Mapping[str, Any],
    ctx: RunContext,
    *,
    first_ordinal: int = 0,
    include_body: bool = True,
    secrets: Iterable[str] = (),
) -> list[pa.RecordBatch]:
    """Rows of messages given up, in the order of the columns; several batches if they are big.

    Args:
        columns: arrays, or single values for all rows: those of `RowBatch.columns()` and the
            kind's own. `reason`, and arrays for at least one column, are needed. Text that is not
            UTF-8 is kept with the replacement character; `body` is exact bytes.
        first_ordinal: the first row's place among the dead letters of its task attempt; the caller
            counts on, so that the dead letters of a key keep their order.
        include_body: False keeps length and digest only, and a backfill cannot send the dead
        letter.

    Raises:
        ValueError: an unknown column or reason, columns of different lengths.
    """
    given = _named(columns)
    count = _count(given)
    _check_reasons(given["reason"])
    for name in _TEXTS:
        if name in given:
            given[name] = _clean(given[name], tuple(secrets))
    lengths = _body_lengths(given.get("body"), count)
    given.setdefault("body_bytes", pa.array(lengths, pa.int64()))
    ordinals = np.arange(first_ordinal, first_ordinal + count, dtype=np.int64)
    given["ordinal"] = pa.array(ordinals)
    given.setdefault("letter_id", _letter_ids(ordinals))
    return [
        _rows(_slice(given, start, stop), stop - start, ctx, include_body=include_body)
        for start, stop in _cuts(lengths)
    ]


def _rows(
    values: dict[str, Any], count: int, ctx: RunContext, *, include_body: bool
) -> pa.RecordBatch:
    body = values.get("body")
    if not include_body and body is not None:
        values |= {"body": None, "body_sha256": _digests(body)}
    texts = {
        name: valid_text(value, LEDGER_SCHEMA.field(name).type)
        for name, value in values.items()
        if isinstance(value, pa.Array)
    }
    return build_rows(DEAD_LETTER, count, {**values, **texts}, ctx)


def _named(columns: Mapping[str, Any]) -> dict[str, Any]:
    """The kind's own names for the row contract's, and its types where they differ."""
    given = {n: v for n, v in columns.items() if v is not None and n not in _IGNORED}
    if "delivery_timestamp_ms" in given:
        given["delivery_timestamp"] = given.pop("delivery_timestamp_ms")
    if "event_time_ms" in given:
        given["event_time"] = _instants(given.pop("event_time_ms"))
    keys = given.get("keys")
    if isinstance(keys, pa.Array) and not pa.types.is_list(keys.type):
        given["keys"] = _one_each(keys)
    unknown = set(given) - set(columns_of(DEAD_LETTER))
    if unknown:
        raise ValueError(f"dead letters have no column {', '.join(sorted(unknown))}")
    return given


def _instants(millis: pa.Array) -> pa.Array:
    """Milliseconds as timestamps; what no datetime can say is null."""
    first, last = (us // 1000 for us in MOMENTS_US)
    ok = pc.and_(pc.greater_equal(millis, first), pc.less_equal(millis, last))
    sane = pc.if_else(ok, millis, pa.scalar(None, pa.int64()))
    return pc.multiply(sane, 1000).cast(pa.timestamp("us", tz="UTC"))


def _one_each(keys: pa.Array) -> pa.Array:
    """A text per row as a list of one text per row; null stays null."""
    present = pc.is_valid(keys)
    offsets = np.concatenate([[0], np.cumsum(present.to_numpy(zero_copy_only=False))])
    starts = pa.array(offsets, pa.int32(), mask=np.append(~np.asarray(present), False))
    return pa.ListArray.from_arrays(starts, keys.filter(present))


def _count(given: Mapping[str, Any]) -> int:
    lengths = {len(value) for value in given.values() if isinstance(value, pa.Array)}
    if len(lengths) != 1:
        raise ValueError(f"dead letters need arrays of one length, not {sorted(lengths)}")
    return lengths.pop()


def _check_reasons(reasons: Any) -> None:
    found = {reasons} if isinstance(reasons, str) else set(pc.unique(reasons).to_pylist())
    if not found <= set(REASONS):
        wrong = ", ".join(sorted(repr(reason) for reason in found - set(REASONS)))
        raise ValueError(f"reason {wrong} is none of {', '.join(REASONS)}")


def _clean(texts: Any, secrets: tuple[str, ...]) -> Any:
    """Errors repeat: each different text is cleaned once."""
    if isinstance(texts, str):
        return storable(texts, secrets=secrets)
    encoded = valid_text(texts, pa.string()).dictionary_encode()
    words = [storable(word, secrets=secrets) for word in encoded.dictionary.to_pylist()]
    return pa.array(words, pa.string()).take(encoded.indices)


def _body_lengths(body: Any, count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    if body is None:
        return np.zeros(count, np.int64)
    if not isinstance(body, pa.Array):
        return np.full(count, len(body), np.int64)
    return np.asarray(pc.fill_null(pc.binary_length(body), 0), np.int64)


def _letter_ids(ordinals: np.ndarray[Any, Any]) -> pa.Array:
    numbers = pa.array(ordinals).cast(pa.string())
    return pc.binary_join_element_wise(pa.scalar(uuid.uuid4().hex), numbers, "-")


def _cuts(lengths: np.ndarray[Any, Any]) -> list[tuple[int, int]]:
    ends = np.cumsum(lengths)
    cuts, start = [], 0
    while start < len(lengths):
        before = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + _BATCH_BYTES, side="right")))
        cuts.append((start, stop))
        start = stop
    return cuts


def _slice(given: Mapping[str, Any], start: int, stop: int) -> dict[str, Any]:
    return {
        name: value.slice(start, stop - start) if isinstance(value, pa.Array) else value
        for name, value in given.items()
    }


def _digests(body: Any) -> Any:
    if not isinstance(body, pa.Array):
        return hashlib.sha256(body).hexdigest()
    return [None if b is None else hashlib.sha256(b).hexdigest() for b in body.to_pylist()]


def valid_text(array: pa.Array, type_: pa.DataType) -> pa.Array:
    """`array` as `type_`, with U+FFFD where its text is not UTF-8 (Spark's strings may be so).

    Arrow never looks into strings unless asked; a reader in Python would fail on them for ever.
    """
    array = array.cast(type_) if array.type != type_ else array
    try:
        array.validate(full=True)
        return array
    except pa.ArrowInvalid:
        return pa.array([_repaired(value) for value in array], type_)


def _repaired(value: pa.Scalar) -> Any:
    if not value.is_valid:
        return None
    if isinstance(value, pa.MapScalar):
        pairs = value.values
        return list(zip(*(map(_repaired, pairs.field(i)) for i in (0, 1)), strict=True))
    if isinstance(value, pa.ListScalar):
        return [_repaired(item) for item in value.values]
    return value.as_buffer().to_pybytes().decode(errors="replace")
