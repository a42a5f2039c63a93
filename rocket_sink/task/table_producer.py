"""A producer for tables (pyarrow, pandas, polars, DuckDB), without Spark. It sends as a Spark task
does, so a message takes a tenth of the CPU that a message of `Producer` takes."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from rocket_sink.errors import ColumnError, ConfigurationError, ProducerClosedError
from rocket_sink.forks import ForkLock
from rocket_sink.ledger.append.table import ledger_token
from rocket_sink.ledger.path import resolve_path
from rocket_sink.ledger.records import RunContext, confirmed_row
from rocket_sink.ledger.schema import COLUMNS, DEAD_LETTER, LEDGER_SCHEMA
from rocket_sink.ledger.transport.spool import SpoolWriter
from rocket_sink.net.telemetry import trace_context
from rocket_sink.options import SinkOptions, constructor_options
from rocket_sink.producer.engine.engine import SendEngine
from rocket_sink.producer.pool import ProducerPool
from rocket_sink.rows.contract import ColumnPlan, resolve_columns
from rocket_sink.task.message_ids import TABLE_LANE
from rocket_sink.task.runner import TaskRunner
from rocket_sink.task.totals import TaskSummary, WriteSummary

if TYPE_CHECKING:
    from typing_extensions import Self

_LETTER_COLUMNS: Final = [column.name for column in COLUMNS if DEAD_LETTER in column.kinds]
_LETTER_SCHEMA: Final = pa.schema([LEDGER_SCHEMA.field(name) for name in _LETTER_COLUMNS])


@dataclass(frozen=True)
class TableResult:
    """The result of sending a table. Printing it shows the summary."""

    summary: WriteSummary
    dead_letters: pa.Table = field(repr=False)
    """The rows that were not delivered, with the ledger's columns for dead letters: `reason`,
    `last_error`, ..., and the columns of the row contract, so that the rows can be sent again."""

    def __str__(self) -> str:
        return str(self.summary)

    def _repr_html_(self) -> str:
        return self.summary._repr_html_()


class TableProducer:
    """Sends tables; a context manager. Threads may share it: each send has connections of its own.

    All options of the Spark sink work. With `ordering`, rows of a key keep their order within one
    `send`. Rows that cannot be sent are returned. With the option `ledger` they are also spooled,
    and a Spark session with that ledger moves them into the table (`Ledger.sync`). In the ledger,
    each producer of a process is a query, named `<appId>/<id>` if the option `appId` is set, and
    each send is an epoch.

    Args:
        options: parsed options; or pass options by name (`nameServer=...`, `topic=...`).
    """

    def __init__(self, options: SinkOptions | None = None, **more: Any) -> None:
        """Check the options, and connect nothing yet; raises OptionError, ConfigurationError."""
        self.options = constructor_options(options, more)
        if self.options.packs_json:
            raise ConfigurationError(
                f"bodyFormat={self.options.body_format} is Spark's to_json: without Spark make a "
                "column 'body' yourself"
            )
        self._pool = ProducerPool(make=SendEngine)
        self._lock = ForkLock()
        self._sends = 0
        self._pid = 0
        self._run_id = ""
        self._closed = False

    def send(self, data: Any) -> TableResult:
        """Send all rows. Return when each row is delivered or is a dead letter.

        Args:
            data: a `pa.Table`, `RecordBatch` or `RecordBatchReader`, an iterable of batches of one
                schema, or an object with `__arrow_c_stream__` (polars, pandas, DuckDB).

        Raises:
            ColumnError: the columns do not fit the row contract; nothing was sent.
            DeliveryError: the options turn dead letters into errors (`onInvalid`, `maxFailures`).
            SendError: a fatal one (credentials, TLS), or no name server answers.
            LedgerError: the ledger's folder cannot be written. If it failed only at the end, rows
                were sent; else none were.
        """
        batches, ledger = _batches(data), self.options.ledger
        # Without a driver, the token only checks that this process can write the ledger.
        token = ledger_token(resolve_path(ledger), spools=True) if ledger else None
        context, letters = self._context(), list[pa.RecordBatch]()
        spool = SpoolWriter(ledger, context) if ledger else None

        def emit(rows: pa.RecordBatch) -> None:
            if rows.num_rows and rows["kind"][0].as_py() == DEAD_LETTER:
                letters.append(rows.select(_LETTER_COLUMNS))
            if spool is not None:
                spool.append(rows)

        began_s = time.monotonic()
        run = TaskRunner(
            self.options, context, emit=emit, pool=self._pool, keeps_dead_letters=True, token=token
        )
        try:
            with run:
                summary = self._send_batches(run, batches)
            if spool is not None:
                if rows := summary.rows_in:
                    spool.append(confirmed_row(context, num_input_rows=rows, rows_in=rows))
                spool.seal()
        except BaseException:
            if spool is not None:
                spool.abort()
            raise
        return TableResult(
            WriteSummary.of(
                vars(summary), query_id=context.query_id, ledger=ledger,
                duration_s=time.monotonic() - began_s,
            ),
            pa.Table.from_batches(letters, _LETTER_SCHEMA),
        )  # fmt: skip

    def close(self) -> None:
        """Close the connections. A second call does nothing."""
        self._closed = True
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{self._sends} tables sent"
        return f"<TableProducer {self.options.topic or 'any topic'}, {state}>"

    def _context(self) -> RunContext:
        if self._closed:
            raise ProducerClosedError("the producer is closed")
        with self._lock:
            if self._pid != os.getpid():  # true also at the first send of a forked child
                self._pid, self._run_id, self._sends = os.getpid(), str(uuid.uuid4()), 0
            self._sends += 1
            app_id, run_id = self.options.app_id, self._run_id
            query_id = f"{app_id}/{run_id}" if app_id else run_id
            return RunContext(query_id, run_id, self._sends, lane=TABLE_LANE)

    def _send_batches(self, run: TaskRunner, batches: Iterator[pa.RecordBatch]) -> TaskSummary:
        plan: ColumnPlan | None = None
        context = tuple(trace_context().items())
        for batch in batches:
            if plan is None:
                plan = replace(resolve_columns(batch.schema, self.options), context=context)
            run.feed(batch, plan)
        return run.finish()


def _batches(data: Any) -> Iterator[pa.RecordBatch]:
    if hasattr(data, "__arrow_c_stream__"):
        return iter(pa.RecordBatchReader.from_stream(data))
    if isinstance(data, Iterable) and not isinstance(data, (str, bytes, dict)):
        return _checked_batches(data)
    raise ColumnError(
        f"{type(data).__name__} is no table: give a pyarrow table, batches, or a frame of polars, "
        "pandas (2.2 or later) or DuckDB"
    )


def _checked_batches(data: Iterable[Any]) -> Iterator[pa.RecordBatch]:
    for batch in data:
        if not isinstance(batch, pa.RecordBatch):
            raise ColumnError(f"{type(batch).__name__} among the batches; give pyarrow batches")
        yield batch
