"""The thread that folds a session's ledgers, and that counts the rows which queries gave to tasks.
The session is a fake: delta-rs folds a local ledger without Java."""

import math
import shutil
import threading
import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import deltalake
import pytest

from rocket_sink.ledger.driver import folded
from rocket_sink.ledger.driver.folded import FoldedLedger
from rocket_sink.ledger.driver.ledger import Ledger
from rocket_sink.ledger.path import resolve_path
from rocket_sink.ledger.query.duckdb_reader import open_quick
from rocket_sink.ledger.upkeep.expire import Retention
from rocket_sink.options import SinkOptions
from rocket_sink.spark.listener import FoldThread, install_fold
from tests.ledger.values import accounts, confirmed, context, session, spool_rows, write_spool
from tests.ledger.views import view_rows
from tests.producer.waiting import until
from tests.python import run_python

QUERY = "5b2f11aa-0c4d-4f5e-9a6b-7c8d9e0f1a2b"
CONSOLE = "rocket_sink.spark.console"
DEADLINE_S = 60.0
wait_for = partial(until, poll_s=0.05)


def done(epoch, rows, run="run-1", *, read=None):
    """Return Spark's progress report of an epoch that has read and sent so many rows."""
    return SimpleNamespace(
        id=QUERY, runId=run, batchId=epoch, numInputRows=rows if read is None else read,
        batchDuration=5,
        sink=SimpleNamespace(numOutputRows=rows),
    )  # fmt: skip


def write(folder, epoch, rows, run="run-1", dead=0):
    """Write the spool file of a task."""
    ctx = context(query_id=QUERY, run_id=run, epoch=epoch, task_attempt_id=10 + epoch)
    write_spool(resolve_path(folder), ctx, accounts(ctx, acked=rows - dead, dead=dead))


@pytest.fixture
def thread():
    thread = FoldThread(session())
    yield thread
    thread.finish()


def begin(thread, folder, interval_s=0.0, run="run-1", *, is_late=False):
    """Start a query that writes to this ledger."""
    place = resolve_path(folder)
    thread.add(place, interval_s=interval_s)
    assert thread.note_start(run, QUERY, is_late=is_late)
    thread.runs.name_sink(run, QUERY, place.uri, QUERY)


def send(thread, folder, epoch, run="run-1", dead=0):
    """Write the five rows of an epoch, and report the epoch."""
    write(folder, epoch, 5, run, dead)
    thread.note_progress(done(epoch, 5, run))


def texts(caplog, level):
    return [record.getMessage() for record in caplog.records if record.levelname == level]


def said(caplog):
    """Return the lines about the ends of queries."""
    return [r.getMessage() for r in caplog.records if r.name == CONSOLE and " ended" in r.message]


def is_confirmed(folder, epochs):
    """Return whether the table has so many confirmed epochs."""
    if (quick := open_quick(folder)) is None:
        return False
    rows = quick.query("SELECT count(*) AS epochs FROM epochs WHERE confirmed")
    return bool(rows["epochs"][0].as_py() == epochs)


def test_the_last_burst_of_an_idle_stream_is_folded(tmp_path, thread):
    """No event comes after the burst, but the interval passes. The last epoch has read no rows, and
    sends those of its state; an epoch without rows is not confirmed."""
    begin(thread, tmp_path, 0.5)
    thread.note_progress(done(0, 0))
    for epoch, read in ((1, 5), (2, 9), (3, 0)):
        write(tmp_path, epoch, 5)
        thread.note_progress(done(epoch, 5, read=read))
    wait_for(lambda: is_confirmed(tmp_path, 3))
    assert not Ledger(tmp_path).unfolded_epochs()


@pytest.mark.parametrize(
    ("read", "handed", "is_again", "row"),
    [
        (5, 5, False, (5, 5, None)), (9, 5, True, (9, 5, 5)), (9, -1, True, (9, None, 9)),
        (9, -1, False, (9, None, None)), (0, 3, False, (0, 3, None)), (5, 0, False, (5, 0, None)),
        (0, 0, True, None), (0, -1, True, None),
    ],
)  # fmt: skip
def test_what_a_confirmation_tells(tmp_path, read, handed, is_again, row):
    ledger = FoldedLedger(session(), resolve_path(tmp_path))
    write(tmp_path, 4, 1)
    ledger.confirm(done(4, handed, read=read), QUERY, has_run_again=is_again)
    rows = spool_rows(*tmp_path.rglob("*.arrow"))
    names = ("num_input_rows", "rows_in", "duplicates_possible")
    noted = [tuple(each[name] for name in names) for each in rows if each["partition"] is None]
    assert noted == ([] if row is None else [row])
    assert ledger.new_queries() == []
    ledger.confirm(done(0, 1), None)
    assert [ledger.new_queries() for _ in range(2)] == [[QUERY], []]


def test_when_a_fold_and_an_expiry_are_due(tmp_path, monkeypatch):
    """Look for an expiry once an hour, however often rows are folded."""
    now, busy, kept = [100.0], [False], list[Retention]()
    monkeypatch.setattr(folded, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(folded, "fold", lambda *_, wait_s: SimpleNamespace(busy=busy[0] or wait_s))
    monkeypatch.setattr(folded, "expire_daily", lambda *of: kept.append(of[2]))
    ledger = FoldedLedger(session(), resolve_path(tmp_path))

    def due():
        return ledger.waits, ledger.is_fold_due(), ledger.is_expiry_due(), ledger.next_s

    assert due() == (False, False, False, math.inf)
    ledger.add(20.0, Retention({"send": 1}))
    ledger.add(10.0, Retention({"send": 2, "epoch": 1}))
    ledger.await_fold()
    assert due() == (True, True, False, -math.inf)
    busy[0] = True
    assert not ledger.fold() and due() == (True, False, False, 101.0)
    now[0], busy[0] = 110.0, False
    assert due() == (True, True, False, 101.0)
    assert ledger.fold() and due() == (False, False, True, 110.0)
    ledger.expire()
    assert due() == (False, False, False, 3710.0) and kept == [Retention({"send": 2, "epoch": 1})]
    ledger.await_fold()
    now[0] = 119.0
    assert due() == (True, False, False, 120.0)
    assert ledger.fold() and due() == (False, False, False, 3710.0)
    ledger.add(0.0, Retention())
    busy[0] = True
    assert not ledger.fold() and ledger.next_s == 120.0


def test_the_accounts_of_new_rows(tmp_path):
    """The first error of an epoch stays. Rows of the spool count on request, and runs end."""
    ledger = Ledger(tmp_path)
    ledger.create(session())
    sums = folded.Accounts(resolve_path(tmp_path))
    for task, error in enumerate(("", "the first", "the second")):
        ctx = context(task_attempt_id=task)
        ledger.append(session(), accounts(ctx, acked=2, first_error=error), confirmed(ctx, 2))
    ledger.append(session(), accounts(context(epoch=1), complete=False, acked=9))
    write_spool(tmp_path, context(epoch=2), accounts(context(epoch=2), dead=1))
    (counts,) = sums.read().items()
    assert counts[0] == ("run-1", 0) and counts[1]["first_error"] == "the first"
    assert (counts[1]["rows_in"], counts[1]["acked"], counts[1]["dead"]) == (6, 6, 0)
    ((key, spooled),) = sums.read(with_spool=True).items()
    assert key == ("run-1", 2) and spooled["dead"] == 1
    assert [sums.take("run-1")["rows_in"] for _ in range(2)] == [7, 0]


def test_the_newest_epochs_wait_for_a_comparison(tmp_path, monkeypatch):
    monkeypatch.setattr(folded, "_UNCOUNTED", 2)
    ledger = FoldedLedger(session(), resolve_path(tmp_path))
    ledger.begin_run("run-1", is_late=False)
    sums = ledger.accounts
    ledger.begin_run("run-2", is_late=True)
    assert ledger.accounts is sums is not None
    write(tmp_path, 0, 5)
    for epoch in range(4):
        ledger.confirm(done(epoch, 5), QUERY)
    assert ledger.handed_epochs() == [("run-1", 2), ("run-1", 3)]


def test_rows_do_not_expire_only_after_a_fold(tmp_path, thread, monkeypatch):
    """A stream may be idle for longer than a day."""
    looks: list[Retention] = []
    monkeypatch.setattr(folded, "expire_daily", lambda spark, place, kept: looks.append(kept))
    monkeypatch.setattr(folded, "_EXPIRY_S", 0.2)
    kept = Retention({"send": 1000})
    thread.add(resolve_path(tmp_path), 1e9, retention=kept)
    thread.note_progress(done(0, 5))
    wait_for(lambda: len(looks) >= 3)
    assert looks[0] == kept


def test_a_fold_that_failed_is_repeated(tmp_path, thread, caplog, monkeypatch):
    """Another process folds while the last query ends. The end is told only after a fold of this
    thread, which has counted all rows, so no row is reported as missing."""
    caplog.set_level("INFO", "rocket_sink")
    fold, tries = folded.fold, []

    def fold_later(*arguments, **more):
        tries.append(1)
        if len(tries) == 1:
            fold(*arguments, **more)
            send(thread, tmp_path, 1)
            thread.note_end("run-1")
        return SimpleNamespace(busy=True) if len(tries) < 3 else fold(*arguments, **more)

    monkeypatch.setattr(folded, "fold", fold_later)
    monkeypatch.setattr(folded, "_RETRY_S", 0.1)
    begin(thread, tmp_path)
    send(thread, tmp_path, 0)
    wait_for(lambda: said(caplog))
    assert len(tries) == 3 and not Ledger(tmp_path).unfolded_epochs()
    assert "10 rows in, 10 acknowledged; ledger" in said(caplog)[0]
    assert not texts(caplog, "ERROR")


def test_the_end_of_a_query_is_waited_for():
    """Spark reports the end after `awaitTermination` has returned."""
    thread, handled = FoldThread(session("other")), threading.Event()
    thread.note_start("other")
    thread.note_start("run-1")
    confirm = thread._confirm

    def slowly(*arguments):
        time.sleep(0.2)
        confirm(*arguments)
        handled.set()

    thread._confirm = slowly
    thread.add(resolve_path("/no/such/ledger"), interval_s=1e9)

    def end():
        thread.note_progress(done(0, 1))
        thread.note_end("run-1")

    threading.Timer(0.2, end).start()
    thread.await_ended(DEADLINE_S)
    assert handled.is_set()
    thread.finish()  # Else its first look for an expiry may come in another test.


def test_an_epoch_is_noted_between_the_folds_of_two_ledgers(thread):
    """A fold of many ledgers takes longer than a sync waits for the end of a query."""
    calls: list[Any] = []

    def fold(ledger):
        if not calls:
            thread.note_progress(done(1, 1))
        calls.append("fold")

    thread._fold = fold
    thread._expire = calls.append
    thread._confirm = lambda ledger, progress: calls.append(progress.batchId)
    for name in ("/no/one", "/no/two"):
        thread.add(resolve_path(name), interval_s=1e9)
    thread.note_end("run-1")
    wait_for(lambda: calls.count("fold") >= 2)
    assert calls[:4] == ["fold", 1, 1, "fold"]


def test_rows_that_come_after_a_fold_began_are_not_missing_yet(
    tmp_path, thread, caplog, monkeypatch
):
    """A fold under load takes longer than an epoch, and the counts are compared after it."""
    fold, folds = folded.fold, []

    def slow_fold(*arguments, **more):
        summary = fold(*arguments, **more)
        folds.append(summary)
        if len(folds) == 1:
            send(thread, tmp_path, 1)
            thread._confirm_new()
        return summary

    monkeypatch.setattr(folded, "fold", slow_fold)
    begin(thread, tmp_path, 1e9)
    send(thread, tmp_path, 0)
    wait_for(lambda: folds)
    thread.note_end("run-2")
    wait_for(lambda: is_confirmed(tmp_path, 2))
    thread.note_progress(done(2, 5))  # The files of this epoch are in no spool.
    write(tmp_path, 3, 4)
    thread.note_progress(done(3, 5))
    thread.note_end("run-1")
    wait_for(lambda: len(texts(caplog, "ERROR")) == 2)
    for text, (lost, epoch) in zip(texts(caplog, "ERROR"), ((5, 2), (1, 3)), strict=True):
        assert f"{lost} of the 5 rows that Spark handed to the tasks of epoch {epoch} " in text
    epochs = view_rows(tmp_path, "SELECT rows_in, missing_rows, adds_up FROM epochs ORDER BY epoch")
    sums = [(5, 0, True), (5, 0, True), (0, 5, False), (4, 1, False)]
    assert [tuple(vars(row).values()) for row in epochs] == sums


def test_a_ledger_that_was_made_anew_is_another_ledger(tmp_path, thread, caplog):
    """A folder is deleted to begin anew. The next query's rows count, the last one's are over."""
    caplog.set_level("INFO", CONSOLE)
    folder = tmp_path / "ledger"
    for run, epochs in (("run-1", 3), ("run-2", 1), ("run-3", 4)):
        begin(thread, folder, run=run)
        for epoch in range(epochs):
            send(thread, folder, epoch, run, dead=1)
        wait_for(lambda epochs=epochs: is_confirmed(folder, epochs))
        thread.note_end(run)
        wait_for(lambda: not [*thread.runs])
        shutil.rmtree(folder)
    ends = [f"the query {QUERY} ended: {5 * n} rows in, {4 * n} acknowledged" for n in (3, 1, 4)]
    assert all(line.startswith(end) for line, end in zip(said(caplog), ends, strict=True))
    losses = [text for text in texts(caplog, "WARNING") if "were not delivered" in text]
    assert len(losses) == 3 + 1 + 4
    assert not texts(caplog, "ERROR")
    assert "deleted while" not in caplog.text


def test_a_ledger_that_is_deleted_under_its_query_is_told_of_once(tmp_path, thread, caplog):
    folder = tmp_path / "ledger"
    begin(thread, folder, 1e9)
    for epoch in range(2):
        # The second epoch is noted, and waits for the next fold.
        send(thread, folder, epoch)
        wait_for(lambda: is_confirmed(folder, 1))
    thread.await_ended(0.0)
    shutil.rmtree(folder)
    for run in ("run-2", "run-3"):
        thread.note_end(run)
        wait_for(lambda: "deleted while" in caplog.text)
    thread.note_end("run-1")
    wait_for(lambda: not [*thread.runs])
    [text] = texts(caplog, "WARNING")
    assert f"the ledger {folder} was deleted while its query ran" in text
    assert "stop the queries" in text
    assert not texts(caplog, "ERROR")
    assert not folder.exists()


def test_a_late_listener_compares_no_counts(tmp_path, thread, caplog):
    """The query has written rows, and another process has folded them, before the listener came."""
    begin(thread, tmp_path, is_late=True)
    assert not thread.note_start("run-1", QUERY)
    thread.note_progress(done(0, 5))
    thread.note_end("run-1")
    wait_for(lambda: is_confirmed(tmp_path, 1))
    wait_for(lambda: not [*thread.runs])
    assert not texts(caplog, "ERROR")


def test_an_epoch_that_spark_reports_after_a_fold_is_confirmed(tmp_path, thread):
    """Spark's report may come so late that a fold has emptied the spool before it. A failed query's
    epochs are confirmed, too, and epochs of another ledger's query are not."""
    begin(thread, tmp_path / "other", 1e9, run="run-2")
    begin(thread, tmp_path / "ledger", 1e9)
    write(tmp_path / "ledger", 0, 5)
    assert Ledger(tmp_path / "ledger").sync(session()).rows
    thread.note_progress(done(0, 5))
    thread.note_end("run-1", "an error of the next epoch")
    wait_for(lambda: is_confirmed(tmp_path / "ledger", 1))
    assert not (tmp_path / "other").exists()


def test_rows_that_no_fold_took_in_are_in_the_accounts_at_the_end(tmp_path, caplog):
    """A script without `awaitTermination` ends before Spark reports the epoch."""
    caplog.set_level("INFO", "rocket_sink")
    thread = FoldThread(session())
    begin(thread, tmp_path, 0.0)
    write(tmp_path, 0, 2, dead=1)
    thread.finish()
    loss, end = (record for record in caplog.records if record.name == CONSOLE)
    assert loss.levelname == "WARNING" and loss.message.startswith("1 of 2 rows of epoch ")
    assert f"the query {QUERY} ended: 2 rows in, 1 acknowledged, 1 dead letter; " in end.message
    waits = "; the last epochs wait for `rocket-sink ledger fold`"
    assert f"{waits}; a start with the same checkpoint goes on from here" in end.message


def test_a_session_folds_before_it_stops(tmp_path):
    """Spark reports the end of a query after `awaitTermination`, during `spark.stop()`."""
    unfolded, listeners = list[int](), list[Any]()
    spark, ledger = session(), Ledger(tmp_path)
    spark._jsparkSession = SimpleNamespace(equals=lambda other: other is spark._jsparkSession)
    spark.streams.addListener = listeners.append
    spark.sparkContext.stop = lambda: unfolded.append(ledger.unfolded_epochs())
    options = SinkOptions.parse({"nameServer": "a:1", "ledger": ledger.path})
    thread = install_fold(options, spark)
    wrapper, other = SimpleNamespace(**vars(spark)), SimpleNamespace(**vars(spark))
    other._jsparkSession = object()
    assert thread is install_fold(options, wrapper) and len(listeners) == 1
    assert thread is not install_fold(options, other) and len(listeners) == 2
    thread.note_start("run-1", QUERY)
    write(tmp_path, 0, 5)
    report = threading.Timer(0.3, thread.note_end, ["run-1"])
    report.start()
    spark.sparkContext.stop()
    assert unfolded == [0]
    spark.sparkContext.stop()  # as at the end of Python
    assert unfolded == [0, 0]


def test_the_ends_of_a_session_that_stops_are_told_at_once(tmp_path, caplog):
    """The JVM may end, or be stopped by Java, under the last fold."""
    caplog.set_level("INFO", "rocket_sink")
    thread = FoldThread(session(is_stopped=True))
    thread._session._jsparkSession = None
    begin(thread, tmp_path, 0.0)
    write(tmp_path, 0, 5)
    thread.note_end("run-1")
    wait_for(lambda: said(caplog))
    [end] = said(caplog)
    assert f"the query {QUERY} ended: 5 rows in, 5 acknowledged; " in end
    wait_for(lambda: thread._thread is not None and not thread._thread.is_alive())
    thread.finish()
    assert len(said(caplog)) == 1


@pytest.mark.parametrize("is_alive", [True, False])
def test_a_session_that_has_stopped_folds_no_last_rows(thread, is_alive):
    folds = list[Any]()
    thread._fold = folds.append
    thread.add(resolve_path("/no/ledger"), interval_s=1e9)
    thread._is_urgent = True  # A query has just ended.
    if not is_alive:
        thread._session.streams = None
    thread.fold_last()
    thread._run()
    assert len(folds) == is_alive


def test_an_end_that_is_never_told_is_waited_for_once(thread):
    thread.note_start("run-1")
    began_s = time.monotonic()
    thread.await_ended(0.3)
    assert time.monotonic() - began_s >= 0.3
    thread.await_ended(1e9)


def test_nobody_waits_while_queries_run():
    thread = FoldThread(session("run-1"))
    thread.note_start("run-1")
    thread.await_ended(1e9)


ENDING = """\
import sys, threading, time
from types import SimpleNamespace
import deltalake, pyarrow
from rocket_sink.ledger.driver import folded
from rocket_sink.ledger.path import resolve_path
from rocket_sink.spark import listener

place, started = resolve_path(sys.argv[1]), threading.Event()
table = pyarrow.table({"a": list(range(20_000))})

def fold(session, place, wait_s):
    for _ in range(10):
        deltalake.write_deltalake(sys.argv[1] + "/t", table, mode="append")
        started.set()
    return SimpleNamespace(busy=True)

folded.fold = fold
thread = listener.FoldThread(SimpleNamespace(sparkContext=SimpleNamespace(_jsc=None)))
thread.add(place, 0.0)
thread.note_end("run")
started.wait()
"""


def test_the_end_of_python_waits_for_the_fold_that_is_under_way(tmp_path):
    """A thread within delta-rs at that moment ended the process by SIGSEGV, every time."""
    process = run_python("-c", ENDING, tmp_path, timeout_s=DEADLINE_S, may_fail=True)
    assert (process.returncode, process.stderr) == (0, "")
    assert deltalake.DeltaTable(f"{tmp_path}/t").version() == 9
