"""Execution of the demo: flights, cluster, stream with a fault, read back, summary."""

from __future__ import annotations

import contextlib
import datetime as dt
import shlex
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

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
)
from rocket_sink.commands.common.spark_input import spark_session
from rocket_sink.commands.demo.flights import (
    FAULT_AT,
    QUEUES_PER_BROKER,
    TOPIC,
    Flights,
    Settings,
    write_flights,
)
from rocket_sink.commands.demo.summary import DemoSummary, Verdict, Verifier, lost_rows
from rocket_sink.errors import RocketSinkError
from rocket_sink.ledger.driver.ledger import Ledger
from rocket_sink.producer.admin.admin import Admin

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery


_DOWN_S: Final = 2.0
"""Time before a dead broker is restarted, so that the sink notices the outage."""
_RESTART_TIMEOUT_S: Final = 60.0


class FaultInjector:
    """Freezes or kills one broker during the run, repairs it, and restarts other dead brokers. The
    caller calls `step` often; `step` checks whether an action is due.

    Args:
        fault: freeze (SIGSTOP), kill (SIGKILL) or none.
        seconds: how long the broker stays frozen or down.
        say: gets a line of text for each action.
    """

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


_POLL_S: Final = 0.2
_PULL: Final = 512
_READ_TRIES: Final = 6


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
    """Return the stream of flights as rows of the contract.

    Each file is a micro-batch. It is partitioned by sharding key, so one task gets all rows of a
    key in the order of the file.
    """
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
