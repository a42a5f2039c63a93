"""Measurements of `rocket-sink benchmark` on a running cluster.

A case is a send mode of `Producer`, or a Spark lane. CPU figures are those of the client.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import psutil

from rocket_sink.errors import RocketSinkError
from rocket_sink.message import Message
from rocket_sink.producer.producer import Producer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from rocket_sink.options import SinkOptions

Advance: TypeAlias = "Callable[[int], None]"
"""A callback that gets the number of messages submitted so far."""

_STREAM_LANES: Final = {
    "foreach": "foreach", "source-stream": "datasource", "write_batch": "foreachBatch",
}  # fmt: skip
"""{case: name of its lane in `rocket-sink stream --lane`}."""
_WARM_UP: Final = 1000
_STEPS: Final = 200
"""Number of calls of `Advance` in a run."""


@dataclass(frozen=True)
class Workload:
    """The messages of each case. `keys` is the number of sharding keys; 0: no message has one."""

    messages: int
    body_bytes: int
    keys: int
    batch: int


@dataclass(frozen=True)
class Figures:
    """The figures of a case's run, or the medians of several runs with the sums of their failures.

    Latencies are those of calls; a call sends a message, a batch, or a request of a lane. CPU is
    that of this process; for a lane also that of Spark's JVM and Python workers.
    """

    case: str
    messages: int
    failed: int
    seconds: float
    messages_per_s: float
    mb_per_s: float
    cpu_s_per_million: float
    p50_ms: float | None
    p95_ms: float | None
    p99_ms: float | None
    max_ms: float | None
    errors: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls, case: str, work: Workload, *, failed: int, seconds: float, cpu_s: float,
        latencies_ms: Sequence[float | None], errors: Mapping[str, int],
    ) -> Figures:  # fmt: skip
        """Make figures of the counts; `latencies_ms` are p50, p95, p99 and the largest."""
        stored = work.messages - failed
        per_s = stored / seconds if seconds else 0.0
        p50_ms, p95_ms, p99_ms, max_ms = latencies_ms
        return cls(
            case, stored, failed, seconds, per_s, per_s * work.body_bytes / 1e6,
            cpu_s / work.messages * 1e6, p50_ms, p95_ms, p99_ms, max_ms, errors,
        )  # fmt: skip


class Calls:
    """The results of calls. Several threads may call `stored` and `failed`."""

    def __init__(self) -> None:
        self._latencies_ms = array("d")
        self.errors: Counter[str] = Counter()
        self.last_error: BaseException | None = None

    def stored(self, began_s: float) -> None:
        """Note the success of a call that began at `began_s`."""
        self._latencies_ms.append((time.perf_counter() - began_s) * 1000)

    def failed(self, error: BaseException, messages: int = 1) -> None:
        self.errors[getattr(error, "code", type(error).__name__)] += messages
        self.last_error = error

    def percentiles_ms(self) -> list[float | None]:
        """Return p50, p95, p99 and maximum of the successful calls (nearest rank)."""
        if not self._latencies_ms:
            return [None] * 4
        shares = (0.5, 0.95, 0.99, 1)
        return [*np.quantile(self._latencies_ms, shares, method="inverted_cdf").tolist()]


class ProducerBench:
    """Cases of `Producer`; each run has its own producer, with a warm-up."""

    def __init__(self, options: SinkOptions, work: Workload) -> None:
        self._options = options
        self._work = work

    def run(self, case: str, advance: Advance) -> Figures:
        """Measure one run.

        Raises:
            RocketSinkError: no message of the warm-up could be stored.
        """
        work, send = self._work, MODES[case]
        with Producer(self._options) as producer:
            warm, warm_up = Calls(), min(_WARM_UP, max(1, work.messages // 10))
            send(producer, self._messages(warm_up), work.batch, warm)
            if warm.last_error is not None and sum(warm.errors.values()) == warm_up:
                raise warm.last_error
            calls = Calls()
            cpu_s, began_s = time.process_time(), time.perf_counter()
            send(producer, _counted(self._messages(work.messages), work.messages, advance),
                 work.batch, calls)  # fmt: skip
            seconds = time.perf_counter() - began_s
            cpu_s = time.process_time() - cpu_s
        return Figures.of(
            case, work, failed=sum(calls.errors.values()), seconds=seconds, cpu_s=cpu_s,
            latencies_ms=calls.percentiles_ms(), errors=calls.errors,
        )  # fmt: skip

    def _messages(self, count: int) -> Iterator[Message]:
        topic, body, keys = self._options.topic, b"x" * self._work.body_bytes, self._work.keys
        for number in range(count):
            sharding_key = f"k{number % keys}" if keys else None
            yield Message(topic, body, keys=(f"key{number}",), sharding_key=sharding_key)


def _counted(messages: Iterator[Message], total: int, advance: Advance) -> Iterator[Message]:
    step = max(1, total // _STEPS)
    for number, message in enumerate(messages):
        if not number % step:
            advance(number)
        yield message
    advance(total)


def _sync(producer: Producer, messages: Iterator[Message], batch: int, calls: Calls) -> None:
    for message in messages:
        began_s = time.perf_counter()
        try:
            producer.send(message)
        except RocketSinkError as error:
            calls.failed(error)
        else:
            calls.stored(began_s)


def _async(producer: Producer, messages: Iterator[Message], batch: int, calls: Calls) -> None:
    """Send asynchronously and await all results. The producer's window limits sends in flight."""
    ends: SimpleQueue[None] = SimpleQueue()

    def done(began_s: float, result: Any, error: BaseException | None) -> None:
        if error is None:
            calls.stored(began_s)
        else:
            calls.failed(error)
        ends.put(None)

    send_count = 0
    for message in messages:
        began_s = time.perf_counter()
        try:
            producer.send_async(message, partial(done, began_s))
        except RocketSinkError as error:
            calls.failed(error)
        else:
            send_count += 1
    for _ in range(send_count):
        ends.get()


def _batch(producer: Producer, messages: Iterator[Message], batch: int, calls: Calls) -> None:
    """Send batches without sharding keys, because a batch request goes to one queue."""
    while part := list(itertools.islice(messages, batch)):
        part = [Message(item.topic, item.body, keys=item.keys) for item in part]
        began_s = time.perf_counter()
        try:
            producer.send_batch(part)
        except RocketSinkError as error:
            results = error.facts.get("results", ())
            stored = sum(item.message_id.count(",") + 1 for item in results)
            calls.failed(error, len(part) - stored)
        else:
            calls.stored(began_s)


MODES: Final[Mapping[str, Callable[[Producer, Iterator[Message], int, Calls], None]]] = {
    "sync": _sync, "async": _async, "batch": _batch,
}  # fmt: skip


class LaneBench:
    """Cases of the Spark lanes: one epoch of generated rows each, with a ledger.

    Failed rows and latencies of requests are read from the ledger.

    Args:
        scratch: for ledgers and checkpoints; all of Spark's machines must see it.
    """

    def __init__(
        self, spark: SparkSession, sink: Mapping[str, Any], work: Workload, scratch: str
    ) -> None:
        self._spark = spark
        self._sink = sink
        self._work = work
        self._scratch = scratch
        self._number = 0
        self._warm: set[str] = set()
        jvm: Any = spark._jvm
        self._jvm = psutil.Process(int(jvm.java.lang.ProcessHandle.current().pid()))

    def run(self, case: str, advance: Advance) -> Figures:
        """Measure one run. Before the first run of a case, a smaller run starts Spark's workers."""
        if case not in self._warm:
            self._warm.add(case)
            self._run(case, replace(self._work, messages=max(1, self._work.messages // 10)))
        figures = self._run(case, self._work)
        advance(self._work.messages)
        return figures

    def _run(self, case: str, work: Workload) -> Figures:
        from rocket_sink.commands.common.stream_run import Source, stream_writer
        from rocket_sink.ledger.driver.ledger import Ledger

        self._number += 1
        folder = f"{self._scratch}/{os.getpid()}-{self._number}"
        sink = {**self._sink, "ledger": f"{folder}/ledger"}
        parallel = self._spark.sparkContext.defaultParallelism
        rate = {"rowsPerBatch": str(work.messages), "numPartitions": str(parallel)}
        source = Source("rate-micro-batch", None, None, rate, None, _columns(work))
        frame = source.read(self._spark, streaming=True)
        writer = stream_writer(self._spark, frame, sink, _STREAM_LANES[case])
        writer = writer.option("checkpointLocation", f"{folder}/checkpoint")
        cpu_s = self._cpu_s()
        query = writer.trigger(availableNow=True).start()
        query.awaitTermination()
        cpu_s = self._cpu_s() - cpu_s
        took_ms = sum(record["durationMs"].get("addBatch", 0) for record in query.recentProgress)
        ledger = Ledger(sink["ledger"])
        ledger.sync_fully(self._spark)
        sums: Any = ledger.epochs(self._spark).selectExpr("sum(acked + degraded) AS stored").first()
        spent = "coalesce(queue_wait_ms, 0) + rtt_ms"
        took: Any = (
            ledger.sends(self._spark)
            .where("response_code IS NOT NULL")
            .selectExpr(
                f"percentile({spent}, array(0.5, 0.95, 0.99)) AS shares", f"max({spent}) AS longest"
            )
            .first()
        )
        dead = ledger.dead_letters(self._spark).groupBy("first_error_code").count().collect()
        return Figures.of(
            case, work, failed=work.messages - int(sums.stored or 0), seconds=took_ms / 1000,
            cpu_s=cpu_s, latencies_ms=[*(took.shares or [None] * 3), took.longest],
            errors={str(record["first_error_code"]): record["count"] for record in dead},
        )  # fmt: skip

    def _cpu_s(self) -> float:
        """Return the CPU seconds of this process, the JVM and all their children, ended or not."""
        processes = {proc.pid: proc for proc in (psutil.Process(), self._jvm)}
        processes |= {proc.pid: proc for proc in self._jvm.children(recursive=True)}
        total = 0.0
        for process in processes.values():
            try:
                times = process.cpu_times()
            except psutil.NoSuchProcess:
                continue
            total += times.user + times.system
            total += getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0)
        return total


def _columns(work: Workload) -> tuple[str, ...]:
    columns = [
        f"cast(repeat('x', {work.body_bytes}) AS binary) AS body",
        "concat('key', cast(value AS string)) AS keys",
    ]
    if work.keys:
        columns.append(f"concat('k', cast(value % {work.keys} AS string)) AS sharding_key")
    return tuple(columns)


def median(runs: Sequence[Figures]) -> Figures:
    """Return the median of each figure over runs of a case; failures and errors are summed."""
    errors: Counter[str] = Counter()
    for run in runs:
        errors.update(run.errors)
    values: dict[str, Any] = {"case": runs[0].case, "errors": dict(errors)}
    for item in fields(Figures):
        if item.name not in values:
            measured = [value for run in runs if (value := getattr(run, item.name)) is not None]
            values[item.name] = statistics.median(measured) if measured else None
    values["messages"] = round(values["messages"])
    values["failed"] = sum(run.failed for run in runs)
    return Figures(**values)
