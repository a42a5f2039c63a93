"""Tables for terminals and notebooks, by rich."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rocket_sink.text import clean

if TYPE_CHECKING:
    from rich.table import Table


def table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], *, numbers: str = ""
) -> Table:
    """A table; columns of numbers, and those named in `numbers` (blank-separated), align right."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    made = Table(
        title=clean(title) or None, title_justify="left", title_style="bold",
        box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold",
    )  # fmt: skip
    rows, right = [tuple(row) for row in rows], set(numbers.split())
    for index, name in enumerate(columns):
        is_number = name in right or name.replace(" ", "_") in right
        is_number |= bool(rows) and all(isinstance(row[index], int | float | None) for row in rows)
        made.add_column(name, justify="right" if is_number else "left", overflow="fold")
    for row in rows:
        # rich would read [brackets] in a str as markup.
        made.add_row(*(Text(cell(value)) for value in row))
    return made


def cell(value: Any) -> str:
    """A value as text of a cell; None is a dash."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.1f}" if abs(value) >= 100 else f"{value:,.2f}"
    return clean(value)
