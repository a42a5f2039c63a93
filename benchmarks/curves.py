"""Curves of cost over size: flatness, sparklines, SVG. Pure: points in, text out.

There is no dependency on a plotting library.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any, Final

from rocket_sink.commands.common.output import table

if TYPE_CHECKING:
    from rich.console import RenderableType

FLAT: Final = 1.3
"""Largest growth of a flat curve, from a point to a later one. A curve may fall: the fixed cost of
a write (its ledger's table, Delta's commit) is spread over more rows."""
_BARS: Final = "▁▂▃▄▅▆▇█"
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 560, 240, 60, 40, 30
_COLOURS: Final = ("#1f6feb", "#d1242f")


@dataclass(frozen=True)
class Line:
    """Values of one measure over the sizes of a curve."""

    name: str
    unit: str
    values: tuple[float, ...]

    @property
    def spread(self) -> float:
        """The largest divided by the smallest; 1 is perfectly flat."""
        return flatness(self.values)

    @property
    def growth(self) -> float:
        """The largest ratio of a value to an earlier one."""
        return growth(self.values)

    @property
    def is_flat(self) -> bool:
        """Whether the growth of the line is at most `FLAT`."""
        return self.growth <= FLAT


def flatness(values: Sequence[float]) -> float:
    """The largest divided by the smallest value; infinite when the smallest is not positive."""
    least = min(values)
    return max(values) / least if least > 0 else math.inf


def growth(values: Sequence[float]) -> float:
    """The largest ratio of a value to an earlier one, at least 1; infinite with a value <= 0."""
    if min(values) <= 0:
        return math.inf
    least, grown = values[0], 1.0
    for value in values:
        least = min(least, value)
        grown = max(grown, value / least)
    return grown


def sparkline(values: Sequence[float]) -> str:
    """Bars from 0 to the largest value."""
    most = max(values)
    if most <= 0:
        return _BARS[0] * len(values)
    top = len(_BARS) - 1
    return "".join(_BARS[max(0, min(top, round(value / most * top)))] for value in values)


def curves_of(points: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """The points by curve, in the order of measurement."""
    by_curve: dict[str, list[Mapping[str, Any]]] = {}
    for point in points:
        by_curve.setdefault(point["curve"], []).append(point)
    return by_curve


def lines_of(points: Sequence[Mapping[str, Any]]) -> tuple[Line, Line]:
    """CPU per million rows (JVM and workers) and the largest worker's memory."""
    return (
        Line("CPU", "cpu-s/M", tuple(point["cpu"] for point in points)),
        Line("memory", "MB", tuple(point["peak_mb"] for point in points)),
    )


def curve_tables(points: Sequence[Mapping[str, Any]]) -> Iterator[RenderableType]:
    """Yield a table per curve, and a table of all curves with their flatness."""
    curves = curves_of(points)
    for name, some in curves.items():
        rows = [
            (
                point["x"], round(point["per_s"]), f"{point['jvm']:.2f}", f"{point['client']:.2f}",
                f"{point['cpu']:.2f}", f"{point['start_mb']:,.0f} -> {point['peak_mb']:,.0f}",
            )
            for point in some
        ]  # fmt: skip
        names = (some[0]["axis"], "rows/s", "JVM", "workers", "CPU", "worker MB")
        numbers = f"{some[0]['axis']} rows/s JVM workers CPU worker_MB"
        yield table(f"Over {name}", names, rows, numbers=numbers)
    if curves:
        flat = [
            (name, line.name, sparkline(line.values), f"{line.spread:.2f}", f"{line.growth:.2f}",
             "flat" if line.is_flat else "NOT FLAT")
            for name, some in curves.items()
            for line in lines_of(some)
        ]  # fmt: skip
        title = f"Flatness (growth: a point by one before it; flat up to {FLAT})"
        names = ("over", "of", "curve", "max/min", "growth", "")
        yield table(title, names, flat, numbers="max/min growth")


def not_flat(points: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Texts about curves that grow."""
    for name, some in curves_of(points).items():
        for line in lines_of(some):
            if not line.is_flat:
                yield (
                    f"{line.name} over {name} is not flat: it grows {line.growth:.2f} times (up to "
                    f"{FLAT} counts as flat)"
                )


def svg(name: str, points: Sequence[Mapping[str, Any]]) -> str:
    """Draw a curve as SVG: two lines from 0, each with its own scale."""
    lines = lines_of(points)
    marks = [_x(index, len(points)) for index in range(len(points))]
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" role="img">',
        f"<title>{escape(name)}</title>",
        f'<text x="{_LEFT}" y="16" font-weight="bold">Over {escape(name)}</text>',
        f'<path d="M{_LEFT} {_TOP}V{_HEIGHT - _BOTTOM}H{_WIDTH - 20}" fill="none" stroke="#888"/>',
    ]
    for mark, point in zip(marks, points, strict=True):
        parts.append(
            f'<text x="{mark:.0f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">'
            f"{point['x']:,}</text>"
        )
    for number, (line, colour) in enumerate(zip(lines, _COLOURS, strict=True)):
        parts += _drawn(line, colour, marks, number)
    return "\n".join([*parts, "</svg>"])


def _drawn(line: Line, colour: str, marks: Sequence[float], number: int) -> Iterator[str]:
    most = max(line.values) or 1.0
    floor, room = _HEIGHT - _BOTTOM, _HEIGHT - _BOTTOM - _TOP - 20
    places = [
        (mark, floor - value / most * room) for mark, value in zip(marks, line.values, strict=True)
    ]
    corners = " ".join(f"{x:.0f},{y:.0f}" for x, y in places)
    yield f'<polyline points="{corners}" fill="none" stroke="{colour}" stroke-width="2"/>'
    for (x, y), value in zip(places, line.values, strict=True):
        below = 14 if number else -6
        yield f'<circle cx="{x:.0f}" cy="{y:.0f}" r="3" fill="{colour}"/>'
        yield (
            f'<text x="{x:.0f}" y="{y + below:.0f}" text-anchor="middle" fill="{colour}">'
            f"{value:,.2f}</text>"
        )
    label = f"{line.name}, {line.unit}: max/min {line.spread:.2f}"
    yield (
        f'<text x="{_LEFT + number * 220}" y="{_HEIGHT - 6}" fill="{colour}">{escape(label)}</text>'
    )


def _x(index: int, count: int) -> float:
    room = _WIDTH - _LEFT - 80
    return _LEFT + 40 + (room * index / (count - 1) if count > 1 else room / 2)
