"""foreachBatch and batch writes: one Spark action sends the rows and appends them to the ledger.

The rows that Spark appends are the results of the sends. If the ledger already has the epoch (in
Delta's transaction, `txn`), Delta skips the append: no task runs, and nothing is sent. Delta also
skips epochs that are older than the last one. So `txn`'s app id contains the query id, and a query
whose ledger is ahead of its checkpoint is refused (`check_not_ahead`)."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from rocket_sink.errors import ConfigurationError
from rocket_sink.forks import ForkLock
from rocket_sink.ledger.append.appender import Append, begin_append
from rocket_sink.ledger.append.table import (
    check_not_ahead,
    ensure_table,
    last_txn_version,
    prove_executors,
    txn_app_id,
)
from rocket_sink.ledger.epoch_starts import (
    begin_epoch,
    begin_write,
    claim_app_id,
    end_write,
    forget_tasks,
)
from rocket_sink.ledger.path import LedgerPath, first_line, resolve_path
from rocket_sink.ledger.query.pending_keys import release, withdraw
from rocket_sink.ledger.records import RunContext, confirmed_row, in_order, placed
from rocket_sink.ledger.schema import EPOCH, ledger_ddl
from rocket_sink.ledger.storage import is_classic
from rocket_sink.ledger.token import LedgerToken
from rocket_sink.ledger.upkeep.growth import keep_small
from rocket_sink.net import log
from rocket_sink.options import SinkOptions
from rocket_sink.producer.process_end import micro_batches
from rocket_sink.rows.contract import ColumnPlan
from rocket_sink.spark import lineage
from rocket_sink.spark.console import say_end, say_start, warn_of_losses
from rocket_sink.spark.context import QUERY_ID, run_context, streaming_query, streaming_run
from rocket_sink.spark.frames import plan_of, select_needed
from rocket_sink.spark.session_checks import (
    append_token,
    check_budget,
    check_reachable,
    check_rights,
    check_session,
    has_budget,
    over_budget,
    refused_queries,
    with_task_rate,
)
from rocket_sink.spark.transactions import TransactionCommitter
from rocket_sink.task.runner import TaskRunner
from rocket_sink.task.totals import COUNTS, WriteSummary, sums_of

_LOG: Final = log.logger(__name__)
_ACCOUNTS: Final = ("first_error", *COUNTS)
_NO_FILES: Final = (
    "%s An epoch or write that died before its append is not noted either: when it runs again, its "
    "duplicates_possible is too low"
)


def _sent(
    options: SinkOptions, plan: ColumnPlan, lane: str, epoch: int, query: str, run: str,
    batches: Iterator[pa.RecordBatch], *, check_group: str, again: bool, token: LedgerToken | None,
    sequence: int | None,
) -> Iterator[pa.RecordBatch]:  # fmt: skip
    """Send batches of rows, and yield batches of ledger rows; for `mapInArrow`. All rows of the
    append have its number `sequence` in the table's order."""
    ctx = run_context(options, lane, epoch=epoch, query_id=query, run_id=run)
    rows: list[pa.RecordBatch] = []

    def drained() -> Iterator[pa.RecordBatch]:
        made, rows[:] = list(rows), []
        for batch in made:
            yield batch if sequence is None else placed(batch, sequence)

    # The runner also aborts after GeneratorExit: later tasks reuse a killed task's engine.
    with TaskRunner(
        options, ctx, emit=rows.append, check_group=check_group, again=again, token=token,
        streaming_query=streaming_query(),
    ) as runner:  # fmt: skip
        for batch in batches:
            runner.feed(batch, plan)
            yield from drained()
        runner.finish()
    yield from drained()


class BatchWriter:
    """Sends micro-batches and batches from the driver, each with one append to the ledger."""

    def __init__(self, options: SinkOptions) -> None:
        self._options = options
        self._started: set[str] = set()
        self._located: tuple[LedgerPath, LedgerToken | None] | None = None

    @micro_batches.uninterrupted()
    def write_epoch(self, df: DataFrame, epoch: int) -> None:
        """Send a micro-batch, once.

        Raises:
            CheckpointError: the ledger is ahead of the query's checkpoint, or the `appId` names
                another query.
            ConfigurationError: no query id, or this run of the query has already written the epoch.
            DeliveryError: more rows failed than `maxEpochFailures` or its ratio allows; or half
                messages of a decided epoch were not committed (a restart commits them).
        """
        session = df.sparkSession
        query, run = self._query_of(session)
        if query not in self._started:
            check_reachable(self._options, session)
            say_start(self._options, "foreachBatch", query)
        # A query that runs again is known here already, but its run is new.
        if run != query and is_classic(session) and lineage.is_on():
            lineage.started(self._options, run, query, df.schema)
        if not self._options.ledger:
            self._started.add(query)
            counts = self._send(df, "foreach_batch", epoch, query, run)
            check_budget(self._options, counts(), epoch)
            return
        place, token = self._ledger(session, on_driver=True)
        with _once_a_run(place, query, run, epoch):
            first = query not in self._started
            if first:
                ensure_table(session, place)
                # Claim on the driver, too: if Delta skips the epoch, no task runs to do so.
                if self._options.app_id and (query_id := _local(session, QUERY_ID)):
                    claim_app_id(place, self._options.app_id, query_id)
                check_not_ahead(session, place, query, epoch)
            transactions = self._transactions(session)
            if transactions is not None and first:
                transactions.end_earlier(query)
            self._started.add(query)
            if self._options.on_pending_key == "hold":
                release(session, place)
            group = transactions.group if transactions is not None else ""
            again = not place.problem and begin_epoch(place, query, epoch)
            append = begin_append(session, place, txn_app_id(query), epoch)
            counts = self._send(
                df, "foreach_batch", epoch, query, run, group, append, again=again, token=token
            )
            if transactions is not None:
                transactions.finish(query, epoch)
            if has_budget(self._options):
                check_budget(self._options, counts(), epoch)

    @micro_batches.uninterrupted()
    def write(self, df: DataFrame) -> WriteSummary:
        """Send a batch and return its counts. Without a ledger, its results are not kept."""
        check_session(self._options, df.sparkSession)
        run = str(uuid.uuid4())
        lineage.started(self._options, run, "write", df.schema, is_stream=False)
        try:
            summary = self._write(df, run)
        except BaseException as error:
            lineage.ended(run, {}, f"{type(error).__name__}: {first_line(error)}")
            raise
        lineage.ended(run, {"acked": summary.acked, "degraded": summary.degraded})
        return summary

    def _write(self, df: DataFrame, run: str) -> WriteSummary:
        session, token = df.sparkSession, None
        if df.isStreaming:
            raise ConfigurationError(
                "write() sends a batch and this frame is a stream; use "
                "df.writeStream.foreachBatch(sink.write_batch), or sink.stream(df)"
            )
        started_s = time.monotonic()
        check_rights(self._options)
        plan_of(df, self._options)  # refuse a bad frame before `_begin_write` notes the write
        check_reachable(self._options, session)
        if self._options.ledger:
            place, token = self._ledger(session, on_driver=is_classic(session))
            ensure_table(session, place)
        transactions = self._transactions(session)
        group = transactions.group if transactions is not None else ""
        query, version, again = self._begin_write(session, run)
        if self._options.ledger:
            try:
                append = begin_append(session, place, txn_app_id(query), version)
                counts_of = self._send(
                    df, "batch", 0, query, run, group, append, again=again, token=token
                )
            except BaseException:
                self._withdraw(session, place, query)
                self._end_notes(place, query, well=False)
                raise
            counts = counts_of()
            over = over_budget(self._options, counts)
            self._end_notes(place, query, well=over is None)
            if transactions is not None:
                transactions.finish(query, 0)
            _confirm(session, place, RunContext(query, run, 0, lane="batch"), counts["rows_in"])
        else:
            counts = self._send(df, "batch", 0, query, run)()
            over = over_budget(self._options, counts)
        if over is not None:
            raise over
        name = f"the write {query}"
        warn_of_losses(name, counts, self._options.ledger)
        say_end(name, counts, self._options.ledger)
        return WriteSummary.of(
            counts, query_id=query, ledger=self._options.ledger,
            duration_s=time.monotonic() - started_s,
        )  # fmt: skip

    def _send(
        self, df: DataFrame, lane: str, epoch: int, query: str, run: str, group: str = "",
        append: Append | None = None, *, again: bool = False, token: LedgerToken | None = None,
    ) -> Callable[[], dict[str, Any]]:  # fmt: skip
        """Send the frame's rows; return a function that sums the tasks' counts up."""
        session = df.sparkSession
        check_session(self._options, session)
        check_rights(self._options)
        needed, plan = select_needed(df, plan_of(df, self._options))
        send = partial(
            _sent, with_task_rate(self._options, session), plan, lane, epoch, query, run,
            check_group=group, again=again, token=token,
            sequence=append.sequence if append is not None else None,
        )  # fmt: skip
        if append is not None:
            _append(append.made_by_tasks(needed, send), append)
            return lambda: sums_of(append.accounts(_ACCOUNTS, query, run, epoch))
        results = needed.mapInArrow(send, ledger_ddl()).where(f"kind = '{EPOCH}'")
        accounts = results.select(*_ACCOUNTS).collect()
        return lambda: sums_of(accounts)

    def _withdraw(self, session: SparkSession, place: LedgerPath, query: str) -> None:
        """Release the keys that a failed write holds, because no later write would release them."""
        if self._options.on_pending_key != "hold" or not is_classic(session):
            return
        with contextlib.suppress(Exception):  # the write's own error is being raised
            if last_txn_version(session, place, txn_app_id(query)) is None:
                withdraw(place, query)

    def _transactions(self, session: SparkSession) -> TransactionCommitter | None:
        if self._options.delivery != "transactional":
            return None
        transactions = TransactionCommitter(session, self._options)
        if self._options.topic:
            transactions.listen(self._options.topic)
        return transactions

    def _ledger(
        self, session: SparkSession, *, on_driver: bool
    ) -> tuple[LedgerPath, LedgerToken | None]:
        """Return the ledger's path, and the token by which tasks check it; looked up once."""
        if self._located is None:
            place = resolve_path(self._options.ledger)
            token = append_token(self._options, place, on_driver=on_driver)
            prove_executors(session, place)
            if place.problem:
                _LOG.warning(_NO_FILES, place.problem)
            self._located = place, token
        return self._located

    def _begin_write(self, session: SparkSession, run: str) -> tuple[str, int, bool]:
        """Return the query id, the `txn` version, and whether an earlier write of the `appId` has
        not ended. With effectively once the write takes over the unfinished write's query id, so
        tasks look up its messages. The version is new then: Delta skips known versions."""
        options = self._options
        own = f"{options.app_id}/{run}" if options.app_id else run
        if not (options.app_id and options.ledger):
            return own, 0, False
        write, again = begin_write(resolve_path(options.ledger), options.app_id, run)
        if not again or options.delivery != "effectively_once" or not is_classic(session):
            return own, 0, again
        query = f"{options.app_id}/{write}"
        last = last_txn_version(session, resolve_path(options.ledger), txn_app_id(query))
        return query, 0 if last is None else last + 1, True

    def _end_notes(self, place: LedgerPath, query: str, *, well: bool) -> None:
        """Remove the notes of a write and its tasks. If a write with an `appId` has failed, or is
        over its budget, keep them for the next write of the `appId`."""
        options = self._options
        if well and options.app_id:
            end_write(place, options.app_id)
        if options.delivery == "effectively_once" and (well or not options.app_id):
            forget_tasks(place, query)

    def _query_of(self, session: SparkSession) -> tuple[str, str]:
        """Return the ids of query and run; raise an error if the listener refused the query."""
        query_id = _local(session, QUERY_ID)
        if reason := refused_queries.get(query_id):
            raise ConfigurationError(reason)
        query = self._options.app_id or query_id
        if not query:
            raise ConfigurationError(
                "Spark gives this function no query id (Spark Connect runs it on the server); name "
                "the query with the option appId, a new name for each new checkpoint, or use the "
                "foreach lane"
            )
        return query, streaming_run(partial(_local, session)) or query


@contextlib.contextmanager
def _once_a_run(place: LedgerPath, query: str, run: str, epoch: int) -> Iterator[None]:
    """Refuse a second write of an epoch in one run of a query: Delta would skip it, and lose its
    rows. A failed write may be repeated. Without a run id (outside of a stream, or over Connect) a
    second write is allowed, because it may be Spark's repetition of the epoch."""
    if run == query:
        yield
        return
    with _writing:
        if _written.get((place, query)) == (run, epoch):
            raise ConfigurationError(
                f"the epoch {epoch} of this query is written to the ledger {place} by another "
                "write_batch. A second one would be taken for the epoch run again, and skipped. "
                "Give each sink an appId of its own, or write one frame with the rows of all"
            )
        _written[place, query] = run, epoch
    try:
        yield
    except BaseException:
        with _writing:
            _written.pop((place, query), None)
        raise


_written: dict[tuple[LedgerPath, str], tuple[str, int]] = {}
"""{(ledger, query): last written (run, epoch)}"""
_writing = ForkLock()
"""The lock of `_written`: a foreachBatch function may write in several threads."""


def _append(results: DataFrame, append: Append) -> None:
    """Run the one Spark action: the tasks send, and the driver commits."""
    append.save(results)
    keep_small(append)


def _confirm(session: SparkSession, place: LedgerPath, ctx: RunContext, rows: int) -> None:
    """Note that the write is done. If that fails, only warn: the ledger already has its sends."""
    try:
        append = begin_append(session, place)
        row = confirmed_row(ctx, num_input_rows=rows, rows_in=rows)
        append.save_rows(list(in_order([row], append.sequence)))
    except Exception as error:
        _LOG.warning("cannot note in the ledger %s that a write is done: %s", place, error)


def _local(session: SparkSession, name: str) -> str:
    return session.sparkContext.getLocalProperty(name) or "" if is_classic(session) else ""
