"""Schedules, the read-back, and which promise is broken when."""

from unittest.mock import Mock

import pytest

from benchmarks.faults import FREEZE, KILL, PAUSE, Schedule, broken_promises, read_back


def test_the_full_schedule_is_ten_seconds_of_thirty_two():
    schedule = Schedule.of(FREEZE, 32)
    assert (schedule.at_s, schedule.length_s, schedule.total_s) == (6, 10, 32)
    assert Schedule.of(KILL, 16).length_s == 5
    assert Schedule.pause(32, 0.3).title == "paused 0.3 s"


@pytest.mark.parametrize(
    ("waits", "kind", "calls"),
    [
        ([False, False], FREEZE, ["freeze", "thaw"]), ([False, False], PAUSE, ["freeze", "thaw"]),
        ([False, False], KILL, ["kill", "restart"]),
        *(([True], kind, []) for kind in (FREEZE, PAUSE, KILL)),
        ([False, True], FREEZE, ["freeze", "thaw"]), ([False, True], KILL, ["kill"]),
    ],
)  # fmt: skip
def test_a_fault_that_is_stopped_leaves_no_frozen_broker(waits, kind, calls):
    """Each wait tells whether the run was stopped in it."""
    broker = Mock()
    stopped = iter(waits)
    Schedule(kind, 1.0, 1.0, 1.0).apply(broker, lambda seconds: next(stopped))
    assert [name for name, *_ in broker.method_calls] == calls


def test_the_read_back_counts_lost_doubled_and_announced():
    stored = {1: 1, 2: 2, 3: 2, 9: 1}
    counts = read_back({1, 2, 3, 4}, {3}, stored)
    assert counts == {"lost": 1, "doubled": 2, "unannounced": 1}


def record(**changes):
    return {
        "ours": True, "sender": "ours sync", "fault": "f", "kind": FREEZE, "lost": 0, "doubled": 0,
        "unannounced": 0, **changes,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, []), ({"doubled": 4}, []), ({"lost": 1}, ["lost"]), ({"lost": 1, "ours": False}, []),
        ({"doubled": 2, "unannounced": 1}, ["in silence"]),
        ({"kind": PAUSE, "doubled": 1}, ["mere pause"]),
    ],
)  # fmt: skip
def test_broken_promises(changes, words):
    promises = broken_promises([record(**changes)])
    assert len(promises) == len(words)
    assert all(word in line for word, line in zip(words, promises, strict=True))
