"""Message ids that a task's next attempt makes again."""

import dataclasses
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocket_sink.options import SinkOptions
from rocket_sink.rows.contract import resolve_columns
from rocket_sink.rows.normalise import normalise
from rocket_sink.task.message_ids import fingerprint, task_ids
from tests.task.one_task import CTX

MAP = pa.map_(pa.string(), pa.string())
OPTIONS = SinkOptions.parse(nameServer="n:1", topic="t")


def rows_of(**columns):
    batch = pa.RecordBatch.from_pydict(columns)
    return normalise(batch, resolve_columns(batch.schema, OPTIONS))


def ids(*batches, ctx=CTX):
    maker = task_ids(ctx)
    return [message_id for batch in batches for message_id in maker.ids(batch).to_pylist()]


texts = st.lists(st.binary(min_size=1, max_size=20), min_size=1, max_size=12)


@given(texts, texts)
def test_the_same_rows_get_the_same_ids_and_no_two_share_one(first, second):
    message_ids = ids(rows_of(body=first), rows_of(body=second))
    assert message_ids == ids(rows_of(body=first), rows_of(body=second))
    assert len(set(message_ids)) == len(message_ids)
    assert {len(message_id) for message_id in message_ids} == {32}


@given(texts, texts)
def test_other_rows_get_other_ids_from_their_batch_on(first, second):
    if first != second:
        same = rows_of(body=[b"same"])
        changed, unchanged = (ids(same, rows_of(body=rows), same) for rows in (first, second))
        assert changed[0] == unchanged[0]
        assert not set(changed[1:]) & set(unchanged[1:])


def test_every_column_is_in_the_id():
    base: dict[str, Any] = {"body": [b"x", b"y"]}
    variants = [
        rows_of(**base), rows_of(body=[b"xy", b""]), rows_of(body=[None, b"xy"]),
        rows_of(tags=["a", None], **base), rows_of(tags=[None, "a"], **base),
        rows_of(tags=["a", ""], **base), rows_of(sharding_key=["a", None], **base),
        rows_of(keys=[["a"], ["b"]], **base), rows_of(keys=[["a", "b"], []], **base),
        rows_of(flag=[1, 2], **base), rows_of(flag=[2, 1], **base),
        rows_of(properties=pa.array([[("a", "b")], []], MAP), **base),
        rows_of(**base).with_(topic="u"),
    ]  # fmt: skip
    first = {ids(rows)[0] for rows in variants}
    # The row contract makes an empty tag null.
    assert len(first) == len(variants) - 1


@pytest.mark.parametrize("change", [{"query_id": "q2"}, {"epoch": 4}, {"partition": 1}])
def test_a_task_is_known_by_query_epoch_and_partition(change):
    rows = rows_of(body=[b"x"])
    assert ids(rows) != ids(rows, ctx=dataclasses.replace(CTX, **change))
    again = dataclasses.replace(CTX, run_id="r2", task_attempt_id=9, attempt_number=1, worker="v")
    assert ids(rows) == ids(rows, ctx=again)


def test_two_batch_writes_of_one_app_are_no_replays():
    rows = rows_of(body=[b"x"])
    write = dataclasses.replace(CTX, lane="batch")
    assert ids(rows, ctx=write) == ids(rows, ctx=dataclasses.replace(write, attempt_number=1))
    assert ids(rows, ctx=write) != ids(rows, ctx=dataclasses.replace(write, run_id="r2"))
    assert task_ids(dataclasses.replace(CTX, query_id="unknown")) is None


def test_ids_of_a_large_batch_differ():
    assert len(set(ids(rows_of(body=[b"x"] * 70_000)))) == 70_000
    assert len(set(timed_ids(rows_of(body=[b"x"] * 70_000)))) == 70_000


def timed_ids(*batches):
    maker = task_ids(CTX, timed=True)
    return [
        message_id
        for batch in batches
        for message_id in maker.ids(batch.with_(topic="t")).to_pylist()
    ]


@given(texts, st.integers(0, 12), st.integers(0, 12))
def test_ids_of_a_task_that_the_clock_cuts_do_not_depend_on_the_cuts(bodies, first, second):
    def cut_at(place):
        parts = [part for part in (bodies[:place], bodies[place:]) if part]
        return timed_ids(*(rows_of(body=part) for part in parts))

    message_ids = cut_at(first)
    assert message_ids == cut_at(second)
    assert len(set(message_ids)) == len(message_ids)


def test_and_have_the_shape_of_the_others():
    (one,), (other,) = timed_ids(rows_of(body=[b"x"])), ids(rows_of(body=[b"x"]))
    assert len(one) == len(other) == 32
    assert one[20:28] == other[20:28] == "0" * 8
    assert one == one.upper()


def test_slices_and_their_copies_are_the_same_rows():
    table = pa.RecordBatch.from_pydict({"body": [f"row {n}" for n in range(50)]})
    part = table.slice(3, 20)
    copy = pa.RecordBatch.from_pydict({"body": part.column(0).to_pylist()})
    plan = resolve_columns(table.schema, OPTIONS)
    assert ids(normalise(part, plan)) == ids(normalise(copy, plan))


@given(st.integers(0, 3_000_000), st.integers(0, 7), st.integers(1, 255))
def test_one_changed_byte_is_seen(at, _, flip):
    data = np.zeros(3_000_001, np.uint8)
    before = fingerprint(data)
    data[at] ^= flip
    assert fingerprint(data) != before


def test_what_differs_in_the_uppermost_bits_of_two_words_is_seen():
    data = np.zeros(64, np.uint8)
    before = fingerprint(data)
    data[[7, 15]] ^= 0x80
    assert fingerprint(data) != before
