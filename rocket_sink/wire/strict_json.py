"""JSON from a peer: bounded depth, integers and number of values, no NaN, no doubled keys, no lone
surrogates.

`json` alone accepts the last five and answers a deep nesting with RecursionError, a long integer
with ValueError. Every refusal here is RemoteProtocolError.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, Final, NoReturn

from rocket_sink.errors import RemoteProtocolError
from rocket_sink.text import clean
from rocket_sink.wire.scalars import INT64_MAX, INT64_MIN

_STRING_OR_BRACKET: Final = re.compile(rb'"(?:[^"\\]|\\.)*\\?(?:"|\Z)|[\[{]|[\]}]', re.DOTALL)
_STRING_OR_NUMERIC_KEY: Final = re.compile(
    r'"(?:[^"\\]|\\.)*\\?(?:"|\Z)|(?<=[{,])\s*(-?\d{1,20})(?=\s*:)', re.DOTALL
)


_MOST_VALUES: Final = 500_000
"""Ten times the topics of a large cluster; an empty list takes 3 bytes on the wire and 64 here."""


class _Refused(ValueError):
    pass


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise _Refused("a key occurs twice")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise _Refused(f"the constant {name}")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _Refused("a number is too large")
    return value


def _int64(text: str) -> int:
    if len(text) <= 20 and INT64_MIN <= (value := int(text)) <= INT64_MAX:
        return value
    raise _Refused("an integer has more than 64 bits")


_DECODER: Final = json.JSONDecoder(
    object_pairs_hook=_unique,
    parse_constant=_refuse_constant,
    parse_float=_finite,
    parse_int=_int64,
)


def load_json(data: bytes, *, max_depth: int, what: str) -> Any:
    """The value of one JSON text in UTF-8; `what` names it in errors.

    Raises:
        RemoteProtocolError: not UTF-8, not JSON, or beyond a limit of this module.
    """
    _check_values(data)
    try:
        _check_depth(data, max_depth)
        text = data.decode().strip(" \t\r\n")
        value, end = _DECODER.raw_decode(text)
        if end != len(text):
            raise _Refused("text after the value")
        if b"\\u" in data:
            _check_surrogates(value)
    except (ValueError, RecursionError) as error:
        # json's own messages hold positions only; UnicodeDecodeError holds one byte.
        raise RemoteProtocolError(
            f"{what} is not acceptable JSON: {clean(str(error), 200)}"
        ) from None
    return value


def _check_values(data: bytes) -> None:
    if data.count(b",") > _MOST_VALUES:
        raise RemoteProtocolError(f"JSON of more than {_MOST_VALUES} values")


def _check_depth(data: bytes, limit: int) -> None:
    if data.count(b"{") + data.count(b"[") <= limit:
        return
    depth = 0
    for match in _STRING_OR_BRACKET.finditer(data):
        token = match.group()[:1]
        if token in b"[{":
            depth += 1
            if depth > limit:
                raise _Refused(f"nested deeper than {limit}")
        elif token in b"]}":
            depth -= 1


def _check_surrogates(value: Any) -> None:
    if isinstance(value, str):
        value.encode()  # UnicodeEncodeError is a ValueError
    elif isinstance(value, dict):
        for key, item in value.items():
            key.encode()
            _check_surrogates(item)
    elif isinstance(value, list):
        for item in value:
            _check_surrogates(item)


def quote_numeric_keys(data: bytes) -> bytes:
    """Legacy fastjson text made strict: `{0:"a"}` becomes `{"0":"a"}`.

    Java's name servers write maps with integer keys so, unless the request asks for strict JSON
    (GetRouteInfoRequestHeader.acceptStandardJsonOnly, or a version from 4.9.4 on). Text inside
    strings stays. Linear in the input: each alternative consumes what it looks at.

    Raises:
        RemoteProtocolError: not UTF-8, or more values than `load_json` takes.
    """
    _check_values(data)
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise RemoteProtocolError(f"the body is not UTF-8: {error.reason}") from None
    quoted = _STRING_OR_NUMERIC_KEY.sub(
        lambda match: match.group() if match.group(1) is None else f'"{match.group(1)}"', text
    )
    return quoted.encode()
