"""Rows of one group to requests: ids, queues, bytes, cuts; whole columns at a time."""

from __future__ import annotations

from rocket_sink.options import SinkOptions
from rocket_sink.routing.publish import PublishInfo
from rocket_sink.spark.assign import Assignment, assign
from rocket_sink.spark.checks import Refused
from rocket_sink.spark.contract_rows import RowBatch
from rocket_sink.spark.groups import waits_for_store, without_rows
from rocket_sink.spark.pending import PendingRequest, Piece
from rocket_sink.spark.task_ids import MessageIds
from rocket_sink.wire.columns import (
    EncodedBatch,
    MessageColumns,
    cut_requests,
    encode_columns,
    group_by_queue,
)
from rocket_sink.wire.columns_properties import property_pieces


def place_rows(
    rows: RowBatch, info: PublishInfo, sharding_hash: str
) -> tuple[RowBatch, Assignment, list[Refused]]:
    """The rows that have a destination, where each goes, and those whose own queue is unknown."""
    placed = assign(rows, info, sharding_hash)
    if not len(placed.refused):
        return rows, placed, []
    refused = [Refused(int(row), "INVALID_QUEUE", _no_such_queue(info)) for row in placed.refused]
    kept = without_rows(rows, placed.refused)
    return kept, assign(kept, info, sharding_hash), refused


def encode_requests(
    rows: RowBatch, placed: Assignment, options: SinkOptions, ids: MessageIds
) -> list[PendingRequest]:
    """Requests of the rows of one group, those of one queue in row order."""
    assert isinstance(rows.topic, str)
    if not len(rows):
        return []
    timed = bool(rows.is_timed()[0])
    groups = group_by_queue(placed.groups, placed.group_count)
    encoded = _encode(rows, ids).take(groups)
    half = options.delivery == "transactional"
    most = 1 if timed or half else options.request_max_messages
    slices = cut_requests(encoded.offsets, groups.bounds, options.request_max_bytes, most)
    data, offsets, waits = encoded.data, encoded.offsets, waits_for_store(rows)
    return [
        PendingRequest(
            rows.topic,
            placed.queue_of(group),
            [Piece(data, offsets[first : last + 1])],
            fixed=placed.is_fixed(group),
            sharded=placed.is_sharded(group),
            timed=timed,
            alone=half,
            waits_for_store=waits,
        )
        for group, first, last in slices
    ]


def _encode(rows: RowBatch, ids: MessageIds) -> EncodedBatch:
    assert isinstance(rows.topic, str)
    columns = rows.property_columns(ids.ids(rows))
    return encode_columns(
        MessageColumns(
            rows.topic,
            rows.body,
            property_pieces(len(rows), **columns),
            0 if rows.flag is None else rows.flag,
        )
    )


def _no_such_queue(info: PublishInfo) -> str:
    brokers = ", ".join(list(info.homes)[:8])
    return (
        f"the topic {info.topic!r} has no such queue; it has {len(info.queues)} on {brokers} "
        "(a queue_id needs its broker_name when there are several brokers)"
    )
