"""The ledger rows that a task's recorder makes."""

import time
from types import SimpleNamespace

import pyarrow as pa
import pytest

from rocket_sink.errors import Outcome, TopicNotFoundError
from rocket_sink.options import SinkOptions
from rocket_sink.producer.engine.attempt import Completion
from rocket_sink.routing.fault import Isolation
from rocket_sink.task.recorder import LedgerRecorder
from rocket_sink.task.totals import TaskSummary
from tests.ledger.values import attempt, context


def rows_of(recorder, rows):
    recorder.add_account(TaskSummary(), complete=True, duration_s=1.0)
    return [row for batch in rows for row in batch.to_pylist() if row["kind"] == "send"]


@pytest.mark.parametrize(
    ("delivery", "outcomes", "doubtful"),
    [
        ("at_least_once", "rejected unknown acked", [False, False, True]),
        ("at_least_once", "unknown rejected acked", [False, True, True]),
        ("transactional", "unknown acked", [False, False]),
    ],
)
def test_attempts_after_an_unknown_one_may_double(delivery, outcomes, doubtful):
    rows: list[pa.RecordBatch] = []
    recorder = LedgerRecorder(SinkOptions(delivery=delivery), context(), rows.append)
    request = SimpleNamespace(number=1, waited_ms=0.0, delayed=False, maybe_duplicate=False)
    attempts = [attempt(outcome=Outcome(outcome)) for outcome in outcomes.split()]
    recorder.add_attempts(Completion(request, Outcome.ACKED, None, None, attempts))
    assert [row["maybe_duplicate"] for row in rows_of(recorder, rows)] == doubtful


def test_a_topic_without_a_route_is_a_wait_without_a_broker():
    rows: list[pa.RecordBatch] = []
    recorder = LedgerRecorder(SinkOptions(), context(), rows.append)
    recorder.add_missing_route(TopicNotFoundError("nowhere"), "t")
    (row,) = rows_of(recorder, rows)
    assert abs(time.time() - row["at"].timestamp()) < 60
    zeros = "queue_wait_ms connect_ms rtt_ms message_count body_bytes wire_bytes request"
    expected = dict.fromkeys(zeros.split(), 0)
    expected |= {"attempt": 1, "queue_id": None, "queue_offset": None}
    assert {name: row[name] for name in expected} == expected


def test_isolations_are_rows():
    rows: list[pa.RecordBatch] = []
    recorder = LedgerRecorder(SinkOptions(), context(), rows.append)
    recorder.add_isolations([])
    assert not rows
    recorder.add_isolations([Isolation("broker-a", "CONNECT", 1.0, 2.0, 3.0)] * 2)
    [batch] = rows
    assert [row["broker_name"] for row in batch.to_pylist()] == ["broker-a"] * 2
