"""`rocket-sink ledger`: look into a ledger and keep it small."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from rocket_sink.commands.base import Group
from rocket_sink.commands.output import note, print_json, print_json_line, show, table
from rocket_sink.commands.sink_input import absolute
from rocket_sink.commands.spark_input import spark_options, spark_session
from rocket_sink.errors import LedgerError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from rocket_sink.ledger.ledger import Ledger

_SHOWN: Final = {
    "epochs": ("at", "query_id", "epoch", "rows_in", "acked", "degraded", "dead", "unknown",
               "duplicates_possible", "adds_up"),
    "sends": ("at", "broker_name", "queue_id", "message_count", "attempt", "outcome", "rtt_ms",
              "error_code"),
    "dead-letters": ("at", "topic", "sharding_key", "keys", "reason", "last_error_code",
                     "last_error"),
    "isolations": ("at", "broker_name", "cause", "latency_ms", "isolated_ms"),
    "resolutions": ("at", "topic", "letter_id", "message_id", "resolution"),
    "attempts": ("at", "query_id", "epoch", "partition", "task_attempt_id", "rows_in", "acked",
                 "complete", "counts"),
}  # fmt: skip
"""View -> the columns of its table; --json shows all."""

_ledger = click.option(
    "--ledger", "-l", "path", required=True, metavar="PATH", help="The ledger's folder."
)
_json = click.option("--json", "as_json", is_flag=True, help="As JSON.")


@click.group(cls=Group)
def ledger() -> None:
    """Fold, show and maintain a ledger.

    The ledger is one Delta table; spark.read.format("delta").load(PATH) reads it as well.
    """


@ledger.command(example="    rocket-sink ledger fold --ledger ledger/")
@_ledger
@spark_options
@_json
def fold(
    path: str, master: str | None, spark_conf: tuple[str, ...], packages: tuple[str, ...],
    as_json: bool,
) -> None:  # fmt: skip
    """Move what tasks have written into the Delta table."""
    with _opened("fold", path, master, spark_conf, packages) as (spark, found):
        summary = found.sync(spark)
    if as_json:
        print_json(summary)
    elif summary.busy:
        note("another fold is at work")
    else:
        note(f"{summary.rows:,} rows of {summary.files:,} files folded in")


@ledger.command(example="    rocket-sink ledger optimize --ledger ledger/")
@_ledger
@spark_options
@_json
def optimize(
    path: str, master: str | None, spark_conf: tuple[str, ...], packages: tuple[str, ...],
    as_json: bool,
) -> None:  # fmt: skip
    """Compact small files into larger ones."""
    with _opened("optimize", path, master, spark_conf, packages) as (spark, found):
        done = found.optimize(spark)
    if as_json:
        print_json(done)
    else:
        note(f"{done['files_removed']:,} files became {done['files_added']:,}; vacuum deletes them")


@ledger.command(
    example="""
    rocket-sink ledger vacuum --ledger ledger/
    rocket-sink ledger vacuum --ledger ledger/ --retain-hours 200"""
)
@_ledger
@click.option(
    "--retain-hours",
    type=click.FloatRange(0),
    metavar="HOURS",
    help="Keep files that versions of this age need. Default: Delta's 168.",
)
@spark_options
def vacuum(
    path: str, retain_hours: float | None, master: str | None, spark_conf: tuple[str, ...],
    packages: tuple[str, ...],
) -> None:  # fmt: skip
    """Delete data files that no recent version of the table needs."""
    with _opened("vacuum", path, master, spark_conf, packages) as (spark, found):
        found.vacuum(spark, retain_hours)
    note("done")


@ledger.command(
    "show",
    example="""
    rocket-sink ledger show epochs --ledger ledger/
    rocket-sink ledger show dead-letters --ledger ledger/ --where "topic = 'flights'" --json""",
)
@click.argument("view", type=click.Choice(list(_SHOWN)))
@_ledger
@click.option("--where", metavar="SQL", help="Only rows for which this is true.")
@click.option(
    "--limit", type=click.IntRange(1), default=20, show_default=True, help="Rows, the newest first."
)
@click.option("--all-letters", is_flag=True, help="dead-letters: also those that are resolved.")
@spark_options
@click.option("--json", "as_json", is_flag=True, help="One JSON object per row, all columns.")
def show_view(
    view: str, path: str, where: str | None, limit: int, all_letters: bool, master: str | None,
    spark_conf: tuple[str, ...], packages: tuple[str, ...], as_json: bool,
) -> None:  # fmt: skip
    """Show the newest rows of a view."""
    with _opened("show", path, master, spark_conf, packages) as (spark, found):
        found.sync(spark)
        frame = _frame(spark, found, view, all_letters=all_letters)
        if where:
            frame = frame.where(where)
        rows = [
            row.asDict(recursive=True) for row in frame.orderBy("at", ascending=False).head(limit)
        ]
    if as_json:
        for row in rows:
            print_json_line(row)
        return
    names = _SHOWN[view]
    show(table(view, [name.replace("_", " ") for name in names],
               ([_short(row[name]) for name in names] for row in rows)))  # fmt: skip
    if len(rows) == limit:
        note(f"the newest {limit}; --limit shows more, --json all columns")


@ledger.command(
    example="""
    rocket-sink ledger park --ledger ledger/ --letter 5e1f-3 --reason "asked the customer"
    rocket-sink ledger park --ledger ledger/ --where "last_error_code = 'EMPTY_BODY'" \\
      --reason "empty since the release of May" """
)
@_ledger
@click.option("--letter", "letters", multiple=True, metavar="ID", help="This one; repeatable.")
@click.option("--where", metavar="SQL", help="Pending dead letters for which this is true.")
@click.option("--reason", required=True, metavar="TEXT", help="Why; kept with each.")
@click.option("--dropped", is_flag=True, help="Note them as not wanted instead of put aside.")
@spark_options
@_json
def park(
    path: str, letters: tuple[str, ...], where: str | None, reason: str, dropped: bool,
    master: str | None, spark_conf: tuple[str, ...], packages: tuple[str, ...], as_json: bool,
) -> int:  # fmt: skip
    """Put dead letters aside by hand: backfills do not send them any more.

    It writes a resolution per letter and edits nothing. Exits 1 when a letter named by --letter is
    not pending; the others are parked all the same.
    """
    from rocket_sink.spark.parking import park as park_letters

    if not letters and not where:
        raise click.UsageError("which letters? give --letter ID or --where SQL")
    with _opened("park", path, master, spark_conf, packages) as (spark, found):
        done = park_letters(
            spark, found, letters=letters, where=where, note=reason,
            resolution="dropped" if dropped else "parked",
        )  # fmt: skip
    if as_json:
        print_json({"parked": done.count, "not_pending": list(done.not_pending)})
    else:
        note(f"{done.count:,} dead letters {'dropped' if dropped else 'parked'}")
        for letter in done.not_pending:
            note(f"{letter} is no pending dead letter of this ledger")
    return 1 if done.not_pending else 0


def _frame(spark: SparkSession, found: Ledger, view: str, *, all_letters: bool) -> DataFrame:
    if view == "dead-letters":
        return found.dead_letters(spark, pending=not all_letters)
    frame: DataFrame = getattr(found, view)(spark)
    return frame


def _short(value: Any) -> Any:
    if isinstance(value, list):
        return " ".join(map(str, value))
    if hasattr(value, "strftime"):
        return value.strftime("%m-%d %H:%M:%S")
    text = str(value)
    return value if not isinstance(value, str) or len(text) <= 60 else text[:57] + "..."


@contextlib.contextmanager
def _opened(
    name: str, path: str, master: str | None, spark_conf: tuple[str, ...],
    packages: tuple[str, ...],
) -> Iterator[tuple[SparkSession, Ledger]]:  # fmt: skip
    from rocket_sink.ledger.ledger import Ledger

    found = Ledger(absolute(path))
    check_there(found.path)
    with spark_session(
        f"ledger {name}", master=master, spark_conf=spark_conf, packages=packages, small=True
    ) as spark:
        yield spark, found


def check_there(path: str) -> None:
    """Refuse a local path without a ledger before the seconds that Spark takes to start.

    Raises:
        LedgerError: neither a table nor a spool is there.
    """
    if "://" in path:
        return
    if not any((Path(path) / part).is_dir() for part in ("_delta_log", "_spool")):
        raise LedgerError(f"there is no ledger in {path}: check the path", path=path)
