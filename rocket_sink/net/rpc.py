"""Single requests over a pump: with a callback, or waited for."""

from __future__ import annotations

from collections.abc import Callable

from rocket_sink.errors import SendError
from rocket_sink.net.pump import Pump
from rocket_sink.wire.frame import Frame


class Call:
    """One request's end, told to a function: the answer (of any code), or the error."""

    __slots__ = ("_done",)

    def __init__(self, done: Callable[[Frame | None, SendError | None, float], None]) -> None:
        self._done = done

    def on_answer(self, frame: Frame, sent_s: float | None, now_s: float) -> None:
        self._done(frame, None, now_s)

    def on_failed(self, error: SendError, now_s: float) -> None:
        self._done(None, error, now_s)


def invoke(pump: Pump, address: str, frame: Frame, timeout_s: float) -> Frame:
    """Send and wait for the answer, whatever its code.

    Raises:
        NotSentError, UnknownOutcomeError: of the connection.
    """
    ended: list[tuple[Frame | None, SendError | None]] = []
    now_s = pump.clock()
    call = Call(lambda answer, error, _: ended.append((answer, error)))
    pump.call(address, frame, call, deadline_s=now_s + timeout_s, now_s=now_s)
    while not ended:
        pump.poll(timeout_s)
    answer, error = ended[0]
    if answer is None:
        assert error is not None
        raise error
    return answer
