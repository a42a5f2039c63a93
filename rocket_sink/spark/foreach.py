"""The foreach lane inside a worker: open, process, close of one task attempt.

What Spark does and the lane must stand (pyspark 4.2 `_construct_foreach_function`):

- `open` returning None would drop all rows in silence; an `open` that raises is never closed;
- `close(None)` is not success: an upstream failure ends the input in the same way. So close waits
  for every answer and balances the accounts of what came in, and whether the epoch is done is for
  the driver to say;
- an error in `close` replaces the one from `process`, so close never raises after an error.
"""

from __future__ import annotations

from typing import Any, Final

from rocket_sink.ledger.shared import LedgerToken
from rocket_sink.options import SinkOptions
from rocket_sink.spark.budget import refuse_budget
from rocket_sink.spark.context import run_context, streaming_query
from rocket_sink.spark.contract import ColumnPlan
from rocket_sink.spark.gather import Gatherer, RowPile
from rocket_sink.spark.worker import TaskRun

_DRIVE_ROWS: Final = 500
"""Rows (some milliseconds of Spark's time) after which answers are looked for."""


class ForeachTask:
    """One task attempt of the foreach lane."""

    def __init__(
        self, options: SinkOptions, plan: ColumnPlan | None, partition: int, epoch: int,
        token: LedgerToken | None = None,
    ) -> None:  # fmt: skip
        refuse_budget(options)
        ctx = run_context(options, "foreach", epoch=epoch, partition=partition)
        self._run = TaskRun(options, ctx, token=token, streaming_query=streaming_query())
        self._gatherer = Gatherer(options, plan)
        self._pile = RowPile(self._gatherer, options.gather_rows)
        self._rows = self._pile.rows
        self._driven = 0
        self._ended = False

    def process(self, row: Any) -> None:
        """Take a row; raises as soon as the task cannot succeed any more."""
        rows = self._rows
        rows.append(row)
        if len(rows) >= self._pile.look_at:
            self._look()

    def _look(self) -> None:
        if self._pile.is_full():
            self._flush()
        elif len(self._rows) - self._driven >= _DRIVE_ROWS:
            self._driven = len(self._rows)
            self._run.drive()

    def close(self, error: BaseException | None) -> None:
        """Send what is left and await every answer; after an error, only let go."""
        if self._ended:
            return
        self._ended = True
        if error is not None:
            self._run.abort()
            return
        try:
            self._flush()
            self._run.finish()
        except BaseException:
            self._run.abort()
            raise

    def _flush(self) -> None:
        batch, self._driven = self._pile.take(), 0
        if batch is not None:
            self._run.feed(batch, self._gatherer.plan)
