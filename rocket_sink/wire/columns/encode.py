"""Encoding of columns of messages to the bytes of batch requests, without Python code per row.

Each message gets its inner form in a batch (`wire.batch`). So consecutive rows of an `EncodedBatch`
are the body of a SEND_BATCH_MESSAGE request: a slice of one buffer, without a copy. `rows.checks`
has checked the values; only the length of the properties is checked again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rocket_sink.errors import LocalProtocolError
from rocket_sink.forks import lazy
from rocket_sink.message_rules import PROPERTIES_MAX_BYTES
from rocket_sink.wire.batch import INNER_OVERHEAD_BYTES
from rocket_sink.wire.columns.buffers import (
    Int64s,
    fixed_width,
    ints_of,
    join_pieces,
    lengths_of,
    offsets_of,
)
from rocket_sink.wire.columns.properties import PropertyPieces
from rocket_sink.wire.ids import id_prefix

_HEX: Final = np.frombuffer(b"0123456789ABCDEF", np.uint8)


def _hex_of_16_bits() -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    numbers = np.arange(1 << 16)
    digits = np.stack([_HEX[numbers >> shift & 15] for shift in (12, 8, 4, 0)], axis=1)
    return np.ascontiguousarray(digits).view(np.uint32).ravel()


_HEX_16: Final = _hex_of_16_bits()


def message_id_column(
    *, ip: bytes, pid: int, class_hash: int, span_ms: int, counter: int, count: int
) -> pa.StringArray:
    """Return `count` client message ids (createUniqID, see `wire.ids`) from `counter` on, at
    `span_ms` after the start of the month. The counter wraps at 65,536, like Java's short. At each
    wrap the time in the ids grows by 1 ms, so that ids do not repeat. The caller adds `count` to
    its counter."""
    counters: Int64s = np.arange(count, dtype=np.int64) + (counter & 0xFFFF)
    times = span_ms + (counters >> 16)
    prefix = np.frombuffer(id_prefix(ip, pid, class_hash).encode(), np.uint32)
    words = len(prefix)
    rows = np.empty((count, words + 3), np.uint32)
    rows[:, :words] = prefix
    rows[:, words] = _HEX_16[times >> 16 & 0xFFFF]
    rows[:, words + 1] = _HEX_16[times & 0xFFFF]
    rows[:, words + 2] = _HEX_16[counters & 0xFFFF]
    return fixed_width(rows).view(pa.string())


def hex_column(digests: np.ndarray[tuple[int, int], np.dtype[np.uint8]]) -> pa.StringArray:
    """Return the bytes of each row (an even number) as upper-case hex."""
    return fixed_width(_HEX_16[np.ascontiguousarray(digests).view(">u2")]).view(pa.string())


@dataclass(frozen=True)
class QueueGroups:
    """Rows by queue: `order[bounds[q]:bounds[q + 1]]` are the rows of queue q, in row order.
    `sorted_already`: `order` is 0, 1, 2, ..."""

    order: Int64s
    bounds: Int64s
    sorted_already: bool


class RequestSlice(NamedTuple):
    """A request: the rows `first` to `last` (exclusive, after grouping) of queue `group`."""

    group: int
    first: int
    last: int


def group_by_queue(queue_index: npt.NDArray[np.integer], queues: int) -> QueueGroups:
    """Group the rows by queue, in their order (a stable sort). `queue_index` has 0 to `queues` - 1
    for each row. Up to 65,536 queues numpy sorts 16-bit integers by radix, in linear time."""
    counts = np.bincount(queue_index, minlength=queues)
    if len(counts) > queues:
        raise ValueError(f"queue index {len(counts) - 1} with {queues} queues")
    bounds = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    if len(queue_index) < 2 or bool((queue_index[1:] >= queue_index[:-1]).all()):
        return QueueGroups(np.arange(len(queue_index)), bounds, True)
    small = queue_index.astype(np.uint16) if queues <= 1 << 16 else queue_index
    return QueueGroups(np.argsort(small, kind="stable"), bounds, False)


def cut_requests(
    offsets: Int64s, bounds: Int64s, max_bytes: int, max_messages: int
) -> list[RequestSlice]:
    """Cut each group into as few slices as the two limits allow, in order. A message larger than
    `max_bytes` gets its own slice. `offsets` are of `EncodedBatch`, `bounds` of `QueueGroups`."""
    sizes = offsets[bounds[1:]] - offsets[bounds[:-1]]
    counts = np.diff(bounds)
    is_one_slice = (sizes <= max_bytes) & (counts <= max_messages)
    slices: list[RequestSlice] = []
    for group in np.flatnonzero(counts).tolist():
        first, last = int(bounds[group]), int(bounds[group + 1])
        while first < last:
            cut = last
            if not is_one_slice[group]:
                limit = offsets[first] + max_bytes
                fitting = int(np.searchsorted(offsets[first + 1 : last + 1], limit, side="right"))
                cut = first + min(max(fitting, 1), max_messages)
            slices.append(RequestSlice(group, first, cut))
            first = cut
    return slices


@dataclass(frozen=True, eq=False)
class EncodedBatch:
    """n encoded messages in one buffer: binary or large binary, without nulls."""

    messages: pa.Array

    def __len__(self) -> int:
        return len(self.messages)

    @lazy
    def offsets(self) -> Int64s:
        """The n + 1 offsets into `data`."""
        return offsets_of(self.messages).astype(np.int64, copy=False)

    @lazy
    def data(self) -> pa.Buffer:
        return self.messages.buffers()[2] or pa.py_buffer(b"")

    def take(self, groups: QueueGroups) -> EncodedBatch:
        """Return the messages in the order of `groups`."""
        if groups.sorted_already:
            return self
        return EncodedBatch(self.messages.take(pa.array(groups.order)))


def encode_columns(
    body: pa.Array, properties: pa.Array | PropertyPieces, flags: int | pa.Array = 0
) -> EncodedBatch:
    """Encode messages of one topic, in their order. Raise LocalProtocolError if a property string
    is longer than PROPERTIES_MAX_BYTES.

    Args:
        body: binary, large binary or a string type (its UTF-8 bytes), without nulls.
        properties: wire property strings or, faster, the result of `property_pieces`.
        flags: one value for all messages, or n values; a null counts as 0.
    """
    if isinstance(properties, pa.Array):
        properties = PropertyPieces((properties,), lengths_of(properties))
    longest = int(properties.sizes.max(initial=0))
    if longest > PROPERTIES_MAX_BYTES:
        raise LocalProtocolError(
            f"properties of {longest} bytes; the limit is {PROPERTIES_MAX_BYTES}",
            size=longest, limit=PROPERTIES_MAX_BYTES,
        )  # fmt: skip
    body_bytes = lengths_of(body)
    head = np.zeros((len(body_bytes), 5), ">i4")
    head[:, 0] = body_bytes + properties.sizes + INNER_OVERHEAD_BYTES
    head[:, 3] = flags if isinstance(flags, int) else ints_of(flags, 0)
    head[:, 4] = body_bytes
    property_bytes = properties.sizes.astype(">i2")
    pieces = (head, body, property_bytes, *properties.pieces)
    return EncodedBatch(join_pieces(pieces, len(head)))
