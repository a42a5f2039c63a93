"""The end of a measurement by a signal."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType

from rocket_sink.commands.common.base import handle_signals


class _Stopped(BaseException):
    """An exception that a signal raises in the main thread; no `except Exception` catches it."""


@dataclass
class Stop:
    """The number of the signal that ended the work; None if no signal came."""

    number: int | None = None

    @property
    def name(self) -> str:
        return signal.Signals(self.number or 0).name


@contextlib.contextmanager
def until_signal() -> Iterator[Stop]:
    """End the context at once on SIGTERM or SIGINT, without an exception; `Stop` has the signal.
    Exceptions of inner context managers are then dropped, because the signal may have ended their
    processes. A second SIGTERM is ignored (`timeout` sends two); a second Ctrl-C interrupts the
    clean-up. Main thread only."""
    stop = Stop()

    def leave(number: int, frame: FrameType | None) -> None:
        stop.number = number
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        raise _Stopped

    try:
        with handle_signals(leave):
            yield stop
    except KeyboardInterrupt:
        # A Spark session's handler of Ctrl-C had replaced `leave`, and raised KeyboardInterrupt.
        stop.number = stop.number or signal.SIGINT
    except BaseException:
        if stop.number is None:
            raise
