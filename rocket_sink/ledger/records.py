"""Builders of ledger rows: plain values in, `pa.RecordBatch`es of `LEDGER_SCHEMA` out.

Dead letters have their own module, `rocket_sink.ledger.dead_letters`, because they come in columns.
"""

from __future__ import annotations

import functools
import os
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from rocket_sink.ledger.schema import (
    EPOCH,
    IN_FLIGHT,
    ISOLATION,
    KINDS,
    LEDGER_SCHEMA,
    RESOLUTION,
    RESOLUTIONS,
    RUN_COLUMNS,
    SEND,
    SEQUENCE,
    TRANSACTION,
    columns_of,
)
from rocket_sink.text import storable

if TYPE_CHECKING:
    from rocket_sink.producer.engine.attempt import AttemptRecord, StoredFrames
    from rocket_sink.routing.fault import Isolation


def worker_name() -> str:
    """`host:pid` of this process."""
    return f"{socket.gethostname()}:{os.getpid()}"


@dataclass(frozen=True)
class RunContext:
    """Who writes: the part of a row that all rows of a task attempt share.

    A driver has no partition and no task. A batch gives its own id as query id and epoch 0.
    """

    query_id: str
    run_id: str
    epoch: int
    partition: int | None = None
    stage_id: int | None = None
    stage_attempt: int | None = None
    task_attempt_id: int | None = None
    attempt_number: int | None = None
    worker: str = field(default_factory=worker_name)
    lane: str = ""


BETWEEN_HALVES: Final = "\x02"
"""In the column `half_messages`. No message id has it: it ends a property on the wire."""


class GroupFacts(NamedTuple):
    """What a send row says of a group of single messages; columns of the ledger."""

    frames: int
    last_message_id: str
    rtt_min_ms: float
    rtt_p50_ms: float
    rtt_p95_ms: float
    rtt_p99_ms: float
    half_messages: str | None

    @classmethod
    def of(cls, stored: StoredFrames, message_ids: pa.Array, *, half: bool) -> GroupFacts:
        """
        Args:
            message_ids: client ids of all messages of the group.
        """
        ids = message_ids.take(pa.array(stored.indices))
        halves = None
        if half:
            brokers_ids = stored.offset_message_ids.astype(str).tolist()
            offsets = stored.queue_offsets.tolist()
            each = zip(brokers_ids, offsets, ids.to_pylist(), strict=True)
            halves = BETWEEN_HALVES.join(f"{broker_id}:{at}:{one}" for broker_id, at, one in each)
        least, p50, p95, p99 = np.percentile(stored.rtt_ms, (0, 50, 95, 99)).tolist()
        last = ids[int(stored.indices.argmax())].as_py()
        return cls(len(stored), last, least, p50, p95, p99, halves)


def send_rows(
    attempts: Sequence[AttemptRecord],
    ctx: RunContext,
    *,
    requests: Sequence[int] | None = None,
    maybe_duplicate: Sequence[bool] | None = None,
    half: Sequence[bool] | None = None,
    groups: Sequence[GroupFacts | None] | None = None,
    secrets: Iterable[str] = (),
) -> pa.RecordBatch:
    """One row per request attempt.

    Args:
        requests: number of the request in its task attempt, per attempt; it joins a row to the
            `in_flight` row written before.
        maybe_duplicate: per attempt, an earlier attempt of its request has no known outcome.
        half: per attempt, it sent a half message.
        groups: per attempt, what it says of a group of single messages.
        secrets: texts that no row may hold.
    """
    secrets = tuple(secrets)
    values: dict[str, Any] = {
        name: [getattr(a, name) for a in attempts]
        for name in (
            "attempt", "topic", "queue_wait_ms", "connect_ms", "rtt_ms", "message_count",
            "body_bytes", "wire_bytes", "response_code", "error_code",
        )
    }  # fmt: skip
    values["at"] = _millis([a.started_ms for a in attempts])
    # A wait that no broker was asked in names none, or only the one that it was for.
    values["broker_name"] = [a.broker_name or None for a in attempts]
    values["broker_address"] = [a.broker_address or None for a in attempts]
    values["queue_id"] = [a.queue_id if a.queue_id >= 0 else None for a in attempts]
    values["outcome"] = [a.outcome.value for a in attempts]
    values["queue_offset"] = [a.queue_offset if a.queue_offset >= 0 else None for a in attempts]
    values["remark"] = [storable(a.remark, secrets=secrets) for a in attempts]
    values["message_id"] = [a.message_id or None for a in attempts]
    # Of a batch the broker names all ids; the first tells the others' place, 33 bytes each.
    values["offset_message_id"] = [a.offset_message_id or None for a in attempts]
    values["request"] = None if requests is None else list(requests)
    values["maybe_duplicate"] = (
        [False] * len(attempts) if maybe_duplicate is None else list(maybe_duplicate)
    )
    values["half"] = half
    if groups is not None and any(groups):
        none = (None,) * len(GroupFacts._fields)
        columns = zip(*(group or none for group in groups), strict=True)
        values |= dict(zip(GroupFacts._fields, map(list, columns), strict=True))
    return build_rows(SEND, len(attempts), values, ctx)


def in_flight_rows(
    requests: Sequence[int],
    ctx: RunContext,
    *,
    topic: str | Sequence[str],
    message_count: Sequence[int],
    body_bytes: Sequence[int],
    message_id: Sequence[str | None] | None = None,
) -> pa.RecordBatch:
    """Rows to append before the answers are awaited, so that a killed worker's sends show up.

    `Ledger.sends` drops each once a row with the same task attempt and request is there; what is
    left is the unknown of attempts that died.
    """
    values: dict[str, Any] = {
        "request": list(requests), "topic": topic, "message_count": list(message_count),
        "body_bytes": list(body_bytes), "message_id": message_id, "outcome": IN_FLIGHT,
    }  # fmt: skip
    return build_rows(SEND, len(requests), values, ctx)


def isolation_rows(
    isolations: Sequence[Isolation],
    ctx: RunContext,
    *,
    now_s: float | None = None,
    now_us: int | None = None,
) -> pa.RecordBatch:
    """One row per isolation.

    Args:
        now_s, now_us: the same moment on the isolations' monotonic clock and on the wall clock
            (microseconds since 1970); by default both are read here.
    """
    now_s = time.monotonic() if now_s is None else now_s
    now_us = time.time_ns() // 1000 if now_us is None else now_us
    offset_us = now_us - now_s * 1e6
    starts = [int(offset_us + i.from_s * 1e6) for i in isolations]
    values: dict[str, Any] = {
        "at": starts,
        "broker_name": [i.broker_name for i in isolations],
        "topic": [i.topic or None for i in isolations],
        "cause": [storable(i.cause) for i in isolations],
        "latency_ms": [float(i.latency_ms) for i in isolations],
        "isolated_from": starts,
        "isolated_until": [int(offset_us + i.until_s * 1e6) for i in isolations],
        "reachable": [i.reachable for i in isolations],
    }
    return build_rows(ISOLATION, len(isolations), values, ctx)


def epoch_row(
    counts: Mapping[str, Any],
    ctx: RunContext,
    *,
    complete: bool,
    duration_ms: float | None = None,
    secrets: Iterable[str] = (),
) -> pa.RecordBatch:
    """The accounts of one task attempt.

    Args:
        counts: `rows_in`, `acked`, `degraded`, `dead`, `unknown`, `filtered` and whatever else the
            kind has; names that it does not have are left out, so `TaskSummary.as_dict()` does.
        complete: the attempt reached the end of its input with every row accounted for.
    """
    known = set(columns_of(EPOCH))
    values = {name: value for name, value in counts.items() if name in known}
    values["first_error"] = storable(values.get("first_error") or None, secrets=secrets)
    values |= {"complete": complete, "duration_ms": duration_ms}
    return build_rows(EPOCH, 1, values, ctx)


def confirmed_row(
    ctx: RunContext,
    *,
    num_input_rows: int,
    rows_in: int | None = None,
    duration_ms: float | None = None,
) -> pa.RecordBatch:
    """The driver's row of an epoch that Spark reported as done (a progress event).

    It has no `complete`: that is how the row is told from the accounts of a task.

    Args:
        num_input_rows: rows that Spark read from its sources; a filter makes the sink's fewer.
        rows_in: rows that Spark handed to the sink's tasks, where that is known: as many must be
            in their accounts.
    """
    values = {"num_input_rows": num_input_rows, "rows_in": rows_in, "duration_ms": duration_ms}
    return build_rows(EPOCH, 1, values, ctx)


def resolution_rows(columns: Mapping[str, Any], ctx: RunContext) -> pa.RecordBatch:
    """What became of dead letters.

    Args:
        columns: arrays, lists or single values of the kind's columns; `letter_id` and
            `resolution` (resent, parked, dropped, unparked) are needed. `note` is made printable.
    """
    count = len(columns["letter_id"])
    ways = columns["resolution"]
    for way in {ways} if isinstance(ways, str) else set(pa.array(ways).to_pylist()):
        if way not in RESOLUTIONS:
            raise ValueError(f"resolution {way!r} is none of {', '.join(RESOLUTIONS)}")
    values = dict(columns)
    if isinstance(values.get("note"), str):
        values["note"] = storable(values["note"])
    return build_rows(RESOLUTION, count, values, ctx)


def transaction_rows(columns: Mapping[str, Any], count: int, ctx: RunContext) -> pa.RecordBatch:
    """The end of a transactional epoch, or messages of it that their brokers would not commit."""
    return build_rows(TRANSACTION, count, columns, ctx)


def in_order(
    batches: Iterable[pa.RecordBatch], sequence: int, file: int = 0
) -> Iterator[pa.RecordBatch]:
    """The rows with their place in the table's order.

    Args:
        sequence: of their append (`appender.Append`).
        file: number of their spool file in the fold. Rows of one that has more than 262,144 share
            the last place in it.
    """
    row = 0
    for batch in batches:
        rows = np.minimum(np.arange(row, row + batch.num_rows), _FILE_ROWS - 1)
        numbers = pa.array(rows + (sequence + file * _FILE_ROWS), pa.int64())
        row += batch.num_rows
        yield _with_sequence(batch, numbers)


def placed(batch: pa.RecordBatch, sequence: int) -> pa.RecordBatch:
    """The rows with one place in the table's order."""
    return _with_sequence(batch, pa.repeat(pa.scalar(sequence, pa.int64()), batch.num_rows))


def _with_sequence(batch: pa.RecordBatch, numbers: pa.Array) -> pa.RecordBatch:
    return batch.set_column(_SEQUENCE, LEDGER_SCHEMA.field(_SEQUENCE), numbers)


def build_rows(kind: str, count: int, values: Mapping[str, Any], ctx: RunContext) -> pa.RecordBatch:
    """`count` rows of one kind; a value is an array, a list or one value for all rows.

    `at` defaults to now. Columns that the kind does not use are null.

    Raises:
        ValueError: a name that the kind does not have, or a column of another length.
    """
    fields = _fields_of(kind)
    unknown = values.keys() - fields.keys()
    if unknown:
        raise ValueError(f"{kind} rows have no column {', '.join(sorted(unknown))}")
    arrays = list(_few_nulls(count) if count <= _FEW else _nulls(count))
    given = {name: value for name, value in values.items() if value is not None}
    given.setdefault("at", time.time_ns() // 1000)
    given |= {name: getattr(ctx, name) for name in RUN_COLUMNS}
    for name, value in given.items():
        place, field = fields[name]
        arrays[place] = _column(field, value, count)
    arrays[_KIND] = _column(LEDGER_SCHEMA.field(_KIND), kind, count)
    return pa.RecordBatch.from_arrays(arrays, schema=LEDGER_SCHEMA)


_KIND: Final = LEDGER_SCHEMA.get_field_index("kind")
_FILE_ROWS: Final = 1 << 18
"""With 2^14 files in a fold at most, the places of one append are below 2^32."""
_SEQUENCE: Final = LEDGER_SCHEMA.get_field_index(SEQUENCE)


@functools.lru_cache(maxsize=len(KINDS))
def _fields_of(kind: str) -> dict[str, tuple[int, pa.Field]]:
    """{name: (place in the schema, field)} of the columns that rows of one kind use."""
    used = set(columns_of(kind))
    return {field.name: (n, field) for n, field in enumerate(LEDGER_SCHEMA) if field.name in used}


def _nulls(count: int) -> tuple[pa.Array, ...]:
    return tuple(pa.nulls(count, field.type) for field in LEDGER_SCHEMA)


# A task hands over small batches by the dozen, and their empty columns cost more than the others.
_few_nulls = functools.lru_cache(maxsize=16)(_nulls)
_FEW: Final = 64
"""Rows; columns of more would hold memory worth mentioning."""


def _column(field: pa.Field, value: Any, count: int) -> pa.Array:
    if value is None:
        return pa.nulls(count, field.type)
    if isinstance(value, pa.ChunkedArray):
        value = value.combine_chunks()
    if isinstance(value, pa.Array):
        array = value if value.type == field.type else value.cast(field.type)
    elif isinstance(value, (list, tuple)) and not _is_one_value(field.type, value):
        array = pa.array(value, field.type)
    else:
        array = pa.repeat(pa.scalar(value, field.type), count)
    if len(array) != count:
        raise ValueError(f"column {field.name} has {len(array)} values for {count} rows")
    return array


def _is_one_value(type_: pa.DataType, value: Sequence[Any]) -> bool:
    """A list of texts is one value of a list column, a list of lists is a column."""
    nested = pa.types.is_list(type_) or pa.types.is_map(type_)
    return nested and all(isinstance(item, str) for item in value) and len(value) > 0


def _millis(values: Sequence[int]) -> pa.Array:
    return pa.array(values, pa.timestamp("ms", tz="UTC")).cast(pa.timestamp("us", tz="UTC"))
