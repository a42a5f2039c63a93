"""The ledger's readers agree on the rows: delta-rs with DuckDB, Spark, and the report."""

import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from rocket_sink import Ledger, RocketSink
from rocket_sink.ledger.report import Scope, figures
from rocket_sink.ledger.report.values import Totals
from rocket_sink.testing import FakeCluster
from tests.clusters import scripted_cluster
from tests.ledger.values import accounts, confirmed, context
from tests.ledger.views import quick_ledger
from tests.producer.waiting import until
from tests.spark.streams import run

from .lanes import read_stream

pytestmark = [pytest.mark.spark, pytest.mark.timeout(1800)]

PATIENT = {"sendMsgTimeout": 60_000, "connectTimeoutMs": 20_000}

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


cluster = scripted_cluster(1, t=4)


def epochs_of(folder):
    """Return the epochs that delta-rs and DuckDB read."""
    quick = quick_ledger(folder)
    return quick.query("SELECT * FROM epochs ORDER BY query_id, epoch").to_pylist()


class Told(NamedTuple):
    """The results of the readers for a ledger with all kinds of epochs."""

    ledger: Ledger
    epochs: list[dict[str, Any]]
    totals: Totals
    report: dict[str, Any]
    stored: int


@pytest.fixture(scope="module")
def told(spark, tmp_path_factory):
    folder = tmp_path_factory.mktemp("told")
    ledger = Ledger(folder)
    complete, short, nothing = context(), context(epoch=1, task_attempt_id=11), context(epoch=2)
    ledger.append(
        spark, accounts(complete, acked=7), confirmed(complete, 9, rows_in=7),
        accounts(short, acked=4, dead=1), confirmed(short, 5, rows_in=7),
        confirmed(nothing, 3, rows_in=3),
    )  # fmt: skip
    with FakeCluster(brokers=1) as cluster:
        cluster.create_topic("t")
        producers = [
            subprocess.Popen([sys.executable, "-c", SENDS, cluster.name_server, folder, str(sends)])
            for sends in (3, 2)
        ]
        assert [producer.wait(600) for producer in producers] == [0, 0]
        stored = len(cluster.messages("t"))
    ledger.sync(spark)
    quick = quick_ledger(folder)
    report = ledger.report(spark)
    assert figures(quick.query, quick.path, Scope()) == report
    return Told(ledger, epochs_of(folder), report.totals, report.as_dict(), stored)


def test_each_send_of_each_table_producer_is_an_epoch(spark, told):
    epochs = [e for e in told.epochs if e["rows_in"] == 100]
    counts = [(e["acked"], e["dead"], e["num_input_rows"]) for e in epochs]
    assert counts == [(75, 25, 100)] * 5
    assert all(e["adds_up"] and e["confirmed"] and e["lane"] == "table" for e in epochs)
    assert sorted(e["epoch"] for e in epochs) == [1, 1, 2, 2, 3]
    assert len({e["query_id"] for e in epochs}) == 2
    attempts = told.ledger.attempts(spark).where("rows_in = 100").collect()
    assert [row.counts and row.send_attempts >= 1 for row in attempts] == [True] * 5
    assert told.stored == 375


def test_rows_that_spark_handed_over_and_no_account_has(told):
    query = context().query_id
    epochs = [e for e in told.epochs if e["query_id"] == query]
    sums = [(e["rows_in"], e["missing_rows"], e["adds_up"]) for e in epochs]
    assert sums == [(7, 0, True), (5, 2, False), (0, 3, False)]
    assert sorted(e["missing_rows"] for e in told.report["epochs"]) == [0] * 6 + [2, 3]


def test_the_sums_of_all(spark, told):
    totals = told.totals
    assert (totals.epochs, totals.rows_in) == (8, 500 + 12)
    assert (totals.acked, totals.dead) == (375 + 11, 125 + 1)
    assert (totals.not_adding_up, totals.unconfirmed, totals.missing_rows) == (2, 0, 5)
    assert told.ledger.dead_letters(spark).count() == 125


def test_an_epoch_of_foreach_is_confirmed_with_sparks_rows(spark, cluster, tmp_path):
    """Count no loss if a filter leaves the sink fewer rows than Spark has read."""
    (tmp_path / "source").mkdir()
    bodies = [None if n % 5 == 0 else str(n) for n in range(100)]
    table = pa.table({"body": bodies, "n": range(100)})
    pq.write_table(table, tmp_path / "source" / "rows.parquet")
    options = {"nameServer": cluster.name_server, "topic": "t", "foldIntervalMs": 0, **PATIENT}
    rows = read_stream(spark, tmp_path / "source").where("n < 60")
    runs = {}
    for app_id in ("", "orders"):
        sink = RocketSink(**options, ledger=str(tmp_path / "ledger"), appId=app_id)
        query = run(rows.writeStream.foreach(sink), tmp_path / f"checkpoint-{app_id}")
        runs[app_id or query.id] = query.runId
    confirmed = _confirmed(spark, Ledger(tmp_path / "ledger"))
    assert {epoch["query_id"]: epoch["run_id"] for epoch in confirmed} == runs
    for epoch in confirmed:
        assert (epoch["rows_in"], epoch["num_input_rows"], epoch["missing_rows"]) == (60, 100, 0)
        assert epoch["confirmed"] and epoch["adds_up"]
    rows = DeltaTable(tmp_path / "ledger").to_pyarrow_dataset().to_table()
    rows = rows.filter(pc.equal(rows["kind"], "epoch"))
    spark_rows = rows.filter(pc.is_null(rows["complete"]))
    assert spark_rows["rows_in"].to_pylist() == [60, 60]  # Spark handed over these rows.


def _confirmed(spark, ledger):
    """Return all epochs, after the listener's events, which come late."""
    folder = Path(ledger.path)

    def all_confirmed():
        ledger.sync(spark)
        return all(epoch["confirmed"] for epoch in epochs_of(folder))

    until(all_confirmed, poll_s=0.2)
    return epochs_of(folder)
