"""The accumulator by which Spark brings rows of the foreach lane to the driver (`ledgerVia=spark`).

A stream's foreach gives its tasks no other way to send data to the driver. When a task has
succeeded, Spark adds its rows once, and waits until the driver's Python process has taken them. So
the rows are durable before the epoch ends. (`DAGScheduler.updateAccumulators`,
`PythonAccumulatorV2.merge`.)"""

from __future__ import annotations

import pickle
from typing import Any, Final

from pyspark.accumulators import Accumulator, AccumulatorParam

from rocket_sink.errors import ConfigurationError, LedgerError
from rocket_sink.ledger.path import LedgerPath, first_line, resolve_path
from rocket_sink.ledger.storage import active_session, is_classic
from rocket_sink.ledger.token import may_hand_over
from rocket_sink.ledger.transport.handed import HandedRows, spool_handed
from rocket_sink.net import log
from rocket_sink.options import SinkOptions

_LOG: Final = log.logger(__name__)
_ATTRIBUTE: Final = "_rocket_sink_handed_rows"

Rows = list[HandedRows]


class _RowsInTask(AccumulatorParam[Rows]):
    def zero(self, value: Rows) -> Rows:
        return []

    def addInPlace(self, value1: Rows, value2: Rows) -> Rows:  # noqa: N802 (Spark's name)
        return value1 + value2


class _RowsOnDriver(_RowsInTask):
    """Writes rows to the spool on the driver's host. Keeps rows that it cannot write."""

    def __init__(self, place: LedgerPath) -> None:
        self._place = place

    def addInPlace(self, value1: Rows, value2: Rows) -> Rows:  # noqa: N802
        rows = value1 + value2
        if not rows:
            return rows
        try:
            # Write to this host first, where the next fold finds the rows. The scheduler's thread
            # runs this: while it waits for a store, no task of the application ends.
            try:
                spool_handed(self._place, rows, in_store=False)
            except LedgerError as error:
                # The host has no folder for the rows, for example a container without a home.
                _LOG.warning("%s. The rows go to the ledger's store, which takes longer", error)
                spool_handed(self._place, rows)
        except Exception as error:
            _LOG.error(
                "the ledger %s lacks the rows of %d tasks that have sent messages: %s. The driver "
                "keeps the rows in memory, and tries again when the next task ends",
                self._place, len(rows), first_line(error),
            )  # fmt: skip
            return rows
        return []

    def __reduce__(self) -> Any:
        return _RowsInTask, ()


class RowsByAccumulator:
    """The accumulator of one ledger's rows. Tasks get it pickled."""

    def __init__(self, accumulator: Accumulator[Rows]) -> None:
        # Unpickle only in tasks with rows: each unpickled accumulator sends the driver an update.
        self._pickled = pickle.dumps(accumulator)

    def add(self, rows: HandedRows) -> None:
        """Add rows in a task. If the task succeeds, Spark brings them to the driver."""
        accumulator: Accumulator[Rows] = pickle.loads(self._pickled)  # noqa: S301 (Spark's own)
        accumulator.add([rows])


def rows_by_accumulator(options: SinkOptions) -> RowsByAccumulator | None:
    """Return the application's accumulator for the ledger, on the driver. Return None if tasks hand
    no rows over, and with `ledgerVia=auto` without a classic session. Raise ConfigurationError for
    `ledgerVia=spark` without one."""
    session = active_session()
    if not may_hand_over(options):
        return None
    if not is_classic(session):
        if options.ledger_via == "auto":
            return None
        raise ConfigurationError(
            "ledgerVia=spark in foreach needs an accumulator, which Spark Connect does not have: "
            'use format("rocketmq"), or ledgerVia=spool with a ledger that tasks can write to'
        )
    context = session.sparkContext
    place = resolve_path(options.ledger)
    accumulators: dict[LedgerPath, RowsByAccumulator]
    accumulators = context.__dict__.setdefault(_ATTRIBUTE, {})
    if place not in accumulators:
        accumulators[place] = RowsByAccumulator(context.accumulator([], _RowsOnDriver(place)))
    return accumulators[place]
