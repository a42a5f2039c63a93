"""The driver's thread that folds, and that counts the rows which queries gave to tasks."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deltalake
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql.types import StructType

from rocket_sink.commands.common.stream_run import stream_writer
from rocket_sink.errors import ConfigurationError
from rocket_sink.ledger.driver.ledger import Ledger
from rocket_sink.ledger.path import LedgerPath, resolve_path
from rocket_sink.ledger.transport.spool import SpoolWriter
from rocket_sink.options import SinkOptions
from rocket_sink.spark import listener
from rocket_sink.spark.datasource import RocketMQDataSource, register
from rocket_sink.spark.listener import FoldThread, install_fold
from rocket_sink.spark.sink import RocketSink
from rocket_sink.testing import FakeCluster
from tests.ledger.values import accounts, context

pytestmark = pytest.mark.spark

QUERY = "5b2f11aa-0c4d-4f5e-9a6b-7c8d9e0f1a2b"
DEADLINE_S = 120.0


def done(epoch: int, rows: int) -> Any:
    """Return Spark's progress report of an epoch."""
    return SimpleNamespace(
        id=QUERY, runId="run-1", batchId=epoch, numInputRows=rows, batchDuration=5,
        sink=SimpleNamespace(numOutputRows=rows),
    )  # fmt: skip


def write(folder: Path, epoch: int, rows: int, **facts: Any) -> None:
    """Write the spool file of a task."""
    ctx = context(query_id=QUERY, epoch=epoch, task_attempt_id=10 + epoch, **facts)
    spool = SpoolWriter(resolve_path(folder), ctx)
    spool.append(accounts(ctx, acked=rows))
    spool.seal()


def wait_for(condition: Callable[[], object]) -> None:
    until_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.05)


def test_a_deleted_ledger_is_told_of_once(
    spark: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "_COUNT_S", 1e9)
    folder = tmp_path / "ledger"
    ledger, thread = Ledger(folder), FoldThread(spark)
    thread.add(resolve_path(folder), interval_s=0.0)
    for epoch in range(2):
        # The second epoch is folded, and waits for the next count.
        write(folder, epoch, 5)
        thread.progressed(done(epoch, 5))
        wait_for(lambda: ledger.exists() and not ledger.unfolded_epochs())
        wait_for(lambda count=epoch: confirmed(ledger, spark) == count + 1)  # type: ignore[misc]
    shutil.rmtree(folder)
    thread.ended()
    wait_for(lambda: told(caplog))
    other = tmp_path / "other"
    thread.add(resolve_path(other), interval_s=0.0)
    for epoch in range(3):
        write(other, epoch, 7)
        thread.ended()
        wait_for(lambda: not Ledger(other).unfolded_epochs())
    (said,) = told(caplog)
    assert f"the ledger {ledger.path} was deleted while its query ran" in said
    assert "stop the queries" in said
    assert not folder.exists()


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the log's texts about counts; a fold that met the deletion may log others."""
    texts = [record.getMessage() for record in caplog.records]
    return [text for text in texts if "deleted while" in text or "cannot count" in text]


def confirmed(ledger: Ledger, spark: Any) -> int:
    return int(ledger.epochs(spark).where("confirmed").count())


def running(*runs: str) -> Any:
    """Return a session that is asked for nothing but its queries."""
    queries = SimpleNamespace(active=[SimpleNamespace(runId=run) for run in runs])
    return SimpleNamespace(streams=queries, sparkContext=SimpleNamespace(_jsc=None))


def test_the_end_of_a_query_is_waited_for() -> None:
    """Spark reports the end after `awaitTermination` has returned."""
    thread, handled = FoldThread(running("other")), threading.Event()
    thread.started("other")
    thread.started("run-1")
    confirm = thread._confirm

    def slowly(*arguments: Any) -> None:
        time.sleep(0.2)
        confirm(*arguments)
        handled.set()

    thread._confirm = slowly  # type: ignore[method-assign]
    thread.add(resolve_path("/no/such/ledger"), interval_s=1e9)

    def end() -> None:
        thread.progressed(done(0, 1))
        thread.ended("run-1")

    threading.Timer(0.2, end).start()
    thread.await_ended(DEADLINE_S)
    assert handled.is_set()


def test_an_epoch_is_noted_between_the_folds_of_two_ledgers() -> None:
    """A fold of many ledgers takes longer than a sync waits for the end of a query."""
    thread, calls = FoldThread(running()), []

    def fold(place: Any) -> bool:
        if not calls:
            thread.progressed(done(1, 1))
        calls.append("fold")
        return False

    thread._fold = fold  # type: ignore[method-assign]
    thread._confirm = lambda place, names, events: calls.extend(e.batchId for e in events)  # type: ignore[method-assign]
    for name in ("/no/one", "/no/two"):
        thread.add(resolve_path(name), interval_s=1e9)
    thread.ended("run-1")
    wait_for(lambda: calls.count("fold") == 2)
    assert calls == ["fold", 1, 1, "fold"]
    thread.finish()


def test_rows_that_come_after_a_fold_began_are_not_missing_yet(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A fold under load takes longer than an epoch, and the count after it looks at the table."""
    thread, spool = FoldThread(running()), Counter[int]()
    table, folds = Counter[int](), []

    def fold(place: Any) -> bool:
        files = Counter(spool)
        if not folds:
            spool[1] = 5
            thread.progressed(done(1, 5))
        table.update(files - table)
        folds.append(place)
        return True

    def confirm(place: Any, names: Any, events: list[Any]) -> None:
        epochs = {(QUERY, "run-1", event.batchId): 5 for event in events}
        thread._uncounted.setdefault(place, {}).update(epochs)

    thread._fold, thread._confirm = fold, confirm  # type: ignore[method-assign]
    thread._expire = lambda place: None  # type: ignore[method-assign]
    thread._rows_in = lambda place, epochs: {key: table[key[2]] for key in epochs}  # type: ignore[method-assign]
    thread.add(resolve_path("/no/one"), interval_s=1e9)
    spool[0] = 5
    thread.progressed(done(0, 5))
    thread.ended("run-1")
    wait_for(lambda: folds)
    thread.progressed(done(2, 5))  # The files of this epoch are in no spool.
    thread.ended("run-1")
    wait_for(lambda: any("epoch 2 " in text for text in errors_in(caplog)))
    thread.finish()
    (text,) = errors_in(caplog)
    assert "lacks 5 of the 5 rows that Spark handed to the tasks of epoch 2 " in text


def errors_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]


def started(folder: Path) -> tuple[FoldThread, LedgerPath]:
    """Return a thread that folds the ledger of a query that has started, and the ledger."""
    thread, place = FoldThread(running()), resolve_path(folder)
    thread.add(place, interval_s=0.0)
    thread.started("run-1", QUERY)
    return thread, place


def test_rows_that_no_fold_took_in_are_in_the_accounts_at_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A script without `awaitTermination` ends before Spark reports the epoch."""
    caplog.set_level("INFO", "rocket_sink")
    thread, place = started(tmp_path)
    ctx = context(query_id=QUERY, run_id="run-1")
    spool = SpoolWriter(place, ctx)
    spool.append(accounts(ctx, acked=1, dead=1))
    spool.seal()
    thread.finish()
    loss, end = (record for record in caplog.records if record.name == "rocket_sink.spark.console")
    assert loss.levelname == "WARNING" and loss.message.startswith("1 of 2 rows of epoch ")
    assert f"the query {QUERY} ended: 2 rows in, 1 acknowledged, 1 dead letter; " in end.message


def test_an_end_whose_fold_fails_is_told_at_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`spark.stop()` right after `awaitTermination` stops the session under the last fold."""
    caplog.set_level("INFO", "rocket_sink")
    thread, _ = started(tmp_path)
    write(tmp_path, 0, 5, run_id="run-1")
    thread.ended("run-1")
    thread.finish()
    (end,) = (record for record in caplog.records if record.name == "rocket_sink.spark.console")
    assert f"the query {QUERY} ended: 5 rows in, 5 acknowledged; " in end.message


@pytest.mark.parametrize("is_idle", [True, False])
def test_the_end_of_a_query_without_rows_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_idle: bool
) -> None:
    caplog.set_level("INFO", "rocket_sink")
    thread, place = FoldThread(running("run-1")), resolve_path(tmp_path)
    thread.add(place, interval_s=0.0)
    for run, query in (("run-1", QUERY), ("run-2", "foreign"), ("run-3", "failed")):
        thread.started(run, query)
    thread.sinks.update({"run-1": place.uri, "run-3": place.uri})
    thread.ended("run-3", "an error that the query raises")
    if is_idle:
        thread.begun.add("run-1")
    thread.finish()
    (end,) = (record for record in caplog.records if record.name == "rocket_sink.spark.console")
    if is_idle:
        assert end.message == f"the query {QUERY} ended: 0 rows in; ledger {tmp_path}"
    else:
        assert end.levelname == "WARNING"
        assert end.message.startswith(f"the query {QUERY} ended before its first epoch was done")


def test_an_end_that_is_never_told_is_waited_for_once() -> None:
    thread = FoldThread(running())
    thread.started("run-1")
    began_s = time.monotonic()
    thread.await_ended(0.3)
    assert time.monotonic() - began_s >= 0.3
    thread.await_ended(1e9)


def test_nobody_waits_while_queries_run() -> None:
    thread = FoldThread(running("run-1"))
    thread.started("run-1")
    thread.await_ended(1e9)


def test_a_sync_after_a_query_knows_its_last_epoch_done(spark: Any, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "1.json").write_text('{"body": "one"}\n')
    rows = spark.readStream.schema("body STRING").json(str(tmp_path / "in"))
    ledger = Ledger(tmp_path / "ledger")
    with FakeCluster(brokers=1) as cluster:
        cluster.create_topic("flights", queues=1)
        sink = RocketSink(nameServer=cluster.name_server, topic="flights", ledger=ledger.path)
        query = sink.stream(rows).option("checkpointLocation", str(tmp_path / "checkpoint"))
        assert query.trigger(availableNow=True).start().awaitTermination(DEADLINE_S)
    ledger.sync(spark)
    assert confirmed(ledger, spark) == 1
    assert ledger.unfolded_epochs() == 0


def test_a_stream_into_a_ledger_that_is_not_folded_says_so_once(
    spark: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources: list[type[RocketMQDataSource]] = []
    monkeypatch.setattr(
        type(spark.dataSource), "register", lambda self, source: sources.append(source)
    )
    monkeypatch.setattr("rocket_sink.spark.datasource.freeze_once", lambda: None)

    def commit(epoch: int, ledger: str = "") -> int:
        """Commit an epoch to the newest source; return the number of its warnings."""
        settings = {"nameServer": "n:1", "topic": "t", **({"ledger": ledger} if ledger else {})}
        caplog.clear()
        schema = StructType.fromDDL("body STRING")
        sources[-1](settings).streamWriter(schema, overwrite=False).commit([], epoch)
        return len(caplog.records)

    first, second = (str(tmp_path / name) for name in ("one", "two"))
    register(spark)
    assert [commit(epoch, first) for epoch in (0, 1)] == [1, 0]
    assert commit(0) == 0
    register(spark, ledger=first)
    register(spark, ledger=second)
    assert [commit(0, ledger) for ledger in (first, second, str(tmp_path / "three"))] == [0, 0, 1]
    assert "register(spark, ledger=...)" in caplog.text and "ledger fold" in caplog.text


@pytest.mark.parametrize("lane", ["foreach", "datasource"])
def test_the_stream_command_folds_while_it_runs(spark: Any, tmp_path: Path, lane: str) -> None:
    ledger = tmp_path / "ledger"
    rows = spark.readStream.format("rate").load().selectExpr("cast(value AS string) AS body")
    with FakeCluster(brokers=1) as cluster:
        options = {"nameServer": cluster.name_server, "topic": "t", "ledger": ledger}
        stream_writer(spark, rows, options, lane)
    thread = install_fold(SinkOptions.parse({"ledger": str(tmp_path / "other")}), spark)
    assert thread is not None and resolve_path(ledger).uri in thread.ledgers


@pytest.mark.parametrize("lane", ["foreach", "datasource"])
def test_a_continuous_trigger_is_refused_before_an_epoch_is_done(
    spark: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, lane: str
) -> None:
    rows = spark.readStream.format("rate").load().selectExpr("cast(value AS string) AS body")
    checkpoint = tmp_path / "checkpoint"
    with FakeCluster(brokers=1) as cluster:
        options = {"nameServer": cluster.name_server, "topic": "flights"}
        if lane == "foreach":
            writer = rows.writeStream.foreach(RocketSink(**options))
        else:
            register(spark)
            writer = rows.writeStream.format("rocketmq").options(**options)
        writer = writer.option("checkpointLocation", str(checkpoint))
        query = writer.trigger(continuous="1 second").start()
        with pytest.raises(StreamingQueryException):
            query.awaitTermination(DEADLINE_S)
    assert list((checkpoint / "commits").glob("[0-9]*")) == []
    (said,) = [r.getMessage() for r in caplog.records if query.id in r.getMessage()]
    assert "trigger(continuous=...) does not work" in said


def test_a_query_whose_checkpoint_was_deleted_is_told_of_at_its_start(
    spark: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "1.json").write_text('{"body": "one"}\n')
    rows = spark.readStream.schema("body STRING").json(str(tmp_path / "in"))
    with FakeCluster(brokers=1) as cluster:
        cluster.create_topic("flights", queues=1)
        sink = RocketSink(
            nameServer=cluster.name_server, topic="flights", ledger=str(tmp_path / "ledger")
        )
        for checkpoint in ("one", "one", "two"):
            query = sink.stream(rows).option("checkpointLocation", str(tmp_path / checkpoint))
            query = query.trigger(availableNow=True).start()
            assert query.awaitTermination(DEADLINE_S)
            Ledger(tmp_path / "ledger").sync(spark)
        assert len(cluster.messages("flights")) == 2
        wait_for(lambda: "begins at epoch 0" in caplog.text)
    texts = [r.getMessage() for r in caplog.records if "begins at epoch 0" in r.getMessage()]
    assert len(texts) == 1
    assert query.id in texts[0] and "appId" in texts[0]


ENDING = """\
import sys, threading, time
from types import SimpleNamespace
import deltalake, pyarrow
from rocket_sink.ledger.path import resolve_path
from rocket_sink.spark import listener

place, started = resolve_path(sys.argv[1]), threading.Event()
table = pyarrow.table({"a": list(range(20_000))})

def fold(session, place, wait_s):
    for _ in range(10):
        deltalake.write_deltalake(sys.argv[1] + "/t", table, mode="append")
        started.set()
    return SimpleNamespace(busy=True)

listener.fold = fold
thread = listener.FoldThread(SimpleNamespace(sparkContext=SimpleNamespace(_jsc=None)))
thread.add(place, 0.0)
thread.ended("run")
started.wait()
"""


def test_the_end_of_python_waits_for_the_fold_that_is_under_way(tmp_path: Path) -> None:
    """A thread within delta-rs at that moment ended the process by SIGSEGV, every time."""
    process = subprocess.run(
        [sys.executable, "-c", ENDING, str(tmp_path)],
        capture_output=True, text=True, timeout=DEADLINE_S, check=False,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    assert (process.returncode, process.stderr) == (0, "")
    assert deltalake.DeltaTable(f"{tmp_path}/t").version() == 9


def test_a_ledger_or_checkpoint_inside_the_input_is_refused(
    spark: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Spark would read their files: a source of 3 rows gave 154."""
    read, outside = tmp_path / "in", str(tmp_path / "ledger")
    read.mkdir()
    (read / "1.json").write_text('{"body": "one"}\n')
    rows = spark.readStream.schema("body STRING").json(str(read))
    with FakeCluster(brokers=1) as cluster:
        cluster.create_topic("flights", queues=1)

        def sink(ledger: str) -> RocketSink:
            return RocketSink(nameServer=cluster.name_server, topic="flights", ledger=ledger)

        inside = sink(str(read / "sub" / "ledger"))
        with pytest.raises(ConfigurationError, match=r"ledger .*in/sub/ledger is inside"):
            inside.stream(rows)
        for folder in (read, f"{tmp_path}/i*"):
            with pytest.raises(ConfigurationError, match="is inside"):
                inside.write(spark.read.schema("body STRING").json(str(folder)))
        bare = rows.writeStream.foreach(inside)  # type: ignore[arg-type]
        query = bare.option("checkpointLocation", str(tmp_path / "checkpoint")).start()
        with pytest.raises(StreamingQueryException):
            query.awaitTermination(DEADLINE_S)
        assert re.search(r"ledger \S*in/sub/ledger is inside", caplog.text)
        writer = sink(outside).stream(rows)
        query = writer.option("checkpointLocation", str(read / "checkpoint")).start()
        with pytest.raises(StreamingQueryException):
            query.awaitTermination(DEADLINE_S)
        assert f"checkpoint file:{read}/checkpoint is inside {read}" in caplog.text
        assert cluster.messages("flights") == []
        assert sink(outside).write(spark.read.schema("body STRING").json(str(read))).acked == 1
