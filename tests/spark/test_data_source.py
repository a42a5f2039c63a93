"""The data source without Java: its methods are called as Spark calls them, a process per call."""

import pickle

import pyarrow as pa
import pytest
from pyspark import TaskContext
from pyspark.sql import Row
from pyspark.sql.types import StructType

from rocket_sink import errors
from rocket_sink.spark.datasource import RocketMQDataSource, RowStreamWriter
from tests.clusters import scripted_cluster
from tests.ledger.values import spool_rows
from tests.spark.test_alone import QUERY, task_of

CONSOLE = "rocket_sink.spark.console"
BODY = StructType().add("body", "string")
cluster = scripted_cluster(1, t=1)


@pytest.fixture
def options(cluster, tmp_path, monkeypatch):
    task = task_of(QUERY)
    task.attemptNumber.return_value = 0
    monkeypatch.setattr(TaskContext, "get", staticmethod(lambda: task))
    return {"nameServer": cluster.name_server, "topic": "t", "ledger": str(tmp_path / "l")}


def send(writer, *bodies):
    """Return the message of a task that sends these rows."""
    is_arrow = not isinstance(writer, RowStreamWriter)
    make = pa.RecordBatch.from_pydict if is_arrow else lambda row: Row(body=row["body"][0])
    rows = map(make, [{"body": [body]} for body in bodies])
    message = pickle.loads(pickle.dumps(writer)).write(rows)
    return pickle.loads(pickle.dumps(message))


def ledger_rows(tmp_path):
    return spool_rows(*(tmp_path / "l/_spool").rglob("*.arrow"))


def test_a_batch_id_is_sent_once(cluster, options, caplog):
    caplog.set_level("INFO")
    named = {**options, "batchId": "b", "delivery": "effectively_once", "storedCheckDelay": "0"}
    source = RocketMQDataSource(named)
    failed, again = source.writer(BODY, False), source.writer(BODY, False)
    assert send(failed, "x", "y").summary.found_stored == 0
    failed.abort([None])
    sent = send(again, "x", "y")
    facts = (sent.summary.found_stored, again.query_id, again.again, failed.again)
    assert facts == (2, failed.query_id, True, False)
    again.commit([sent])
    repeated = source.writer(BODY, False)
    message = send(repeated, "x", "y")
    assert (message.summary.rows_in, message.summary.acked) == (2, 0)
    caplog.clear()
    repeated.commit([message, None])
    assert len(caplog.messages) == 1 and "the batchId b is complete" in caplog.text
    assert sorted(m.body for m in cluster.messages("t")) == [b"x", b"y"]
    with pytest.raises(errors.CheckpointError, match="rows"):
        repeated.commit([send(repeated, "x")])
    with pytest.raises(errors.CheckpointError, match="columns"):
        source.writer(StructType().add("tags", "string").add("body", "string"), False)


@pytest.mark.parametrize("via", ["spool", "spark"])
@pytest.mark.parametrize(
    ("kind", "lane", "epoch", "end"),
    [("batch", "batch", 0, ()), ("arrow", "datasource", 8, (8,)), ("rows", "datasource", 8, (8,))],
)
def test_what_is_done_is_noted(options, tmp_path, caplog, via, kind, lane, epoch, end):
    """With ledgerVia=spark a failed task leaves no record: each row of a batch may be doubled."""
    caplog.set_level("INFO", CONSOLE)
    source = RocketMQDataSource({**options, "ledgerVia": via})
    is_batch = kind == "batch"
    writer = source.writer(BODY, False) if is_batch else source.streamWriter(BODY, False)
    if kind == "rows":
        writer = RowStreamWriter(writer.options, writer.plan, token=writer.token, folded=False)
    tasks = [send(writer, "x", "y", ""), send(writer, "z")]
    assert [task.handed is not None for task in tasks] == [via == "spark"] * 2
    writer.abort(tasks[:1], *end)
    assert sum(row["kind"] == "epoch" for row in ledger_rows(tmp_path)) == 1 + (via == "spool")
    writer.commit(tasks, *end)
    query = writer.query_id if is_batch else "query"
    rows = ledger_rows(tmp_path)
    assert {(row["query_id"], row["lane"], row["epoch"]) for row in rows} == {(query, lane, epoch)}
    assert {row["kind"] for row in rows} == {"send", "dead_letter", "epoch"}
    [note] = [row for row in rows if row["kind"] == "epoch" and row["complete"] is None]
    assert (note["num_input_rows"], note["rows_in"]) == (4, 4)
    assert note["duplicates_possible"] == (3 if is_batch and via == "spark" else None)
    name = f"the write {query}" if is_batch else "epoch 8"
    assert "nothing folds" not in caplog.text
    losses, *ends = [each.getMessage() for each in caplog.records if each.name == CONSOLE]
    assert losses.startswith(f"1 of 4 rows of {name} were not delivered")
    end_text = f"{name} ended: 4 rows in, 3 acknowledged, 1 dead letter"
    assert [text.partition(";")[0] for text in ends] == [end_text] * is_batch
    if not is_batch:
        writer.commit([], 0)
        assert caplog.messages[-1].startswith(f"nothing folds the ledger file:{tmp_path}/l while")


@pytest.mark.parametrize("app_id", ["a", ""])
def test_a_failed_write_is_taken_up_by_its_app_id(options, tmp_path, app_id):
    more = {"appId": app_id, "ordering": "strict", "columns": "sharding_key=body"}
    source = RocketMQDataSource({**options, "delivery": "effectively_once", **more})
    failed, notes = source.writer(BODY, False), tmp_path / "l/_notes"
    send(failed, "x")
    assert len([*(notes / "starts").rglob("*.json")]) == 1
    failed.abort([None])
    again = source.writer(BODY, False)
    sent = send(again, "x", "y")
    assert (again.query_id == failed.query_id) is bool(app_id)
    assert (sent.summary.found_stored, sent.summary.acked) == (1 if app_id else 0, 2)
    again.commit([sent])
    assert not [*(notes / "starts").rglob("*.json")]
    # A failed write has rows in the ledger, whose dead letters need the list of queues.
    lists = {path.name for path in (notes / "queues").iterdir()}
    assert lists == {f"q-{app_id or failed.query_id}"}
    assert source.writer(BODY, False).query_id not in (failed.query_id, again.query_id)


def test_rows_that_tasks_hand_over_are_kept_once(options, tmp_path):
    """Spark calls `abort` after a commit that raised (V2TableWriteExec), in another process."""
    budget = {**options, "ledgerVia": "spark", "maxEpochFailures": "0"}
    writer = RocketMQDataSource(budget).writer(BODY, False)
    sent = send(writer, "", "x", "y")
    with pytest.raises(errors.DeliveryError, match=r"1 of 3 rows could not .* backfill them"):
        writer.commit([sent])
    writer.abort([sent])
    kinds = [row["kind"] for row in ledger_rows(tmp_path)]
    assert (kinds.count("dead_letter"), kinds.count("epoch")) == (1, 1)


def test_writes_that_the_data_source_refuses(options):
    for make, overwrite, option, text in (
        ("writer", True, {}, r'use mode\("append"\)'),
        ("streamWriter", False, {"batchId": "b"}, "leave batchId out"),
        ("writer", False, {"delivery": "transactional"}, r'format\("rocketmq"\) has none'),
    ):
        with pytest.raises(errors.ConfigurationError, match=text):
            getattr(RocketMQDataSource({**options, **option}), make)(BODY, overwrite)
