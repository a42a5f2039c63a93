"""Reading a ledger in commands: with DuckDB if possible, else with Spark."""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import click

from rocket_sink.commands.common.base import Decorated, time_value, together
from rocket_sink.commands.common.output import note, step
from rocket_sink.commands.common.sink_input import absolute
from rocket_sink.commands.common.spark_input import spark_session
from rocket_sink.errors import LedgerError
from rocket_sink.ledger.append.named import located
from rocket_sink.ledger.driver.fold import FoldSummary
from rocket_sink.ledger.driver.ledger import Ledger
from rocket_sink.ledger.path import LOG_FOLDER, NOTES, SPOOL, is_remote, is_table_name, resolve_path
from rocket_sink.ledger.query.duckdb_reader import QuickLedger, open_quick
from rocket_sink.ledger.sql import Scope
from rocket_sink.text import counted

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def scoped_ledger(function: Decorated) -> Decorated:
    """Let a command take the ledger's folder (`path`) by --ledger or as an argument, and the
    selection of its rows (`scope`) by --query, --since and --until."""

    @functools.wraps(function)
    def with_scope(
        *, argument: str | None, named: str | None, query: str | None,
        since: dt.datetime | None, until: dt.datetime | None, **more: Any,
    ) -> Any:  # fmt: skip
        if argument and named:
            raise click.UsageError("the ledger is named twice: give LEDGER or --ledger, not both")
        path = argument or named
        if not path:
            raise click.UsageError("which ledger? give --ledger PATH")

        return function(path=path, scope=Scope(query, since, until), **more)

    add_options = together(
        click.option(
            "--ledger", "-l", "named", metavar="PATH",
            help="The ledger's folder; it may be named without --ledger, too.",
        ),
        click.argument("argument", metavar="[LEDGER]", required=False),
        click.option(
            "--query", metavar="ID", help="Only this streaming query (the start of its id)."
        ),
        click.option(
            "--since", callback=time_value, metavar="TIME",
            help="From this time on: 2026-01-31T12:00 (UTC), or 90m ago.",
        ),
        click.option("--until", callback=time_value, metavar="TIME", help="Up to this time."),
    )  # fmt: skip
    return cast("Decorated", add_options(with_scope))


fold_option: Final = click.option(
    "--fold", is_flag=True,
    help="First fold what tasks have written into the table, with Spark. Without it, and with the "
    "extra `fast` installed, a local ledger is read as it is, in seconds.",
)  # fmt: skip


def quick_ledger(path: str, *spark_wanted: object) -> QuickLedger | None:
    """Open the ledger without Spark; note rows that its table lacks. Return None if a flag in
    `spark_wanted` is set, or DuckDB cannot read it. Raise LedgerError if the path has no ledger."""
    path = absolute(path)
    check_exists(path)
    # Under spark-submit the JVM runs already. Only Spark's catalogs know tables' names.
    if any(spark_wanted) or "PYSPARK_GATEWAY_PORT" in os.environ or is_table_name(path):
        return None

    ledger = open_quick(path)
    if ledger is not None and ledger.unfolded_epochs:
        epochs = counted(ledger.unfolded_epochs, "epoch")
        letters = counted(ledger.unfolded_letters, "dead letter")
        more = f", {letters} among them" if ledger.unfolded_letters else ""
        note(f"rows of {epochs} are not folded yet and not shown{more}; --fold takes them in")
    if ledger is not None and ledger.quarantined_files:
        files = counted(ledger.quarantined_files, "damaged spool file", "is", "are")
        note(f"{files} put aside in _spool/_quarantine: the table lacks their rows")
    return ledger


@contextlib.contextmanager
def open_ledger(name: str, path: str, **spark: Any) -> Iterator[tuple[SparkSession, Ledger]]:
    """Yield a Spark session for small plans, made from the flags `spark`, and the ledger. Raise
    LedgerError if the path has no ledger."""

    path = absolute(path)
    check_exists(path)
    with spark_session(name, small=True, **spark) as session:
        # Check again, because only the session may know the store's address and keys.
        check_exists(path, session)
        with step(name):
            yield session, Ledger(path)


def fold_and_note(ledger: Ledger, spark: SparkSession) -> None:
    """Fold the ledger before it is shown; print a note if rows are not in the table."""
    try:
        summary = ledger.sync(spark)
    except LedgerError as error:
        note(f"{error}; what is not folded yet is not shown")
        return
    if summary.busy:
        note(
            f"{summary.holder} is folding the ledger: what tasks wrote last is not in the table "
            "yet, and not shown"
        )
    note_faults(summary)


def note_faults(summary: FoldSummary) -> None:
    """Note the files that could not be folded."""
    for path in summary.damaged:
        note(f"damaged and put aside, the table lacks its rows: {path}")
    for path in summary.left:
        note(f"this rocket-sink cannot read it, the table lacks its rows: {path}")


def check_exists(path: str, spark: SparkSession | None = None) -> None:
    """Check that a path has a ledger, if pyarrow can look there. Without a session only a local
    path is checked, so that a wrong path is reported before Spark starts: for a store, only the
    session may know the address and keys. Raise LedgerError if the path has neither a table nor a
    spool, or this user may not read them."""
    if spark is None and (is_remote(path) or is_table_name(path)):
        return
    place = resolve_path(located(path, spark))
    if place.problem:
        return
    if place.is_local:
        for folder in (Path(place.root, part) for part in ("", LOG_FOLDER, SPOOL)):
            if os.access(folder, os.F_OK) and not os.access(folder, os.R_OK | os.X_OK):
                raise LedgerError(
                    f"the ledger {path} cannot be read: this user may not look into {folder}",
                    path=path,
                )
    folders = [f"{place.root}/{part}" for part in (LOG_FOLDER, SPOOL, NOTES)]
    try:
        infos = place.filesystem().get_file_info(folders)
    except OSError:
        return  # Spark may have the store's address and keys.
    # On an object store a folder exists if it contains an object.
    has_table, has_spool, has_notes = (info.type.name != "NotFound" for info in infos)
    if not (has_table or has_spool):
        if has_notes:
            raise LedgerError(f"no task has written to the ledger {path} yet", path=path)
        raise LedgerError(f"there is no ledger in {path}: check the path", path=path)
