"""`rocket-sink report` and `jobs/report.py`: the ledger's figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from rocket_sink.commands.common.base import Command, count_option, json_option
from rocket_sink.commands.common.ledger_input import (
    fold_and_note,
    fold_option,
    open_ledger,
    quick_ledger,
    scoped_ledger,
)
from rocket_sink.commands.common.output import check_writable, print_if_json, show, write_file
from rocket_sink.commands.common.sink_input import group_option, resolved_options, sink_options
from rocket_sink.commands.common.spark_input import spark_options
from rocket_sink.ledger.report import Scope, figures, to_html


@click.command(
    cls=Command,
    example="""
    rocket-sink report --ledger ledger/
    rocket-sink report --ledger ledger/ --since 2h --html report.html
    rocket-sink report --ledger ledger/ --group billing -n 127.0.0.1:9876
    rocket-sink report --ledger ledger/ --json | jq .totals""",
)
@scoped_ledger
@count_option("--epochs", default=20, help="Epochs to list, the last ones.")
@click.option(
    "--html",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Also write the report as a page with charts: one file, to be read offline.",
)
@group_option
@sink_options("nameServer")
@fold_option
@spark_options
@json_option
def report(
    path: str, scope: Scope, epochs: int, html: Path | None, group: str, fold: bool, **spark: Any
) -> None:
    """Show what a ledger says about sends, failures and brokers."""
    if html:
        check_writable(html)
    options = resolved_options() if group else None
    if quick := quick_ledger(path, fold, *spark.values()):
        ledger_report = figures(quick.query, quick.path, scope, epochs=epochs,
                                unfolded_epochs=quick.unfolded_epochs,
                                unfolded_letters=quick.unfolded_letters,
                                quarantined_files=quick.quarantined_files,
                                series=html is not None, group=group,
                                options=options)  # fmt: skip
    else:
        with open_ledger("report", path, **spark) as (session, ledger):
            fold_and_note(ledger, session)
            ledger_report = ledger.report(
                session, query=scope.query_id, since=scope.since, until=scope.until, epochs=epochs,
                charts=html is not None, group=group, options=options,
            )  # fmt: skip
    if html:
        write_file(html, to_html(ledger_report))
    if not print_if_json(ledger_report.as_dict()):
        show(ledger_report)
