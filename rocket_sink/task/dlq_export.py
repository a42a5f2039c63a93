"""Export of consumer groups' dead letters from RocketMQ, into a ledger's spool or into a file.

The ledger's next fold, or backfill, moves the spool into the table. A dead letter's id is its
group, its offset message id and its store time, so the ledger shows a dead letter once, even after
several exports. A broker that was restored from a backup, or made anew at its address, gives offset
message ids a second time, but to messages that it stores at another time."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from rocket_sink.errors import ConfigurationError
from rocket_sink.ledger.records import RunContext, dead_letter_rows
from rocket_sink.ledger.transport.spool import SpoolWriter
from rocket_sink.producer.admin.dlq import DeadLetter
from rocket_sink.rows.stored_rows import STORED_SCHEMA, stored_batch
from rocket_sink.text import json_text
from rocket_sink.wire.stored import memory_bytes

_ROWS: Final = 1000
_CHUNK_BYTES: Final = 16 << 20
_KEPT: Final = ("body", "tags", "keys", "sharding_key", "properties", "flag", "message_id",
                "event_time")  # fmt: skip
CODE: Final = "CONSUMER_GAVE_UP"


def to_ledger(letters: Iterable[DeadLetter], ledger: str) -> int:
    """Write the dead letters, for their origin topics, into the ledger at this path, which need not
    exist yet; return their number. Raise a LedgerError if the ledger cannot be written."""
    run_id = f"dlq-{uuid.uuid4()}"
    ctx = RunContext(run_id, run_id, 0, lane="export")
    spool = SpoolWriter(ledger, ctx)
    count = 0
    try:
        for chunk in _chunks(letters):
            spool.append(*dead_letter_rows(_columns(chunk), ctx, first_ordinal=count))
            count += len(chunk)
        spool.seal()
    except BaseException:
        spool.abort()
        raise
    return count


def to_file(letters: Iterable[DeadLetter], path: Path) -> int:
    """Write the messages as `.parquet`, or as `.json` with an object per line; return their number.
    Raise a ConfigurationError for another suffix."""
    count = 0
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        with pq.ParquetWriter(path, STORED_SCHEMA) as parquet:
            for chunk in _chunks(letters):
                parquet.write_batch(_stored_rows(chunk))
                count += len(chunk)
    elif path.suffix in (".json", ".jsonl"):
        with path.open("w", encoding="utf-8") as file:
            for letter in letters:
                file.write(json_text(row(letter)) + "\n")
                count += 1
    else:
        raise ConfigurationError(
            f"the kind of the file {path.name} is not known: name it FILE.parquet or FILE.json"
        )
    return count


def row(letter: DeadLetter) -> dict[str, Any]:
    """Return the dead letter for JSON; bytes of the body that are not UTF-8 are escaped."""
    message = letter.message
    return {
        "group": letter.group,
        "topic": letter.origin_topic,
        "message_id": letter.message_id,
        "keys": list(letter.keys),
        "tags": message.properties.get("TAGS"),
        "given_up_ms": message.store_ms,
        "reconsume_times": message.reconsume_times,
        "resends": letter.resends,
        "broker": letter.broker_name,
        "queue_offset": message.queue_offset,
        "offset_message_id": message.offset_message_id,
        "properties": dict(message.properties),
        "body": bytes(message.body).decode("utf-8", "backslashreplace"),
    }


def _columns(chunk: list[DeadLetter]) -> dict[str, Any]:
    stored = _stored_rows(chunk)
    text = [f"the consumer group {letter.group} gave it up after "
            f"{letter.message.reconsume_times} times" for letter in chunk]  # fmt: skip
    ids = [f"dlq-{c.group}-{c.message.offset_message_id}-{c.message.store_ms}" for c in chunk]
    return {
        **{name: stored[name] for name in _KEPT},
        "topic": pa.array([letter.origin_topic for letter in chunk], pa.string()),
        "message_id": pa.array([letter.message_id for letter in chunk], pa.string()),
        "letter_id": pa.array(ids, pa.string()),
        "at": stored["store_timestamp"],
        "reason": "consumer",
        "outcome": "acked",
        "last_broker_name": stored["broker_name"],
        "attempts": pa.array([letter.message.reconsume_times for letter in chunk], pa.int64()),
        "first_error_code": CODE,
        "last_error_code": CODE,
        "last_error": pa.array(text),
    }


def _stored_rows(chunk: list[DeadLetter]) -> pa.RecordBatch:
    return stored_batch([(letter.broker_name, letter.message) for letter in chunk])


def _chunks(letters: Iterable[DeadLetter]) -> Iterator[list[DeadLetter]]:
    chunk: list[DeadLetter] = []
    size = 0
    for letter in letters:
        chunk.append(letter)
        size += memory_bytes(letter.message)
        if len(chunk) >= _ROWS or size >= _CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk
