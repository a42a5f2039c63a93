"""Ledger rows that Spark brings to the driver, for tasks that do not reach the ledger's folder.

Spark brings the rows with the task's result: in the data source's commit message, or in foreach by
an accumulator (`transport.accumulator`). The driver writes them to the spool. A task's rows stay in
its memory until its end. So the ledger does not record the sends of a failed or killed task."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from rocket_sink.errors import LedgerError
from rocket_sink.ledger.path import LedgerPath
from rocket_sink.ledger.records import RunContext
from rocket_sink.ledger.transport.spool import SpoolWriter
from rocket_sink.ledger.transport.stream import BatchWriter
from rocket_sink.net import log

_LOG: Final = log.logger(__name__)
_MOST_BYTES: Final = 64 * 1024 * 1024
"""Limit of a task's rows. The rows of a whole epoch must fit into `spark.driver.maxResultSize`."""


@dataclass(frozen=True)
class HandedRows:
    """A task attempt's ledger rows; `stream` is the content of a spool file."""

    ctx: RunContext
    stream: bytes


class RowsInMemory:
    """A `RowTransport` that keeps an attempt's rows in memory for Spark; for one thread."""

    keeps_failed = False

    def __init__(self, ctx: RunContext) -> None:
        self._ctx = ctx
        self._file = io.BytesIO()
        self._stream: BatchWriter | None = None

    def append(self, batch: pa.RecordBatch) -> None:
        """Keep rows. Raise LedgerError if they are too many for the driver; the task must fail."""
        if not batch.num_rows:
            return
        self._stream = self._stream or BatchWriter(self._file)
        self._stream.write(batch)
        if self._file.tell() > _MOST_BYTES:
            raise LedgerError(
                f"the ledger rows of this task are more than {_MOST_BYTES >> 20} MiB, too many to "
                "go to the driver with the task's result (ledgerVia). Dead letters with their "
                "bodies are the largest: make tasks smaller, set ledgerRetention=body=0, or let "
                "the tasks reach the ledger"
            )

    def finish(self) -> HandedRows | None:
        """Return the rows for Spark; None if there are none."""
        if self._stream is None:
            return None
        self._stream.flush()
        rows = HandedRows(self._ctx, self._file.getvalue())
        self.abort()
        return rows

    def abort(self) -> None:
        """Drop the rows."""
        self._file, self._stream = io.BytesIO(), None


def spool_handed(
    place: LedgerPath, handed: Sequence[HandedRows], *, in_store: bool = True
) -> None:  # fmt: skip
    """Write the rows of task attempts to the spool durably, on the driver. All rows are in one
    file, so a caller that gets a LedgerError may write them again: none is there then.

    For a ledger in a store, `in_store` tries the spool in the store, then the spool in the driver's
    folder. Without it only the driver's folder is used, because a store may be slow. A ledger in a
    local folder has only one spool."""
    spools = place.spools if in_store else place.spools[-1:]
    for spool in spools:
        try:
            SpoolWriter(spool, handed[0].ctx).put(rows.stream for rows in handed)
            return
        except LedgerError as error:
            if spool is spools[-1]:
                raise
            _LOG.warning("%s. The rows wait in %s", error, spools[-1].spool)
