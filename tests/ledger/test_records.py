"""Row builders: a row has all given values, and nothing else."""

import datetime as dt

import pyarrow as pa
import pytest

from rocket_sink.errors import Outcome
from rocket_sink.ledger.records import (
    confirmed_row,
    epoch_row,
    in_flight_rows,
    isolation_rows,
    resolution_rows,
    send_rows,
)
from rocket_sink.ledger.schema import KINDS, LEDGER_SCHEMA, columns_of
from rocket_sink.routing.fault import Isolation
from rocket_sink.task.totals import TaskSummary

from .values import attempt, context


def row(batch: pa.RecordBatch, index: int = 0) -> dict:
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
        ("queue_offset", -1, None),
        ("response_code", None, None),
        ("offset_message_id", "", None),
        ("remark", "accessKey=ABCDEF\nand SESAME-SESAME", "accessKey=*** and ***"),
    ],
)
def test_a_fact_of_an_attempt_is_stored(fact, value, stored):
    """Store null for a fact that the broker did not give; clean remarks, and mask secrets."""
    batch = send_rows([attempt(**{fact: value})], context(), secrets=["SESAME-SESAME"])
    assert row(batch)[fact] == stored
    assert send_rows([], context()).num_rows == 0


def test_in_flight_rows_are_sends_without_an_answer():
    batch = in_flight_rows([1, 2], context(), topic="t", message_count=[3, 4], body_bytes=[30, 40])
    assert [r["outcome"] for r in batch.to_pylist()] == ["in_flight", "in_flight"]
    assert row(batch, 1)["request"] == 2
    assert row(batch, 1)["rtt_ms"] is None


def test_isolations_move_from_the_monotonic_clock_to_the_wall():
    event = Isolation("broker-a", "REQUEST_TIMEOUT", 10_000.0, 100.0, 130.0, False, "t")
    values = row(isolation_rows([event], context(), now_s=110.0, now_us=1_700_000_000_000_000))
    start = dt.datetime.fromtimestamp(1_699_999_990, dt.timezone.utc)
    assert values["at"] == values["isolated_from"] == start
    assert values["isolated_until"] - start == dt.timedelta(seconds=30)
    assert (values["broker_name"], values["topic"], values["reachable"]) == ("broker-a", "t", False)


def test_a_task_summary_becomes_an_epoch_row():
    summary = TaskSummary(
        rows_in=10, acked=6, degraded=1, dead=2, unknown=1, duplicates_possible=3,
        first_error="no\nroute",
    )  # fmt: skip
    values = row(epoch_row(vars(summary), context(), complete=True, duration_ms=5.0))
    assert values["rows_in"] == 10
    assert values["duplicates_possible"] == 3
    assert values["filtered"] == 0
    assert values["complete"] is True
    assert values["first_error"] == "no route"


def test_the_drivers_row_has_no_partition():
    values = row(confirmed_row(context(partition=None), num_input_rows=9))
    assert values["partition"] is None
    assert values["num_input_rows"] == 9
    assert values["complete"] is None


def test_resolutions_take_columns_and_refuse_mistakes():
    columns = {"letter_id": pa.array(["a", "b"]), "resolution": "resent", "queue_offset": [1, 2]}
    values = row(resolution_rows({**columns, "note": "by\nhand"}, context()), 1)
    assert (values["letter_id"], values["queue_offset"], values["note"]) == ("b", 2, "by hand")
    for name, value, why in (
        ("resolution", ["forgotten"], "forgotten"), ("rtt_ms", 1.0, "rtt_ms"),
        ("topic", ["t"], "1 values for 2"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=why):
            resolution_rows({**columns, name: value}, context())
