"""Cleaning of untrusted text: remarks, names, bodies, keys, exception texts.

Escape sequences can rewrite a terminal's screen or fill the clipboard (OSC 52), line ends can forge
log lines, and bidirectional controls can reorder text. All output passes `clean`, `clean_lines` or
`json_text`; texts in the ledger pass `storable`."""

from __future__ import annotations

import difflib
import heapq
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Final

UUID: Final = "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
"""The pattern of the text of `uuid.uuid4`, by which ids of Spark and of runs are recognised."""
TEXT_MAX_BYTES: Final = 2048
"""The number of UTF-8 bytes that `storable` keeps."""

_CUT_MARK: Final = "..."
_MASK: Final = "***"
_SHORTEST_SECRET: Final = 4
"""Secrets of fewer characters are not masked: they would match too much."""
_CLOSE: Final = 0.75
"""The lowest likeness (0 to 1) of close names. At 0.6 `jsn` would be close to `since`."""
_LIKELY: Final = 100
"""Number of names that difflib compares, at most."""
_SHORTEST_START: Final = 3
_CLOSE_PART: Final = 0.8
_SHORTEST_PREFIX: Final = 4
_CREDENTIAL: Final = re.compile(
    r"(?i)((?:access|secret)[ _-]?key|signature|security[ _-]?token|password|passwd|credential)"
    r"(\W{0,3}[:=]\W{0,2})([^\s,;&\"'\])}]+)"
)
"""The pattern of `accessKey=..`, `Signature: ..` and similar, as in texts of AclException."""
_NOT_ASCII_TEXT: Final = re.compile(r"[^ -~]+")


def clean(text: object, max_chars: int | None = None) -> str:
    """Return `str(text)` as one printable line of at most `max_chars` characters.

    Each white-space character, also a line end, becomes a blank. Other characters that are not
    printable (`str.isprintable`: C0, DEL, C1, bidirectional and other format characters,
    surrogates, unassigned ones) become escapes: \\x1b, \\u202e. A truncated text ends in `...`."""
    line = str(text)
    if max_chars is not None and len(line) > max_chars:
        line = line[: max_chars + 1]
    if not line.isprintable():
        line = _NOT_ASCII_TEXT.sub(_shown, line)
    if max_chars is not None and len(line) > max_chars:
        line = line[: max_chars - len(_CUT_MARK)] + _CUT_MARK
    return line


def clean_lines(text: str) -> str:
    """Clean each line of a text whose line ends are trusted."""
    return "\n".join(map(clean, text.split("\n")))


def clean_trace(trace: str) -> str:
    """Clean and indent a traceback, so that no line of it looks like a log record."""
    return "\n".join(f"  {clean(line)}" for line in trace.rstrip("\n").split("\n"))


def counted(
    count: int, noun: str, singular: str = "", plural: str = "", of: int | None = None
) -> str:
    """Return the count with its noun, as `1 row` or `2 rows`, and with the verb `singular` or
    `plural`, if these are given. The number `of` (default: `count`) decides which verb."""
    verb = singular if (count if of is None else of) == 1 else plural
    return f"{count:,} {noun}{'' if count == 1 else 's'}{' ' if verb else ''}{verb}"


def json_text(
    value: Any, *, default: Callable[[Any], Any] | None = None, indent: int | None = None
) -> str:
    """Return JSON with printable characters unchanged and all others escaped."""
    encoded = json.dumps(value, default=default, ensure_ascii=False, indent=indent)
    # json.dumps escapes line ends inside of texts.
    return "\n".join(_NOT_ASCII_TEXT.sub(_escaped, line) for line in encoded.split("\n"))


def masked(text: str, secrets: Iterable[str]) -> str:
    """Replace each secret of at least 4 characters in a text by `***`."""
    for secret in secrets:
        if len(secret) >= _SHORTEST_SECRET:
            text = text.replace(secret, _MASK)
    return text


def storable(text: str | None, *, secrets: Iterable[str] = ()) -> str | None:
    """Return `text` for the ledger: clean, with credentials and `secrets` masked, and cut to
    `TEXT_MAX_BYTES` of UTF-8. A cut text ends in `...`."""
    if text is None:
        return None
    text = masked(text, secrets)
    # Mask before the cut at TEXT_MAX_BYTES, because a cut credential is not recognised. The cut at
    # 8 times that size only limits the work.
    text = clean(_CREDENTIAL.sub(rf"\1\2{_MASK}", text[: 8 * TEXT_MAX_BYTES]))
    encoded = text.encode()
    if len(encoded) <= TEXT_MAX_BYTES:
        return text
    return encoded[: TEXT_MAX_BYTES - len(_CUT_MARK)].decode(errors="ignore") + _CUT_MARK


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the name in `known` that a mistyped `name` probably means; None if no name is close.
    The beginning of exactly one known name is close, too: `name` for `name-server`."""
    names = list(known)
    # difflib takes 25 us for a name, and clusters may have 10,000 topics. So compare only the names
    # that share the most letters with `name`, in any order.
    letters = Counter(name)

    def likeness(candidate: str) -> float:
        shared = sum(min(count, candidate.count(letter)) for letter, count in letters.items())
        return shared / max(1, len(name) + len(candidate))

    likely = heapq.nlargest(_LIKELY, names, likeness)
    if near := difflib.get_close_matches(name, likely, n=1, cutoff=_CLOSE):
        return near[0]
    completions = [candidate for candidate in names if candidate.startswith(name)]
    return completions[0] if len(name) >= _SHORTEST_START and len(completions) == 1 else None


def is_misspelled(name: str, word: str) -> bool:
    """Return whether a name was probably meant to be `word`: `shardKey` for `sharding_key`, but not
    a name that differs only in case. The parts of both names are compared in pairs. So `order_id`
    is not taken for `order_by`, nor `message` for `message_id`."""
    if name.replace("_", "").lower() == word.replace("_", ""):
        return name.lower() != word
    parts = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().split("_")
    wanted = word.split("_")
    return len(parts) == len(wanted) and all(map(_is_near, parts, wanted))


def _is_near(part: str, wanted: str) -> bool:
    if len(part) >= _SHORTEST_PREFIX and wanted.startswith(part):
        return True
    ratio = difflib.SequenceMatcher(None, part, wanted).ratio()
    return part[:1] == wanted[:1] and not re.search("[0-9]", part) and ratio >= _CLOSE_PART


def _shown(run: re.Match[str]) -> str:
    return "".join(
        c if c.isprintable() else " " if c.isspace() else c.encode("unicode_escape").decode()
        for c in run.group()
    )


def _escaped(run: re.Match[str]) -> str:
    text = run.group()
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)
