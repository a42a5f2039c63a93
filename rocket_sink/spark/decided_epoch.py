"""Reads the half messages of a decided epoch from the ledger, on the driver. delta-rs reads the
table if it can open it: a Spark job would delay each epoch by a second or more."""

from __future__ import annotations

import binascii
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rocket_sink.errors import DeliveryError, ProtocolError
from rocket_sink.ledger.append.table import rows_of_epoch
from rocket_sink.ledger.path import LedgerPath
from rocket_sink.ledger.records import BETWEEN_IDS
from rocket_sink.ledger.schema import SEND, TRANSACTION
from rocket_sink.producer.admin.half_commits import HALVES
from rocket_sink.wire.ids import decode_offset_message_id

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


_COLUMNS: Final = (
    "kind", "topic", "broker_name", "queue_id", "queue_offset", "offset_message_id", "message_id",
    "message_ids", "half_messages", "run_id", "lane", "at",
)  # fmt: skip


@dataclass(frozen=True)
class DecidedEpoch:
    """An epoch whose rows are in the ledger's table, so that its half messages are to be committed.

    Attributes:
        halves: the half messages, with the schema `half_commits.HALVES`; some hundred bytes each.
        since_ms: time of the epoch's first answer, ms since 1970.
        is_ended: a row of the table says that all half messages are committed.
    """

    halves: pa.Table
    since_ms: int
    run_id: str
    lane: str
    is_ended: bool


def decided_epoch(
    spark: SparkSession, place: LedgerPath, query_id: str, epoch: int
) -> DecidedEpoch | None:
    """Read an epoch; return None if the table lacks it, or if it has no half messages.

    Raises:
        LedgerError: there is no ledger, or some of its files are gone.
        DeliveryError: a row does not say where its half message is.
    """
    columns = (*_COLUMNS, "half", "outcome")
    rows = rows_of_epoch(spark, place, (SEND, TRANSACTION), query_id, epoch, columns)
    # Take the rows of the views `decided_halves` and `epoch_ends`.
    is_send = pc.equal(rows.column("kind"), SEND)
    is_stored = pc.is_in(rows.column("outcome"), pa.array(["acked", "acked_degraded"]))
    decided = pc.and_(is_send, pc.and_(pc.fill_null(rows.column("half"), False), is_stored))
    end = pc.and_(pc.invert(is_send), pc.is_null(rows.column("message_id")))
    rows = rows.filter(pc.or_(decided, end))
    sends = rows.filter(pc.equal(rows.column("kind"), SEND))
    if not sends.num_rows:
        return None
    first = pc.min(sends.column("at").cast(pa.timestamp("us", "UTC")))
    return DecidedEpoch(
        read_halves(sends), first.value // 1000, sends.column("run_id")[0].as_py(),
        sends.column("lane")[0].as_py(), sends.num_rows < rows.num_rows,
    )  # fmt: skip


def read_halves(sends: pa.Table) -> pa.Table:
    """Return the half messages of `send` rows as a table with the schema `HALVES`; raise a
    DeliveryError if a row does not say where its half message is."""
    is_group = pc.is_valid(sends.column("half_messages"))
    singles = sends.filter(pc.invert(is_group))
    groups = sends.filter(is_group)
    names = ("topic", "broker_name", "queue_id")
    try:
        row, broker_ids, queue_offsets = _half_messages(groups.column("half_messages"))
        ids = pc.list_flatten(pc.split_pattern(groups.column("message_ids"), BETWEEN_IDS))
        rows = pa.concat_tables([
            singles.select([*names, "queue_offset", "offset_message_id", "message_id"]),
            groups.select(names).take(row)
            .append_column("queue_offset", queue_offsets)
            .append_column("offset_message_id", broker_ids)
            .append_column("message_id", ids),
        ])  # fmt: skip
        offsets = commit_log_offsets(rows.column("offset_message_id").combine_chunks())
    except (ProtocolError, pa.ArrowInvalid) as unreadable:
        raise DeliveryError(
            f"a half message of the ledger has no valid commit-log offset: {unreadable}"
        ) from unreadable
    columns = [*(rows.column(number) for number in range(4)), offsets, rows.column("message_id")]
    return pa.table(columns, HALVES.names).cast(HALVES)


def _half_messages(groups: pa.ChunkedArray) -> tuple[pa.Array, pa.StringArray, pa.Int64Array]:
    """Return (row of its group, broker's message id, queue offset) of each half message in the
    column `half_messages`, which has no nulls."""
    lists = pc.split_pattern(groups.combine_chunks(), BETWEEN_IDS)
    parts = pc.split_pattern(pc.list_flatten(lists), ":")
    broker_ids, offsets = (pc.list_element(parts, number) for number in range(2))
    return pc.list_parent_indices(lists), broker_ids, offsets.cast(pa.int64())


_FORM: Final = "^([0-9a-fA-F]{32}|[0-9a-fA-F]{56})$"
_DIGITS: Final = 16


def commit_log_offsets(ids: pa.StringArray) -> pa.Int64Array:
    """Return the commit-log offset that each of the brokers' message ids contains; raise a
    RemoteProtocolError for a malformed id."""
    is_good = pc.fill_null(pc.match_substring_regex(ids, _FORM), False)
    bad = pc.index(is_good, False).as_py()
    if bad >= 0:
        decode_offset_message_id(str(ids[bad].as_py()))  # raises the error
    digits = "".join(pc.utf8_slice_codeunits(ids, -_DIGITS).to_pylist())
    return pa.array(np.frombuffer(binascii.unhexlify(digits), ">i8").astype(np.int64))
