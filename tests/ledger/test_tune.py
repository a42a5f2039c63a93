"""Recorded sends under other settings: the figures of known attempts."""

import datetime as dt
import io
import math
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from rocket_sink.errors import LedgerError, Outcome
from rocket_sink.ledger.driver.ledger import Ledger
from rocket_sink.ledger.records import send_rows
from rocket_sink.ledger.sql import Scope, Scoped
from rocket_sink.ledger.tune import suggest
from rocket_sink.ledger.tune.replay import Attempts, read_attempts, replay
from rocket_sink.ledger.tune.suggest import (
    DEFAULT,
    NOTHING_TO_GAIN,
    RECORDED,
    Candidate,
    Suggestion,
    SuspicionFigures,
    Tuning,
    profiles,
    suspicions,
    tune,
)
from rocket_sink.ledger.views import queried
from rocket_sink.options import SinkOptions
from rocket_sink.routing.fault import PROFILES
from tests.ledger.views import quick_ledger

from .night import store
from .values import attempt, context, failure


def attempts(*rows, **changes):
    """Return attempts from (start in s, broker, time to the answer in ms), each of one message."""
    brokers = sorted({broker for _, broker, _ in rows})
    count = len(rows)
    values = {
        "start_s": np.array([start for start, _, _ in rows], "float64"),
        "wait_ms": np.zeros(count),
        "rtt_ms": np.array([ms for _, _, ms in rows], "float64"),
        "group_ms": np.full((count, 3), np.nan),
        "messages": np.ones(count, "int64"),
        "bytes": np.full(count, 100),
        "frames": np.ones(count, "int64"),
        "broker": np.array([brokers.index(broker) for _, broker, _ in rows]),
        "host": np.zeros(count, "int64"),
        "process": np.zeros(count, "int64"),
        "stored": np.ones(count, bool),
        "isolates": np.zeros(count, bool),
        "request": np.full(count, -1),
        "brokers": brokers,
        "hosts": ["host"],
    }
    return Attempts(**{**values, **changes})


SLOW = [(10.0 + n, "slow", 600.0) for n in range(6)]
QUICK = [(9.5 + n, "quick", 2.0) for n in range(7)]
END = (99.0, "quick", 1.0)
MIXED = sorted([*SLOW, *QUICK])


def test_hosts_have_tables_of_their_own():
    rows = [(0.0, "slow", 600.0), (0.9, "quick", 2.0), (1.0, "slow", 600.0)]
    for hosts, moved in (([0, 0, 0], 1), ([0, 0, 1], 0)):
        sent = attempts(*rows, host=np.array(hosts), hosts=["a", "b"])
        assert replay(sent, PROFILES["5.x"]).moved == moved


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        # The first answer takes 600 ms and isolates the broker for 2 s from second 10.6 on. The
        # messages of seconds 11 and 12 move, that of second 13 is slow again, and so on.
        (MIXED, (4, 2, 4.0)),
        ([*SLOW, END], (0, 1, 7.0)),
        # A broker whose last answer is older than a minute takes no messages.
        ([(0.0, "quick", 0.0), (59.0, "slow", 600.0), (60.0, "slow", 600.0)], (1, 1, 2.0)),
        ([(0.0, "quick", 0.0), (59.0, "slow", 600.0), (60.125, "slow", 1.0)], (0, 1, 2.0)),
        # An isolation begins with the answer, and ends two seconds later.
        ([(0.0, "quick", 2.0), (0.0, "slow", 625.0), (0.5, "slow", 1.0), END], (0, 1, 2.0)),
        ([(0.0, "quick", 2.0), (0.0, "slow", 625.0), (0.625, "slow", 1.0)], (1, 1, 2.0)),
        ([(0.0, "quick", 2.0), (0.0, "slow", 625.0), (2.5, "slow", 1.0)], (1, 1, 2.0)),
        ([(0.0, "quick", 2.0), (0.0, "slow", 625.0), (2.625, "slow", 1.0)], (0, 1, 2.0)),
        # Answers to requests that were on their way extend it.
        ([(0.0, "slow", 625.0), (0.5, "slow", 1500.0), END], (0, 1, 3.375)),
        ([(0.0, "slow", 625.0), (2.0, "slow", 625.0), END], (0, 2, 4.0)),
    ],
)
def test_when_messages_move(rows, expected):
    replayed = replay(attempts(*rows), PROFILES["5.x"])
    result = replayed.moved, replayed.isolations, replayed.isolated_s
    assert result == pytest.approx(expected)


@pytest.mark.parametrize(
    ("tails", "best"),
    [
        ({DEFAULT: 100.0, "a": 80.0}, DEFAULT),
        ({DEFAULT: 100.0, "a": 79.0, "b": 70.0}, "b"),
        ({DEFAULT: 100.0, "b": 70.0, "a": 73.5}, "a"),  # It isolates for a shorter time.
        ({RECORDED: 1.0, DEFAULT: 100.0}, DEFAULT),
        ({RECORDED: 1.0, DEFAULT: None, "a": 1.0}, None),
    ],
)
def test_a_table_is_suggested_for_a_clearly_shorter_tail(tails, best):
    seconds = {"a": 1.0, "b": 2.0}
    candidates = [
        Candidate(name, "", 0, seconds.get(name, 0.0), 0, None, None, tail, None)
        for name, tail in tails.items()
    ]
    chosen = suggest._best(candidates)
    assert (chosen and chosen.name) == best


BYTES = SinkOptions().request_max_bytes
FULL = SinkOptions().request_max_messages


@pytest.mark.parametrize(
    ("ms", "messages", "size", "advice"),
    [
        (501.0, FULL, BYTES // 4 + 1, {"requestMaxBytes": str(max(65_536, (BYTES // 4 + 1) // 2))}),
        (500.0, FULL, BYTES // 4 + 1, {}),
        (501.0, FULL, BYTES // 4, {}),
        (500.0, FULL, BYTES // 4, {}),
        (500.0, FULL, BYTES // 4 - 1, {"requestMaxMessages": str(4 * FULL)}),
        (1.0, math.ceil(0.9 * FULL), 100, {"requestMaxMessages": str(4 * FULL)}),
        (1.0, math.ceil(0.9 * FULL) - 1, 100, {}),
        (1.0, FULL // 2, 100, {}),
        (501.0, 2, BYTES, {"requestMaxBytes": str(max(65_536, BYTES // 2))}),
        (501.0, 1, BYTES, None),  # A message alone is no batch.
    ],
)
def test_advice_on_the_sizes_of_batches(ms, messages, size, advice):
    sent = attempts((0.0, "a", ms), messages=np.array([messages]), bytes=np.array([size]))
    items = [*suggest._batches(sent, SinkOptions())]
    assert bool(items) == (advice is not None)
    values = {item.option: item.value for item in items if isinstance(item, Suggestion)}
    assert values == (advice or {})


def test_a_failure_counts_as_ten_seconds_and_its_retry_is_left_out_when_it_moves():
    rows = [(0, "good", 1), (1, "dead", 1000), (2, "good", 1), (5, "dead", 1000), (6, "good", 1)]
    dead = np.array([False, True, False, True, False])
    recorded = attempts(*rows, stored=~dead, isolates=dead, request=np.array([-1, 7, 7, 8, 8]))
    was = replay(recorded, None)
    assert sorted(was.latency_ms) == [1.0, 1001.0, 1001.0]
    replayed = replay(recorded, PROFILES["5.x"])
    assert sorted(replayed.latency_ms) == [1.0, 1.0, 1001.0], "the second failure did not happen"
    assert (replayed.moved, replayed.isolations, replayed.isolated_s) == (1, 1, 10.0)
    late = np.array([False, True, False])
    both = attempts((0.0, "a", 15_000.0), (0.0, "a", 16_000.0), (99.0, "b", 1.0), isolates=late)
    assert replay(both, PROFILES["5.x"]).isolated_s == 30.0, "the failure ends within the slowness"


def test_what_failed_for_good_is_in_no_latency():
    dead = np.array([True, True])
    rows = [(0.0, "a", 10.0), (1.0, "a", 10.0)]
    recorded = attempts(*rows, stored=~dead, isolates=dead, request=np.array([1, 1]))
    replayed = replay(recorded, None)
    assert replayed.unsent == 1
    assert replayed.percentile(0.5) is None


@pytest.mark.parametrize(
    ("frames", "group_ms", "expected"),
    [
        (100, [1.0, 10.0, 20.0], [1.0, 10.0, 20.0, 40.0]),
        (2, [1.0, 10.0, 20.0], [1.0, 10.0, 20.0, 40.0]),
        (100, [np.nan] * 3, [40.0] * 4),
    ],
)
def test_a_group_stands_for_its_percentiles(frames, group_ms, expected):
    values = {"messages": np.array([100]), "frames": np.array([frames])}
    group = attempts((0.0, "a", 40.0), **values, group_ms=np.array([group_ms]))
    replayed = replay(group, None)
    assert [replayed.percentile(share) for share in (0.5, 0.95, 0.99, 1.0)] == expected
    assert replay(replace(group, messages=np.array([0])), None).percentile(0.5) is None


def test_a_group_that_moves_takes_the_time_of_one_answer():
    moved = attempts(
        (0.0, "quick", 2.0), (0.0, "slow", 600.0), (1.0, "slow", 600.0),
        frames=np.array([1, 1, 100]), messages=np.array([1, 1, 100]),
        group_ms=np.array([[np.nan] * 3, [np.nan] * 3, [500.0] * 3]),
    )  # fmt: skip
    replayed = replay(moved, PROFILES["5.x"])
    assert replayed.latency_ms.tolist() == [2.0, 2.0, 600.0]
    assert (replayed.moved, replayed.weight[-1]) == (100, 102)


def test_candidates_move_the_first_class_that_isolates():
    candidates = profiles()
    variants = [f"from {ms} ms" for ms in ("100", "250", "1,000", "2,000")]
    assert [*candidates] == [RECORDED, DEFAULT, "4.x", *variants]
    assert candidates[RECORDED] is None
    assert candidates[DEFAULT] == PROFILES["5.x"]
    profile = candidates["from 1,000 ms"]
    assert profile.duration_ms(999, isolation=False) == 0
    assert profile.duration_ms(1000, isolation=False) == 2000


def test_suspicion_tells_false_alarms_from_trouble():
    rows = [(float(n), "a", 250.0 if n == 9 else 1.0) for n in range(997)]
    rows += [(997.0, "a", 300.0), (998.0, "a", 5000.0), (999.0, "b", 3000.0)]
    failed = np.arange(1000) == 999
    recorded = attempts(*rows, stored=~failed, isolates=failed)
    figures = {suspicion.suspect_after_ms: suspicion for suspicion in suspicions(recorded)}
    assert figures[250].late_share == pytest.approx(1 / 998)
    assert figures[500].late_share == 0
    assert figures[500].troubles == 2
    assert figures[500].sooner_s == pytest.approx(4.5 + 2.5)
    assert [*figures] == [50, 100, 250, 500, 1000, 2000]
    failed_at_500 = replace(recorded, rtt_ms=np.where(failed, 500.0, 1.0))
    assert [row.troubles for row in suspicions(failed_at_500)] == [1, 1, 1, 0, 0, 0]


@pytest.mark.parametrize(("slowest_ms", "troubles"), [(700.0, 0), (2800.0, 0), (2801.0, 1)])
def test_a_broker_that_is_always_slow_is_in_no_trouble(slowest_ms, troubles):
    """An answer is unusual if it takes more than four times the broker's p95."""
    recorded = attempts(*[(float(n), "far", 700.0) for n in range(99)], (99.0, "far", slowest_ms))
    assert {suspicion.troubles for suspicion in suspicions(recorded)} == {troubles}
    failed = np.ones(2, bool)
    recorded = attempts(*SLOW[:2], stored=~failed, isolates=failed)
    assert {suspicion.late_share for suspicion in suspicions(recorded)} == {0.0}


def test_bytes_are_in_flight_from_their_process_until_the_answer():
    rows = [(0.0, "a", 1000.0), (0.5, "a", 1000.0), (1.0, "a", 1.0), (5.0, "a", 1.0)]
    waits = np.array([1000.0, 0.0, 0.0, 0.0])
    recorded = attempts(*rows, wait_ms=waits, process=np.array([0, 0, 1, 0]))
    assert recorded.bytes_in_flight().tolist() == [200, 100, 100, 100]


@pytest.mark.parametrize(
    ("parts", "suspect_ms", "depends_on"),
    [
        ([(1.0, 999), (300.0, 1)], 50, 1), ([(1.0, 998), (300.0, 2)], 500, 1),
        ([(3000.0, 10)], 2000, 1), ([(1.0, 9_999)], 50, 9), ([(1.0, 10_000)], 50, None),
    ],
)  # fmt: skip
def test_few_usual_requests_may_be_suspected(monkeypatch, parts, suspect_ms, depends_on):
    """A thousandth of them, and p99.9 depends on as many."""
    rows = [(0.0, "a", ms) for ms, count in parts for _ in range(count)]
    monkeypatch.setattr(suggest, "read_attempts", lambda *_: attempts(*rows))
    done = []
    tuning = tune(None, "ledger", Scope(), progress=done.append)
    assert [row.suspect_after_ms for row in tuning.suspicion if row.suggested] == [suspect_ms]
    note = f"p99.9 depends on only {depends_on} of these attempts"
    assert tuning.note.startswith(note) if depends_on else tuning.note == ""
    assert done == list(range(1, 1 + len(profiles()))) and not tuning.limited


@pytest.mark.parametrize(
    ("best_ms", "now_ms", "troubles", "advice"),
    [
        (500, 500, 9, "suspectAfterMs: 0.50% of the usual requests took longer than it"),
        (500, 100, 0, "0.10% of the usual requests took longer than 100 ms, 0.50% longer than"),
        (100, 500, 7, "0.10% of the usual requests took longer; 7 failures and delays are noticed"),
        (100, 500, 0, "suspectAfterMs: no broker was in trouble"),
        (100, 99, 0, "0.10% of the usual requests took longer than 99 ms, 0.10% longer than"),
    ],
)  # fmt: skip
def test_advice_on_suspicions(best_ms, now_ms, troubles, advice):
    figures = [SuspicionFigures(ms, ms / 100_000, troubles, 0.0) for ms in (100, 500)]
    best, options = figures[best_ms == 500], SinkOptions.parse(suspectAfterMs=now_ms)
    (item,) = suggest._suspicion_option(figures, best, options)
    assert (item if isinstance(item, str) else item.reason).startswith(advice)
    if isinstance(item, Suggestion):
        assert (item.option, item.value) == ("suspectAfterMs", str(best_ms))
        assert ("400 ms sooner" in item.reason) == (now_ms == 500)


@pytest.mark.parametrize(("name", "value"), [("4.x", "4.x"), ("from 100 ms", "100:2000")])
def test_advice_on_the_table(name, value):
    default = Candidate(DEFAULT, "", 3, 0.0, 0, 1.0, 1.0, 900.4, 1.0)
    best = Candidate(name, "100:2000", 1200, 0.0, 0, 1.0, 1.0, 99.6, 1.0)
    reason = "p99.9 100 ms instead of 900, 1,200 isolations instead of 3"
    (item,) = suggest._table_option([default, best], best)
    assert item == Suggestion("faultTable", value, reason)
    assert suggest._unless_set(item, SinkOptions()) == item
    assert isinstance(suggest._unless_set(item, SinkOptions.parse(faultTable=value)), str)


def text_of(*tunings):
    console = Console(file=io.StringIO(), width=200)
    console.print(*tunings)
    return console.file.getvalue()


def test_the_tables_that_are_shown():
    nothing = Tuning("ledger", Scope(), 0, None, None, limited=False)
    assert "nothing to learn from" in text_of(nothing)
    candidate = Candidate(DEFAULT, "", 2, 4.06, 4, 1.0, 2.0, 3.0, 4.0, suggested=True)
    suspicion = SuspicionFigures(50, 0.0123456, 2, 7.06)
    tuning = Tuning("ledger", Scope(), 1, None, None, False, [candidate], [suspicion],
                    [Suggestion("a", "1", "why")], ["b: why not: c"])  # fmt: skip
    rows = [comparison.rows for comparison in tuning.comparisons]
    assert rows == [
        [(DEFAULT, 2, 4.1, 4, 1.0, 2.0, 3.0, 4.0, "<- suggested")], [(50, 1.235, 2, 7.1, "")]
    ]  # fmt: skip
    assert tuning.reasons == [("keep", "b", "why not: c"), ("set", "a=1", "why")]


def test_the_wait_of_a_strict_queue_is_no_attempt(tmp_path):
    """Ignore the wait: it never moves, so it must not become a message that took a minute."""
    wait = failure("INVALID_QUEUE", wire_bytes=0, queue_wait_ms=60_000.0)
    fast = quick_ledger(store(tmp_path, [send_rows([attempt(), wait], context())]))
    tuning = tune(fast.query, fast.path, Scope())
    assert tuning.attempts == 1
    assert {candidate.max_ms for candidate in tuning.candidates} == {1.75}


WINDOW = SinkOptions().max_in_flight_bytes


@pytest.mark.parametrize(
    ("waits_ms", "rtt_ms", "share", "advice"),
    [
        ([0, 0, 30, 30], 10, 0.45, 2),
        ([0, 0, 30, 30], 10, 0.44, "2 requests waited, half of them 30.0 ms or more, but for a "),
        ([0, 0, 30, 30], 10, 1.0, 4),
        ([0, 0, 0, 30], 10, 0.45, "do not wait"),
        ([0, 0, 21, 21], 10, 0.45, 2),
        ([0, 0, 20, 20], 10, 0.45, "do not wait"),
        ([0, 0, 1.5, 1.5], 0.1, 0.45, 2),
        ([0, 0, 1.0, 1.0], 0.1, 0.45, "do not wait"),
        # The window is full for one of the two requests that wait.
        ([0, 0, 30, 35], 10, 0.45, 2),
    ],
)
def test_advice_on_the_window(waits_ms, rtt_ms, share, advice):
    """Four requests are sent, and `share` is the part of the window that each takes."""
    sent = attempts(
        *[(0.0, "a", rtt_ms)] * 4, wait_ms=np.array(waits_ms, "float64"),
        bytes=np.full(4, math.ceil(share * WINDOW)),
    )  # fmt: skip
    (item,) = suggest._window(sent, SinkOptions())
    if isinstance(advice, int):
        assert isinstance(item, Suggestion) and item.value == str(advice * WINDOW)
    else:
        assert isinstance(item, str) and advice in item
    (item,) = suggest._window(replace(sent, stored=np.zeros(4, bool)), SinkOptions())
    assert "do not wait" in item, "nothing was stored"


@pytest.mark.parametrize("size", [WINDOW, 2 * WINDOW])
def test_waits_for_a_full_window_ask_for_a_larger_one(tmp_path, size):
    """Twenty requests fill the window of a process until the first answers come."""
    rows = [
        attempt(started_ms=1_700_000_000_000, body_bytes=size // 20, rtt_ms=10.0,
                queue_wait_ms=0.5 + 30.0 * (n // 20), broker_name="broker-a")
        for n in range(60)
    ]  # fmt: skip
    fast = quick_ledger(store(tmp_path, [send_rows(rows, context())]))
    for set_size in ({}, {"backPressureForAsyncSendSize": size}):
        tuning = tune(fast.query, fast.path, Scope(), options=SinkOptions.parse(set_size))
        assert tuning.options["backPressureForAsyncSendSize"] == str(2 * size)


def test_a_value_that_is_set_is_not_advised_again(tmp_path):
    full = SinkOptions().request_max_messages
    rows = [attempt(message_count=full, body_bytes=10 * full, rtt_ms=n / 1000) for n in range(2000)]
    fast = quick_ledger(store(tmp_path, [send_rows(rows, context())]))
    first = tune(fast.query, fast.path, Scope())
    assert "requestMaxMessages" in first.options and "only 2 of these" in first.note
    recorded = first.candidates[0]
    figures = [recorded.p50_ms, recorded.p99_ms, recorded.p999_ms, recorded.max_ms]
    assert figures == pytest.approx([1.5, 2.48, 2.498, 2.499], abs=0.002)
    assert (recorded.name, recorded.isolations, recorded.moved) == (RECORDED, 0, 0)
    again = tune(fast.query, fast.path, Scope(), options=SinkOptions.parse(first.options))
    assert again.options == {}
    assert NOTHING_TO_GAIN in text_of(again)


@pytest.mark.parametrize("driver", ["delta_rs", pytest.param("spark", marks=pytest.mark.spark)])
def test_a_ledger_by_duckdb_and_by_spark(request, tmp_path, driver):
    slow, quick = {"broker_name": "broker-b", "rtt_ms": 600.0}, {"rtt_ms": 2.0}
    records = [
        attempt(started_ms=1_700_000_000_000 + int(start * 1000), message_count=1,
                **(slow if broker == "slow" else quick))
        for start, broker, _ in MIXED
    ]  # fmt: skip
    failed = failure("REQUEST_TIMEOUT", outcome=Outcome.UNKNOWN)
    fast = quick_ledger(store(tmp_path, [send_rows([*records, failed], context())]))
    scope = Scope("query", dt.datetime.fromtimestamp(1_700_000_001, dt.timezone.utc))
    by_duckdb = tune(fast.query, fast.path, scope)
    isolates = read_attempts(Scoped(fast.query, Scope()), 99).isolates
    assert isolates.sum() == 1, "a timeout isolates its broker"
    if driver == "spark":
        rows = Ledger(tmp_path).rows(request.getfixturevalue("spark"))
        by_spark = tune(lambda select: queried(rows, select).toArrow(), fast.path, scope)
        assert by_duckdb == by_spark
    for comparison in by_duckdb.comparisons:
        assert {len(row) for row in comparison.rows} == {len(comparison.columns)}
    assert by_duckdb.attempts == len(MIXED)
    (default,) = [candidate for candidate in by_duckdb.candidates if candidate.name == DEFAULT]
    assert (default.isolations, default.moved, default.table) == (2, 4, PROFILES["5.x"].table)
    for figures in (by_duckdb.candidates, by_duckdb.suspicion):
        assert [row.suggested for row in figures].count(True) == 1
    assert "depends on only 1 of these" in by_duckdb.note
    text = text_of(tune(fast.query, fast.path, Scope(), limit=3), by_duckdb)
    assert text.startswith("the newest 3 attempts from 2023-11-14 22:13:34 to 2023-11-14 22:13:35")
    assert "\n13 attempts from 2023-11-14 22:13:2" in text
    few = tune(fast.query, fast.path, Scope(), fewest=len(MIXED) + 2)
    assert few == Tuning(fast.path, Scope(), len(MIXED) + 1, None, None, limited=False)
    with pytest.raises(LedgerError, match="no rows of a query 'other'"):
        tune(fast.query, fast.path, Scope("other"))
    assert tune(fast.query, fast.path, Scope("que")) == tune(fast.query, fast.path, Scope("query"))
