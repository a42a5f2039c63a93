"""A Sphinx extension: the picture of the rooms as SVG, for a site that works offline.

docs/architecture.md has it as Mermaid text, which GitHub draws. Mermaid itself is a script of three
megabytes, so the site's picture is laid out here, from the same values (`rooms.py`), in layers: a
room stands below those that import from it, an arrow passes between the boxes of the rows that it
crosses, and rows are sorted so that few arrows cross (barycentres).
"""

from __future__ import annotations

import itertools
from html import escape
from typing import Any, Final

import rooms
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

WIDE: Final = 236
NARROW: Final = 12
"""Width of a place at which an arrow crosses a row."""
GAP: Final = 16
LINE: Final = 15
BETWEEN: Final = 38
SWEEPS: Final = 24

Edge = tuple[str, str]


def downward(uses: dict[str, set[str]]) -> tuple[set[Edge], set[Edge]]:
    """The arrows; and those of them that close a circle, which go up."""
    up: set[Edge] = set()
    done: set[str] = set()

    def visit(room: str, way: tuple[str, ...]) -> None:
        for other in sorted(uses[room]):
            if other in way:
                up.add((room, other))
            elif other not in done:
                visit(other, (*way, other))
        done.add(room)

    # those that nobody imports from first, so that circles are entered from above
    used = set().union(*uses.values())
    for room in sorted(uses, key=lambda room: (room in used, room)):
        if room not in done:
            visit(room, (room,))
    return {(room, other) for room in uses for other in uses[room]} - up, up


def levels(names: list[str], down: set[Edge]) -> dict[str, int]:
    """Room -> its row: one below the lowest of those that import from it."""
    found = dict.fromkeys(names, 0)
    for _ in names:
        for room, other in down:
            found[other] = max(found[other], found[room] + 1)
    return found


class Layout:
    """Rows of rooms and of places where arrows cross them, each with its middle `x`."""

    def __init__(self, uses: dict[str, set[str]]) -> None:
        down, self.up = downward(uses)
        level = levels(sorted(uses), down)
        self.rows: list[list[str]] = [[] for _ in range(max(level.values()) + 1)]
        for room in sorted(uses):
            self.rows[level[room]].append(room)
        self.ways: dict[Edge, list[str]] = {}
        self._near: dict[str, list[str]] = {}
        for room, other in sorted(down):
            crossed = [f"{room}>{other}>{at}" for at in range(level[room] + 1, level[other])]
            for at, place in enumerate(crossed, level[room] + 1):
                self.rows[at].append(place)
            way = self.ways[room, other] = [room, *crossed, other]
            for one, next_one in itertools.pairwise(way):
                self._near.setdefault(one, []).append(next_one)
                self._near.setdefault(next_one, []).append(one)
        self.x: dict[str, float] = {}
        for row in self.rows:
            self._place(row)
        for sweep in range(SWEEPS):
            for row in self.rows if sweep % 2 == 0 else reversed(self.rows):
                row.sort(key=self._wanted)
                self._place(row)
        left = min(self.x[one] - self.width(one) / 2 for one in self.x)
        self.x = {one: x - left + GAP for one, x in self.x.items()}

    @staticmethod
    def width(one: str) -> int:
        return NARROW if ">" in one else WIDE

    def _wanted(self, one: str) -> float:
        near = self._near.get(one, [one])
        return sum(self.x[other] for other in near) / len(near)

    def _place(self, row: list[str]) -> None:
        """Side by side, as near to where their neighbours are as there is room."""
        total = sum(self.width(one) + GAP for one in row) - GAP
        x = -total / 2
        for one in row:
            self.x[one] = x + self.width(one) / 2
            x += self.width(one) + GAP


def svg() -> str:
    """The picture; its colours are the theme's."""
    modules, all_uses = rooms.rooms()
    uses = {room: others & modules.keys() for room, others in rooms.reduced(all_uses).items()}
    layout = Layout(uses)
    box: dict[str, tuple[float, float]] = {}
    parts: list[str] = []
    top = 8.0
    for row in layout.rows:
        lines = {one: [] if ">" in one else _wrapped(modules[one]) for one in row}
        height = max(LINE * (len(some) + 1) + 14 for some in lines.values())
        for one in row:
            box[one] = top, top + height
            if ">" not in one:
                bottom = top + LINE * (len(lines[one]) + 1) + 14
                box[one] = top, bottom
                parts.append(_room(one, lines[one], layout.x[one] - WIDE / 2, top, bottom - top))
        top += height + BETWEEN
    arrows = [_arrow([(layout.x[one], *box[one]) for one in way]) for way in layout.ways.values()]
    arrows += [_back(layout.x[a], box[a], layout.x[b], box[b]) for a, b in sorted(layout.up)]
    width = max(layout.x[one] + layout.width(one) / 2 for one in layout.x) + GAP
    height = top - BETWEEN + 8
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}"'
        f' width="{width:.0f}"'
        ' role="img" aria-label="The rooms and what they import from" font-size="11"'
        ' fill="currentColor"><defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4"'
        ' markerWidth="7" markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z"/></marker></defs>'
        f"{''.join(arrows)}{''.join(parts)}</svg>"
    )


def _wrapped(names: list[str]) -> list[str]:
    lines = [""]
    for name in names:
        if len(lines[-1]) + len(name) > 37:
            lines.append("")
        lines[-1] = f"{lines[-1]} {name}".strip()
    return lines


def _room(name: str, lines: list[str], x: float, y: float, height: float) -> str:
    texts = "".join(
        f'<text x="{x + 8:g}" y="{y + 18 + LINE * (at + 1):g}" opacity="0.75">{escape(line)}</text>'
        for at, line in enumerate(lines)
    )
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{WIDE}" height="{height:g}" rx="6" stroke="currentColor"'
        ' stroke-opacity="0.4" style="fill:var(--color-background-secondary,#f8f9fb)"/>'
        f'<text x="{x + 8:g}" y="{y + 18:g}" font-weight="bold" font-size="12.5">'
        f"{escape(name.replace('.', '/'))}</text>{texts}"
    )


def _arrow(points: list[tuple[float, float, float]]) -> str:
    """Down through (x, top, bottom) of a room, of places, of a room."""
    x, _, y = points[0]
    path = f"M{x:g} {y:g}"
    for at, (next_x, top, bottom) in enumerate(points[1:], 1):
        bend = (top - y) / 2
        path += f"C{x:g} {y + bend:g} {next_x:g} {top - bend:g} {next_x:g} {top:g}"
        x, y = next_x, top
        if at < len(points) - 1:
            path += f"V{bottom:g}"
            y = bottom
    return _line(path)


def _back(x1: float, box1: tuple[float, float], x2: float, box2: tuple[float, float]) -> str:
    """Up, from a room's right side to that of one above it."""
    x1, x2 = x1 + WIDE / 2, x2 + WIDE / 2
    y1, y2 = box1[0] + 14, box2[1] - 10
    out = max(x1, x2) + 3 * GAP
    return _line(f"M{x1:g} {y1:g}C{out:g} {y1:g} {out:g} {y2:g} {x2:g} {y2:g}")


def _line(path: str) -> str:
    return (
        f'<path d="{path}" fill="none" stroke="currentColor" stroke-opacity="0.45"'
        ' marker-end="url(#tip)"/>'
    )


class Mermaid(SphinxDirective):
    """A Mermaid fence: the page has one, the picture of the rooms."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        return [nodes.raw("", f'<div class="rooms">{svg()}</div>', format="html")]


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("mermaid", Mermaid)
    return {"version": "1", "parallel_read_safe": True}
