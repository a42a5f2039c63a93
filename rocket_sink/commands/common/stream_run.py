"""Execution of `rocket-sink stream`: the source, the query, its progress, signals, the report."""
# ruff: noqa: S608 (the SQL has our own names; texts of users are checked or hexadecimal)

from __future__ import annotations

import datetime as dt
import os
import shlex
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Final

from rocket_sink.commands.common.base import handle_signals, one_line
from rocket_sink.commands.common.ledger_input import fold_and_note
from rocket_sink.commands.common.output import note, stderr_console, table
from rocket_sink.errors import ConfigurationError, LedgerError
from rocket_sink.ledger.path import check_encoding, resolve_path
from rocket_sink.text import clean, counted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter
    from rich.console import RenderableType

    from rocket_sink.ledger.query.live import BrokerSums, LiveFigures
    from rocket_sink.spark.sink import RocketSink


class RunView:
    """The view of a running query: a table that changes in a terminal, else a line per event.
    `report` gets the micro-batches; `figures` reads the ledger's new rows (None: show only Spark's
    figures). A context manager; not thread-safe."""

    def __init__(self, report: Report, figures: LiveFigures | None) -> None:
        self._report = report
        self._figures = figures
        self._live: Any = None
        self._last_epoch = -1
        self._epoch = ""
        self._began_s = time.monotonic()
        self._isolated_until: dict[str, dt.datetime | None] = {}
        self._pending = 0
        self._rates: dict[str, float] = {}
        self._read_s = time.monotonic()
        self._messages: dict[str, int] = {}

    def __enter__(self) -> RunView:
        if sys.stderr.isatty():
            from rich.live import Live

            self._live = Live(console=stderr_console(), auto_refresh=False)
            self._live.start()
        return self

    def __exit__(self, *failure: object) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, text: str) -> None:
        """Print a line above the table."""
        if self._live is not None:
            self._live.console.print(clean(text))
        else:
            note(text)

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
        self._epoch = f"epoch {epoch}: {counted(rows, 'row')} in {took_s:.1f} s"
        self._event(self._epoch)

    def refresh(self) -> None:
        """Show the ledger rows that came since the last call."""
        if self._figures is not None and self._figures.refresh():
            self._add(self._figures)
        if self._live is not None:
            self._live.update(self.as_table(), refresh=True)

    def as_table(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        rows, seconds = self._report.rows_read, time.monotonic() - self._began_s
        rate = f", {rows / seconds:,.0f} rows/s" if rows and seconds >= 1 else ""
        head = f"{counted(rows, 'row')} read in {seconds:,.0f} s{rate}"
        lines: list[RenderableType] = [Text(f"{head}; {self._epoch}" if self._epoch else head)]
        figures = self._figures
        if figures is None:
            return Group(*lines)
        counts = ", ".join(f"{name} {n:,}" for name, n in figures.rows.items())
        doubled = figures.duplicates_possible
        counts += f", perhaps doubled {doubled:,}" if doubled else ""
        lines.append(Text(f"rows: {counts or 'none folded yet'}"))
        if figures.standing.pending:
            waiting = ", ".join(f"{reason} {n:,}" for reason, n in figures.standing.pending.items())
            lines.append(Text(f"dead letters pending: {waiting}", style="yellow"))
        if figures.brokers:
            lines.append(table(
                "",
                ("broker", "messages", "per s", "p50 ms", "p99 ms", "failed", "retries",
                 "isolated"),
                [self._broker(name, sums) for name, sums in sorted(figures.brokers.items())],
            ))  # fmt: skip
        return Group(*lines)

    def _broker(self, name: str, sums: BrokerSums) -> tuple[Any, ...]:
        isolated = ""
        if sums.is_isolated() and sums.isolated_until is not None:
            until = sums.isolated_until.astimezone().strftime("%H:%M:%S")
            isolated = f"until {until} ({sums.cause})"
        return (
            name, sums.messages, round(self._rates.get(name, 0.0)), sums.latency_ms(0.5),
            sums.latency_ms(0.99), sums.failures.total(), sums.retries, isolated,
        )  # fmt: skip

    def _add(self, figures: LiveFigures) -> None:
        """Compute the rates since the last call, and show new isolations and dead letters."""
        now_s = time.monotonic()
        passed_s = max(now_s - self._read_s, 1e-3)
        self._read_s = now_s
        for name, sums in figures.brokers.items():
            self._rates[name] = (sums.messages - self._messages.get(name, 0)) / passed_s
            self._messages[name] = sums.messages
            until = sums.isolated_until
            if sums.is_isolated() and until != self._isolated_until.get(name):
                self._isolated_until[name] = until
                self._event(f"{name} is isolated until {until:%H:%M:%S} UTC ({sums.cause})")
        pending = sum(figures.standing.pending.values())
        if pending > self._pending:
            self._event(f"{counted(pending, 'dead letter', 'is', 'are')} pending")
        self._pending = pending

    def _event(self, text: str) -> None:
        """Print an event as a line if no table shows it."""
        if self._live is None:
            note(text)


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
                from rocket_sink.ledger.report.verdict import backfill_command

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
    query_name: str | None,
    stop_timeout_s: float,
) -> Report:
    """Run the query until it ends, fails, or SIGTERM or SIGINT arrives; show its progress."""
    check_encoding(spark, checkpoint)
    frame = source.read(spark, streaming=True)
    figures = _figures(sink_options)
    writer = stream_writer(spark, frame, sink_options, lane)
    writer = writer.option("checkpointLocation", checkpoint)
    if query_name:
        writer = writer.queryName(query_name)
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
    with handle_signals(lambda *_: stop.set()), RunView(report, figures) as view:
        _let_jvm_go_on(spark, stop)
        while query.isActive and not stop.is_set():
            time.sleep(_POLL_S)
            view.look(query)
        if stop.is_set():
            view.say("stopping after the current micro-batch")
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
    from rocket_sink.ledger.driver.ledger import Ledger
    from rocket_sink.ledger.query.duckdb_reader import reader_of
    from rocket_sink.ledger.query.live import pending_by_reason
    from rocket_sink.ledger.sql import Scope, Scoped, is_text
    from rocket_sink.ledger.views import OUTCOMES

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
    from rocket_sink.ledger.query.live import follow

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
