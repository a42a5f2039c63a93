"""`rocket-sink tail`: print a topic's messages, then new ones. It uses no consumer group."""

from __future__ import annotations

import contextlib
import datetime
import heapq
import time
from collections import deque
from collections.abc import Iterator
from itertools import repeat
from typing import Any

import click

from rocket_sink.commands.common.base import Command, count_option, json_lines_option, time_ms
from rocket_sink.commands.common.output import line, print_if_json
from rocket_sink.commands.common.sink_input import resolved_options, sink_options
from rocket_sink.errors import RocketSinkError
from rocket_sink.message import MessageQueue
from rocket_sink.producer.admin.admin import Admin
from rocket_sink.wire.properties import split_keys
from rocket_sink.wire.stored import StoredMessage

_IDLE_S = 0.5
_DISPATCH_S = 3.0
"""Longest wait until brokers have dispatched all messages to their queues. The limit is for steady
traffic, when there is always a message that is not dispatched yet."""


@click.command(
    cls=Command,
    example="""
    rocket-sink tail -n 127.0.0.1:9876 -t flights --last 10 --no-follow
    rocket-sink tail -t flights --from-start --json | jq .body""",
)
@sink_options("nameServer", "topic")
@click.option("--from-start", is_flag=True, help="Begin with the oldest stored message.")
@click.option(
    "--since",
    "since_ms",
    callback=time_ms,
    metavar="TIME",
    help="Begin at a time (UTC), or 10m ago.",
)
@click.option(
    "--last", type=click.IntRange(0), metavar="N", help="Begin with the newest N messages."
)
@click.option("--follow/--no-follow", default=True, help="Wait for new messages.")
@count_option("--limit", metavar="N", help="Stop after N messages.")
@click.option("--key", help="Only messages that have this key.")
@click.option("--tag", help="Only messages with this tag.")
@json_lines_option("One JSON object per message.")
def tail(
    from_start: bool,
    since_ms: int | None,
    last: int | None,
    follow: bool,
    limit: int | None,
    key: str | None,
    tag: str | None,
) -> None:
    """Print the messages of a topic, and wait for new ones.

    Times are UTC. Ctrl-C ends it. No consumer group is used and no offset is stored: consumers do
    not notice.
    """

    options = resolved_options()
    if not options.topic:
        raise click.UsageError("which topic? give --topic NAME")
    if sum((from_start, since_ms is not None, last is not None)) > 1:
        raise click.UsageError("give one of --from-start, --since, --last")
    shown = 0
    with Admin(options) as admin:
        if not follow:
            # Messages that were acknowledged just now must be included.
            admin.await_dispatched(options.topic, _DISPATCH_S)
        offsets = {
            queue: _first_offset(admin, queue, from_start, since_ms, last)
            for queue in admin.queues(options.topic)
        }
        for queue, message in _messages(admin, offsets, last, follow=follow):
            # Brokers before 5.2 return the newest message's offset for any later time.
            if (
                (since_ms is None or message.store_ms >= since_ms)
                and (tag is None or message.properties.get("TAGS") == tag)
                and (key is None or key in split_keys(message.properties))
            ):
                _print(queue, message)
                shown += 1
            if limit is not None and shown >= limit:
                return


def _first_offset(
    admin: Admin, queue: MessageQueue, from_start: bool, since_ms: int | None, last: int | None
) -> int:
    if since_ms is not None:
        return admin.offset_by_time(queue, since_ms)
    if from_start:
        return admin.min_offset(queue)
    newest = admin.max_offset(queue)
    return newest if not last else max(newest - last, admin.min_offset(queue))


def _messages(
    admin: Admin, offsets: dict[MessageQueue, int], last: int | None, *, follow: bool
) -> Iterator[tuple[MessageQueue, StoredMessage]]:
    """Yield stored messages, or the `last` ones, by time; then, with `follow`, new messages."""
    ends = {queue: admin.max_offset(queue) for queue in offsets}
    stored = (
        zip(repeat(queue), admin.read_queue(queue, offset, ends[queue]))
        for queue, offset in offsets.items()
    )
    merged = heapq.merge(*stored, key=_stored_ms)
    yield from merged if last is None else deque(merged, last)
    offsets = {queue: max(offset, ends[queue]) for queue, offset in offsets.items()}
    asked_s, every_s = time.monotonic(), admin.options.poll_name_server_interval_ms / 1000
    while follow:
        arrived: list[tuple[MessageQueue, StoredMessage]] = []
        if time.monotonic() - asked_s >= every_s:
            asked_s = time.monotonic()
            with contextlib.suppress(RocketSinkError):  # Go on with the known queues.
                # Read new queues from their beginning: a broker may create a topic when the
                # topic's first message arrives, and that message must be printed, too.
                for queue in set(admin.queues(admin.options.topic)) - offsets.keys():
                    offsets[queue] = admin.min_offset(queue)
        for queue, offset in offsets.items():
            messages, offsets[queue] = admin.pull(queue, offset)
            arrived += [(queue, message) for message in messages]
        yield from sorted(arrived, key=_stored_ms)
        if not arrived:
            time.sleep(_IDLE_S)


def _stored_ms(pair: tuple[MessageQueue, StoredMessage]) -> int:
    return pair[1].store_ms


def _print(queue: MessageQueue, message: StoredMessage) -> None:
    row = message_row(queue, message)
    if print_if_json(row):
        return
    marks = "  ".join(
        f"{name}={row[name]}" for name in ("tags", "keys", "shardingKey") if row[name]
    )
    stored = datetime.datetime.fromtimestamp(row["storedMs"] / 1000, datetime.timezone.utc)
    when = stored.strftime("%H:%M:%S.%f")[:-3]
    line(f"{when}  {row['broker']}:{row['queueId']} @{row['queueOffset']}  {marks}  {row['body']}")


def message_row(queue: MessageQueue, message: StoredMessage) -> dict[str, Any]:
    """Return a stored message for JSON; a body that is not UTF-8 is escaped."""
    properties = dict(message.properties)
    return {
        "topic": message.topic,
        "broker": queue.broker_name,
        "queueId": message.queue_id,
        "queueOffset": message.queue_offset,
        "storedMs": message.store_ms,
        "bornMs": message.born_ms,
        "messageId": properties.pop("UNIQ_KEY", None),
        "tags": properties.pop("TAGS", None),
        "keys": properties.pop("KEYS", None),
        "shardingKey": properties.pop("__SHARDINGKEY", None),
        "properties": properties,
        "body": bytes(message.body).decode("utf-8", "backslashreplace"),
    }
