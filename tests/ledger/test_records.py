"""The ledger's schema, and the builders of rows: a row has all given values and nothing else."""

import dataclasses
import datetime as dt
import hashlib

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocket_sink.errors import Outcome
from rocket_sink.ledger import records
from rocket_sink.ledger.records import (
    RunContext,
    confirmed_row,
    dead_letter_rows,
    epoch_row,
    in_order,
    isolation_rows,
    resolution_rows,
    send_rows,
)
from rocket_sink.ledger.schema import (
    KINDS,
    LEDGER_SCHEMA,
    columns_of,
    ledger_ddl,
)
from rocket_sink.routing.fault import Isolation
from rocket_sink.task.totals import TaskSummary

from .values import attempt, context


def row(batch, index=0):
    assert batch.schema.equals(LEDGER_SCHEMA)
    batch.validate(full=True)
    values = batch.slice(index, 1).to_pylist()[0]
    kind = values["kind"]
    assert kind in KINDS
    foreign = set(LEDGER_SCHEMA.names) - set(columns_of(kind)) - {"kind"}
    assert all(values[name] is None for name in foreign)
    return values


def test_a_send_row_holds_its_attempt_and_its_task():
    values = row(send_rows([attempt(message_id="ID", remark="fine")], context(), requests=[5]))
    assert values["kind"] == "send"
    assert values["at"] == dt.datetime.fromtimestamp(1_700_000_000.123, dt.timezone.utc)
    for name in ("attempt", "topic", "broker_name", "broker_address", "queue_id", "queue_offset",
                 "queue_wait_ms", "connect_ms", "rtt_ms", "message_count", "body_bytes",
                 "wire_bytes", "response_code"):  # fmt: skip
        assert values[name] == getattr(attempt(), name), name
    assert values["outcome"] == "acked"
    assert values["request"] == 5
    assert values["remark"] == "fine"
    assert values["maybe_duplicate"] is False
    for name, value in vars(context()).items():
        assert values[name] == value


@pytest.mark.parametrize(
    ("fact", "value", "stored"),
    [
        *(("outcome", outcome, outcome.value) for outcome in Outcome),
        ("queue_offset", -1, None), ("queue_offset", 0, 0), ("queue_id", -1, None),
        ("queue_id", 0, 0), ("error_code", "TLS", "TLS"),
        ("response_code", None, None), ("offset_message_id", "", None),
        ("remark", "accessKey=ABCDEF\nand SESAME-SESAME", "accessKey=*** and ***"),
    ],
)  # fmt: skip
def test_a_fact_of_an_attempt_is_stored(fact, value, stored):
    """Store null for a fact that the broker did not give; clean remarks, and mask secrets."""
    batch = send_rows([attempt(**{fact: value})], context(), secrets=["SESAME-SESAME"])
    assert row(batch)[fact] == stored
    assert send_rows([], context()).num_rows == 0


def test_isolations_move_from_the_monotonic_clock_to_the_wall():
    event = Isolation("broker-a", "REQUEST_TIMEOUT", 10_000.0, 100.0, 130.0, False, "t")
    values = row(isolation_rows([event], context(), now_s=110.0, now_us=1_700_000_000_000_000))
    start = dt.datetime.fromtimestamp(1_699_999_990, dt.timezone.utc)
    assert values["at"] == values["isolated_from"] == start
    assert values["isolated_until"] - start == dt.timedelta(seconds=30)
    assert (values["broker_name"], values["topic"], values["reachable"]) == ("broker-a", "t", False)
    assert (values["cause"], values["latency_ms"]) == ("REQUEST_TIMEOUT", 10_000.0)


def test_a_task_and_the_driver_each_make_an_epoch_row():
    values = row(confirmed_row(context(partition=None), num_input_rows=9))
    assert (values["partition"], values["num_input_rows"], values["complete"]) == (None, 9, None)
    summary = TaskSummary(
        rows_in=10, acked=6, degraded=1, dead=2, unknown=1, duplicates_possible=3,
        first_error="no\nroute for SESAME",
    )  # fmt: skip
    values = row(epoch_row(vars(summary), context(), complete=True, secrets=["SESAME"]))
    assert values["rows_in"] == 10
    assert values["duplicates_possible"] == 3
    assert values["filtered"] == 0
    assert values["complete"] is True
    assert values["first_error"] == "no route for ***"


def test_resolutions_take_columns():
    columns = {"letter_id": pa.array(["a", "b"]), "resolution": "resent", "queue_offset": [1, 2]}
    values = row(resolution_rows({**columns, "note": "by\nhand"}, context()), 1)
    assert [values[name] for name in (*columns, "note")] == ["b", "resent", 2, "by hand"]


def test_rows_are_numbered_in_their_order():
    """A spool file has 262,144 numbers; what is more has the last one."""
    batches = [pa.record_batch({"sequence": pa.nulls(n, pa.int64())}) for n in (2, 262_144)]
    for more, first in (((), 7), ((1,), 262_151)):
        few, many = (batch["sequence"].to_pylist() for batch in in_order(batches, 7, *more))
        assert few == [first, first + 1] and many[:2] == [first + 2, first + 3]
        assert many[-4:] == [first + 262_142, *[first + 262_143] * 3]


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
            "traceparent": "00-x",
            "tracestate": "x",
            "reason": pa.array(["data", "unknown"]),
        }
    )
    assert [(row["body"], row["body_bytes"]) for row in (first, second)] == [(b"one", 3), (None, 0)]
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


def test_large_letters_have_batches_of_64_mib():
    bodies = pa.array([bytes(1 << 25)] * 3)
    batches = dead_letter_rows({"body": bodies, "reason": "data"}, context())
    assert [batch.num_rows for batch in batches] == [2, 1]


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
    assert rows({"tags": pa.array(["a"]), "reason": "data"}, include_body=False)[0]["tags"] == "a"


def test_error_texts_are_cleaned_whether_single_or_many():
    texts = pa.array(["a\nb", "password=x1y2", "a\nb"])
    letters = rows(
        {"reason": "data", "last_error": texts, "first_error": "Key CANARY"}, secrets=["CANARY"]
    )
    assert [r["last_error"] for r in letters] == ["a b", "password=***", "a b"]
    assert letters[0]["first_error"] == "Key ***"


@pytest.mark.parametrize(
    ("build", "name", "value", "why"),
    [
        (resolution_rows, "resolution", ["forgotten"], "forgotten"),
        (resolution_rows, "rtt_ms", 1.0, "rtt_ms"),
        (resolution_rows, "topic", ["t"], "1 values for 2"),
        (dead_letter_rows, "reason", "gone", "'gone'"), (dead_letter_rows, "x", pa.array([1]), "x"),
        (dead_letter_rows, "tags", pa.array(["a", "b"]), r"\[1, 2\]"),
        (dead_letter_rows, "body", b"no array", r"of one length, not \[\]"),
    ],
)  # fmt: skip
def test_mistakes_are_refused(build, name, value, why):
    columns = {"letter_id": ["a", "b"], "resolution": "resent"}
    if build is dead_letter_rows:
        columns = {"body": pa.array([b"a"]), "reason": "data"}
    with pytest.raises(ValueError, match=why):
        build({**columns, name: value}, context())


@pytest.mark.spark
def test_ddl_and_arrow_schema_are_the_same_columns(spark):
    from pyspark.sql.pandas.types import from_arrow_type
    from pyspark.sql.types import StructType

    from_ddl = {f.name: f.dataType for f in StructType.fromDDL(ledger_ddl())}
    assert list(from_ddl) == LEDGER_SCHEMA.names
    for field in LEDGER_SCHEMA:
        assert from_ddl[field.name] == from_arrow_type(field.type), field.name


def test_every_kind_says_who_wrote_its_rows():
    names = {f.name for f in dataclasses.fields(RunContext)}
    assert len(names) == 9
    # Tables in use have these columns; a change of them needs another version.
    assert [len(columns_of(kind)) for kind in KINDS] == [39, 41, 21, 18, 29, 16, 19]
    for kind in KINDS:
        assert names <= set(columns_of(kind))
    with pytest.raises(ValueError, match="no_kind"):
        columns_of("no_kind")
