"""Tables of documents that are made from the code, between marker lines."""

from __future__ import annotations

from typing import Final

from rocket_sink.commands.options import markdown_table
from rocket_sink.errors import ConfigurationError

_START: Final = "<!-- options: made by `rocket-sink options --markdown` -->"
_END: Final = "<!-- /options -->"


def with_marked(text: str, start: str, end: str, made: str) -> str:
    """The text with `made` between its marker lines.

    Raises:
        ConfigurationError: the markers are missing, or in another order.
    """
    before, found_start, remainder = text.partition(start)
    _, found_end, after = remainder.partition(end)
    if not (found_start and found_end):
        raise ConfigurationError(f"the text has no {start} ... {end}")
    return f"{before}{start}\n{made}\n{end}{after}"


def with_options(text: str) -> str:
    """Return a Markdown text with the current option tables between its markers.

    Raises:
        ConfigurationError: the markers are missing.
    """
    return with_marked(text, _START, _END, markdown_table())
