"""`rocket-sink ledger`: look into a ledger and keep it small."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import click

from rocket_sink.commands.common.base import (
    Decorated,
    Group,
    count_option,
    json_lines_option,
    json_option,
    together,
)
from rocket_sink.commands.common.ledger_input import (
    fold_and_note,
    fold_option,
    note_faults,
    open_ledger,
    quick_ledger,
)
from rocket_sink.commands.common.output import (
    json_printer,
    line,
    note,
    print_if_json,
    rows_table,
    show,
)
from rocket_sink.commands.common.spark_input import spark_options
from rocket_sink.errors import LedgerError, OptionError
from rocket_sink.ledger import views
from rocket_sink.options import LEDGER_KINDS, find_option
from rocket_sink.text import counted

if TYPE_CHECKING:
    import pyarrow as pa

    from rocket_sink.ledger.query.duckdb_reader import QuickLedger
    from rocket_sink.spark.backfill.parking import Parked

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
"""{view: columns of its table}; --json shows all columns."""
_ALIKE: Final = re.compile(r"('[^'\\]*'|(IN|AND|OR|NOT)\b|\w+\b(?!\s*\()|[\s.,=<>!()-])*", re.I)
"""Conditions that mean the same in DuckDB. Other signs may differ: DuckDB counts elements of lists
from 1, takes "x" for a column, ^ for a power, and \\ for itself. Functions differ, too."""

_ledger = click.option(
    "--ledger", "-l", "path", required=True, metavar="PATH", help="The ledger's folder."
)


def _letter_options(where_help: str) -> Callable[[Decorated], Decorated]:
    return together(
        click.option("--letter", "letters", multiple=True, metavar="ID",
                     help="This one; repeatable."),
        click.option("--where", metavar="SQL", help=where_help),
        click.option("--reason", required=True, metavar="TEXT", help="Why; kept with each."),
    )  # fmt: skip


def _age(_context: click.Context, _option: click.Parameter, text: str | None) -> int | None:
    try:
        return None if text is None else int(find_option("foldIntervalMs").parse(text))
    except OptionError as error:
        raise click.BadParameter(f"{text!r} is no age, as 30d or 12h") from error


def _age_or_forever(
    context: click.Context, option: click.Parameter, text: str | None
) -> int | None:
    return None if text == "forever" else _age(context, option, text)


@click.group(cls=Group)
def ledger() -> None:
    """Fold, show and maintain a ledger.

    The ledger is one Delta table; spark.read.format("delta").load(PATH) reads it as well.
    """


@ledger.command(example="    rocket-sink ledger fold --ledger ledger/")
@_ledger
@spark_options
@json_option
def fold(path: str, **spark: Any) -> None:
    """Move what tasks have written into the Delta table."""
    with open_ledger("ledger fold", path, **spark) as (session, opened_ledger):
        summary = opened_ledger.sync(session)
    if print_if_json(summary):
        return
    if summary.busy:
        note(f"another fold is at work ({summary.holder}): nothing was done")
    else:
        note(f"{counted(summary.rows, 'row')} of {counted(summary.files, 'file')} folded in")
        note_faults(summary)


@ledger.command(example="    rocket-sink ledger optimize --ledger ledger/")
@_ledger
@spark_options
@json_option
def optimize(path: str, **spark: Any) -> None:
    """Compact small files into larger ones."""
    with open_ledger("ledger optimize", path, **spark) as (session, opened_ledger):
        done = opened_ledger.optimize(session)
    if not print_if_json(done):
        files = counted(done["files_removed"], "file")
        note(f"{files} became {done['files_added']:,}; vacuum deletes them")


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
    help="Keep files of this age, also those of writes that run. Default: 168, a week.",
)
@spark_options
def vacuum(path: str, retain_hours: float | None, **spark: Any) -> None:
    """Delete data files that no recent version of the table needs."""
    with open_ledger("ledger vacuum", path, **spark) as (session, opened_ledger):
        opened_ledger.vacuum(session, retain_hours)
    note("done")


@ledger.command(
    example="""
    rocket-sink ledger expire --ledger ledger/
    rocket-sink ledger expire --ledger ledger/ --older-than 30d --kind send --dry-run"""
)
@_ledger
@click.option(
    "--older-than", metavar="AGE", callback=_age, help="Drop rows of this age, as in 30d."
)
@click.option(
    "--kind",
    "kinds",
    multiple=True,
    type=click.Choice(LEDGER_KINDS),
    metavar="KIND",
    help="Of this kind only; repeatable.",
)
@click.option(
    "--settled-bodies",
    metavar="AGE",
    callback=_age_or_forever,
    default="7d",
    help="Remove bodies of dead letters that were stored or dropped so long ago; 0: all of these "
    "bodies; forever: bodies stay.",
)
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@spark_options
@json_option
def expire(
    path: str, older_than: int | None, kinds: tuple[str, ...], settled_bodies: int | None,
    dry_run: bool, **spark: Any,
) -> None:  # fmt: skip
    """Drop old rows, and bodies of dead letters that are settled.

    Without --older-than only bodies go. Rows that are still needed stay whatever their age: pending
    dead letters, open transactions, resolutions of dead letters that stay, and the last two epochs
    of each query. The command also deletes files that were replaced at least two days ago.
    """
    if kinds and older_than is None:
        raise click.UsageError("which age? give --older-than, as in --older-than 30d")
    age, bodies_age = (
        None if ms is None else dt.timedelta(milliseconds=ms) for ms in (older_than, settled_bodies)
    )
    ages = {} if age is None else dict.fromkeys(kinds or LEDGER_KINDS, age)
    with open_ledger("ledger expire", path, **spark) as (session, opened_ledger):
        done = opened_ledger.expire(session, ages, settled_bodies=bodies_age, dry_run=dry_run)
    if print_if_json(done):
        return
    if done.busy:
        note("another process rewrote the ledger meanwhile: nothing was done; try again")
    for kind in done.rows:
        note(
            f"{kind}: {counted(done.rows[kind], 'row')} of that age; {done.kept[kind]:,} more stay"
        )
    note(f"bodies of {counted(done.bodies, 'settled dead letter')}")
    files = counted(done.files, "file")
    if dry_run:
        note(f"nothing was done: {files} would go or be written anew")
    else:
        note(
            f"{files} gone or written anew. A running query or the next `rocket-sink ledger "
            "expire` deletes the old ones, after two days at least"
        )


@ledger.command(
    example="""
    rocket-sink ledger erase --ledger ledger/ --where "sharding_key = 'N14228'" \\
      --reason "request of 3 May" """
)
@_ledger
@click.option(
    "--where", required=True, metavar="SQL", help="Dead letters for which this is true; no undo."
)
@click.option("--reason", required=True, metavar="TEXT", help="Why; kept with each.")
@spark_options
@json_option
def erase(path: str, where: str, reason: str, **spark: Any) -> None:
    """Remove bodies, keys, tags, properties and errors' texts of dead letters for good.

    The letters still count, and pending letters are noted as dropped. The files with the contents
    are deleted at once, for every version of the table. Look first at what --where matches:
    `rocket-sink ledger show dead-letters --all-letters --where ...`.
    """
    from rocket_sink.spark.backfill.parking import erase as erase_letters

    with open_ledger("ledger erase", path, **spark) as (session, opened_ledger):
        done = erase_letters(session, opened_ledger, where=where, reason=reason)
    if print_if_json(done):
        return
    note(f"{counted(done.letters, 'dead letter')} erased, {done.dropped:,} of them were pending")
    note(f"{counted(done.deleted_files, 'file')} with their contents deleted")
    if done.loose_files:
        files = counted(done.loose_files, "file", "was", "were")
        note(
            f"{files} left that no version of the table names: attempts that run, or died, wrote "
            "them. They may have such rows until `rocket-sink ledger vacuum` deletes them after "
            "a week"
        )
    if done.unfolded:
        note(
            f"rows of {counted(len(done.unfolded), 'epoch')} are not folded yet: running tasks, or "
            "killed workers of other hosts, wrote them. They may hold such contents; run this "
            f"again when they are folded: {', '.join(done.unfolded)}"
        )
    for name in done.quarantined:
        note(f"this damaged file was not looked into; delete it if it may have such rows: {name}")


def _quick_rows(quick: QuickLedger, view: str, where: str | None, limit: int) -> pa.Table | None:
    """Return the newest rows of a view, or None if DuckDB does not understand the condition."""
    import duckdb

    rows = f"{view} WHERE ({where or 'true'}\n)"
    try:
        return quick.query(f"SELECT * FROM {rows} ORDER BY at DESC LIMIT {limit}")  # noqa: S608
    except (duckdb.Error, LedgerError):
        if where is None:
            raise
        return None


@ledger.command(
    "show",
    example="""
    rocket-sink ledger show epochs --ledger ledger/
    rocket-sink ledger show dead-letters --ledger ledger/ --where "topic = 'flights'" --json""",
)
@click.argument("view", type=click.Choice(list(_SHOWN)), metavar="VIEW")
@_ledger
@click.option("--where", metavar="SQL", help="Only rows for which this is true.")
@count_option("--limit", default=20, help="Rows, the newest first.")
@click.option("--all-letters", is_flag=True, help="dead-letters: also those that are resolved.")
@fold_option
@spark_options
@json_lines_option("One JSON object per row, all columns.")
def show_view(
    view: str, path: str, where: str | None, limit: int, all_letters: bool, fold: bool,
    **spark: Any,
) -> None:  # fmt: skip
    """Show the newest rows of a view; times are UTC.

    Views: epochs, sends, dead-letters, isolations, resolutions, attempts.

    --where is a condition in Spark's SQL; Spark starts only if DuckDB could differ.
    """

    named = {"dead-letters": "letters" if all_letters else "pending_letters"}.get(view, view)
    quick = quick_ledger(path, fold, not _ALIKE.fullmatch(where or ""), *spark.values())
    table = _quick_rows(quick, named, where, limit) if quick else None
    if table is None:
        from rocket_sink.spark.backfill.sources import filtered

        with open_ledger("ledger show", path, **spark) as (session, opened_ledger):
            fold_and_note(opened_ledger, session)
            frame = filtered(
                views.view(opened_ledger.rows(session), named), where, of="the view's columns"
            )
            table = frame.orderBy("at", ascending=False).limit(limit).toArrow()
    rows = views.rows_of(table)
    if printer := json_printer():
        for row in rows:
            printer(row)
        return
    if not rows:
        line(f"{view}: none")
        return
    show(rows_table(view, _SHOWN[view], rows))
    if len(rows) == limit:
        note(f"the newest {limit}; --limit shows more, --json all columns")


@ledger.command(
    example="""
    rocket-sink ledger park --ledger ledger/ --letter 5e1f-3 --reason "asked the customer"
    rocket-sink ledger park --ledger ledger/ --where "last_error_code = 'EMPTY_BODY'" \\
      --reason "empty since the release of May" """
)
@_ledger
@_letter_options("Pending dead letters for which this is true.")
@click.option("--dropped", is_flag=True, help="Note them as not wanted instead of put aside.")
@spark_options
@json_option
def park(
    path: str, letters: tuple[str, ...], where: str | None, reason: str, dropped: bool,
    **spark: Any,
) -> int:  # fmt: skip
    """Put dead letters aside by hand: backfills do not send them any more.

    It adds a resolution per dead letter and changes no row. Exits 1 if a dead letter named by
    --letter is not pending; the others are parked all the same.
    """
    from rocket_sink.spark.backfill.parking import park as park_letters

    _check_named(letters, where)
    with open_ledger("ledger park", path, **spark) as (session, opened_ledger):
        done = park_letters(
            session, opened_ledger, letters=letters, where=where, note=reason,
            resolution="dropped" if dropped else "parked",
        )  # fmt: skip
    return _print_parked(done, "dropped" if dropped else "parked", "pending")


@ledger.command(
    example="""
    rocket-sink ledger unpark --ledger ledger/ --letter 5e1f-3 --reason "the customer agreed"
    rocket-sink ledger unpark --ledger ledger/ --where "topic = 'orders'" --reason "mended" """
)
@_ledger
@_letter_options("Parked dead letters for which this is true.")
@spark_options
@json_option
def unpark(
    path: str, letters: tuple[str, ...], where: str | None, reason: str,
    **spark: Any,
) -> int:  # fmt: skip
    """Take dead letters back that were parked or dropped: backfills send them again.

    It adds a resolution per dead letter and changes no row. Exits 1 if a dead letter named by
    --letter is not parked; the others are taken back all the same. --where uses the columns of
    dead letters.
    """
    from rocket_sink.spark.backfill.parking import unpark as unpark_letters

    _check_named(letters, where)
    with open_ledger("ledger unpark", path, **spark) as (session, opened_ledger):
        done = unpark_letters(session, opened_ledger, letters=letters, where=where, note=reason)
    return _print_parked(done, "unparked", "parked")


def _check_named(letters: tuple[str, ...], where: str | None) -> None:
    if not letters and not where:
        raise click.UsageError("which dead letters? give --letter ID or --where SQL")


def _print_parked(done: Parked, way: str, needed: str) -> int:
    if not print_if_json({way: done.count, f"not_{needed}": list(done.left_out)}):
        note(f"{counted(done.count, 'dead letter')} {way}")
        for letter in done.left_out:
            note(f"{letter} is no {needed} dead letter of this ledger")
    return 1 if done.left_out else 0
