"""Grouping rows by queue and cutting each group into requests; numpy only, no work per row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rocket_sink.wire.columns_buffers import Int64s


@dataclass(frozen=True)
class QueueGroups:
    """Rows ordered by queue: `order[bounds[q]:bounds[q + 1]]` are queue q's rows, in row order.

    `sorted_already` says that `order` is 0, 1, 2, ... and nothing needs to move.
    """

    order: Int64s
    bounds: Int64s
    sorted_already: bool


class RequestSlice(NamedTuple):
    """Rows `first` to `last` (exclusive, after grouping) of queue `group` are one request."""

    group: int
    first: int
    last: int


def group_by_queue(queue_index: npt.NDArray[np.integer], queues: int) -> QueueGroups:
    """Bring the rows of each queue together, keeping their order (a stable counting sort).

    `queue_index` holds 0 to `queues` - 1 for each row. numpy sorts 16-bit integers by radix, so
    the cost per row is flat up to 65,536 queues and n log n above.
    """
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
    """Cut each group into as few slices as the two limits allow, in order.

    `offsets` are the encoded messages' (n + 1), `bounds` a `QueueGroups`' (queues + 1). A message
    that is larger than `max_bytes` is a slice of its own. The work is per slice, not per row.
    """
    sizes = offsets[bounds[1:]] - offsets[bounds[:-1]]
    counts = np.diff(bounds)
    whole = (sizes <= max_bytes) & (counts <= max_messages)
    slices: list[RequestSlice] = []
    for group in np.flatnonzero(counts).tolist():
        first, last = int(bounds[group]), int(bounds[group + 1])
        if whole[group]:
            slices.append(RequestSlice(group, first, last))
        else:
            slices.extend(_cut_one(offsets, group, first, last, max_bytes, max_messages))
    return slices


def _cut_one(
    offsets: Int64s, group: int, first: int, last: int, max_bytes: int, max_messages: int
) -> Iterator[RequestSlice]:
    while first < last:
        limit = offsets[first] + max_bytes
        fitting = int(np.searchsorted(offsets[first + 1 : last + 1], limit, side="right"))
        cut = first + min(max(fitting, 1), max_messages)
        yield RequestSlice(group, first, cut)
        first = cut
