"""The fault table by a clock of the test's own: both generations' tables, isolation, probes."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocket_sink.routing.fault import (
    BUSY,
    EXTENSION_S,
    FAILING,
    PROFILES,
    SLOW,
    TOPIC_ISOLATION_MS,
    UNREACHABLE,
    FaultItem,
    FaultProfile,
    FaultTable,
    Isolation,
)
from tests.routing.fault_views import is_available, is_reachable

NOW = 1000.0
FIVE = [
    (0, 0), (49, 0), (50, 0), (99, 0), (100, 0), (549, 0), (549.9, 0),
    (550, 2000), (1799, 2000), (1800, 5000), (2999, 5000), (3000, 6000), (4999, 6000),
    (5000, 10000), (14999, 10000), (15000, 30000), (10**9, 30000),
]  # fmt: skip
FOUR = [
    (0, 0), (49, 0), (50, 0), (99, 0), (100, 0), (549, 0), (549.9, 0),
    (550, 30000), (999, 30000), (1000, 60000), (1999, 60000), (2000, 120000), (2999, 120000),
    (3000, 180000), (14999, 180000), (15000, 600000), (10**9, 600000),
]  # fmt: skip


TABLES = {"5.x": FIVE, "4.x": FOUR, "10:0,50:50": [(60, 50)]}


def table(profile="5.x", **options):
    return FaultTable(PROFILES[profile], **options)


def good(faults, name, latency_ms, now_s=NOW):
    return faults.update(name, latency_ms, now_s, rank=SLOW)


def bad(faults, name, now_s=NOW, latency_ms=1.0, reachable=False, rank=FAILING):
    return faults.update(name, latency_ms, now_s, rank=rank, reachable=reachable, cause="CONNECT")


@pytest.mark.parametrize(
    ("profile", "latency_ms", "duration_ms"),
    [(profile, *line) for profile, lines in TABLES.items() for line in lines],
)
def test_c34_c35_c37_every_boundary_of_both_tables_and_of_an_own_one(
    profile, latency_ms, duration_ms
):
    faults = FaultTable(FaultProfile.of(profile))
    event = good(faults, "a", latency_ms)
    assert (event is not None) == (duration_ms > 0)
    assert is_available(faults, "a", NOW) == (duration_ms == 0)
    assert is_available(faults, "b", NOW)
    end = NOW + duration_ms / 1000
    assert is_available(faults, "a", end)
    assert duration_ms == 0 or not is_available(faults, "a", math.nextafter(end, 0))
    if event is not None:
        assert (event.from_s, event.until_s, event.latency_ms) == (NOW, end, latency_ms)


@pytest.mark.parametrize(("profile", "seconds"), [("5.x", 10), ("4.x", 600)])
def test_c37_a_failure_counts_as_a_long_latency(profile, seconds):
    """apache/rocketmq#7812: with a frozen detector the broker was avoided for ever."""
    faults = table(profile)
    event = bad(faults, "a")
    assert (event.cause, event.until_s) == ("CONNECT", NOW + seconds)
    assert not is_available(faults, "a", NOW + seconds - 0.001)
    assert is_available(faults, "a", NOW + seconds)


def test_5x_success_never_shortens_isolation_and_4x_does():
    five, four = table("5.x"), table("4.x")
    for faults in (five, four):
        bad(faults, "a")
        good(faults, "a", 10, NOW + 1)
    assert not is_available(five, "a", NOW + 9.9)
    assert is_available(four, "a", NOW + 1)
    assert is_reachable(five, "a")
    bad(four, "a", reachable=True)
    good(four, "a", 600, NOW + 1)
    assert four.ranks(NOW + 1) == {"a": SLOW}, "an update of 4.x replaces the causes"


def test_a_shorter_isolation_does_not_cut_a_longer_one():
    faults = table()
    good(faults, "a", 15000)
    good(faults, "a", 550, NOW + 1)
    assert not is_available(faults, "a", NOW + 29.9)


def test_each_cause_has_its_own_end_and_the_worst_that_has_not_ended_is_the_rank():
    faults = table()
    good(faults, "a", 20_000)
    bad(faults, "a", NOW + 5, reachable=True, rank=BUSY)
    bad(faults, "a", NOW + 3, reachable=True)
    ends = {4: FAILING, 12.9: FAILING, 13: BUSY, 14.9: BUSY, 15: SLOW, 29.9: SLOW, 30: 0}
    item = faults.store.get("a")
    assert {at: item.rank(NOW + at) for at in ends} == ends


def test_a_worse_cause_is_announced_and_a_lesser_one_is_not():
    faults = table()
    assert bad(faults, "a", reachable=True, rank=BUSY) is not None
    assert good(faults, "a", 600, NOW + 0.1) is None
    assert bad(faults, "a", NOW + 0.2, reachable=True) is not None
    assert bad(faults, "a", NOW + 0.3, reachable=True, rank=BUSY) is None
    assert faults.ranks(NOW + 0.4) == {"a": FAILING}
    assert bad(faults, "a", NOW + 0.5) is not None
    assert faults.ranks(NOW + 0.6) == {"a": UNREACHABLE}


def test_quick_answers_leave_no_trace():
    faults = table()
    for _ in range(3):
        assert good(faults, "a", 5) is None
    assert faults.items() == []


def test_many_failures_at_once_are_one_event():
    faults = table()
    events = [bad(faults, "a", NOW + number / 1000) for number in range(1000)]
    assert [event for event in events if event is not None] == events[:1]
    assert bad(faults, "a", NOW + EXTENSION_S + 0.01) is not None
    assert bad(faults, "a", NOW + EXTENSION_S + 0.02) is None
    assert bad(faults, "a", NOW + 60).from_s == NOW + 60


def test_probes_are_claimed_once_per_interval_and_store():
    store: dict[str, FaultItem] = {}
    worker, other = table(store=store), table(store=store)
    bad(worker, "a")
    bad(worker, "b", reachable=True)
    assert worker.due_for_probe(NOW, "a") == []
    assert other.due_for_probe(NOW + 2, "a") == ["a"]
    assert worker.due_for_probe(NOW + 2, "a") == []
    assert worker.due_for_probe(NOW + 4, "a") == ["a"]


def test_brokers_that_are_unknown_here_are_left_to_those_who_know_them():
    """A worker without a route must not claim the probes of other workers' brokers."""
    store: dict[str, FaultItem] = {}
    worker, other = table(store=store), table(store=store)
    bad(worker, "a")
    assert other.due_for_probe(NOW + 2, ()) == []
    assert worker.due_for_probe(NOW + 2, "a") == ["a"]
    assert other.due_for_probe(NOW + 4, "b") == [] and not is_reachable(other, "a")
    assert other.due_for_probe(NOW + 700, "b") == [] and other.items() == []


def test_a_dead_probe_extends_and_a_live_one_lets_isolation_run_out():
    faults = table()
    bad(faults, "a")
    assert faults.note_probe("a", NOW + 9, alive=False) is not None
    assert not is_reachable(faults, "a")
    assert not is_available(faults, "a", NOW + 12.9)
    assert faults.note_probe("a", NOW + 11, alive=True) is None
    assert is_reachable(faults, "a")
    assert is_available(faults, "a", NOW + 13)
    assert faults.note_probe("nobody", NOW, alive=True) is None


def test_a_topic_is_isolated_on_one_broker_only():
    faults = table()
    faults.isolate_topic("orders", "a", NOW, "NO_PERMISSION")
    until_s = NOW + TOPIC_ISOLATION_MS / 1000
    assert [*faults.events] == [Isolation("a", "NO_PERMISSION", 0.0, NOW, until_s, True, "orders")]
    assert not is_available(faults, "a", NOW, "orders")
    assert is_available(faults, "a", NOW)
    assert is_available(faults, "a", NOW, "others")
    assert is_available(faults, "b", NOW, "orders")
    assert is_available(faults, "a", until_s, "orders")
    assert faults.items() == []
    assert faults.due_for_probe(NOW + 100, "ab") == []


def test_own_tables_are_those_of_5x_with_other_classes():
    profile = FaultProfile.of("10:100,1000:9000")
    assert profile.classes == ((10, 100), (1000, 9000))
    assert profile.duration_ms(999, isolation=False) == 100
    assert profile.duration_ms(1, isolation=True) == 9000
    assert FaultProfile.of("4.x") == PROFILES["4.x"]


steps = st.lists(
    st.tuples(
        st.sampled_from(["good", "bad", "probe", "dead"]),
        st.sampled_from("ab"),
        st.floats(0, 20000),
        st.floats(0, 5),
    ),
    max_size=30,
)


def events(faults, history):
    """Yield the time and the event, or None, of each step."""
    now_s = NOW
    for kind, name, latency_ms, wait_s in history:
        now_s += wait_s
        if kind == "good":
            yield now_s, good(faults, name, latency_ms, now_s)
        elif kind == "bad":
            yield now_s, bad(faults, name, now_s, latency_ms)
        else:
            yield now_s, faults.note_probe(name, now_s, alive=kind == "probe")


@given(st.sampled_from(sorted(PROFILES)), steps)
def test_every_isolation_ends_by_time(profile, history):
    faults, now_s = table(profile), NOW
    for now_s, _ in events(faults, history):  # noqa: B007
        pass
    longest_s = PROFILES[profile].classes[-1][1] / 1000
    assert all(is_available(faults, name, now_s + longest_s) for name in "ab")


@given(steps)
def test_an_unavailable_broker_was_announced(history):
    """Every broker is available again EXTENSION_S after the last end that the ledger shows."""
    faults, until_s = table(), {"a": 0.0, "b": 0.0}
    for now_s, event in events(faults, history):
        if event is not None:
            until_s[event.broker_name] = event.until_s
        for broker, end_s in until_s.items():
            assert is_available(faults, broker, max(end_s, now_s) + EXTENSION_S)
