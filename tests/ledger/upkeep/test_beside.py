"""An expiry beside those who use the ledger: a fold, a report, a backfill, a stream of its rows."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from rocket_sink.ledger.append.delta_rs import open_table
from rocket_sink.ledger.query.backfill_marks import settled_since
from rocket_sink.ledger.upkeep.expire import Retention, expire
from rocket_sink.ledger.upkeep.growth import merge
from tests.growth import TASKS, Growth
from tests.ledger.views import quick_ledger

FOLDS = 40
OLD = Retention({"send": 1})
"""All sends are old; those of the last two epochs stay."""


def expire_now(growth: Growth) -> bool:
    """Expire and merge; return whether nobody else rewrote the table meanwhile."""
    table, quick = open_table(growth.place), quick_ledger(growth.place.root)
    assert table is not None
    done = expire(growth.place, table, quick.query, OLD)
    newest = open_table(growth.place)
    assert newest is not None
    merge(growth.place, newest, everything=True)
    return not done.busy


def test_folds_and_reports_lose_nothing(tmp_path: Path) -> None:
    growth = Growth(str(tmp_path / "ledger"), 600.0)
    for _ in range(3):
        growth.grow()

    done = {"reports": 0, "expiries": 0}
    expired = threading.Event()

    def grow() -> None:
        while growth.epochs < FOLDS or min(done.values()) < 2:
            growth.grow()
            if growth.epochs % 15 == 0:  # folds are seldom, and an expiry is seldom too late
                expired.clear()
                assert expired.wait(120), "no expiry ended"

    def report() -> None:
        """Each report adds up, and none sees fewer epochs than the one before."""
        seen = 0
        while not folds.done():
            quick = quick_ledger(growth.place.root)
            [row] = quick.query(
                "SELECT count(*) AS n, bool_and(adds_up AND confirmed) AS ok FROM epochs"
            ).to_pylist()
            assert row["ok"]
            assert row["n"] >= seen
            seen = row["n"]
            done["reports"] += 1

    def keep_expiring() -> None:
        while not folds.done():
            done["expiries"] += expire_now(growth)
            expired.set()

    with ThreadPoolExecutor(3) as pool:
        folds = pool.submit(grow)
        others = [pool.submit(report), pool.submit(keep_expiring)]
        for thread in (folds, *others):
            thread.result()
    expire_now(growth)
    rows = DeltaTable(growth.place.root).to_pyarrow_table(columns=["kind", "epoch", "partition"])
    counts = rows.group_by(["kind", "epoch"]).aggregate([([], "count_all")]).to_pylist()
    accounts = {r["epoch"]: r["count_all"] for r in counts if r["kind"] == "epoch"}
    assert accounts.pop(0) == TASKS + 1
    assert set(accounts.values()) == {TASKS + 1}
    assert sorted(accounts) == list(range(1, growth.epochs))
    last = [growth.epochs - 2, growth.epochs - 1]
    assert sorted(r["epoch"] for r in counts if r["kind"] == "send") == last


def test_a_backfill_takes_a_rewrite_for_no_resolution(tmp_path: Path) -> None:
    growth = Growth(str(tmp_path / "ledger"), 600.0)
    growth.grow()
    version = DeltaTable(growth.place.root).version()
    growth.grow()
    growth.grow()
    assert expire_now(growth)
    assert settled_since(growth.place, version) == set()


@pytest.mark.spark
def test_a_stream_of_the_ledgers_rows_has_each_once(spark: Any, tmp_path: Path) -> None:
    growth, seen = Growth(str(tmp_path / "ledger"), 600.0), tmp_path / "seen"

    def read_on() -> pa.Table:
        stream = spark.readStream.format("delta").load(growth.place.uri).where("kind = 'epoch'")
        stream = stream.select("epoch", "partition").writeStream.format("parquet")
        stream.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(
            availableNow=True
        ).start(str(seen)).awaitTermination()
        return spark.read.parquet(str(seen)).toArrow()

    for _ in range(4):
        growth.grow()
    assert len(read_on()) == 4 * (TASKS + 1)
    assert expire_now(growth)
    growth.grow()
    assert expire_now(growth)
    rows = read_on()
    assert len(rows) == 5 * (TASKS + 1)
    assert set(rows["epoch"].to_pylist()) == set(range(5))
