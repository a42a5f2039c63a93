"""Descriptions of options, the parsing of their values, and secrets. The table is in `options`."""

from __future__ import annotations

import enum
import hashlib
import hmac
import math
import os
import re
import string
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field
from fractions import Fraction
from functools import partial
from ipaddress import ip_network
from pathlib import Path
from typing import Any, Final

from rocket_sink.errors import OptionError
from rocket_sink.message_rules import host_and_port
from rocket_sink.text import nearest

_KEY: Final = "rocket_sink.option"


class Secret:
    """Text that is not printed: `str`, `repr`, `format` and errors show `***`. Secrets are compared
    in constant time. They pickle, because Spark's task closures contain them; if that is a risk,
    use a reference (`env:NAME`, `file:PATH`)."""

    __slots__ = ("_text",)

    def __init__(self, text: str | Secret) -> None:
        self._text = text.reveal() if isinstance(text, Secret) else str(text)

    def reveal(self) -> str:
        return self._text

    def digest(self) -> str:
        """Return a short SHA-256 of the text, for cache keys."""
        return hashlib.sha256(self._text.encode()).hexdigest()[:16]

    def __bool__(self) -> bool:
        return bool(self._text)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Secret):
            return NotImplemented
        return hmac.compare_digest(self._text.encode(), other.reveal().encode())

    def __hash__(self) -> int:
        return hash(self.digest())

    def __repr__(self) -> str:
        return "***" if self._text else "''"

    __str__ = __repr__

    def __reduce__(self) -> tuple[Any, ...]:
        return Secret, (self._text,)


class Kind(enum.Enum):
    TEXT = "text"
    SECRET = "secret"
    INTEGER = "integer"
    NUMBER = "number"
    BOOLEAN = "boolean"
    MILLISECONDS = "ms"
    BYTES = "bytes"
    CHOICE = "choice"
    INTEGERS = "integers"
    COLUMNS = "column=source, ..."
    ADDRESSES = "address=address; ..."
    SELECTOR = "name, or name=number, ..."
    DURATIONS = "name=duration, ..."
    FAULT_TABLE = "ms:ms, ..."
    BUDGET = "number or percentage"
    BATCH = "ms, bytes"


@dataclass(frozen=True)
class Option:
    """An option. `java` is the property of DefaultMQProducer or ClientConfig, if there is one."""

    name: str
    attribute: str
    kind: Kind
    default: Any
    group: str
    help: str
    low: float = -math.inf
    high: float = math.inf
    choices: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    java: str | None = None
    booleans: tuple[str, ...] = ()
    """The values that false and true mean, because an option of Java with this meaning is one."""

    @property
    def unit(self) -> str:
        """The unit of the values: `ms`, `bytes` or an empty text."""
        return self.kind.value if self.kind in _UNITS else ""

    def parse(self, value: Any) -> Any:
        """Convert text or a Python value to the option's type. Raise OptionError, which shows no
        secret, if the type is wrong or the value out of range."""
        word = str(value).strip().lower()
        if self.booleans and word in _BOOLEANS:
            value = self.booleans[_BOOLEANS.index(word)]
        try:
            parse, expected = _FORMS[self.kind]
            parsed = parse(value)
        except (TypeError, ValueError):
            shown = "the given value" if self.kind is Kind.SECRET else repr(value)
            raise OptionError(
                f"option {self.name}: {shown} is not {expected}", option=self.name
            ) from None
        if self.choices:
            return self._chosen(parsed)
        for number in parsed if isinstance(parsed, tuple) else (parsed,):
            if isinstance(number, (int, float)) and not self.low <= number <= self.high:
                raise OptionError(
                    f"option {self.name}: {number} is outside {self._range()}", option=self.name
                )
        return parsed

    def shown(self, value: Any) -> str:
        """Return the value as text; secrets are masked."""
        if value is None:
            return ""
        if isinstance(value, bool):
            return str(value).lower()
        if isinstance(value, tuple):
            return ",".join("=".join(map(str, v)) if isinstance(v, tuple) else str(v)
                            for v in value)  # fmt: skip
        return str(value)

    def _chosen(self, text: str) -> str:
        for choice in self.choices:
            if choice.lower() == text.lower():
                return choice
        near = nearest(text.lower(), self.choices)
        raise OptionError(
            f"option {self.name}: {text!r} is not one of {', '.join(self.choices)}"
            + (f"; did you mean {near!r}?" if near else ""),
            option=self.name,
        )

    def _range(self) -> str:
        low = "any" if self.low == -math.inf else f"{self.low:g}"
        high = "any" if self.high == math.inf else f"{self.high:g}"
        return f"{low}..{high} {self.unit}".rstrip()


def _text(value: Any) -> str:
    if value is None or isinstance(value, (dict, list, tuple, set)):
        raise TypeError(value)
    return str(value).strip()


def _integer(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError(value)
    if isinstance(value, float) and not value.is_integer():
        raise ValueError(value)
    return int(value)


def _number(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(value)
    return number


def _boolean(value: Any) -> bool:
    word = str(value).strip().lower()
    if word not in ("true", "1", "yes", "on", "false", "0", "no", "off"):
        raise ValueError(value)
    return word in ("true", "1", "yes", "on")


def _scaled(value: Any, scales: Mapping[str, int]) -> int:
    """Return a number with an optional suffix (`1500`, `1.5s`, `4 MiB`) in whole units."""
    if not isinstance(value, str):
        return _integer(value)
    text = value.strip().lower()
    suffix = next((suffix for suffix in scales if text.endswith(suffix)), "")
    if "/" in text:
        raise ValueError(text)
    # Use fractions: 1.1 * 1000 in floats is 1100.0000000000002.
    number = Fraction(text.removesuffix(suffix).strip()) * scales.get(suffix, 1)
    if number.denominator != 1:
        raise ValueError(text)
    return number.numerator


_MS_SCALES: Final = {
    "ms": 1,
    "min": 60_000,
    "m": 60_000,
    "h": 3_600_000,
    "d": 86_400_000,
    "s": 1000,
}
_BYTE_SCALES: Final = {
    "kib": 2**10, "mib": 2**20, "gib": 2**30,
    "kb": 1000, "mb": 1000**2, "gb": 1000**3, "k": 2**10, "m": 2**20, "g": 2**30, "b": 1,
}  # fmt: skip


def _parts(value: Any) -> list[Any]:
    """Return the parts of a list, or of a text with commas; an empty text has no parts."""
    if isinstance(value, str):
        return value.split(",") if value.strip() else []
    return list(value)


def _columns(value: Any) -> tuple[tuple[str, str], ...]:
    if isinstance(value, Mapping):
        value = value.items()
    pairs: dict[str, str] = {}
    for part in _parts(value):
        name, source = part.partition("=")[::2] if isinstance(part, str) else map(str, part)
        name, source = name.strip(), source.strip()
        if not (name and source) or name in pairs:
            raise ValueError(part)
        pairs[name] = source
    return tuple(pairs.items())


def _selector(value: Any) -> str:
    """Return the name of a selector, or the weights of brokers as BROKER=WEIGHT,..."""
    if str(value).strip().lower() in _SELECTORS:
        return str(value).strip().lower()
    weights = _columns(value)
    if not weights or any(not 0 <= _number(weight) <= 1e9 for _, weight in weights):
        raise ValueError(value)
    return ",".join("=".join(pair) for pair in weights)


def _addresses(value: Any) -> tuple[tuple[str, str], ...]:
    pairs = _columns(value.replace(";", ",") if isinstance(value, str) else value)
    for source, target in pairs:
        network, _, port = source.rpartition(":")
        if "/" in network:
            ip_network(network.strip("[]"), strict=False)
            source = f"any:{port}"
        if not all(host_and_port(re.sub(r":\*$", ":1", text)) for text in (source, target)):
            raise ValueError(value)
    return pairs


def _durations(value: Any) -> tuple[tuple[str, int], ...]:
    spans = tuple((name, _scaled(span, _MS_SCALES)) for name, span in _columns(value))
    if any(span < 0 for _, span in spans):
        raise ValueError(value)
    return spans


def _fault_table(value: Any) -> str:
    """Return a name of a table, or its classes as LATENCY:DURATION,... in ms, by latency."""
    text = _text(value).lower()
    if text in ("5.x", "4.x", "off"):
        return text
    pairs = [[_scaled(ms, _MS_SCALES) for ms in part.split(":")] for part in text.split(",")]
    if any(len(pair) != 2 or min(pair) < 0 for pair in pairs):
        raise ValueError(value)
    return ",".join(f"{latency}:{duration}" for latency, duration in sorted(pairs))


def _budget(value: Any) -> str:
    """Return a number of rows, a percentage of them with `%`, or an empty text: no limit."""
    text = _text(value).replace(" ", "")
    if not re.fullmatch(r"[0-9]*|([0-9]{1,2}([.][0-9]+)?|100)%", text):
        raise ValueError(value)
    return text


def _batch(value: Any) -> tuple[int, int] | None:
    """Return (delay in ms, size in bytes) of `10ms, 32KiB`; None for an empty text."""
    if not (text := _text(value)):
        return None
    delay, _, size = text.partition(",")
    return _scaled(delay, _MS_SCALES), _scaled(size or "32KiB", _BYTE_SCALES)


_BOOLEANS: Final = "false", "true"
_SELECTORS: Final = ("round_robin", "random", "weighted", "least_latency")
_UNITS: Final = {Kind.MILLISECONDS, Kind.BYTES}
_FORMS: Final[dict[Kind, tuple[Callable[[Any], Any], str]]] = {
    Kind.TEXT: (_text, "text"),
    Kind.SECRET: (Secret, "text"),
    Kind.INTEGER: (_integer, "a whole number"),
    Kind.NUMBER: (_number, "a number"),
    Kind.BOOLEAN: (_boolean, "true or false"),
    Kind.MILLISECONDS: (partial(_scaled, scales=_MS_SCALES),
                        "a duration (milliseconds, or with a unit as in 3s, 500ms, 10m)"),
    Kind.BYTES: (partial(_scaled, scales=_BYTE_SCALES),
                 "a size (bytes, or with a unit as in 512KiB, 4MiB)"),
    Kind.CHOICE: (_text, "one word"),
    Kind.INTEGERS: (lambda value: tuple(map(_integer, _parts(value))),
                    "whole numbers separated by commas"),
    Kind.COLUMNS: (_columns, "pairs of different names, as in 'body=payload, keys=order_id'"),
    Kind.ADDRESSES: (_addresses, "pairs of HOST:PORT, as in '10.1.0.0/16:*=gateway:*'"),
    Kind.SELECTOR: (_selector,
                    f"{', '.join(_SELECTORS)}, or weights of 0 to 1e9, as in 'broker-a=2, b=1'"),
    Kind.FAULT_TABLE: (_fault_table, "5.x, 4.x, off, or classes as in '50:0, 550:2s, 3s:30s'"),
    Kind.BUDGET: (_budget, "a number of rows, or a percentage of them, as in 100 or 1%"),
    Kind.BATCH: (_batch, "a delay and a size, as in '10ms, 32KiB'"),
    Kind.DURATIONS: (_durations, "durations of different names, as in 'send=7d, epoch=400d'"),
}  # fmt: skip
"""{kind: (parser of values, description of legal values for errors)}"""


def option(name: str, kind: Kind, default: Any, group: str, help: str, **more: Any) -> Any:
    """Declare a field of `SinkOptions`, or of another table of options."""
    facts = {"name": name, "kind": kind, "group": group, "help": help, **more}
    return field(default=default, metadata={_KEY: facts})


def option_of(item: Field[Any]) -> Option:
    return Option(attribute=item.name, default=item.default, **item.metadata[_KEY])


REFERENCES: Final = ("env:", "file:")
"""Prefixes of a reference to a secret in an environment variable or in a file."""


def resolve_secret(name: str, value: Secret) -> Secret:
    """Return the secret. A reference (`env:NAME`, `file:PATH`) is replaced by the variable's or the
    file's text, without white space and byte order marks around it. Call this where the secret is
    used, not earlier. Raise OptionError if the variable or file is missing or empty."""
    kind, _, where = value.reveal().partition(":")
    if not value.reveal().startswith(REFERENCES):
        return value
    if kind == "env":
        text = os.environ.get(where, "")
    else:
        try:
            text = Path(where).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise OptionError(f"option {name}: cannot read {where}: {error}", option=name) from None
    # Editors, and `export KEY=$(cat file)` on Windows, add white space and byte order marks.
    text = text.strip(string.whitespace + "\ufeff")
    if not text:
        raise OptionError(f"option {name}: {kind}:{where} is missing or empty", option=name)
    return Secret(text)
