"""SipHash-2-4, for one key and for a block of keys, with Guava's default key.

Source: Aumasson and Bernstein, "SipHash: a fast short-input PRF" (2012). The 5.x gRPC clients of
RocketMQ choose a FIFO message's queue by `Hashing.sipHash24().hashBytes(utf8).asLong()` and
`LongMath.mod` (PublishingLoadBalancer.takeMessageQueueByMessageGroup).
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import numpy as np

IntArray: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

GUAVA_K0: Final = 0x0706050403020100
GUAVA_K1: Final = 0x0F0E0D0C0B0A0908
"""The key of com.google.common.hash.Hashing.sipHash24()."""

_INITIAL: Final = (
    0x736F6D6570736575, 0x646F72616E646F6D, 0x6C7967656E657261, 0x7465646279746573,
)  # fmt: skip
_MASK: Final = (1 << 64) - 1


def sip_hash24(data: bytes, k0: int = GUAVA_K0, k1: int = GUAVA_K1) -> int:
    """SipHash-2-4 as Guava's `asLong()` gives it: a signed 64-bit integer."""
    keys = (k0, k1, k0, k1)
    v0, v1, v2, v3 = (constant ^ key for constant, key in zip(_INITIAL, keys, strict=True))
    whole = len(data) & ~7
    last = int.from_bytes(data[whole:], "little") | (len(data) & 0xFF) << 56
    for start in range(0, whole + 1, 8):
        word = int.from_bytes(data[start : start + 8], "little") if start < whole else last
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


def sip_hash24_block(data: IntArray, offsets: IntArray) -> IntArray:
    """Hash row i = data[offsets[i]:offsets[i + 1]] (uint8; int64 offsets from 0): int64, per row.

    One pass of numpy per eight bytes of the longest row.
    """
    lengths = np.diff(offsets)
    # Longest first: the rows that still have a word to take are a prefix in every pass.
    order = np.argsort(-lengths, kind="stable")
    sizes, starts = lengths[order], offsets[:-1][order]
    padded = np.concatenate((data, np.zeros(8, np.uint8)))
    words = np.ndarray(len(data) + 1, "<u8", padded, strides=(1,))  # unaligned, overlapping
    count = len(sizes)
    keys = (GUAVA_K0, GUAVA_K1, GUAVA_K0, GUAVA_K1)
    state = [np.full(count, c ^ k, np.uint64) for c, k in zip(_INITIAL, keys, strict=True)]
    whole = sizes >> 3
    for index in range(int(whole[0]) if count else 0):
        active = int(np.searchsorted(-whole, -index, side="left"))
        _absorb([part[:active] for part in state], words[starts[:active] + 8 * index])
    rest = (sizes & 7).astype(np.uint64) << np.uint64(3)
    tail = words[starts + 8 * whole] & ((np.uint64(1) << rest) - np.uint64(1))
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
    """In place: the arrays of `state` may be views of longer ones."""
    v0, v1, v2, v3 = state
    for a, b, c, d, x, y in ((v0, v1, v2, v3, 13, 16), (v2, v1, v0, v3, 17, 21)):
        a += b
        c += d
        _rotate_array(b, x)
        _rotate_array(d, y)
        b ^= a
        d ^= c
        _rotate_array(a, 32)
