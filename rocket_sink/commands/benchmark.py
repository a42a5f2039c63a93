"""`rocket-sink benchmark` and `jobs/benchmark.py`: measurements on the user's own cluster. A case
is a send mode of `Producer`, or a Spark lane. CPU figures are those of the client."""

from __future__ import annotations

import datetime as dt
import itertools
import json
import os
import platform
import statistics
import tempfile
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import click
import psutil

from rocket_sink import __version__
from rocket_sink.commands.common.base import Command, count_option, json_option, until_signal
from rocket_sink.commands.common.output import (
    Bar,
    check_writable,
    note,
    print_json,
    show,
    table,
    write_file,
)
from rocket_sink.commands.common.sink_input import (
    absolute,
    check_name_server,
    checked_options,
    given_options,
    sink_options,
)
from rocket_sink.commands.common.spark_input import spark_options, spark_session
from rocket_sink.commands.common.stream_run import Source, stream_writer
from rocket_sink.errors import ConfigurationError, RocketSinkError
from rocket_sink.message import Message
from rocket_sink.options import SinkOptions

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from rocket_sink.producer.producer import Producer

Advance: TypeAlias = Callable[[int], None]
"""A callback that gets the number of messages submitted so far."""

LANES: Final = {
    "foreach": "foreach", "source-stream": "datasource", "write_batch": "foreachBatch",
}  # fmt: skip
"""{case: name of its lane in `rocket-sink stream --lane`}."""
_ORDERED_KEYS: Final = 1000
_COMPARED: Final = {"messages_per_s": "messages/s", "cpu_s_per_million": "CPU s/M"}
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
    that of this process; for a lane also that of Spark's JVM and Python workers."""

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
        import numpy as np

        shares = (0.5, 0.95, 0.99, 1)
        return [*np.quantile(self._latencies_ms, shares, method="inverted_cdf").tolist()]


def measure_producer(options: SinkOptions, work: Workload, case: str, advance: Advance) -> Figures:
    """Measure one run of a send mode, with its own producer and after a warm-up. Raise
    RocketSinkError if no message of the warm-up could be stored."""
    from rocket_sink.producer.producer import Producer

    send = MODES[case]
    with Producer(options) as producer:
        warm, warm_up = Calls(), min(_WARM_UP, max(1, work.messages // 10))
        send(producer, _messages(options.topic, work, warm_up), work.batch, warm)
        if warm.last_error is not None and sum(warm.errors.values()) == warm_up:
            raise warm.last_error
        calls = Calls()
        messages = _counted(_messages(options.topic, work, work.messages), work.messages, advance)
        cpu_s, began_s = time.process_time(), time.perf_counter()
        send(producer, messages, work.batch, calls)
        seconds = time.perf_counter() - began_s
        cpu_s = time.process_time() - cpu_s
    return Figures.of(
        case, work, failed=sum(calls.errors.values()), seconds=seconds, cpu_s=cpu_s,
        latencies_ms=calls.percentiles_ms(), errors=calls.errors,
    )  # fmt: skip


def _messages(topic: str, work: Workload, count: int) -> Iterator[Message]:
    body = b"x" * work.body_bytes
    for number in range(count):
        sharding_key = f"k{number % work.keys}" if work.keys else None
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
    """Cases of the Spark lanes: one epoch of generated rows each, with a ledger, from which failed
    rows and latencies of requests are read. All of Spark's machines must see the folder `scratch`,
    which gets ledgers and checkpoints."""

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
        from rocket_sink.ledger.driver.ledger import Ledger

        self._number += 1
        folder = f"{self._scratch}/{os.getpid()}-{self._number}"
        sink = {**self._sink, "ledger": f"{folder}/ledger"}
        parallel = self._spark.sparkContext.defaultParallelism
        rate = {"rowsPerBatch": str(work.messages), "numPartitions": str(parallel)}
        source = Source("rate-micro-batch", None, None, rate, select=_columns(work))
        frame = source.read(self._spark, streaming=True)
        writer = stream_writer(self._spark, frame, sink, LANES[case])
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
    errors = sum((Counter(run.errors) for run in runs), Counter[str]())
    failed = sum(run.failed for run in runs)
    values: dict[str, Any] = {"case": runs[0].case, "errors": dict(errors), "failed": failed}
    for item in fields(Figures):
        if item.name not in values:
            measured = [value for run in runs if (value := getattr(run, item.name)) is not None]
            values[item.name] = statistics.median(measured) if measured else None
    values["messages"] = round(values["messages"])
    return Figures(**values)


@click.command(
    cls=Command,
    example="""
    rocket-sink benchmark -n 10.0.0.1:9876 -t benchmark
    rocket-sink benchmark -t benchmark --mode sync --mode async --body-bytes 4096 --keys 1000
    rocket-sink benchmark -t benchmark --lane foreach --lane write_batch --messages 500000
    rocket-sink benchmark -t benchmark --out before.json
    rocket-sink benchmark -t benchmark --baseline before.json --tolerance 0.2""",
)
@sink_options("nameServer", "topic", "ordering")
@click.option(
    "--mode",
    "modes",
    type=click.Choice(tuple(MODES)),
    multiple=True,
    help="Send mode of the Producer; repeatable. Default: all, unless a --lane is given.",
)
@click.option(
    "--lane",
    "lanes",
    type=click.Choice(tuple(LANES)),
    multiple=True,
    help="Spark lane; repeatable. One epoch of generated rows, with a ledger.",
)
@count_option(
    "--messages",
    default=20_000,
    help="Messages per run. An epoch costs Spark a second or two: give a lane 200000 or more.",
)
@count_option("--body-bytes", default=256, help="Size of a body.")
@click.option(
    "--keys",
    type=click.IntRange(0),
    help="Number of sharding keys; --mode batch uses none. Default: 0; with --ordering "
    f"{_ORDERED_KEYS}.",
)
@count_option("--batch", default=1000, help="--mode batch: messages per call.")
@count_option("--repeat", default=3, help="Runs of each case, in turn; medians are shown.")
@click.option(
    "--scratch",
    metavar="PATH",
    help="--lane: folder for ledgers and checkpoints that all of Spark's machines see; the files "
    "stay. Default: a temporary folder, which is enough for a local master.",
)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Also write the figures to this file, as a baseline.",
)
@click.option(
    "--baseline",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Compare with an earlier --out, each case relative to the others of its run; exit 1 if a "
    "case is worse.",
)
@click.option(
    "--tolerance",
    type=click.FloatRange(0),
    default=0.15,
    help="--baseline: how much worse is accepted.",
)
@spark_options
@json_option
def benchmark(
    modes: tuple[str, ...],
    lanes: tuple[str, ...],
    messages: int,
    body_bytes: int,
    keys: int | None,
    batch: int,
    repeat: int,
    scratch: str | None,
    out: Path | None,
    baseline: Path | None,
    tolerance: float,
    as_json: bool,
    **spark: Any,
) -> int:
    """Measure sending to your cluster: rate, CPU, latency.

    The messages stay in the topic: use one that nobody consumes. The comparison with a baseline
    uses ratios between cases, since all figures of two runs on a shared machine differ. It does not
    find a change that slows all cases alike. Exits 1 if messages failed, or a case is worse than
    the baseline.
    """
    sink = given_options()
    options = checked_options(sink)
    if not options.topic:
        raise click.UsageError("which topic? give --topic NAME")
    if keys is None:
        keys = 0 if options.ordering == "none" else _ORDERED_KEYS
    work = Workload(messages, body_bytes, keys, batch)
    modes = modes or (() if lanes else tuple(MODES))
    machine = {
        "at": dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
        "cores": os.cpu_count(), "python": platform.python_version(), "rocket-sink": __version__,
    }  # fmt: skip
    settings = {**asdict(work), "ordering": options.ordering}
    before = _baseline(baseline, settings, {*modes, *lanes}) if baseline else {}
    if out:
        check_writable(out)
    check_name_server(options)  # fail now: each message would fail after its time-out
    runs: dict[str, list[Figures]] = {}
    with until_signal() as stop, ExitStack() as stack:
        measure: Callable[[str, Advance], Figures] = partial(measure_producer, options, work)
        benches = dict.fromkeys(modes, measure)
        if lanes:
            if not scratch:
                folder = tempfile.TemporaryDirectory(prefix="rocket-sink-benchmark-")
                scratch = stack.enter_context(folder)
            session = stack.enter_context(spark_session("benchmark", **spark))
            lane_bench = LaneBench(session, sink, work, absolute(scratch))
            benches |= dict.fromkeys(lanes, lane_bench.run)
        for number, case in itertools.product(range(1, repeat + 1), benches):
            with Bar(f"{case} {number}/{repeat}", work.messages) as bar:
                figures = benches[case](case, bar.advance_to)
            runs.setdefault(case, []).append(figures)
    medians = [median(figures) for figures in runs.values()]
    results = {
        "machine": machine,
        "settings": settings,
        "cases": [asdict(item) for item in medians],
    }
    changes = compare(before, medians, tolerance) if before and not stop.number else []
    if out and runs:
        write_file(out, json.dumps(results, indent=1) + "\n")
    if as_json:
        print_json({**results, **({"comparison": changes} if before else {})})
    else:
        show(*_tables(settings, medians, changes, tolerance))
    if stop.number:
        note(f"stopped by {stop.name}")
        return 128 + stop.number
    failed = any(item.failed for item in medians)
    return 1 if failed or any(item.worse for item in changes) else 0


@dataclass(frozen=True)
class Change:
    """A figure of a case, before (in the baseline) and now. `relative`: the change divided by the
    median change of all cases. `worse`: the figure is worse by more than the tolerance."""

    case: str
    figure: str
    before: float
    now: float
    relative: float
    worse: bool


def compare(
    before: Mapping[str, Figures], now: Sequence[Figures], tolerance: float
) -> list[Change]:
    """Compare the cases of both runs; `tolerance` 0.1 allows a tenth less speed, or more CPU."""
    all_changes = []
    for figure in _COMPARED:
        pairs = {
            figures.case: (getattr(before[figures.case], figure), getattr(figures, figure))
            for figures in now
            if figures.case in before
        }
        changes = {case: new / old for case, (old, new) in pairs.items() if old and new}
        if not changes:
            continue
        common = statistics.median(changes.values())
        for case, change in changes.items():
            relative = change / common
            loss = 1 / relative if figure == "messages_per_s" else relative
            all_changes.append(Change(case, figure, *pairs[case], relative, loss > 1 + tolerance))
    return all_changes


def _baseline(path: Path, now: Mapping[str, Any], cases: set[str]) -> dict[str, Figures]:
    """Read the baseline; raise ConfigurationError if its settings differ, or it lacks cases."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        settings = dict(value["settings"])
        before = {record["case"]: Figures(**record) for record in value["cases"]}
    except OSError as error:
        raise ConfigurationError(f"cannot read the baseline {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"{path} is no file of rocket-sink benchmark --out ({error!r})"
        ) from None
    if settings != now:
        other = [f"{name} {settings.get(name)}" for name in now
                 if settings.get(name) != now[name]]  # fmt: skip
        raise ConfigurationError(f"the baseline {path} was measured with {', '.join(other)}")
    if len(before.keys() & cases) < 2:
        raise ConfigurationError(
            f"the baseline {path} has {', '.join(before)}: give two of them or more, because each "
            "is compared with the others"
        )
    return before


def _tables(
    settings: Mapping[str, Any], medians: Sequence[Figures], changes: Sequence[Change],
    tolerance: float,
) -> Iterator[Any]:  # fmt: skip
    columns = ("case", "messages", "messages/s", "MB/s", "CPU s/M", "p50 ms", "p95 ms", "p99 ms",
               "max ms", "failed")  # fmt: skip
    rows = [
        (
            item.case, item.messages, round(item.messages_per_s), item.mb_per_s,
            item.cpu_s_per_million, item.p50_ms, item.p95_ms, item.p99_ms, item.max_ms, item.failed,
        )
        for item in medians
    ]  # fmt: skip
    keys = f", {settings['keys']:,} sharding keys" if settings["keys"] else ""
    title = f"Bodies of {settings['body_bytes']:,} bytes{keys}, ordering {settings['ordering']}"
    yield table(title, columns, rows)
    yield (
        "CPU s/M: CPU seconds of the client per million messages. ms: latency of a call (batch: of "
        f"a call with {settings['batch']:,} messages; lanes: of a request)."
    )
    for item in medians:
        if item.errors:
            causes = ", ".join(f"{code} {count:,}" for code, count in item.errors.items())
            yield f"{item.case}: failed with {causes}"
    if changes:
        yield table(
            f"Beside the baseline; {tolerance:.0%} worse is accepted",
            ("case", "figure", "before", "now", "relative", ""),
            [
                (item.case, _COMPARED[item.figure], item.before, item.now, item.relative,
                 "WORSE" if item.worse else "")
                for item in changes
            ],
        )  # fmt: skip
        yield "relative: now / before, divided by the median of it over all cases."
