"""Results as one HTML page: the terminal's tables and the curves; without external resources."""

from __future__ import annotations

import io
from typing import Final

from rich.console import Console

from benchmarks.curves import curves_of, svg
from benchmarks.render import tables
from benchmarks.results import Results

_WIDTH: Final = 150
_END: Final = "</body>"


def page(results: Results) -> str:
    """The page's text."""
    console = Console(record=True, width=_WIDTH, file=io.StringIO(), force_jupyter=False)
    for thing in tables(results):
        console.print(thing)
    text = console.export_html(inline_styles=True)
    drawings = "\n".join(svg(name, points) for name, points in curves_of(results.scale).items())
    before, end, after = text.rpartition(_END)
    return f"{before}{drawings}\n{end}{after}"
