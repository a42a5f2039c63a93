"""Ledger rows that a task hands to the driver by Spark, where it does not write them to the spool.

Spark carries them with the task's result: in the commit message of the data source, in an
accumulator of foreach. So what a failed or killed task sent is on no record, and the rows of a task
are kept in memory until its end. On the driver they go to the spool, like any others.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from rocket_sink.errors import LedgerError
from rocket_sink.ledger.path import LedgerPath
from rocket_sink.ledger.records import RunContext
from rocket_sink.ledger.spool.stream import BatchWriter, checked_batches
from rocket_sink.ledger.spool.writer import SpoolWriter
from rocket_sink.net import log

_LOG: Final = log.logger(__name__)
_MOST_BYTES: Final = 64 * 1024 * 1024
"""Of one task; the driver gets those of all tasks of an epoch (`spark.driver.maxResultSize`)."""


@dataclass(frozen=True)
class HandedRows:
    """A task attempt's ledger rows; `stream` is what its spool file would hold."""

    ctx: RunContext
    stream: bytes


class RowsInMemory:
    """Gathers a task attempt's ledger rows; for one thread of one process."""

    def __init__(self, ctx: RunContext) -> None:
        self._ctx = ctx
        self._file: io.BytesIO | None = None
        self._stream: BatchWriter | None = None

    def append(self, batch: pa.RecordBatch) -> None:
        """Keep rows.

        Raises:
            LedgerError: they are more than the driver should be given; the task must fail.
        """
        if not batch.num_rows:
            return
        if self._file is None or self._stream is None:
            self._file = io.BytesIO()
            self._stream = BatchWriter(self._file)
        self._stream.write(batch)
        if self._file.tell() > _MOST_BYTES:
            raise LedgerError(
                f"the ledger rows of this task are more than {_MOST_BYTES >> 20} MiB, too many to "
                "go to the driver with the task's result (ledgerVia). Dead letters with their "
                "bodies are the largest: make tasks smaller, set dlqIncludeBody=false, or let the "
                "tasks reach the ledger"
            )

    def take(self) -> HandedRows | None:
        """All rows; None: there are none."""
        if self._file is None or self._stream is None:
            return None
        self._stream.close()
        rows = HandedRows(self._ctx, self._file.getvalue())
        self._file = self._stream = None
        return rows


def spool_handed(place: LedgerPath, rows: HandedRows) -> None:
    """Called on the driver: put the rows into the spool, durably.

    Into that of the driver's own folder where the store fails.

    Raises:
        LedgerError: they can be written nowhere.
    """
    *others, last = place.spools
    for spool in others:
        try:
            _spool(spool, rows)
        except LedgerError as error:
            _LOG.warning("%s. The rows wait in %s", error, last.spool)
        else:
            return
    _spool(last, rows)


def _spool(place: LedgerPath, rows: HandedRows) -> None:
    writer = SpoolWriter(place, rows.ctx)
    for batch in checked_batches(io.BytesIO(rows.stream), "of a task"):
        writer.append(batch)
    writer.seal()
