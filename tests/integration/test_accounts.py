"""What the ledger's readers say of rows that went in: delta-rs and DuckDB, Spark, the report."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from rocket_sink import Ledger, RocketSink
from rocket_sink.ledger.quick import open_quick
from rocket_sink.ledger.report import Scope, build_report, figures
from rocket_sink.testing import FakeCluster
from tests.ledger.values import accounts, confirmed, context, letter

from .lanes import read_stream

pytestmark = [pytest.mark.spark, pytest.mark.timeout(1800)]

PATIENT = {"sendMsgTimeout": 60_000, "connectTimeoutMs": 20_000, "mqClientApiTimeout": 20_000}

SENDS = """
import sys
import pyarrow as pa
from rocket_sink import TableProducer

name_server, ledger, sends = sys.argv[1:]
rows = pa.table({"body": pa.array([None if n % 4 == 0 else str(n) for n in range(100)])})
with TableProducer(nameServer=name_server, topic="t", ledger=ledger, sendMsgTimeout=60_000) as one:
    for _ in range(int(sends)):
        one.send(rows)
"""


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster(brokers=1) as fake:
        fake.create_topic("t")
        yield fake


def epochs_of(folder: Path) -> list[dict[str, Any]]:
    """As delta-rs and DuckDB read them."""
    quick = open_quick(folder)
    assert quick is not None
    return quick.query("SELECT * FROM epochs ORDER BY query_id, epoch").to_pylist()


def both_reports(spark: Any, ledger: Ledger) -> Any:
    quick = open_quick(ledger.path)
    assert quick is not None
    found = build_report(spark, ledger)
    assert figures(quick.query, quick.path, Scope()) == found
    return found


def test_each_send_of_each_table_producer_is_an_epoch(
    spark: Any, cluster: FakeCluster, tmp_path: Path
) -> None:
    for sends in (3, 2):
        arguments = [sys.executable, "-c", SENDS, cluster.name_server, str(tmp_path), str(sends)]
        subprocess.run(arguments, check=True, timeout=300)
    ledger = Ledger(tmp_path)
    ledger.sync(spark)
    found = epochs_of(tmp_path)
    counts = [(e["rows_in"], e["acked"], e["dead"], e["num_input_rows"]) for e in found]
    assert counts == [(100, 75, 25, 100)] * 5
    assert all(e["adds_up"] and e["confirmed"] and e["lane"] == "table" for e in found)
    assert sorted(e["epoch"] for e in found) == [1, 1, 2, 2, 3]
    totals = both_reports(spark, ledger).totals
    assert (totals.epochs, totals.rows_in, totals.acked, totals.dead) == (5, 500, 375, 125)
    assert (totals.not_adding_up, totals.unconfirmed, totals.missing_rows) == (0, 0, 0)
    assert ledger.dead_letters(spark).count() == 125
    attempts = ledger.attempts(spark)
    assert attempts.where("counts AND rows_in = 100 AND send_attempts >= 1").count() == 5
    assert attempts.count() == 5
    assert len(cluster.messages("t")) == 375


def test_table_producers_that_had_one_id_are_told_apart(spark: Any, tmp_path: Path) -> None:
    """As rocket-sink wrote them once: two processes, three and two sends."""
    ledger = Ledger(tmp_path)
    for worker, sends in (("h:1", 3), ("h:2", 2)):
        for epoch in range(1, sends + 1):
            ctx = context(
                query_id="local", run_id="local", epoch=epoch, partition=None, stage_id=None,
                stage_attempt=None, task_attempt_id=None, attempt_number=None, worker=worker,
                lane="table",
            )  # fmt: skip
            ledger.append(spark, accounts(ctx, acked=9, dead=1), letter(ctx))
    found = epochs_of(tmp_path)
    assert [(e["query_id"], e["epoch"]) for e in found] == [
        ("local/h:1", 1), ("local/h:1", 2), ("local/h:1", 3), ("local/h:2", 1), ("local/h:2", 2)
    ]  # fmt: skip
    assert all(e["adds_up"] and e["rows_in"] == 10 and not e["confirmed"] for e in found)
    totals = both_reports(spark, ledger).totals
    assert (totals.rows_in, totals.dead, totals.not_adding_up) == (50, 5, 0)
    assert ledger.dead_letters(spark).count() == 5


@pytest.mark.parametrize("app_id", ["", "orders"])
def test_an_epoch_of_foreach_is_confirmed_with_sparks_rows(
    spark: Any, cluster: FakeCluster, tmp_path: Path, app_id: str
) -> None:
    """A filter makes the sink's rows fewer than those read: that is no loss."""
    (tmp_path / "source").mkdir()
    bodies = [None if n % 5 == 0 else str(n) for n in range(100)]
    table = pa.table({"body": bodies, "n": range(100)})
    pq.write_table(table, tmp_path / "source" / "rows.parquet")
    given = {"nameServer": cluster.name_server, "topic": "t", "foldIntervalMs": 0, **PATIENT}
    sink = RocketSink(**given, ledger=str(tmp_path / "ledger"), appId=app_id)
    rows = read_stream(spark, tmp_path / "source").where("n < 60")
    writer = rows.writeStream.foreach(sink).option("checkpointLocation", str(tmp_path / "c"))
    query = writer.trigger(availableNow=True).start()
    query.awaitTermination()
    epoch = _confirmed(spark, Ledger(tmp_path / "ledger"))
    assert epoch["query_id"] == (app_id or query.id) and epoch["run_id"] == query.runId
    assert (epoch["rows_in"], epoch["num_input_rows"], epoch["missing_rows"]) == (60, 100, 0)
    assert epoch["confirmed"] and epoch["adds_up"]
    table = open_table(tmp_path / "ledger")
    said = table.filter(pc.is_null(table["complete"]))
    assert said["rows_in"].to_pylist() == [60]  # what Spark handed over, by itself


def _confirmed(spark: Any, ledger: Ledger) -> dict[str, Any]:
    """The one epoch, once the listener has heard of it: its events come late."""
    until_s = time.monotonic() + 120
    while True:
        ledger.sync(spark)
        (epoch,) = epochs_of(Path(ledger.path))
        if epoch["confirmed"] or time.monotonic() > until_s:
            return epoch
        time.sleep(0.2)


def open_table(folder: Path) -> pa.Table:
    from deltalake import DeltaTable

    rows = DeltaTable(folder).to_pyarrow_dataset().to_table()
    return rows.filter(pc.equal(rows["kind"], "epoch"))


def test_rows_that_spark_handed_over_and_no_account_has(spark: Any, tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    whole, short = context(), context(epoch=1, task_attempt_id=11)
    nothing = context(epoch=2)
    ledger.append(
        spark, accounts(whole, acked=7), confirmed(whole, 9, rows_in=7),
        accounts(short, acked=4, dead=1), confirmed(short, 5, rows_in=7),
        confirmed(nothing, 3, rows_in=3),
    )  # fmt: skip
    found = [(e["rows_in"], e["missing_rows"], e["adds_up"]) for e in epochs_of(tmp_path)]
    assert found == [(7, 0, True), (5, 2, False), (0, 3, False)]
    report = both_reports(spark, ledger)
    assert (report.totals.missing_rows, report.totals.not_adding_up) == (5, 2)
    assert [e["missing_rows"] for e in report.as_dict()["epochs"]] == [0, 2, 3]
