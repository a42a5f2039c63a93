"""Dead letters keep all fields and the order of rows."""

import datetime as dt
import hashlib

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocket_sink.ledger import records
from rocket_sink.ledger.records import dead_letter_rows
from rocket_sink.ledger.schema import LEDGER_SCHEMA

from .values import context

PROPERTIES = pa.map_(pa.string(), pa.string())


def rows(columns, **more):
    batches = dead_letter_rows(columns, context(), **more)
    for batch in batches:
        assert batch.schema.equals(LEDGER_SCHEMA)
        batch.validate(full=True)
    return [values for batch in batches for values in batch.to_pylist()]


def test_all_columns_come_through():
    [first, second] = rows(
        {
            "body": pa.array([b"one", None], pa.large_binary()),
            "topic": pa.array(["t", None]),
            "tags": "tag",
            "keys": pa.array([["k1", "k2"], None], pa.list_(pa.string())),
            "sharding_key": pa.array(["s", None], pa.large_string()),
            "properties": pa.array([[("a", "1"), ("b", "2")], None], PROPERTIES),
            "delay_level": pa.array([2**40, None], pa.int64()),
            "delivery_timestamp_ms": pa.array([2**60, None], pa.int64()),
            "event_time_ms": pa.array([1_700_000_000_123, 2**62], pa.int64()),
            "order_by": pa.array([1, 2]),
            "flag": pa.array([7, 8]),
            "wait_store": pa.array([False, None]),
            "message_id": pa.array(["ID1", "ID2"]),
            "reason": pa.array(["data", "unknown"]),
            "last_error_code": "NULL_BODY",
            "attempts": 0,
        }
    )
    assert (first["body"], first["body_bytes"], second["body"]) == (b"one", 3, None)
    assert first["keys"] == ["k1", "k2"]
    assert first["properties"] == [("a", "1"), ("b", "2")]
    assert (first["delay_level"], first["delivery_timestamp"]) == (2**40, 2**60)
    assert first["event_time"] == dt.datetime.fromtimestamp(1_700_000_000.123, dt.timezone.utc)
    assert second["event_time"] is None  # A timestamp cannot express it.
    assert (first["tags"], second["tags"]) == ("tag", "tag")
    assert (first["reason"], second["reason"]) == ("data", "unknown")


def test_times_that_python_cannot_say_are_null():
    """A single such time would keep all letters from being collected."""
    moments = [-62_135_596_800_001, -62_135_596_800_000, 253_402_300_799_999, 253_402_300_800_000]
    columns = {"event_time_ms": pa.array(moments, pa.int64()), "reason": "data"}
    before, first, last, after = (row["event_time"] for row in rows(columns))
    assert (before, after) == (None, None)
    assert first == dt.datetime.min.replace(tzinfo=dt.timezone.utc)
    assert last == dt.datetime(9999, 12, 31, 23, 59, 59, 999_000, dt.timezone.utc)


def test_a_key_per_row_becomes_a_list_of_one():
    letters = rows({"keys": pa.array([None, "a", "", None, "b"]), "reason": "data"})
    assert [r["keys"] for r in letters] == [None, ["a"], [""], None, ["b"]]
    sliced = pa.array(["x", None, "a", "b"]).slice(1)
    assert [r["keys"] for r in rows({"keys": sliced, "reason": "data"})] == [None, ["a"], ["b"]]


def test_order_and_identity():
    first = rows({"body": pa.array([b"a", b"b"]), "reason": "transport"})
    second = rows({"body": pa.array([b"c"]), "reason": "transport"}, first_ordinal=2)
    assert [r["ordinal"] for r in first + second] == [0, 1, 2]
    again = rows({"body": pa.array([b"a", b"b"]), "reason": "transport"})
    ids = [r["letter_id"] for r in first + second + again]
    assert len(set(ids)) == 5


@given(st.lists(st.binary(min_size=0, max_size=30), max_size=40), st.integers(1, 60))
def test_big_sets_are_cut_and_nothing_is_lost(bodies, limit):
    before, records._BATCH_BYTES = records._BATCH_BYTES, limit
    try:
        batches = dead_letter_rows(
            {"body": pa.array(bodies, pa.binary()), "reason": "data"}, context()
        )
    finally:
        records._BATCH_BYTES = before
    assert [b for batch in batches for b in batch.column("body").to_pylist()] == bodies
    assert [o for b in batches for o in b.column("ordinal").to_pylist()] == list(range(len(bodies)))
    for batch in batches:
        assert batch.num_rows == 1 or sum(batch.column("body_bytes").to_pylist()) <= limit


def test_text_that_is_not_utf8_can_be_read_again():
    bad = pa.array([b"ok", b"\xff\xfe", None]).cast(pa.binary()).view(pa.string())
    pairs = pa.MapArray.from_arrays([0, 1, 2, 2], bad.slice(0, 2), bad.slice(0, 2))
    lists = pa.ListArray.from_arrays([0, 2, 2, 3], bad)
    letters = rows({"topic": bad, "properties": pairs, "keys": lists,
                    "body": pa.array([b"\xff"] * 3), "reason": "data"})  # fmt: skip
    assert [r["topic"] for r in letters] == ["ok", "\ufffd\ufffd", None]
    assert letters[1]["properties"] == [("\ufffd\ufffd", "\ufffd\ufffd")]
    assert letters[0]["keys"] == ["ok", "\ufffd\ufffd"]
    assert letters[0]["body"] == b"\xff"


def test_without_bodies_their_length_and_digest_stay():
    [one, none] = rows({"body": pa.array([b"secret", None]), "reason": "data"}, include_body=False)
    assert one["body"] is None
    assert one["body_bytes"] == 6
    assert one["body_sha256"] == hashlib.sha256(b"secret").hexdigest()
    assert none["body_sha256"] is None


def test_error_texts_are_cleaned_whether_single_or_many():
    texts = pa.array(["a\nb", "password=x1y2", "a\nb"])
    letters = rows(
        {"reason": "data", "last_error": texts, "first_error": "Key CANARY"}, secrets=["CANARY"]
    )
    assert [r["last_error"] for r in letters] == ["a b", "password=***", "a b"]
    assert letters[0]["first_error"] == "Key ***"


def test_mistakes_are_refused():
    columns = {"body": pa.array([b"a"]), "reason": "data"}
    for name, value, why in (
        ("reason", "gone", "'gone'"), ("rtt_ms", 1, "rtt_ms"),
        ("tags", pa.array(["a", "b"]), r"\[1, 2\]"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=why):
            dead_letter_rows({**columns, name: value}, context())
