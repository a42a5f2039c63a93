"""Key hashes, for one key and for a whole Arrow column, that give the same numbers.

Sources: `java.lang.String.hashCode` and `java.lang.Long.hashCode` with `SelectMessageQueueByHash`
(the Java remoting client, which hashes the object that the application gives it);
SipHash-2-4 of the 5.x gRPC clients (siphash.py); rendezvous hashing (rendezvous.py). Python's own
`hash()` is never used: it differs between processes.

The column forms take string, binary, their large forms, views and dictionaries (hashed once per
dictionary value). They work on the array's buffers with numpy; there is no loop over rows. A null
hashes like the empty key: callers keep the validity bitmap. Bytes that are not UTF-8 hash as if
read with U+FFFD for what cannot be read; only a column that has such bytes is slow.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import numpy as np
import pyarrow as pa

from rocket_sink.routing.rendezvous import (
    jump_index,
    jump_index_array,
    rendezvous,
    rendezvous_of_hashes,
)
from rocket_sink.routing.siphash import IntArray, sip_hash24, sip_hash24_block

__all__ = [
    "java_hash", "java_hash_array", "java_index", "java_index_array",
    "java_long_hash", "java_long_hash_array",
    "jump_index", "jump_index_array", "rendezvous", "rendezvous_of_hashes",
    "sip_hash24", "sip_index", "sip_index_array", "siphash_array",
]  # fmt: skip

BLOCK_BYTES: Final = 1 << 18
"""Bytes of keys hashed at a time: the intermediates (a few words per byte) stay in cache."""

_INVERSE_31: Final = pow(31, -1, 1 << 32)
_LONG: Final = re.compile(r"0|-?[1-9][0-9]{0,18}", re.ASCII)
_LONG_MAX: Final = (1 << 63) - 1
_LONG_DIGITS: Final = len(str(_LONG_MAX))


@functools.lru_cache(maxsize=1 << 16)
def java_hash(text: str) -> int:
    """`String.hashCode()`: a signed 32-bit integer over UTF-16 code units. Keys come again."""
    units = np.frombuffer(text.encode("utf-16-le", "surrogatepass"), dtype="<u2")
    value = 0
    for unit in units.tolist():
        value = (31 * value + unit) & 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value


def java_long_hash(text: str) -> int:
    """`Long.hashCode()` of the number whose text it is (Long.toString); `java_hash` of other texts.

    Of numbers from 0 to 2^31 - 1 it is also Integer's.
    """
    if _LONG.fullmatch(text) is None or not -_LONG_MAX - 1 <= (number := int(text)) <= _LONG_MAX:
        return java_hash(text)
    bits = number & 0xFFFFFFFF_FFFFFFFF
    value = (bits ^ bits >> 32) & 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value


def java_index(hash_value: int, count: int) -> int:
    """Queue index of SelectMessageQueueByHash: truncated remainder, then its absolute value.

    So MIN_VALUE, whose absolute value Java cannot represent, is no special case.
    """
    return abs(hash_value) % count


def java_index_array(hashes: IntArray, count: int) -> IntArray:
    """`java_index` for an array of hashes; int64 indices."""
    indices: IntArray = np.abs(hashes.astype(np.int64)) % count
    return indices


def sip_index(hash_value: int, count: int) -> int:
    """Queue index of the gRPC clients: LongMath.mod, never negative."""
    return hash_value % count


def sip_index_array(hashes: IntArray, count: int) -> IntArray:
    """`sip_index` for an array of int64 hashes; int64 indices."""
    indices: IntArray = hashes % np.int64(count)
    return indices


def java_hash_array(keys: pa.Array | pa.ChunkedArray) -> IntArray:
    """`java_hash` of each key: int32, one per row."""
    return _hash_column(keys, _java_hash_block, np.int32)


def java_long_hash_array(keys: pa.Array | pa.ChunkedArray) -> IntArray:
    """`java_long_hash` of each key: int32, one per row.

    Costs one pass per digit of the longest number of a block, beside the texts' hashes.
    """
    return _hash_column(keys, _java_long_hash_block, np.int32)


def siphash_array(keys: pa.Array | pa.ChunkedArray) -> IntArray:
    """`sip_hash24` of each key's bytes: int64, one per row.

    Costs one pass per eight bytes of the longest key of a block.
    """
    return _hash_column(keys, sip_hash24_block, np.int64)


Block: TypeAlias = Callable[[IntArray, IntArray], IntArray]
"""(bytes of some rows, n + 1 offsets from 0 into them) -> n hashes."""


def _hash_column(keys: Any, block: Block, dtype: Any) -> IntArray:
    if isinstance(keys, pa.ChunkedArray):
        parts = [_hash_column(chunk, block, dtype) for chunk in keys.chunks]
        return np.concatenate(parts) if parts else np.empty(0, dtype)
    if pa.types.is_dictionary(keys.type):
        # The null's hash stands last, so that index -1 finds it.
        known = _hash_column(keys.dictionary, block, dtype)
        table = np.append(known, _empty_hash(block).astype(dtype))
        indices = keys.indices.fill_null(-1) if keys.null_count else keys.indices
        found: IntArray = table[indices.to_numpy(zero_copy_only=False)]
        return found
    data, offsets = _buffers(keys)
    hashes = np.empty(len(keys), dtype)
    for first, last in _blocks(offsets):
        start, stop = offsets[first], offsets[last]
        rows = offsets[first : last + 1] - start
        hashes[first:last] = block(data[start:stop], rows).view(dtype)
    return hashes


def _empty_hash(block: Block) -> IntArray:
    return block(np.empty(0, np.uint8), np.zeros(2, np.int64))


def _buffers(keys: pa.Array) -> tuple[IntArray, IntArray]:
    """The value bytes and int64 offsets of a string or binary array, nulls as empty."""
    kind = keys.type
    large = pa.types.is_large_string(kind) or pa.types.is_large_binary(kind)
    if not (large or pa.types.is_string(kind) or pa.types.is_binary(kind)):
        keys, large = keys.cast(pa.large_binary()), True
    if keys.null_count:
        # A null's slot may hold any bytes; fill_null compacts it to none.
        keys = keys.fill_null(b"" if "binary" in str(keys.type) else "")
    _, offsets, data = keys.buffers()
    if not len(keys):
        return np.empty(0, np.uint8), np.zeros(1, np.int64)
    wide = np.frombuffer(offsets, np.int64 if large else np.int32)
    rows = wide[keys.offset : keys.offset + len(keys) + 1].astype(np.int64)
    flat = np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)
    return flat[rows[0] : rows[-1]], rows - rows[0]


def _blocks(offsets: IntArray) -> list[tuple[int, int]]:
    """Row ranges of about BLOCK_BYTES each (a longer key is a block of its own)."""
    count = len(offsets) - 1
    if count <= 0:
        return []
    if offsets[-1] <= BLOCK_BYTES and count <= BLOCK_BYTES:
        return [(0, count)]
    ranges, first = [], 0
    while first < count:
        end = int(np.searchsorted(offsets, offsets[first] + BLOCK_BYTES, side="right")) - 1
        last = min(max(end, first + 1), first + BLOCK_BYTES, count)
        ranges.append((first, last))
        first = last
    return ranges


def _powers(base: int, count: int) -> IntArray:
    powers = np.full(count + 1, base, np.uint32)
    powers[0] = 1
    return np.multiply.accumulate(powers, dtype=np.uint32)


# 31 is odd, so it has an inverse modulo 2^32, and the hash of a substring is a difference of two
# prefix sums: h(s, e) = 31^(e-1) * sum(byte[i] * 31^-i for s <= i < e). One multiply and one sum
# per byte and two look-ups per row; sorting or grouping by length is not needed.
_POWERS: Final = _powers(31, BLOCK_BYTES)
_INVERSES: Final = _powers(_INVERSE_31, BLOCK_BYTES)


def _java_hash_block(data: IntArray, offsets: IntArray) -> IntArray:
    if len(data) and int(data.max()) >= 0x80:
        raw = data.tobytes()
        starts = data[offsets[:-1][np.diff(offsets) > 0]]
        try:
            text = raw.decode()
        except UnicodeDecodeError:
            text = ""
        if not text or ((starts & 0xC0) == 0x80).any():
            return _java_hash_malformed(raw, offsets)
        offsets = _unit_offsets(data)[offsets]
        data = np.frombuffer(text.encode("utf-16-le"), "<u2")
    count = len(data)
    if count <= BLOCK_BYTES:
        powers, inverses = _POWERS, _INVERSES
    else:
        powers, inverses = _powers(31, count), _powers(_INVERSE_31, count)
    sums = np.zeros(count + 1, np.uint32)
    np.cumsum(data * inverses[:count], dtype=np.uint32, out=sums[1:])
    ends = offsets[1:]
    # An empty key at the very front asks for 31^-1; its sum is 0, so any power will do.
    hashes: IntArray = (sums[ends] - sums[offsets[:-1]]) * powers[np.maximum(ends - 1, 0)]
    return hashes.view(np.int32)


def _java_long_hash_block(data: IntArray, offsets: IntArray) -> IntArray:
    hashes = _java_hash_block(data, offsets)
    rows = np.flatnonzero(offsets[1:] > offsets[:-1])
    negative = data[offsets[rows]] == ord("-")
    digits = offsets[rows + 1] - offsets[rows] - negative
    fits = (digits > 0) & (digits <= _LONG_DIGITS)
    rows, negative, digits = rows[fits], negative[fits], digits[fits]
    if not len(rows):
        return hashes
    starts = offsets[rows] + negative
    # No number's text begins with a zero but that of 0 itself.
    good = (data[starts] != ord("0")) | ((digits == 1) & ~negative)
    magnitude = np.zeros(len(rows), np.uint64)
    for position in range(int(digits.max())):
        inside = digits > position
        digit = data[np.minimum(starts + position, len(data) - 1)] - np.uint8(ord("0"))
        good &= ~inside | (digit <= 9)
        magnitude = np.where(inside, magnitude * np.uint64(10) + digit, magnitude)
    good &= magnitude <= np.uint64(_LONG_MAX) + negative
    bits = np.where(negative, np.uint64(0) - magnitude, magnitude)
    hashes[rows[good]] = (bits ^ bits >> np.uint64(32)).astype(np.uint32).view(np.int32)[good]
    return hashes


def _unit_offsets(data: IntArray) -> IntArray:
    """For each byte position of UTF-8 text: the number of UTF-16 units before it."""
    units = ((data & 0xC0) != 0x80).astype(np.int64) + (data >= 0xF0)
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(units)))


def _java_hash_malformed(raw: bytes, offsets: IntArray) -> IntArray:
    """Per row, for the block that no encoder wrote: a substring may even cut a character."""
    ends = offsets.tolist()
    rows = itertools.pairwise(ends)
    return np.fromiter(
        (java_hash(raw[start:end].decode("utf-8", "replace")) for start, end in rows),
        np.int32,
        len(ends) - 1,
    )
