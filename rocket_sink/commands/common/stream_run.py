"""Execution of `rocket-sink stream`: the source, the query, its progress, signals, the report."""
# ruff: noqa: S608 (the SQL has our own names; texts of users are checked or hexadecimal)

from __future__ import annotations

import datetime as dt
import os
import shlex
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Final

from rocket_sink.commands.common.base import handle_signals, one_line
from rocket_sink.commands.common.ledger_input import fold_and_note
from rocket_sink.commands.common.output import note
from rocket_sink.errors import ConfigurationError, LedgerError
from rocket_sink.ledger.driver.ledger import Ledger
from rocket_sink.ledger.path import check_encoding, resolve_path
from rocket_sink.ledger.query.duckdb_reader import reader_of
from rocket_sink.ledger.query.live import LiveFigures, follow, pending_by_reason
from rocket_sink.ledger.report.verdict import backfill_command
from rocket_sink.ledger.sql import Scope, Scoped, is_text
from rocket_sink.ledger.views import OUTCOMES
from rocket_sink.text import counted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    from rocket_sink.spark.sink import RocketSink


class RunView:
    """Prints a line for each event of a running query. `report` gets the micro-batches; `figures`
    reads the ledger's new rows (None: there are only Spark's figures). Not thread-safe."""

    def __init__(self, report: Report, figures: LiveFigures | None) -> None:
        self._report = report
        self._figures = figures
        self._last_epoch = -1
        self._isolated_until: dict[str, dt.datetime | None] = {}
        self._pending = 0

    def look(self, query: StreamingQuery) -> None:
        """Show the query's micro-batches and the ledger's rows that came since the last call."""
        for progress in query.recentProgress:
            epoch, rows = int(progress["batchId"]), int(progress["numInputRows"])
            if epoch > self._last_epoch and rows:
                self._last_epoch = epoch
                self.epoch(epoch, rows, progress["durationMs"].get("triggerExecution", 0) / 1000)
        self.refresh()

    def epoch(self, epoch: int, rows: int, took_s: float) -> None:
        """Add a micro-batch to the report, and show it."""
        self._report.epochs += 1
        self._report.rows_read += rows
        note(f"epoch {epoch}: {counted(rows, 'row')} in {took_s:.1f} s")

    def refresh(self) -> None:
        """Show isolations and dead letters among the ledger rows that came since the last call."""
        if self._figures is None or not self._figures.refresh():
            return
        for name, sums in self._figures.brokers.items():
            until = sums.isolated_until
            if sums.is_isolated() and until != self._isolated_until.get(name):
                self._isolated_until[name] = until
                note(f"{name} is isolated until {until:%H:%M:%S} UTC ({sums.cause})")
        pending = sum(self._figures.standing.pending.values())
        if pending > self._pending:
            note(f"{counted(pending, 'dead letter', 'is', 'are')} pending")
        self._pending = pending


_POLL_S: Final = 0.3
_STOP_POLL_S: Final = 0.02
_WITH_FIXED_SCHEMA: Final = ("rate", "rate-micro-batch", "kafka", "socket", "delta")
"""Streaming sources that have a schema; file sources infer their schema from the files."""


@dataclass(frozen=True)
class Source:
    """A Spark source, and its projection to the row contract."""

    form: str
    path: str | None
    schema: str | None
    options: Mapping[str, str]
    where: str | None = None
    select: tuple[str, ...] = ()

    def read(self, spark: SparkSession, *, streaming: bool) -> DataFrame:
        """Return the DataFrame. Raise ConfigurationError if the Kafka package is missing, or if
        Java cannot use the path."""
        check_encoding(spark, self.path or "")
        reader = spark.readStream if streaming else spark.read
        reader = reader.format(self.form).options(**self.options)
        if self.schema:
            reader = reader.schema(self.schema)
        elif streaming and self.path and self.form.lower() not in _WITH_FIXED_SCHEMA:
            files = spark.read.format(self.form).options(**self.options).load(self.path)
            reader = reader.schema(files.schema)
        try:
            frame = reader.load(self.path) if self.path else reader.load()
        except Exception as error:
            raise self._explained(error, spark) from error
        if self.where:
            frame = frame.where(self.where)
        return frame.selectExpr(*self.select) if self.select else frame

    def _explained(self, error: Exception, spark: SparkSession) -> Exception:
        if self.form.lower() != "kafka" or "kafka" not in str(error).lower():
            return error
        return ConfigurationError(
            "Spark has no Kafka source: add --package "
            f"org.apache.spark:spark-sql-kafka-0-10_2.13:{spark.version}"
        )


@dataclass
class Report:
    """The result of a run. `counts` are the ledger's sums over the run's epochs. `pending` counts
    all pending dead letters of the ledger, by reason."""

    query_id: str | None = None
    run_id: str | None = None
    epochs: int = 0
    rows_read: int = 0
    seconds: float = 0.0
    error: str | None = None
    ledger: str | None = None
    counts: dict[str, int] = field(default_factory=dict)
    pending: dict[str, int] = field(default_factory=dict)

    def as_text(self) -> str:
        per_s = self.rows_read / self.seconds if self.seconds else 0
        rate = f", {per_s:,.1f} rows/s" if per_s else ""
        batches = f"{self.epochs:,} micro-batch{'' if self.epochs == 1 else 'es'}"
        lines = [f"{counted(self.rows_read, 'row')} in {batches}, {self.seconds:.1f} s{rate}"]
        if self.counts:
            lines.append(", ".join(f"{name} {count:,}" for name, count in self.counts.items()))
        if self.ledger:
            path = shlex.quote(self.ledger)
            lines.append(f"ledger: {self.ledger} (rocket-sink report --ledger {path})")
            waiting = {reason: n for reason, n in self.pending.items() if reason != "data"}
            if waiting:
                reasons = ", ".join(f"{reason} {n:,}" for reason, n in waiting.items())
                lines.append(
                    f"dead letters wait: {reasons}; when the cause is mended, send them with "
                    + backfill_command(self.ledger)
                )
            if refused := self.pending.get("data"):
                lines.append(
                    f"rows that no broker takes: {refused:,}; see the reasons with "
                    f"rocket-sink ledger show dead-letters --ledger {path}"
                )
        return "\n".join(lines)


def run_stream(
    spark: SparkSession,
    source: Source,
    sink_options: Mapping[str, Any],
    lane: str,
    *,
    checkpoint: str,
    trigger: str | None,
    stop_timeout_s: float,
) -> Report:
    """Run the query until it ends, fails, or SIGTERM or SIGINT arrives; show its progress."""
    check_encoding(spark, checkpoint)
    frame = source.read(spark, streaming=True)
    figures = _figures(sink_options)
    writer = stream_writer(spark, frame, sink_options, lane)
    writer = writer.option("checkpointLocation", checkpoint)
    if trigger == "available-now":
        writer = writer.trigger(availableNow=True)
    elif trigger:
        writer = writer.trigger(processingTime=trigger)
    query = writer.start()
    note(f"query {query.id} runs; Ctrl-C or SIGTERM ends it after the current micro-batch")
    started_s = time.monotonic()
    report = Report(query_id=str(query.id), run_id=str(query.runId))
    if figures is not None:
        figures.run_id = report.run_id
    stop = threading.Event()
    view = RunView(report, figures)
    with handle_signals(lambda *_: stop.set()):
        _let_jvm_go_on(spark, stop)
        while query.isActive and not stop.is_set():
            time.sleep(_POLL_S)
            view.look(query)
        if stop.is_set():
            note("stopping after the current micro-batch")
            _stop(spark, query, stop_timeout_s)
        view.look(query)
    report.seconds = time.monotonic() - started_s
    failure = query.exception()
    report.error = one_line(failure) if failure is not None else None
    return report


def run_batch(
    spark: SparkSession, source: Source, sink_options: Mapping[str, Any], lane: str
) -> Report:
    """Send the source's rows once: by the data source, else by `RocketSink.write`."""
    from rocket_sink.spark.sink import RocketSink

    sink = RocketSink(**sink_options)
    frame = _in_order(sink, source.read(spark, streaming=False))
    started_s = time.monotonic()
    report = Report(epochs=1)
    if lane == "datasource":
        from rocket_sink.spark.datasource import register

        register(spark)
        from pyspark.sql import Observation
        from pyspark.sql.functions import count, lit

        observation = Observation()
        frame = frame.observe(observation, count(lit(1)).alias("rows"))
        frame.write.format("rocketmq").options(**_texts(sink_options)).mode("append").save()
        report.rows_read = observation.get["rows"]
    else:
        summary = sink.write(frame)
        report.query_id, report.rows_read = summary.query_id, summary.rows_in
    report.seconds = time.monotonic() - started_s
    return report


def finish(spark: SparkSession, report: Report, sink_options: Mapping[str, Any]) -> Report:
    """Fold the ledger and add its counts of this run to the report."""

    path = sink_options.get("ledger")
    if not path:
        return report
    ledger, began = Ledger(str(path)), dt.datetime.now(dt.timezone.utc)
    began -= dt.timedelta(seconds=report.seconds)
    fold_and_note(ledger, spark)
    report.ledger = ledger.path
    query = reader_of(spark, resolve_path(str(path)))
    if query is None:
        return report
    report.pending = pending_by_reason(query)
    if report.query_id is None:
        # The data source makes the id of a batch write in another process.
        read = Scoped(query, Scope(since=began))
        ids = read(f"SELECT query_id FROM epochs WHERE lane = 'batch' AND {read.where} LIMIT 2")
        report.query_id = ids[0]["query_id"] if len(ids) == 1 else None
    if report.query_id is not None:
        # With `appId` the ledger's query id is the appId, so a stream is selected by its run's id.
        key, value = ("run_id", report.run_id) if report.run_id else ("query_id", report.query_id)
        counts = ", ".join(
            f"CAST(coalesce(sum({name}), 0) AS BIGINT) AS {name}" for name in ("rows_in", *OUTCOMES)
        )
        rows = query(f"SELECT {counts} FROM epochs WHERE {is_text(key, value)}")
        (report.counts,) = rows.to_pylist()
    return report


def _figures(sink_options: Mapping[str, Any]) -> LiveFigures | None:
    """Return the figures of the ledger's new rows; None without a ledger that can be followed."""

    if not sink_options.get("ledger"):
        return None
    try:
        return follow(resolve_path(str(sink_options["ledger"])))
    except (LedgerError, OSError):
        return None  # Ignore the error: the query raises it if it needs the ledger's files.


def stream_writer(
    spark: SparkSession, frame: DataFrame, sink_options: Mapping[str, Any], lane: str
) -> DataStreamWriter:
    """Return the frame's writer for a lane; the caller adds checkpoint and trigger."""
    from rocket_sink.spark.sink import RocketSink

    sink = RocketSink(**sink_options)
    frame = _in_order(sink, frame)
    if lane == "foreach":
        return sink.stream(frame)
    if lane == "foreachBatch":
        return frame.writeStream.foreachBatch(sink.write_batch)
    from rocket_sink.spark.datasource import register
    from rocket_sink.spark.listener import install_fold

    register(spark, ledger=sink.options.ledger)
    install_fold(sink.options, spark)  # folds every foldIntervalMs
    return frame.writeStream.format("rocketmq").options(**_texts(sink_options))


def _in_order(sink: RocketSink, frame: DataFrame) -> DataFrame:
    """Check the frame; with an `ordering`, put all rows of a sharding key into one partition.

    Raises:
        ColumnError: the frame does not fit the row contract.
        ConfigurationError: `ordering` is set, but the frame has no sharding key and no queues.
    """
    plan = sink.check(frame)
    by_queue = plan.source("sharding_key") is None and plan.source("queue_id") is not None
    if sink.options.ordering == "none" or by_queue:
        return frame
    return sink.ordered(frame)


def _texts(options: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in options.items()}


def _stop(spark: SparkSession, query: StreamingQuery, timeout_s: float) -> None:
    """Stop the query between two micro-batches, or after the time-out. A micro-batch that is
    interrupted runs again after a restart."""
    deadline_s = time.monotonic() + timeout_s
    epoch = _newest_epoch(query)
    while (
        query.isActive
        and query.status["isTriggerActive"]
        and _newest_epoch(query) == epoch
        and time.monotonic() < deadline_s
    ):
        time.sleep(_STOP_POLL_S)
    # Silence Spark, which logs interrupted tasks as errors. The report has the query's errors.
    spark.sparkContext.setLogLevel("OFF")
    query.stop()


def _newest_epoch(query: StreamingQuery) -> int:
    progress = query.lastProgress
    return int(progress["batchId"]) if progress else -1


def _let_jvm_go_on(spark: SparkSession, stop: threading.Event) -> None:
    """Under spark-submit, let signals to the JVM set `stop`, so that it does not end its session in
    the middle of a micro-batch. The JVM is this process's parent: a terminal sends Ctrl-C to both
    processes, and SIGTERM goes to the JVM alone. The JVM ends after this process."""
    if "PYSPARK_GATEWAY_PORT" not in os.environ:
        return
    jvm: Any = spark.sparkContext._jvm
    signals = jvm.sun.misc
    for name in ("INT", "TERM"):
        signals.Signal.handle(signals.Signal(name), _SetsEvent(stop))


class _SetsEvent:
    """A signal handler for Java (`SignalHandler`), which sets an event."""

    def __init__(self, event: threading.Event) -> None:
        self._event = event

    def handle(self, _: Any) -> None:
        self._event.set()

    class Java:
        implements: ClassVar[list[str]] = ["sun.misc.SignalHandler"]
