"""From columns to batch bodies: the bytes, the groups, the cuts."""

from itertools import zip_longest

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rocket_sink.errors import LocalProtocolError
from rocket_sink.wire.batch import encode_inner, iter_batch
from rocket_sink.wire.columns import buffers
from rocket_sink.wire.columns.buffers import join_pieces
from rocket_sink.wire.columns.encode import (
    cut_requests,
    encode_columns,
    group_by_queue,
    message_id_column,
)
from tests.decoding import batch_body, message_id

UNTIMED = settings(deadline=None)
MESSAGES = st.lists(
    st.tuples(
        st.binary(min_size=1, max_size=30), st.text("ab\x01\x02é", max_size=12),
        st.integers(-(2**31), 2**31 - 1),
    )
)  # fmt: skip


def encoded(rows, *, large=False):
    kind = pa.large_binary() if large else pa.binary()
    return encode_columns(
        pa.array([body for body, _, _ in rows], kind),
        pa.array([properties.encode() for _, properties, _ in rows], pa.binary()),
        pa.array([flag for _, _, flag in rows], pa.int64()),
    )


@UNTIMED
@given(MESSAGES, st.booleans(), st.integers(0, 3))
def test_each_message_has_the_bytes_of_the_scalar_encoder(rows, large, first):
    batch = encoded(rows, large=large)
    expected = [encode_inner(*row) for row in rows]
    first = min(first, len(rows))
    assert batch_body(batch, first, len(rows)) == b"".join(expected[first:])
    assert np.diff(batch.offsets).tolist() == [len(item) for item in expected]


@UNTIMED
@given(MESSAGES, st.randoms(use_true_random=False))
def test_a_batch_can_be_decoded_after_it_was_grouped(rows, rng):
    queues = np.array([rng.randrange(3) for _ in rows], np.int64)
    groups = group_by_queue(queues, 3)
    batch = encoded(rows).take(groups)
    for queue in range(3):
        part = batch_body(batch, groups.bounds[queue], groups.bounds[queue + 1])
        bodies = [row[0] for row, own in zip(rows, queues, strict=True) if own == queue]
        assert [message.body for message in iter_batch(part)] == bodies


def test_sliced_columns_encode_their_own_rows_only():
    body, properties = pa.array([b"x", b"a", b"y"])[1:2], pa.array([b"p", b"q", b"r"])[1:2]
    batch = encode_columns(body, properties)
    assert batch_body(batch, 0, 1) == encode_inner(b"a", "q")


def test_properties_longer_than_their_int16_length_are_refused():
    longest = (b"x", "p" * 32_767, 0)
    assert batch_body(encoded([longest]), 0, 1) == encode_inner(*longest)
    with pytest.raises(LocalProtocolError):
        encoded([(b"x", "p" * 32_768, 0)])


PIECES = st.lists(
    st.one_of(
        st.binary(max_size=4),
        st.tuples(st.just("fixed"), st.integers(1, 5)),
        st.lists(st.none() | st.binary(max_size=4), min_size=3, max_size=3),
    ),
    max_size=7,
)


@UNTIMED
@given(PIECES, st.sampled_from([2**31 - 1, 4]))
def test_pieces_are_joined_as_python_would_join_them(pieces, limit):
    """The result is that of Python's join for any kinds of pieces, also beyond 32-bit offsets."""
    columns, rows = [], [[], [], []]
    for piece in pieces:
        if isinstance(piece, bytes):
            values = [piece] * 3
            columns.append(piece)
        elif isinstance(piece, tuple):
            values = [bytes([65 + i]) * piece[1] for i in range(3)]
            columns.append(np.array(values, f"S{piece[1]}").view(f"V{piece[1]}"))
        else:
            values = [value or b"" for value in piece]
            columns.append(pa.array(piece, pa.binary()))
        for row, value in zip(rows, values, strict=True):
            row.append(value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buffers, "INT32_MAX", limit)
        joined = join_pieces(columns, 3)
    expected = [b"".join(row) for row in rows]
    assert joined.to_pylist() == expected
    assert pa.types.is_large_binary(joined.type) == (len(b"".join(expected)) > limit)


@UNTIMED
@given(st.lists(st.integers(0, 5), max_size=60), st.sampled_from([6, 70_000]))
def test_grouping_is_a_stable_sort_by_queue(queues, count):
    groups = group_by_queue(np.array(queues, np.int64), count)
    expected = [i for q in range(6) for i, own in enumerate(queues) if own == q]
    assert groups.order.tolist() == expected
    assert groups.sorted_already == (expected == list(range(len(queues))))
    assert np.diff(groups.bounds)[:6].tolist() == [queues.count(q) for q in range(6)]
    assert len(groups.bounds) == count + 1


@pytest.mark.parametrize(("index", "said"), [(-1, "negative"), (2, "queue index 2 with 2 queues")])
def test_a_queue_that_is_not_there_is_an_error(index, said):
    with pytest.raises(ValueError, match=said):
        group_by_queue(np.array([0, index]), 2)


@UNTIMED
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(22, 90)), max_size=50),
    st.integers(60, 300),
    st.integers(1, 9),
)
def test_cuts_are_whole_in_order_within_limits_and_as_few_as_can_be(rows, max_bytes, max_messages):
    rows.sort(key=lambda row: row[0])
    offsets = np.concatenate(([0], np.cumsum([size for _, size in rows]))).astype(np.int64)
    groups = group_by_queue(np.array([queue for queue, _ in rows], np.int64), 4)
    cuts = cut_requests(offsets, groups.bounds, max_bytes, max_messages)
    assert [i for cut in cuts for i in range(cut.first, cut.last)] == list(range(len(rows)))
    for cut, following in zip_longest(cuts, cuts[1:]):
        size = offsets[cut.last] - offsets[cut.first]
        assert {rows[i][0] for i in range(cut.first, cut.last)} == {cut.group}
        assert cut.last - cut.first <= max_messages
        assert size <= max_bytes or cut.last - cut.first == 1
        if following is not None and following.group == cut.group:
            with_next = offsets[cut.last + 1] - offsets[cut.first]
            assert with_next > max_bytes or cut.last - cut.first == max_messages


@UNTIMED
@given(
    st.sampled_from([bytes([10, 0, 0, 7]), bytes(range(16))]),
    st.integers(0, 2**32),
    st.integers(-(2**31), 2**31 - 1),
    st.integers(0, 31 * 86_400_000),
    st.integers(0, 200_000),
)
def test_ids_are_those_that_are_made_one_by_one(ip, pid, class_hash, span_ms, counter):
    start_ms = 1_700_000_000_000
    given_parts = {"ip": ip, "pid": pid, "class_hash": class_hash}
    column = message_id_column(**given_parts, span_ms=span_ms, counter=counter, count=5)
    wraps = [((counter & 0xFFFF) + i) >> 16 for i in range(5)]
    assert column.to_pylist() == [
        message_id(
            **given_parts, start_ms=start_ms, now_ms=start_ms + span_ms + wraps[i],
            counter=counter + i,
        )
        for i in range(5)
    ]  # fmt: skip


def test_ids_of_one_column_differ_though_the_counter_wraps():
    column = message_id_column(
        ip=bytes(4), pid=1, class_hash=2, span_ms=5, counter=65_000, count=140_000
    )
    assert len(column.unique()) == 140_000
