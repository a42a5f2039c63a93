"""Tables for terminals, made with rich, and for notebooks."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Sequence
from types import NoneType
from typing import TYPE_CHECKING, Any, Final

from rocket_sink.text import clean

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.table import Table


def table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], *, numbers: str = ""
) -> Table:
    """Return a table. Columns of numbers, and those in `numbers` (blank-separated), align right.
    Cells of wide tables are broken at blanks. If the terminal is still too narrow, each row becomes
    lines of `column value` pairs: nothing is cut, and no word that fits a line is broken."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    class Fitting(Table):
        def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
            widths = _widths(self, options.max_width)
            if widths is None:
                yield Group(*_blocks(self, options.max_width))
                return
            for column, width in zip(self.columns, widths, strict=True):
                column.width = width
            yield from super().__rich_console__(console, options)

    fitted_table = Fitting(
        title=clean(title) or None, title_justify="left", title_style="bold",
        box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold",
    )  # fmt: skip
    rows, right = [tuple(row) for row in rows], set(numbers.split())
    for index, name in enumerate(columns):
        is_number = name in right or name.replace(" ", "_") in right
        # A bool is an int of Python, and its cell has a word.
        is_number |= bool(rows) and all(type(row[index]) in (int, float, NoneType) for row in rows)
        fitted_table.add_column(name, justify="right" if is_number else "left", overflow="fold")
    for row in rows:
        # rich would read [brackets] in a str as markup.
        fitted_table.add_row(*(Text(cell(value)) for value in row))
    return fitted_table


def html_table(title: str, rows: Iterable[Sequence[str]]) -> str:
    """Return an HTML table for `_repr_html_`; the first column has the headings of the rows."""
    lines = "".join(
        f"<tr><th style='text-align:left'>{html.escape(clean(heading))}</th>"
        + "".join(
            f"<td style='text-align:left'>{html.escape(clean(value))}</td>" for value in values
        )
        + "</tr>"
        for heading, *values in rows
    )
    return f"<table><caption>{html.escape(clean(title))}</caption>{lines}</table>"


_BETWEEN: Final = 3
"""Blanks between two columns."""
_NARROW: Final = 20


def _widths(source: Table, room: int) -> list[int] | None:
    """Return column widths at which no word breaks; None if the room is too small."""
    from rich.cells import cell_len

    texts = [[str(column.header), *map(str, column.cells)] for column in source.columns]
    cells = [max(map(cell_len, text[1:]), default=0) for text in texts]
    longest = [max(map(cell_len, text)) for text in texts]
    widths = [
        max((cell_len(word) for text in column for word in text.split()), default=0)
        for column in texts
    ]
    spare = room - sum(widths) - _BETWEEN * len(widths)
    if spare < 0 and source.row_count:
        return None
    # Widen for cells before headings: headings read well on two lines, but cells with times do not.
    for wanted in (cells, longest):
        while spare > 0 and (short := [n for n, width in enumerate(widths) if width < wanted[n]]):
            for n in short[:spare]:
                widths[n] += 1
            spare -= min(spare, len(short))
    # Refuse narrow columns with long texts: these would have one word a line.
    towers = (
        width < _NARROW and text > 3 * width for width, text in zip(widths, longest, strict=True)
    )
    return None if any(towers) and source.row_count else widths


def _blocks(source: Table, width: int) -> Iterator[RenderableType]:
    """Yield each row as `column value` pairs, as many on a line as fit."""
    from rich.text import Text

    if source.title:
        yield Text(str(source.title), style="bold")
    names = [str(column.header) for column in source.columns]
    for cells in zip(*(column.cells for column in source.columns), strict=True):
        lines = [Text()]
        for name, value in zip(names, map(str, cells), strict=True):
            if not value:
                continue
            pair = Text.assemble((name, "dim"), " " if name else "", value)
            if lines[-1] and lines[-1].cell_len + 3 + pair.cell_len > width:
                lines.append(Text("  "))
            elif lines[-1]:
                lines[-1].append("   ")
            lines[-1].append(pair)
        yield from lines
    yield Text("")


def cell(value: Any) -> str:
    """Return a value as the text of a cell; None is a dash."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.1f}" if abs(value) >= 100 else f"{value:,.2f}"
    return clean(value)
