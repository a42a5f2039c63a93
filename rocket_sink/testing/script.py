"""Behaviours of scripted servers and of the proxy: values, rules, and their execution.

The first rule of a `Script` that matches a request decides. If no rule matches, the server answers
normally. Random generators are seeded, so that runs can be repeated."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from rocket_sink.testing.server import Connection
from rocket_sink.wire.codes import RequestCode, ResponseCode
from rocket_sink.wire.frame import encode_frame
from rocket_sink.wire.headers import Frame, response_to

Predicate = Callable[[Frame], bool]
SEND_CODES = frozenset(
    {RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE, RequestCode.SEND_REPLY_MESSAGE_V2}
)


_DEGRADED = (10, 11, 12)


def is_send(frame: Frame) -> bool:
    return frame.code in SEND_CODES


@dataclass(frozen=True)
class Behaviour:
    """Base of all behaviours. `stores` says whether the message of a send is stored, even if the
    client gets no answer or a wrong one."""

    stores: bool = field(default=True, kw_only=True)

    @property
    def keeps_message(self) -> bool:
        """Whether a send with this behaviour is stored."""
        return self.stores


@dataclass(frozen=True)
class Answer(Behaviour):
    """Answer with this response code and remark, and store nothing unless `stores=True`.

    With the codes 10, 11 and 12 (degraded) the message is stored, as in real brokers."""

    code: int
    remark: str = ""
    ext: tuple[tuple[str, str], ...] = ()
    stores: bool = field(default=False, kw_only=True)

    @property
    def keeps_message(self) -> bool:
        return self.stores or self.code in _DEGRADED


@dataclass(frozen=True)
class Delay(Behaviour):
    """Answer `ms` milliseconds later; other requests are answered meanwhile."""

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
    """Send the answer byte by byte, one in `ms_per_byte`."""

    ms_per_byte: float


@dataclass(frozen=True)
class Garbage(Behaviour):
    """Send these bytes instead of an answer."""

    data: bytes = b"HTTP/1.1 400 Bad Request\r\n\r\n"


@dataclass(frozen=True)
class IncompleteAnswer(Behaviour):
    """Answer SUCCESS without queue offset and message id."""


@dataclass
class _Rule:
    behaviour: Behaviour
    matches: Predicate
    times: int | None
    chance: float


class Script:
    """The rules of one server. Thread-safe."""

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
        """Add a rule for the next `times` matching requests (None: all), each with this chance."""
        if times == 0:
            return
        with self._lock:
            self._rules.append(_Rule(behaviour, matches, times, chance))

    def clear(self) -> None:
        with self._lock:
            self._rules.clear()

    def decide(self, request: Frame) -> Behaviour | None:
        """Return the behaviour for this request; None if the server shall answer normally."""
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


class Scripted:
    """A server with a script."""

    def __init__(self, seed: int) -> None:
        self.script = Script(seed)

    def on_send(self, behaviour: Behaviour, *, times: int | None = 1, chance: float = 1.0) -> None:
        """Apply a behaviour to the next `times` sends (None: all), each with this chance."""
        self.script.add(behaviour, matches=is_send, times=times, chance=chance)

    def on(self, code: int, behaviour: Behaviour, *, times: int | None = 1) -> None:
        """Apply a behaviour to the next `times` requests of this code."""
        self.script.add(behaviour, matches=lambda frame: frame.code == code, times=times)

    def behave(self) -> None:
        """Remove all behaviours."""
        self.script.clear()


def perform(client: Connection, behaviour: Behaviour | None, answer: Frame) -> None:
    """Execute a behaviour; `answer` is the normal answer, which None sends."""
    data = encode_frame(answer)
    match behaviour:
        case None:
            client.send(data)
        case Answer(code=code, remark=remark, ext=ext):
            fields = dict(ext) or (answer.ext if code in _DEGRADED else None)
            client.send(
                encode_frame(replace(answer, code=code, remark=remark, ext=fields, body=None))
            )
        case Delay(ms=ms):
            client.after(ms / 1000, lambda: client.send(data))
        case Twice():
            client.send(data + data)
        case WrongOpaque():
            client.send(encode_frame(replace(answer, opaque=answer.opaque + 1_000_000)))
        case CloseConnection():
            client.reset()
        case CutAnswer(at_byte=at_byte):
            client.send(data[:at_byte])
            client.drop()
        case Drip(ms_per_byte=ms):
            client.drip(data, ms / 1000)
        case Garbage(data=garbage):
            client.send(garbage)
        case IncompleteAnswer():
            client.send(encode_frame(replace(answer, ext={}, body=None)))
        case _:
            pass  # Drop


def unsupported(request: Frame) -> Frame:
    """Return the answer to a request that the server does not know."""
    return response_to(
        request,
        ResponseCode.REQUEST_CODE_NOT_SUPPORTED,
        remark=f" request type {request.code} not supported",
    )
