"""Key hashes, for single keys and for Arrow columns.

- `java.lang.String.hashCode` and `java.lang.Long.hashCode`, as SelectMessageQueueByHash of the Java
  remoting client uses them.
- SipHash-2-4 with Guava's default key (Aumasson and Bernstein, 2012). The 5.x gRPC clients choose a
  FIFO message's queue by `Hashing.sipHash24().hashBytes(utf8).asLong()` and `LongMath.mod`
  (PublishingLoadBalancer.takeMessageQueueByMessageGroup).
- Rendezvous hashing (Thaler and Ravishankar, 1998) with logarithmic weights (Schindelhauer and
  Schomaker, 2005), and jump hashing (Lamping and Veach, 2014), over SipHash values. If a broker
  leaves, only its own keys move; if it comes back, exactly these keys return. The order of the
  candidates does not matter. Jump hashing rounds exactly as Guava's `Hashing.consistentHash`, by
  which RocketMQ places lite topics.

The column functions take string, binary, their large forms, views and dictionaries. They work on
the buffers with numpy, without a loop over rows. A null has the hash of the empty key. The Java
hashes read invalid UTF-8 as U+FFFD, with a slow loop."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, TypeAlias, TypeVar

import numpy as np
import pyarrow as pa

from rocket_sink.wire.columns.buffers import bytes_of, is_text, offsets_of

IntArray: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
_Hashes = TypeVar("_Hashes", int, IntArray)

_MASK: Final = (1 << 64) - 1


def rendezvous(
    hashes: _Hashes, candidates: Sequence[str], weights: Sequence[int] | None = None
) -> _Hashes:
    """Return the index of the candidate of each key, given the keys' SipHash values; all are int64.
    Candidates get keys in proportion to `weights`. If two candidates have the same score, the first
    name in sorted order wins."""
    if isinstance(hashes, int):
        return int(rendezvous(np.array([hashes], np.int64), candidates, weights)[0])
    if not candidates:
        raise ValueError("rendezvous hashing needs at least one candidate")
    if weights is not None and len(set(weights)) == 1:
        weights = None
    keys = hashes.view(np.uint64)
    order = sorted(range(len(candidates)), key=candidates.__getitem__)
    best = np.full(len(keys), order[0], np.int64)
    highest = np.zeros(len(keys), np.uint64 if weights is None else np.float64)
    for position, index in enumerate(order):
        salt = np.uint64(sip_hash24(candidates[index].encode()) & _MASK)
        score = _mix(keys ^ salt)
        if weights is not None:
            score = _weighted_scores(score, weights[index])
        wins = score > highest if position else np.ones(len(keys), np.bool_)
        best[wins], highest[wins] = index, score[wins]
    return best


def _mix(value: IntArray) -> IntArray:
    """Mix bits so that each input bit affects all output bits (splitmix64's finaliser)."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: IntArray = value ^ (value >> np.uint64(31))
    return mixed


def _weighted_scores(score: IntArray, weight: int) -> IntArray:
    # Add 0.5, so that the logarithm's argument is never 0 or 1.
    uniform = ((score >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    weighted: IntArray = weight / -np.log(uniform)
    return weighted


def jump_index(hashes: _Hashes, count: int | IntArray) -> _Hashes:
    """Return the bucket of each int64 hash, in about ln(count) passes. If `count` grows by 1,
    1/(count + 1) of all hashes move."""
    if isinstance(hashes, int):
        return int(jump_index(np.array([hashes], np.int64), count)[0])
    state = hashes.astype(np.int64).view(np.uint64)
    counts = np.broadcast_to(np.asarray(count, np.int64), state.shape)
    bucket = np.zeros(len(state), np.int64)
    jump = np.zeros(len(state), np.float64)
    going = jump < counts
    while going.any():
        bucket[going] = jump[going].astype(np.int64)
        state = state * np.uint64(2862933555777941757) + np.uint64(1)
        # Guava's int overflows here, so let int32 overflow, too. The jump is then negative, which
        # ends the search.
        step = (state >> np.uint64(33)).astype(np.int32) + np.int32(1)
        jump = np.floor((bucket + 1) / (step / 2.0**31))
        going &= (jump >= 0) & (jump < counts)
    return bucket


_GUAVA_KEYS: Final = (0x0706050403020100, 0x0F0E0D0C0B0A0908)
"""The key of com.google.common.hash.Hashing.sipHash24()."""

_CONSTANTS: Final = (
    0x736F6D6570736575, 0x646F72616E646F6D, 0x6C7967656E657261, 0x7465646279746573,
)  # fmt: skip
_INITIAL: Final = tuple(c ^ key for c, key in zip(_CONSTANTS, 2 * _GUAVA_KEYS, strict=True))


def sip_hash24(data: bytes) -> int:
    """Return SipHash-2-4 as Guava's `asLong()` does: a signed 64-bit integer."""
    v0, v1, v2, v3 = _INITIAL
    whole_bytes = len(data) & ~7
    last = int.from_bytes(data[whole_bytes:], "little") | (len(data) & 0xFF) << 56
    for start in range(0, whole_bytes + 1, 8):
        word = int.from_bytes(data[start : start + 8], "little") if start < whole_bytes else last
        v3 ^= word
        for _ in range(2):
            v0, v1, v2, v3 = _round(v0, v1, v2, v3)
        v0 ^= word
    v2 ^= 0xFF
    for _ in range(4):
        v0, v1, v2, v3 = _round(v0, v1, v2, v3)
    value = v0 ^ v1 ^ v2 ^ v3
    return value - (1 << 64) if value >= 1 << 63 else value


def _rotate(value: int, bits: int) -> int:
    return (value << bits | value >> (64 - bits)) & _MASK


def _round(v0: int, v1: int, v2: int, v3: int) -> tuple[int, int, int, int]:
    v0, v2 = (v0 + v1) & _MASK, (v2 + v3) & _MASK
    v1, v3 = _rotate(v1, 13) ^ v0, _rotate(v3, 16) ^ v2
    v0 = _rotate(v0, 32)
    v2, v0 = (v2 + v1) & _MASK, (v0 + v3) & _MASK
    v1, v3 = _rotate(v1, 17) ^ v2, _rotate(v3, 21) ^ v0
    return v0, v1, _rotate(v2, 32), v3


def _sip_hash24_block(data: IntArray, offsets: IntArray) -> IntArray:
    """Return `sip_hash24` of each row, data[offsets[i]:offsets[i + 1]], as int64. `data` is uint8,
    `offsets` are int64 from 0. The time grows with the longest row: one pass per eight bytes."""
    lengths = np.diff(offsets)
    # Put the longest rows first, so that a prefix of the arrays has all unfinished rows.
    order = np.argsort(-lengths, kind="stable")
    sizes, starts = lengths[order], offsets[:-1][order]
    padded = np.concatenate((data, np.zeros(8, np.uint8)))
    words = np.ndarray(len(data) + 1, "<u8", padded, strides=(1,))  # words[i] starts at byte i.
    count = len(sizes)
    state = [np.full(count, initial, np.uint64) for initial in _INITIAL]
    word_counts = sizes >> 3
    for index in range(int(word_counts[0]) if count else 0):
        active = int(np.searchsorted(-word_counts, -index, side="left"))
        _absorb([part[:active] for part in state], words[starts[:active] + 8 * index])
    tail_bits = (sizes & 7).astype(np.uint64) << np.uint64(3)
    tail = words[starts + 8 * word_counts] & ((np.uint64(1) << tail_bits) - np.uint64(1))
    _absorb(state, tail | (sizes.astype(np.uint64) & np.uint64(0xFF)) << np.uint64(56))
    state[2] ^= np.uint64(0xFF)
    for _ in range(4):
        _round_arrays(state)
    hashes = np.empty(count, np.int64)
    hashes[order] = (state[0] ^ state[1] ^ state[2] ^ state[3]).view(np.int64)
    return hashes


def _absorb(state: list[IntArray], words: IntArray) -> None:
    state[3] ^= words
    _round_arrays(state)
    _round_arrays(state)
    state[0] ^= words


def _rotate_array(value: IntArray, bits: int) -> None:
    high = value >> np.uint64(64 - bits)
    value <<= np.uint64(bits)
    value |= high


def _round_arrays(state: list[IntArray]) -> None:
    """Run a round in place: the arrays of `state` may be views of longer arrays."""
    v0, v1, v2, v3 = state
    for a, b, c, d, x, y in ((v0, v1, v2, v3, 13, 16), (v2, v1, v0, v3, 17, 21)):
        a += b
        c += d
        _rotate_array(b, x)
        _rotate_array(d, y)
        b ^= a
        d ^= c
        _rotate_array(a, 32)


BLOCK_BYTES: Final = 1 << 18
"""Bytes of keys that are hashed at a time, so that intermediate arrays stay in the cache."""

_INVERSE_31: Final = pow(31, -1, 1 << 32)
_LONG: Final = re.compile(r"0|-?[1-9][0-9]{0,18}", re.ASCII)
_LONG_MAX: Final = (1 << 63) - 1
_LONG_DIGITS: Final = len(str(_LONG_MAX))


@functools.lru_cache(maxsize=1 << 16)
def java_hash(text: str) -> int:
    """Return Java's `String.hashCode()`: a signed 32-bit integer over UTF-16 code units."""
    units = np.frombuffer(text.encode("utf-16-le", "surrogatepass"), dtype="<u2")
    value = 0
    for unit in units.tolist():
        value = (31 * value + unit) & 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value


def java_long_hash(text: str) -> int:
    """Return Java's `Long.hashCode()` of a text that `Long.toString` can return; `java_hash` of any
    other text. From 0 to 2^31 - 1 it equals `Integer.hashCode()`."""
    if _LONG.fullmatch(text) is None or not -_LONG_MAX - 1 <= (number := int(text)) <= _LONG_MAX:
        return java_hash(text)
    bits = number & 0xFFFFFFFF_FFFFFFFF
    value = (bits ^ bits >> 32) & 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value


def java_index(hashes: _Hashes, count: int) -> _Hashes:
    """Return the queue index, or array of indices, of SelectMessageQueueByHash."""
    return abs(hashes) % count


def sip_index(hashes: _Hashes, count: int) -> _Hashes:
    """Return the queue index, or indices, of the gRPC clients (LongMath.mod); never negative."""
    return hashes % count


def java_hash_array(keys: pa.Array) -> IntArray:
    """Return `java_hash` of each key, as int64."""
    return _hash_column(keys, _java_hash_block)


def java_long_hash_array(keys: pa.Array) -> IntArray:
    """Return `java_long_hash` of each key, as int64."""
    return _hash_column(keys, _java_long_hash_block)


def siphash_array(keys: pa.Array) -> IntArray:
    """Return `sip_hash24` of each key's bytes, as int64."""
    return _hash_column(keys, _sip_hash24_block)


Block: TypeAlias = Callable[[IntArray, IntArray], IntArray]
"""A function that takes the bytes of n rows and their n + 1 offsets, and returns n hashes."""


def _hash_column(keys: pa.Array, block: Block) -> IntArray:
    if pa.types.is_dictionary(keys.type):
        # Append the hash of null, because a null row gets the index -1.
        null_hash = block(np.empty(0, np.uint8), np.zeros(2, np.int64))
        table = np.append(_hash_column(keys.dictionary, block), null_hash)
        indices = keys.indices.fill_null(-1) if keys.null_count else keys.indices
        row_hashes: IntArray = table[indices.to_numpy(zero_copy_only=False)]
        return row_hashes
    if not is_text(keys.type):
        keys = keys.cast(pa.large_binary())
    if keys.null_count:
        # A null's slot may have bytes, so replace it by an empty value.
        keys = keys.fill_null("")
    data, offsets = bytes_of(keys), offsets_of(keys).astype(np.int64)
    offsets -= offsets[0]
    hashes = np.empty(len(keys), np.int64)
    for first, last in _blocks(offsets):
        start, stop = offsets[first], offsets[last]
        hashes[first:last] = block(data[start:stop], offsets[first : last + 1] - start)
    return hashes


def _blocks(offsets: IntArray) -> Iterator[tuple[int, int]]:
    """Yield ranges of rows with at most BLOCK_BYTES each; a longer key is a range of its own."""
    first, count = 0, len(offsets) - 1
    while first < count:
        last = count
        if offsets[-1] - offsets[first] > BLOCK_BYTES or count - first > BLOCK_BYTES:
            end = int(np.searchsorted(offsets, offsets[first] + BLOCK_BYTES, side="right")) - 1
            last = min(max(end, first + 1), first + BLOCK_BYTES, count)
        yield first, last
        first = last


def _powers(base: int, count: int) -> IntArray:
    powers = np.full(count + 1, base, np.uint32)
    powers[0] = 1
    return np.multiply.accumulate(powers, dtype=np.uint32)


# 31 is odd, so it has an inverse modulo 2^32. Therefore the hash of the key from byte s to e is
# 31^(e-1) * sum(byte[i] * 31^-i for s <= i < e), and the sum is the difference of two prefix sums.
# This takes one multiplication and one addition per byte, and two look-ups per key.
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
    # An empty first key would need 31^-1. Its sum is 0, so use any power.
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
    # A text that begins with a zero is a number only if it is "0" itself.
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
    """Return the number of UTF-16 units before each byte of a UTF-8 text, and before its end."""
    units = ((data & 0xC0) != 0x80).astype(np.int64) + (data >= 0xF0)
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(units)))


def _java_hash_malformed(raw: bytes, offsets: IntArray) -> IntArray:
    rows = itertools.pairwise(offsets.tolist())
    keys = [raw[start:end].decode("utf-8", "replace") for start, end in rows]
    return np.array([java_hash(key) for key in keys], np.int32)
