"""Flatness, sparklines, drawings."""

import math
from xml.etree import ElementTree

import pytest

from benchmarks.curves import curves_of, flatness, growth, lines_of, not_flat, sparkline, svg


def points(curve, cpus):
    return [
        {"curve": curve, "axis": "rows", "x": 10**n, "cpu": cpu, "peak_mb": 100.0 + n, "jvm": 0.1,
         "client": cpu, "per_s": 1000.0, "start_mb": 50.0}
        for n, cpu in enumerate(cpus)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("values", "largest_by_smallest", "later_by_earlier"),
    [([2, 2, 2], 1, 1), ([1, 4, 2], 4, 4), ([4, 2, 1], 4, 1), ([2, 1, 3], 3, 3),
     ([3, 0], math.inf, math.inf), ([5], 1, 1)],
)  # fmt: skip
def test_flatness_and_growth(values, largest_by_smallest, later_by_earlier):
    assert (flatness(values), growth(values)) == (largest_by_smallest, later_by_earlier)


def test_a_flat_curve_looks_flat_and_a_growing_one_grows():
    assert sparkline([7, 7, 7]) == "███"
    grown = sparkline([1, 2, 4, 8])
    assert list(grown) == sorted(grown) and grown[0] < grown[-1] == "█"


def test_points_are_parted_into_curves():
    curves = curves_of([*points("a", [1, 2]), *points("b", [3])])
    assert {name: [p["cpu"] for p in some] for name, some in curves.items()} == {
        "a": [1, 2], "b": [3]
    }  # fmt: skip
    assert lines_of(curves["a"])[0].spread == 2


def test_a_curve_that_grows_is_named_with_its_measure():
    assert not list(not_flat(points("rows", [3.0, 1.0, 1.3])))
    (growth_text,) = not_flat([*points("rows", [1.0, 1.2]), *points("keys", [2.0, 3.0])])
    assert "CPU over keys" in growth_text and "1.50" in growth_text
    growing = [{**point, "peak_mb": point["x"]} for point in points("rows", [1, 1, 1])]
    assert "memory over rows" in next(not_flat(growing))


def test_a_drawing_is_well_formed_and_higher_values_stand_higher():
    root = ElementTree.fromstring(svg("keys <&> brokers", points("a", [1.0, 4.0, 2.0])))
    first = next(node for node in root.iter() if node.tag.endswith("polyline"))
    heights = [float(pair.split(",")[1]) for pair in first.attrib["points"].split()]
    assert heights[1] < heights[2] < heights[0]
    texts = [node.text or "" for node in root.iter()]
    assert "Over keys <&> brokers" in texts
    assert any("max/min 4.00" in text for text in texts)
