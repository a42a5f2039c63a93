"""The last row is the last by the table's order, and never by clocks, which may be set back."""

import datetime as dt
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rocket_sink.ledger.driver.ledger import Ledger
from rocket_sink.ledger.path import resolve_path
from rocket_sink.ledger.records import RunContext, resolution_rows
from rocket_sink.ledger.schema import LEDGER_SCHEMA
from rocket_sink.ledger.transport.files import sealed_files
from rocket_sink.ledger.transport.spool import SpoolWriter
from tests.ledger.views import quick_ledger

from .values import accounts, confirmed, context, letter


def at(batch: pa.RecordBatch, second: int) -> pa.RecordBatch:
    """Return the rows with another time."""
    when = dt.datetime(2024, 1, 1, tzinfo=dt.timezone.utc) + dt.timedelta(seconds=second)
    place = LEDGER_SCHEMA.get_field_index("at")
    column = pa.array([when] * batch.num_rows, LEDGER_SCHEMA.field("at").type)
    return batch.set_column(place, LEDGER_SCHEMA.field("at"), column)


def pending(ledger: Ledger) -> list[bytes]:
    """Return the pending letters by DuckDB, in a fraction of Spark's time."""
    quick = quick_ledger(ledger.path)
    rows = quick.query("SELECT body FROM pending_letters").to_pylist()
    return sorted(row["body"] for row in rows)


def pending_of_both(spark: Any, ledger: Ledger) -> list[bytes]:
    """Return the pending letters by Spark after comparing them with DuckDB's."""
    bodies = sorted(bytes(row["body"]) for row in ledger.dead_letters(spark).collect())
    assert pending(ledger) == bodies
    return bodies


def spool(ledger: Ledger, ctx: RunContext, *batches: pa.RecordBatch) -> str:
    writer = SpoolWriter(ledger.path, ctx)
    writer.append(*batches)
    sealed = writer.seal()
    assert sealed is not None
    return sealed


@pytest.mark.spark
def test_a_clock_that_is_set_back(spark: Any, tmp_path: Path) -> None:
    pytest.importorskip("duckdb")
    ledger = Ledger(tmp_path)
    by_hand = context(query_id="export", partition=None)
    ledger.append(spark, letter(by_hand, b"parked", letter_id=pa.array(["l"])))
    for turn, way in enumerate(("parked", "unparked", "parked", "unparked")):
        # The clock of each resolution is behind the one before.
        columns = {"letter_id": ["l"], "resolution": way}
        ledger.append(spark, at(resolution_rows(columns, by_hand), 100 - turn))
        assert pending(ledger) == ([b"parked"] if way == "unparked" else [])
    ledger.append(spark, resolution_rows({"letter_id": ["l"], "resolution": "dropped"}, by_hand))

    # The run that ended last counts if both are unconfirmed.
    old, new = context(), context(run_id="run-2", task_attempt_id=1)
    ledger.append(spark, at(letter(old, b"old"), 50), at(accounts(old, dead=1), 50))
    ledger.append(spark, at(letter(new, b"new"), 10), at(accounts(new, dead=1), 10))
    assert pending(ledger) == [b"new"]
    # The second run is confirmed last, by a clock that is behind.
    ledger.append(spark, at(confirmed(old, 1), 60))
    assert pending(ledger) == [b"old"]
    ledger.append(spark, at(confirmed(new, 1), 20))
    assert pending_of_both(spark, ledger) == [b"new"]


@pytest.mark.spark
def test_two_runs_in_one_fold(spark: Any, tmp_path: Path) -> None:
    """Ignore the times of files, because they come from a clock, too."""
    pytest.importorskip("duckdb")
    ledger = Ledger(tmp_path)
    old, new = context(), context(run_id="run-2", task_attempt_id=1)
    spool(ledger, old, at(letter(old, b"old"), 50), at(accounts(old, dead=1), 50))
    late = spool(ledger, new, at(letter(new, b"new"), 10), at(accounts(new, dead=1), 10))
    os.utime(late, (1, 1))
    ledger.sync(spark)
    assert pending_of_both(spark, ledger) == [b"new"]
    rows = ledger.rows(spark).select("run_id", "sequence").distinct().collect()
    numbers = {row.run_id: row.sequence for row in rows}
    assert numbers["run-1"] < numbers["run-2"]
    last = ledger.rows(spark).agg({"sequence": "max"}).head()[0]
    ledger.append(spark, accounts(context(epoch=1), acked=1))
    assert ledger.rows(spark).where("epoch = 1").head()["sequence"] > last


def test_a_fold_takes_the_files_of_an_epoch_in_the_order_of_their_begin(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    paths = []
    for epoch in (11, 9):
        for turn in range(3):
            ctx = context(epoch=epoch, run_id=f"run-{turn}")
            path = spool(ledger, ctx, accounts(ctx, acked=1))
            os.utime(path, (100 - turn, 100 - turn))
            paths.append(path)
    place = resolve_path(tmp_path)
    listed = [info.path for info in sealed_files(place, place.filesystem())]
    assert listed == [*paths[3:], *paths[:3]], "by epoch, and within it as they were made"
