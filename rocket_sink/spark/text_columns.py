"""Tests on the text of whole columns by their bytes.

The common case, printable ASCII, is known from the least and the greatest byte of a column, which
numpy finds at memory speed; only what is left costs more.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rocket_sink.wire.columns_buffers import (
    Bytes,
    Mask,
    as_binary,
    bytes_of,
    lengths_of,
    nulls_of,
    offsets_of,
)

BLANKS: Final = (
    "\t\n\x0b\x0c\r\x1c\x1d\x1e\x1f \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006"
    "\u2007\u2008\u2009\u200a\u2028\u2029\u202f\u205f\u3000"
)
"""What `str.strip` and `str.isspace` take for blank."""
_WIDE_BLANKS: Final = "[" + "".join(c for c in BLANKS if c > "\x7f") + "]"
_ALL_BLANK: Final = f"^[{BLANKS}]*$"
_BLANK_LEADS: Final = np.array([0x20, 0xC2, 0xE1, 0xE2, 0xE3], np.uint8)
"""First bytes of the blanks in UTF-8, control characters left out."""
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


def with_blank(array: pa.Array) -> Mask:
    """True where the text has a blank; where it is not UTF-8 the answer means nothing."""
    data = bytes_of(array)
    found = np.zeros(len(array), np.bool_)
    if not len(data):
        return found
    if int(data.min()) <= 0x20:
        found |= _rows_with(array, data <= 0x20)
    if int(data.max()) >= 0x80:
        found |= _matches(array, _WIDE_BLANKS)
    return found


def all_blank(array: pa.Array) -> Mask:
    """True where the text is there and has nothing but blanks, or nothing at all.

    Where it is not UTF-8, or has control characters, the answer means nothing.
    """
    found = empty(array)
    data = bytes_of(array)
    if not len(data) or only_printable_ascii(array, spaces=False):
        return found
    offsets = offsets_of(array)
    filled = np.flatnonzero(lengths_of(array))
    leads = data[offsets[filled] - offsets[0]]
    candidates = filled[np.isin(leads, _BLANK_LEADS)]
    if len(candidates):
        found[candidates] |= _matches(array.take(pa.array(candidates)), _ALL_BLANK)
    return found


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


def _matches(array: pa.Array, pattern: str) -> Mask:
    found = pc.match_substring_regex(array, pattern).fill_null(False)
    mask: Mask = found.to_numpy(zero_copy_only=False)
    return mask


def _rows_with(array: pa.Array, wanted: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Mask:
    """True for the (non-null) rows that own one of the wanted bytes of `bytes_of`."""
    found = np.zeros(len(array), np.bool_)
    places = np.flatnonzero(wanted)
    if len(places):
        offsets = offsets_of(array)
        found[np.searchsorted(offsets - offsets[0], places, side="right") - 1] = True
    return found & ~nulls_of(array) if array.null_count else found


__all__ = [
    "BLANKS",
    "Bytes",
    "all_blank",
    "empty",
    "invalid_utf8",
    "only_printable_ascii",
    "with_blank",
    "with_control",
]
