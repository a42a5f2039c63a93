"""`rocket-sink transactions`: epochs whose half messages the ledger has decided to commit."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import click

from rocket_sink.commands.common.base import Group, count_option, json_lines_option, json_option
from rocket_sink.commands.common.ledger_input import check_exists, fold_and_note, open_ledger
from rocket_sink.commands.common.output import (
    Bar,
    json_printer,
    note,
    print_if_json,
    rows_table,
    show,
)
from rocket_sink.commands.common.sink_input import (
    check_name_server,
    check_topic_name,
    resolved_options,
    sink_options,
)
from rocket_sink.commands.common.spark_input import spark_options
from rocket_sink.errors import OptionError, RocketSinkError
from rocket_sink.ledger.driver.ledger import Ledger
from rocket_sink.ledger.sql import Scope, with_full_id
from rocket_sink.ledger.views import reader
from rocket_sink.options import SinkOptions
from rocket_sink.text import counted

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from rocket_sink.spark.transactions import EndReport, TransactionCommitter

_SHOWN: Final = ("at", "query_id", "epoch", "halves", "committed", "refused", "open", "topics")
_WAIT_S: Final = 60.0
_LOOK_S: Final = 10.0
_UNSEEN: Final = (
    "half messages of attempts that failed are in no ledger: nobody commits them, and their "
    "brokers drop them after transactionCheckMax questions, or when a query or `rocket-sink "
    "transactions serve` answers"
)


@click.group(cls=Group)
def transactions() -> None:
    """List and settle open transactions of a ledger, and answer for them.

    With delivery=transactional, a transaction is an epoch of a query. The epoch's append to the
    ledger decides that its half messages are committed; then the query commits them. In between the
    transaction is open. It stays open if the driver was killed, until the next start of the query
    settles it.
    """


@transactions.command(
    "list",
    example="""
    rocket-sink transactions list --ledger ledger/
    rocket-sink transactions list --ledger ledger/ --all --json""",
)
@click.option("--ledger", "-l", "path", required=True, metavar="PATH", help="The ledger's folder.")
@click.option("--all", "everything", is_flag=True, help="Also those that are ended.")
@count_option("--limit", default=50,
              help="Rows, the newest first.")  # fmt: skip
@spark_options
@json_lines_option("One JSON object per transaction.")
def list_transactions(path: str, everything: bool, limit: int, **spark: Any) -> None:
    """Show the transactions that are open."""
    with open_ledger("transactions list", path, **spark) as (session, ledger):
        fold_and_note(ledger, session)
        frame = ledger.transactions(session, pending=not everything)
        rows = [row.asDict() for row in frame.orderBy("at", ascending=False).head(limit)]
    if printer := json_printer():
        for row in rows:
            printer(row)
        return
    if rows:
        show(rows_table("transactions", _SHOWN, rows))
    else:
        note("no transaction is open" if not everything else "there are no transactions")
    note(_UNSEEN)


@transactions.command(
    example="""
    rocket-sink transactions settle --ledger ledger/ -n 127.0.0.1:9876 --dry-run
    rocket-sink transactions settle --ledger ledger/ -n 127.0.0.1:9876 --query 5b2f..."""
)
@sink_options("nameServer", "ledger")
@click.option("--query", metavar="ID", help="Only of this query (the start of its id).")
@click.option(
    "--refused",
    is_flag=True,
    help="Also those with messages that brokers did not have, as in a wrong cluster.",
)
@click.option("--dry-run", is_flag=True, help="Say what is open, commit nothing.")
@spark_options
@json_option
def settle(query: str | None, refused: bool, dry_run: bool, **spark: Any) -> int:
    """Commit the half messages of open transactions, in order.

    It first asks the brokers which messages are visible already, so it may be run twice, and beside
    the query. Give it the namespace and the credentials of the query. Exits 0 if all chosen
    transactions are settled, and none has lost a message.
    """
    with _open_session("settle", asks=not dry_run, **spark) as (session, options):
        from rocket_sink.spark.transactions import TransactionCommitter

        ledger = Ledger(options.ledger)
        whole_id = with_full_id(Scope(query), reader(ledger.rows(session)), ledger.uri).query_id
        committer = TransactionCommitter(session, options, ordered=True)
        epochs = committer.open_epochs(refused=refused)
        rows = [row for row in epochs if whole_id in (None, row.query_id)]
        if dry_run:
            _print_plan(rows)
            return 0
        if not rows:
            note("no transaction is open")
            done = []
        else:
            with Bar(f"settle {len(rows):,} transactions", sum(row.halves for row in rows)) as bar:
                done = settle_in_order(committer, rows, bar)
    print_if_json([outcome.as_dict() for outcome in done])
    return 0 if all(outcome.is_good for outcome in done) else 1


@transactions.command(
    example="""
    rocket-sink transactions serve --ledger ledger/ -n 127.0.0.1:9876 --topic flights
    rocket-sink transactions serve --ledger ledger/ -n 127.0.0.1:9876 --json"""
)
@sink_options("nameServer", "ledger")
@click.option("--topic", "-t", "topics", multiple=True, metavar="TOPIC",
              help="Answer this topic's brokers, too; repeatable.")  # fmt: skip
@click.option("--for", "seconds", type=click.FloatRange(0), metavar="SECONDS",
              help="End after so long instead of running until it is stopped.")  # fmt: skip
@spark_options
@json_lines_option("One JSON object per answer.")
def serve(topics: tuple[str, ...], seconds: float | None, **spark: Any) -> None:
    """Answer what brokers ask about half messages, as the drivers of running queries do.

    Use it for ledgers whose queries are down: it rolls back half messages, or settles their
    transactions, before the queries are started again. Any number may run, beside the queries.
    """
    for topic in topics:
        check_topic_name(topic)

    printer = json_printer()  # The checker's thread has no command.

    def on_decision(mark: Any, message_id: str, state: Any) -> None:
        answer = {
            "query_id": mark.query_id, "epoch": mark.epoch, "message_id": message_id,
            "answer": state.name,
        }  # fmt: skip
        if printer:
            printer(answer)
        else:
            note(" ".join(f"{name}={value}" for name, value in answer.items()))

    def on_end(report: EndReport) -> None:
        note(_text(Settled(report)))

    with _open_session("serve", **spark) as (session, options):
        from rocket_sink.spark.transactions import TransactionChecker

        checker = TransactionChecker(
            session, options, on_decision=on_decision, on_end=on_end, ordered=True
        )
        until_s = math.inf if seconds is None else time.monotonic() + seconds
        with contextlib.closing(checker):
            note(f"answering for {options.ledger}; Ctrl-C ends it")
            while time.monotonic() < until_s:
                transactions = Ledger(options.ledger).transactions(session)
                topic_rows = transactions.select("topics").distinct().collect()
                checker.watch(*topics, *(topic for row in topic_rows for topic in row.topics))
                time.sleep(max(0.0, min(until_s - time.monotonic(), _LOOK_S)))


@dataclass(frozen=True)
class Settled:
    """The result of one transaction; `failure` is the text of the error that kept it open."""

    report: EndReport
    failure: str = ""

    @property
    def error(self) -> str:
        """The reason why the transaction stays open; empty if it was settled."""
        busy = "another process is ending transactions of the ledger" if self.report.busy else ""
        return self.failure or busy

    @property
    def is_good(self) -> bool:
        return not self.error and not self.report.refused

    def as_dict(self) -> dict[str, Any]:
        report = self.report
        return {
            "query_id": report.query_id, "epoch": report.epoch, "committed": report.committed,
            "found_visible": report.found_stored, "refused": report.refused,
            "error": self.error or None,
        }  # fmt: skip


def settle_in_order(
    committer: TransactionCommitter, rows: Sequence[Any], bar: Bar
) -> list[Settled]:
    """Settle the transactions one by one; after a failure skip the later ones of the same query."""
    from rocket_sink.spark.transactions import EndReport

    done: list[Settled] = []
    before = 0
    failed: set[str] = set()

    def advance(count: int, total: int) -> None:
        bar.advance_to(before + count)

    for row in rows:
        report, failure = EndReport(row.query_id, row.epoch), ""
        if row.query_id in failed:
            failure = "an earlier epoch of its query is open"
        else:
            try:
                report = committer.end(
                    row.query_id, row.epoch, wait_s=_WAIT_S, again=not row.open, progress=advance
                )
            except RocketSinkError as error:
                failure = error.text
        outcome = Settled(report, failure)
        if outcome.error:
            failed.add(row.query_id)
        before += row.halves
        bar.advance_to(before)
        bar.say(_text(outcome))
        done.append(outcome)
    return done


def _text(outcome: Settled) -> str:
    report = outcome.report
    name = f"query {report.query_id} epoch {report.epoch}"
    if outcome.error:
        return f"{name} stays open: {outcome.error}"
    text = f"{name}: {counted(report.committed, 'message', 'is', 'are')} visible"
    if report.found_stored:
        text += f", {report.found_stored:,} were before"
    if report.refused:
        text += f"; {report.refused:,} are not at their brokers: lost, or of another cluster"
    return text


def _print_plan(rows: Sequence[Any]) -> None:
    if print_if_json([row.asDict() for row in rows]):
        return
    messages = sum(row.halves for row in rows)
    note(
        f"{counted(len(rows), 'transaction')} of {counted(messages, 'message')} "
        f"{'is' if len(rows) == 1 else 'are'} open; nothing committed"
    )
    if rows:
        names = ("at", "query_id", "epoch", "halves", "topics")
        show(rows_table("open", names, rows))


@contextlib.contextmanager
def _open_session(
    name: str, *, asks: bool = True, **spark: Any
) -> Iterator[tuple[SparkSession, SinkOptions]]:
    """Open a session for the ledger; with `asks`, check that a name server answers."""
    options = resolved_options()
    if not options.ledger:
        raise OptionError("which ledger? give --ledger PATH", option="ledger")
    check_exists(options.ledger)
    if asks:
        check_name_server(options)  # Fail before Spark starts.
    with open_ledger(f"transactions {name}", options.ledger, **spark) as (session, _):
        yield session, options
