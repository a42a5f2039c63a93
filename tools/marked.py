"""Tables of documents that are made from the code, between marker lines."""

from __future__ import annotations

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
    if spec.java and spec.java.lower() != spec.name.lower():
        text += f" (Java: `{spec.java}`)"
    default = default_text(spec).replace(",", ", ")  # Lines break at blanks only.
    return f"| `{spec.name}` | {default} | {text} |"


def with_options(text: str) -> str:
    """Return a Markdown text with the current option tables between its markers.

    Raises:
        ConfigurationError: the markers are missing.
    """
    return with_marked(text, _START, _END, markdown_table())
