"""Scaling: CPU per row and memory per worker over rows, sharding keys, brokers, workers and queues.

Each curve varies one of them, through `sink.write`. Real brokers up to 8; above, a stub in another
process, with its own curve from 2 on, because its cost differs from a broker's. The curve over
queues has the tasks' code without Spark, in strict order, over stubs, with the Arrow batches that
Spark makes by default and with ten times larger ones.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks.figures import Case, Figures, medians
from benchmarks.lanes.cases import lane_cases
from benchmarks.lanes.runs import Brokers, LaneRun, SparkBench
from benchmarks.log_room import QUICK_ROUNDS, LogRoom
from benchmarks.processes import ProcessRun, our_launcher
from benchmarks.results import SCALE, Results
from benchmarks.rows import Load, RowFiles
from benchmarks.run import TOPIC, scratch_folder
from benchmarks.stub.cluster import StubCluster
from rocket_sink.cluster.local import LocalCluster

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Say = Callable[[str], None]
Session = Callable[[int], AbstractContextManager["SparkSession"]]
"""Starts Spark with so many workers."""

DIMENSIONS: Final = ("rows", "keys", "brokers", "workers", "queues")
_BODY_BYTES: Final = 256
_REAL_BROKERS: Final = (2, 4, 8)
_STUB_BROKERS: Final = (2, 4, 8, 16, 32, 64)
_WORKERS: Final = (1, 2, 3, 4)
_QUEUES: Final = (2, 8, 64, 256)
_BATCH_ROWS: Final = (10_000, 100_000)
"""Rows of an Arrow batch: Spark's default, and a number for topics of many queues."""
_TIMES_ROWS: Final = (1, 2, 5, 10)
_PARTS_OF_ROWS: Final = (1000, 100, 10, 1)
_HEAP_MB: Final = 256


@dataclass(frozen=True)
class Scaling:
    """The curves; `rows` is the smallest number of rows, and that of the other curves."""

    rows: int
    repeat: int
    by: tuple[str, ...] = DIMENSIONS

    @classmethod
    def of(cls, rows: int, repeat: int, by: Iterable[str]) -> Scaling:
        """The selected curves, by default all."""
        return cls(rows, repeat, tuple(by) or DIMENSIONS)

    @property
    def row_counts(self) -> tuple[int, ...]:
        """1 to 10 million, of a million rows."""
        return tuple(self.rows * times for times in _TIMES_ROWS)

    @property
    def key_counts(self) -> tuple[int, ...]:
        """1,000 to a million, of a million rows."""
        return tuple(max(1, self.rows // part) for part in _PARTS_OF_ROWS)

    @property
    def count(self) -> int:
        """Of points."""
        kinds = 3  # unordered, strict, strict with larger batches
        points = {
            "rows": len(_TIMES_ROWS), "keys": len(_PARTS_OF_ROWS), "workers": len(_WORKERS),
            "queues": len(_BATCH_ROWS) * len(_QUEUES),
            "brokers": kinds * (len(_REAL_BROKERS) + len(_STUB_BROKERS)),
        }  # fmt: skip
        return sum(points[dimension] for dimension in self.by)


def run_scale(scaling: Scaling, results: Results, say: Say, session: Session) -> None:
    """Measure all curves into `results.scale`."""
    with scratch_folder() as folder:
        run = _ScaleRun(scaling, folder, say, session, os.cpu_count() or 1)
        results.planned[SCALE] = scaling.count
        for dimension in scaling.by:
            for point in run.points(dimension):
                say(f"over {point['curve']}, {point['x']:,}: {point['cpu']:.2f} cpu-s/M")
                results.add(SCALE, point)


class _ScaleRun:
    def __init__(
        self, scaling: Scaling, folder: Path, say: Say, session: Session, workers: int
    ) -> None:
        self._scaling = scaling
        self._folder = folder
        self._say = say
        self._session = session
        self._workers = workers

    def points(self, dimension: str) -> Iterator[dict[str, Any]]:
        curves: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
            "rows": self._over_rows, "keys": self._over_keys, "brokers": self._over_brokers,
            "workers": self._over_workers, "queues": self._over_queues,
        }  # fmt: skip
        self._say(f"measuring over {dimension}")
        return curves[dimension]()

    def _over_rows(self) -> Iterator[dict[str, Any]]:
        with _real(2) as cluster, self._session(self._workers) as spark:
            self._compile(spark, cluster)
            for rows in self._scaling.row_counts:
                yield _point("rows", "rows", rows, self._measured(spark, cluster, rows))

    def _over_keys(self) -> Iterator[dict[str, Any]]:
        rows = self._scaling.rows
        with _real(2) as cluster, self._session(self._workers) as spark:
            self._compile(spark, cluster)
            for keys in self._scaling.key_counts:
                figures = self._measured(spark, cluster, rows, keys=keys)
                yield _point("sharding keys, strict", "keys", keys, figures)

    def _over_brokers(self) -> Iterator[dict[str, Any]]:
        with self._session(self._workers) as spark:
            for count in _REAL_BROKERS:
                with _real(count) as cluster:
                    if count == _REAL_BROKERS[0]:
                        self._compile(spark, cluster)
                    yield from self._broker_points(spark, cluster, count, "real")
            for count in _STUB_BROKERS:
                with StubCluster(count) as stub:
                    yield from self._broker_points(spark, stub, count, "stub")

    def _broker_points(
        self, spark: SparkSession, brokers: Brokers, count: int, kind: str
    ) -> Iterator[dict[str, Any]]:
        rows, keys = self._scaling.rows, self._scaling.key_counts[0]
        default, large = _BATCH_ROWS
        for name, key_count, batch_rows in (
            (kind, 0, default), (f"{kind}, strict", keys, default),
            (f"{kind}, strict, batches of {large:,} rows", keys, large),
        ):  # fmt: skip
            spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", batch_rows)
            figures = self._measured(spark, brokers, rows, keys=key_count, count=kind == "real")
            yield _point(f"brokers ({name})", "brokers", count, figures)

    def _over_workers(self) -> Iterator[dict[str, Any]]:
        with _real(2) as cluster:
            for workers in _WORKERS:
                with self._session(workers) as spark:
                    self._compile(spark, cluster)
                    figures = self._measured(spark, cluster, self._scaling.rows)
                    yield _point("workers", "workers", workers, figures)

    def _over_queues(self) -> Iterator[dict[str, Any]]:
        """Each round measures every number of queues once: machines change their speed."""
        with ExitStack() as stack:
            runs = []
            points = list(itertools.product(_BATCH_ROWS, _QUEUES))
            for rows, count in points:
                brokers = min(count, _STUB_BROKERS[-1])
                stub = stack.enter_context(StubCluster(brokers, count // brokers))
                arguments = {
                    "nameServer": stub.name_server, "topic": TOPIC, "mode": "arrow", "rows": rows,
                    "ordering": "strict", "keys": self._scaling.key_counts[0],
                }  # fmt: skip
                case = Case(f"{count} queues", "", (), body_bytes=_BODY_BYTES)
                runs.append(
                    ProcessRun(
                        case, our_launcher(), arguments, messages=self._scaling.rows,
                        brokers_s=stub.cpu_s, count=None,
                    )
                )  # fmt: skip
            rounds = [[run.run() for run in runs] for _ in range(self._scaling.repeat)]
        for (rows, count), figures in zip(points, zip(*rounds, strict=True), strict=True):
            curve = f"queues (stub, strict, batches of {rows:,} rows)"
            yield _point(curve, "queues", count, medians(figures)[0])

    def _compile(self, spark: SparkSession, brokers: Brokers) -> None:
        """An unmeasured run: the JVM's compilers work most in its first minute, which would raise
        the first point of every curve."""
        self._measured(spark, brokers, self._scaling.rows, repeat=1)

    def _measured(
        self, spark: SparkSession, brokers: Brokers, rows: int, *, keys: int = 0,
        count: bool = True, repeat: int | None = None,
    ) -> Figures:  # fmt: skip
        if isinstance(brokers, LocalCluster):
            LogRoom(brokers).make()
        path = self._folder / f"rows-{rows}-{keys}"
        files = RowFiles(spark, Load(rows, _BODY_BYTES, (keys,)), path)
        scratch = Path(str(path) + f"-{len(list(self._folder.iterdir()))}")
        bench = SparkBench(spark, brokers, TOPIC, scratch, count=count)
        return medians(_runs(bench, files, keys, repeat or self._scaling.repeat))[0]


def _runs(bench: SparkBench, files: RowFiles, keys: int, repeat: int) -> Sequence[Figures]:
    ordering = "strict" if keys else "none"
    lane_case = lane_cases(["write"], [ordering], [keys], [_BODY_BYTES])[-1]
    run = LaneRun(bench, lane_case, files)
    return [run.run() for _ in range(repeat)]


def _real(count: int) -> AbstractContextManager[LocalCluster]:
    return _WithTopic(count, broker_config=QUICK_ROUNDS, heap_mb=_HEAP_MB)


class _WithTopic(LocalCluster):
    def start(self, timeout_s: float = 240) -> LocalCluster:
        cluster = super().start(timeout_s)
        cluster.create_topic(TOPIC, 4)
        return cluster


def _point(curve: str, axis: str, x: int, figures: Figures) -> dict[str, Any]:
    return {
        "curve": curve, "axis": axis, "x": x, "rows": figures.messages, "per_s": figures.per_s,
        "cpu": figures.cpu, "jvm": figures.jvm, "client": figures.client,
        "brokers": figures.brokers, "start_mb": figures.start_mb or 0.0,
        "peak_mb": figures.peak_mb or 0.0,
    }  # fmt: skip
