"""The witness finds messages that are lost, doubled in silence, denied or disordered."""

import json

import pytest

from tests.hosts import networks, replication, tables
from tests.hosts.play import Case, broken_promises
from tests.hosts.witness import Stored, Told, finding, told_by_lane, told_by_producer


def _stored(*numbers, mode="sync", queue=0):
    return [
        Stored(mode, number, 1000 + 100 * place, ("b", queue), place)
        for place, number in enumerate(numbers)
    ]


def test_figures_of_a_producer():
    report = {
        "told": [[0, "acked", False], [1, "degraded", True], [2, "unknown", True],
                 [3, "not_sent", False], [4, "rejected", False], [5, "acked", False]],
        "ended_ms": 1500,
    }  # fmt: skip
    stored = _stored(0, 1, 1, 4, 0) + _stored(7, mode="async")
    figures = finding("sync", told_by_producer(report), stored, since_ms=1000)
    assert (figures.sent, figures.failed, figures.degraded) == (6, 3, 1)
    assert figures.lost == 1, "5 was acknowledged"
    assert figures.denied == 1, "4 was said not to be stored"
    assert (figures.announced, figures.doubled, figures.unannounced) == (2, 2, 1), (
        "0 was not announced"
    )
    assert figures.pause_ms == 100


def test_a_lane_announces_by_number_and_its_letters_are_failures():
    report = {
        "written": 4, "letters": [["sync.3", "not_sent"]], "possible": 1, "degraded": 0,
        "errors": [], "accounted": True, "ended_ms": 2000,
    }  # fmt: skip
    figures = finding("sync", told_by_lane(report), _stored(0, 1, 1, 2, 2), since_ms=1000)
    assert (figures.failed, figures.lost, figures.doubled, figures.unannounced) == (1, 0, 2, 1)
    assert finding("sync", told_by_lane(report), _stored(0), since_ms=0).lost == 2
    died = finding("sync", told_by_lane({**report, "errors": ["died"]}), _stored(0), since_ms=0)
    assert (died.lost, died.accounted) == (0, False), "nobody knows what it has acknowledged"


@pytest.mark.parametrize(
    ("numbers", "since_ms", "until_ms", "pause_ms"),
    [((0, 1, 2), 900, 1250, 100), ((0, 1, 2), 0, 1200, 1000), ((0, 1, 2), 1000, 5000, 3800),
     ((), 0, 5000, 5000)],
)  # fmt: skip
def test_a_pause_includes_both_ends(numbers, since_ms, until_ms, pause_ms):
    reported = Told(acked=numbers, ended_ms=until_ms)
    assert finding("sync", reported, _stored(*numbers), since_ms).pause_ms == pause_ms


@pytest.mark.parametrize(
    ("numbers", "wrong"), [((0, 8, 16), 0), ((0, 16, 8), 1), ((0, 8, 0, 16), 0), ((8, 0, 8), 1)]
)
def test_order_is_that_of_first_copies(numbers, wrong):
    stored = _stored(*numbers, mode="ordered")
    assert finding("ordered", Told(ended_ms=1), stored, 0, ordered=True).disordered == wrong
    moved = stored + _stored(24, mode="ordered", queue=1)
    assert finding("ordered", Told(ended_ms=1), moved, 0, ordered=True).disordered == wrong + 1


def test_broken_promises():
    def broken(covered=True, may_fail=False, degraded=False, lane=False, **told):
        case = Case("", "", lambda at: None, lambda at: None, covered=covered, may_fail=may_fail,
                    degraded=degraded)  # fmt: skip
        facts = Told(**{"ended_ms": 1000, **told})
        figures = finding("sync", facts, _stored(1, 1, 2), 1000, back_at_ms=1000)
        return broken_promises(figures, case, lane=lane)

    good = {"acked": [1, 2], "announced": [1]}
    assert broken(**good) == []
    assert "lost" in broken(**{**good, "acked": [1, 2, 3]})[0]
    assert "silence" in broken(acked=[1, 2])[0]
    assert "stored that were said" in broken(**good, not_stored=[2], may_fail=True)[0]
    assert "failed" in broken(**good, unknown=[2])[0]
    assert broken(**good, unknown=[2], may_fail=True) == []
    assert "failed" in broken(**good, unknown=[2], may_fail=True, lane=True)[0]
    assert "accounts" in broken(**good, accounted=False)[0]
    assert "degraded" in broken(**good, degraded=True)[0]
    assert "pause" in broken(**good, ended_ms=9000)[0]
    assert broken(**good, ended_ms=9000, covered=False) == []


def test_going_on_is_measured_from_the_moment_that_the_case_names():
    reported = Told(acked=[0, 1], ended_ms=9000)
    assert finding("sync", reported, _stored(0, 1), 0, back_at_ms=1050).back_ms == 50
    assert finding("sync", reported, _stored(0, 1), 0, back_at_ms=2000).back_ms == 7000


def test_part_of_a_run_replaces_its_cases_only(tmp_path):
    file = tmp_path / "results.json"
    tables.store(file, {"cases": [{"name": "a", "n": 1}, {"name": "b", "n": 1}]}, whole=True)
    tables.store(file, {"cases": [{"name": "b", "n": 2}, {"name": "c", "n": 2}]}, whole=False)
    cases = json.loads(file.read_text())["cases"]
    assert [(case["name"], case["n"]) for case in cases] == [("a", 1), ("b", 2), ("c", 2)]


@pytest.mark.parametrize("table", [networks, replication])
def test_the_short_form_is_of_cases_that_there_are(table):
    assert set(table.SHORT) <= {case.name for case in table.CASES}
