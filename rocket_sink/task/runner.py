"""The runner of a task attempt, which all ways of writing share (a *lane*, e.g. foreachBatch). A
lane calls `TaskRunner.feed` for each batch, then `finish`, or `abort` after any error. The runner
opens nothing before the first row, so an empty partition costs nothing and leaves no file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TYPE_CHECKING

import pyarrow as pa

from rocket_sink.ledger.epoch_starts import IdFacts, claim_app_id
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
from rocket_sink.task.message_ids import task_ids
from rocket_sink.task.queue_snapshot import QueueSnapshots
from rocket_sink.task.recorder import LedgerRecorder
from rocket_sink.task.replay import ReplayCheck
from rocket_sink.task.task import TaskSender
from rocket_sink.task.totals import TaskSummary
from rocket_sink.task.transaction_marker import half_properties, needs_append
from rocket_sink.task.worker_heap import freeze_once

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(eq=False)
class TaskRunner:
    """A task attempt, with an engine from the pool. As a context manager it aborts after an error.

    Args:
        emit: takes the ledger rows. None: they are spooled under the ledger's path, or dropped if
            no ledger is configured.
        check_group: the producer group of half messages; only `delivery=transactional` needs it.
        timed: the caller cuts its batches by the clock, so another attempt makes other batches.
        again: an earlier attempt that left no record may have sent the rows.
        keeps_dead_letters: `emit` keeps dead letters, as `TaskSender` says.
        hands_over: if this process cannot reach the ledger (`ledgerVia`), the caller gives the
            ledger rows in `handed` to Spark.
        token: checks, before anything is sent, that this process has the driver's ledger.
        streaming_query: Spark's own id of the query; empty in a batch, or without Spark.
        settings: Spark's settings on which the ids of effectively once depend.

    Raises, the last two from the first `feed`:
        ConfigurationError: `delivery=transactional` in a lane that cannot decide on half messages.
        CheckpointError: the `appId` names another query.
        LedgerError: the ledger is not the driver's, or cannot be written.
    """

    options: SinkOptions
    ctx: RunContext
    _: KW_ONLY
    emit: Callable[[pa.RecordBatch], None] | None = None
    pool: ProducerPool = field(default_factory=worker_pool)
    check_group: str = ""
    timed: bool = False
    again: bool = False
    keeps_dead_letters: bool = False
    hands_over: bool = False
    token: LedgerToken | None = None
    streaming_query: str = ""
    settings: IdFacts = field(default_factory=IdFacts)
    handed: HandedRows | None = field(default=None, init=False)
    """Ledger rows that Spark must bring to the driver; set by `finish`."""

    def __post_init__(self) -> None:
        if not self.check_group:
            needs_append(self.options, f"the lane {self.ctx.lane!r}")
        if self.token is not None:
            self.token.use()
        self._engine: SendEngine | None = None
        self._body: TaskSender | None = None
        self._rows: RowTransport | None = None
        self._pending_keys: PendingKeys | None = None
        if self.options.holds_pending_keys:
            self._pending_keys = PendingKeys(resolve_path(self.options.ledger))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self.abort()

    def feed(self, batch: pa.RecordBatch, plan: ColumnPlan) -> None:
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
            self._pending_keys.note(self.ctx, self._body.letter_keys)
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
            self.options, self.ctx, emit=self.emit, token=self.token,
            hands_over=self.hands_over,
        )  # fmt: skip
        # Batch writes claim no `appId`, even in foreachBatch.
        app_id, ledger, query = self.options.app_id, self.options.ledger, self.streaming_query
        if app_id and ledger and query and self.ctx.lane != "batch":
            claim_app_id(resolve_path(ledger), app_id, query, self.token)
        # Without `keeps_failed`, three kinds of attempts leave no record: earlier ones, those of an
        # earlier run, and a speculative copy that Spark kills after this attempt. Callers that take
        # the rows know themselves whether an earlier run has begun the epoch (`again`).
        epoch, settings = str(self.ctx.epoch), self.settings
        if self.ctx.lane == "batch":
            # A function of foreachBatch may write batches, too: their epoch 0 is not the query's.
            settings = replace(settings, pending_epoch="", unrecorded_epoch="")
        repeated = bool(self.ctx.attempt_number) or self.options.allow_speculation
        is_replay = repeated or settings.pending_epoch == epoch
        is_unrecorded = (is_replay if self.emit is None else repeated) and not rows.keeps_failed
        again = self.again or is_unrecorded or settings.unrecorded_epoch == epoch
        self._engine = self.pool.acquire(self.options)
        recorder = LedgerRecorder(
            self.options, self.ctx, rows.append, intents=rows.keeps_failed,
            is_replay=is_replay or again,
        )  # fmt: skip
        replay = ids = None
        if self.options.delivery == "effectively_once":
            replay = ReplayCheck(self.options, self.ctx, self._engine, settings)
        elif self.options.delivery == "at_least_once":
            ids = task_ids(self.ctx, timed=self.timed)
        # Tasks whose rows Spark brings to the driver may have no way to notes in the ledger.
        appends_locally = self.emit is not None and bool(ledger) and resolve_path(ledger).is_local
        has_notes = rows.keeps_failed or appends_locally or bool(self.options.using_ledger_files)
        queues = QueueSnapshots(self.options, self.ctx.query_id, shares=has_notes).queues
        group, pending = self.check_group, self._pending_keys
        return TaskSender(
            self.options, plan, engine=self._engine, recorder=recorder, ids=ids, replay=replay,
            held=pending.held_for(self.ctx) if pending is not None else {}, again=again,
            half_properties=half_properties(self.ctx, group) if group else "",
            keeps_dead_letters=self.keeps_dead_letters, queues=queues,
        )  # fmt: skip

    def _release(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            self.pool.release(engine)
