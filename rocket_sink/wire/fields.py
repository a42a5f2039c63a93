"""Header fields from Python values: what all request builders share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from rocket_sink.wire.command import Body, Frame

AUTO_CREATE_TOPIC: Final = "TBW102"
"""TopicValidator.AUTO_CREATE_TOPIC_KEY_TOPIC: its settings are inherited by topics made on
demand."""

Value = str | int | bool | None


def fields(values: Mapping[str, Value]) -> dict[str, str]:
    """Header fields as text; None and empty text are left out (see header_binary)."""
    ext = {}
    for name, value in values.items():
        if value is None or value == "":
            continue
        if isinstance(value, bool):
            ext[name] = "true" if value else "false"
        else:
            ext[name] = str(value)
    return ext


def request(code: int, values: Mapping[str, Value], body: Body | None = None) -> Frame:
    """A request with these header fields."""
    return Frame(code, fields(values) or None, body)
