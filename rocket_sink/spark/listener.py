"""Folds spool files into ledgers while queries run, and notes the epochs that Spark reports.

A session has one listener, and one background thread for all its ledgers. Spark's events come late,
and at a shutdown perhaps never. So a fold takes all finished files and awaits no event; only
`Ledger.sync` is certain to fold. The thread is a daemon: files that remain at the driver's end stay
in the spool. But Python's end waits for a running fold: a thread in delta-rs would crash Python."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any, Final

from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 (Spark's own habit)
from pyspark.sql.streaming.listener import StreamingQueryListener

from rocket_sink.errors import LedgerError
from rocket_sink.forks import ForkLock
from rocket_sink.ledger.append.table import is_table, read_table
from rocket_sink.ledger.driver.fold import FOLDERS, fold, spools_in_use
from rocket_sink.ledger.epoch_starts import query_of
from rocket_sink.ledger.path import LedgerPath, first_line, resolve_path
from rocket_sink.ledger.query.duckdb_reader import reader_of
from rocket_sink.ledger.query.live import observe
from rocket_sink.ledger.records import RunContext, confirmed_row
from rocket_sink.ledger.schema import EPOCH
from rocket_sink.ledger.storage import active_session, is_classic
from rocket_sink.ledger.transport.files import has_files
from rocket_sink.ledger.transport.spool import SpoolWriter
from rocket_sink.ledger.upkeep.expire import Retention, expire_daily
from rocket_sink.net import log
from rocket_sink.options import SinkOptions
from rocket_sink.producer.process_end import finish_at_end
from rocket_sink.spark import lineage
from rocket_sink.spark.console import Accounts, say_no_rows, say_start
from rocket_sink.spark.session_checks import refuse_query, schema_of

_LOG: Final = log.logger(__name__)
_LOCK: Final = ForkLock()
_COUNT_S: Final = 30.0
"""Shortest time between two counts of a ledger's rows; each count queries the table."""
_LAST_S: Final = 5.0
"""Longest wait at the driver's end for Spark's report that a query has ended."""
_END_S: Final = 60.0
"""Longest wait for a fold when the driver ends."""
_UNCOUNTED: Final = 10_000
"""Limit of epochs that wait for a count; beyond it the oldest epochs are dropped uncounted."""


def install_fold(options: SinkOptions, session: SparkSession | None = None) -> FoldThread | None:
    """Install the session's listener, once, and fold this ledger while queries make progress.
    Return the thread that folds; None without a ledger, or without a classic session. Without a
    ledger the listener only checks queries at their start."""
    session = session or active_session()
    if not is_classic(session):
        return None
    assert session is not None
    # Keep the thread in the context, because a session may have several wrapper objects.
    with _LOCK:
        folders = session.sparkContext.__dict__.setdefault(FOLDERS, {})
        key = session._jsparkSession.hashCode()
        folder: FoldThread | None = folders.get(key)
        if folder is None:
            folder = folders[key] = FoldThread(session)
            session.streams.addListener(folder)
    if not options.ledger:
        return None
    place = resolve_path(options.ledger)
    app_id = "" if place.problem else options.app_id  # the `appId` is noted in the ledger's folder
    bodies_ms = options.settled_body_retention_ms or None
    retention = Retention(dict(options.ledger_retention_ms), bodies_ms)
    folder.add(place, options.fold_interval_ms / 1000, app_id, retention)
    try:
        observe(session, place)
    except (LedgerError, OSError) as error:
        _LOG.warning("no metrics of the ledger %s: %s", place, first_line(error))
    return folder


_Epoch = tuple[str, str, int]
"""Query, run, epoch."""


class FoldThread(StreamingQueryListener):
    """Folds a session's ledgers in the background, each at most once per interval."""

    def __init__(self, session: SparkSession) -> None:
        self._session = session
        self._intervals: dict[LedgerPath, float] = {}
        self._retentions: dict[LedgerPath, Retention] = {}
        self._app_ids: dict[LedgerPath, set[str]] = {}
        self._names: dict[tuple[LedgerPath, str], str] = {}
        self._uncounted: dict[LedgerPath, dict[_Epoch, int]] = {}
        self._deleted: set[LedgerPath] = set()
        """Ledgers whose deletion was logged."""
        self._new: dict[LedgerPath, set[str]] = {}
        """{ledger: queries whose first epoch is done, for `_warn_of_successors`}"""
        self._wake = threading.Condition()
        self._events: list[Any] = []
        self._urgent = False
        self._is_confirming = False
        self._running: set[str] = set()
        """Runs whose start Spark has reported, but not their end."""
        self._queries: dict[str, str] = {}
        """{run: query} of runs whose end was not logged yet."""
        self.sinks: dict[str, str] = {}
        """{run: ledger} of runs whose sink is known at the start; not for foreachBatch."""
        self.begun: set[str] = set()
        """Runs that finished an epoch, waited for rows, or that Spark reports as ended."""
        self._accounts: dict[LedgerPath, Accounts] = {}
        self._thread: threading.Thread | None = None
        self._ended: set[str] = set()
        self._is_finished = False
        self.of_pid = os.getpid()
        finish_at_end(self)

    def finish(self) -> None:
        """Fold the rows of queries that have just ended, log the end of each query, and stop. Rows
        of an epoch that Spark reports after Python's end wait in the spool."""
        is_alive = True
        try:
            self.await_ended(_LAST_S)
        except Exception:
            is_alive = False  # The session has been stopped already.
        with self._wake:
            self._urgent &= is_alive
            self._is_finished = True
            self._wake.notify_all()
        if self._thread is not None:
            self._thread.join(_END_S)
        for place in list(self._accounts) if self._queries else ():
            self._read_accounts(place, is_last=True)
        self._say_ends(set(self._queries))
        for emitter in lineage.emitters:
            emitter.finish()

    def add(
        self, place: LedgerPath, interval_s: float, app_id: str = "",
        retention: Retention = Retention(),  # noqa: B008 (a value)
    ) -> None:  # fmt: skip
        """Fold this ledger from now on. `app_id` is the `appId` of its queries, or empty. If a
        ledger is added several times, the shortest interval and the longest retention apply."""
        with self._wake:
            self._retentions[place] = retention.or_longer(self._retentions.get(place, retention))
            self._app_ids.setdefault(place, set()).update({app_id} if app_id else ())
            self._intervals[place] = min(interval_s, self._intervals.get(place, interval_s))

    @property
    def ledgers(self) -> frozenset[str]:
        """The URIs of the ledgers that are folded."""
        with self._wake:
            return frozenset(place.uri for place in self._intervals)

    def onQueryStarted(self, event: Any) -> None:  # noqa: N802 (Spark's names)
        query, run = str(event.id), str(event.runId)
        self.started(run, query)
        sink = refuse_query(self._session, query, self.ledgers)
        if sink is not None:
            options, lane, plan = sink
            say_start(options, lane, query)
            self.sinks[run] = options.ledger
            if lineage.is_on():
                lineage.started(options, run, query, schema_of(plan))

    def onQueryProgress(self, event: Any) -> None:  # noqa: N802
        self.progressed(event.progress)

    def onQueryIdle(self, event: Any) -> None:  # noqa: N802
        self.begun.add(str(event.runId))

    def onQueryTerminated(self, event: Any) -> None:  # noqa: N802
        self.ended(str(event.runId), event.exception or "")

    def started(self, run_id: str, query_id: str = "") -> None:
        """Note the start of a query; Spark reports it before `start()` returns."""
        with self._wake:
            self._running.add(run_id)
            self._queries[run_id] = query_id
            places = [p for p in self._intervals if p not in self._accounts and not p.problem]
        # Begin to count now: a foreachBatch query commits its first epoch before its first event.
        for place in places:
            with contextlib.suppress(LedgerError, OSError):  # The first fold logs the error.
                self._accounts[place] = Accounts(place)

    def progressed(self, progress: Any) -> None:
        self.begun.add(str(progress.runId))
        if self._intervals:
            self._notify([progress], urgent=False)

    def ended(self, run_id: str = "", error: str = "") -> None:
        """Note the end of a query, and fold at once, so that its last rows do not wait."""
        lineage.failed(run_id, error)
        if error:
            self.sinks.pop(run_id, None)
        self.begun.add(run_id)
        with self._wake:
            self._running.discard(run_id)
            self._ended.add(run_id)
        self._notify([], urgent=True)

    def await_ended(self, wait_s: float) -> None:
        """Wait until the last epochs of ended queries are noted in the spool. `awaitTermination`
        returns before Spark has reported these epochs."""
        active = {str(query.runId) for query in self._session.streams.active}

        def is_noted() -> bool:
            return not (self._running - active or self._events or self._is_confirming)

        with self._wake:
            if not self._wake.wait_for(is_noted, wait_s):
                self._running &= active  # Wait only once for runs without events.

    def _notify(self, events: list[Any], *, urgent: bool) -> None:
        with self._wake:
            self._events += events
            self._urgent |= urgent
            if self._thread is None and not self._is_finished:
                self._thread = threading.Thread(
                    target=self._run, name="rocket-sink-fold", daemon=True
                )
                self._thread.start()
            self._wake.notify_all()

    def _run(self) -> None:
        folded: dict[LedgerPath, float] = {}
        counted: dict[LedgerPath, float] = {}
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._events or self._urgent or self._is_finished)
                urgent, self._urgent = self._urgent, False
                ended_runs, self._ended = self._ended, set()
                places = dict(self._intervals)
            is_all_folded = urgent
            for place, interval_s in places.items():
                # Confirm before each fold: all folds take longer than `Ledger.sync` waits.
                self._confirm_new()
                now = time.monotonic()
                if self._is_finished and not urgent:
                    continue
                if urgent or now - folded.get(place, -interval_s) >= interval_s:
                    # Count only epochs noted before the fold: it may miss files of later epochs.
                    noted = list(self._uncounted.get(place, ()))
                    is_folded = self._fold(place)
                    is_all_folded &= is_folded
                    now = folded[place] = time.monotonic()
                    self._read_accounts(place)
                    if is_folded and not self._is_finished:
                        self._warn_of_successors(place)
                        self._confirm_new()
                        self._expire(place)
                        self._confirm_new()
                    is_due = urgent or now - counted.get(place, -_COUNT_S) >= _COUNT_S
                    if is_folded and is_due and not self._is_finished:
                        self._count(place, noted)
                        counted[place] = time.monotonic()
            self._say_ends(ended_runs, without_rows=is_all_folded)
            if self._is_finished:
                return

    def _read_accounts(self, place: LedgerPath, *, is_last: bool = False) -> None:
        try:
            if place in self._accounts:
                self._accounts[place].read(self._queries, is_last=is_last)
        except Exception as error:
            _LOG.info("the ledger %s cannot be followed now: %s", place, first_line(error))

    def _say_ends(self, runs: set[str], *, without_rows: bool = True) -> None:
        """Log the row counts of these runs, which have ended. After a failed fold (`without_rows`
        is False) leave runs without rows to `finish`, which also looks into the spool."""
        runs &= set(self._queries)
        for run in runs:
            counts = Counter[str]()
            for accounts in list(self._accounts.values()):
                is_cut = run in self._running
                counts += accounts.say_end(run, self._queries[run], is_cut=is_cut)
            if not (counts or without_rows):
                continue
            query, ledger = self._queries.pop(run), self.sinks.pop(run, "")
            if ledger and not counts and ledger in [place.uri for place in self._accounts]:
                say_no_rows(query, ledger, is_early=run not in self.begun)
            self.begun.discard(run)
            lineage.ended(run, counts)

    def _fold(self, place: LedgerPath) -> bool:
        """Fold a ledger; return whether all finished files are in the table."""
        try:
            if place.problem and not spools_in_use(place):
                # The ledger has no spool to fold: only foreachBatch and sink.write use it.
                return True
            return not fold(self._session, place, wait_s=0).busy
        except Exception as error:
            # The rows are safe in the spool; the next fold takes them. If the session stops during
            # the fold, as at a driver's end, that is no error.
            if not _is_stopped(self._session):
                _LOG.warning("the ledger %s is not folded yet: %s", place, first_line(error))
            return False

    def _expire(self, place: LedgerPath) -> None:
        """Drop rows that are older than the queries' retention, once a day."""
        try:
            expire_daily(self._session, place, self._retentions[place])
        except Exception as error:
            if not _is_stopped(self._session):
                _LOG.warning("old rows stay in %s for now: %s", place, first_line(error))

    def _confirm_new(self) -> None:
        """Note the epochs that Spark has reported since the last call, for all ledgers."""
        with self._wake:
            events, self._events = self._events, []
            self._is_confirming = bool(events)
            app_ids = {place: tuple(names) for place, names in self._app_ids.items()}
        for place, names in app_ids.items():
            self._confirm(place, names, events)
        with self._wake:
            self._is_confirming = False
            self._wake.notify_all()

    def _confirm(self, place: LedgerPath, app_ids: tuple[str, ...], events: list[Any]) -> None:
        """Note the epochs that are done, for queries that write to this ledger."""
        for progress in events:
            # An epoch that reads no rows may still send rows of an aggregation's state.
            if not progress.numInputRows and int(progress.sink.numOutputRows) <= 0:
                continue
            if not progress.batchId:
                self._new.setdefault(place, set()).add(str(progress.id))
            try:
                query = self._name(place, app_ids, str(progress.id))
                if query is not None:
                    self._note(place, query, progress)
            except Exception as error:
                _LOG.warning(
                    "cannot note in the ledger %s that epoch %s of the query %s is done: %s",
                    place, progress.batchId, progress.id, first_line(error),
                )  # fmt: skip

    def _note(self, place: LedgerPath, query: str, progress: Any) -> None:
        ctx = RunContext(query, str(progress.runId), int(progress.batchId), lane="foreach")
        # Spark gives -1 if it does not count this sink's rows. The number of rows read is no
        # substitute, because a query may filter.
        handed = int(progress.sink.numOutputRows)
        spool = SpoolWriter(place.spools[0], ctx)
        spool.append(
            confirmed_row(
                ctx,
                num_input_rows=progress.numInputRows,
                rows_in=handed if handed >= 0 else None,
                duration_ms=float(progress.batchDuration),
            )
        )
        spool.seal()
        if handed > 0:
            waiting = self._uncounted.setdefault(place, {})
            waiting[query, ctx.run_id, ctx.epoch] = handed
            if len(waiting) > _UNCOUNTED:
                del waiting[next(iter(waiting))]

    def _warn_of_successors(self, place: LedgerPath) -> None:
        """Warn of queries with a new checkpoint that write to an earlier query's topics."""
        # Import here: workers import this module, too, but read no ledger.
        from rocket_sink.ledger.report.queries import successors
        from rocket_sink.ledger.sql import Scope, Scoped

        for query_id in sorted(self._new.pop(place, ())):
            if self._is_finished:
                return
            # Confirm now: a query of the table may take longer than `Ledger.sync` waits.
            self._confirm_new()
            try:
                query = reader_of(self._session, place)
                for successor in successors(Scoped(query, Scope(query_id))) if query else ():
                    _LOG.warning(
                        "the query %s begins at epoch 0 and writes to %s, as the query %s did "
                        "before it: if its checkpoint was deleted, all rows are sent again. With "
                        "the option appId such a start is refused",
                        query_id, successor.topic, successor.earlier,
                    )  # fmt: skip
            except Exception as error:
                if not self._is_finished:
                    text = "cannot look for queries before %s in %s: %s"
                    _LOG.warning(text, query_id, place.uri, first_line(error))

    def _name(self, place: LedgerPath, app_ids: tuple[str, ...], query_id: str) -> str | None:
        """Return the id under which the query's tasks write; None if they have written nothing."""
        name = self._names.get((place, query_id))
        if name is not None:
            return name
        for app_id in app_ids:
            if query_of(place, app_id) == query_id:
                self._names[place, query_id] = app_id
                return app_id
        # Ignore queries without files in the spool: Spark reports the events of all queries here.
        if not any(has_files(spool, spool.filesystem(), query_id) for spool in place.spools):
            return None
        self._names[place, query_id] = query_id
        return query_id

    def _count(self, place: LedgerPath, noted: Iterable[_Epoch]) -> None:
        """Log an error for each `noted` epoch with fewer rows in the table than Spark handed to
        tasks. Repeated attempts count, too, so a lower sum proves that rows are missing."""
        uncounted = self._uncounted.get(place, {})
        waiting = {key: uncounted.pop(key) for key in noted if key in uncounted}
        if not waiting:
            return
        try:
            row_counts = self._rows_in(place, waiting)
        except Exception as error:
            if _is_stopped(self._session):
                return
            if self._is_deleted(place):
                if place not in self._deleted:
                    self._deleted.add(place)
                    _LOG.warning(
                        "the ledger %s was deleted while its query ran, so nobody can tell whether "
                        "it lacks rows. Put the folder back from a backup; if it was deleted on "
                        "purpose, stop the queries that write to it, because they make a new "
                        "ledger there", place,
                    )  # fmt: skip
                return
            uncounted.update(waiting)
            _LOG.warning("cannot count the rows in %s: %s", place, first_line(error))
            return
        self._deleted.discard(place)
        for key, handed in waiting.items():
            if (rows := row_counts.get(key, 0)) < handed:
                _LOG.error(
                    "the ledger %s lacks %d of the %d rows that Spark handed to the tasks of "
                    "epoch %d of the query %s: workers wrote to another folder than the driver's, "
                    "or files of its _spool are gone. Dead letters may be among them: look for the "
                    "same path on the disks of the workers",
                    place, handed - rows, handed, key[2], key[0],
                )  # fmt: skip

    def _is_deleted(self, place: LedgerPath) -> bool:
        """Return whether the table is gone. It existed: `_count` follows a fold, which makes it."""
        try:
            return not is_table(self._session, place)
        except Exception:
            return False  # unknown: the caller logs its own error

    def _rows_in(self, place: LedgerPath, epochs: Iterable[_Epoch]) -> dict[_Epoch, int]:
        queries, _, numbers = zip(*epochs, strict=True)
        rows = read_table(self._session, place)
        tasks = rows.where((rows.kind == EPOCH) & rows.complete)
        matches = tasks.where(tasks.query_id.isin(*set(queries)))
        matches = matches.where(matches.epoch.between(min(numbers), max(numbers)))
        sums = matches.groupBy("query_id", "run_id", "epoch").agg(F.sum("rows_in").alias("rows"))
        return {(r.query_id, r.run_id, r.epoch): r.rows or 0 for r in sums.collect()}


def _is_stopped(session: SparkSession) -> bool:
    """Return whether the session has begun to stop; `_jsc` may be set for a while longer."""
    from py4j.protocol import Py4JError

    context = session.sparkContext._jsc
    try:
        return context is None or bool(context.sc().isStopped())
    except (OSError, Py4JError):  # The JVM is gone.
        return True
