"""Ids by content: the same rows get the same ids again, equal rows get different ones."""

import dataclasses
import itertools
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from rocket_sink.options import SinkOptions
from rocket_sink.rows.contract import resolve_columns
from rocket_sink.rows.normalise import normalise
from rocket_sink.task.message_ids import ContentIds
from tests.task.one_task import CTX

OPTIONS = SinkOptions.parse(nameServer="n:1", topic="t")


def rows_of(topic="t", **columns):
    batch = pa.RecordBatch.from_pydict(columns)
    return normalise(batch, resolve_columns(batch.schema, OPTIONS)).with_(topic=topic)


def ids(rows, cuts, ctx=CTX):
    """Return (row, id) of rows that are sent in the given batches."""
    maker, row_ids = ContentIds(ctx), []
    bounds = [0, *sorted(min(cut, len(rows)) for cut in cuts), len(rows)]
    for first, last in itertools.pairwise(bounds):
        part = rows[first:last]
        if part:
            body = [str(row % 7).encode() for row in part]
            row_ids += zip(
                [r % 7 for r in part], maker.ids(rows_of(body=body)).to_pylist(), strict=True
            )
    return row_ids


@settings(max_examples=150)
@given(
    st.lists(st.integers(0, 20), max_size=60).flatmap(
        lambda rows: st.tuples(st.just(rows), st.permutations(rows))
    ),
    st.lists(st.integers(0, 60), max_size=5),
    st.lists(st.integers(0, 60), max_size=5),
)
def test_ids_depend_neither_on_order_nor_on_batches(orders, cuts, other_cuts):
    first, replayed = orders
    row_ids = ids(first, cuts)
    assert sorted(row_ids) == sorted(ids(replayed, other_cuts))
    assert len({message_id for _, message_id in row_ids}) == len(first)


def test_everything_that_is_sent_is_in_the_id():
    base: dict[str, Any] = {"body": [b"x"]}
    variants = [
        rows_of(**base), rows_of("u", **base), rows_of(body=[b"y"]), rows_of(tags=["a"], **base),
        rows_of(keys=["a"], **base), rows_of(sharding_key=["a"], **base),
        rows_of(delay_level=[1], **base), rows_of(flag=[1], **base),
    ]  # fmt: skip
    distinct = {ContentIds(CTX).ids(rows)[0].as_py() for rows in variants}
    assert len(distinct) == len(variants)


def test_query_epoch_and_partition_are_in_the_id():
    """Equal rows of two partitions are two messages: a stored one must not hide the other."""
    others = [{"query_id": "q2"}, {"epoch": 4}, {"partition": 1}]
    same = [{"run_id": "r2"}, {"task_attempt_id": 9}, {"attempt_number": 1}, {"worker": "w:2"}]

    def one(change):
        (made,) = ids([1], [], dataclasses.replace(CTX, **change))
        return made[1]

    assert len({one(change) for change in [{}, *others]}) == 1 + len(others)
    assert {one(change) for change in [{}, *same]} == {one({})}


def test_an_id_is_32_hex_digits():
    message_ids = ContentIds(CTX).ids(rows_of(body=[b"a", b"a", b"b"])).to_pylist()
    assert all(
        len(message_id) == 32 and message_id == message_id.upper() and int(message_id, 16) >= 0
        for message_id in message_ids
    )


def test_many_batches_keep_few_runs():
    maker = ContentIds(CTX)
    for start in range(0, 6400, 100):
        maker.ids(rows_of(body=[str(i).encode() for i in range(start, start + 100)]))
    runs = maker._runs
    assert sum(map(len, runs)) == 6400 and len(runs) <= 8
    assert all(np.all(run[1:] >= run[:-1]) for run in runs)
