"""Runs cases of the Spark lanes: one stream or batch over a load's rows, into the case's sink."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from benchmarks.figures import Case, Figures
from benchmarks.lanes.cases import LaneCase
from benchmarks.measure import Cost, Meter
from benchmarks.rows import RowFiles
from benchmarks.stored import StoredCount
from rocket_sink.errors import RocketSinkError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class Brokers(Protocol):
    """A cluster as a case sees it."""

    @property
    def name_server(self) -> str: ...

    def cpu_s(self) -> float: ...


class SparkBench:
    """A session, brokers, a topic and a scratch folder that cases share."""

    def __init__(
        self, spark: SparkSession, brokers: Brokers, topic: str, folder: Path, *,
        count: bool = True,
    ) -> None:  # fmt: skip
        self.spark = spark
        self.brokers = brokers
        self.topic = topic
        self.folder = folder
        self.stored = StoredCount(brokers.name_server, topic) if count else None
        jvm: Any = spark._jvm
        self._jvm_pid = int(jvm.java.lang.ProcessHandle.current().pid())
        self._number = 0

    def meter(self, brokers_s: Callable[[], float] | None = None) -> Meter:
        """Return a meter of this session's processes and its brokers, or of other brokers."""
        return Meter(self._jvm_pid, brokers_s or self.brokers.cpu_s)

    def scratch(self, kind: str) -> Path:
        """An unused path."""
        self._number += 1
        return self.folder / f"{kind}-{self._number}"


class LaneRun:
    """A `Subject`: a lane's case over some rows."""

    def __init__(self, bench: SparkBench, made: LaneCase, rows: RowFiles) -> None:
        self._bench = bench
        self._made = made
        self._rows = rows

    @property
    def case(self) -> Case:
        return self._made.case

    def warm_up(self) -> None:
        self._run(warm_up=True)

    def run(self) -> Figures:
        """Begins with a small run: Spark ends Python processes after an idle minute, and their
        start must not count for the next case.

        Raises RocketSinkError: a row is missing on the brokers or in the ledger.
        """
        self.warm_up()
        return self._run(warm_up=False)

    def _run(self, *, warm_up: bool) -> Figures:
        bench, lane_case = self._bench, self._made
        ledger = bench.scratch("ledger")
        options = {
            "nameServer": bench.brokers.name_server, "topic": bench.topic,
            "ordering": lane_case.case.ordering, **lane_case.kind.options,
        }  # fmt: skip
        if lane_case.ledger:
            options["ledger"] = str(ledger)
        if lane_case.lane.sends and bench.stored:
            bench.stored.start()
        rows, seconds, cost = self._measured(options, warm_up)
        doubled = 0
        if lane_case.lane.sends:
            # The ledger first: it has the errors of failed rows.
            if lane_case.ledger:
                _check_ledger(bench.spark, ledger, rows, lane_case.case.name)
            doubled = bench.stored.check(rows, lane_case.case.name) if bench.stored else 0
        return spark_figures(lane_case.case.name, rows, seconds, cost, doubled)

    def _measured(self, options: dict[str, Any], warm_up: bool) -> tuple[int, float, Cost]:
        lane, keys, more = self._made.lane, self._made.case.keys, self._made.kind.columns
        if lane.writer is not None:
            frame = self._rows.stream(keys, more, warm_up=warm_up)
            checkpoint = self._bench.scratch("checkpoint")
            return run_stream(self._bench.meter(), lane.writer(frame, options), checkpoint)
        assert lane.run is not None
        frame, run = self._rows.frame(keys, more, warm_up=warm_up), lane.run
        count = frame.count()
        return run_batch(self._bench.meter(), lambda: run(frame, options), count)


def run_stream(meter: Meter, writer: Any, checkpoint: Path) -> tuple[int, float, Cost]:
    """Rows, seconds spent in epochs, cost of a stream that ends when its files are read."""
    writer = writer.trigger(availableNow=True)
    writer = writer.option("checkpointLocation", str(checkpoint))
    with meter:
        query = writer.start()
        query.awaitTermination()
    progress = query.recentProgress
    rows = sum(report["numInputRows"] for report in progress)
    seconds = sum(report["durationMs"].get("addBatch", 0) for report in progress) / 1000
    return rows, seconds, meter.cost


def run_batch(meter: Meter, write: Callable[[], None], rows: int) -> tuple[int, float, Cost]:
    """Return the rows, the seconds spent in the write, and the cost of a batch."""
    with meter:
        began_s = time.monotonic()
        write()
        seconds = time.monotonic() - began_s
    return rows, seconds, meter.cost


def spark_figures(case: str, rows: int, seconds: float, cost: Cost, doubled: int = 0) -> Figures:
    """Costs divided by the rows."""
    millions = rows / 1e6
    return Figures(
        case, rows, seconds, rows / seconds, cost.jvm_s / millions, cost.workers_s / millions,
        cost.driver_s / millions, cost.brokers_s / millions, cost.worker_start_mb,
        cost.worker_peak_mb, doubled=doubled,
    )  # fmt: skip


def _check_ledger(spark: SparkSession, path: Path, rows: int, case: str) -> None:
    from rocket_sink.ledger.driver.ledger import Ledger

    ledger = Ledger(str(path))
    ledger.sync(spark)
    sums = ledger.epochs(spark).selectExpr("sum(acked) AS acked").first()
    acked = sums.acked if sums else 0
    if acked != rows:
        letters = ledger.dead_letters(spark).groupBy("reason", "first_error_code", "first_error")
        why = "; ".join(
            f"{row['count']:,} {row.reason}, {row.first_error_code}: {row.first_error}"
            for row in letters.count().orderBy("count", ascending=False).take(3)
        )
        raise RocketSinkError(
            f"{case}: of {rows:,} rows the ledger {path} has {acked:,} acknowledged; {why}"
        )
    with contextlib.suppress(OSError):
        shutil.rmtree(path)
