"""The schema of the ledger's one wide, append-only table, for pyarrow and for Spark.

Every row has a `kind`, which is the partition column, and says who wrote it (`records.RunContext`).
Columns that the row's kind does not use are null. The columns of a dead letter have the names of
the row contract, so the sink can send a dead letter like any other row."""
# ruff: noqa: E501 (one column per line: it is read as a table)

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import pyarrow as pa

SCHEMA_VERSION: Final = 1
VERSION_PROPERTY: Final = "rocketSink.schemaVersion"
"""Property of the Delta table that stores the schema's version."""

SEND: Final = "send"
DEAD_LETTER: Final = "dead_letter"
RESOLUTION: Final = "resolution"
ISOLATION: Final = "isolation"
EPOCH: Final = "epoch"
BACKFILL: Final = "backfill"
TRANSACTION: Final = "transaction"
KINDS: Final = (SEND, DEAD_LETTER, RESOLUTION, ISOLATION, EPOCH, BACKFILL, TRANSACTION)

REASONS: Final = ("data", "transport", "permission", "unknown", "held_back", "consumer")
"""Causes of dead letters, in this order: the row itself; the connection to the broker, or a busy or
broken broker; a missing permission; no valid answer, so the message may be stored; an earlier
failed message of the key; a consumer group that gave up (exported from its dead-letter topic)."""

UNPARKED: Final = "unparked"
"""The resolution that undoes `parked` or `dropped`: the dead letter is pending again."""

RESOLUTIONS: Final = ("resent", "parked", "dropped", UNPARKED)
"""Resolutions: stored by a later send; put aside by hand; not wanted; pending again."""

MOMENTS_US: Final = (-62_135_596_800_000_000, 253_402_300_799_999_999)
"""The first and the last of Python's datetimes (years 1 to 9999) in microseconds since 1970. Rows
with a time outside this range cannot be collected."""

IN_FLIGHT: Final = "in_flight"
"""Outcome of a row that is written before the answer. Views hide it once there is an answer."""

NO_WAY: Final = (
    "CONNECT", "CONNECTION_LOST", "HELD_BACK", "LOCAL_RESOURCES", "NAME_SERVER_UNAVAILABLE",
    "NO_ROUTE", "REQUEST_TIMEOUT", "TLS", "TLS_REFUSED", "UNKNOWN_HOST", "UNWRITTEN",
)  # fmt: skip
"""Error codes of failures between sink and brokers. The dead letter itself is not their cause."""

_TYPES: Final[dict[str, pa.DataType]] = {
    "STRING": pa.string(),
    "BINARY": pa.binary(),
    "BOOLEAN": pa.bool_(),
    "INT": pa.int32(),
    "BIGINT": pa.int64(),
    "DOUBLE": pa.float64(),
    "TIMESTAMP": pa.timestamp("us", tz="UTC"),
    "ARRAY<STRING>": pa.list_(pa.string()),
    "MAP<STRING,STRING>": pa.map_(pa.string(), pa.string()),
}


@dataclass(frozen=True)
class Column:
    """A column: Spark's type name, the kinds that use it, and its meaning."""

    name: str
    sql_type: str
    kinds: tuple[str, ...]
    comment: str

    @property
    def arrow_type(self) -> pa.DataType:
        return _TYPES[self.sql_type]


# fmt: off
COLUMNS: Final[tuple[Column, ...]] = (
    Column("kind", "STRING", KINDS, "send, dead_letter, resolution, isolation, epoch, backfill or transaction; the partition column"),
    Column("at", "TIMESTAMP", KINDS, "when it happened (send: start of the attempt), UTC"),
    Column("query_id", "STRING", KINDS, "streaming query id, kept by its checkpoint; of a batch, its run id; of a TableProducer, its own"),
    Column("run_id", "STRING", KINDS, "streaming run id: new at each start"),
    Column("epoch", "BIGINT", KINDS, "micro-batch id; 0 for a batch; of a TableProducer, the number of the send"),
    Column("partition", "INT", KINDS, "partition of the task; null: written by a driver, or by a TableProducer"),
    Column("stage_id", "INT", KINDS, "Spark stage"),
    Column("task_attempt_id", "BIGINT", KINDS, "attempt of the task, unique in its Spark application"),
    Column("attempt_number", "INT", KINDS, "attempt of the task, 0 for the first"),
    Column("worker", "STRING", KINDS, "host:pid that wrote the row"),
    Column("lane", "STRING", KINDS, "foreach, datasource, foreach_batch, batch, backfill, export or table"),

    Column("sequence", "BIGINT", KINDS, "the table's order: the Delta version that the row's append saw, plus 1, times 2^32, plus its place in the append"),

    Column("topic", "STRING", (SEND, DEAD_LETTER, RESOLUTION, ISOLATION, BACKFILL, TRANSACTION), "topic; isolation: set when only this topic is avoided on the broker"),
    Column("broker_name", "STRING", (SEND, DEAD_LETTER, RESOLUTION, ISOLATION, TRANSACTION), "broker; dead_letter: the one that the row itself asked for"),
    Column("queue_id", "BIGINT", (SEND, DEAD_LETTER, RESOLUTION), "queue; dead_letter: the one that the row itself asked for"),
    Column("message_id", "STRING", (SEND, DEAD_LETTER, RESOLUTION, BACKFILL, TRANSACTION), "client message id (UNIQ_KEY); send: of the request's first message; transaction: of a message that its broker would not commit, null in the row of the epoch"),
    Column("outcome", "STRING", (SEND, DEAD_LETTER, BACKFILL), "acked, acked_degraded, rejected, not_sent, unknown; in_flight: written before the answer, or before a backfill sends the dead letter"),
    Column("broker_address", "STRING", (SEND, RESOLUTION), "host:port that was asked"),
    Column("queue_offset", "BIGINT", (SEND, RESOLUTION), "offset of the (first) message in its queue; half: in its broker's half queue; null: a delayed message, which gets its place when it is due"),
    Column("offset_message_id", "STRING", (SEND, RESOLUTION), "the broker's id of the (first) message"),
    Column("body_bytes", "BIGINT", (SEND, DEAD_LETTER, EPOCH), "bytes of the bodies; send: of the request's body; epoch: of all rows that came in"),

    Column("request", "BIGINT", (SEND,), "number of the request in its task attempt; its attempts share it; of those to the deadLetterTopic, negative; 0: the error that ended a task whose topic had no route"),
    Column("attempt", "INT", (SEND,), "attempt of the request, 1 for the first; of a row that sums up a wait, the last that it stands for"),
    Column("queue_wait_ms", "DOUBLE", (SEND,), "from submit (in order: from when the row was ready for its queue), or from the attempt before, to the hand-over to a connection"),
    Column("connect_ms", "DOUBLE", (SEND,), "time spent on connecting, after queue_wait_ms; 0: the connection existed"),
    Column("rtt_ms", "DOUBLE", (SEND,), "from the last byte written to the answer, or to the end of the wait"),
    Column("message_count", "INT", (SEND,), "messages in the request"),
    Column("wire_bytes", "BIGINT", (SEND,), "bytes of the whole frame; 0: no attempt, but the wait of attempts that found no broker to go to"),
    Column("response_code", "INT", (SEND,), "the broker's response code"),
    Column("error_code", "STRING", (SEND, BACKFILL), "class of the failure"),
    Column("remark", "STRING", (SEND, TRANSACTION), "the broker's remark, made printable and cut"),
    Column("maybe_duplicate", "BOOLEAN", (SEND, DEAD_LETTER), "an earlier attempt has no known outcome: messages may be stored twice, under one id (dead_letter: may be stored)"),
    Column("half", "BOOLEAN", (SEND,), "a half message (delivery=transactional): delivered once its epoch is ended"),

    Column("frames", "INT", (SEND,), "requests that the row stands for: single messages of a group that were all acknowledged at once; null: one"),
    Column("message_ids", "STRING", (SEND,), "group: client message ids of all its messages, separated by the character 2"),
    Column("rtt_min_ms", "DOUBLE", (SEND,), "group: shortest time to an answer; rtt_ms is the longest"),
    Column("rtt_p50_ms", "DOUBLE", (SEND,), "group: median time to an answer"),
    Column("rtt_p95_ms", "DOUBLE", (SEND,), "group: 95th percentile of the times to an answer"),
    Column("rtt_p99_ms", "DOUBLE", (SEND,), "group: 99th percentile of the times to an answer"),
    Column("half_messages", "STRING", (SEND,), "group of half messages: offset_message_id:queue_offset of each, in the order of message_ids, separated by the character 2"),

    Column("letter_id", "STRING", (DEAD_LETTER, RESOLUTION, BACKFILL), "names one dead letter, or one row of a table that a backfill sends"),
    Column("ordinal", "BIGINT", (DEAD_LETTER,), "order of the dead letters of one task attempt, and so of a key"),
    Column("body", "BINARY", (DEAD_LETTER,), "message body; null: absent in the row, or left out (body_sha256 is set)"),
    Column("body_sha256", "STRING", (DEAD_LETTER,), "digest of a body that was left out (ledgerRetention with body=0)"),
    Column("tags", "STRING", (DEAD_LETTER,), "tag"),
    Column("keys", "ARRAY<STRING>", (DEAD_LETTER,), "index keys"),
    Column("sharding_key", "STRING", (DEAD_LETTER,), "sharding key"),
    Column("properties", "MAP<STRING,STRING>", (DEAD_LETTER,), "user properties"),
    Column("delay_level", "BIGINT", (DEAD_LETTER,), "delay level, 1 to 18"),
    Column("delay_ms", "BIGINT", (DEAD_LETTER,), "delay in milliseconds"),
    Column("delivery_timestamp", "BIGINT", (DEAD_LETTER,), "delivery time, milliseconds since 1970"),
    Column("priority", "BIGINT", (DEAD_LETTER,), "priority, 0 and up"),
    Column("lite_topic", "STRING", (DEAD_LETTER,), "lite topic"),
    Column("flag", "BIGINT", (DEAD_LETTER,), "user flag"),
    Column("wait_store", "BOOLEAN", (DEAD_LETTER,), "wait for the store's durability conditions"),
    Column("event_time", "TIMESTAMP", (DEAD_LETTER,), "event time of a row that was refused before it was encoded"),
    Column("reason", "STRING", (DEAD_LETTER,), "data, transport, permission, unknown, held_back or consumer"),
    Column("attempts", "BIGINT", (DEAD_LETTER, EPOCH), "send attempts made"),
    Column("first_error_code", "STRING", (DEAD_LETTER,), "class of the first failure"),
    Column("first_error", "STRING", (DEAD_LETTER, EPOCH), "text of the first failure, made printable and cut"),
    Column("last_error_code", "STRING", (DEAD_LETTER,), "class of the last failure"),
    Column("last_error", "STRING", (DEAD_LETTER,), "text of the last failure, made printable and cut"),
    Column("last_broker_name", "STRING", (DEAD_LETTER,), "broker of the last attempt; in strict order, also without an attempt: that of its queue"),

    Column("resolution", "STRING", (RESOLUTION,), "resent, parked, dropped or unparked"),
    Column("note", "STRING", (RESOLUTION,), "free text of who resolved it"),

    Column("cause", "STRING", (ISOLATION,), "what isolated the broker: latency, or the class of a failure"),
    Column("latency_ms", "DOUBLE", (ISOLATION,), "latency that the fault table was told"),
    Column("isolated_from", "TIMESTAMP", (ISOLATION,), "start of the isolation"),
    Column("isolated_until", "TIMESTAMP", (ISOLATION,), "end of the isolation, as planned at its start"),
    Column("reachable", "BOOLEAN", (ISOLATION,), "false: the broker could not be reached"),

    Column("rows_in", "BIGINT", (EPOCH,), "rows that came in = acked + degraded + dead + unknown + filtered; driver's row: rows that Spark handed to the tasks"),
    Column("acked", "BIGINT", (EPOCH,), "rows stored"),
    Column("degraded", "BIGINT", (EPOCH,), "rows stored without the durability asked for"),
    Column("dead", "BIGINT", (EPOCH,), "rows given up and certainly not stored; dead letters"),
    Column("unknown", "BIGINT", (EPOCH,), "rows given up and perhaps stored; dead letters"),
    Column("filtered", "BIGINT", (EPOCH,), "rows that need no sending"),
    Column("invalid", "BIGINT", (EPOCH,), "of dead: refused before anything was sent"),
    Column("held_back", "BIGINT", (EPOCH,), "of dead: held back behind an earlier failure of their key"),
    Column("duplicates_possible", "BIGINT", (EPOCH,), "rows stored that an earlier attempt may have stored too"),
    Column("found_stored", "BIGINT", (EPOCH, TRANSACTION), "transaction: of committed, found visible at their brokers; epoch: of acked, found stored by their ids, after a lost answer or in a replay (delivery=effectively_once)"),
    Column("requests", "BIGINT", (EPOCH,), "requests made"),
    Column("moved_keys", "BIGINT", (EPOCH,), "keys moved off their queue (ordering=best_effort)"),
    Column("complete", "BOOLEAN", (EPOCH,), "the task attempt reached the end of its input with all rows accounted for"),
    Column("duration_ms", "DOUBLE", (EPOCH, TRANSACTION), "time of the task attempt; driver: of the micro-batch; transaction: of ending it"),
    Column("num_input_rows", "BIGINT", (EPOCH,), "driver's row: rows that Spark read in the micro-batch"),

    Column("committed", "BIGINT", (TRANSACTION,), "half messages of the epoch that were made visible"),
    Column("refused", "BIGINT", (TRANSACTION,), "half messages of the epoch that their brokers would not commit; each has a row"),
)
# fmt: on

SEQUENCE: Final = "sequence"
"""Column that orders rows by their appends, not by clocks. A later row has a greater number."""

LEDGER_SCHEMA: Final = pa.schema([pa.field(c.name, c.arrow_type) for c in COLUMNS])

STATS_COLUMNS: Final = (
    "at", "query_id", "epoch", "partition", "broker_name", "outcome", "letter_id", "rtt_ms",
)  # fmt: skip
"""Columns whose minima and maxima Delta stores. Those of bodies and texts would bloat its log."""


UNFOLDED: Final = {kind: f"unfolded {kind}" for kind in (SEND, ISOLATION)}
"""{kind: kind under which readers see rows that are not in the table yet}. For a moment a row may
have both kinds, so no query may count over both."""


def columns_of(kind: str) -> tuple[str, ...]:
    """Return the columns that rows of a kind use, without `kind`, in the table's order."""
    if kind not in KINDS:
        raise ValueError(f"{kind!r} is not a kind of ledger row; there are {', '.join(KINDS)}")
    return tuple(c.name for c in COLUMNS if kind in c.kinds and c.name != "kind")


def ledger_ddl() -> str:
    """Return the schema as Spark reads it (`mapInArrow`, `createDataFrame`), without comments."""
    return ", ".join(f"`{c.name}` {c.sql_type}" for c in COLUMNS)
