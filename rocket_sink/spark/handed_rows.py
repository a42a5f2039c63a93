"""Ledger rows of foreach by an accumulator of Spark's (`ledgerVia`).

A stream's foreach gives its tasks no other way to tell the driver anything. Spark adds what a task
has accumulated once, when it has succeeded, and waits for the driver's Python process to take it:
so rows are durable before the epoch is. (`DAGScheduler.updateAccumulators`,
`PythonAccumulatorV2.merge`.)
"""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any, Final

from pyspark.accumulators import Accumulator, AccumulatorParam

from rocket_sink.errors import ConfigurationError
from rocket_sink.ledger.path import LedgerPath, resolve_path
from rocket_sink.ledger.spool.handed import HandedRows, spool_handed
from rocket_sink.ledger.storage import active_session
from rocket_sink.ledger.table import first_line
from rocket_sink.net import log
from rocket_sink.options import SinkOptions
from rocket_sink.spark.session_checks import is_classic

if TYPE_CHECKING:
    from pyspark import SparkContext

_LOG: Final = log.logger(__name__)
_ATTRIBUTE: Final = "_rocket_sink_handed_rows"

Rows = list[HandedRows]


class _InTask(AccumulatorParam[Rows]):
    """Gathers."""

    def zero(self, value: Rows) -> Rows:
        return []

    def addInPlace(self, value1: Rows, value2: Rows) -> Rows:  # noqa: N802 (Spark's name)
        return value1 + value2


class _OnDriver(_InTask):
    """Writes what comes to the ledger's spool; keeps what cannot be written for the next time."""

    def __init__(self, place: LedgerPath) -> None:
        self._place = place

    def addInPlace(self, value1: Rows, value2: Rows) -> Rows:  # noqa: N802
        rows = value1 + value2
        while rows:
            try:
                spool_handed(self._place, rows[0])
            except Exception as error:
                _LOG.error(
                    "the ledger %s lacks the rows of %d tasks that have sent: %s. They are kept in "
                    "memory until the next task ends",
                    self._place.uri, len(rows), first_line(error),
                )  # fmt: skip
                break
            del rows[0]
        return rows

    def __reduce__(self) -> Any:
        return _InTask, ()


class RowsByAccumulator:
    """For the tasks of one ledger; pickled to them."""

    def __init__(self, accumulator: Accumulator[Rows]) -> None:
        # Pickled by itself, and loaded where it is needed: each accumulator that a task knows costs
        # the driver an update.
        self._pickled = pickle.dumps(accumulator)

    def add(self, rows: HandedRows) -> None:
        """Called in a task: Spark takes the rows along when it succeeds."""
        accumulator: Accumulator[Rows] = pickle.loads(self._pickled)  # noqa: S301 (Spark's own)
        accumulator.add([rows])


def rows_by_accumulator(options: SinkOptions) -> RowsByAccumulator | None:
    """One per application and ledger; called on the driver.

    None where tasks need none, or have none: `ledgerVia=spool`, no ledger, no classic session.

    Raises:
        ConfigurationError: `ledgerVia=spark` without a classic session.
    """
    session = active_session()
    if not options.ledger or options.ledger_via == "spool":
        return None
    if not is_classic(session):
        if options.ledger_via == "auto":
            return None
        raise ConfigurationError(
            "ledgerVia=spark in foreach needs an accumulator, which Spark Connect does not have: "
            'use format("rocketmq"), or ledgerVia=spool with a ledger that tasks can write to'
        )
    context: SparkContext = session.sparkContext
    place = resolve_path(options.ledger)
    if place.is_local and options.ledger_via == "auto":
        return None
    known = context.__dict__.setdefault(_ATTRIBUTE, {})
    if place not in known:
        known[place] = RowsByAccumulator(context.accumulator([], _OnDriver(place)))
    found: RowsByAccumulator = known[place]
    return found
