"""`rocket-sink benchmark` and `jobs/benchmark.py`: measurements on the user's own cluster."""

from __future__ import annotations

import datetime as dt
import itertools
import json
import os
import platform
import statistics
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from rocket_sink import __version__
from rocket_sink.commands.common.base import Command, json_option, until_signal
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
    given_options,
    resolved_options,
    sink_options,
)
from rocket_sink.commands.common.spark_input import spark_options, spark_session
from rocket_sink.errors import ConfigurationError

if TYPE_CHECKING:
    from rocket_sink.commands.benchmark_run import Figures, LaneBench, ProducerBench, Workload
    from rocket_sink.options import SinkOptions

MODES: Final = ("sync", "async", "batch")
LANES: Final = ("foreach", "source-stream", "write_batch")
_ORDERED_KEYS: Final = 1000
_COMPARED: Final = {"messages_per_s": "messages/s", "cpu_s_per_million": "CPU s/M"}


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
    type=click.Choice(MODES),
    multiple=True,
    help="Send mode of the Producer; repeatable. Default: all, unless a --lane is given.",
)
@click.option(
    "--lane",
    "lanes",
    type=click.Choice(LANES),
    multiple=True,
    help="Spark lane; repeatable. One epoch of generated rows, with a ledger.",
)
@click.option(
    "--messages",
    type=click.IntRange(1),
    default=20_000,
    help="Messages per run. An epoch costs Spark a second or two: give a lane 200000 or more.",
)
@click.option(
    "--body-bytes",
    type=click.IntRange(1),
    default=256,
    help="Size of a body.",
)
@click.option(
    "--keys",
    type=click.IntRange(0),
    help="Number of sharding keys; --mode batch uses none. Default: 0; with --ordering "
    f"{_ORDERED_KEYS}.",
)
@click.option(
    "--batch",
    type=click.IntRange(1),
    default=1000,
    help="--mode batch: messages per call.",
)
@click.option(
    "--repeat",
    type=click.IntRange(1),
    default=3,
    help="Runs of each case, in turn; medians are shown.",
)
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
    from rocket_sink.commands.benchmark_run import Workload

    options = resolved_options()
    if not options.topic:
        raise click.UsageError("which topic? give --topic NAME")
    if keys is None:
        keys = 0 if options.ordering == "none" else _ORDERED_KEYS
    work = Workload(messages, body_bytes, keys, batch)
    cases = (*dict.fromkeys(modes or (() if lanes else MODES)), *dict.fromkeys(lanes))
    machine = {
        "at": dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
        "cores": os.cpu_count(), "python": platform.python_version(), "rocket-sink": __version__,
    }  # fmt: skip
    results = Results(machine, {**asdict(work), "ordering": options.ordering})
    before = _baseline(baseline, results, cases) if baseline else None
    if out:
        check_writable(out)
    check_name_server(options)  # fail now: each message would fail after its time-out
    with until_signal() as stop:
        _measure(cases, repeat, options, work, scratch, spark, results)
    changes = compare(before, results, tolerance) if before and not stop.number else []
    if out and results.runs:
        write_file(out, json.dumps(results.as_dict(), indent=1) + "\n")
    if as_json:
        print_json({**results.as_dict(), **({"comparison": changes} if before else {})})
    else:
        show(*_tables(results, changes, tolerance))
    if stop.number:
        note(f"stopped by {stop.name}")
        return 128 + stop.number
    failed = any(item.failed for item in results.medians)
    return 1 if failed or any(item.worse for item in changes) else 0


@dataclass
class Results:
    """Figures of all runs, with facts of the machine and the settings."""

    machine: Mapping[str, Any]
    settings: Mapping[str, Any]
    runs: dict[str, list[Figures]] = field(default_factory=dict)

    @property
    def medians(self) -> list[Figures]:
        from rocket_sink.commands.benchmark_run import median

        return [median(runs) for runs in self.runs.values()]

    def as_dict(self) -> dict[str, Any]:
        cases = [asdict(figures) for figures in self.medians]
        return {"machine": self.machine, "settings": self.settings, "cases": cases}


def _measure(
    cases: Sequence[str], repeat: int, options: SinkOptions, work: Workload, scratch: str | None,
    spark: Mapping[str, Any], results: Results,
) -> None:  # fmt: skip
    from rocket_sink.commands.benchmark_run import LaneBench, ProducerBench

    benches: dict[str, ProducerBench | LaneBench] = {}
    benches |= dict.fromkeys(MODES, ProducerBench(options, work))
    with ExitStack() as stack:
        if not set(cases) <= set(MODES):
            if not scratch:
                folder = tempfile.TemporaryDirectory(prefix="rocket-sink-benchmark-")
                scratch = stack.enter_context(folder)
            session = stack.enter_context(spark_session("benchmark", **spark))
            sink = {**given_options(), "nameServer": options.name_server, "topic": options.topic}
            benches |= dict.fromkeys(LANES, LaneBench(session, sink, work, absolute(scratch)))
        for number, case in itertools.product(range(1, repeat + 1), cases):
            with Bar(f"{case} {number}/{repeat}", work.messages) as bar:
                figures = benches[case].run(case, bar.advance_to)
            results.runs.setdefault(case, []).append(figures)


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


def compare(before: Mapping[str, Figures], now: Results, tolerance: float) -> list[Change]:
    """Compare the cases of both runs; `tolerance` 0.1 allows a tenth less speed, or more CPU."""
    all_changes = []
    for figure in _COMPARED:
        pairs = {
            figures.case: (getattr(before[figures.case], figure), getattr(figures, figure))
            for figures in now.medians
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


def _baseline(path: Path, now: Results, cases: Iterable[str]) -> dict[str, Figures]:
    """Read the baseline; raise ConfigurationError if it has another workload or too few cases."""
    from rocket_sink.commands.benchmark_run import Figures

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
    if settings != now.settings:
        other = [f"{name} {settings.get(name)}" for name in now.settings
                 if settings.get(name) != now.settings[name]]  # fmt: skip
        raise ConfigurationError(f"the baseline {path} was measured with {', '.join(other)}")
    if len(before.keys() & set(cases)) < 2:
        raise ConfigurationError(
            f"the baseline {path} has {', '.join(before)}: give two of them or more, because each "
            "is compared with the others"
        )
    return before


def _tables(results: Results, changes: list[Change], tolerance: float) -> Iterator[Any]:
    settings = results.settings
    columns = ("case", "messages", "messages/s", "MB/s", "CPU s/M", "p50 ms", "p95 ms", "p99 ms",
               "max ms", "failed")  # fmt: skip
    rows = [
        (
            item.case, item.messages, round(item.messages_per_s), item.mb_per_s,
            item.cpu_s_per_million, item.p50_ms, item.p95_ms, item.p99_ms, item.max_ms, item.failed,
        )
        for item in results.medians
    ]  # fmt: skip
    keys = f", {settings['keys']:,} sharding keys" if settings["keys"] else ""
    title = f"Bodies of {settings['body_bytes']:,} bytes{keys}, ordering {settings['ordering']}"
    yield table(title, columns, rows)
    yield (
        "CPU s/M: CPU seconds of the client per million messages. ms: latency of a call (batch: of "
        f"a call with {settings['batch']:,} messages; lanes: of a request)."
    )
    for item in results.medians:
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
