"""Text to numbers, as strict as Java's parsers.

Python's `int()` takes underscores, blanks and any script's digits; Java's `Long.parseLong` takes
only an optional sign and digits (of any script, which no broker writes, so ASCII here).
"""

from __future__ import annotations

import re
from typing import Final

from rocket_sink.errors import RemoteProtocolError
from rocket_sink.text import clean

INT32_MIN: Final = -(2**31)
INT32_MAX: Final = 2**31 - 1
INT64_MIN: Final = -(2**63)
INT64_MAX: Final = 2**63 - 1

_DECIMAL: Final = re.compile(r"[+-]?[0-9]{1,19}")


def parse_int64(text: object, what: str) -> int:
    """A 64-bit integer from its decimal text, or RemoteProtocolError that names `what`."""
    if isinstance(text, str) and _DECIMAL.fullmatch(text):
        value = int(text)
        if INT64_MIN <= value <= INT64_MAX:
            return value
    raise RemoteProtocolError(f"{what} is not a 64-bit integer: {clean(text, 40)!r}")


def parse_int32(text: object, what: str) -> int:
    """A 32-bit integer from its decimal text, or RemoteProtocolError that names `what`."""
    value = parse_int64(text, what)
    if INT32_MIN <= value <= INT32_MAX:
        return value
    raise RemoteProtocolError(f"{what} is not a 32-bit integer: {value}")
