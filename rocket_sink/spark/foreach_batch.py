"""foreachBatch and batch writes: one Spark action sends the rows and appends them to the ledger.

The rows that Spark appends are the results of the sends. If the ledger already has the epoch (in
Delta's transaction, `txn`), Delta skips the append: no task runs, and nothing is sent. Delta also
skips epochs that are older than the last one. So `txn`'s app id contains the query id, and a query
whose ledger is ahead of its checkpoint is refused (`check_not_ahead`)."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from typing import Any, Final, NamedTuple

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from rocket_sink.errors import ConfigurationError, LedgerError
from rocket_sink.forks import ForkLock
from rocket_sink.ledger.append.appender import Append, Rows, begin_append
from rocket_sink.ledger.append.table import (
    check_not_ahead,
    ensure_table,
    prove_executors,
    rows_of_epoch,
    txn_app_id,
)
from rocket_sink.ledger.epoch_starts import (
    ROWS_FACT,
    NamedBatch,
    begin_batch,
    begin_epoch,
    begin_named_write,
    check_whole,
    claim_app_id,
    end_named_write,
    note_refused_frame,
)
from rocket_sink.ledger.lock import ledger_lock
from rocket_sink.ledger.path import LedgerPath, failing, first_line, path_part, resolve_path
from rocket_sink.ledger.query.pending_keys import release, withdraw
from rocket_sink.ledger.records import RunContext, confirmed_row, in_order, placed
from rocket_sink.ledger.schema import EPOCH, SEQUENCE, ledger_ddl
from rocket_sink.ledger.storage import is_classic
from rocket_sink.ledger.token import LedgerToken
from rocket_sink.ledger.upkeep.growth import keep_small
from rocket_sink.net import log
from rocket_sink.options import SinkOptions
from rocket_sink.producer.process_end import micro_batches
from rocket_sink.rows.contract import ColumnPlan
from rocket_sink.spark import lineage
from rocket_sink.spark.checks.budget import check_budget, over_budget
from rocket_sink.spark.checks.context import (
    PENDING,
    StreamRun,
    id_settings,
    run_context,
    run_of,
    watched_stages,
)
from rocket_sink.spark.checks.plans import frame_facts, planned_facts
from rocket_sink.spark.checks.queries import refuse_chance, refused_runs, unrecorded_by
from rocket_sink.spark.checks.reach import check_reachable, check_rights
from rocket_sink.spark.checks.session_settings import check_session, with_task_rate
from rocket_sink.spark.checks.tokens import append_token
from rocket_sink.spark.console import label_of, say_end, say_repeated, say_start, warn_of_losses
from rocket_sink.spark.frames import plan_of, select_needed
from rocket_sink.spark.transactions import TransactionCommitter
from rocket_sink.task.queue_snapshot import forget_queues
from rocket_sink.task.runner import TaskRunner
from rocket_sink.task.totals import COUNTS, WriteSummary, sums_of, uncounted_duplicates
from rocket_sink.text import counted

_LOG: Final = log.logger(__name__)
_ACCOUNTS: Final = ("first_error", *COUNTS)
_NO_FILES: Final = (
    "%s An epoch or write that died before its append is not noted either: when it runs again, its "
    "duplicates_possible is too low"
)


def _send_rows(
    options: SinkOptions, plan: ColumnPlan, lane: str, epoch: int, query: str, run: str,
    batches: Iterator[pa.RecordBatch], *, check_group: str, again: bool, token: LedgerToken | None,
    sequence: int | None, planned: Mapping[str, str], unrecorded: str,
) -> Iterator[pa.RecordBatch]:  # fmt: skip
    """Send batches of rows, and yield batches of ledger rows; for `mapInArrow`. All rows of the
    append have its number `sequence` in the table's order."""
    ctx = run_context(options, lane, epoch=epoch, query_id=query, run_id=run)
    rows: list[pa.RecordBatch] = []

    def take_rows() -> Iterator[pa.RecordBatch]:
        ready, rows[:] = list(rows), []
        for batch in ready:
            yield batch if sequence is None else placed(batch, sequence)

    # The runner also aborts after GeneratorExit: later tasks reuse a killed task's engine.
    with TaskRunner(
        options, ctx, emit=rows.append, check_group=check_group, again=again, token=token,
        settings=replace(id_settings(planned), unrecorded_epoch=unrecorded),
    ) as runner:  # fmt: skip
        for batch in batches:
            runner.feed(batch, plan)
            yield from take_rows()
        runner.finish()
    yield from take_rows()


class _Start(NamedTuple):
    """The start of a run of a query, with the ledger as the driver found it then.

    Attributes:
        run: Spark's id of the run; empty if it is not known.
        ledger_id: Delta's id of the ledger's table.
        token: by which tasks check the ledger.
        unrecorded: epoch of which an earlier run left no record here (`unrecorded_by`), or empty.
    """

    run: str
    place: LedgerPath
    ledger_id: str = ""
    token: LedgerToken | None = None
    unrecorded: str = ""


@dataclass
class _Sent:
    """The results of a write's tasks, when they have ended.

    Attributes:
        accounts: reads the accounts of the tasks.
        has_run_again: tells whether Spark has run, or may have run, the tasks' stage again. Rows
            that the stage's earlier attempt had sent are on no record, and each stored row may be
            one of them.
    """

    accounts: Callable[[], list[Any]]
    has_run_again: Callable[[], bool]

    @cached_property
    def is_repeated(self) -> bool:
        return self.has_run_again()

    @cached_property
    def counts(self) -> dict[str, Any]:
        """Return the sums of the accounts, and the possible duplicates that tasks did not count."""
        sums = {**sums_of(self.accounts()), "uncounted": 0}
        if self.is_repeated:
            sums["uncounted"] = uncounted_duplicates(sums)
            sums["duplicates_possible"] += sums["uncounted"]
        return sums


_NOWHERE: Final = LedgerPath("", "", is_local=True)
"""The place of a start without a ledger."""


class BatchWriter:
    """Sends micro-batches and batches from the driver, each with one append to the ledger."""

    def __init__(self, options: SinkOptions) -> None:
        self._options = options
        self._starts: dict[str, _Start] = {}
        """{query: its last start}"""

    @micro_batches.uninterrupted()
    def write_epoch(self, df: DataFrame, epoch: int) -> None:
        """Send a micro-batch, once.

        Raises:
            CheckpointError: the ledger is ahead of the query's checkpoint, the `appId` names
                another query, or the ledger has only one of the epoch's frames.
            ConfigurationError: nothing tells the query, or this run of the query has already
                written the epoch.
            DeliveryError: more rows failed than `maxEpochFailures` allows; or half messages
                of a decided epoch were not committed (a restart commits them).
        """
        session, stream = df.sparkSession, run_of(df)
        query, run = self._query_of(session, stream), stream.run_id
        start, unrecorded = self._starts.get(query), ""
        if start is None or start.run != run:
            if stream.query_id:
                pending = session.conf.get(PENDING, "") or ""
                unrecorded = unrecorded_by(
                    self._options, session, stream.query_id, run, pending, "foreachBatch"
                )
            check_reachable(self._options, session)
            say_start(self._options, "foreachBatch", label_of(stream.name, query))
            # The frame does not show the plan that made its rows.
            if stream.execution is not None:
                plan = stream.execution.analyzedPlan()
                refuse_chance(self._options, plan_of(df, self._options), plan)
            start = None
        # A query that runs again is known here already, but its run is new.
        if run and lineage.is_on():
            lineage.start(self._options, run, query, df.schema)
        if not self._options.ledger:
            self._starts[query] = _Start(run, _NOWHERE)
            sent = self._send(df, "foreach_batch", epoch, query, run or query)
            check_budget(self._options, sent.counts, epoch)
            return
        # Without a run's id each epoch counts as a start, because nothing tells a restart.
        if start is None or not start.run:
            start = self._start(session, run, on_driver=True)._replace(unrecorded=unrecorded)
        place = start.place
        transactions = self._transactions(session)
        is_new = start is not self._starts.get(query)
        if is_new:
            # Claim here: if Delta skips the epoch, no task runs that would claim.
            if self._options.app_id and stream.query_id:
                claim_app_id(place, self._options.app_id, stream.query_id, start.token)
            is_held = check_not_ahead(session, place, query, epoch)
            check_whole(place, query, epoch, self._options.delivery, is_held=is_held)
        # Later, this note would replace the note of a frame that is refused beside this one.
        again = not place.problem and begin_epoch(place, query, epoch, self._options.delivery)
        with _once_a_run(start, query, epoch, df):
            if is_new:
                if transactions is not None:
                    transactions.end_earlier(query)
                self._starts[query] = start
            if self._options.holds_pending_keys:
                release(session, place)
            group = transactions.group if transactions is not None else ""
            append = begin_append(session, place, txn_app_id(query), epoch)
            sent = self._send(
                df, "foreach_batch", epoch, query, run or query, group, append, again=again,
                token=start.token, unrecorded=start.unrecorded,
            )  # fmt: skip
        if transactions is not None:
            transactions.finish(query, epoch)
        if self._options.max_epoch_failures:
            check_budget(self._options, sent.counts, epoch)

    @micro_batches.uninterrupted()
    def write(self, df: DataFrame) -> WriteSummary:
        """Send a batch and return its counts. Without a ledger, its results are not kept. Only one
        process at a time writes a `batchId`: raise a LedgerError if another process writes it."""
        check_session(self._options, df.sparkSession)
        run = str(uuid.uuid4())
        lineage.start(self._options, run, "write", df.schema, is_stream=False)
        try:
            with self._lock() as lock:
                if lock is None:
                    raise LedgerError(
                        f"another process is writing the batchId {self._options.batch_id!r} to the "
                        f"ledger {self._options.ledger}: nothing is sent. Write it again when that "
                        "process has ended",
                        path=self._options.ledger,
                    )
                summary = self._write(df, run)
        except BaseException as error:
            lineage.end(run, {}, f"{type(error).__name__}: {first_line(error)}")
            raise
        lineage.end(run, {"acked": summary.acked, "degraded": summary.degraded})
        return summary

    def _lock(self) -> contextlib.AbstractContextManager[object]:
        """Return the lock of the `batchId`, which yields None if another process has it."""
        if not self._options.batch_id:
            return contextlib.nullcontext(self)
        name = f"batch_{path_part(self._options.app_id)}_{path_part(self._options.batch_id)}.lock"
        return ledger_lock(resolve_path(self._options.ledger), 0, name=name)

    def _write(self, df: DataFrame, run: str) -> WriteSummary:
        session, token = df.sparkSession, None
        if df.isStreaming:
            raise ConfigurationError(
                "write() sends a batch and this frame is a stream; use "
                "df.writeStream.foreachBatch(sink.write_batch), or sink.stream(df)"
            )
        started_s = time.monotonic()
        check_rights(self._options)
        plan_of(df, self._options)  # refuse a bad frame before a note says that the write begins
        check_reachable(self._options, session)
        if self._options.ledger:
            start = self._start(session, run, on_driver=is_classic(session))
            place, token = start.place, start.token
        transactions = self._transactions(session)
        group = transactions.group if transactions is not None else ""
        batch = None
        if self._options.batch_id:
            # The plan of a frame that foreachBatch gives does not name the stream's input.
            facts = {**frame_facts(df), "streaming query": run_of(df).query_id}
            batch = begin_batch(self._options, run, facts)
            query, again = batch.query_id, not batch.is_new
            if (first := self._first_summary(session, batch)) is not None:
                batch.check({ROWS_FACT: df.count()})
                if transactions is not None:
                    transactions.finish(query, 0)
                say_repeated(self._options)
                return first
        else:
            takes_over = is_classic(session)
            query, again = begin_named_write(self._options, run, takes_over=takes_over)
        if self._options.ledger:
            try:
                # A table keeps all transactions for ever. So make one for half messages only, whose
                # commit it decides.
                txn = "" if transactions is None else txn_app_id(query)
                append = begin_append(session, place, txn)
                sent = self._send(
                    df, "batch", 0, query, run, group, append, again=again, token=token
                )
            except BaseException:
                self._withdraw(session, place, query)
                end_named_write(place, self._options, query, run, is_done=False)
                forget_queues(self._options, query, {})
                raise
            counts = sent.counts
            over = over_budget(self._options, counts)
            summary = self._summary(query, counts, time.monotonic() - started_s)
            if batch is not None and over is None:
                batch.end(asdict(summary))
            end_named_write(place, self._options, query, run, is_done=over is None)
            forget_queues(self._options, query, counts)
            if transactions is not None:
                transactions.finish(query, 0)
        else:
            counts = self._send(df, "batch", 0, query, run).counts
            over = over_budget(self._options, counts)
            summary = self._summary(query, counts, time.monotonic() - started_s)
        if over is not None:
            raise over
        name = f"the write {query}"
        warn_of_losses(name, counts, self._options.ledger)
        say_end(name, counts, self._options.ledger)
        return summary

    def _summary(self, query: str, counts: Mapping[str, Any], duration_s: float) -> WriteSummary:
        ledger = self._options.ledger
        return WriteSummary.of(counts, query_id=query, ledger=ledger, duration_s=duration_s)

    def _first_summary(self, session: SparkSession, batch: NamedBatch) -> WriteSummary | None:
        """Return the summary of the complete write of the `batchId`; None if there is none. If the
        write died after its append and before its note, the ledger has the counts. Raise a
        DeliveryError if it was over its budget, and its messages are visible to consumers."""
        first = batch.summary
        if not first and not batch.is_new:
            columns = (*_ACCOUNTS, "run_id", SEQUENCE)
            table = rows_of_epoch(session, batch.place, (EPOCH,), batch.query_id, 0, columns)
            if not table.num_rows:
                return None
            # The last write's rows count, as in the ledger's views.
            rows = table.sort_by(SEQUENCE).to_pylist()
            counts = sums_of([row for row in rows if row["run_id"] == rows[-1]["run_id"]])
            over = over_budget(self._options, counts)
            if over is not None and self._options.delivery == "transactional":
                raise over
            first = {} if over is not None else {**counts, "duration_s": 0.0}
            if first:
                batch.end(first)
        if not first:
            return None
        summary = self._summary(batch.query_id, first, first["duration_s"])
        return replace(summary, is_repeated=True)

    def _send(
        self, df: DataFrame, lane: str, epoch: int, query: str, run: str, group: str = "",
        append: Append | None = None, *, again: bool = False, token: LedgerToken | None = None,
        unrecorded: str = "",
    ) -> _Sent:  # fmt: skip
        """Send the frame's rows, and append the results to the ledger."""
        session = df.sparkSession
        check_session(self._options, session)
        check_rights(self._options)
        needed, plan = select_needed(df, plan_of(df, self._options))
        is_once = self._options.delivery == "effectively_once"
        send = partial(
            _send_rows, with_task_rate(self._options, session), plan, lane, epoch, query, run,
            check_group=group, again=again, token=token, unrecorded=unrecorded,
            sequence=append.sequence if append is not None else None,
            planned=planned_facts(df, is_write=lane == "batch") if is_once else {},
        )  # fmt: skip
        with watched_stages(session) as has_run_again:
            if self._options.delivery == "transactional":
                # Half messages of a stage's earlier attempt are never committed.
                has_run_again = bool
            if append is None:
                results = needed.mapInArrow(send, ledger_ddl()).where(f"kind = '{EPOCH}'")
                rows = results.select(*_ACCOUNTS).collect()
                return _Sent(partial(list, rows), has_run_again if rows else bool)
            ctx = RunContext(query, run, epoch, lane=lane)
            sent = _Sent(partial(append.accounts, _ACCOUNTS, ctx), has_run_again)
            later = partial(_confirmation, ctx, sent, append)
            _append(append.made_by_tasks(needed, send), append, later)
        sent = sent if append.rows else _Sent(list, bool)
        # Spark's Delta has committed before anybody could count; without rows nothing is committed.
        if lane == "batch" if not append.rows else not append.merges:
            _confirm(session, append.place, ctx, sent)
        return sent

    def _withdraw(self, session: SparkSession, place: LedgerPath, query: str) -> None:
        """Release the keys that a failed write holds, because no later write would release them."""
        if not self._options.holds_pending_keys or not is_classic(session):
            return
        with contextlib.suppress(Exception):  # the write's own error is being raised
            if not rows_of_epoch(session, place, (EPOCH,), query, 0, (SEQUENCE,)).num_rows:
                withdraw(place, query)

    def _transactions(self, session: SparkSession) -> TransactionCommitter | None:
        if self._options.delivery != "transactional":
            return None
        transactions = TransactionCommitter(session, self._options)
        if self._options.topic:
            transactions.listen(self._options.topic)
        return transactions

    def _start(self, session: SparkSession, run: str, *, on_driver: bool) -> _Start:
        """Find or make the ledger at each start: it may have been deleted since the last one, and
        with it the token by which tasks check it."""
        place = resolve_path(self._options.ledger)
        token = append_token(self._options, place, on_driver=on_driver)
        prove_executors(session, place)
        if place.problem:
            _LOG.warning(_NO_FILES, place.problem)
        return _Start(run, place, ensure_table(session, place), token)

    def _query_of(self, session: SparkSession, stream: StreamRun) -> str:
        """Return the name of the query; raise an error if the listener refused the run, or if
        nothing tells the query."""
        if reason := refused_runs.get(stream.run_id):
            raise ConfigurationError(reason)
        if stream.is_unclear or (
            is_classic(session) and not (self._options.app_id or stream.query_id)
        ):
            raise ConfigurationError(
                "nothing tells which streaming query writes this frame: the frame is not made from "
                "the one that Spark gave to the function of foreachBatch, and this thread lacks "
                "Spark's local properties. Nothing is sent. Write a frame that is made from "
                "Spark's, or start the thread with pyspark.inheritable_thread_target; for a batch "
                "call sink.write(df)"
            )
        query = self._options.app_id or stream.query_id
        if self._options.ledger and not is_classic(session):
            raise ConfigurationError(
                "foreachBatch over Spark Connect cannot use a ledger: the server does not tell "
                "which epochs the ledger has, so repeated epochs cannot be recognised. Nothing is "
                'sent. Use foreach(sink), format("rocketmq"), or a classic session'
            )
        if not query:
            raise ConfigurationError(
                "Spark Connect runs this function on the server, and tells it no query id; name "
                "the query with the option appId, a new name for each new checkpoint, or use the "
                "foreach lane"
            )
        return query


class _Write(NamedTuple):
    """A write of an epoch by this process; `run` is empty if the run is not known. `failed` is the
    frame of a write that failed before its append."""

    run: str
    epoch: int
    failed: DataFrame | None = None

    def excludes(self, later: _Write, frame: DataFrame) -> bool:
        """Return whether Delta would skip the `later` write of the frame, although it repeats no
        epoch, or would skip the failed frame because of it. Only a new run, and the failed frame
        itself, repeat an epoch. Two writes may be of one run if a run is not known."""
        if self.run and later.run and self.run != later.run:
            return False
        if self.failed is not None and later.epoch == self.epoch:
            return bool(later.run) and not _is_same(self.failed, frame)
        return later.epoch <= self.epoch


def _is_same(one: DataFrame, other: DataFrame) -> bool:
    with contextlib.suppress(Exception):  # one of them is of a session that was stopped
        return one is other or one.sameSemantics(other)
    return False


@contextlib.contextmanager
def _once_a_run(start: _Start, query: str, epoch: int, frame: DataFrame) -> Iterator[None]:
    """Refuse a second write of an epoch in one run of a query, and a late write of an earlier
    epoch: Delta would skip them, and lose their rows. A write that failed before its append may be
    repeated, with the same frame: if the ledger had another one, the next run would skip this."""
    key, own = (start.ledger_id, query), _Write(start.run, epoch)
    with _writing:
        last = _written.get(key)
        is_refused = last is not None and last.excludes(own, frame)
        if not is_refused:
            _written[key] = own
    if is_refused:
        refusal = ConfigurationError(
            f"another write_batch has written the epoch {epoch}, or a later one, of the query "
            f"{query} to the ledger {start.place}, or has failed with another frame of it. The "
            "ledger takes one frame for the whole epoch, and would skip the other when the epoch "
            "runs again, so nothing of this frame is sent. Give each sink an appId of "
            "its own, or write one frame with the rows of all and a column topic under a new "
            "appId, which sends the epoch again"
        )
        if last is not None and epoch == last.epoch:
            place = start.place
            with failing(f"{refusal}. No later run knows this", place.uri, "", (LedgerError,)):
                note_refused_frame(place, query, epoch)
        raise refusal
    try:
        yield
    except BaseException:
        with _writing:
            if _written.get(key) is own:
                _written[key] = own._replace(failed=frame)
        raise


_written: dict[tuple[str, str], _Write] = {}
"""{(id of the ledger, query): last write}"""
_writing = ForkLock()
"""The lock of `_written`: a foreachBatch function may write in several threads."""


def _append(results: DataFrame, append: Append, later: Callable[[], Rows]) -> None:
    """Run the one Spark action: the tasks send, and the driver commits."""
    append.save(results, later=later)
    keep_small(append)


def _confirm(session: SparkSession, place: LedgerPath, ctx: RunContext, sent: _Sent) -> None:
    """Note after the append what `_confirmation` says. If that fails, only warn: the ledger already
    has the write's sends."""
    try:
        append = begin_append(session, place)
        if rows := _confirmation(ctx, sent, append):
            append.save_rows(rows)
    except Exception as error:
        _LOG.warning(_UNCONFIRMED, place, error)


def _confirmation(ctx: RunContext, sent: _Sent, append: Append) -> Rows:
    """Return the row that a write is done, with its possible duplicates that no task has counted;
    for a micro-batch only if there are some. If they cannot be counted, only warn."""
    try:
        if ctx.lane != "batch" and not (sent.is_repeated and sent.counts["uncounted"]):
            return ()
        rows, uncounted = sent.counts["rows_in"], sent.counts["uncounted"]
    except Exception as error:
        _LOG.warning(_UNCONFIRMED, append.place, error)
        return ()
    if uncounted:
        _LOG.warning(
            "Spark may have run tasks of epoch %d of the query %s again in a later attempt of "
            "their stage, as after the loss of an executor: %s may be stored twice",
            ctx.epoch, ctx.query_id, counted(uncounted, "row"),
        )  # fmt: skip
    # Without `rows_in`: it would only be the sum of the accounts, and count twice with them.
    read = rows if ctx.lane == "batch" else None
    row = confirmed_row(ctx, num_input_rows=read, duplicates_possible=uncounted)
    return list(in_order([row], append.sequence))


_UNCONFIRMED: Final = "cannot note in the ledger %s that a write is done: %s"
