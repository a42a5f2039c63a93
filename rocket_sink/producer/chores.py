"""Things to be done at a time by whoever drives the engine: no thread of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from rocket_sink.net import log

_LOG: Final = log.logger(__name__)


class Chore(Protocol):
    """`run` is called outside the driver's lock, on the leading thread, and may send."""

    def due_s(self) -> float | None:
        """When it wants to run (monotonic seconds); None: not for now."""

    def run(self, now_s: float) -> None: ...

    def flush(self) -> None:
        """The producer closes: do at once what was put off."""


class Chores:
    """The chores of one driver; an empty one costs a look at a list."""

    def __init__(self) -> None:
        self._chores: tuple[Chore, ...] = ()

    def add(self, chore: Chore) -> None:
        self._chores = (*self._chores, chore)

    def wait_s(self, wait_s: float, clock: Callable[[], float]) -> float:
        """How long the driver may wait, at most `wait_s`."""
        for chore in self._chores:
            due_s = chore.due_s()
            if due_s is not None:
                wait_s = min(wait_s, max(0.0, due_s - clock()))
        return wait_s

    def run(self, clock: Callable[[], float]) -> None:
        for chore in self._chores:
            due_s = chore.due_s()
            if due_s is not None and due_s <= clock():
                try:
                    chore.run(clock())
                except Exception:
                    _LOG.exception("a chore of the producer failed")

    def flush(self) -> None:
        for chore in self._chores:
            chore.flush()
