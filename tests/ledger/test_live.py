"""New rows of a ledger that is being followed: sums and metrics."""

import datetime as dt
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from deltalake import DeltaTable
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from rocket_sink.errors import Outcome
from rocket_sink.ledger.path import resolve_path
from rocket_sink.ledger.query import live
from rocket_sink.ledger.query.duckdb_reader import open_quick
from rocket_sink.ledger.query.live import METRICS, LiveFigures, Standing, register, standing_of
from rocket_sink.ledger.records import (
    GroupFacts,
    in_flight_rows,
    in_order,
    isolation_rows,
    resolution_rows,
    send_rows,
)
from rocket_sink.ledger.views import OUTCOMES
from rocket_sink.routing.fault import Isolation

from .night import store
from .values import accounts, attempt, context, failure, letter
from .views import view_rows

ROOT = Path(__file__).parents[2]
CONTEXT = context()


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch):
    monkeypatch.setattr(live, "_MOST_OFTEN_S", 0.0)


def followed(folder, **more):
    return LiveFigures(resolve_path(folder), **more)


def minute():
    """Return the rows of 4 attempts: 7 messages stored at once, 7 at the second try, and a wait."""
    sent = [
        attempt(rtt_ms=2.0),
        failure("TIMEOUT", broker_name="broker-b", outcome=Outcome.UNKNOWN, rtt_ms=3000.0),
        attempt(attempt=2, rtt_ms=4.0),
        failure("NO_BROKER", broker_name="", wire_bytes=0),
    ]
    isolation = Isolation("broker-b", "TIMEOUT", 3000.0, 0.0, 30.0, reachable=False)
    return [
        send_rows(sent, CONTEXT),
        isolation_rows([isolation], CONTEXT, now_s=0.0),
        accounts(CONTEXT, acked=14, dead=1, duplicates_possible=7),
        letter(CONTEXT),
    ]


def test_only_what_comes_is_counted_and_once(tmp_path):
    store(tmp_path, minute())
    figures = followed(tmp_path)
    assert not figures.refresh()
    assert not figures.rows
    for times in (1, 2):
        store(tmp_path, minute())
        assert figures.refresh()
        assert not figures.refresh()
        assert figures.rows["acked"] == 14 * times
        assert figures.duplicates_possible == 7 * times
        a, b, none = (figures.brokers[name] for name in ("broker-a", "broker-b", "-"))
        assert (a.messages, a.requests, a.retries, a.body_bytes) == (
            14 * times, 2 * times, times, 1400 * times,
        )  # fmt: skip
        assert dict(b.failures) == {"TIMEOUT": times}
        assert (b.messages, b.requests) == (0, times)
        assert dict(none.failures) == {"NO_BROKER": times}
        assert none.requests == 0
        assert dict(b.isolations) == {"TIMEOUT": times}
        assert b.is_isolated()
        assert not a.is_isolated()
    group = GroupFacts(100, "", 1.0, 8.0, 20.0, 40.0, None)
    answers = attempt(broker_name="broker-g", message_count=100, rtt_ms=70.0)
    store(tmp_path, [send_rows([answers], CONTEXT, groups=[group])])
    assert figures.refresh()
    sums = figures.brokers["broker-g"]
    assert (sums.messages, sums.requests) == (100, 100)
    # The median stands for half of the answers, and so on (`GROUP_SHARES`).
    assert sums.durations == {0.01: 50, 0.025: 45, 0.05: 4, 0.1: 1}
    DeltaTable(tmp_path).optimize.compact()
    assert not figures.refresh()
    assert figures.rows["acked"] == 28


def test_a_ledger_that_is_not_there_yet_is_followed_from_its_first_row(tmp_path):
    figures = followed(tmp_path / "later")
    assert not figures.refresh()
    store(tmp_path / "later", minute())
    figures.refresh()
    assert (figures.rows["dead"], figures._follower.state.gaps) == (1, 0)


@pytest.mark.parametrize("commits", [1, 5])
def test_a_table_that_was_made_anew_is_read_from_its_beginning(tmp_path, commits):
    """The new log may be shorter than the old one, or longer."""
    folder, asked = tmp_path / "ledger", list[int]()

    def standing():
        asked.append(len(asked))
        return Standing({}, len(asked))

    for _ in range(3):
        store(folder, minute())
    figures = followed(folder, standing=standing)
    store(folder, minute())
    figures.refresh()
    assert figures.rows["dead"] == 1
    shutil.rmtree(folder)
    figures.refresh()
    assert figures.standing.superseded_rows == len(asked) == 2
    figures.refresh()
    assert len(asked) == 2
    for _ in range(commits):
        store(folder, minute())
    assert figures.refresh()
    assert figures.rows["dead"] == 1 + commits
    assert not figures.refresh()


def test_a_folder_that_is_away_for_a_while_is_read_once(tmp_path):
    """A mounted folder may be gone for a moment, and come back with the same table."""
    figures = followed(tmp_path / "ledger")
    store(tmp_path / "ledger", minute())
    figures.refresh()
    (tmp_path / "ledger").rename(tmp_path / "away")
    assert not figures.refresh()
    (tmp_path / "away").rename(tmp_path / "ledger")
    assert not figures.refresh()
    store(tmp_path / "ledger", minute())
    figures.refresh()
    assert figures.rows["dead"] == 2


def test_other_runs_are_left_out(tmp_path):
    figures = followed(tmp_path)
    figures.run_id = "run-2"
    store(tmp_path, [*minute(), accounts(context(run_id="run-2"), acked=3)])
    figures.refresh()
    assert figures.rows["acked"] == 3
    assert not figures.brokers


def test_pending_letters_are_counted_when_they_may_have_changed(tmp_path):
    calls = []

    def standing():
        calls.append(1)
        return Standing({"transport": len(calls)}, 0)

    figures = followed(tmp_path, standing=standing)
    figures.refresh()
    assert figures.standing == ({"transport": 1}, 0)
    store(tmp_path, [send_rows([attempt()], CONTEXT)])
    figures.refresh()
    assert len(calls) == 1
    resolution = resolution_rows({"letter_id": ["a"], "resolution": "parked"}, CONTEXT)
    for number, rows in enumerate((letter(CONTEXT), resolution, accounts(CONTEXT, acked=1)), 2):
        store(tmp_path, [rows])
        figures.refresh()
        assert figures.standing == ({"transport": number}, 0)


def test_a_reading_comes_a_second_after_the_last(tmp_path, monkeypatch):
    monkeypatch.undo()
    figures, times = followed(tmp_path), iter([0.0, 0.0, 0.999, 1.0, 1.0, 1.5])
    monkeypatch.setattr(live, "time", SimpleNamespace(monotonic=times.__next__))
    seen = []
    for _ in range(4):
        store(tmp_path, [accounts(CONTEXT, acked=1)])
        seen.append((figures.refresh(), figures.rows["acked"]))
    assert seen == [(True, 1), (False, 1), (True, 3), (False, 3)]


def test_what_killed_attempts_sent_is_the_same_in_metrics_and_views(tmp_path):
    """The rows of a killed attempt come after those of the attempt that took its place."""
    waiting = in_flight_rows(
        [1, 2], CONTEXT, topic=["t", "t"], message_count=[2, 3], body_bytes=[9, 9],
        message_id=["a", "b"],
    )  # fmt: skip
    again = context(task_attempt_id=CONTEXT.task_attempt_id + 1, attempt_number=1)
    figures = followed(tmp_path, standing=lambda: standing_of(open_quick(tmp_path).query))
    store(tmp_path, in_order([accounts(again, acked=5)], 1 << 32))
    assert collected(figures)["rocket_sink.rows.superseded"] == {(): 0}
    store(tmp_path, in_order([waiting], 2 << 32))
    [epoch] = view_rows(tmp_path, "SELECT superseded_rows FROM epochs")
    superseded = collected(figures)["rocket_sink.rows.superseded"]
    assert superseded == {(): epoch.superseded_rows} == {(): 5}


def test_an_error_is_logged_and_the_rows_come_later(tmp_path, caplog):
    figures = followed(tmp_path)
    store(tmp_path, minute())
    commit = tmp_path / "_delta_log" / f"{1:020}.json"
    text = commit.read_text()
    commit.write_text(text[:-9])
    assert not figures.refresh()
    assert "cannot be followed now" in caplog.text
    commit.write_text(text)
    figures.refresh()
    assert figures.rows["acked"] == 14


def test_a_file_that_is_gone_is_passed_over(tmp_path, caplog):
    figures = followed(tmp_path)
    store(tmp_path, minute())
    [sends] = (tmp_path / "kind=send").iterdir()
    sends.unlink()  # VACUUM does the same after OPTIMIZE.
    store(tmp_path, [accounts(CONTEXT, acked=3)])
    assert figures.refresh()
    assert f"{sends} is gone" in caplog.text
    assert (figures.rows["acked"], figures._follower.state.gaps) == (17, 1)
    assert not figures.refresh()


def test_commits_that_are_gone_are_passed_over(tmp_path, caplog):
    """A clean-up removes commits when nobody has read for longer than the log is kept."""
    figures = followed(tmp_path)
    store(tmp_path, [accounts(CONTEXT, acked=1)])
    assert figures.refresh()
    for epoch in range(1, 4):
        store(tmp_path, [accounts(context(epoch=epoch), acked=10**epoch)])
    for version in (2, 3):  # The versions 0 and 1 made the table and appended the first rows.
        (tmp_path / "_delta_log" / f"{version:020}.json").unlink()
    assert figures.refresh()
    assert f"the ledger {tmp_path} no longer has the commits 2 to 3" in caplog.text
    assert (figures.rows["acked"], figures._follower.state.gaps) == (1001, 1)


def collected(figures):
    """Return the values by metric and attributes, without the attribute of the ledger."""
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    register(provider.get_meter("test"), {figures.place: figures})
    data = json.loads(reader.get_metrics_data().to_json())
    provider.shutdown()
    values = {}
    for metric in data["resource_metrics"][0]["scope_metrics"][0]["metrics"]:
        for point in metric["data"]["data_points"]:
            assert point["attributes"].pop("ledger") == figures.place.uri
            of = tuple(str(value) for value in point["attributes"].values())
            values.setdefault(metric["name"], {})[of] = point["value"]
    return values


def test_metrics_are_the_sums(tmp_path):
    figures = followed(tmp_path, standing=lambda: Standing({"transport": 5}, 3))
    store(tmp_path, minute())
    values = collected(figures)
    assert set(values) == {metric.name for metric in METRICS}
    assert values["rocket_sink.rows"]["acked",] == 14
    assert values["rocket_sink.messages"]["broker-a",] == 14
    assert values["rocket_sink.failures"]["broker-b", "TIMEOUT"] == 1
    assert values["rocket_sink.broker.isolated"] == {
        ("broker-a",): 0, ("broker-b",): 1, ("-",): 0,
    }  # fmt: skip
    assert values["rocket_sink.dead_letters.pending"] == {("transport",): 5}
    assert values["rocket_sink.rows.superseded"] == {(): 3}


def test_each_ledger_has_its_metrics_once(tmp_path, monkeypatch):
    registered, reached = [], []
    monkeypatch.setattr(live, "_followed", {})
    monkeypatch.setattr(live, "register", lambda meter, followed: registered.append(followed))
    monkeypatch.setattr(LiveFigures, "reach", lambda figures, _: reached.append(figures.place))
    one, two = (resolve_path(tmp_path / name) for name in ("one", "two"))
    for place in (one, two, one):
        live.observe(place)
    assert reached == [one] and [list(followed) for followed in registered] == [[one, two]]
    monkeypatch.setitem(sys.modules, "opentelemetry.metrics", None)
    live.observe(resolve_path(tmp_path / "three"))
    assert len(live._followed) == 2


def test_rows_are_counted_from_zero_on(tmp_path):
    """Start each count at zero: otherwise an outcome's first rows raise no alert."""
    rows = collected(followed(tmp_path))["rocket_sink.rows"]
    assert rows == {(outcome,): 0 for outcome in OUTCOMES}


def test_the_isolation_that_ends_last_counts_and_ends(tmp_path):
    figures = followed(tmp_path)
    for cause, end_s in (("A", 30.0), ("B", 60.0), ("C", 45.0)):
        isolation = Isolation("broker-b", cause, 3000.0, 0.0, end_s, reachable=False)
        store(tmp_path, [isolation_rows([isolation], CONTEXT, now_s=0.0)])
    figures.refresh()
    sums = figures.brokers["broker-b"]
    assert sums.is_isolated() and sums.cause == "B"
    sums.isolated_until = dt.datetime.now(dt.timezone.utc) - dt.timedelta(seconds=1)
    assert not sums.is_isolated()


def test_latencies_are_a_histogram_that_adds_up(tmp_path):
    """The buckets of two drivers, added, are those of one that saw all answers."""
    slow, fast = [3.0, 40.0, 700.0, 20_000.0], [0.4, 3.0]

    def buckets(name, *readings):
        figures = followed(tmp_path / name)
        for latencies in readings:
            rows = [attempt(rtt_ms=ms) for ms in latencies]
            store(tmp_path / name, [send_rows(rows, CONTEXT)])
            figures.refresh()
        values = collected(figures)["rocket_sink.send.duration.bucket"]
        return {bound: count for (_, bound), count in values.items()}

    one, two, both = buckets("one", slow), buckets("two", fast), buckets("both", slow, fast)
    assert {bound: one[bound] + two[bound] for bound in both} == both
    assert {float(bound): count for bound, count in both.items()} == {
        bound: sum(ms / 1000 <= bound for ms in slow + fast) for bound in live.BOUNDS_S
    }
    assert " ".join(both) == "0.001 0.0025 0.005 0.01 0.025 0.05 0.1 0.25 0.5 1 2.5 5 10 +Inf"
