"""Which queue each row goes to: a whole column at a time, pure.

A row has one of three destinations:

- its own queue (`queue_id`, `broker_name`): never changes;
- a home queue, found from its sharding key: the same in every task, epoch and language;
- none: the engine's fault strategy spreads requests over the brokers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rocket_sink.message import MessageQueue
from rocket_sink.routing.keyed import owners
from rocket_sink.wire.columns_buffers import Int64s, ints_of

if TYPE_CHECKING:
    from rocket_sink.routing.publish import PublishInfo
    from rocket_sink.spark.contract_rows import RowBatch

_NOT_A_QUEUE: Final = -1


@dataclass(frozen=True, eq=False)
class Assignment:
    """Group numbers of n rows of one topic, for `wire.columns.group_by_queue`.

    Groups 0..q-1 are home queues, q is "the engine chooses", q+1.. are the rows' own queues.
    `refused` are rows (indices) whose own queue does not exist; their group is q.
    """

    groups: Int64s
    queues: Sequence[MessageQueue]
    refused: Int64s

    @property
    def group_count(self) -> int:
        return 2 * len(self.queues) + 1

    def queue_of(self, group: int) -> MessageQueue | None:
        count = len(self.queues)
        if group == count:
            return None
        return self.queues[group if group < count else group - count - 1]

    def is_sharded(self, group: int) -> bool:
        return group < len(self.queues)

    def is_fixed(self, group: int) -> bool:
        return group > len(self.queues)


def assign(rows: RowBatch, info: PublishInfo, sharding_hash: str) -> Assignment:
    """Destinations of rows of one topic (`info.topic`), by the queues that `info` has."""
    queues = info.queues
    groups = np.full(len(rows), len(queues), np.int64)
    refused = np.empty(0, np.int64)
    if rows.sharding_key is not None:
        _place_sharded(groups, rows.sharding_key, owners(info, rows.sharding_key, sharding_hash))
    if rows.queue_id is not None:
        refused = _place_fixed(groups, rows, queues)
    return Assignment(groups, queues, refused)


def _place_sharded(groups: Int64s, keys: pa.Array, homes: Int64s) -> None:
    if keys.null_count:
        present = keys.is_valid().to_numpy(zero_copy_only=False)
        groups[present] = homes[present]
    else:
        groups[:] = homes


def _place_fixed(groups: Int64s, rows: RowBatch, queues: Sequence[MessageQueue]) -> Int64s:
    """Put rows with their own queue into its group; returns the rows whose queue is unknown."""
    assert rows.queue_id is not None
    present = rows.queue_id.is_valid().to_numpy(zero_copy_only=False)
    ids = ints_of(rows.queue_id, _NOT_A_QUEUE)
    found = np.full(len(rows), _NOT_A_QUEUE, np.int64)
    for broker, mask in _broker_masks(rows.broker_name, present):
        own = [i for i, queue in enumerate(queues) if broker in (None, queue.broker_name)]
        table = {queues[i].queue_id: i for i in own}
        if broker is None and len({queues[i].broker_name for i in own}) > 1:
            continue
        wanted = ids[mask]
        known = np.array([table.get(int(q), _NOT_A_QUEUE) for q in np.unique(wanted)], np.int64)
        found[mask] = known[np.searchsorted(np.unique(wanted), wanted)]
    placed = found >= 0
    groups[placed] = found[placed] + len(queues) + 1
    return np.flatnonzero(present & ~placed)


def _broker_masks(
    names: pa.Array | None, present: np.ndarray[Any, np.dtype[np.bool_]]
) -> list[tuple[str | None, np.ndarray[Any, np.dtype[np.bool_]]]]:
    if names is None:
        return [(None, present)]
    masks: list[tuple[str | None, np.ndarray[Any, np.dtype[np.bool_]]]] = []
    for name in pc.unique(names).to_pylist():
        same = pc.equal(names, name) if name is not None else names.is_null()
        masks.append((name, same.fill_null(False).to_numpy(zero_copy_only=False) & present))
    return masks
