"""Execution of the demo: cluster, stream of the flights with a fault, read back, summary."""

from __future__ import annotations

import datetime as dt
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from pyspark.sql import Row, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from rich.console import RenderableType
from rich.text import Text

from rocket_sink.cluster.local import LocalCluster
from rocket_sink.cluster.node import Broker
from rocket_sink.commands.common.base import one_line
from rocket_sink.commands.common.output import Bar, Steps, note, program, show, step, table
from rocket_sink.commands.common.spark_input import spark_session
from rocket_sink.commands.common.stream_run import Source
from rocket_sink.commands.demo.flights import BODY, Flights, verdict, write_flights
from rocket_sink.errors import RocketSinkError
from rocket_sink.ledger.driver.ledger import Ledger
from rocket_sink.ledger.report import Report
from rocket_sink.ledger.report.tables import console_table, tables
from rocket_sink.producer.admin.admin import Admin
from rocket_sink.spark.datasource import register
from rocket_sink.spark.sink import RocketSink

TOPIC: Final = "flights"
FAULT_AT: Final = 0.35
"""Share of the rows after which the broker is broken."""
FAULT_S: Final = 6.0
"""How long the broker stays frozen, or down."""
_BROKERS: Final = 2
_POLL_S: Final = 0.2
_ISOLATIONS_SHOWN: Final = 8


class FaultInjector:
    """Freezes (SIGSTOP) or kills (SIGKILL) one broker once, and repairs the broker `FAULT_S` later.
    `say` gets a line of text for each action; `events` keeps the lines."""

    def __init__(
        self, victim: Broker, fault: str, say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        if fault == "freeze":
            self._break = victim.freeze, f"{victim.name} is frozen for {FAULT_S:g} s (SIGSTOP)"
            self._mend = victim.thaw, f"{victim.name} goes on (SIGCONT)"
        else:
            self._break = victim.kill, f"{victim.name} is killed (SIGKILL), down for {FAULT_S:g} s"
            self._mend = victim.restart, f"{victim.name} runs again"
        self._clock = clock
        self._broken_s = 0.0
        self.say = say
        self.events: list[str] = []

    def step(self, *, due: bool) -> None:
        """Break the broker at the first call with `due`; repair it when its time is over."""
        if due and not self.events:
            self._broken_s = self._clock()
            self._act(*self._break)
        elif self._clock() - self._broken_s >= FAULT_S:
            self.repair()

    def repair(self) -> None:
        """End the fault, if there is one."""
        if len(self.events) == 1:
            self._act(*self._mend)

    def _act(self, action: Callable[[], object], text: str) -> None:
        action()
        self.events.append(f"{dt.datetime.now(dt.timezone.utc):%H:%M:%S} UTC: {text}")
        self.say(self.events[-1])


@dataclass(frozen=True)
class DemoSummary:
    """The ledger's report, the verification, and the checks on both."""

    ledger: Path
    flights: Flights
    seconds: float
    report: Report
    verdict: Row
    events: list[str]
    """The demo's actions on brokers, with their times."""

    @property
    def announced(self) -> int:
        """The number of possible duplicates that the ledger reports."""
        totals = self.report.totals
        return totals.duplicates_possible + totals.superseded_rows + totals.unknown

    @property
    def failures(self) -> list[str]:
        totals, verdict = self.report.totals, self.verdict
        checks = {
            f"{totals.not_adding_up:,} epochs of the ledger do not add up": totals.not_adding_up,
            f"the ledger has {totals.rows_in:,} rows, the input {self.flights.rows:,}":
                totals.rows_in != self.flights.rows,
            f"{verdict.lost:,} rows are lost": verdict.lost,
            f"{verdict.foreign:,} messages are no rows of the demo, or differ": verdict.foreign,
            f"{verdict.new_ids:,} duplicates have a message id of their own": verdict.new_ids,
            f"{verdict.duplicates:,} duplicates, but only {self.announced:,} were announced":
                verdict.duplicates > self.announced,
            f"{verdict.disordered_keys:,} keys are out of order": verdict.disordered_keys,
            f"{verdict.moved_keys:,} keys are in several queues": verdict.moved_keys,
        }  # fmt: skip
        return [text for text, wrong in checks.items() if wrong]

    def tables(self) -> list[RenderableType]:
        isolations = self.report.isolations[-_ISOLATIONS_SHOWN:]
        accounts, brokers, isolated, *_ = (
            console_table(each, narrow=True)
            for each in tables(replace(self.report, isolations=isolations))
        )
        return [accounts, self._stored(), brokers, isolated, self._explained(), self._closing()]

    def _stored(self) -> RenderableType:
        verdict = self.verdict
        order = f"{verdict.keys - verdict.disordered_keys:,} of {verdict.keys:,}"
        rows = [
            ("messages stored", verdict.stored, "read back from every queue"),
            ("distinct rows", verdict.distinct, "compared with the input"),
            ("duplicates", verdict.duplicates, f"announced as possible: {self.announced:,}"),
            ("lost", verdict.lost, ""),
            ("keys in order", order, f"{verdict.moved_keys:,} moved to another queue"),
        ]
        return table("Read back (brokers)", ("", "messages", "note"), rows, numbers="messages")

    def _explained(self) -> RenderableType:
        failed = [f"{e.attempts:,} {e.error_code}" for e in self.report.errors]
        shown = f" ({', '.join(failed)})" if failed else ""
        advice = (
            f"Requests that failed{shown} are not acked, and only those with an answer have a "
            "latency. A broker is isolated after a failure, or after a slow answer (LATENCY) "
            "or a refusal because it is overloaded (BROKER_BUSY). A busy machine causes both, too."
            "\n"
        )
        return "\n".join((*self.events, advice))

    def _closing(self) -> RenderableType:
        path = str(self.ledger)
        ledger = f"ledger: {path}\n  {program()} report --ledger {shlex.quote(path)}\n"
        if not self.failures:
            passed = ("PASSED", "bold green")
            return Text.assemble(ledger, passed, ": the accounts add up and nothing is lost")
        wrong = "\n".join(f"  - {text}" for text in self.failures)
        return Text.assemble(ledger, ("FAILED", "bold red"), f":\n{wrong}")


def run(folder: Path, rows: int, fault: str) -> bool:
    """Run the demo in an empty folder and print the summary; return whether all checks passed.

    Args:
        fault: `freeze` or `kill`.
    """
    broken = "frozen" if fault == "freeze" else "killed"
    note(
        f"rocket-sink demo: {rows:,} flights, {_BROKERS} brokers, one {broken} in mid-run for "
        f"{FAULT_S:g} s, strict order; all flights take 2 to 5 minutes"
    )
    started_s = time.monotonic()
    flights = write_flights(folder / "flights", rows)
    note(
        f"flights: {flights.rows:,} rows in {flights.files} files, {flights.keys:,} sharding keys "
        f"({flights.keyless:,} rows have no tail number: carrier and flight stand in for it)"
    )
    note("cluster: starting RocketMQ (the first time it is fetched, about 98 MB)")
    warehouse = {"spark.sql.warehouse.dir": str(folder / "checkpoint/warehouse")}
    with (
        LocalCluster(_BROKERS, progress=Steps()) as cluster,
        spark_session("demo", spark_conf=warehouse) as spark,
    ):
        cluster.create_topic(TOPIC)
        note(f"cluster: name server {cluster.name_server}, "
             f"{', '.join(broker.name for broker in cluster.brokers)}")  # fmt: skip
        injector = FaultInjector(cluster.brokers[-1], fault, note)
        streamed_s = time.monotonic()
        _stream(spark, cluster, flights, folder, injector)
        streamed_s = time.monotonic() - streamed_s
        injector.repair()
        ledger = Ledger(str(folder / "ledger"))
        ledger.sync_fully(spark)
        summary = DemoSummary(
            folder / "ledger", flights, streamed_s, ledger.report(spark),
            _read_back(spark, cluster, folder, ledger), injector.events,
        )  # fmt: skip
        show(*summary.tables())
        note(f"{time.monotonic() - started_s:.0f} s in all")
    return not summary.failures


def _stream(
    spark: SparkSession, cluster: LocalCluster, flights: Flights, folder: Path,
    injector: FaultInjector,
) -> None:  # fmt: skip
    columns = (BODY, "carrier AS tags", "concat(carrier, flight) AS keys", "sharding_key")
    source = Source("parquet", str(folder / "flights"), None, {"maxFilesPerTrigger": "1"}, None,
                    columns)  # fmt: skip
    sink = RocketSink(
        nameServer=cluster.name_server, topic=TOPIC, ledger=str(folder / "ledger"),
        ordering="strict",
    )  # fmt: skip
    # Each file is a micro-batch. A task gets all rows of a key in the order of the file.
    rows = sink.ordered(source.read(spark, streaming=True), spark.sparkContext.defaultParallelism)
    writer = sink.stream(rows).option("checkpointLocation", str(folder / "checkpoint"))
    with Bar("stream", flights.rows) as bar:
        injector.say = bar.say
        query = writer.trigger(availableNow=True).start()
        while query.isActive:
            done = _rows_done(query)
            bar.advance_to(done)
            injector.step(due=done >= FAULT_AT * flights.rows)
            time.sleep(_POLL_S)
        bar.advance_to(_rows_done(query))
        injector.say = note
    failure = query.exception()
    if failure is not None:
        raise RocketSinkError(f"the stream failed: {one_line(failure)}") from failure


def _rows_done(query: StreamingQuery) -> int:
    return sum(progress["numInputRows"] for progress in query.recentProgress)


def _read_back(spark: SparkSession, cluster: LocalCluster, folder: Path, ledger: Ledger) -> Row:
    with step("read back and compare"):
        with Admin(nameServer=cluster.name_server) as admin:
            admin.await_dispatched(TOPIC)
        register(spark)
        reader = spark.read.format("rocketmq").option("nameServer", cluster.name_server)
        messages = reader.option("topic", TOPIC).load()
        flights = spark.read.parquet(str(folder / "flights"))
        return verdict(flights, messages, ledger.dead_letters(spark))
