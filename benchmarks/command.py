"""The command: arguments, output, exit codes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from benchmarks.arguments import LANES, ORDERINGS, Arguments, key_counts
from benchmarks.processes import python_path
from benchmarks.stop import until_signal
from rocket_sink.cli import run
from rocket_sink.commands.common.base import Command
from rocket_sink.commands.common.output import note, print_json, show
from rocket_sink.commands.common.spark_input import spark_session
from rocket_sink.errors import ConfigurationError

if TYPE_CHECKING:
    from benchmarks.figures import Comparison
    from benchmarks.results import Results


@click.command(
    cls=Command,
    example="""
    python -m benchmarks --rows 500000
    python -m benchmarks --lane write_batch --ordering strict --keys 1000 --keys all
    python -m benchmarks --full --out figures.json
    python -m benchmarks --peers --out peers.json --baseline peers-before.json
    python -m benchmarks --singles --out singles.json
    python -m benchmarks --readers --out readers.json
    python -m benchmarks --faults
    python -m benchmarks --faults --pause-ms 300
    python -m benchmarks --scale --html curves.html
    python -m benchmarks --latency
    python -m benchmarks --name-server 10.0.0.1:9876 --topic benchmark --lane foreach --ceiling""",
)
@click.option(
    "--rows",
    type=click.IntRange(1000),
    default=1_000_000,
    show_default=True,
    help="Rows per run; fewer where bodies are large.",
)
@click.option(
    "--repeat",
    type=click.IntRange(1),
    default=3,
    show_default=True,
    help="Runs of each case, in turn; medians are shown.",
)
@click.option(
    "--lane",
    "lanes",
    type=click.Choice(LANES),
    multiple=True,
    help="Lane to measure, with its do-nothing twin; repeatable. Default: foreach, "
    "source-stream, write_batch.",
)
@click.option(
    "--ordering",
    "orderings",
    type=click.Choice(ORDERINGS),
    multiple=True,
    help="Repeatable; default none.",
)
@click.option(
    "--keys",
    multiple=True,
    callback=key_counts,
    metavar="N|all",
    help="Sharding keys of ordered rows, or all different; repeatable. Default 1000.",
)
@click.option(
    "--body-bytes",
    "bodies",
    type=click.IntRange(20, 4_000_000),
    multiple=True,
    help="Size of a body; repeatable. Default 256.",
)
@click.option(
    "--brokers",
    type=click.IntRange(1, 8),
    default=2,
    show_default=True,
    help="Brokers, on this machine.",
)
@click.option(
    "--full",
    is_flag=True,
    help="All lanes, orderings and body sizes, the ceiling, Java's batches, Kafka.",
)
@click.option("--without-ledger", is_flag=True, help="Each lane without a ledger, too.")
@click.option(
    "--ceiling",
    is_flag=True,
    help="Also frames encoded beforehand and replayed, and the engine without Spark.",
)
@click.option(
    "--peers",
    is_flag=True,
    help="Producers one by one and in batches: ours, Java's, the gRPC client.",
)
@click.option(
    "--singles",
    is_flag=True,
    help="What shares no batch: delayed and compressed rows, transactions, asynchronous sends, "
    "automatic batching, each beside Java's where it has it; and epochs of 200 rows.",
)
@click.option(
    "--readers",
    is_flag=True,
    help="Reading a topic: Spark's batch and stream, the same tasks without Spark, Java's pull "
    "consumer; bodies of 256 bytes, of 4 KiB, and compressed ones of 16 KiB.",
)
@click.option("--kafka", is_flag=True, help="Also Spark's own Kafka sink on the same rows.")
@click.option(
    "--faults",
    is_flag=True,
    help="A broker frozen, a broker killed: ours and Java's producer in turn.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(1),
    default=32.0,
    show_default=True,
    help="--faults: length of a run; the fault takes 10/32 of it.",
)
@click.option(
    "--pause-ms",
    type=click.IntRange(1),
    help="--faults: only stop a broker for so long; no message may be doubled.",
)
@click.option(
    "--scale",
    is_flag=True,
    help="Cost per row and memory over rows, sharding keys, brokers and workers; exit 1 when a "
    "curve is not flat.",
)
@click.option(
    "--scale-by",
    type=click.Choice(["rows", "keys", "brokers", "workers", "queues"]),
    multiple=True,
    help="--scale: only this; repeatable.",
)
@click.option(
    "--latency",
    is_flag=True,
    help="Single rows from arrival to broker and ledger, of foreach, source-stream and "
    "write_batch: one row per epoch, and 1,000 rows/s for as many seconds as --rows has, at most "
    "20.",
)
@click.option(
    "--name-server",
    default="",
    metavar="HOST:PORT[;HOST:PORT]",
    help="Send to this running cluster instead of brokers of this machine. The messages stay in "
    "its topic.",
)
@click.option(
    "--topic",
    default="benchmark",
    show_default=True,
    help="--name-server: the topic, which must be there.",
)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Also write all figures to this file, as JSON; after each case, so that a run that is "
    "stopped keeps what it has.",
)
@click.option(
    "--html",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Also write tables and curves to this file.",
)
@click.option(
    "--baseline",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Compare ratios with those of an earlier --out; exit 1 when one is worse.",
)
@click.option(
    "--tolerance",
    type=click.FloatRange(0),
    default=0.15,
    show_default=True,
    help="--baseline: how much worse is no regress.",
)
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def benchmark(
    out: Path | None, html: Path | None, baseline: Path | None, tolerance: float, as_json: bool,
    **given: Any,
) -> int:  # fmt: skip
    """Measure the sink beside a sink that does nothing.

    Same rows, same Spark, one run, with the brokers on the same machine: compare the cases with
    each other, not with another run.
    """
    from benchmarks.facts import machine_facts
    from benchmarks.results import Results, read_results

    before = read_results(baseline) if baseline else None
    arguments = Arguments(**given)
    results = Results(machine_facts(), arguments.as_dict())
    stopped_by = _measure_and_keep(arguments, results, out)
    if html:
        from benchmarks.html import page

        html.write_text(page(results), encoding="utf-8")
        note(f"written to {html}")
    comparison = _compared(before, results, tolerance) if before and not stopped_by else None
    if as_json:
        print_json(results.as_dict() | ({"comparison": comparison} if comparison else {}))
    else:
        from benchmarks.render import comparison_table, tables

        show(*tables(results))
        if comparison:
            show(comparison_table(comparison, tolerance))
    broken = _promises_broken(results)
    if stopped_by:
        return 128 + stopped_by
    return 1 if broken or (comparison and comparison.regressed) else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    return run(benchmark, "python -m benchmarks", arguments)


def _measure_and_keep(arguments: Arguments, results: Results, out: Path | None) -> int | None:
    """Measure, and update the file after each case; returns the signal that stopped it, or None."""

    def keep() -> None:
        if out:
            with contextlib.suppress(OSError):  # a full disk now may have room at the end
                results.write(out)
        note(f"done: {results.progress}")

    if out:
        _check_out(out)
    results.on_added = keep
    try:
        with until_signal() as stop:
            _measure(arguments, results)
        if stop.number:
            note(f"stopped by {stop.name}; done: {results.progress}")
        return stop.number
    finally:
        # hours may be in it, also when something fails or stops it at last
        if out and not results.is_empty:
            results.write(out)
            note(f"written to {out}")


def _check_out(out: Path) -> None:
    """Raises ConfigurationError: the file is not writable."""
    if out.exists() and not out.is_file():
        raise ConfigurationError(f"--out {out} is no plain file; --json prints to standard output")
    folder = out.resolve().parent
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigurationError(f"--out: cannot write into the folder {folder}")


def _measure(arguments: Arguments, results: Results) -> None:
    """Measure all selected parts into `results`."""
    if arguments.wants_cases:
        from benchmarks.run import run_plan

        run_plan(arguments.plan(), results, note, _session)
    if arguments.faults:
        from benchmarks.faults import run_faults

        run_faults(arguments.schedules(), results, note)
    if arguments.scale:
        from benchmarks.scale import run_scale

        run_scale(arguments.scaling(), results, note, _scaled_session)
    if arguments.latency:
        from benchmarks.latency import Rows, run_latency

        run_latency(Rows.of(arguments.rows), results, note, _session)


def _session(packages: tuple[str, ...]) -> Any:
    _let_workers_import()
    # Spark's Parquet reader wants 4,096 rows in one piece: too much for 1 GB with bodies of 16 KiB.
    memory = {"spark.driver.memory": "3g"}
    return spark_session("benchmark", packages=packages, spark_conf=memory)


def _let_workers_import() -> None:
    """Spark's Python workers import this package, which only a checkout has."""
    os.environ["PYTHONPATH"] = python_path()


def _scaled_session(workers: int) -> Any:
    _let_workers_import()
    return spark_session("benchmark", master=f"local[{workers}]")


def _promises_broken(results: Results) -> bool:
    """Note failed cases, violated invariants of faults, and curves that are not flat."""
    broken = [f"{case} failed: {why}" for case, why in results.failed.items()]
    if results.faults:
        from benchmarks.faults import broken_promises

        broken += broken_promises(results.faults)
    if results.scale:
        from benchmarks.curves import not_flat

        broken += not_flat(results.scale)
    for line in broken:
        note(line)
    return bool(broken)


def _compared(before: Results, now: Results, tolerance: float) -> Comparison:
    """Raises ConfigurationError: the two have no common ratio."""
    from benchmarks.figures import compare

    comparison = compare(before.ratios, now.ratios, tolerance)
    if not comparison.changes:
        raise ConfigurationError("the baseline has no ratio in common with this run")
    return comparison
