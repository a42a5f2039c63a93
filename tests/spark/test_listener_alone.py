"""The listener of a session without a JVM: sessions, queries and ledgers are stand-ins."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock, call

import pytest

from rocket_sink.errors import LedgerError
from rocket_sink.ledger.path import resolve_path
from rocket_sink.ledger.upkeep.expire import Retention
from rocket_sink.options import SinkOptions
from rocket_sink.spark import listener
from rocket_sink.spark.listener import FoldThread, QueryListener
from tests.ledger.values import session

QUERY = "0123456789"
NAMED = {"ledger": "file:/l", "appId": "app"}


@pytest.mark.parametrize(
    ("options", "name", "named", "start"),
    [
        (None, None, call("7", QUERY), None),
        (None, "job", call("7", "job (01234567)"), None),
        ({}, "job", call("7", "job (01234567)", "", QUERY, hands_over=False), "job (01234567)"),
        ({"ledger": "file:/l", "ledgerVia": "spark"}, None,
         call("7", QUERY, "file:/l", QUERY, hands_over=True), QUERY),
        (NAMED, None, call("7", "app (01234567)", "file:/l", "app", hands_over=False),
         "app (01234567)"),
    ],
)  # fmt: skip
def test_the_events_of_a_query(monkeypatch, options, name, named, start):
    parsed = None if options is None else SinkOptions.parse(options)
    refuse = Mock(return_value=parsed and (parsed, "lane", "plan"))
    say, begin = Mock(), Mock()
    monkeypatch.setattr(listener, "refuse_query", refuse)
    monkeypatch.setattr(listener, "say_start", say)
    monkeypatch.setattr(listener, "schema_of", lambda plan: f"schema of {plan}")
    monkeypatch.setattr(listener, "plan_below", lambda plan: f"the {plan}")
    monkeypatch.setattr(listener.lineage, "start", begin)
    monkeypatch.setattr(listener.lineage, "is_on", lambda: True)
    thread = Mock(ledgers=["/l"])
    heard = QueryListener("session", thread)
    event = SimpleNamespace(runId=7, id=QUERY, name=name, progress="progress", exception=None)
    heard.onQueryStarted(event)
    assert thread.note_start.mock_calls == [call("7", QUERY, is_late=False)]
    assert refuse.mock_calls == [call("session", QUERY, ["/l"], is_late=False)]
    assert thread.runs.name_sink.mock_calls == [named]
    assert say.mock_calls == [call(parsed, "lane", start)] * (start is not None)
    start_event = call(parsed, "7", QUERY, "schema of the plan")
    assert begin.mock_calls == [start_event] * (start is not None)
    thread.note_start.return_value = False
    heard.meet("7", QUERY, is_late=True)
    assert thread.note_start.mock_calls[1:] == [call("7", QUERY, is_late=True)]
    assert refuse.call_count == 1
    heard.onQueryProgress(event)
    heard.onQueryIdle(event)
    heard.onQueryTerminated(event)
    heard.onQueryTerminated(SimpleNamespace(runId=7, exception="broken"))
    assert thread.note_progress.mock_calls == [call("progress")]
    assert thread.runs.begin.mock_calls == [call("7")]
    assert thread.note_end.mock_calls == [call("7", ""), call("7", "broken")]


def test_a_listener_that_comes_late_meets_the_queries_that_run(monkeypatch, caplog):
    met, heard, added = Mock(), list[Any](), Mock()
    monkeypatch.setattr(QueryListener, "meet", met)
    monkeypatch.setattr(FoldThread, "add", added)
    monkeypatch.setattr(listener, "observe", Mock(side_effect=LedgerError("no metrics")))
    spark: Any = session("run-1")
    spark.streams.active[0].id = QUERY
    spark.streams.addListener = heard.append
    spark._jsparkSession = SimpleNamespace(equals=lambda other: other is spark._jsparkSession)
    spark.sparkContext.stop = Mock()
    monkeypatch.setattr(listener, "active_session", lambda: spark)
    options = SinkOptions.parse(ledger="/l", foldIntervalMs=500, ledgerRetention="send=1d,body=2d")
    assert listener.install_fold(SinkOptions()) is None
    assert met.mock_calls == [call("run-1", QUERY, is_late=True)]
    thread = listener.install_fold(options, spark)
    [own] = heard
    assert own._session is spark and own._thread is thread is not None
    kept = Retention({"send": 86_400_000}, 2 * 86_400_000)
    assert added.mock_calls == [call(resolve_path("/l"), 0.5, kept)]
    assert met.call_count == 1 and "no metrics of the ledger /l: no metrics" in caplog.text
    assert listener.install_fold(options, object()) is None
    of_connect: Any = SimpleNamespace(sparkSession=object())
    assert listener.owner_of(of_connect) is of_connect.sparkSession
    spark.sparkContext._jsc = None  # The application has been stopped.
    assert listener.install_fold(options, spark) is None


def test_an_epoch_that_cannot_be_noted_is_warned_of(monkeypatch, caplog):
    again = Mock(return_value=True)
    monkeypatch.setattr(listener, "epoch_ran_again", again)
    thread, ledger = FoldThread(session()), Mock(place=resolve_path("/l"))
    progress = SimpleNamespace(
        runId=7, id=QUERY, batchId=3, timestamp="2026-01-01T00:00:00.500Z", batchDuration=5
    )
    thread.runs.start("7", QUERY)
    for hands_over in (False, True):
        thread.runs.name_sink("7", "job", ledger.place.uri, "app", hands_over=hands_over)
        thread._confirm(ledger, progress)
        ledger.confirm.assert_called_with(progress, "app", has_run_again=hands_over)
    began_ms = 1_767_225_600_500
    assert again.mock_calls == [call(thread._session, "7", began_ms, began_ms + 5)]
    ledger.confirm.side_effect = ValueError("no space\n")
    thread._confirm(ledger, progress)
    text = f"cannot note in the ledger /l that epoch 3 of the query {QUERY} is done: no space"
    assert caplog.messages == [text]


@pytest.mark.parametrize(
    ("failing", "java", "texts"),
    [
        ("", "runs", []), ("fold", "runs", ["the ledger /l is not folded yet: why"]),
        ("fold", "stopped", []), ("fold", "none", []), ("fold", "gone", []),
        ("expire", "runs", ["old rows stay in /l for now: why"]),
        ("warn_of_successor", "runs", ["cannot look in the ledger /l for queries before q: why"]),
        ("read_accounts", "runs", ["the ledger /l cannot be followed now: why"]),
    ],
)  # fmt: skip
def test_a_job_that_fails_is_warned_of_unless_the_session_stops(caplog, failing, java, texts):
    caplog.set_level("INFO")
    thread = FoldThread(session(is_stopped=java == "stopped"))
    if java == "none":
        thread._session.sparkContext._jsc = None
    if java == "gone":
        thread._session.sparkContext._jsc = Mock(sc=Mock(side_effect=OSError))
    ledger: Any = MagicMock(place=resolve_path("/l"), **{"new_queries.return_value": ["q"]})
    ledger.read_accounts.return_value = {}
    thread._confirm_new = Mock()
    if failing:
        getattr(ledger, failing).side_effect = ValueError("why\nof Java")
    thread._fold(ledger)
    thread._expire(ledger)
    assert caplog.messages == texts
    assert thread._is_finished is (java != "runs")
    assert ledger.read_accounts.mock_calls[0] == call(with_spool=False)
    is_folded = failing not in ("fold", "read_accounts")
    assert ledger.compare_counts.called is ledger.warn_of_successor.called is is_folded
    assert thread._confirm_new.call_count == 1 + is_folded
