"""Execution of the demo: cluster, stream of the flights with a fault, read back, summary."""

from __future__ import annotations

import contextlib
import datetime as dt
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_fixed

from rocket_sink import cluster as clusters
from rocket_sink.cluster.local import LocalCluster
from rocket_sink.cluster.node import Broker
from rocket_sink.commands.common.base import one_line
from rocket_sink.commands.common.output import (
    Bar,
    Steps,
    note,
    note_lines,
    print_json,
    program,
    show,
    table,
)
from rocket_sink.commands.common.spark_input import spark_session
from rocket_sink.commands.demo.flights import Flights, Verdict, Verifier, write_flights
from rocket_sink.errors import RocketSinkError
from rocket_sink.ledger.driver.ledger import Ledger
from rocket_sink.ledger.report import Report
from rocket_sink.ledger.report.tables import console_table, tables
from rocket_sink.ledger.views import OUTCOMES
from rocket_sink.producer.admin.admin import Admin

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from rich.console import RenderableType


TOPIC: Final = "flights"
QUEUES_PER_BROKER: Final = 4
FAULT_AT: Final = 0.35
"""Share of the rows after which the broker is broken."""
_DOWN_S: Final = 2.0
"""Time before a dead broker is restarted, so that the sink notices the outage."""
_RESTART_TIMEOUT_S: Final = 60.0
_POLL_S: Final = 0.2
_PULL: Final = 512
_READ_TRIES: Final = 6
_ISOLATIONS_SHOWN: Final = 8


@dataclass(frozen=True)
class Settings:
    """A run of the demo. `fault` is freeze, kill or none. `out` has the folders flights (input),
    checkpoint, ledger and cluster."""

    out: Path
    rows: int
    ordering: str
    brokers: int
    fault: str
    fault_s: float


class FaultInjector:
    """Freezes (SIGSTOP) or kills (SIGKILL) one broker during the run, or none, repairs the broker
    after `seconds`, and restarts other dead brokers. The caller calls `step` often; `step` checks
    whether an action is due. `say` gets a line of text for each action."""

    def __init__(
        self,
        cluster: LocalCluster,
        *,
        fault: str,
        seconds: float,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster = cluster
        self._fault = fault
        self._seconds = seconds
        self.say = say
        self.events: list[str] = []
        """The actions, with their times."""
        self._clock = clock
        self._repair_at_s: dict[str, float] = {}
        """{name of a broken or dead broker: time of its repair}"""
        self.done = fault == "none"

    def _note(self, text: str) -> None:
        self.events.append(f"{dt.datetime.now(dt.timezone.utc):%H:%M:%S} UTC: {text}")
        self.say(self.events[-1])

    def step(self, *, due: bool) -> None:
        """Break the broker at the first call with `due`; repair it `seconds` later."""
        now_s = self._clock()
        if due and not self.done:
            self.done = True
            self._break(now_s)
        for broker in self._cluster.brokers:
            if broker.name in self._repair_at_s:
                if now_s >= self._repair_at_s[broker.name]:
                    self._repair(broker)
            elif not broker.alive:
                self._note(f"{broker.name} has died")
                self._repair_at_s[broker.name] = now_s + _DOWN_S

    def restart_all(self) -> None:
        """End the fault, and restart all dead brokers at once."""
        for broker in self._cluster.brokers:
            if broker.name in self._repair_at_s or not broker.alive:
                self._repair(broker)

    def _break(self, now_s: float) -> None:
        victim = self._cluster.brokers[-1]
        if not victim.alive:
            return
        if self._fault == "freeze":
            victim.freeze()
            self._note(f"{victim.name} is frozen for {self._seconds:g} s (SIGSTOP)")
        else:
            victim.kill()
            self._note(
                f"{victim.name} is killed (SIGKILL) and will be down for {self._seconds:g} s"
            )
        self._repair_at_s[victim.name] = now_s + self._seconds

    def _repair(self, broker: Broker) -> None:
        started_s = self._clock()
        if broker.alive:
            broker.thaw()
            self._note(f"{broker.name} goes on (SIGCONT)")
        else:
            broker.restart(timeout_s=_RESTART_TIMEOUT_S)
            self._note(f"{broker.name} runs again, started in {self._clock() - started_s:.1f} s")
        self._repair_at_s.pop(broker.name, None)


@dataclass(frozen=True)
class DemoSummary:
    """The ledger's report, the verification, and the checks on both."""

    settings: Settings
    flights: Flights
    seconds: float
    report: Report
    verdict: Verdict
    lost: int
    events: Sequence[str]
    """The demo's actions on brokers, with their times."""

    @property
    def announced(self) -> int:
        """The number of possible duplicates that the ledger reports."""
        totals = self.report.totals
        return totals.duplicates_possible + totals.superseded_rows + totals.unknown

    @property
    def failures(self) -> list[str]:
        totals, verdict = self.report.totals, self.verdict
        ordering = self.settings.ordering
        accounted = sum(getattr(totals, outcome) for outcome in OUTCOMES)
        checks = {
            f"{totals.not_adding_up:,} epochs of the ledger do not add up": totals.not_adding_up,
            f"the ledger has {totals.rows_in:,} rows, the input {self.flights.rows:,}":
                totals.rows_in != self.flights.rows,
            f"{accounted:,} of {totals.rows_in:,} rows are accounted for":
                accounted != totals.rows_in,
            f"{self.lost:,} rows are lost": self.lost,
            f"{verdict.altered:,} messages differ from their rows": verdict.altered,
            f"{verdict.foreign:,} messages are not the demo's": verdict.foreign,
            f"{verdict.new_ids:,} duplicates have a message id of their own": verdict.new_ids,
            f"{verdict.duplicates:,} duplicates, but only {self.announced:,} were announced":
                verdict.duplicates > self.announced,
            f"{verdict.disordered_keys:,} keys are out of order":
                verdict.disordered_keys and ordering != "none",
            f"{verdict.moved_keys:,} keys are in several queues":
                verdict.moved_keys and ordering == "strict",
        }  # fmt: skip
        return [text for text, wrong in checks.items() if wrong]

    @property
    def passed(self) -> bool:
        return not self.failures

    def as_dict(self) -> dict[str, Any]:
        verdict = asdict(self.verdict)
        missing = len(verdict.pop("missing"))
        return {
            "passed": self.passed,
            "failures": self.failures,
            "rows": self.flights.rows,
            "seconds": round(self.seconds, 1),
            "stored": {**verdict, "missing": missing, "lost": self.lost},
            "ledger": self.report.as_dict(),
        }

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
        if self.settings.ordering == "none":
            order = "not asked for"
        rows = [
            ("messages stored", verdict.stored, "read back from every queue"),
            ("distinct rows", verdict.distinct, "compared with the input"),
            ("duplicates", verdict.duplicates, f"announced as possible: {self.announced:,}"),
            ("lost", self.lost, ""),
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
        from rich.text import Text

        path = str(self.settings.out / "ledger")
        ledger = f"ledger: {path}\n  {program()} report --ledger {shlex.quote(path)}"
        if self.passed:
            return Text.assemble(
                f"{ledger}\n", ("PASSED", "bold green"),
                ": the accounts add up and nothing is lost",
            )  # fmt: skip
        wrong = "\n".join(f"  - {text}" for text in self.failures)
        return Text.assemble(f"{ledger}\n", ("FAILED", "bold red"), f":\n{wrong}")


def lost_rows(spark: SparkSession, ledger: Ledger, verdict: Verdict) -> int:
    """Return the number of rows that neither a broker nor a pending dead letter has."""
    dead_letters = ledger.dead_letters(spark).selectExpr("cast(properties['row'] AS int) AS row")
    dead_rows = [row.row for row in dead_letters.where("row IS NOT NULL").collect()]
    return len(verdict.missing.difference(dead_rows))


def run(settings: Settings, *, keep: bool, as_json: bool) -> bool:
    """Run the demo and print the summary; return whether all checks passed."""
    note(_headline(settings))
    started_s = time.monotonic()
    flights = write_flights(settings.out / "flights", settings.rows)
    note(
        f"flights: {flights.rows:,} rows in {flights.files} files, {flights.keys:,} sharding keys "
        f"({flights.keyless:,} rows have no tail number: carrier and flight stand in for it)"
    )
    warehouse = {"spark.sql.warehouse.dir": str(settings.out / "checkpoint/warehouse")}
    with (
        _cluster(settings, keep=keep) as cluster,
        spark_session("demo", spark_conf=warehouse) as spark,
    ):
        note(f"cluster: name server {cluster.name_server}, "
             f"{', '.join(broker.name for broker in cluster.brokers)}")  # fmt: skip
        injector = FaultInjector(cluster, fault=settings.fault, seconds=settings.fault_s, say=note)
        streamed_s = time.monotonic()
        _stream(spark, cluster, flights, settings, injector)
        streamed_s = time.monotonic() - streamed_s
        injector.restart_all()
        verdict = _read_back(cluster, settings, injector)
        ledger = Ledger(str(settings.out / "ledger"))
        ledger.sync_fully(spark)
        summary = DemoSummary(
            settings, flights, streamed_s, ledger.report(spark), verdict,
            lost_rows(spark, ledger, verdict), injector.events,
        )  # fmt: skip
        if as_json:
            print_json(summary.as_dict())
        else:
            show(*summary.tables())
        note(f"{time.monotonic() - started_s:.0f} s in all")
    if keep:
        _leave_running(settings)
    return summary.passed


def _headline(settings: Settings) -> str:
    fault = {
        "freeze": f"one frozen for {settings.fault_s:g} s in mid-run",
        "kill": f"one killed in mid-run and started again after {settings.fault_s:g} s",
        "none": "none broken",
    }[settings.fault]
    return (
        f"rocket-sink demo: {settings.rows:,} flights, {settings.brokers} brokers, {fault}, "
        f"ordering {settings.ordering}; all flights take 2 to 5 minutes"
    )


@contextlib.contextmanager
def _cluster(settings: Settings, *, keep: bool) -> Iterator[LocalCluster]:
    note("cluster: starting RocketMQ (the first time it is fetched, about 80 MB)")
    # Use a temporary home without --keep: `stop` then kills the brokers without a clean shutdown.
    home = settings.out / "cluster" if keep else None
    with LocalCluster(settings.brokers, home, progress=Steps()) as cluster:
        cluster.create_topic(TOPIC, QUEUES_PER_BROKER)
        yield cluster


def _stream(
    spark: SparkSession,
    cluster: LocalCluster,
    flights: Flights,
    settings: Settings,
    injector: FaultInjector,
) -> None:
    from rocket_sink.spark.sink import RocketSink

    with Bar("stream", flights.rows) as bar:
        injector.say = bar.say
        sink = RocketSink(
            nameServer=cluster.name_server, topic=TOPIC, ledger=str(settings.out / "ledger"),
            ordering=settings.ordering,
        )  # fmt: skip
        query = (
            sink.stream(message_rows(spark, settings))
            .option("checkpointLocation", str(settings.out / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
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


def message_rows(spark: SparkSession, settings: Settings) -> DataFrame:
    """Return the stream of flights as rows of the contract. Each file is a micro-batch, partitioned
    by sharding key: one task gets all rows of a key in the order of the file."""
    path = str(settings.out / "flights")
    schema = spark.read.parquet(path).schema
    columns = [f"`{name}`" for name in schema.names if name not in ("sharding_key", "row", "seq")]
    return (
        spark.readStream.schema(schema)
        .option("maxFilesPerTrigger", 1)
        .parquet(path)
        .repartition(spark.sparkContext.defaultParallelism, "sharding_key")
        .selectExpr(
            f"to_json(struct({', '.join(columns)})) AS body",
            "carrier AS tags",
            "concat(carrier, flight) AS keys",
            "sharding_key",
            "map('row', cast(row AS string), 'seq', cast(seq AS string)) AS properties",
        )
    )


def _rows_done(query: StreamingQuery) -> int:
    return sum(progress["numInputRows"] for progress in query.recentProgress)


def _read_back(cluster: LocalCluster, settings: Settings, injector: FaultInjector) -> Verdict:
    retrying = Retrying(
        retry=retry_if_exception_type(RocketSinkError), stop=stop_after_attempt(_READ_TRIES),
        # Restart dead brokers: a user may have killed one by hand.
        before_sleep=lambda _: injector.restart_all(), wait=wait_fixed(_POLL_S), reraise=True,
    )  # fmt: skip
    with Admin(nameServer=cluster.name_server) as admin:
        admin.await_dispatched(TOPIC)
        pull = retrying.wraps(admin.pull)
        ends = {queue: admin.max_offset(queue) for queue in admin.queues(TOPIC)}
        verifier = Verifier(settings.out / "flights")
        with Bar("read back", sum(ends.values())) as bar:
            done = 0
            for queue, end in ends.items():
                offset = 0
                while offset < end:
                    messages, offset = pull(queue, offset, max_messages=_PULL)
                    for message in messages:
                        verifier.feed(queue.broker_name, message)
                    done += len(messages)
                    bar.advance_to(done)
    return verifier.verdict()


def _leave_running(settings: Settings) -> None:
    note("--keep: starting the brokers again on the same data, to outlive the demo")
    home = settings.out / "cluster"
    state = clusters.up(home, settings.brokers)
    note_lines(
        f"name server {state.name_server}; look around with\n"
        f"  {program()} tail -n {state.name_server} -t {TOPIC} --last 3 --no-follow\n"
        f"end it with\n  {program()} cluster down --home {shlex.quote(str(home))}"
    )
