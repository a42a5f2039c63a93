"""`rocket-sink verify`: compare a topic's messages with a ledger, or with the keys of a table."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from shlex import quote
from typing import Any, Final

import click

from rocket_sink.commands.common.base import Command, json_option
from rocket_sink.commands.common.ledger_input import open_ledger, quick_ledger
from rocket_sink.commands.common.output import line, note, print_if_json, show, table
from rocket_sink.commands.common.sink_input import resolved_options, sink_options
from rocket_sink.commands.common.spark_input import spark_options
from rocket_sink.errors import LedgerError, MissingPackageError
from rocket_sink.ledger.query.verify import EXAMPLES, StoredPlaces, Verification, sent_topics
from rocket_sink.ledger.sql import Query, Scope, with_full_id
from rocket_sink.ledger.views import reader
from rocket_sink.producer.admin.admin import Admin
from rocket_sink.text import clean, counted

_FIGURES: Final = (
    "acknowledged", "found", "missing", "twice", "not_due", "expired", "unacknowledged", "foreign",
)  # fmt: skip
_MEANING: Final = {
    "acknowledged": "rows that the ledger says are stored",
    "found": "messages at their places",
    "missing": "messages that the topic does not have",
    "twice": "further copies of messages that were found",
    "not_due": "delayed messages that wait at their brokers",
    "expired": "messages of a part that retention has deleted",
    "unacknowledged": "messages of the ledger's queries without an answer that counts",
    "foreign": "messages of other producers",
}
_OF_TABLE: Final = {
    "acknowledged": "rows of the table", "found": "messages with their keys",
    "missing": "rows without a message", "twice": "more messages than rows have their key",
    "foreign": "messages whose key no row has",
}  # fmt: skip


@click.command(
    cls=Command,
    example="""
    rocket-sink verify --ledger ledger/ -n 127.0.0.1:9876 -t flights
    rocket-sink verify -t orders --path orders.parquet --key order_id""",
)
@sink_options("nameServer", "topic", "ledger")
@click.option("--query", metavar="ID", help="Only rows of this query (the start of its id).")
@click.option("--path", metavar="FILES", help="Parquet, CSV or JSON files to compare keys with.")
@click.option("--key", metavar="COLUMN", help="The column of --path that messages have as key.")
@spark_options
@json_option
def verify(query: str | None, path: str | None, key: str | None, **spark: Any) -> int:
    """Check that each acknowledged message is in its topic once.

    Reads whole topics, by the offsets and ids that the ledger has. Stop the query before, or rows
    that are stored meanwhile count as foreign. Exits 0 only if all adds up.
    """
    options = resolved_options()
    if bool(path) != bool(key) or bool(path) == bool(options.ledger):
        raise click.UsageError("give --ledger PATH, or --path FILES and --key COLUMN")
    if path and not options.topic:
        raise click.UsageError("which topic? give --topic NAME")
    from importlib.util import find_spec

    if find_spec("duckdb") is None:
        raise MissingPackageError(
            "verify needs DuckDB: pip install 'rocket-sink[fast]'", package="duckdb"
        )
    with Admin(options) as admin:
        if path and key:
            topic = options.topic
            results = [_compare_topic(admin, topic, lambda own: own.compare_keys(topic, path, key))]
        else:
            results = _of_ledger(admin, options.ledger, options.topic, query, spark)
    if not print_if_json([{**asdict(result), "adds_up": result.adds_up} for result in results]):
        for result in results:
            _show(result, _OF_TABLE if path else _MEANING)
    return 0 if all(result.adds_up for result in results) else 1


def _of_ledger(
    admin: Admin, path: str, topic: str, query_id: str | None, spark: dict[str, Any]
) -> list[Verification]:
    with contextlib.ExitStack() as stack:
        quick = quick_ledger(path, *spark.values())
        if quick is not None:
            if quick.unfolded_epochs:
                raise LedgerError(
                    f"{counted(quick.unfolded_epochs, 'epoch', 'is', 'are')} not folded yet, and "
                    "unfolded rows would count as foreign; run `rocket-sink ledger fold --ledger "
                    f"{quote(clean(path))}` first",
                    path=path,
                )
            query: Query = quick.query
        else:
            session, ledger = stack.enter_context(open_ledger("verify", path, **spark))
            query = reader(ledger.rows(session))

        whole_id = with_full_id(Scope(query_id), query, path).query_id
        topics = [topic] if topic else sent_topics(query)
        if not topics:
            note("the ledger has no stored message: there is nothing to verify")

        def of(name: str) -> Verification:
            hidden = partial(admin.hidden_copies, name, time.time_ns() // 1_000_000)
            return _compare_topic(
                admin, name, lambda places: places.compare(query, name, hidden, whole_id)
            )

        return [of(name) for name in topics]


def _compare_topic(
    admin: Admin, topic: str, compare: Callable[[StoredPlaces], Verification]
) -> Verification:
    """Read the whole topic, and return the result of the comparison."""

    admin.await_dispatched(topic)
    with contextlib.closing(StoredPlaces()) as places:
        for queue in admin.queues(topic):
            least = admin.min_offset(queue)
            places.add(queue.broker_name, queue.queue_id, least, admin.read_queue(queue, least))
        return compare(places)


def _show(result: Verification, meanings: dict[str, str]) -> None:
    rows = [
        (name.replace("_", " "), getattr(result, name), meanings[name])
        for name in _FIGURES
        if name in meanings and (getattr(result, name) or name in _OF_TABLE)
    ]
    show(table(f"topic {clean(result.topic)}", ("", "messages", "what"), rows))
    for name, examples in result.examples.items():
        more = ", ..." if getattr(result, name) > len(examples) >= EXAMPLES else ""
        line(f"{name.replace('_', ' ')}: {', '.join(map(clean, examples))}{more}")
    line("It adds up." if result.adds_up else "It does not add up.")
