"""Tests on the text of whole columns by their bytes.

The common case, printable ASCII, is known from the least and the greatest byte of a column, which
numpy finds at memory speed; only what is left costs more.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import pyarrow as pa

from rocket_sink.wire.columns.buffers import (
    Bytes,
    Mask,
    as_binary,
    bytes_of,
    lengths_of,
    nulls_of,
    offsets_of,
)

_SMALL: Final = 16
"""Rows that are looked at one by one when a bad one is among them."""


def only_printable_ascii(array: pa.Array, *, spaces: bool) -> bool:
    """True when each byte is printable ASCII (with `spaces`, or blank); nothing is said if not."""
    data = bytes_of(array)
    if not len(data):
        return True
    return int(data.min()) >= (0x20 if spaces else 0x21) and int(data.max()) < 0x7F


def empty(array: pa.Array) -> Mask:
    """True where the text is there and has no bytes."""
    found: Mask = lengths_of(array) == 0
    return found & ~nulls_of(array) if array.null_count else found


def with_control(array: pa.Array) -> Mask:
    """True where the text has a C0 control character or DEL."""
    data = bytes_of(array)
    if not len(data) or (int(data.min()) >= 0x20 and int(data.max()) < 0x7F):
        return np.zeros(len(array), np.bool_)
    return _rows_with(array, (data < 0x20) | (data == 0x7F))


def with_separator(array: pa.Array) -> Mask:
    """True where the text has 0x01, 0x02 or 0x00: where `is_carried` may be False."""
    return _rows_with_up_to(array, 0x02)


def with_blank(array: pa.Array) -> Mask:
    """True where the text has a blank, or a control character."""
    return _rows_with_up_to(array, 0x20)


def all_blank(array: pa.Array) -> Mask:
    """True where the text is there and has nothing but JAVA_BLANKS, or nothing at all."""
    data = bytes_of(array)
    if not len(data) or int(data.min()) > 0x20:
        return empty(array)
    found: Mask = ~_rows_with(array, data > 0x20)
    return found & ~nulls_of(array) if array.null_count else found


def invalid_utf8(array: pa.Array) -> Mask:
    """True where the bytes are not UTF-8."""
    found = np.zeros(len(array), np.bool_)
    data = bytes_of(array)
    if len(data) and int(data.max()) >= 0x80:
        _mark_invalid(as_binary(array), found)
    return found


def _mark_invalid(array: pa.Array, found: Mask) -> None:
    """Arrow says only whether a column is valid, so the bad rows are found by halving it."""
    try:
        array.cast(pa.large_string() if pa.types.is_large_binary(array.type) else pa.string())
    except pa.ArrowInvalid:
        half = len(array) // 2
        if len(array) <= _SMALL:
            found[:] = [_is_invalid(value) for value in array.to_pylist()]
        else:
            _mark_invalid(array[:half], found[:half])
            _mark_invalid(array[half:], found[half:])


def _is_invalid(value: bytes | None) -> bool:
    try:
        (value or b"").decode()
    except UnicodeDecodeError:
        return True
    return False


def _rows_with_up_to(array: pa.Array, greatest: int) -> Mask:
    """True where the text has a byte of at most `greatest`."""
    data = bytes_of(array)
    if not len(data) or int(data.min()) > greatest:
        return np.zeros(len(array), np.bool_)
    return _rows_with(array, data <= greatest)


def _rows_with(array: pa.Array, wanted: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Mask:
    """True for the (non-null) rows that own one of the wanted bytes of `bytes_of`."""
    found = np.zeros(len(array), np.bool_)
    places = np.flatnonzero(wanted)
    if len(places):
        offsets = offsets_of(array)
        found[np.searchsorted(offsets - offsets[0], places, side="right") - 1] = True
    return found & ~nulls_of(array) if array.null_count else found


__all__ = [
    "Bytes",
    "all_blank",
    "empty",
    "invalid_utf8",
    "only_printable_ascii",
    "with_blank",
    "with_control",
    "with_separator",
]
