"""Ids of a task's messages: its next attempt makes them again, and no two messages share one."""

import dataclasses
import itertools
from functools import partial

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rocket_sink.options import SinkOptions
from rocket_sink.rows.contract import resolve_columns
from rocket_sink.rows.normalise import normalise
from rocket_sink.task.message_ids import ContentIds, fingerprint, task_ids
from tests.task.one_task import CTX

OPTIONS = SinkOptions.parse(nameServer="n:1", topic="t")
TIMED = partial(task_ids, timed=True)
EVERY = pytest.mark.parametrize("make", [task_ids, TIMED, ContentIds], ids=["task", "timed", "all"])
BY_CONTENT = pytest.mark.parametrize("make", [TIMED, ContentIds], ids=["timed", "all"])


def rows_of(topic="t", **columns):
    batch = pa.RecordBatch.from_pydict(columns)
    return normalise(batch, resolve_columns(batch.schema, OPTIONS)).with_(topic=topic)


def ids(make, *batches, ctx=CTX):
    maker = make(ctx)
    return [message_id for batch in batches for message_id in maker.ids(batch).to_pylist()]


texts = st.lists(st.binary(min_size=1, max_size=20), min_size=1, max_size=12)


@EVERY
@given(first=texts, second=texts)
def test_the_same_rows_get_the_same_ids_and_no_two_share_one(make, first, second):
    message_ids = ids(make, rows_of(body=first), rows_of(body=second))
    assert message_ids == ids(make, rows_of(body=first), rows_of(body=second))
    assert len(set(message_ids)) == len(message_ids)
    for message_id in message_ids:
        assert len(message_id) == 32 and message_id == message_id.upper() and int(message_id, 16)
        assert make is ContentIds or message_id[20:28] == "0" * 8


@given(texts, texts)
def test_other_rows_get_other_ids_from_their_batch_on(first, second):
    if first != second:
        same = rows_of(body=[b"same"])
        changed, unchanged = (
            ids(task_ids, same, rows_of(body=rows), same) for rows in (first, second)
        )
        assert changed[0] == unchanged[0]
        assert not set(changed[1:]) & set(unchanged[1:])


@BY_CONTENT
@settings(max_examples=150)
@given(
    orders=st.lists(st.integers(0, 20), max_size=60).flatmap(
        lambda rows: st.tuples(st.just(rows), st.permutations(rows))
    ),
    cuts=st.lists(st.integers(0, 60), max_size=5),
    other_cuts=st.lists(st.integers(0, 60), max_size=5),
)
def test_ids_depend_neither_on_order_nor_on_batches(make, orders, cuts, other_cuts):
    def pairs(rows, places):
        """Return the sorted (body, id) of rows that are cut at these places."""
        bodies = [b"%d" % (row % 7) for row in rows]
        bounds = [0, *sorted(min(place, len(rows)) for place in places), len(rows)]
        parts = [bodies[begin:end] for begin, end in itertools.pairwise(bounds)]
        batches = [rows_of(body=part) for part in parts if part]
        return sorted(zip(bodies, ids(make, *batches), strict=True))

    first, replayed = orders
    assert pairs(first, cuts) == pairs(replayed, other_cuts)
    assert len({message_id for _, message_id in pairs(first, cuts)}) == len(first)


@EVERY
def test_everything_that_is_sent_is_in_the_id(make):
    properties = pa.array([[("a", "b")]], pa.map_(pa.string(), pa.string()))
    variants = [
        rows_of(body=[b"x"]), rows_of("u", body=[b"x"]), rows_of(body=[b"y"]),
        *(
            rows_of(body=[b"x"], **{name: value})
            for name, value in {
                "tags": ["a"], "keys": ["a"], "sharding_key": ["a"], "delay_level": [1],
                "flag": [1], "properties": properties,
            }.items()
        ),
    ]  # fmt: skip
    assert len({ids(make, rows)[0] for rows in variants}) == len(variants)


def test_the_places_of_values_are_in_the_ids_of_a_batch():
    base = {"body": [b"x", b"y"]}
    variants = [
        rows_of(**base), rows_of(body=[b"xy", b""]), rows_of(body=[None, b"xy"]),
        rows_of(tags=["a", None], **base), rows_of(tags=[None, "a"], **base),
        rows_of(keys=[["a"], ["b"]], **base), rows_of(keys=[["a", "b"], []], **base),
        rows_of(flag=[1, 2], **base), rows_of(flag=[2, 1], **base),
    ]  # fmt: skip
    assert len({ids(task_ids, rows)[0] for rows in variants}) == len(variants)


@EVERY
def test_a_task_is_known_by_query_epoch_and_partition(make):
    """Equal rows of two partitions are two messages: a stored one must not hide the other."""
    others = [{"query_id": "q2"}, {"epoch": 4}, {"partition": 1}]
    same = {"run_id": "r2", "task_attempt_id": 9, "attempt_number": 1, "worker": "v"}
    of_rows = [
        ids(make, rows_of(body=[b"x"]), ctx=dataclasses.replace(CTX, **change))[0]
        for change in ({}, same, *others)
    ]
    assert of_rows[0] == of_rows[1] and len(set(of_rows)) == 1 + len(others)


def test_two_batch_writes_of_one_app_are_no_replays():
    rows = rows_of(body=[b"x"])
    write = dataclasses.replace(CTX, lane="batch")
    of_writes = [
        ids(task_ids, rows, ctx=dataclasses.replace(write, **change))
        for change in ({}, {"attempt_number": 1}, {"run_id": "r2"})
    ]
    assert of_writes[0] == of_writes[1] != of_writes[2]
    assert task_ids(dataclasses.replace(CTX, query_id="unknown")) is None


@EVERY
def test_ids_of_a_large_batch_differ(make):
    assert len(set(ids(make, rows_of(body=[b"x"] * 70_000)))) == 70_000


def test_slices_and_their_copies_are_the_same_rows():
    table = pa.RecordBatch.from_pydict({"body": [f"row {n}" for n in range(50)]})
    part = table.slice(3, 20)
    copy = pa.RecordBatch.from_pydict({"body": part.column(0).to_pylist()})
    plan = resolve_columns(table.schema, OPTIONS)
    assert ids(task_ids, normalise(part, plan)) == ids(task_ids, normalise(copy, plan))


def test_many_batches_keep_few_runs():
    maker = ContentIds(CTX)
    for start in range(0, 6400, 100):
        maker.ids(rows_of(body=[str(i).encode() for i in range(start, start + 100)]))
    runs = maker._runs
    assert sum(map(len, runs)) == 6400 and len(runs) <= 8
    assert all(np.all(run[1:] >= run[:-1]) for run in runs)


@given(st.integers(0, 3_000_000), st.integers(1, 255))
def test_one_changed_byte_is_seen(at, flip):
    data = np.zeros(3_000_001, np.uint8)
    before = fingerprint(data)
    data[at] ^= flip
    assert fingerprint(data) != before


def test_what_differs_in_the_uppermost_bits_of_two_words_is_seen():
    data = np.zeros(64, np.uint8)
    before = fingerprint(data)
    data[[7, 15]] ^= 0x80
    assert fingerprint(data) != before
