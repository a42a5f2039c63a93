"""Text from the network, made fit for a table: printable, short, without credentials."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

TEXT_MAX_BYTES: Final = 2048
"""UTF-8 bytes kept of a remark or an error text."""

_CUT_MARK: Final = "..."
_MASK: Final = "***"
_SHORTEST_SECRET: Final = 4
"""A given secret shorter than this is not searched for: it would mask half of a text."""
_CREDENTIAL: Final = re.compile(
    r"(?i)((?:access|secret)[ _-]?key|signature|security[ _-]?token|password|passwd|credential)"
    r"(\W{0,3}[:=]\W{0,2})([^\s,;&\"'\])}]+)"
)
"""`accessKey=..`, `Signature: ..` and their like, as AclException texts hold them."""


def sanitise(
    text: str | bytes | None,
    *,
    secrets: Iterable[str] = (),
    max_bytes: int = TEXT_MAX_BYTES,
) -> str | None:
    """`text` as it may be stored: printable, credentials masked, at most `max_bytes` of UTF-8.

    Line ends and tabs become one blank each, other unprintable characters (controls, bidirectional
    overrides, lone surrogates, unassigned ones) become U+FFFD. `secrets` are masked wherever they
    stand. A cut text ends in `...`.
    """
    if text is None:
        return None
    if isinstance(text, bytes):
        text = text[: 8 * max_bytes].decode(errors="replace")
    for secret in secrets:
        if len(secret) >= _SHORTEST_SECRET:
            text = text.replace(secret, _MASK)
    # A cut before the patterns run could leave a half that they do not know; this one is far off.
    text = _CREDENTIAL.sub(rf"\1\2{_MASK}", text[: 8 * max_bytes])
    return _cut("".join(map(_printable, text)), max_bytes)


def _printable(character: str) -> str:
    if character.isprintable():
        return character
    return " " if character in "\r\n\t" else "\ufffd"


def _cut(text: str, max_bytes: int) -> str:
    encoded = text.encode()
    if len(encoded) <= max_bytes:
        return text
    return encoded[: max_bytes - len(_CUT_MARK)].decode(errors="ignore") + _CUT_MARK
