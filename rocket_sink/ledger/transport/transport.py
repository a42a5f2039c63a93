"""The transports, by which a task attempt's ledger rows become durable, and the choice of one.

| transport | lane | rows are durable | rows of a failed attempt |
|---|---|---|---|
| `spool.SpoolWriter` | foreach, data source, backfill | as they come; sealed at the end | stay |
| `handed.RowsInMemory` | foreach, data source with `ledgerVia=spark` | on the driver | are lost |
| `RowsForCaller` | foreachBatch, batch writes | with the commit of `data_files` | are lost |"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Protocol

from rocket_sink.errors import LedgerError
from rocket_sink.ledger.records import RunContext, worker_name
from rocket_sink.ledger.token import LedgerToken, may_hand_over
from rocket_sink.ledger.transport.handed import HandedRows, RowsInMemory
from rocket_sink.ledger.transport.spool import SpoolWriter
from rocket_sink.net import log
from rocket_sink.options import SinkOptions

if TYPE_CHECKING:
    import pyarrow as pa


_LOG: Final = log.logger(__name__)
_warned: set[str] = set()
"""Ledgers for which this process has logged that Spark brings their rows to the driver."""


class RowTransport(Protocol):
    """Makes a task attempt's ledger rows durable; for one thread of one process."""

    keeps_failed: bool
    """Whether rows of a failed or killed attempt are kept."""

    def append(self, batch: pa.RecordBatch, /) -> None:
        """Take rows. Raise LedgerError if the rows cannot be kept; the task must fail."""

    def finish(self) -> HandedRows | None:
        """Make all rows durable, or return them for Spark to bring to the driver."""

    def abort(self) -> None:
        """End a failed attempt; never raises."""


class RowsForCaller:
    """A `RowTransport` to the caller, who writes data files or returns the rows to Spark."""

    keeps_failed = False

    def __init__(self, emit: Callable[[pa.RecordBatch], None]) -> None:
        self.append = emit

    def finish(self) -> None:
        """Do nothing: the caller has the rows."""

    abort = finish


def transport_of(
    options: SinkOptions, ctx: RunContext, *, emit: Callable[[pa.RecordBatch], None] | None,
    token: LedgerToken | None, hands_over: bool,
) -> RowTransport:  # fmt: skip
    """Choose the transport of an attempt's rows, and check that it leads to the driver's ledger.
    Raise LedgerError if the ledger is not the driver's, or cannot be written.

    Args:
        emit: a function that takes the rows; None: choose another transport.
        hands_over: the caller can give rows to Spark if the ledger is out of reach (`ledgerVia`).
    """
    if emit is None and hands_over and may_hand_over(options) and _must_hand_over(options, token):
        return RowsInMemory(ctx)
    if token is not None:
        token.check()
    if emit is not None:
        return RowsForCaller(emit)
    if options.ledger:
        return SpoolWriter(options.ledger, ctx)
    # Drop the rows if there is no ledger. A row that is given up then fails the task.
    return RowsForCaller(deque[Any](maxlen=0).append)


def _must_hand_over(options: SinkOptions, token: LedgerToken | None) -> bool:
    """Return whether a task that may hand its rows over has no other way to the ledger."""
    why = "ledgerVia=spark"
    if options.ledger_via == "auto":
        try:
            if token is not None:
                token.check()
            return False
        except LedgerError as error:
            why = f"the ledger is out of reach: {error.__cause__ or error}"
    _warn_once(options.ledger, why)
    return True


def _warn_once(ledger: str, why: str) -> None:
    if ledger not in _warned:
        _warned.add(ledger)
        _LOG.warning(
            "Spark brings rows for the ledger %s from %s to the driver with the results of tasks "
            "(%s); what a failed or killed task sends is on no record",
            ledger, worker_name(), why,
        )  # fmt: skip
