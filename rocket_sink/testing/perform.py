"""A behaviour acted out on one connection, whoever serves it: a scripted server or the proxy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from rocket_sink.testing import script
from rocket_sink.testing.script import Behaviour
from rocket_sink.wire.command import Frame
from rocket_sink.wire.frame import encode_frame

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
