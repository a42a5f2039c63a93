"""Arrow batches inside foreach: `RocketSink.stream` makes each batch one row for Spark.

Spark pickles each row that it hands to a foreach writer, which costs more CPU than sending the row.
So `pack` turns an Arrow batch into a *pack*: one row whose only column is the batch as an Arrow IPC
stream. Spark pickles a few hundred packs instead of a million rows, and `PackTask` opens them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import DataFrame

from rocket_sink.ledger.token import LedgerToken
from rocket_sink.ledger.transport.accumulator import RowsByAccumulator
from rocket_sink.net import log
from rocket_sink.options import SinkOptions
from rocket_sink.rows.contract import ColumnPlan
from rocket_sink.spark.foreach_task import finish_run, foreach_run

_LOG: Final = log.logger(__name__)
_COLUMN: Final = "arrow_batch"
_MOST_BYTES: Final = 16 << 20
"""Largest pack of more than one row. Spark cuts batches by rows, and by bytes only from 4.1 on.
Packs of 10,000 large bodies would take too much memory, because two workers and Spark hold them."""


def packed(df: DataFrame) -> DataFrame | None:
    """Return the frame as packs; None if Spark's `mapInArrow` lacks pandas, which it asks for."""
    try:
        return df.mapInArrow(pack, f"{_COLUMN} binary")
    except ImportError as error:
        _LOG.warning("Spark hands over each row alone, which takes twice the CPU: %s", error)
        return None


def plan_below(plan: Any) -> Any:
    """Return the plan (in the JVM) of the frame that was packed; the plan itself without packs."""
    return plan.child() if list(plan.schema().fieldNames()) == [_COLUMN] else plan


def pack(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the packs of Arrow batches; for `mapInArrow`."""
    for batch in batches:
        for part in _parts(batch):
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, part.schema) as stream:
                stream.write_batch(part)
            stored = sink.getvalue()
            offsets = pa.array([0, stored.size], pa.int32()).buffers()[1]
            # Build the column from the stream's buffer: pa.array would copy it.
            column = pa.Array.from_buffers(pa.binary(), 1, [None, offsets, stored])
            yield pa.RecordBatch.from_arrays([column], [_COLUMN])


def _parts(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Yield the batch in halves until each part has one row or fits into a pack; rows keep their
    order."""
    if not batch.num_rows:
        return
    if batch.num_rows == 1 or pa.ipc.get_record_batch_size(batch) <= _MOST_BYTES:
        yield batch
        return
    half = batch.num_rows // 2
    yield from _parts(batch.slice(0, half))
    yield from _parts(batch.slice(half))


class PackTask:
    """The foreach writer of a task attempt whose rows are packs. Another attempt gets the same
    packs, as tasks of the data source get the same batches, so rows need no ids of their own."""

    def __init__(
        self, options: SinkOptions, plan: ColumnPlan, partition: int, epoch: int,
        token: LedgerToken | None, handed: RowsByAccumulator | None,
    ) -> None:  # fmt: skip
        self._run = foreach_run(options, partition, epoch, token, hands_over=handed is not None)
        self._plan = plan
        self._handed = handed

    def process(self, row: Any) -> None:
        """Send the rows of a pack; raise an error once the task cannot succeed any more."""
        self._run.feed(pa.ipc.open_stream(row[0]).read_next_batch(), self._plan)

    def close(self, error: BaseException | None) -> None:
        """Await all answers; after an error of Spark only free the engine."""
        if error is not None:
            self._run.abort()
            return
        with self._run:
            finish_run(self._run, self._handed)
