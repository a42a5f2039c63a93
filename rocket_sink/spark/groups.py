"""Rows parted into groups that may share a batch request, and rows picked out by index."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rocket_sink.spark.contract_rows import RowBatch

_PART_BYTES: Final = 8 << 20
"""Input is worked on in parts of about this size: several columns of it exist at a time."""
Mask = np.ndarray[Any, np.dtype[np.bool_]]


def parts_of(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """The batch in parts that are not too big to be worked on, in order, without a copy."""
    rows = batch.num_rows
    if batch.nbytes <= _PART_BYTES:
        yield batch
        return
    step = max(1, rows * _PART_BYTES // batch.nbytes)
    for start in range(0, rows, step):
        yield batch.slice(start, step)


def split_rows(rows: RowBatch) -> Iterator[RowBatch]:
    """Groups of one topic (as text), one WAIT and one kind (timed or not), in row order.

    A batch may not mix them (MessageBatch.generateFromList; timed messages not at all).
    """
    for group in _by_topic(rows):
        for mask in _masks(group):
            if mask is None:
                yield group
            elif mask.any():
                yield group.take(np.flatnonzero(mask))


def without_rows(rows: RowBatch, refused: np.ndarray[Any, Any]) -> RowBatch:
    """The rows but those of the given indices."""
    if not len(refused):
        return rows
    keep = np.ones(len(rows), np.bool_)
    keep[refused] = False
    return rows.take(np.flatnonzero(keep))


def waits_for_store(rows: RowBatch) -> bool:
    """The WAIT of a group that `split_rows` made."""
    if rows.wait_store is None or not len(rows):
        return True
    first = rows.wait_store[0].as_py()
    return first is None or bool(first)


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


def _masks(rows: RowBatch) -> Iterator[Mask | None]:
    timed = rows.is_timed()
    patient = _patient(rows)
    if not timed.any() and patient.all():
        yield None
        return
    for is_timed in (False, True):
        for waits in (True, False):
            yield (timed == is_timed) & (patient == waits)


def _patient(rows: RowBatch) -> Mask:
    if rows.wait_store is None:
        return np.ones(len(rows), np.bool_)
    waits: pa.Array = pc.fill_null(rows.wait_store, True)
    mask: Mask = waits.to_numpy(zero_copy_only=False)
    return mask
