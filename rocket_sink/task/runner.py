"""The runner of a task attempt, which all ways of writing share (a *lane*, e.g. foreachBatch).

A lane calls `TaskRunner.feed` for each batch, then `finish`, or `abort` after any error. The runner
opens nothing before the first row, so an empty partition costs nothing and leaves no file.
"""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa

from rocket_sink.ledger.epoch_starts import claim_app_id
from rocket_sink.ledger.path import resolve_path
from rocket_sink.ledger.query.pending_keys import PendingKeys
from rocket_sink.ledger.records import RunContext
from rocket_sink.ledger.token import LedgerToken
from rocket_sink.ledger.transport.handed import HandedRows
from rocket_sink.ledger.transport.transport import RowTransport, transport_of
from rocket_sink.options import SinkOptions
from rocket_sink.producer.engine.engine import SendEngine
from rocket_sink.producer.pool import ProducerPool, worker_pool
from rocket_sink.rows.contract import ColumnPlan
from rocket_sink.task.message_ids import ContentIds, task_ids
from rocket_sink.task.recorder import LedgerRecorder
from rocket_sink.task.replay import ReplayCheck
from rocket_sink.task.task import TaskSender
from rocket_sink.task.totals import TaskSummary
from rocket_sink.task.transaction_marker import half_properties, needs_append
from rocket_sink.task.worker_heap import freeze_once


class TaskRunner:
    """A task attempt from its first batch to its end, with an engine from the pool.

    Args:
        emit: takes the ledger rows. None: they are spooled under the ledger's path, or dropped if
            no ledger is configured.
        check_group: the producer group of half messages; only `delivery=transactional` needs it.
        timed: the caller cuts its batches by the clock, so another attempt of the task makes other
            batches.
        again: an earlier attempt that left no record may have sent the rows.
        keeps_dead_letters: `emit` keeps dead letters although there is no ledger.
        hands_over: if this process cannot reach the ledger (`ledgerVia`), the caller gives the
            ledger rows in `handed` to Spark.
        token: checks, before anything is sent, that this process has the driver's ledger.
        streaming_query: Spark's own id of the query; empty in a batch, or without Spark.

    Raises, the last two from the first `feed`:
        ConfigurationError: `delivery=transactional` in a lane that cannot decide on half messages.
        CheckpointError: the `appId` names another query.
        LedgerError: the ledger is not the driver's, or cannot be written.
    """

    def __init__(
        self, options: SinkOptions, ctx: RunContext, *,
        emit: Callable[[pa.RecordBatch], None] | None = None, pool: ProducerPool | None = None,
        check_group: str = "", timed: bool = False, again: bool = False,
        keeps_dead_letters: bool = False, hands_over: bool = False,
        token: LedgerToken | None = None, streaming_query: str = "",
    ) -> None:  # fmt: skip
        if not check_group:
            needs_append(options, f"the lane {ctx.lane!r}")
        self._check_group = check_group
        if token is not None:
            token.use()
        self._options = options
        self._timed = timed
        self._again = again
        self._keeps_dead_letters = keeps_dead_letters
        self._hands_over = hands_over
        self.handed: HandedRows | None = None
        """Ledger rows that Spark must bring to the driver; set by `finish`."""
        self._token = token
        self._streaming_query = streaming_query
        self._ctx = ctx
        self._emit = emit
        self._pool = pool
        self._engine: SendEngine | None = None
        self._body: TaskSender | None = None
        self._rows: RowTransport | None = None
        self._pending_keys: PendingKeys | None = None
        if options.on_pending_key == "hold":
            self._pending_keys = PendingKeys(resolve_path(options.ledger))

    def feed(self, batch: pa.RecordBatch, plan: ColumnPlan) -> None:
        """Send a batch."""
        if not batch.num_rows:
            return
        if self._body is None:
            self._body = self._open(plan)
        self._body.feed(batch)

    def drive(self) -> bool:
        """Read answers while the caller gathers rows; return whether answers are outstanding."""
        return self._body is not None and self._body.drive()

    def finish(self) -> TaskSummary:
        """Await all answers, and make the ledger rows durable."""
        if self._body is None:
            return TaskSummary()
        summary = self._body.finish()
        if self._pending_keys is not None:
            self._pending_keys.note(self._ctx, self._body.letter_keys)
        if self._rows is not None:
            self.handed = self._rows.finish()
        if self._pending_keys is not None:
            self._pending_keys.withdraw_earlier()
        self._release()
        freeze_once()
        return summary

    def abort(self) -> None:
        """End after an error. This never raises, so that users see the first error."""
        try:
            if self._body is not None:
                self._body.abort()
        except Exception:  # noqa: S110 (a second failure; the first one is on its way up)
            pass
        finally:
            self._body = None
            if self._rows is not None:
                self._rows.abort()
            self._release()

    def _open(self, plan: ColumnPlan) -> TaskSender:
        rows = self._rows = transport_of(
            self._options, self._ctx, emit=self._emit, token=self._token,
            hands_over=self._hands_over,
        )  # fmt: skip
        self._claim_app_id()
        # Without `keeps_failed`, earlier attempts of the task have left no record, nor does a
        # speculative copy that Spark kills after this attempt.
        repeated = bool(self._ctx.attempt_number or self._ctx.stage_attempt)
        repeated |= self._options.allow_speculation
        again = self._again or (repeated and not rows.keeps_failed)
        pool = self._pool = self._pool or worker_pool()
        self._engine = pool.acquire(self._options)
        recorder = LedgerRecorder(
            self._options, self._ctx, rows.append, intents=rows.keeps_failed,
            again=again and self._options.delivery == "at_least_once",
        )  # fmt: skip
        replay = ids = None
        if self._options.delivery == "effectively_once":
            replay = ReplayCheck(self._options, self._ctx, self._engine, ContentIds(self._ctx))
        elif self._options.delivery == "at_least_once":
            ids = task_ids(self._ctx, timed=self._timed)
        group = self._check_group
        held_keys = (
            self._pending_keys.held_for(self._ctx) if self._pending_keys is not None else None
        )
        return TaskSender(
            self._options, plan, engine=self._engine, recorder=recorder, ids=ids,
            replay=replay, held=held_keys, keeps_dead_letters=self._keeps_dead_letters,
            half_properties=half_properties(self._ctx, group) if group else "",
        )  # fmt: skip

    def _claim_app_id(self) -> None:
        """Claim the appId for a streaming query; batch writes claim none, even in foreachBatch."""
        options = self._options
        if not options.app_id or not options.ledger or self._ctx.lane == "batch":
            return
        if self._streaming_query:
            claim_app_id(resolve_path(options.ledger), options.app_id, self._streaming_query)

    def _release(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None and self._pool is not None:
            self._pool.release(engine)
