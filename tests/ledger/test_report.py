"""A report's figures of a ledger with known rows."""

import dataclasses
import datetime as dt

import pyarrow as pa
import pytest

from rocket_sink.errors import LedgerError, Outcome
from rocket_sink.ledger.append.delta_rs import create_table
from rocket_sink.ledger.driver.ledger import Ledger
from rocket_sink.ledger.path import resolve_path
from rocket_sink.ledger.query.duckdb_reader import open_quick
from rocket_sink.ledger.records import in_flight_rows, isolation_rows, resolution_rows, send_rows
from rocket_sink.ledger.report import Scope, figures
from rocket_sink.ledger.schema import LEDGER_SCHEMA, SCHEMA_VERSION, VERSION_PROPERTY
from rocket_sink.ledger.transport.spool import SpoolWriter
from rocket_sink.ledger.views import queried, reader, rows_of
from rocket_sink.routing.fault import Isolation
from tests.ledger.views import quick_ledger

from .values import accounts, attempt, confirmed, context, letter, session

SPARK = session()
"""A session whose appends delta-rs commits; delta-rs and DuckDB read the ledgers."""
PROPERTIES = pa.map_(pa.string(), pa.string())
START_MS = 1_700_000_000_000


@pytest.fixture(scope="module")
def ledger(tmp_path_factory):
    new_ledger = Ledger(tmp_path_factory.mktemp("report"))
    first = context()
    second = dataclasses.replace(first, partition=1, task_attempt_id=11, worker="host:2")
    lost = dataclasses.replace(first, partition=2, task_attempt_id=13)
    other = context(query_id="o'th\\er {1}", task_attempt_id=12)
    # With the retried attempt there are 102, so percentiles fall between two values, where
    # definitions differ.
    good = [attempt(rtt_ms=float(i), started_ms=START_MS) for i in (42, *range(1, 101))]
    bad = attempt(
        broker_name="broker-b", outcome=Outcome.UNKNOWN, response_code=None, rtt_ms=3000.0,
        error_code="REQUEST_TIMEOUT", remark="no answer", started_ms=START_MS,
    )  # fmt: skip
    retried = attempt(attempt=2, rtt_ms=5.0, started_ms=START_MS + 60_000)
    refused = letter(first, reason="data", last_error_code="NULL_BODY", last_error="null")
    isolation = [Isolation("broker-b", "REQUEST_TIMEOUT", 10_000.0, 5.0, 35.0)]
    settled = {"letter_id": refused.column("letter_id"), "resolution": "dropped"}
    kept = {"keys": pa.array([["a", "b"]]), "properties": pa.array([[("x", "1")]], PROPERTIES)}
    new_ledger.append(
        SPARK,
        send_rows([*good, bad, retried], first),
        in_flight_rows([7], lost, topic="t", message_count=[0], body_bytes=[0]),
        refused, letter(second, last_error_code="CONNECT", last_error="refused", **kept),
        *(isolation_rows(isolation, c, now_s=5.0, now_us=START_MS * 1000)
          for c in (first, second)),
        accounts(first, acked=700, dead=1), accounts(second, acked=1, dead=1),
        confirmed(first, 703),
        accounts(other, rows_in=9, acked=8),
        resolution_rows(settled, context(query_id="backfill")),
    )  # fmt: skip
    return new_ledger


@pytest.fixture(scope="module")
def report(ledger):
    return ledger.report(SPARK, charts=True)


@pytest.mark.spark
def test_spark_says_the_same(spark, ledger, mixed):
    """Compare Spark's reports and views with those by delta-rs and DuckDB."""
    late = dt.datetime.fromtimestamp(START_MS / 1000 + 30, dt.timezone.utc)
    for of, scope in (
        (ledger, {}), (ledger, {"query": "o'th\\er {1}"}), (ledger, {"since": late}),
        (ledger, {"until": late}), (mixed[0], {}), (mixed[0], {"query": "5b2f1111"}),
    ):  # fmt: skip
        by_spark = figures(
            reader(of.rows(spark)), of.path,
            Scope(scope.get("query"), scope.get("since"), scope.get("until")), series=True,
        )  # fmt: skip
        assert by_spark == of.report(SPARK, charts=True, **scope)
    with pytest.raises(LedgerError, match="2 queries"):
        mixed[0].report(spark, query="5b2f")
    for view in (
        "sends", "letters", "pending_letters", "resolutions", "isolations", "epochs", "attempts",
    ):  # fmt: skip
        select = f"SELECT * FROM {view} ORDER BY at DESC LIMIT 1000"
        rows, expected = (
            sorted(map(repr, rows_of(table)))
            for table in (
                quick_ledger(ledger.path).query(select),
                queried(ledger.rows(spark), select).toArrow(),
            )
        )
        assert rows == expected != []


def test_totals(report):
    totals = report.totals
    assert (totals.epochs, totals.rows_in, totals.acked, totals.dead) == (2, 712, 709, 2)
    assert (totals.not_adding_up, totals.unconfirmed) == (1, 1)
    assert {(e.query_id, e.epoch, e.adds_up) for e in report.epochs} == {
        ("query", 0, True), ("o'th\\er {1}", 0, False)
    }  # fmt: skip


def test_brokers(report):
    nobody, a, b = report.brokers
    assert (nobody.broker, nobody.outcomes) == ("-", {"in_flight": 1})
    assert (a.broker, a.requests, a.messages, a.retries) == ("broker-a", 102, 714, 1)
    assert a.outcomes == {"acked": 102}
    assert (a.p50_ms, a.max_ms) == (pytest.approx(50.0, abs=1), 100.0)
    assert a.p95_ms == pytest.approx(95.0, abs=1)
    assert a.p99_ms == pytest.approx(99.0, abs=1)
    assert b.outcomes == {"unknown": 1}
    assert b.p99_ms is None  # A wait without an answer is no latency.


def test_series_have_the_sums_of_the_figures(report):
    series, (_, a, b) = report.series, report.brokers
    messages = dict.fromkeys(("broker-a", "broker-b"), 0)
    attempts = dict(messages)
    for _, broker, _, _, requests, stored, *_ in series.rows["cells"]:
        messages[broker] += stored
        attempts[broker] += requests
    assert messages == {"broker-a": a.messages, "broker-b": b.messages}
    assert attempts == {"broker-a": a.requests, "broker-b": b.requests}
    assert sum(row[3] for row in series.rows["queues"]) == a.messages
    [(broker, topic, answers, p50, p95, p99, p999, longest)] = series.rows["latency"]
    assert (broker, topic, answers, longest) == ("broker-a", "t", a.requests, a.max_ms)
    assert (p50, p95, p99, p999) == pytest.approx(
        (a.p50_ms, a.p95_ms, a.p99_ms, a.p999_ms), abs=0.001
    )
    assert [(f[3], f[10]) for f in series.rows["failures"]] == [("t", "REQUEST_TIMEOUT")]
    assert {row[:2] for row in series.rows["epochs"]} == {("query", 0), ("o'th\\er {1}", 0)}
    by_reason = {(reason): (n, settled) for _, reason, n, settled, _ in series.rows["letters"] if n}
    assert by_reason["transport"] == (1, 0) and sum(row[3] for row in series.rows["letters"]) == 1


def test_isolations_noted_by_two_workers_are_one(report):
    [event] = report.isolations
    assert report.isolation_count == 1
    assert (event.broker, event.cause, event.workers) == ("broker-b", "REQUEST_TIMEOUT", 2)
    assert event.length_ms == pytest.approx(30_000.0)
    assert event.start == dt.datetime.fromtimestamp(START_MS / 1000, dt.timezone.utc)


def test_a_broker_that_died_since_the_last_fold_is_named(tmp_path):
    ledger = Ledger(tmp_path)
    ledger.create(SPARK)
    writer = SpoolWriter(ledger.path, context())
    failed = attempt(
        broker_name="broker-b", outcome=Outcome.NOT_SENT, error_code="CONNECT", response_code=None
    )
    writer.append(send_rows([failed], context(), requests=[1]))
    report = ledger.report(SPARK)
    assert [absence.broker for absence in report.absences] == ["broker-b"]
    assert report.brokers == [], "its file is not folded: its task still runs"
    writer.abort()


def test_dead_letters_and_errors(report):
    letters = {d.error_code: (d.reason, d.letters, d.pending) for d in report.dead_letters}
    assert letters == {"NULL_BODY": ("data", 1, 0), "CONNECT": ("transport", 1, 1)}
    [error] = report.errors
    assert (error.error_code, error.attempts, error.messages) == ("REQUEST_TIMEOUT", 1, 7)
    assert error.first_at == dt.datetime.fromtimestamp(START_MS / 1000, dt.timezone.utc)


def test_scopes(ledger):
    other = ledger.report(SPARK, query="o'th\\er {1}")
    assert (other.totals.epochs, other.brokers, other.isolations) == (1, [], [])
    late = dt.datetime.fromtimestamp(START_MS / 1000 + 30, dt.timezone.utc)
    naive = late.replace(tzinfo=None)  # A time without a zone is in UTC.
    assert [b.requests for b in ledger.report(SPARK, since=naive).brokers] == [1, 1]
    early = ledger.report(SPARK, until=naive)
    assert (early.scope.until, ledger.report(SPARK, until=late)) == (late, early)
    assert [b.requests for b in early.brokers] == [101, 1]
    assert early.totals.epochs == 0


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """Return a ledger of mixed rows and the end of its epoch's task.

    It has degraded answers, a request that failed three times before it was stored, and two queries
    whose ids begin alike.
    """
    new_ledger = Ledger(tmp_path_factory.mktemp("mixed"))
    first = context(query_id="5b2f1111-aaaa")
    second = context(query_id="5b2f2222-bbbb", task_attempt_id=12)
    kept = attempt(outcome=Outcome.ACKED_DEGRADED, response_code=10)
    failed = [
        attempt(
            broker_name="broker-gone", outcome=Outcome.NOT_SENT, response_code=None,
            attempt=n, error_code="CONNECT", remark="refused", started_ms=START_MS - 60_000,
        )
        for n in (1, 2, 3)
    ]  # fmt: skip
    stored = attempt(attempt=4, started_ms=START_MS)
    account = accounts(first, acked=7, degraded=7)
    new_ledger.append(
        SPARK, send_rows([kept, *failed, stored], first, requests=[1, 2, 2, 2, 2]), account,
        accounts(second, acked=1), confirmed(first, 14),
    )  # fmt: skip
    return new_ledger, account.column("at")[0].as_py()


class TestMixed:
    @pytest.fixture(scope="class")
    def found(self, mixed):
        return mixed[0].report(SPARK)

    def test_degraded_is_stored(self, found):
        a, _ = found.brokers
        assert (a.broker, a.requests, a.degraded, a.not_acked) == ("broker-a", 2, 1, 0)
        assert [error.error_code for error in found.errors] == ["CONNECT"]

    def test_messages_are_not_counted_per_attempt(self, found):
        a, gone = found.brokers
        assert (a.messages, a.body_bytes) == (14, 1400)
        assert (gone.messages, gone.body_bytes, gone.requests, gone.not_acked) == (0, 0, 3, 3)
        [error] = found.errors
        assert (error.attempts, error.messages) == (3, 7)

    def test_a_broker_that_gets_nothing_any_more_shows_its_last_time(self, found):
        a, gone = found.brokers
        assert (a.last_at - gone.last_at).total_seconds() > 59

    def test_an_epochs_time_is_its_tasks(self, found, mixed):
        [epoch] = [e for e in found.epochs if e.query_id == "5b2f1111-aaaa"]
        assert epoch.confirmed and epoch.at == mixed[1]

    def test_the_beginning_of_an_id_will_do(self, mixed):
        for query_id in ("5b2f1111", "5b2f1111-aaaa", "5b2f1"):
            scoped = mixed[0].report(SPARK, query=query_id)
            assert scoped.scope.query_id == "5b2f1111-aaaa"
            assert scoped.totals.rows_in == 14

    def test_an_id_of_several_queries_or_none_is_an_error(self, mixed):
        cases = {"5b2f": "2 queries .* 5b2f1111-aaaa, 5b2f2222", "x'y": "no rows"}
        for query_id, message in cases.items():
            with pytest.raises(LedgerError, match=message):
                mixed[0].report(SPARK, query=query_id)


class TestWithoutSpark:
    """delta-rs and DuckDB read a ledger without a session."""

    def test_nothing_is_printed_and_memory_is_bounded(self, ledger):
        """Change DuckDB's defaults: progress on standard output, and most of the memory."""
        quick = quick_ledger(ledger.path)
        names = ("enable_progress_bar", "memory_limit", "temp_directory")
        settings = ", ".join(f"current_setting('{name}') AS {name}" for name in names)
        (found,) = rows_of(quick.query(f"SELECT {settings}"))
        assert found["enable_progress_bar"] is False
        assert found["memory_limit"] in ("953.6 MiB", "1.0 GB", "1GB")
        assert "rocket-sink-duckdb" in found["temp_directory"]

    def test_only_a_ledger_of_this_version_is_read(self, tmp_path):
        assert open_quick(tmp_path) is None
        assert open_quick("s3://bucket/ledger") is None
        for version in ("0", "99", str(SCHEMA_VERSION)):
            place = resolve_path(tmp_path / version)
            create_table(place, LEDGER_SCHEMA, {VERSION_PROPERTY: version})
            assert (open_quick(place.root) is not None) == (version == str(SCHEMA_VERSION))
