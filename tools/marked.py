"""Tables of documents that are made from the code, between marker lines."""

from __future__ import annotations

import math
from typing import Final

from rocket_sink.commands.options import default_text, described
from rocket_sink.errors import ConfigurationError
from rocket_sink.option_spec import Option
from rocket_sink.options import GROUPS, options_in

_START: Final = "<!-- options: made by `python docs/reference_tables.py` -->"
_END: Final = "<!-- /options -->"
_TITLES: Final = {"message": "Messages", "routing": "Routing and fault tolerance"}


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


def markdown_table() -> str:
    """Return the options as Markdown, one table per group."""
    parts: list[str] = []
    for group in GROUPS:
        title = _TITLES.get(group, group.capitalize())
        parts += [f"\n**{title}**\n", "| option | default | what it is |", "|---|---|---|"]
        parts += [_markdown_row(option) for option in options_in([group])]
    return "\n".join(parts).strip() + "\n"


def _markdown_row(spec: Option) -> str:
    text = described(spec)
    facts = _facts(spec)
    text += f" ({'; '.join(facts)})" if facts else ""
    default = default_text(spec).replace(",", ", ")  # Lines break at blanks only.
    return f"| `{spec.name}` | {default} | {text} |"


def _facts(spec: Option) -> list[str]:
    """Return the option's bounds, its name in Java and its other names, if it has any."""
    low, high = (f"{bound:,}" if math.isfinite(bound) else "" for bound in (spec.low, spec.high))
    bounds = " ".join(part for part in (low and f"from {low}", high and f"to {high}") if part)
    java = spec.java if spec.java and spec.java.lower() != spec.name.lower() else ""
    others = ", ".join(f"`{name}`" for name in spec.aliases if name != java)
    named = java and f"Java: `{java}`", others and f"also {others}"
    return [fact for fact in (bounds, *named) if fact]


def with_options(text: str) -> str:
    """Return a Markdown text with the current option tables between its markers.

    Raises:
        ConfigurationError: the markers are missing.
    """
    return with_marked(text, _START, _END, markdown_table())
