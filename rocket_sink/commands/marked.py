"""Parts of Markdown files that are made: what stands between two marker lines."""

from __future__ import annotations

from rocket_sink.errors import ConfigurationError


def with_marked(text: str, start: str, end: str, made: str) -> str:
    """A text with what stands between its markers made anew.

    Raises:
        ConfigurationError: the markers are not there, in this order.
    """
    before, found_start, rest = text.partition(start)
    _, found_end, after = rest.partition(end)
    if not (found_start and found_end):
        raise ConfigurationError(f"the text has no {start} ... {end}")
    return f"{before}{start}\n{made}\n{end}{after}"
