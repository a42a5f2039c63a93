"""`rocket-sink tune`: latency options that fit the sends which a ledger has recorded."""

from __future__ import annotations

from functools import partial
from typing import Any

import click

from rocket_sink.commands.common.base import Command, count_option, json_option
from rocket_sink.commands.common.ledger_input import open_ledger, quick_ledger, scoped_ledger
from rocket_sink.commands.common.output import Bar, print_if_json, show
from rocket_sink.commands.common.sink_input import given_options, sink_options
from rocket_sink.commands.common.spark_input import spark_options
from rocket_sink.ledger.sql import Scope
from rocket_sink.ledger.tune import suggest
from rocket_sink.ledger.views import reader
from rocket_sink.options import SinkOptions


@click.command(
    cls=Command,
    example="""
    rocket-sink tune ledger/
    rocket-sink tune ledger/ --since 2h --conf rocket-sink.conf
    rocket-sink tune ledger/ --json | jq .options""",
)
@scoped_ledger
@sink_options()
@count_option("--attempts", "limit", default=200_000, help="Attempts to replay, the newest ones.")
@spark_options
@json_option
def tune(path: str, scope: Scope, limit: int, **spark: Any) -> None:
    """Suggest latency options by what a ledger has recorded.

    Replays the recorded sends with other latency classes. Compares isolations, messages that would
    have gone to another broker, and latencies. It cannot know how slow a broker would have been for
    requests that were kept away from it. Give the query's options by --conf or -O: the ledger does
    not have them, and the defaults are taken for the others.
    """
    options = SinkOptions.parse(given_options())
    quick = quick_ledger(path, *spark.values())
    with Bar("replaying", len(suggest.profiles())) as bar:
        run = partial(
            suggest.tune, scope=scope, options=options, limit=limit, progress=bar.advance_to
        )
        if quick:
            suggestions = run(quick.query, quick.path)
        else:
            with open_ledger("tune", path, **spark) as (session, ledger):
                suggestions = run(reader(ledger.rows(session)), ledger.path)
    if not print_if_json(suggestions.as_dict()):
        show(suggestions)
