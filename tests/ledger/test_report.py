"""A report's figures of a ledger with known rows."""

import dataclasses
import datetime as dt

import pyarrow as pa
import pytest

from rocket_sink.errors import LedgerError, Outcome
from rocket_sink.ledger.driver.ledger import Ledger
from rocket_sink.ledger.records import (
    GroupFacts,
    dead_letter_rows,
    in_flight_rows,
    in_order,
    isolation_rows,
    send_rows,
)
from rocket_sink.ledger.report import Scope, figures
from rocket_sink.ledger.report.series import step_of
from rocket_sink.ledger.report.values import ResentFigures
from rocket_sink.ledger.sql import class_of, latencies, latency_class, percentile, with_full_id
from rocket_sink.ledger.transport.spool import SpoolWriter
from rocket_sink.ledger.views import reader
from rocket_sink.routing.fault import Isolation
from tests.ledger.views import quick_ledger, report_of

from . import values
from .night import START, at, store
from .values import accounts, attempt, confirmed, context, failure, letter, resolved, session

SPARK = session()
"""A session whose appends delta-rs commits; delta-rs and DuckDB read the ledgers."""
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
    bad = failure("REQUEST_TIMEOUT", broker_name="broker-b", outcome=Outcome.UNKNOWN,
                  rtt_ms=3000.0, remark="no answer", started_ms=START_MS)  # fmt: skip
    retried = attempt(attempt=2, rtt_ms=5.0, started_ms=START_MS + 60_000)
    refused = letter(first, reason="data", last_error_code="NULL_BODY", last_error="null")
    isolation = [Isolation("broker-b", "REQUEST_TIMEOUT", 10_000.0, 5.0, 35.0)]
    kept = {"keys": pa.array([["a", "b"]]), "properties": [[("x", "1")]]}
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
        resolved(refused, "dropped"),
    )  # fmt: skip
    return new_ledger


@pytest.fixture(scope="module")
def report(ledger):
    return ledger.report(SPARK, charts=True)


@pytest.mark.spark
def test_spark_says_the_same(spark, ledger, mixed):
    """Compare Spark's reports with those by delta-rs and DuckDB."""
    late = dt.datetime.fromtimestamp(START_MS / 1000 + 0.5, dt.timezone.utc)
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
    assert (a.outcomes, a.max_ms) == ({"acked": 102}, 100.0)
    assert (a.p50_ms, a.p95_ms, a.p99_ms) == pytest.approx((50.0, 95.0, 99.0), abs=1)
    assert (b.outcomes, b.p99_ms) == ({"unknown": 1}, None)  # A wait is no latency.


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


def test_dead_letters_and_errors(report):
    letters = {d.error_code: (d.reason, d.letters, d.pending) for d in report.dead_letters}
    assert letters == {"NULL_BODY": ("data", 1, 0), "CONNECT": ("transport", 1, 1)}
    [error] = report.errors
    assert (error.error_code, error.attempts, error.messages) == ("REQUEST_TIMEOUT", 1, 7)
    assert error.first_at == dt.datetime.fromtimestamp(START_MS / 1000, dt.timezone.utc)


def test_scopes(ledger):
    other = ledger.report(SPARK, query="o'th\\er {1}")
    assert (other.totals.epochs, other.brokers, other.isolations) == (1, [], [])
    late = dt.datetime.fromtimestamp(START_MS / 1000 + 0.5, dt.timezone.utc)
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
    gone = {"broker_name": "broker-gone", "remark": "refused", "started_ms": START_MS - 60_000}
    failed = [failure("CONNECT", **gone, attempt=number) for number in (1, 2, 3)]
    stored = attempt(attempt=4, started_ms=START_MS)
    account = accounts(first, acked=7, degraded=7)
    new_ledger.append(
        SPARK, send_rows([kept, *failed, stored], first, requests=[1, 2, 2, 2, 2]), account,
        accounts(second, acked=1), confirmed(first, 14),
    )  # fmt: skip
    return new_ledger, account.column("at")[0].as_py()


def test_messages_are_not_counted_per_attempt(mixed):
    """Degraded answers count as stored; a broker that gets nothing any more shows its last time."""
    ledger, task_at = mixed
    report = ledger.report(SPARK)
    a, gone = report.brokers
    assert (a.broker, a.requests, a.degraded, a.not_acked) == ("broker-a", 2, 1, 0)
    assert (a.messages, a.body_bytes) == (14, 1400)
    assert (gone.messages, gone.body_bytes, gone.requests, gone.not_acked) == (0, 0, 3, 3)
    assert (a.last_at - gone.last_at).total_seconds() > 59
    [error] = report.errors
    assert (error.error_code, error.attempts, error.messages) == ("CONNECT", 3, 7)
    [epoch] = [e for e in report.epochs if e.query_id == "5b2f1111-aaaa"]
    assert epoch.confirmed and epoch.at == task_at


def test_the_beginning_of_an_id_will_do(mixed):
    for query_id in ("5b2f1111", "5b2f1111-aaaa", "5b2f1"):
        scoped = mixed[0].report(SPARK, query=query_id)
        assert scoped.scope.query_id == "5b2f1111-aaaa"
        assert scoped.totals.rows_in == 14
    cases = {"5b2f": "2 queries .* 5b2f1111-aaaa, 5b2f2222-bbbb; give", "x'y": "no rows"}
    for query_id, message in cases.items():
        with values.refusal(mixed[0].path, message):
            mixed[0].report(SPARK, query=query_id)
    for count, end in ((5, "; give more"), (6, ", ...; give more")):
        ids = pa.table({"query_id": [f"a{n}" for n in range(count)]})
        with values.refusal("/l", f"{count} queries .* 'a': a0, a1, a2, a3, a4{end}"):
            with_full_id(Scope("a"), lambda select, ids=ids: ids, "/l")


def test_latencies_have_classes_of_one_percent(tmp_path):
    group = GroupFacts(100, "ids", 1.0, 2.0, 3.0, 4.0, None)
    rows = send_rows([attempt(), attempt(rtt_ms=0.0)], context(), groups=[group, None])
    of_answers = latencies("topic = 't'", "topic")
    answers = quick_ledger(store(tmp_path, [rows])).query(
        f"SELECT ms, weight, {class_of('ms')} AS class FROM ({of_answers}) ORDER BY ms"
    )
    by_ms = [(0.0, 1.0), (1.25, 1.0), (2.0, 50.0), (3.0, 45.0), (4.0, 4.0)]
    assert [*zip(*answers.drop(["class"]).to_pydict().values(), strict=True)] == by_ms
    classes = [-691, 22, 69, 109, 138]
    assert answers["class"].to_pylist() == classes
    assert latency_class(answers["ms"].to_numpy()).tolist() == classes
    assert [percentile([(0, 1), (100, 1)], share, 2.7) for share in (0.5, 0.51)] == [1.005, 2.7]


def test_duckdb_prints_nothing_and_its_memory_is_bounded(ledger):
    """Change DuckDB's defaults: progress on standard output, and most of the memory."""
    names = ("enable_progress_bar", "memory_limit", "temp_directory")
    settings = ", ".join(f"current_setting('{name}')" for name in names)
    (values,) = quick_ledger(ledger.path).query(f"SELECT {settings}").to_pylist()
    shows_progress, memory, folder = values.values()
    assert shows_progress is False and memory in ("953.6 MiB", "1.0 GB", "1GB")
    assert "rocket-sink-duckdb" in folder


def sends(*from_to_s):
    """Return a send a second to each of two brokers; broker-b is away in these spans."""
    attempts = []
    for second in range(600):
        is_away = any(begin <= second < end for begin, end in from_to_s)
        started = int(START.timestamp() + second) * 1000
        by_b = {"broker_name": "broker-b", "started_ms": started + 500}
        attempts.append(attempt(broker_name="broker-a", started_ms=started))
        attempts.append(failure("CONNECT", **by_b) if is_away else attempt(**by_b))
    return send_rows(attempts, context(), requests=list(range(1, len(attempts) + 1)))


def isolation(from_s, to_s):
    event = Isolation("broker-b", "CONNECT", 2.0, from_s, to_s)
    return isolation_rows([event], context(), now_s=0.0, now_us=int(START.timestamp() * 1e6))


def test_two_outages_are_two(tmp_path):
    """Count two outages if the broker is there for minutes between them.

    A send that succeeds in the first seconds of an outage does not end it.
    """
    report = report_of(store(tmp_path, in_order([sends((60, 62), (63, 100), (480, 510))], 1 << 32)))
    times = [(b.p50_ms, b.p95_ms, b.p99_ms, b.p999_ms, b.wait_p99_ms) for b in report.brokers]
    assert times == [(1.25, 1.25, 1.25, 1.25, pytest.approx(0.5, rel=0.01))] * 2
    lengths = [(a.back_at - a.since).total_seconds() for a in report.absences if a.back_at]
    assert lengths == [40.0, 30.0]
    assert [a.stored_elsewhere for a in report.absences] == [40, 30]
    (line,) = [str(finding) for finding in report.verdict if finding.name == "broker_was_away"]
    assert "2 times, at most 70.0 s in all, the last from 2026-03-01 13:53:00 UTC" in line


def test_lists_have_limits(tmp_path):
    """20 brokers, 10 errors and 50 isolations at most are listed."""
    failed = [
        failure("CONNECT" if number > 10 else f"ERROR_{number}", broker_name=f"b-{number}")
        for number in range(32)
    ]
    rows = [send_rows(failed, context(), requests=list(range(1, 33)))]
    rows += [isolation(n, n + 1) for n in range(51)]
    report = report_of(store(tmp_path, in_order(rows, 1 << 32)))
    assert (len(report.absences), len(report.errors)) == (20, 10)
    assert (report.isolation_count, len(report.isolations)) == (51, 50)


@pytest.mark.parametrize(("elsewhere", "is_away"), [(19, False), (20, True)])
def test_a_silent_broker_is_away_if_others_were_asked(tmp_path, elsewhere, is_away):
    ms = int(START.timestamp()) * 1000
    unknown = {"outcome": Outcome.UNKNOWN, "broker_name": "broker-b", "started_ms": ms}
    silent = failure("REQUEST_TIMEOUT", **unknown)
    stored = [attempt(started_ms=ms + 1 + n) for n in range(elsewhere)]
    rows = send_rows([silent, *stored], context(), requests=list(range(1, elsewhere + 2)))
    path = store(tmp_path, in_order([rows], 1 << 32))
    assert bool(report_of(path).absences) == is_away
    back = send_rows(
        [attempt(broker_name="broker-b", started_ms=ms + 99)], context(), requests=[99]
    )
    assert report_of(store(tmp_path, in_order([back], 2 << 32))).absences == []


@pytest.mark.parametrize(("pause_s", "outages"), [(10, 1), (11, 2)])
def test_failures_in_ten_seconds_are_one_outage(tmp_path, pause_s, outages):
    spans = [(60, 61), (60 + pause_s, 61 + pause_s)]
    report = report_of(store(tmp_path, in_order([sends(*spans)], 1 << 32)))
    assert len(report.absences) == outages


def test_steps_suit_a_time_axis():
    steps = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600, 43_200,
             86_400]  # fmt: skip
    assert [step_of(96 * step) for step in steps] == steps
    assert [step_of(96 * step + 1) for step in steps] == [*steps[1:], 2 * 86_400]
    assert step_of(96 * 200_000) == 3 * 86_400


def test_penalties_that_overlap_are_one_isolation(tmp_path):
    spans = [(0, 10), (8, 18), (9, 12), (18, 20), (100, 130)]
    rows = [isolation(*span) for span in spans]
    (sums,) = report_of(store(tmp_path, in_order(rows, 1 << 32))).isolated
    seconds = {second for span in spans for second in range(*span)}
    assert (sums.times, sums.length_ms) == (2, 1000 * len(seconds))
    assert (sums.last_start - START).total_seconds() == 100


def test_a_broker_that_died_since_the_last_fold_is_named(tmp_path):
    """Read failures that are only in the spool, in the file of a task that still runs."""
    path = store(tmp_path, in_order([sends()], 1 << 32))
    late = at(sends((0, 600)), START + dt.timedelta(minutes=11))
    writer = SpoolWriter(path, context(epoch=7))
    writer.append(late, isolation(655, 700))
    report = report_of(path, unfolded_epochs=1)
    names = [str(finding) for finding in report.verdict]
    assert names[0].startswith(
        "broker-b has stored nothing since 2026-03-01 13:56:00 UTC (CONNECT)"
    )
    assert [sums.broker for sums in report.isolated] == ["broker-b"]
    assert sum(b.requests for b in report.brokers) == 1200, "what is in the table counts once"
    writer.append(at(sends(), START + dt.timedelta(minutes=12)))
    assert [finding.name for finding in report_of(path).verdict][:1] == ["all_is_well"]
    writer.abort()


def test_letters_that_were_exported_twice_count_once(tmp_path):
    columns = {
        "body": pa.array([b"one", b"two"]), "reason": "consumer", "last_error_code": "GAVE_UP",
        "letter_id": pa.array(["dlq-1", "dlq-2"]),
    }  # fmt: skip
    exports = [
        dead_letter_rows(columns, context(query_id=f"export-{n}", partition=None))[0]
        for n in range(2)
    ]
    report = report_of(store(tmp_path, in_order(exports, 1 << 32)))
    assert [(d.letters, d.pending) for d in report.dead_letters] == [(2, 2)]


def test_letters_without_a_key_are_told_beside_as_many_with_one(tmp_path):
    """Tell of letters without a key even if as many letters of closed topics have keys."""
    ctx = context()
    of_keys = {"reason": "permission", "sharding_key": pa.array(["k"])}
    rows = [letter(ctx, **of_keys), letter(ctx, reason="transport"), accounts(ctx, dead=2)]
    report = report_of(store(tmp_path, in_order(rows, 1 << 32)))
    assert [(w.rows, w.forbidden) for w in report.waiting] == [(1, 1)]
    problems = [finding.name for finding in report.verdict if finding.level == "problem"]
    assert problems == ["keys_wait", "letters_pending", "letters_forbidden"]


@pytest.mark.parametrize(
    ("ways", "settled"),
    [
        (("parked", "unparked"), None), (("parked", "unparked", "resent"), 3),
        (("parked", "unparked", "parked", "dropped"), 3), (("resent", "unparked"), 1),
        (("resent", "parked"), 1),
    ],
)  # fmt: skip
def test_a_letter_is_settled_by_what_was_not_taken_back(tmp_path, ways, settled):
    lost = letter(context(partition=None))
    rows = [at(lost, START)]
    for hour, way in enumerate(ways, 1):
        rows.append(at(resolved(lost, way), START + dt.timedelta(hours=hour)))
    series = report_of(store(tmp_path, in_order(rows, 1 << 32)), series=True).series
    times = [row[0] * series.step_ms / 1000 for row in series.rows["letters"] if row[3]]
    hours = [(time - START.timestamp()) / 3600 for time in times]
    assert hours == ([] if settled is None else [settled])


def test_sums_are_there_without_their_lists(tmp_path):
    ctx = context()
    isolated = [Isolation("broker-b", "REQUEST_TIMEOUT", 10_000.0, 5.0, 35.0)]
    rows = [accounts(ctx, acked=7), isolation_rows(isolated, ctx, now_s=5.0, now_us=0)]
    path = store(tmp_path, in_order(rows, 1 << 32))
    report = report_of(path, epochs=0)
    assert (report.totals.epochs, report.totals.acked, report.epochs) == (1, 7, [])
    assert (report.isolation_count, len(report.isolations)) == (1, 1)
    assert [isolated_broker.broker for isolated_broker in report.isolated] == ["broker-b"]
    assert len(report_of(path, epochs=1).epochs) == 1


def test_a_table_send_that_failed_adds_up_and_is_told(tmp_path):
    """Count such a send as complete: its caller has the error, and no later epoch replaces it.

    Other lanes try again.
    """
    table = {"query_id": "table-1", "partition": None, "task_attempt_id": None, "lane": "table"}
    failed, good = (context(epoch=epoch, **table) for epoch in (1, 2))
    rows = [
        accounts(failed, complete=False, rows_in=9, acked=3, unknown=2), accounts(good, acked=9),
        confirmed(good, 9, rows_in=9), accounts(context(), complete=False, rows_in=9, acked=3),
    ]  # fmt: skip
    report = report_of(store(tmp_path, in_order(rows, 1 << 32)))
    assert {(e.query_id, e.epoch): e.adds_up for e in report.epochs} == {
        ("table-1", 1): True, ("table-1", 2): True, ("query", 0): False
    }  # fmt: skip
    totals = report.totals
    assert (totals.not_adding_up, totals.unconfirmed, totals.failed_sends) == (1, 1, 1)
    assert "sends_failed" in [finding.name for finding in report.verdict]


OLD, NEW = "5b2f11aa-0c4d-4f5e-9a6b-7c8d9e0f1a2b", "6b2f11aa-0c4d-4f5e-9a6b-7c8d9e0f1a2b"


@pytest.mark.parametrize(
    ("query", "topic", "epoch", "minute", "successors"),
    [
        (NEW, "t", 0, 10, [(NEW, OLD, "t")]),
        ("an-app-id", "t", 0, 10, []),
        (NEW, "other", 0, 10, []),
        (NEW, "t", 1, 10, []),  # The query's beginning is in no ledger, or in another.
        (NEW, "t", 0, 3, []),  # The query began while the other still sent.
        (OLD, "t", 1, 10, []),
    ],
)
def test_a_query_whose_checkpoint_may_have_been_deleted_is_told(
    tmp_path, query, topic, epoch, minute, successors
):
    def epoch_rows(query, topic, epoch, minute):
        ctx = context(query_id=query, epoch=epoch)
        sent = send_rows([attempt(topic=topic)], ctx, requests=[1])
        rows = [sent, accounts(ctx, acked=7), confirmed(ctx, 7, rows_in=7)]
        return [at(batch, START + dt.timedelta(minutes=minute)) for batch in rows]

    rows = epoch_rows(OLD, "t", 0, 0) + epoch_rows(OLD, "t", 5, 5)
    rows += epoch_rows(query, topic, epoch, minute)
    report = report_of(store(tmp_path, in_order(rows, 1 << 32)))
    assert [(s.query_id, s.earlier, s.topic) for s in report.successors] == successors
    assert [f.name for f in report.verdict if f.level != "note"] == (
        ["query_began_again"] if successors else ["all_is_well"]
    )


def test_resent_letters_are_stored_and_late_keys_are_counted(tmp_path):
    """Letters of two keys fail in epoch 0, epoch 1 is stored, and then a backfill sends them."""
    first, second = context(), context(epoch=1, task_attempt_id=11)
    keys = ("a", "a", "b", None)
    lost = [letter(first, sharding_key=pa.array([key], pa.string())) for key in keys]
    parked = letter(first, sharding_key=pa.array(["c"]))
    rows = [
        *(at(batch, START) for batch in (*lost, parked)),
        at(accounts(first, acked=5, dead=5), START), at(confirmed(first, 10), START),
        at(accounts(second, acked=10), START + dt.timedelta(seconds=10)),
        at(confirmed(second, 10), START + dt.timedelta(seconds=10)),
    ]  # fmt: skip
    for batch, resolution in [*((each, "resent") for each in lost), (parked, "dropped")]:
        rows.append(at(resolved(batch, resolution), START + dt.timedelta(seconds=20)))
    report = report_of(store(tmp_path, in_order(rows, 1 << 32)))
    assert report.resent == ResentFigures(rows=4, late_rows=3, late_keys=2)
    assert report.verdict[0].text.startswith("All is well: 19 rows of 2 epochs are stored, 4 of")
