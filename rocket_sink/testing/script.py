"""What a scripted broker or name server does with a request, as values.

A `Script` holds rules in the order in which they were added; the first one that matches a request
and is not used up decides, and without one the server behaves well. Chance comes from a seeded
generator, so that a run can be repeated.

A behaviour acted out on one connection, whoever serves it: a scripted server or the proxy.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from rocket_sink.testing import script
from rocket_sink.wire.codes import RequestCode
from rocket_sink.wire.frame import encode_frame
from rocket_sink.wire.headers.command import Frame

Predicate = Callable[[Frame], bool]
SEND_CODES = frozenset(
    {RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE, RequestCode.SEND_REPLY_MESSAGE_V2}
)


def is_send(frame: Frame) -> bool:
    """The request has something to store."""
    return frame.code in SEND_CODES


@dataclass(frozen=True)
class Behaviour:
    """Base of all behaviours.

    `stores`: whether a send is put into the store although the sender may hear otherwise; that is
    what makes an outcome unknown.
    """

    stores: bool = field(default=True, kw_only=True)


@dataclass(frozen=True)
class Answer(Behaviour):
    """Answer with this response code and remark, and store nothing unless `stores=True`.

    Codes 10, 11 and 12 (degraded) do store, as real brokers do.
    """

    code: int
    remark: str = ""
    ext: tuple[tuple[str, str], ...] = ()
    stores: bool = field(default=False, kw_only=True)


@dataclass(frozen=True)
class Delay(Behaviour):
    """Behave well, but answer `ms` later; other requests are answered meanwhile."""

    ms: float


@dataclass(frozen=True)
class Drop(Behaviour):
    """Never answer."""


@dataclass(frozen=True)
class Twice(Behaviour):
    """Answer twice with the same opaque id."""


@dataclass(frozen=True)
class WrongOpaque(Behaviour):
    """Answer with an opaque id that the client never used."""


@dataclass(frozen=True)
class CloseConnection(Behaviour):
    """Close the connection (RST) instead of answering."""


@dataclass(frozen=True)
class CutAnswer(Behaviour):
    """Send the first `at_byte` bytes of the answer, then close the connection."""

    at_byte: int


@dataclass(frozen=True)
class Drip(Behaviour):
    """Send the answer byte by byte, `ms_per_byte` apart."""

    ms_per_byte: float


@dataclass(frozen=True)
class Garbage(Behaviour):
    """Send these bytes instead of an answer."""

    data: bytes = b"HTTP/1.1 400 Bad Request\r\n\r\n"


@dataclass(frozen=True)
class IncompleteAnswer(Behaviour):
    """Say success without queue offset and message id."""


@dataclass
class _Rule:
    behaviour: Behaviour
    matches: Predicate
    times: int | None
    chance: float


class Script:
    """Rules for one server; safe to change while it runs."""

    def __init__(self, seed: int = 0) -> None:
        self._rules: list[_Rule] = []
        self._random = random.Random(seed)
        self._lock = threading.Lock()

    def add(
        self,
        behaviour: Behaviour,
        *,
        matches: Predicate,
        times: int | None = 1,
        chance: float = 1.0,
    ) -> None:
        """Add a rule for the next `times` matching requests (None: all), each with `chance`."""
        with self._lock:
            self._rules.append(_Rule(behaviour, matches, times, chance))

    def clear(self) -> None:
        """Behave well from now on."""
        with self._lock:
            self._rules.clear()

    def decide(self, request: Frame) -> Behaviour | None:
        """The behaviour for this request; None: behave well."""
        with self._lock:
            for rule in self._rules:
                if not rule.matches(request) or self._random.random() >= rule.chance:
                    continue
                if rule.times is not None:
                    rule.times -= 1
                    if rule.times == 0:
                        self._rules.remove(rule)
                return rule.behaviour
        return None


_DEGRADED = (10, 11, 12)


class Line(Protocol):
    """A connection to a client."""

    def send(self, data: bytes) -> None:
        """Bytes for the client, in order."""

    def reset(self) -> None:
        """Close with RST."""

    def drop(self) -> None:
        """Close after what was sent."""

    def after(self, seconds: float, function: Callable[[], None]) -> None:
        """Call it then; others are served meanwhile."""


def perform(line: Line, behaviour: Behaviour, answer: Frame) -> None:
    """Do to the client what the behaviour says, `answer` being the good one."""
    data = encode_frame(answer)
    match behaviour:
        case script.Answer(code=code, remark=remark, ext=ext):
            fields = dict(ext) or (answer.ext if code in _DEGRADED else None)
            line.send(
                encode_frame(replace(answer, code=code, remark=remark, ext=fields, body=None))
            )
        case script.Delay(ms=ms):
            line.after(ms / 1000, lambda: line.send(data))
        case script.Twice():
            line.send(data + data)
        case script.WrongOpaque():
            line.send(encode_frame(replace(answer, opaque=answer.opaque + 1_000_000)))
        case script.CloseConnection():
            line.reset()
        case script.CutAnswer(at_byte=at_byte):
            line.send(data[:at_byte])
            line.drop()
        case script.Drip(ms_per_byte=ms):
            _drip(line, data, ms / 1000)
        case script.Garbage(data=garbage):
            line.send(garbage)
        case script.IncompleteAnswer():
            line.send(encode_frame(replace(answer, ext={}, body=None)))
        case _:
            pass  # Drop: no answer, ever


def _drip(line: Line, data: bytes, seconds_per_byte: float) -> None:
    line.send(data[:1])
    if data := data[1:]:
        line.after(seconds_per_byte, lambda: _drip(line, data, seconds_per_byte))


def stores(behaviour: Behaviour) -> bool:
    """A send that is treated so is stored all the same."""
    if isinstance(behaviour, script.Answer) and behaviour.code in _DEGRADED:
        return True
    return behaviour.stores
