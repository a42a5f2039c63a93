"""Medians, ratios and the comparison with a baseline."""

import pytest

from benchmarks.figures import CPU, SPEED, Case, Figures, Ratio, compare, medians, ratios


def figures(case, per_s, *, client=1.0, **more):
    more = {"jvm": 0.0, "driver": 0.0, "brokers": 0.0, **more}
    return Figures(case, 1000, 1000 / per_s, per_s, client=client, **more)


def test_the_median_is_taken_of_each_figure_by_itself():
    runs = [figures("a", 10, client=5, failed=0), figures("b", 1), figures("a", 90, failed=0),
            figures("a", 20, client=99, failed=3)]  # fmt: skip
    first, second = medians(runs)
    assert (first.case, first.per_s, first.client, first.failed) == ("a", 20, 5, 0)
    assert (second.case, second.peak_mb) == ("b", None)


def test_ratios_are_only_of_cases_that_both_have_run():
    cases = [Case("a", "g", ("twin", "absent")), Case("twin", "g")]
    pairs = ratios(cases, [figures("a", 50, client=2, jvm=1), figures("twin", 100, client=1)])
    assert pairs == [Ratio("a", "twin", SPEED, 0.5), Ratio("a", "twin", CPU, 3.0)]


def test_ratios_are_of_cases_of_the_same_round():
    """The machine has half its speed in the second round, and slows down within the third."""
    cases = [Case("a", "g", ("twin",)), Case("twin", "g")]
    speeds = [("a", 60), ("twin", 100), ("a", 30), ("twin", 50), ("a", 60), ("twin", 33)]
    runs = [figures(*speed) for speed in speeds]
    assert ratios(cases, runs)[0] == Ratio("a", "twin", SPEED, 0.6)


@pytest.mark.parametrize(
    ("what", "before", "now", "regress"),
    [
        (SPEED, 1.0, 0.95, False), (SPEED, 1.0, 0.85, True), (SPEED, 1.0, 3.0, False),
        (CPU, 1.0, 1.05, False), (CPU, 1.0, 1.15, True), (CPU, 1.0, 0.3, False),
    ],
)  # fmt: skip
def test_worse_is_less_speed_or_more_cpu(what, before, now, regress):
    comparison = compare([Ratio("a", "b", what, before)], [Ratio("a", "b", what, now)], 0.1)
    assert comparison.regressed is comparison.changes[0].regress is regress


def test_a_ratio_that_is_gone_is_named_and_a_new_one_is_no_regress():
    old, new = Ratio("a", "b", SPEED, 1.0), Ratio("c", "d", SPEED, 0.1)
    comparison = compare([old], [new], 0.1)
    assert comparison.missing == (old.name,)
    assert not comparison.regressed
