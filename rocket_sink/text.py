"""The one cleaner of text that others wrote: remarks, names, bodies, keys, exception texts.

Whatever a terminal or a log would obey instead of show must not leave this process: an escape
sequence can rewrite the screen or fill the clipboard (OSC 52), a line end can forge a log line, a
bidirectional control can reorder what is read. All output goes through `clean`, `clean_lines` or
`json_text`; what is stored in the ledger's tables goes through `storable`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import Any, Final

TEXT_MAX_BYTES: Final = 2048
"""UTF-8 bytes that `storable` keeps."""

_CUT_MARK: Final = "..."
_MASK: Final = "***"
_SHORTEST_SECRET: Final = 4
"""A given secret shorter than this is not searched for: it would mask half of a text."""
_CREDENTIAL: Final = re.compile(
    r"(?i)((?:access|secret)[ _-]?key|signature|security[ _-]?token|password|passwd|credential)"
    r"(\W{0,3}[:=]\W{0,2})([^\s,;&\"'\])}]+)"
)
"""`accessKey=..`, `Signature: ..` and their like, as AclException texts hold them."""
_NOT_ASCII_TEXT: Final = re.compile(r"[^ -~]+")


def clean(text: object, max_chars: int | None = None) -> str:
    """`str(text)` as one printable line of at most `max_chars` characters.

    White space, line ends too, becomes blanks, one for one. Any other character that
    `str.isprintable` refuses (C0, DEL, C1, bidirectional and other format characters, surrogates,
    unassigned ones) is shown by its number: \\x1b, \\u202e. A cut text ends in `...`.
    """
    whole = str(text)
    if max_chars is not None and len(whole) > max_chars:
        whole = whole[: max_chars + 1]
    if not whole.isprintable():
        whole = _NOT_ASCII_TEXT.sub(_shown, whole)
    if max_chars is not None and len(whole) > max_chars:
        whole = whole[: max_chars - len(_CUT_MARK)] + _CUT_MARK
    return whole


def clean_lines(text: str) -> str:
    """Each line as `clean` makes it; for texts whose line ends are our own."""
    return "\n".join(map(clean, text.split("\n")))


def clean_trace(trace: str) -> str:
    """A traceback, clean and indented: no line of it can pass for a line of another kind."""
    return "\n".join(f"  {clean(line)}" for line in trace.rstrip("\n").split("\n"))


def json_text(
    value: Any, *, default: Callable[[Any], Any] | None = None, indent: int | None = None
) -> str:
    """JSON that is read by people: letters of all scripts as they are, all else as escapes.

    Nothing is lost: a reader of JSON gets the same text.
    """
    made = json.dumps(value, default=default, ensure_ascii=False, indent=indent)
    if indent is None:
        return _NOT_ASCII_TEXT.sub(_escaped, made)
    # The only line ends are those of the layout: json.dumps escapes those inside of texts.
    return "\n".join(_NOT_ASCII_TEXT.sub(_escaped, line) for line in made.split("\n"))


def storable(
    text: str | bytes | None,
    *,
    secrets: Iterable[str] = (),
    max_bytes: int = TEXT_MAX_BYTES,
) -> str | None:
    """`text` as a table may hold it: clean, credentials masked, at most `max_bytes` of UTF-8.

    `secrets` are masked wherever they stand. A cut text ends in `...`.
    """
    if text is None:
        return None
    if isinstance(text, bytes):
        text = text[: 8 * max_bytes].decode(errors="replace")
    for secret in secrets:
        if len(secret) >= _SHORTEST_SECRET:
            text = text.replace(secret, _MASK)
    # A cut before the patterns run could leave a half that they do not know; this one is far off.
    text = clean(_CREDENTIAL.sub(rf"\1\2{_MASK}", text[: 8 * max_bytes]))
    encoded = text.encode()
    if len(encoded) <= max_bytes:
        return text
    return encoded[: max_bytes - len(_CUT_MARK)].decode(errors="ignore") + _CUT_MARK


def _shown(run: re.Match[str]) -> str:
    return "".join(
        c if c.isprintable() else " " if c.isspace() else _number(c) for c in run.group()
    )


def _number(character: str) -> str:
    number = ord(character)
    if number <= 0xFF:
        return f"\\x{number:02x}"
    return f"\\u{number:04x}" if number <= 0xFFFF else f"\\U{number:08x}"


def _escaped(run: re.Match[str]) -> str:
    text = run.group()
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)
