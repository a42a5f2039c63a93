"""`rocket-sink send`: send arguments, lines or JSON lines one by one, which keeps their order."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import click

from rocket_sink.commands.common.base import Command, json_lines_option, pairs_option
from rocket_sink.commands.common.output import json_printer, line, note, print_if_json
from rocket_sink.commands.common.sink_input import resolved_options, sink_options
from rocket_sink.errors import MessageError, NameServerUnavailableError, RocketSinkError, SendError
from rocket_sink.message import Message, SendResult
from rocket_sink.options import SinkOptions
from rocket_sink.producer.producer import Producer

_FIELDS = {item.name for item in dataclasses.fields(Message) if item.init} - {"body", "delay_s"}
"""Fields of `Message`: the row contract without the queue, event_time and order_by."""


@click.command(
    cls=Command,
    example="""
    rocket-sink send -n 127.0.0.1:9876 -t flights --tags AA --sharding-key N14228 'take off'
    rocket-sink send -t flights --file bodies.txt
    echo '{"body": "landed", "keys": ["UA1545"]}' | rocket-sink send -t flights --json-lines""",
)
@click.argument("bodies", nargs=-1, metavar="[BODY]...")
@sink_options("nameServer", "topic", "producerGroup")
@click.option("--file", "path", type=click.File("rb"), help="One message per line; - is stdin.")
@click.option(
    "--json-lines",
    is_flag=True,
    help="Lines are objects with the row contract's names: body (or value), topic, tags, keys, "
    "sharding_key, properties, delay_level, delay_ms, delivery_timestamp (ms since 1970), flag, "
    "wait_store, message_id, priority, lite_topic.",
)
@click.option("--tags", help="The messages' tag.")
@click.option("--keys", help="Keys, separated by blanks.")
@click.option(
    "--sharding-key",
    help="Messages with one sharding key go to one queue, in order; "
    "-O ordering=strict: also while its broker is isolated.",
)
@pairs_option("--property", "properties", help="Repeatable.")
@click.option("--delay-level", type=click.IntRange(1, 18), help="Deliver later: level 1 to 18.")
@click.option("--delay-ms", type=click.IntRange(0), help="Deliver so much later (5.x brokers).")
@json_lines_option("One JSON object per message.")
def send(bodies: tuple[str, ...], path: Any, json_lines: bool, **fields: Any) -> int:
    """Send messages from the command line or from standard input.

    Exits 0 only when every message was acknowledged.
    """
    if bodies and path:
        raise click.UsageError("give bodies or --file, not both")
    options = resolved_options()
    if not options.topic and not json_lines:
        raise click.UsageError("name a topic: -t TOPIC (--json-lines takes one from each line)")
    common = _common_fields(fields)
    texts = _texts(bodies, path)
    messages = _from_json(texts, common) if json_lines else ({**common, "body": t} for t in texts)
    sent, failed = _send_all(options, messages)
    if not json_printer():
        note(f"{sent:,} sent" + (f", {failed:,} failed" if failed else ""))
    return 1 if failed else 0


def _texts(bodies: tuple[str, ...], path: Any) -> Iterable[bytes]:
    if bodies:
        return [os.fsencode(body) for body in bodies]  # the bytes that the shell passed
    source = path or sys.stdin.buffer
    if path is None and sys.stdin.isatty():
        note("one message per line; Ctrl-D ends")
    return (line.rstrip(b"\r\n") for line in source)


def _common_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    common = {name: value for name, value in fields.items() if value not in (None, {})}
    if "keys" in common:
        common["keys"] = tuple(common["keys"].split())
    return common


def _from_json(lines: Iterable[bytes], common: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for number, text in enumerate(lines):
        try:
            fields = {**common, **_fields(text)}
        except ValueError as error:
            raise RocketSinkError(
                f"message {number}: {error}; it is not sent, nor what follows it"
            ) from None
        yield fields


def _fields(text: bytes) -> dict[str, Any]:
    """Return a message's fields from JSON; raise ValueError if the text has another form."""
    try:
        row = json.loads(text)
    except ValueError as error:
        raise ValueError(f"a line is not JSON: {error}: {text[:60]!r}") from None
    if not isinstance(row, dict):
        raise ValueError(f"a line is not a JSON object: {text[:60]!r}")
    row = {name: value for name, value in row.items() if value is not None}
    body = row.pop("body", row.pop("value", None))
    if "delivery_timestamp" in row and "delivery_timestamp_ms" not in row:
        row["delivery_timestamp_ms"] = row.pop("delivery_timestamp")
    unknown = row.keys() - _FIELDS
    if unknown:
        raise ValueError(
            f"unknown fields {', '.join(sorted(unknown))}; known are body, "
            + ", ".join(sorted(_FIELDS))
        )
    if isinstance(body, (dict, list)):
        body = json.dumps(body, ensure_ascii=False)
    return {**row, "body": body.encode() if isinstance(body, str) else body}


def _send_all(options: SinkOptions, messages: Iterator[dict[str, Any]]) -> tuple[int, int]:
    sent = failed = 0
    with Producer(options) as producer:
        for number, fields in enumerate(messages):
            topic = options.topic or fields.get("topic", "")
            try:
                result = producer.send(Message(**{**fields, "topic": topic}))
                sent += 1
                _show_result(number, result)
            except (MessageError, SendError) as error:
                # Stop if no name server has answered yet: every message would fail, slowly.
                at_all = sent or not isinstance(error, NameServerUnavailableError)
                if not at_all and not json_printer():
                    raise
                failed += 1
                _show_failure(number, error)
                if error.fatal or not at_all:
                    break
            except BrokenPipeError:
                note(f"standard output is closed: {sent:,} sent, what follows is not")
                raise
    return sent, failed


def _show_result(number: int, result: SendResult) -> None:
    queue = result.queue
    facts = {
        "number": number, "outcome": result.outcome, "messageId": result.message_id,
        "topic": queue.topic, "broker": queue.broker_name, "queueId": queue.queue_id,
        "queueOffset": result.queue_offset, "attempts": result.attempts,
        "latencyMs": round(result.latency_ms, 3), "maybeDuplicate": result.maybe_duplicate,
    }  # fmt: skip
    if print_if_json(facts):
        return
    repeated = f"  {result.attempts} attempts" if result.attempts > 1 else ""
    line(
        f"{result.outcome.value}  {queue.broker_name} queue {queue.queue_id} offset "
        f"{result.queue_offset}  {result.latency_ms:.1f} ms  {result.message_id}{repeated}"
    )


def _show_failure(number: int, error: RocketSinkError) -> None:
    outcome = getattr(error, "outcome", None)
    facts = {"number": number, "outcome": outcome, "code": error.code, "error": str(error)}
    if not print_if_json(facts):
        note(f"message {number}: {error.code}: {error}")
