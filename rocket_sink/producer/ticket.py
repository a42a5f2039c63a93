"""A caller's wait for the end of his request."""

from __future__ import annotations

import threading
from collections.abc import Callable

from rocket_sink.producer.values import Completion


class Ticket:
    """Somebody's wait for one completion; the engine's token. `finish` is called once."""

    __slots__ = ("_gate", "asleep", "completion", "on_done")

    def __init__(self, on_done: Callable[[Completion], None] | None = None) -> None:
        self.completion: Completion | None = None
        self.on_done = on_done
        self.asleep = False
        self._gate: threading.Lock | None = None

    def sleep(self, timeout_s: float) -> None:
        """Until `wake`, or for so long; `asleep` was set under the driver's lock."""
        assert self._gate is not None
        self._gate.acquire(timeout=timeout_s)

    def lie_down(self) -> None:
        """Called under the driver's lock, before `sleep`."""
        self._gate = threading.Lock()
        self._gate.acquire()
        self.asleep = True

    def wake(self) -> None:
        """Called under the driver's lock."""
        if self.asleep and self._gate is not None:
            self.asleep = False
            self._gate.release()
