"""Takes Spark's reports of queries, and folds ledgers in the background while queries run.

A session has one listener, and one background thread for all its ledgers. `runs` notes what Spark
has reported of each run; `ledger.driver.folded` has the jobs of one ledger; `FoldThread` decides
when a job runs. Events of Spark and the time wake the thread: an epoch's rows are folded one
interval after the fold before them at the latest, even if no further epoch comes.

Spark's events come late, and at a shutdown perhaps never. So a fold takes all finished files and
awaits no event; only `Ledger.sync` is certain to fold. The thread is a daemon: files that remain at
the driver's end stay in the spool. `spark.stop()` and Python's end first fold what ended queries
have written, and wait for a running fold: a thread in delta-rs would crash Python."""

from __future__ import annotations

import datetime as dt
import math
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.listener import StreamingQueryListener

from rocket_sink.errors import LedgerError
from rocket_sink.forks import ForkLock
from rocket_sink.ledger.driver.fold import FOLDERS
from rocket_sink.ledger.driver.folded import FoldedLedger
from rocket_sink.ledger.path import LedgerPath, first_line, resolve_path
from rocket_sink.ledger.query.live import observe
from rocket_sink.ledger.storage import active_session, is_classic
from rocket_sink.ledger.token import may_hand_over
from rocket_sink.ledger.upkeep.expire import Retention
from rocket_sink.net import log
from rocket_sink.options import BODY, SinkOptions
from rocket_sink.producer.process_end import finish_at_end
from rocket_sink.spark import lineage
from rocket_sink.spark.checks.context import epoch_ran_again, run_of
from rocket_sink.spark.checks.plans import schema_of
from rocket_sink.spark.checks.queries import refuse_query
from rocket_sink.spark.console import label_of, say_start
from rocket_sink.spark.packs import plan_below
from rocket_sink.spark.runs import Runs

_LOG: Final = log.logger(__name__)
_LOCK: Final = ForkLock()
_LAST_S: Final = 5.0
"""Longest wait at the driver's end for Spark's report that a query has ended."""
_END_S: Final = 60.0
"""Longest wait for a fold when the driver ends."""


def install_fold(options: SinkOptions, session: SparkSession | None = None) -> FoldThread | None:
    """Install the session's listener, once, and fold this ledger while queries make progress.
    Return the thread that folds; None without a ledger, or without a classic session that runs.
    Without a ledger the listener only checks queries at their start. A sink may be older than its
    session, or write frames of several sessions, so each write calls this."""
    session = session or active_session()
    if not is_classic(session) or session.sparkContext._jsc is None:
        return None
    # Keep the threads in the context, because a session may have several wrapper objects.
    with _LOCK:
        context = session.sparkContext.__dict__
        if FOLDERS not in context:
            context[FOLDERS] = []
            context["stop"] = partial(_fold_and_stop, session.sparkContext.stop, context[FOLDERS])
        threads: list[FoldThread] = context[FOLDERS]
        thread = next((thread for thread in threads if thread.folds_for(session)), None)
        is_new = thread is None
        if thread is None:
            thread = FoldThread(session)
            threads.append(thread)
    if options.ledger:
        _add_ledger(thread, options)
    if is_new:
        listener = QueryListener(session, thread)
        session.streams.addListener(listener)
        # A sink may be made before its session: then its query runs already.
        for query in session.streams.active:
            listener.meet(str(query.runId), str(query.id), is_late=True)
    return thread if options.ledger else None


def _fold_and_stop(stop: Callable[[], None], threads: list[FoldThread]) -> None:
    """Stop the application (`spark.stop()`), which can fold no more, after the folds that are due.
    A script that ends by `awaitTermination()` and `spark.stop()` gives Spark no time to report the
    query's end before."""
    try:
        for thread in list(threads):
            thread.fold_last()
    finally:
        stop()


def owner_of(df: DataFrame) -> SparkSession:
    """Return the session whose listener hears of the query that gave this frame to a foreachBatch
    function. The frame's own session is a clone of it, which the query has made."""
    session, execution = df.sparkSession, run_of(df).execution
    if not is_classic(session):
        return session
    if execution is not None:
        return SparkSession(session.sparkContext, execution.sparkSession())
    # An application is running, so this returns its session.
    return SparkSession.builder.getOrCreate()


def _add_ledger(thread: FoldThread, options: SinkOptions) -> None:
    place = resolve_path(options.ledger)
    rows_ms = {kind: ms for kind, ms in options.ledger_retention_ms if kind != BODY}
    retention = Retention(rows_ms, options.body_retention_ms)
    thread.add(place, options.fold_interval_ms / 1000, retention)
    try:
        observe(place)
    except (LedgerError, OSError) as error:
        _LOG.warning("no metrics of the ledger %s: %s", place, first_line(error))


class QueryListener(StreamingQueryListener):
    """Checks queries at their start, and tells the thread of their progress and end."""

    def __init__(self, session: SparkSession, thread: FoldThread) -> None:
        self._session = session
        self._thread = thread

    def onQueryStarted(self, event: Any) -> None:  # noqa: N802 (Spark's names)
        self.meet(str(event.runId), str(event.id), event.name or "")

    def onQueryProgress(self, event: Any) -> None:  # noqa: N802
        self._thread.note_progress(event.progress)

    def onQueryIdle(self, event: Any) -> None:  # noqa: N802
        self._thread.runs.begin(str(event.runId))

    def onQueryTerminated(self, event: Any) -> None:  # noqa: N802
        self._thread.note_end(str(event.runId), event.exception or "")

    def meet(self, run: str, query: str, name: str = "", *, is_late: bool = False) -> None:
        """Check and note a run, once. `name` is its `queryName`, or empty; `is_late`: the run began
        before the listener was there."""
        if not self._thread.note_start(run, query, is_late=is_late):
            return
        sink = refuse_query(self._session, query, self._thread.ledgers, is_late=is_late)
        if sink is None:
            self._thread.runs.name_sink(run, label_of(name, query))
            return
        options, lane, plan = sink
        label = label_of(name or options.app_id, query)
        say_start(options, lane, label)
        hands_over = may_hand_over(options)
        writer = options.app_id or query
        self._thread.runs.name_sink(run, label, options.ledger, writer, hands_over=hands_over)
        if lineage.is_on():
            lineage.start(options, run, query, schema_of(plan_below(plan)))


class FoldThread:
    """Folds a session's ledgers in the background, each at most once per interval, and does the
    ledgers' other jobs after their folds."""

    def __init__(self, session: SparkSession) -> None:
        self.runs = Runs()
        self._session = session
        self._ledgers: dict[LedgerPath, FoldedLedger] = {}
        self._wake = threading.Condition()
        self._events: list[Any] = []
        """Epochs that Spark has reported, not noted in the spool yet."""
        self._is_confirming = False
        self._is_urgent = False
        """Whether a query has ended, so that its last rows must not wait."""
        self._is_finished = False
        self._thread: threading.Thread | None = None
        self.of_pid = os.getpid()
        finish_at_end(self)

    def folds_for(self, session: SparkSession) -> bool:
        """Return whether this thread is that of a session, whose wrapper may be another object."""
        return bool(self._session._jsparkSession.equals(session._jsparkSession))

    def finish(self) -> None:
        """Do as `fold_last` at Python's end. Rows of an epoch that Spark reports after that wait in
        the spool."""
        self.fold_last()
        for emitter in lineage.emitters:
            emitter.finish()

    def fold_last(self) -> None:
        """Fold the rows of queries that have just ended, log the end of each query, and stop."""
        is_alive = True
        try:
            self.await_ended(_LAST_S)
        except Exception:
            is_alive = False  # The session has been stopped already.
        with self._wake:
            self._is_urgent &= is_alive
            self._is_finished = True
            self._wake.notify_all()
        if self._thread is not None:
            self._thread.join(_END_S)
        self._conclude()

    def _conclude(self) -> None:
        """Log the ends of all runs, with rows that wait in the spool."""
        ledgers = list(self._ledgers.values())
        for ledger in ledgers if [*self.runs] else ():
            self._read_accounts(ledger, with_spool=True)
        self.runs.say_ends(self.runs, ledgers, is_last=True)

    def add(
        self, place: LedgerPath, interval_s: float,
        retention: Retention = Retention(),  # noqa: B008 (a value)
    ) -> None:  # fmt: skip
        """Fold this ledger from now on. If a ledger is added several times, the shortest interval
        and the longest retention apply."""
        with self._wake:
            is_new = place not in self._ledgers
            ledger = self._ledgers.setdefault(place, FoldedLedger(self._session, place))
            ledger.add(interval_s, retention)
        # The sink of a running query may be older than its session, and be met at its first epoch.
        for run in self.runs.awaited() if is_new else ():
            ledger.begin_run(run, is_late=True)

    @property
    def ledgers(self) -> frozenset[str]:
        """The URIs of the ledgers that are folded."""
        with self._wake:
            return frozenset(place.uri for place in self._ledgers)

    def note_start(self, run: str, query: str = "", *, is_late: bool = False) -> bool:
        """Note the start of a run; Spark reports it before `start()` returns. Return False if the
        run is noted already. `is_late`: the run may have written to its ledger already."""
        with self._wake:
            if run in self.runs:
                return False
            self.runs.start(run, query)
            ledgers = list(self._ledgers.values())
        # Begin to count now: a foreachBatch query commits its first epoch before its first event.
        for ledger in ledgers:
            ledger.begin_run(run, is_late=is_late)
        return True

    def note_progress(self, progress: Any) -> None:
        """Note an epoch that is done; its rows wait for a fold."""
        self.runs.begin(str(progress.runId))
        if self._ledgers:
            with self._wake:
                self._events.append(progress)
                self._start()

    def note_end(self, run: str, error: str = "") -> None:
        """Note the end of a run, and fold at once, so that its last rows do not wait."""
        with self._wake:
            self.runs.end(run, error)
            self._is_urgent = True
            self._start()

    def await_ended(self, wait_s: float) -> None:
        """Wait until the last epochs of ended queries are noted in the spool. `awaitTermination`
        returns before Spark has reported these epochs."""
        active = {str(query.runId) for query in self._session.streams.active}

        def is_noted() -> bool:
            return not (self.runs.awaited() - active or self._events or self._is_confirming)

        with self._wake:
            if not self._wake.wait_for(is_noted, wait_s):
                self.runs.give_up(self.runs.awaited() - active)

    def _start(self) -> None:
        """Wake the thread; start it at the first call. The caller holds `_wake`."""
        if self._thread is None and not self._is_finished:
            self._thread = threading.Thread(target=self._run, name="rocket-sink-fold", daemon=True)
            self._thread.start()
        self._wake.notify_all()

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(self._is_woken, self._pause_s())
                is_urgent, self._is_urgent = self._is_urgent, False
                is_last = self._is_finished
                ended_runs, ledgers = self.runs.ended(), list(self._ledgers.values())
            for ledger in ledgers:
                # Confirm before each fold: all folds take longer than `Ledger.sync` waits.
                self._confirm_new()
                if is_urgent or (ledger.is_fold_due() and not self._is_finished):
                    self._fold(ledger)
                if ledger.is_expiry_due() and not self._is_finished:
                    self._expire(ledger)
            self.runs.say_ends(ended_runs, ledgers)
            if is_last:
                return

    def _is_woken(self) -> bool:
        return bool(self._events or self._is_urgent or self._is_finished)

    def _pause_s(self) -> float | None:
        """Return the time until the next fold or expiry; None: wait for an event."""
        next_s = min((ledger.next_s for ledger in self._ledgers.values()), default=math.inf)
        return None if next_s == math.inf else max(0.0, next_s - time.monotonic())

    def _confirm_new(self) -> None:
        """Note the epochs that Spark has reported since the last call, for all ledgers."""
        with self._wake:
            events, self._events = self._events, []
            self._is_confirming = bool(events)
            ledgers = list(self._ledgers.values())
        for ledger in ledgers if events else ():
            ledger.await_fold()
            for progress in events:
                self._confirm(ledger, progress)
        with self._wake:
            self._is_confirming = False
            self._wake.notify_all()

    def _confirm(self, ledger: FoldedLedger, progress: Any) -> None:
        try:
            query = self.runs.name_in(str(progress.runId), ledger.place.uri)
            # Spark is asked about stages only if the query writes to this ledger.
            has_run_again = query is not None and self._has_run_again(progress)
            ledger.confirm(progress, query, has_run_again=has_run_again)
        except Exception as error:
            _LOG.warning(
                "cannot note in the ledger %s that epoch %s of the query %s is done: %s",
                ledger.place, progress.batchId, progress.id, first_line(error),
            )  # fmt: skip

    def _has_run_again(self, progress: Any) -> bool:
        """Return whether a stage of the epoch ran again and its earlier attempt left no record."""
        if not self.runs.hands_over(str(progress.runId)):
            return False
        began = dt.datetime.fromisoformat(progress.timestamp.replace("Z", "+00:00"))
        began_ms = began.timestamp() * 1000
        ended_ms = began_ms + progress.batchDuration
        return epoch_ran_again(self._session, str(progress.runId), began_ms, ended_ms)

    def _fold(self, ledger: FoldedLedger) -> None:
        """Fold a ledger, and log what its new rows say."""
        handed = ledger.handed_epochs()
        try:
            is_folded = ledger.fold()
        except Exception as error:
            is_folded = False
            self._warn("the ledger %s is not folded yet: %s", ledger.place, error)
        if not self._read_accounts(ledger) or not is_folded or self._is_finished:
            return
        ledger.compare_counts(handed)
        # Confirm between queries of the table: they may take longer than `Ledger.sync` waits.
        for query in ledger.new_queries():
            self._confirm_new()
            try:
                ledger.warn_of_successor(query)
            except Exception as error:
                text = "cannot look in the ledger %s for queries before %s: %s"
                self._warn(text, ledger.place, query, error)

    def _expire(self, ledger: FoldedLedger) -> None:
        self._confirm_new()
        try:
            ledger.expire()
        except Exception as error:
            self._warn("old rows stay in %s for now: %s", ledger.place, error)

    def _warn(self, text: str, *facts: Any) -> None:
        """Warn of a job that failed, which is repeated later; the last of `facts` is the error. If
        the session has stopped, that is no error: log the ends of all runs, and stop."""
        if not _is_stopped(self._session):
            *before, error = facts
            _LOG.warning(text, *before, first_line(error))
        elif not self._is_finished:
            self._is_finished = True
            self._conclude()

    def _read_accounts(self, ledger: FoldedLedger, *, with_spool: bool = False) -> bool:
        """Warn of losses in the ledger's new rows. Return False if the rows cannot be read now."""
        try:
            counts = ledger.read_accounts(with_spool=with_spool)
        except Exception as error:
            _LOG.info("the ledger %s cannot be followed now: %s", ledger.place, first_line(error))
            return False
        self.runs.warn_of_losses(counts, ledger.place.uri)
        return True


def _is_stopped(session: SparkSession) -> bool:
    """Return whether the session has begun to stop; `_jsc` may be set for a while longer."""
    from py4j.protocol import Py4JError

    context = session.sparkContext._jsc
    try:
        return context is None or bool(context.sc().isStopped())
    except (OSError, Py4JError):  # The JVM is gone.
        return True
