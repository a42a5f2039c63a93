"""`rocket-sink dlq`: the dead-letter topics of consumer groups (`%DLQ%group`). No Spark needed."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from rocket_sink.commands.common.base import (
    Group,
    count_option,
    json_lines_option,
    json_option,
    time_ms,
    together,
)
from rocket_sink.commands.common.output import (
    check_writable,
    json_printer,
    note,
    print_if_json,
    show,
    table,
)
from rocket_sink.commands.common.sink_input import absolute, resolved_options, sink_options
from rocket_sink.producer.admin import dlq as dead_letters
from rocket_sink.producer.admin.admin import Admin
from rocket_sink.producer.admin.dlq import DeadLetter, ResendReport
from rocket_sink.producer.producer import Producer
from rocket_sink.task.dlq_export import row, to_file, to_ledger
from rocket_sink.text import counted

_FAILED = ("message id", "topic", "code", "error")
_SHOWN = ("given up", "topic", "keys", "times", "resends", "message id", "body")


_selection = together(
    click.option("--topic", "-t", metavar="TOPIC", help="Only messages of this origin topic."),
    click.option("--since", "since_ms", callback=time_ms, metavar="TIME",
                 help="Given up at or after this time (UTC), or since 10m ago."),
    click.option("--until", "until_ms", callback=time_ms, metavar="TIME",
                 help="Given up before then."),
    click.option("--key", help="Only messages that have this key."),
    click.option("--message-id", metavar="ID", help="This client id or offset id only."),
    count_option("--limit", metavar="N", help="Only the N oldest."),
)  # fmt: skip
"""The options that select messages of a group: the fields of `DlqQuery`."""
_group = click.option("--group", "-g", required=True, help="The consumer group.")


@click.group(cls=Group)
def dlq() -> None:
    """Look into the dead letters of consumer groups, export them, send them again.

    A broker puts a message into the topic %DLQ%GROUP when a consumer group has failed with it as
    often as it may. Reading leaves no trace: no group is used and no offset is stored.
    """


@dlq.command(
    "list",
    example="""
    rocket-sink dlq list -n 127.0.0.1:9876
    rocket-sink dlq list -n 127.0.0.1:9876 --group billing --since 1d --json""",
)
@sink_options("nameServer")
@click.option("--group", "-g", help="The consumer group; without it, all groups are counted.")
@_selection
@json_lines_option("One JSON object per message (or group).")
def list_letters(group: str | None, **selection: Any) -> None:
    """Show a group's dead letters, the oldest first, or count those of all groups."""
    if group is None and set(selection.values()) != {None}:
        raise click.UsageError("these options choose among the messages of a group: give --group")

    with Admin(resolved_options()) as admin:
        if group is None:
            _print_groups(dead_letters.groups(admin))
            return
        letters = dead_letters.read(admin, dead_letters.DlqQuery(group, **selection))
        rows = (row(dead_letter) for dead_letter in letters)
        if printer := json_printer():
            for letter in rows:
                printer(letter)
            return
        shown = [_cells(letter) for letter in rows]
    if not shown:
        note("no dead letter is selected")
        return
    show(table(f"dead letters of {group}", _SHOWN, shown))


@dlq.command(
    example="""
    rocket-sink dlq export -n 127.0.0.1:9876 --group billing --ledger ledger/
    rocket-sink dlq export -n 127.0.0.1:9876 --group billing --out billing.parquet"""
)
@sink_options("nameServer")
@_group
@_selection
@click.option("--ledger", "-l", metavar="PATH", help="As dead letters into this ledger.")
@click.option("--out", metavar="FILE", help="Into this file, .parquet or .json (lines).")
@json_option
def export(group: str, ledger: str | None, out: str | None, **selection: Any) -> None:
    """Copy a group's dead letters into a ledger or a file; they stay where they are.

    In a ledger they are dead letters of their origin topics with the reason "consumer", which
    rocket-sink backfill sends. Exporting twice makes no second dead letter.
    """
    if bool(ledger) == bool(out):
        raise click.UsageError("where to? give --ledger PATH or --out FILE")
    if out:
        check_writable(Path(out))

    with Admin(resolved_options()) as admin:
        letters = dead_letters.read(admin, dead_letters.DlqQuery(group, **selection))
        count = to_ledger(letters, absolute(ledger)) if ledger else to_file(letters, Path(str(out)))
    if not print_if_json({"exported": count, "to": ledger or out}):
        note(f"{counted(count, 'dead letter')} of {group} exported to {ledger or out}")


@dlq.command(
    example="""
    rocket-sink dlq resend -n 127.0.0.1:9876 --group billing --dry-run
    rocket-sink dlq resend -n 127.0.0.1:9876 --group billing --topic orders --rate 50"""
)
@sink_options("nameServer", "maxMessagesPerSecond", "maxBytesPerSecond")
@_group
@_selection
@click.option("--to-topic", metavar="TOPIC", help="Send to this topic instead of the origin.")
@count_option("--max-resends", default=3, metavar="N",
              help="Leave messages alone that were sent again N times before.")  # fmt: skip
@click.option("--again", is_flag=True, help="Also these, and those that have been sent already.")
@click.option("--dry-run", is_flag=True, help="Count by topic, send nothing.")
@json_option
def resend(
    group: str, to_topic: str | None, max_resends: int, again: bool, dry_run: bool,
    **selection: Any,
) -> int:  # fmt: skip
    """Send a group's dead letters to the topics they came from.

    They keep bodies, keys, tags, sharding keys, user properties, ids and the order in which they
    were given up. The property ROCKET_SINK_RESENDS counts the resends of a message. This may be run
    again after it has ended: a message is skipped if the topic already has its copy with a higher
    count. Two runs at the same time do not see each other's copies, and send messages twice. All
    groups that consume the topic get the message. Exits 0 if nothing failed. The letters that
    failed are named (1,000 at most), with --json under `failures`.
    """

    options = resolved_options()
    with Admin(options) as admin:
        letters = dead_letters.read(admin, dead_letters.DlqQuery(group, **selection))
        if dry_run:
            _print_plan(letters, to_topic)
            return 0
        with Producer(options) as producer:
            work = dead_letters.Resender(
                admin, producer.send, to_topic=to_topic, max_resends=max_resends, again=again
            )
            for dead_letter in letters:
                work.resend(dead_letter)
    _print_report(work.report)
    return 0 if work.report.settled else 1


def _print_groups(counts: dict[str, int]) -> None:
    if printer := json_printer():
        for name, count in counts.items():
            printer({"group": name, "letters": count})
    elif counts:
        show(table("", ("group", "letters"), counts.items()))
    else:
        note("no consumer group has a dead-letter topic")


def _cells(letter: dict[str, Any]) -> list[Any]:
    when = dt.datetime.fromtimestamp(letter["given_up_ms"] / 1000, dt.timezone.utc)
    body = letter["body"]
    return [
        when.strftime("%Y-%m-%d %H:%M:%S"), letter["topic"], " ".join(letter["keys"]),
        letter["reconsume_times"], letter["resends"], letter["message_id"],
        body if len(body) <= 40 else body[:37] + "...",
    ]  # fmt: skip


def _print_plan(letters: Iterable[DeadLetter], to_topic: str | None) -> None:
    counts = Counter(to_topic or letter.origin_topic or "(unknown)" for letter in letters)
    if print_if_json({"selected": counts.total(), "by_topic": counts}):
        return
    note(f"{counted(counts.total(), 'dead letter', 'is', 'are')} selected; nothing sent")
    if counts:
        show(table("by topic", ("topic", "letters"), counts.items()))


def _print_report(report: ResendReport) -> None:
    if print_if_json(vars(report)):
        return
    texts = (
        (report.degraded, "of these stored, but not flushed or replicated in time"),
        (report.already, "sent by an earlier resend"),
        (report.left_alone, "left alone: sent again --max-resends times (--again sends them)"),
        (report.homeless, "without the name of their topic (--to-topic gives one)"),
        (report.failed, "failed"),
        (report.held_back, "held back behind a failed letter of their key"),
    )
    note(f"{counted(report.resent, 'dead letter')} sent again")
    for count, text in texts:
        if count:
            note(f"  {count:,} {text}")
    for code, count in report.codes.most_common():
        note(f"  {code}: {count:,}")
    if report.failures:
        show(table("failed", _FAILED, ([*failure.values()] for failure in report.failures)))
    if report.failed > len(report.failures):
        note(f"  {report.failed - len(report.failures):,} more failed")
