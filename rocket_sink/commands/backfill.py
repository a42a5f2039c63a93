"""`rocket-sink backfill` and `jobs/backfill.py`: send dead letters, or a table's rows."""

from __future__ import annotations

import datetime as dt
import os
import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import click

from rocket_sink.commands.common.base import (
    Command,
    count_option,
    json_option,
    pairs_option,
    time_value,
)
from rocket_sink.commands.common.ledger_input import check_exists
from rocket_sink.commands.common.output import (
    Bar,
    note,
    print_if_json,
    rows_table,
    show,
    step,
    table,
)
from rocket_sink.commands.common.sink_input import (
    absolute,
    check_name_server,
    checked_options,
    given_options,
    sink_options,
)
from rocket_sink.commands.common.spark_input import spark_options, spark_session
from rocket_sink.commands.common.stream_run import Source
from rocket_sink.errors import OptionError
from rocket_sink.ledger.schema import REASONS
from rocket_sink.options import SinkOptions

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from rocket_sink.spark.backfill.backfill import Backfill, Plan
    from rocket_sink.spark.backfill.resend import Resent

_SAMPLE: Final = 5
"""Number of dead letters that --dry-run shows."""


@click.command(
    cls=Command,
    example="""
    rocket-sink backfill --ledger ledger/ -n 127.0.0.1:9876 --dry-run
    rocket-sink backfill --ledger ledger/ -n 127.0.0.1:9876 --reason transport --reason held_back
    rocket-sink backfill --ledger ledger/ -n 127.0.0.1:9876 --where "keys[0] = 'AA1'" --since 2d
    rocket-sink backfill --format parquet --path old/ --ledger ledger/ -n 127.0.0.1:9876 \\
      --columns 'body=payload, keys=order_id' --to-topic orders --rate 500""",
)
@sink_options(
    "nameServer", "ledger", "producerGroup", "columns", "maxMessagesPerSecond", "maxBytesPerSecond"
)
@click.option("--path", help="Send the rows of the files or the Delta table there.")
@click.option("--table", "name", metavar="NAME", help="Send the rows of this table of the catalog.")
@click.option(
    "--format", "form", default="delta",
    help="What --path is: delta, parquet, json, csv or another source of Spark.",
)  # fmt: skip
@click.option("--schema", metavar="DDL", help="The files' schema, where they have none.")
@pairs_option("--source-option", help="For --path; repeatable.")
@click.option(
    "--reason",
    "reasons",
    type=click.Choice(REASONS),
    multiple=True,
    help="Only dead letters of this class; repeatable. Default: all but data, which no "
    "broker would take.",
)
@click.option("--only-topic", metavar="TOPIC", help="Only dead letters of this topic.")
@click.option("--where", metavar="SQL", help="Only dead letters (rows) for which this is true.")
@click.option(
    "--since", callback=time_value, metavar="TIME",
    help="Only dead letters from this time (UTC) on, or from 10m ago; rows by their event_time.",
)  # fmt: skip
@click.option("--until", callback=time_value, metavar="TIME", help="Only those before this time.")
@count_option("--limit", metavar="N", help="Only the N oldest.")
@count_option(
    "--max-tries", default=3, metavar="N",
    help="Leave out dead letters that N backfills failed with, and later ones of their keys.",
)  # fmt: skip
@click.option("--again", is_flag=True, help="Also send dead letters that --max-tries leaves out.")
@click.option(
    "--move-keys", is_flag=True,
    help="Send dead letters whose queue's broker is gone to other queues of their topic.",
)  # fmt: skip
@click.option(
    "--no-wait", is_flag=True, help="Give up when another backfill of the ledger is at work."
)
@click.option("--to-topic", metavar="TOPIC", help="Send to this topic instead of their own.")
@click.option("--dry-run", is_flag=True, help="Count, show a sample, send nothing.")
@spark_options
@json_option
def backfill(
    path: str | None, name: str | None, form: str, schema: str | None,
    source_option: dict[str, str], reasons: tuple[str, ...], only_topic: str | None,
    where: str | None, since: dt.datetime | None, until: dt.datetime | None, limit: int | None,
    max_tries: int, again: bool, move_keys: bool, no_wait: bool,
    to_topic: str | None, dry_run: bool, **spark: Any,
) -> int:  # fmt: skip
    """Send the pending dead letters of a ledger again, or the rows of any table, once.

    It sends in order per sharding key and under the same message ids. It notes each stored letter
    in the ledger as it goes, so it may be run twice, or again after it was killed; a second
    backfill waits for the end of the first. Exits 0 only if every selected dead letter is stored,
    or was settled by others meanwhile.

    --path or --table sends rows with the columns of the row contract (docs/reference/columns.md)
    instead; --columns takes them from other names. The ledger remembers the rows that were sent,
    and is made if it is missing. A key's rows go in the order of -O orderBy=COLUMN, else of
    event_time, else of the files.

    --rate and --max-bytes-per-second are divided over the tasks that run at once: -O rateTasks=N,
    else the backfill's tasks, at most Spark's task slots.

    A sharding key stays on its queue: while the queue's broker is in no route, the key's dead
    letters stay pending, and the broker is named (also by --dry-run). If it never comes back,
    --move-keys sends them to other queues; consumers may then see a key's messages out of order.

    A backfill that could not reach the brokers does not count for --max-tries.
    """
    if path and name:
        raise click.UsageError("give --path or --table, not both")
    from_table = bool(path or name)
    if from_table and reasons:
        raise click.UsageError("--reason is for dead letters; choose rows of a table with --where")
    options = _options(to_topic, dry_run=dry_run)
    if not from_table:
        check_exists(options.ledger)
    if not dry_run:
        check_name_server(options)  # Fail before Spark starts.
    with spark_session("backfill", small=dry_run, **spark) as session:
        if not from_table:
            check_exists(options.ledger, session)
        from rocket_sink.spark.backfill.backfill import Backfill
        from rocket_sink.spark.backfill.sources import Selection, Table

        selection = Selection(reasons, only_topic, where, since, until, limit, max_tries, again)
        source = None
        if name:
            source = Table(session.table(name), _full_name(session, name), options)
        elif path:
            path = absolute(path)
            files = Source(form, path, schema, source_option).read(session, streaming=False)
            is_text = form in ("csv", "json", "text", "xml")
            source = Table(files, _real_path(path), options, is_text)
        work = Backfill(
            session, options, selection, source, move_keys=move_keys,
            wait_s=0.0 if no_wait else None,
            on_wait=lambda holder: note(
                f"waits for another backfill of the ledger ({holder}); --no-wait gives up instead"
            ),
        )  # fmt: skip
        if dry_run:
            with step(f"reading the {work.noun}"):
                plan = work.plan(sample=_SAMPLE)
            waiting = work.waiting() if plan.selected and options.name_server else None
            _print_plan(plan, waiting, work.noun)
            return 0
        with work:
            with step(f"reading the {work.noun}"):
                plan = work.plan(sample=0)
            done = _run(work, plan)
    _print_done(plan, done, work.noun)
    return 1 if done.unsettled else 0


def _full_name(session: SparkSession, name: str) -> str:
    """Return a table's name with its catalog and database. A table has several names, and rows that
    were sent under one of them must not be sent again under another."""
    from pyspark.errors import AnalysisException

    try:
        entry = session.catalog.getTable(name)
    except AnalysisException:  # Spark reads parquet.`/data/old` as a table, too.
        return name
    full = ".".join(filter(None, (entry.catalog, *(entry.namespace or ()), entry.name)))
    return full if session.conf.get("spark.sql.caseSensitive") == "true" else full.lower()


def _real_path(path: str) -> str:
    """Return the one name of a path, without links, for the same reason; URIs of stores stay."""
    local = re.sub("^file:/+", "/", path)
    return os.path.realpath(local) if local.startswith("/") else local


def _options(to_topic: str | None, *, dry_run: bool) -> SinkOptions:
    values = given_options()
    if not values.get("ledger"):
        raise OptionError(
            "option ledger is missing: --ledger PATH names it; it has the dead letters, and a "
            "backfill notes there what it has sent",
            option="ledger",
        )
    # Dead letters have their topics: a topic in a configuration file must not change them.
    values.pop("topic", None)
    if to_topic:
        values["topic"] = to_topic
    return SinkOptions.parse(values) if dry_run else checked_options(values)


def _run(work: Backfill, plan: Plan) -> Resent:
    if not plan.selected:
        return work.run(plan.selected)
    with Bar(f"backfill of {plan.selected:,}", plan.selected) as bar:
        done = work.run(
            plan.selected, progress=lambda count: bar.advance_to(min(count, plan.selected))
        )
        bar.advance_to(plan.selected, f"{done.settled:,} stored")
    return done


def _print_plan(plan: Plan, waiting: dict[str, int] | None, what: str) -> None:
    """Print the plan. `waiting` is {broker: its dead letters}; None: no name server answered."""
    if print_if_json({**asdict(plan), "waiting": waiting}):
        return
    note(f"{plan.pending:,} pending {what}, {plan.selected:,} of them selected "
         f"({plan.selected_bytes:,} bytes); nothing sent")  # fmt: skip
    if not plan.selected:
        note(f"  nothing to send{_not_selected(plan, what)}")
    for text in (*_remarks(plan), *_waits(waiting or {})):
        note(f"  {text}")
    if plan.selected and waiting is None:
        note("  which of them wait for a broker is not known: no name server (-n), or no answer")
    if not plan.pending:
        return
    if plan.by_reason:
        show(table("by reason", ("reason", what), plan.by_reason.items()))
    show(table("by topic", ("topic", what), plan.by_topic.items()))
    if plan.sample:
        names = ("topic", "sharding_key", "keys", "reason", "last_error_code", "tries",
                 "body_bytes")  # fmt: skip
        there = [name for name in names if name in plan.sample[0]]
        title = f"the first {len(plan.sample)}"
        show(rows_table(title, there, plan.sample))


def _remarks(plan: Plan) -> list[str]:
    texts = (
        (plan.left_alone, "are left alone: too many backfills failed (--again sends them)"),
        (plan.behind, "wait behind these with the same key (`ledger park` lets them go)"),
        (plan.asked, "may be stored (no answer, or a killed backfill): brokers are asked"),
        (plan.without_body, "have no body and cannot be sent"),
        (plan.without_topic, "have no topic: --to-topic names one"),
    )
    return [f"{count:,} {text}" for count, text in texts if count]


def _waits(waiting: Mapping[str, int]) -> list[str]:
    return [
        f"{count:,} wait for {broker}, which no route names: start it and run this again "
        "(--move-keys sends them to other queues)"
        for broker, count in sorted(waiting.items())
    ]


def _print_done(plan: Plan, done: Resent, what: str) -> None:
    # Other processes may have settled letters since the plan, and the run did not select these. So
    # compare with the number of letters that the run has selected.
    pending = plan.pending - plan.selected + done.unsettled
    handled = done.settled + done.left_out + done.unsettled
    facts = {"pending_before": plan.pending, "selected": plan.selected,
             "left_alone": plan.left_alone, "behind": plan.behind, **done.as_dict(),
             "pending": pending}  # fmt: skip
    if print_if_json(facts):
        return
    if not plan.selected:
        note("nothing to send" + _not_selected(plan, what))
        for text in _remarks(plan):
            note(f"  {text}")
        return
    parts = [f"{done.resent:,} stored"]
    parts += [f"{count:,} {text}" for count, text in (
        (done.degraded, "of these without the durability asked for"),
        (done.found, "found at a broker, stored by an earlier send"),
        (done.failed, "failed"), (done.held_back, "held back behind a failed letter of their key"),
        (done.left_out, "left out, settled since (as by `ledger park`)"),
        (done.not_tried, "not tried, because no broker could be reached"),
        (sum(done.waiting.values()), "left to wait for their broker"),
        (done.moved, "of the stored ones moved to other queues"),
    ) if count]  # fmt: skip
    note(f"{handled:,} {what}: {', '.join(parts)}; {pending:,} pending")
    for text in (*_remarks(plan), *_waits(done.waiting)):
        note(f"  {text}")
    for code, count in done.codes.most_common():
        note(f"  {code}: {count:,}")
    if done.first_error:
        note(f"  first error: {done.first_error}")


def _not_selected(plan: Plan, what: str) -> str:
    if not plan.pending:
        return f": no {what} are pending"
    if plan.left_alone:
        return f": {plan.left_alone:,} have failed too often (--again sends them)"
    data = plan.by_reason.get("data", 0)
    if data == plan.pending:
        return f": the {data:,} pending ones are rows that no broker takes (--reason data tries)"
    return (
        f": none of the {plan.pending:,} pending {what} is what --reason, --only-topic, --where, "
        "--since, --until ask for"
    )
