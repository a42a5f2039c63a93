"""`rocket-sink report` and `jobs/report.py`: the ledger's figures."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import click

from rocket_sink.commands.base import Command
from rocket_sink.commands.ledger import check_there
from rocket_sink.commands.output import note, print_json, show
from rocket_sink.commands.sink_input import absolute
from rocket_sink.commands.spark_input import spark_options, spark_session
from rocket_sink.commands.times import time_value


@click.command(
    cls=Command,
    example="""
    rocket-sink report --ledger ledger/
    rocket-sink report --ledger ledger/ --since 2h --html report.html
    rocket-sink report --ledger ledger/ --json | jq .totals""",
)
@click.option("--ledger", "-l", "path", required=True, metavar="PATH", help="The ledger's folder.")
@click.option("--query", metavar="ID", help="Only this streaming query.")
@click.option(
    "--since",
    callback=time_value,
    metavar="TIME",
    help="From this time on: 2026-01-31T12:00 (UTC), or 90m ago.",
)
@click.option("--until", callback=time_value, metavar="TIME", help="Up to this time.")
@click.option(
    "--epochs",
    type=click.IntRange(1),
    default=20,
    show_default=True,
    help="Epochs to list, the last ones.",
)
@click.option(
    "--html",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Also write the report to this file.",
)
@spark_options
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def report(
    path: str, query: str | None, since: dt.datetime | None, until: dt.datetime | None,
    epochs: int, html: Path | None, master: str | None, spark_conf: tuple[str, ...],
    packages: tuple[str, ...], as_json: bool,
) -> None:  # fmt: skip
    """Show what a ledger says about sends, failures and brokers."""
    from rocket_sink.ledger.ledger import Ledger

    ledger = Ledger(absolute(path))
    check_there(ledger.path)
    with spark_session(
        "report", master=master, spark_conf=spark_conf, packages=packages, small=True
    ) as spark:
        from rocket_sink.ledger.render import to_html
        from rocket_sink.ledger.report import Scope, build_report

        ledger.sync(spark)
        found = build_report(spark, ledger, Scope(query, since, until), epochs=epochs)
    if html:
        html.write_text(to_html(found), encoding="utf-8")
        note(f"written to {html}")
    if as_json:
        print_json(found.as_dict())
    else:
        show(found)
