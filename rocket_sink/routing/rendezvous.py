"""Rendezvous (highest random weight) and jump hashing over key hashes.

Sources: Thaler and Ravishankar (1998), with the logarithmic weights of Schindelhauer and
Schomaker (2005); Lamping and Veach, "A Fast, Minimal Memory, Consistent Hash Algorithm" (2014).

A broker that leaves moves only its own keys, each to the broker that scored second for it; one
that comes back takes exactly those keys back. Scores depend on the candidates' names, never on
their order. Keys come as SipHash values; the same functions serve one key (an array of one) and a
column, so the two can't differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from rocket_sink.routing.siphash import IntArray, sip_hash24

_MASK: Final = (1 << 64) - 1


def rendezvous(
    key: str | bytes, candidates: Sequence[str], weights: Sequence[int] | None = None
) -> int:
    """Index of the candidate that owns `key`; a candidate's share is its weight.

    Raises:
        ValueError: there are no candidates.
    """
    data = key.encode("utf-8", "surrogatepass") if isinstance(key, str) else key
    hashes = np.array([sip_hash24(data)], np.int64)
    return int(rendezvous_of_hashes(hashes, candidates, weights)[0])


def rendezvous_of_hashes(
    hashes: IntArray, candidates: Sequence[str], weights: Sequence[int] | None = None
) -> IntArray:
    """`rendezvous` for int64 SipHash values of keys: int64 candidate indices.

    Two candidates of one name, or of one score (2^-64), are settled by the name.
    """
    if not candidates:
        raise ValueError("rendezvous hashing needs at least one candidate")
    flat = weights is None or len(set(weights)) == 1
    keys = hashes.view(np.uint64)
    order = sorted(range(len(candidates)), key=candidates.__getitem__)
    best = np.full(len(keys), order[0], np.int64)
    highest = np.zeros(len(keys), np.uint64 if flat else np.float64)
    for position, index in enumerate(order):
        salt = np.uint64(sip_hash24(candidates[index].encode()) & _MASK)
        score = _mix(keys ^ salt)
        if not flat:
            assert weights is not None
            score = _weighted(score, weights[index])
        wins = score > highest if position else np.ones(len(keys), np.bool_)
        best[wins], highest[wins] = index, score[wins]
    return best


def _mix(value: IntArray) -> IntArray:
    """The finaliser of splitmix64 (Stafford's variant 13): each input bit reaches all bits."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: IntArray = value ^ (value >> np.uint64(31))
    return mixed


def _weighted(score: IntArray, weight: int) -> IntArray:
    # The half keeps the logarithm's argument inside (0, 1).
    uniform = ((score >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    weighted: IntArray = weight / -np.log(uniform)
    return weighted


def jump_index(hash_value: int, count: int) -> int:
    """Bucket of a hash among `count`; growing by one moves 1/(count + 1) of the hashes."""
    return int(jump_index_array(np.array([hash_value], np.int64), count)[0])


def jump_index_array(hashes: IntArray, count: int | IntArray) -> IntArray:
    """`jump_index` of int64 hashes; `count` may differ per hash. About ln(count) passes."""
    state = hashes.astype(np.int64).view(np.uint64)
    counts = np.broadcast_to(np.asarray(count, np.int64), state.shape)
    bucket = np.zeros(len(state), np.int64)
    jump = np.zeros(len(state), np.float64)
    going = jump < counts
    while going.any():
        bucket[going] = jump[going].astype(np.int64)
        state = state * np.uint64(2862933555777941757) + np.uint64(1)
        step = (state >> np.uint64(33)).astype(np.float64) + 1.0
        jump = np.where(going, np.floor((bucket + 1) * (2.0**31 / step)), jump)
        going = jump < counts
    return bucket
