"""Builders of ledger rows: plain values in, `pa.RecordBatch`es of `LEDGER_SCHEMA` out. A dead
letter's row has everything that is needed to send it again. Functions import pyarrow.compute
themselves, because processes that plan and commit a stream do not need it."""

from __future__ import annotations

import functools
import hashlib
import os
import socket
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from rocket_sink.ledger.schema import (
    DEAD_LETTER,
    EPOCH,
    IN_FLIGHT,
    ISOLATION,
    KINDS,
    LEDGER_SCHEMA,
    MOMENTS_US,
    REASONS,
    RESOLUTION,
    RESOLUTIONS,
    SEND,
    SEQUENCE,
    columns_of,
)
from rocket_sink.text import storable

if TYPE_CHECKING:
    from rocket_sink.producer.engine.attempt import AttemptRecord, StoredFrames
    from rocket_sink.routing.fault import Isolation


def worker_name() -> str:
    """Return `host:pid` of this process."""
    return f"{socket.gethostname()}:{os.getpid()}"


@dataclass(frozen=True)
class RunContext:
    """The columns that say who wrote a row. All rows of a task attempt have the same values. A
    driver has no partition and no task. A batch write has its own id as query id, and epoch 0."""

    query_id: str
    run_id: str
    epoch: int
    partition: int | None = None
    stage_id: int | None = None
    task_attempt_id: int | None = None
    attempt_number: int | None = None
    worker: str = field(default_factory=worker_name)
    lane: str = ""


BETWEEN_IDS: Final = "\x02"
"""Separator in `message_ids` and `half_messages`. Ids cannot contain it: RocketMQ ends each
property with it."""


class GroupFacts(NamedTuple):
    """Columns of a send row that sums up a group of single messages."""

    frames: int
    message_ids: str
    rtt_min_ms: float
    rtt_p50_ms: float
    rtt_p95_ms: float
    rtt_p99_ms: float
    half_messages: str | None

    @classmethod
    def of(cls, stored: StoredFrames, message_ids: pa.Array, *, half: bool) -> GroupFacts:
        """Return the facts of a group; `message_ids` are the client ids of its messages."""
        import pyarrow.compute as pc

        ids = message_ids.take(pa.array(stored.indices))
        lists = pa.ListArray.from_arrays([0, len(ids)], ids)
        joined = pc.binary_join(lists, BETWEEN_IDS)[0].as_py()
        halves = None
        if half:
            brokers_ids = stored.offset_message_ids.astype(str).tolist()
            each = zip(brokers_ids, stored.queue_offsets.tolist(), strict=True)
            halves = BETWEEN_IDS.join(f"{broker_id}:{at}" for broker_id, at in each)
        least, p50, p95, p99 = np.percentile(stored.rtt_ms, (0, 50, 95, 99)).tolist()
        return cls(len(stored), joined, least, p50, p95, p99, halves)


def send_rows(
    attempts: Sequence[AttemptRecord], ctx: RunContext, *, requests: Sequence[int] | None = None,
    maybe_duplicate: Sequence[bool] | bool = False, half: Sequence[bool] | None = None,
    groups: Sequence[GroupFacts | None] = (), secrets: Sequence[str] = (),
) -> pa.RecordBatch:  # fmt: skip
    """Return a row per request attempt.

    Args:
        requests: per attempt, the number of its request in the task attempt. It joins the row to
            the request's `in_flight` row.
        maybe_duplicate: per attempt, whether the outcome of an earlier attempt is unknown.
        groups: per attempt, the facts of its group of single messages.
        secrets: texts to mask in the rows.
    """
    values: dict[str, Any] = {
        name: [getattr(a, name) for a in attempts]
        for name in (
            "attempt", "topic", "queue_wait_ms", "connect_ms", "rtt_ms", "message_count",
            "body_bytes", "wire_bytes", "response_code", "error_code",
        )
    }  # fmt: skip
    values |= {"request": requests, "maybe_duplicate": maybe_duplicate, "half": half}
    # A row about a wait names the broker that the request waited for, if any. A batch's row has
    # only the first offset id: the others follow from it, and each takes 33 bytes.
    for name in ("broker_name", "broker_address", "message_id", "offset_message_id"):
        values[name] = [getattr(a, name) or None for a in attempts]
    values["at"] = pa.array([a.started_ms for a in attempts], pa.timestamp("ms", tz="UTC"))
    values["queue_id"] = [a.queue_id if a.queue_id >= 0 else None for a in attempts]
    values["queue_offset"] = [a.queue_offset if a.queue_offset >= 0 else None for a in attempts]
    values["outcome"] = [a.outcome.value for a in attempts]
    values["remark"] = [storable(a.remark, secrets=secrets) for a in attempts]
    if any(groups):
        none = (None,) * len(GroupFacts._fields)
        columns = zip(*(group or none for group in groups), strict=True)
        values |= dict(zip(GroupFacts._fields, map(list, columns), strict=True))
    return build_rows(SEND, len(attempts), values, ctx)


def in_flight_rows(
    requests: Sequence[int], ctx: RunContext, *, topic: str | Sequence[str],
    message_count: Sequence[int], body_bytes: Sequence[int],
    message_id: Sequence[str | None] | None = None,
) -> pa.RecordBatch:  # fmt: skip
    """Return rows to append before the answers, so that a killed worker's sends are on record.
    `Ledger.sends` hides such a row once the ledger has the request's answer. A row without an
    answer stands for a request of an attempt that died; its outcome is unknown."""
    values: dict[str, Any] = {
        "request": requests, "topic": topic, "message_count": message_count,
        "body_bytes": body_bytes, "message_id": message_id, "outcome": IN_FLIGHT,
    }  # fmt: skip
    return build_rows(SEND, len(requests), values, ctx)


def isolation_rows(
    isolations: Sequence[Isolation], ctx: RunContext, *, now_s: float | None = None,
    now_us: int | None = None,
) -> pa.RecordBatch:  # fmt: skip
    """Return a row per isolation. `now_s` and `now_us` are one moment on the isolations' monotonic
    clock and on the wall clock (microseconds since 1970). The default is now."""
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
    counts: Mapping[str, Any], ctx: RunContext, *, complete: bool, duration_ms: float | None = None,
    secrets: Sequence[str] = (),
) -> pa.RecordBatch:  # fmt: skip
    """Return the accounts of one task attempt.

    Args:
        counts: `rows_in`, `acked`, `degraded`, `dead`, `unknown`, `filtered` and other columns of
            `epoch` rows. Other names are ignored, so `vars` of a `TaskSummary` may be passed.
        complete: the attempt has read all of its input, and each row has an outcome.
    """
    values = {name: value for name, value in counts.items() if name in _fields_of(EPOCH)}
    values["first_error"] = storable(values.get("first_error") or None, secrets=secrets)
    values |= {"complete": complete, "duration_ms": duration_ms}
    return build_rows(EPOCH, 1, values, ctx)


def confirmed_row(
    ctx: RunContext, *, num_input_rows: int | None, rows_in: int | None = None,
    duration_ms: float | None = None, duplicates_possible: int | None = None,
) -> pa.RecordBatch:  # fmt: skip
    """Return the driver's row for an epoch that Spark reported as done in a progress event. Its
    column `complete` is null, in contrast to the accounts of a task.

    Args:
        num_input_rows: rows that Spark read from its sources, if known; the query may filter some
            of them.
        rows_in: rows that Spark handed to the sink's tasks, if known. It must equal the sum of
            `rows_in` in the tasks' accounts.
        duplicates_possible: rows stored perhaps twice, which the tasks' accounts do not count.
    """
    values = {
        "num_input_rows": num_input_rows, "rows_in": rows_in, "duration_ms": duration_ms,
        "duplicates_possible": duplicates_possible,
    }  # fmt: skip
    return build_rows(EPOCH, 1, values, ctx)


def resolution_rows(columns: Mapping[str, Any], ctx: RunContext) -> pa.RecordBatch:
    """Return rows that resolve dead letters. `columns` has arrays, lists or single values of
    `resolution` rows; `letter_id` and `resolution` (resent, parked, dropped, unparked) are needed.
    `note` is one text; it is made printable."""
    _check_words("resolution", columns["resolution"], RESOLUTIONS)
    values = {**columns, "note": storable(columns.get("note"))}
    return build_rows(RESOLUTION, len(columns["letter_id"]), values, ctx)


def in_order(
    batches: Iterable[pa.RecordBatch], sequence: int, file: int = 0
) -> Iterator[pa.RecordBatch]:
    """Yield the rows with their order numbers (the column `sequence`).

    Args:
        sequence: the append's `Append.sequence`.
        file: number of the rows' spool file in the fold. A file has 262,144 order numbers;
            all further rows get the last one.
    """
    row = 0
    for batch in batches:
        rows = np.minimum(np.arange(row, row + batch.num_rows), _FILE_ROWS - 1)
        numbers = pa.array(rows + (sequence + file * _FILE_ROWS), pa.int64())
        row += batch.num_rows
        yield replaced(batch, {SEQUENCE: numbers})


def placed(batch: pa.RecordBatch, sequence: int) -> pa.RecordBatch:
    """Return the rows, all with the order number `sequence`."""
    return replaced(batch, {SEQUENCE: pa.repeat(pa.scalar(sequence, pa.int64()), batch.num_rows)})


def replaced(batch: pa.RecordBatch, columns: Mapping[str, pa.Array]) -> pa.RecordBatch:
    """Return the rows with these columns replaced."""
    for name, values in columns.items():
        place = batch.schema.get_field_index(name)
        batch = batch.set_column(place, batch.schema.field(place), values)
    return batch


def build_rows(kind: str, count: int, values: Mapping[str, Any], ctx: RunContext) -> pa.RecordBatch:
    """Build `count` rows of one kind. A value is an array, a list, or a single value for all rows.
    `at` defaults to now. Columns that the kind does not use are null. Raise ValueError if a column
    is not one of the kind, or has another length."""
    fields = _fields_of(kind)
    unknown = values.keys() - fields.keys()
    if unknown:
        raise ValueError(f"{kind} rows have no column {', '.join(sorted(unknown))}")
    arrays = list(_few_nulls(count) if count <= _FEW else _nulls(count))
    columns = {"at": time.time_ns() // 1000, **values, **vars(ctx), "kind": kind}
    for name, value in columns.items():
        if value is not None:
            place, field = fields[name]
            arrays[place] = _column(field, value, count)
    return pa.RecordBatch.from_arrays(arrays, schema=LEDGER_SCHEMA)


_FILE_ROWS: Final = 1 << 18
"""The number of `sequence` values for each file of a fold. An append has 2^32: 2^14 files."""


@functools.lru_cache(maxsize=len(KINDS))
def _fields_of(kind: str) -> dict[str, tuple[int, pa.Field]]:
    """Return {name: (index in the schema, field)} of the columns that rows of a kind use."""
    used = {"kind", *columns_of(kind)}
    return {field.name: (n, field) for n, field in enumerate(LEDGER_SCHEMA) if field.name in used}


def _nulls(count: int) -> tuple[pa.Array, ...]:
    return tuple(pa.nulls(count, field.type) for field in LEDGER_SCHEMA)


# Cache columns of nulls. In a task's many small batches they cost more than the other columns.
_few_nulls = functools.lru_cache(maxsize=16)(_nulls)
_FEW: Final = 64
"""Number of rows up to which columns of nulls are cached; longer columns take too much memory."""


def _column(field: pa.Field, value: Any, count: int) -> pa.Array:
    if isinstance(value, pa.ChunkedArray):
        value = value.combine_chunks()
    if isinstance(value, pa.Array):
        array = value if value.type == field.type else value.cast(field.type)
    elif isinstance(value, (list, tuple)):
        array = pa.array(value, field.type)
    else:
        array = pa.repeat(pa.scalar(value, field.type), count)
    if len(array) != count:
        raise ValueError(f"column {field.name} has {len(array)} values for {count} rows")
    return array


_BATCH_BYTES: Final = 64 * 1024 * 1024
"""Limit of body bytes in a record batch; a binary array can hold 2 GiB."""
_IGNORED: Final = frozenset({"order_by", "traceparent", "tracestate"})
"""Columns of the row contract that are not stored. `ordinal` keeps the order instead, and
`properties` has the trace context."""


def dead_letter_rows(
    columns: Mapping[str, Any], ctx: RunContext, *, first_ordinal: int = 0,
    include_body: bool = True, secrets: Sequence[str] = (),
) -> list[pa.RecordBatch]:  # fmt: skip
    """Return rows of dead letters in the given order, with large bodies in several batches. Raise
    ValueError for an unknown column or reason, or for columns of different lengths.

    Args:
        columns: arrays, or single values for all rows, by the names of `RowBatch.columns()` and of
            the kind's own columns. `reason` and at least one array are required; `body` is an
            array. Bytes of a text that are not UTF-8 become the replacement character; `body` stays
            as it is.
        first_ordinal: number of dead letters that the task attempt gave up before these. It keeps
            the dead letters of a key in order.
        include_body: False stores only length and digest, so a backfill cannot send the message.
    """
    import pyarrow.compute as pc

    values = _named(columns)
    counts = {len(value) for value in values.values() if isinstance(value, pa.Array)}
    if len(counts) != 1:
        raise ValueError(f"dead letters need arrays of one length, not {sorted(counts)}")
    (count,) = counts
    _check_words("reason", values["reason"], REASONS)
    for name in ("first_error", "last_error"):
        if name in values:
            values[name] = _clean(values[name], secrets)
    lengths = np.zeros(count, np.int64)
    if "body" in values:
        lengths = np.asarray(pc.fill_null(pc.binary_length(values["body"]), 0), np.int64)
    values.setdefault("body_bytes", pa.array(lengths))
    values["ordinal"] = ordinals = pa.array(np.arange(first_ordinal, first_ordinal + count))
    prefix = pa.scalar(uuid.uuid4().hex)
    letter_ids = pc.binary_join_element_wise(prefix, ordinals.cast(pa.string()), "-")
    values.setdefault("letter_id", letter_ids)
    batches = []
    for start, stop in _cuts(lengths):
        part = {
            name: valid_text(value.slice(start, stop - start), LEDGER_SCHEMA.field(name).type)
            if isinstance(value, pa.Array)
            else value
            for name, value in values.items()
        }
        if not include_body and "body" in part:
            part["body_sha256"] = digests(part.pop("body"))
        batches.append(build_rows(DEAD_LETTER, stop - start, part, ctx))
    return batches


def _named(columns: Mapping[str, Any]) -> dict[str, Any]:
    values = {n: v for n, v in columns.items() if v is not None and n not in _IGNORED}
    if "delivery_timestamp_ms" in values:
        values["delivery_timestamp"] = values.pop("delivery_timestamp_ms")
    if "event_time_ms" in values:
        values["event_time"] = _instants(values.pop("event_time_ms"))
    keys = values.get("keys")
    if isinstance(keys, pa.Array) and not pa.types.is_list(keys.type):
        values["keys"] = _one_each(keys)
    unknown = set(values) - set(columns_of(DEAD_LETTER))
    if unknown:
        raise ValueError(f"dead letters have no column {', '.join(sorted(unknown))}")
    return values


def _instants(millis: pa.Array) -> pa.Array:
    """Return milliseconds as timestamps; values outside of datetime's range become null."""
    import pyarrow.compute as pc

    first, last = (us // 1000 for us in MOMENTS_US)
    ok = pc.and_(pc.greater_equal(millis, first), pc.less_equal(millis, last))
    sane = pc.if_else(ok, millis, pa.scalar(None, pa.int64()))
    return pc.multiply(sane, 1000).cast(pa.timestamp("us", tz="UTC"))


def _one_each(keys: pa.Array) -> pa.Array:
    """Return a column of texts as a column of lists with one text each; null stays null."""
    present = keys.is_valid()
    offsets = np.concatenate([[0], np.cumsum(present.to_numpy(zero_copy_only=False))])
    starts = pa.array(offsets, pa.int32(), mask=np.append(~np.asarray(present), False))
    return pa.ListArray.from_arrays(starts, keys.filter(present))


def _check_words(name: str, words: Any, known: Sequence[str]) -> None:
    if isinstance(words, (pa.Array, pa.ChunkedArray)):
        words = words.unique().to_pylist()
    unique = {words} if isinstance(words, str) else set(words)
    if wrong := ", ".join(sorted(map(repr, unique.difference(known)))):
        raise ValueError(f"{name} {wrong} is none of {', '.join(known)}")


def _clean(texts: Any, secrets: Sequence[str]) -> Any:
    """Mask secrets in texts. Clean each distinct text once, because errors repeat."""
    if isinstance(texts, str):
        return storable(texts, secrets=secrets)
    encoded = valid_text(texts, pa.string()).dictionary_encode()
    words = [storable(word, secrets=secrets) for word in encoded.dictionary.to_pylist()]
    return pa.array(words, pa.string()).take(encoded.indices)


def _cuts(lengths: np.ndarray[Any, Any]) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of batches whose bodies have at most `_BATCH_BYTES`, or of one row."""
    ends, start = np.cumsum(lengths), 0
    while start < len(lengths):
        limit = _BATCH_BYTES + (int(ends[start - 1]) if start else 0)
        stop = max(start + 1, int(np.searchsorted(ends, limit, side="right")))
        yield start, stop
        start = stop


def digests(bodies: pa.Array) -> pa.Array:
    """Return the column `body_sha256` of bodies; null for null."""
    each = (None if b is None else hashlib.sha256(b).hexdigest() for b in bodies.to_pylist())
    return pa.array(each, pa.string())


def valid_text(array: pa.Array, type_: pa.DataType) -> pa.Array:
    """Return `array` as `type_`. Bytes that are not UTF-8, which Spark permits, become U+FFFD.
    Arrow checks strings only on request, but every reader in Python would fail on invalid ones."""
    array = array.cast(type_) if array.type != type_ else array
    try:
        array.validate(full=True)
        return array
    except pa.ArrowInvalid:
        return pa.array([_repaired(value) for value in array], type_)


def _repaired(value: pa.Scalar) -> Any:
    if not value.is_valid:
        return None
    if isinstance(value, pa.MapScalar):
        pairs = value.values
        return list(zip(*(map(_repaired, pairs.field(i)) for i in (0, 1)), strict=True))
    if isinstance(value, pa.ListScalar):
        return [_repaired(item) for item in value.values]
    return value.as_buffer().to_pybytes().decode(errors="replace")
