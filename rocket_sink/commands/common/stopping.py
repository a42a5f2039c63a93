"""SIGTERM and SIGINT as an orderly end of work that runs in the main thread."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType


class _Stopped(BaseException):
    """Raised in the main thread by a signal; no `except Exception` keeps it."""


@dataclass
class Stop:
    """The signal that ended the work; None: it came to its own end."""

    number: int | None = None

    @property
    def name(self) -> str:
        """SIGTERM, SIGINT."""
        return signal.Signals(self.number or 0).name


@contextlib.contextmanager
def until_signal() -> Iterator[Stop]:
    """Leave the context at once on SIGTERM or SIGINT; `Stop` tells which, nothing is raised.

    What the work's own context managers raise while they close is dropped then: a process group's
    signal has ended their processes as well. A second SIGTERM changes nothing (`timeout` sends
    two), a second Ctrl-C ends the closing. Main thread only.
    """
    stop = Stop()

    def leave(number: int, frame: FrameType | None) -> None:
        stop.number = number
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        raise _Stopped

    earlier = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    except KeyboardInterrupt:
        # Spark installs a handler of its own, which raises this
        stop.number = stop.number or signal.SIGINT
    except BaseException:
        if stop.number is None:
            raise
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
