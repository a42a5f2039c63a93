"""Rendezvous and jump hashing: only the keys that must move do."""

from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rocket_sink.routing import hashing

KEYS = pa.array([f"key-{number}" for number in range(4000)])
names = st.lists(st.text(max_size=12), min_size=1, max_size=8, unique=True)


def drawn_weights(data, candidates):
    count = len(candidates)
    return data.draw(st.none() | st.lists(st.integers(1, 16), min_size=count, max_size=count))


def owners(candidates, weights=None):
    indices = hashing.rendezvous(hashing.siphash_array(KEYS), candidates, weights)
    return [candidates[index] for index in indices.tolist()]


@given(names, st.data())
def test_a_leaving_broker_moves_only_its_own_keys(candidates, data):
    assume(len(candidates) > 1)
    weights = drawn_weights(data, candidates)
    gone = data.draw(st.sampled_from(candidates))
    remaining = [name for name in candidates if name != gone]
    rest_weights = weights and [w for n, w in zip(candidates, weights, strict=True) if n != gone]
    before, after = owners(candidates, weights), owners(remaining, rest_weights)
    for old, new in zip(before, after, strict=True):
        assert new == old or old == gone


@given(names, st.randoms(use_true_random=False))
def test_the_order_of_the_candidates_does_not_matter(candidates, random):
    shuffled = random.sample(candidates, len(candidates))
    assert owners(candidates) == owners(shuffled)


@given(st.text(max_size=20), names, st.data())
def test_one_key_is_a_column_of_one(key, candidates, data):
    weights = drawn_weights(data, candidates)
    owner = hashing.rendezvous(hashing.sip_hash24(key.encode()), candidates, weights)
    hashes = hashing.siphash_array(pa.array([key]))
    assert hashing.rendezvous(hashes, candidates, weights).tolist() == [owner]


def test_shares_follow_the_weights():
    plain = Counter(owners(["a", "b", "c", "d"]))
    assert all(800 < count < 1200 for count in plain.values())
    weighted = Counter(owners(["a", "b"], [1, 3]))
    assert 800 < weighted["a"] < 1200
    assert Counter(owners(["a", "b", "c", "d"], [5, 5, 5, 5])) == plain


def test_no_candidate_is_an_error():
    with pytest.raises(ValueError, match="at least one"):
        hashing.rendezvous(1, [])


def test_jump_takes_a_count_per_key():
    hashes = hashing.siphash_array(KEYS)
    counts = np.arange(len(hashes)) % 7 + 1
    mixed = hashing.jump_index(hashes, counts).tolist()
    pairs = zip(hashes.tolist(), counts.tolist(), strict=True)
    assert mixed == [hashing.jump_index(value, count) for value, count in pairs]


def test_jump_as_its_authors_wrote_it():
    def reference(key, count):
        bucket, jump = -1, 0
        while jump < count:
            bucket = jump
            key = (key * 2862933555777941757 + 1) & (1 << 64) - 1
            jump = int((bucket + 1) * (float(1 << 31) / float((key >> 33) + 1)))
        return bucket

    for count in (1, 2, 8, 1000):
        for value in hashing.siphash_array(KEYS[:300]).tolist():
            assert hashing.jump_index(value, count) == reference(value & (1 << 64) - 1, count)
