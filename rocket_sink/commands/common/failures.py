"""Any exception as one line that says what went wrong, for people who read no traceback."""

from __future__ import annotations

import re
from typing import Final

from rocket_sink.errors import RocketSinkError
from rocket_sink.text import clean

_OURS: Final = re.compile(r"rocket_sink\.errors\.(\w+): (.+)")
"""An error of ours inside the text of a Spark exception: the worker's traceback ends with it."""
_FOREIGN: Final = re.compile(r"^(?:Caused by: )?([\w.$]+(?:Exception|Error)): (.+)", re.MULTILINE)
_PYTHON: Final = re.compile(
    r"^(?!Caused by|org\.|java\.)[\w.]+(?:Error|Exception): .+", re.MULTILINE
)
"""The end of a traceback in a Spark exception; Java's own names come after it."""
_LONGEST: Final = 600


def one_line(error: BaseException) -> str:
    """What happened, without stack traces; at most 600 characters.

    A Spark exception carries Python and Java traces as text; the innermost error of ours in it is
    what the user can act on, else its first line.
    """
    text = str(error)
    if isinstance(error, RocketSinkError):
        first, _, more = text.strip().partition("\n")
        return _short(first) + (" (--debug shows them all)" if more else "")
    ours = _OURS.findall(text)
    if ours:
        return _short(ours[-1][1])
    if _is_sparks(error):
        return _short(_spark_text(error))
    return _short(f"{type(error).__name__}: {text}" if text else type(error).__name__)


def _is_sparks(error: BaseException) -> bool:
    return type(error).__module__.partition(".")[0] in ("pyspark", "py4j")


def _spark_text(error: BaseException) -> str:
    text = str(error).strip()
    first = text.splitlines()[0] if text else type(error).__name__
    workers = _PYTHON.findall(text) if "PYTHON" in first else []
    if workers:
        return str(workers[-1])
    if "An error occurred while calling" in first:
        found = _FOREIGN.search(text)
        return f"{found[1].rpartition('.')[2]}: {found[2]}" if found else first
    return first


def _short(text: str) -> str:
    return clean(" ".join(text.split()), _LONGEST)
