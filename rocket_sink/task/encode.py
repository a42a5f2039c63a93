"""Encoding of rows into requests, whole columns at a time. A row has one of three destinations:

- the queue that the row names (`queue_id`, `broker_name`), which never changes;
- the home queue of its sharding key, which is equal in every task, epoch and client language;
- none: the engine chooses queues, and avoids bad brokers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rocket_sink.message import MessageQueue
from rocket_sink.options import SinkOptions
from rocket_sink.routing.sharding import LITE_TOPIC_HASH, queues_for_keys
from rocket_sink.routing.topic_publish_info import TopicPublishInfo
from rocket_sink.rows.checks import Refused, lacks_keys
from rocket_sink.rows.row_batch import DELAYED, KINDS, RowBatch
from rocket_sink.task.message_ids import MessageIds
from rocket_sink.task.pending import PendingRequest, Piece, SingleColumns
from rocket_sink.task.request_factory import compressed_column
from rocket_sink.wire.columns.buffers import Int64s, as_binary, ints_of, nulls_of
from rocket_sink.wire.columns.encode import RequestSlice, cut_requests, group_by_queue
from rocket_sink.wire.columns.properties import property_pieces
from rocket_sink.wire.properties import least_version

_PART_BYTES: Final = 8 << 20
"""Bytes of input that are encoded at a time; several copies of them are in memory at once."""


def parts_of(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Yield slices of the batch with about _PART_BYTES each, in order."""
    rows, size = batch.num_rows, sum(map(_bytes_of, batch.columns))
    step = max(1, rows * _PART_BYTES // max(1, size))
    for start in range(0, rows, step):
        yield batch.slice(start, step)


def _bytes_of(column: pa.Array) -> int:
    """Return about how many bytes the decoded column takes. `nbytes` cannot be used for views and
    dictionaries: of a slice it counts all values."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        values = column.dictionary
        return int(len(column) * values.get_total_buffer_size() // max(1, len(values)))
    if pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):
        # A view has four 32-bit words. The first word is the length of the value.
        words = np.frombuffer(column.buffers()[1], np.int32)[4 * column.offset :]
        lengths = words[: 4 * len(column) : 4][~nulls_of(column)]
        return int(lengths.sum(dtype=np.int64)) + 8 * len(column)
    try:
        return int(column.nbytes)
    except pa.ArrowTypeError:  # pyarrow 18 raises this if a nested column has views.
        return int(column.get_total_buffer_size())


def split_rows(rows: RowBatch, *, in_order: bool = False) -> Iterator[RowBatch]:
    """Yield groups of rows with one topic, one value of WAIT and one kind (`RowBatch.kinds`): a
    batch must not mix these (MessageBatch.generateFromList). A group is in row order.
    With `in_order`, the groups of a topic follow each other in row order, too: a new group begins
    where WAIT or the kind changes. Delayed rows come first and together: consumers get them at
    their own time, whatever the order of the rows, so they must not divide groups of other rows."""
    for group in _by_topic(rows):
        kinds: np.ndarray[Any, Any] = group.kinds()
        if group.wait_store is not None:
            waits = pc.fill_null(group.wait_store, True).to_numpy(zero_copy_only=False)
            kinds = kinds + KINDS * ~waits
        if not kinds.any():
            yield group
        elif in_order:
            is_delayed = np.isin(kinds % KINDS, DELAYED)
            if is_delayed.any():
                yield from _by_kind(group, kinds, is_delayed)
                group, kinds = group.take(np.flatnonzero(~is_delayed)), kinds[~is_delayed]
            cuts = (np.flatnonzero(np.diff(kinds)) + 1).tolist()
            for first, last in itertools.pairwise((0, *cuts, len(group))):
                if last > first:
                    yield group.slice(first, last)
        else:
            yield from _by_kind(group, kinds, np.full(len(group), True))


def _by_kind(
    rows: RowBatch, kinds: np.ndarray[Any, Any], mask: np.ndarray[Any, Any]
) -> Iterator[RowBatch]:
    """Yield the rows of the mask, those of a kind together."""
    for kind in np.unique(kinds[mask]):
        yield rows.take(np.flatnonzero(mask & (kinds == kind)))


def without_rows(rows: RowBatch, refused: np.ndarray[Any, Any]) -> RowBatch:
    """Return the rows except those at the indices `refused`."""
    return rows.take(np.delete(np.arange(len(rows)), refused)) if len(refused) else rows


def _by_topic(rows: RowBatch) -> Iterator[RowBatch]:
    if isinstance(rows.topic, str):
        yield rows
        return
    encoded = rows.topic.dictionary_encode()
    topics = encoded.dictionary.to_pylist()
    if len(topics) == 1:
        yield rows.with_(topic=topics[0])
        return
    indices = encoded.indices.to_numpy(zero_copy_only=False)
    for index, topic in enumerate(topics):
        yield rows.take(np.flatnonzero(indices == index)).with_(topic=topic)


_GROUP: Final = 512
"""Limit of messages that are sent one by one as a group; 256 took 1.3 times the CPU per message."""
_GROUPS: Final = 4
"""Number of groups that must fit into the engine's window (`max_in_flight`)."""
_NOT_A_QUEUE: Final = -1


def place_rows(
    rows: RowBatch, info: TopicPublishInfo, sharding_hash: str
) -> tuple[RowBatch, Int64s, list[Refused]]:
    """Return the rows that can be sent, their destinations, and the rows that name unknown queues.
    All rows have the topic `info.topic`. Destinations are group numbers for
    `wire.columns.group_by_queue`. If the topic has q queues, groups 0 to q-1 are home queues, group
    q is "the engine chooses", and groups q+1 to 2q are queues that rows name."""
    queues = info.queues
    groups = np.full(len(rows), len(queues), np.int64)
    for keys, hash_name in (
        (rows.sharding_key, sharding_hash),
        (rows.lite_topic, LITE_TOPIC_HASH),
    ):
        if keys is not None:
            present = ~nulls_of(keys)
            groups[present] = queues_for_keys(info, keys, hash_name)[present]
    if rows.queue_id is None or rows.broker_name is None:
        return rows, groups, []
    unknown = _place_fixed(groups, rows, queues)
    refused = [Refused(int(row), "INVALID_QUEUE", _no_such_queue(info)) for row in unknown]
    return without_rows(rows, unknown), np.delete(groups, unknown), refused


def _place_fixed(groups: Int64s, rows: RowBatch, queues: Sequence[MessageQueue]) -> Int64s:
    """Set the groups of rows that name a queue; return the indices of rows with unknown queues. A
    row has both `queue_id` and `broker_name`, or none of them (`rows.checks`)."""
    assert rows.queue_id is not None and rows.broker_name is not None
    ids = ints_of(rows.queue_id, _NOT_A_QUEUE)
    queue_indices = np.full(len(rows), _NOT_A_QUEUE, np.int64)
    for broker in pc.unique(rows.broker_name.drop_null()).to_pylist():
        same = pc.equal(rows.broker_name, broker).fill_null(False)
        mask = same.to_numpy(zero_copy_only=False)
        table = {queue.queue_id: i for i, queue in enumerate(queues) if queue.broker_name == broker}
        own_ids, inverse = np.unique(ids[mask], return_inverse=True)
        indices = np.array([table.get(int(q), _NOT_A_QUEUE) for q in own_ids], np.int64)
        queue_indices[mask] = indices[inverse]
    placed = queue_indices >= 0
    groups[placed] = queue_indices[placed] + len(queues) + 1
    return np.flatnonzero(~nulls_of(rows.queue_id) & ~placed)


def encode_requests(
    rows: RowBatch, destinations: Int64s, queues: Sequence[MessageQueue], options: SinkOptions,
    ids: MessageIds, *, alone: bool,
) -> list[PendingRequest]:  # fmt: skip
    """Return the requests for a group of `split_rows`; requests of one queue are in row order. The
    `destinations` come from `place_rows`. With `alone` no row is sent in a batch."""
    assert isinstance(rows.topic, str)
    if not len(rows):
        return []
    timed, is_delayed = bool(rows.kinds()[0]), rows.is_delayed
    alone = alone or options.delivery == "transactional"
    ids_made = ids.ids(rows)
    rows, sys_flags = _with_compressed_bodies(rows, options, is_single=timed or alone)
    # The bodies of a request are all compressed or all not. So separate them, if order allows.
    kinds = 2 if sys_flags is not None and options.ordering == "none" else 1
    if kinds == 2:
        destinations = 2 * destinations + (sys_flags != 0)
    queue_count = len(queues)
    groups = group_by_queue(destinations, kinds * (2 * queue_count + 1))
    singles: SingleColumns | None = None
    lacking = np.zeros(len(rows) + 1, np.int64)
    if timed or alone:
        if not groups.sorted_already:
            order = groups.order
            rows, ids_made = rows.take(order), ids_made.take(pa.array(order))
        singles = _single_columns(rows, ids_made)
        encoded = rows.encoded_batch(ids_made, singles.properties)
        most = max(1, min(_GROUP, options.max_in_flight // _GROUPS))
    else:
        encoded = rows.encoded_batch(ids_made).take(groups)
        most = options.request_max_messages
        lacking = np.concatenate(([0], np.cumsum(lacks_keys(rows)[groups.order])))
    slices = cut_requests(encoded.offsets, groups.bounds, options.request_max_bytes, most)
    if sys_flags is None:
        flags = np.zeros(len(rows), np.int64)
    else:
        flags = sys_flags[groups.order]
        slices = _cut_at_changes(slices, flags)
    data, offsets = encoded.data, encoded.offsets
    waits = rows.wait_store is None or rows.wait_store[0].as_py() is not False
    requests = []
    for group, first, last in slices:
        place = group // kinds
        request = PendingRequest(
            rows.topic,
            None if place == queue_count else queues[place % (queue_count + 1)],
            [Piece(data, offsets[first : last + 1])],
            fixed=place > queue_count,
            sharded=place < queue_count,
            timed=timed,
            delayed=is_delayed,
            alone=alone,
            waits_for_store=waits,
            columns=singles.slice(first, last) if singles and last - first > 1 else None,
            lacks_keys=bool(lacking[last] > lacking[first]),
            sys_flag=int(flags[first]),
        )
        requests.append(request)
    if singles is None or is_delayed or options.ordering == "none":
        return requests
    # A broker handles the requests of one connection in several threads, so messages of a group
    # could be stored out of order. Therefore split groups that have a queue.
    return [
        part
        for request in requests
        for part in ([request] if request.queue is None else request.split())
    ]


def _with_compressed_bodies(
    rows: RowBatch, options: SinkOptions, *, is_single: bool
) -> tuple[RowBatch, Int64s | None]:
    """Compress the bodies of rows for batches. Return the rows, and the MessageSysFlag bits of each
    row, or None if no body shrank."""
    if is_single or not options.compress_type.endswith("-all"):
        return rows, None
    bodies, sys_flags = compressed_column(rows.body, options)
    if isinstance(sys_flags, int) or not sys_flags.any():
        return rows, None
    return rows.with_(body=bodies), sys_flags


def _cut_at_changes(slices: Sequence[RequestSlice], flags: Int64s) -> list[RequestSlice]:
    """Cut slices where `flags` change, because all messages of a batch have one flag."""
    parts = []
    for group, first, last in slices:
        changes = (first + 1 + np.flatnonzero(np.diff(flags[first:last]))).tolist()
        for start, end in itertools.pairwise((first, *changes, last)):
            parts.append(RequestSlice(group, start, end))
    return parts


def _single_columns(rows: RowBatch, ids: pa.Array) -> SingleColumns:
    columns = rows.property_columns(ids)
    properties = property_pieces(len(rows), **columns).strings()
    return SingleColumns(
        as_binary(rows.body),
        properties,
        columns["message_ids"],
        0 if rows.flag is None else ints_of(rows.flag, 0),
        least_version(properties[0].as_py().decode()),
    )


def _no_such_queue(info: TopicPublishInfo) -> str:
    brokers = ", ".join(list(info.queues_by_broker)[:8])
    return (
        f"the topic {info.topic!r} has no such queue; it has {len(info.queues)} on {brokers} "
        "(a queue_id needs its broker_name when there are several brokers)"
    )
