"""A task attempt of `foreach`: gathers rows from Spark, and feeds batches to the `TaskRunner`.

Spark calls `process` for each row, and nothing while no row comes. So a second thread sends rows
that waited for `gatherMaxDelayMs`, and reads brokers' answers. One lock guards task and engine:

- `process` appends a row without the lock. It takes the lock only if the buffer has
  `RowBuffer.look_at` rows: at the first row of a batch, then about every hundred rows;
- the thread takes rows out of the buffer and feeds them under the lock, so rows keep their order;
- after an error in one of them `look_at` is 0, and the thread ends, so nothing more is sent. The
  next `process` or `close` raises the error;
- `close` ends the thread before it sends the remaining rows.

A forked child has no such thread. It raises an error, and does not resend its parent's rows."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Iterator
from datetime import datetime
from typing import Any, Final

from pyspark.sql.types import TimestampType

from rocket_sink.errors import ConfigurationError
from rocket_sink.ledger.token import LedgerToken
from rocket_sink.ledger.transport.accumulator import RowsByAccumulator
from rocket_sink.options import SinkOptions
from rocket_sink.rows.contract import ColumnPlan
from rocket_sink.rows.row_batcher import FarTime, RowBatcher, RowBuffer
from rocket_sink.spark.checks.budget import refuse_budget
from rocket_sink.spark.checks.context import id_settings, run_context, streaming_query
from rocket_sink.task.runner import TaskRunner

_DRIVE_ROWS: Final = 500
"""`process` reads answers after this many new rows; Spark delivers them within milliseconds."""
_ANSWERS_S: Final = 0.002
"""The interval at which the thread reads answers while no row comes."""


def _time_of(micros: int | None) -> datetime | None:
    """Return a TIMESTAMP as Spark does. If no datetime can hold the value, return a `FarTime`;
    Spark's own conversion would fail the task."""
    try:
        return TimestampType.fromInternal(TimestampType(), micros)  # type: ignore[arg-type]
    except (OverflowError, ValueError):
        far = FarTime(1, 1, 1)
        far.micros = micros or 0
        return far


def foreach_run(
    options: SinkOptions, partition: int, epoch: int, token: LedgerToken | None, *,
    hands_over: bool, timed: bool = False,
) -> TaskRunner:  # fmt: skip
    """Return the runner of a task attempt of the foreach lane (see `TaskRunner`)."""
    refuse_budget(options)
    ctx = run_context(options, "foreach", epoch=epoch, partition=partition)
    return TaskRunner(
        options, ctx, token=token, streaming_query=streaming_query(), settings=id_settings(),
        timed=timed, hands_over=hands_over,
    )  # fmt: skip


def finish_run(run: TaskRunner, handed: RowsByAccumulator | None) -> None:
    """Await all answers; give Spark the ledger rows that it must bring to the driver."""
    run.finish()
    if run.handed is not None and handed is not None:
        handed.add(run.handed)


class ForeachTask:
    """The writer that Spark calls through `RocketSink`, with a row at a time."""

    def __init__(
        self, options: SinkOptions, plan: ColumnPlan | None, partition: int, epoch: int,
        token: LedgerToken | None = None, handed: RowsByAccumulator | None = None,
    ) -> None:  # fmt: skip
        self._max_delay_s = options.gather_max_delay_ms / 1000
        self._run = foreach_run(
            options, partition, epoch, token, hands_over=handed is not None,
            timed=self._max_delay_s > 0,
        )  # fmt: skip
        self._handed = handed
        self._gatherer = RowBatcher(options, plan)
        self._buffer = RowBuffer(self._gatherer, 2 * options.request_max_messages)
        self._rows = self._buffer.rows
        self._driven = 0
        self._ended = False
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._failure: BaseException | None = None
        self._flush_s = math.inf
        """The time at which the oldest row must be sent."""
        self._answers_s = math.inf
        """The time at which the thread must read answers."""
        self._sleeps_until_s = math.inf
        # `TimestampType` is a singleton, which all tasks and Spark's conversions share.
        TimestampType().__dict__["fromInternal"] = _time_of

    def process(self, row: Any) -> None:
        """Add a row; raise an error once the task cannot succeed any more."""
        rows = self._rows
        rows.append(row)
        if len(rows) >= self._buffer.look_at:
            self._look()

    def _look(self) -> None:
        self._refuse_child()
        with self._lock, self._failing():
            if self._failure is not None:
                raise self._failure
            if not self._rows:
                return  # The thread has taken the rows meanwhile.
            if self._buffer.is_full():
                self._flush()
                self._expect_thread()
            elif len(self._rows) - self._driven >= _DRIVE_ROWS:
                self._driven = len(self._rows)
                self._run.drive()
                self._expect_thread()
            elif self._flush_s == math.inf:
                self._expect_thread(first_row=True)

    def close(self, error: BaseException | None) -> None:
        """Send all rows and await all answers; after an error of Spark only free the engine."""
        if self._ended:
            return
        self._refuse_child()
        TimestampType().__dict__.pop("fromInternal", None)
        with self._lock:
            self._ended = True
            self._wake.set()
        if self._thread is not None:
            self._thread.join()
        if error is not None:
            self._run.abort()
            return
        with self._run:
            if self._failure is not None:
                raise self._failure
            self._flush()
            finish_run(self._run, self._handed)

    def _flush(self) -> None:
        self._flush_s = math.inf
        batch, self._driven = self._buffer.take(), 0
        if batch is not None:
            self._run.feed(batch, self._gatherer.plan)

    def _refuse_child(self) -> None:
        if self._pid != os.getpid():
            raise ConfigurationError(
                "a foreach task was used in a forked child of its worker process; only the worker "
                "process itself may send the rows"
            )

    def _expect_thread(self, *, first_row: bool = False) -> None:
        """Set the thread's next deadline: with `first_row` for sending the oldest row, otherwise
        for reading answers if no further row comes."""
        if not self._max_delay_s:
            return
        due_s = time.monotonic() + self._max_delay_s
        if first_row:
            self._flush_s = due_s
        else:
            self._answers_s = due_s
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._serve, name="rocket-sink-flush", daemon=True
            )
            self._thread.start()
        elif due_s < self._sleeps_until_s:
            self._wake.set()

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """Keep an error, after which neither thread sends anything: Spark calls `close` later."""
        try:
            yield
        except BaseException as error:
            self._failure = error
            self._buffer.look_at = 0
            raise

    def _serve(self) -> None:
        while True:
            with self._lock:
                if self._ended or self._failure is not None:
                    return
                self._wake.clear()
                try:
                    with self._failing():
                        self._serve_due(time.monotonic())
                except BaseException:
                    return
                until_s = self._sleeps_until_s = min(self._flush_s, self._answers_s)
            self._wake.wait(None if until_s == math.inf else max(0.0, until_s - time.monotonic()))

    def _serve_due(self, now_s: float) -> None:
        if now_s >= self._flush_s:
            self._flush()
            self._answers_s = now_s
            if self._rows:
                # `process` has added rows during the flush, and `_look` gave them no deadline.
                self._flush_s = time.monotonic() + self._max_delay_s
        if now_s >= self._answers_s:
            more = self._run.drive()
            self._answers_s = time.monotonic() + _ANSWERS_S if more else math.inf
