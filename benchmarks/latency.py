"""Latency of single rows: from the arrival in Spark's source to the broker, and to the ledger.

Rows come through Spark's socket source, each with the time of its arrival in its body, at two
paces: one row per epoch (the next one arrives when the epoch of the one before has ended), and
1,000 a second. The broker's word is the message's store time; the ledger's is the time of the Delta
commit that brought the row's epoch. All clocks are this machine's.
"""

from __future__ import annotations

import json
import math
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow.parquet as pq

from benchmarks.lanes.cases import Lane, lane_named
from benchmarks.results import LATENCY, Results
from benchmarks.rows import body_of, number_of
from benchmarks.run import reason_of, scratch_folder
from rocket_sink.cluster.local import LocalCluster
from rocket_sink.errors import RocketSinkError
from rocket_sink.producer.admin.admin import Admin

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

Say = Callable[[str], None]
Session = Callable[[tuple[str, ...]], AbstractContextManager["SparkSession"]]

LANES: Final = ("foreach", "source-stream", "write_batch")
EPOCH: Final = "one row per epoch"
STEADY: Final = "1,000 rows/s"
_RATE: Final = 1000
_BODY_BYTES: Final = 256
_PATIENCE_S: Final = 120.0
_POLL_S: Final = 0.02


@dataclass(frozen=True)
class Rows:
    """How many rows of each pace."""

    epochs: int
    steady: int

    @classmethod
    def of(cls, rows: int) -> Rows:
        """Return the rows of each pace, at most `rows`."""
        return cls(max(3, min(50, rows // 400)), min(rows, 20 * _RATE))


def run_latency(rows: Rows, results: Results, say: Say, session: Session) -> None:
    """Measure every lane at both paces, each after a few rows that are not counted.

    A case whose stream fails, or whose rows are not all there, is named in `results.failed`.

    Raises:
        RocketSinkError: the cluster or Spark does not start.
    """
    paces = ((EPOCH, rows.epochs), (STEADY, rows.steady))
    results.planned[LATENCY] = len(LANES) * len(paces)
    with ExitStack() as stack:
        folder = stack.enter_context(scratch_folder())
        say("starting RocketMQ")
        cluster = stack.enter_context(LocalCluster(1))
        say("starting Spark")
        spark = stack.enter_context(session(()))
        # `_wait` counts the rows by these progress reports; by default Spark keeps 100 of them.
        spark.conf.set("spark.sql.streaming.numRecentProgressUpdates", 10_000)
        for pace, count in paces:
            for name in LANES:
                say(f"{name}, {pace}")
                case = _Case(spark, cluster.name_server, lane_named(name), folder)
                cluster.create_topic(case.topic)
                try:
                    record = case.run(pace, count)
                except Exception as error:  # Spark's have no ancestor in common with ours
                    results.failed[f"{name}, {pace}"] = reason_of(error)
                else:
                    results.add(LATENCY, record)


class _Source:
    """Rows for one socket source, which is what connects."""

    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._server.getsockname()[1])
        self._server.settimeout(_PATIENCE_S)
        self._spark: socket.socket | None = None
        self._last_us = 0

    def accept(self) -> None:
        """Wait for Spark."""
        self._spark = self._server.accept()[0]

    def put(self) -> None:
        """A row arrives; no two have the same time."""
        self._last_us = max(time.time_ns() // 1000, self._last_us + 1)
        line = body_of(self._last_us, _BODY_BYTES) + b"\n"
        assert self._spark is not None
        self._spark.sendall(line)

    def __enter__(self) -> _Source:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()
        if self._spark is not None:
            self._spark.close()


class _Case:
    def __init__(self, spark: SparkSession, name_server: str, lane: Lane, folder: Path) -> None:
        self.topic = f"latency-{uuid.uuid4().hex[:8]}"
        self._spark = spark
        self._name_server = name_server
        self._lane = lane
        self._folder = folder / self.topic

    def run(self, pace: str, count: int) -> dict[str, Any]:
        """The case's record."""
        warm_up = 2 if pace == EPOCH else _RATE // 2
        ledger = self._folder / "ledger"
        options = {
            "nameServer": self._name_server, "topic": self.topic, "ledger": str(ledger),
        }  # fmt: skip
        with _Source() as source:
            frame = self._spark.readStream.format("socket")
            frame = frame.option("host", "127.0.0.1").option("port", source.port)
            body = frame.load().selectExpr("cast(value AS binary) AS body")
            assert self._lane.writer is not None
            writer = self._lane.writer(body, options)
            writer = writer.option("checkpointLocation", str(self._folder / "checkpoint"))
            query = writer.start()
            try:
                self._send(source, query, pace, warm_up + count)
            finally:
                query.stop()
        from rocket_sink.ledger.driver.ledger import Ledger

        Ledger(str(ledger)).sync(self._spark)
        return self._record(pace, warm_up, warm_up + count, ledger)

    def _send(self, source: _Source, query: StreamingQuery, pace: str, count: int) -> None:
        source.accept()
        began_s = time.monotonic()
        for number in range(count):
            try:
                source.put()
            except OSError as error:
                raise (query.exception() or error) from error
            if pace == EPOCH:
                _wait(query, number + 1)
            else:
                time.sleep(max(0.0, began_s + (number + 1) / _RATE - time.monotonic()))
        _wait(query, count)

    def _record(self, pace: str, skip: int, count: int, ledger: Path) -> dict[str, Any]:
        with Admin(nameServer=self._name_server) as admin:
            admin.await_dispatched(self.topic)
            stored = sorted((number_of(m.body), m.store_ms) for m in admin.read_topic(self.topic))
        commits = list(commits_of(ledger))
        ledger_rows = sum(acked for _, acked in commits)
        if len({at_us for at_us, _ in stored}) != count or ledger_rows != count:
            raise RocketSinkError(
                f"{self._lane.name}, {pace}: of {count:,} rows the brokers hold {len(stored):,}, "
                f"and the ledger {ledger_rows:,}"
            )
        # Epochs go by in order, and so do their rows: what a commit brings are the next ones.
        at_ms = [ms for ms, acked in commits for _ in range(acked)]
        to_broker = [ms - us / 1000 for us, ms in stored][skip:]
        to_ledger = [ms - us / 1000 for ms, (us, _) in zip(at_ms, stored, strict=False)][skip:]
        return {
            "lane": self._lane.name, "pace": pace, "rows": count - skip,
            "stored_ms": shares(to_broker), "ledger_ms": shares(to_ledger),
        }  # fmt: skip


def _wait(query: StreamingQuery, rows: int) -> None:
    """Wait until the epochs of so many rows have ended."""
    until_s = time.monotonic() + _PATIENCE_S
    while sum(int(progress["numInputRows"]) for progress in query.recentProgress) < rows:
        if (error := query.exception()) is not None:
            raise error
        if time.monotonic() > until_s:
            raise RocketSinkError("the stream takes no rows")
        time.sleep(_POLL_S)


def commits_of(ledger: Path) -> Iterator[tuple[float, int]]:
    """(time in ms, acknowledged rows of complete epochs) of the commits of a Delta ledger."""
    for commit in sorted((ledger / "_delta_log").glob("*.json")):
        actions = [json.loads(line) for line in commit.read_text(encoding="utf-8").splitlines()]
        at_ms = next(
            action["commitInfo"]["timestamp"] for action in actions if "commitInfo" in action
        )
        added = [action["add"] for action in actions if "add" in action]
        # Merged files have no new rows.
        paths = [add["path"] for add in added if add["dataChange"]]
        acked = sum(_acked(ledger / path) for path in paths if path.startswith("kind=epoch/"))
        if acked:
            yield float(at_ms), acked


def _acked(path: Path) -> int:
    return sum(n or 0 for n in pq.ParquetFile(path).read(["acked"])["acked"].to_pylist())


def shares(values: Sequence[float]) -> dict[str, float]:
    """p50, p95 and p99: the smallest value that so many are not above."""
    ranked = sorted(values)
    return {
        f"p{share}": round(ranked[max(0, math.ceil(len(ranked) * share / 100) - 1)], 1)
        for share in (50, 95, 99)
    }
