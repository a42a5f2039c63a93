"""The error budget of an epoch, on the driver."""

from contextlib import nullcontext

import pytest

from rocket_sink.errors import ConfigurationError, DeliveryError
from rocket_sink.options import SinkOptions
from rocket_sink.spark.checks.budget import check_budget
from rocket_sink.spark.datasource import BatchWriter, RowStreamWriter, TaskMessage
from rocket_sink.task.totals import TaskSummary


def counts(rows_in, dead, unknown=0):
    return {"rows_in": rows_in, "dead": dead, "unknown": unknown, "first_error": "why"}


@pytest.mark.parametrize(
    ("limit", "given", "is_beyond"),
    [
        (3, counts(100, 2, 2), True), (0, counts(100, 1), True), ("10%", counts(100, 11), True),
        ("", counts(100, 100), False), (3, counts(100, 3), False), ("0%", counts(0, 0), False),
        ("29 %", counts(100, 29), False),  # 0.29 * 100 is 28.999999999999996.
    ],
)  # fmt: skip
def test_the_budget(limit, given, is_beyond):
    refusal = pytest.raises(DeliveryError, match=f"epoch 7 .* maxEpochFailures={limit} .*why")
    with refusal if is_beyond else nullcontext():
        check_budget(SinkOptions.parse(maxEpochFailures=limit), given, 7)


def test_a_data_source_sums_its_tasks_up(caplog):
    options = SinkOptions.parse(nameServer="n:1", topic="t", maxEpochFailures=3)
    summary = TaskSummary(rows_in=5, acked=3, dead=1, unknown=1, first_error="why")
    messages = [TaskMessage("q", "r", summary), TaskMessage("q", "r", summary)]
    writer = RowStreamWriter(options, None)
    with pytest.raises(DeliveryError, match="4 of 10 rows of epoch 7"):
        writer.commit(messages, 7)
    writer.commit(messages[:1], 7)
    assert not caplog.messages  # The listener of the session warns of its losses.


@pytest.mark.parametrize(("kind", "epoch"), [(RowStreamWriter, (7,)), (BatchWriter, ())])
def test_a_write_whose_tasks_have_told_nothing_is_not_done(kind, epoch):
    """Spark passes None for a task that never called `write`, as under a continuous trigger."""
    writer = kind(SinkOptions.parse(nameServer="n:1", topic="t"), None)
    empty = TaskMessage("q", "r", TaskSummary())
    writer.commit([empty, empty], *epoch)
    writer.commit([], *epoch)
    for messages in ([None], [empty, None]):
        with pytest.raises(ConfigurationError, match=r"1 of its \d tasks .*trigger\(continuous"):
            writer.commit(messages, *epoch)


def test_an_epoch_whose_note_cannot_be_written_is_done_all_the_same(tmp_path, caplog):
    """A commit that fails ends the query, and its restart sends the epoch again."""
    (tmp_path / "_spool").write_text("no folder")
    options = SinkOptions.parse(nameServer="n:1", topic="t", ledger=str(tmp_path))
    message = TaskMessage("q", "r", TaskSummary(rows_in=5, acked=5))
    RowStreamWriter(options, None).commit([message], 7)
    assert "that epoch 7 is done" in caplog.text


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ({"delivery": "effectively_once", "appId": "load"}, "under the same appId sends only"),
        ({"delivery": "effectively_once"}, "backfill them"),
        ({"appId": "load"}, "backfill them"),
    ],
)
def test_what_to_do_about_a_batch(options, advice):
    parsed = SinkOptions.parse({"maxEpochFailures": 0, **options})
    with pytest.raises(DeliveryError, match=f"1 of 9 rows could .* ledger.*{advice}") as caught:
        check_budget(parsed, counts(9, 1))
    of_rows = {"rows_in": 9, "dead": 1, "unknown": 0}
    assert caught.value.facts == {"counts": of_rows, "first_error": "why"}
