"""Name look-ups beside the loop: the system's resolver has no time-out that we could set.

A literal address needs none and is known at once. A name is looked up by a short-lived daemon
thread, which ends the loop's wait when it is done; what waits gives up by a deadline of its own.
Answers serve for `KEEP_S` and are dropped when no peer could be reached there, for brokers move
(apache/rocketmq#2763). One thread per name at a time, however many wait for it.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import Any, Final

KEEP_S: Final = 5.0
"""Long enough for the connections that an engine opens together, short enough to move."""


class LookUp:
    """The addresses of a name, once `done`: `targets` as `socket.getaddrinfo` gives them, or none
    and the `error`."""

    __slots__ = ("done", "error", "targets")

    def __init__(self) -> None:
        self.done = False
        self.error: OSError | None = None
        self.targets: list[Any] = []

    def run(self, host: str, port: int, flags: int = 0) -> LookUp:
        """Ask the system; blocks unless the flags say AI_NUMERICHOST."""
        try:
            self.targets = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
        except OSError as error:
            self.error = error
        except UnicodeError as error:  # a label that is empty or too long for IDNA
            self.error = OSError(str(error))
        self.done = True
        return self


class Resolver:
    """Look-ups of one loop; all but the look-up itself is done in the loop's thread.

    Args:
        wake: ends the loop's wait; called from the look-up's thread.
    """

    def __init__(
        self, wake: Callable[[], None], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._wake = wake
        self._clock = clock
        self._known: dict[tuple[str, int], tuple[LookUp, float]] = {}

    def look_up(self, host: str, port: int) -> LookUp:
        """Begun, or done when the address is literal or known from before."""
        literal = LookUp().run(host, port, socket.AI_NUMERICHOST)
        if literal.error is None:
            return literal
        key, now_s = (host, port), self._clock()
        found, since_s = self._known.get(key, (None, 0.0))
        # one under way is waited for, however long it takes already
        fresh = found is not None and now_s - since_s < KEEP_S and found.error is None
        if found is not None and (not found.done or fresh):
            return found
        begun = LookUp()
        self._known[key] = (begun, now_s)
        work = threading.Thread(
            target=self._work, args=(begun, host, port), name="rocket-sink-look-up", daemon=True
        )
        try:
            work.start()
        except RuntimeError:  # the interpreter ends
            begun.run(host, port)
        return begun

    def forget(self, host: str, port: int) -> None:
        """No peer could be reached there: ask again the next time."""
        found, _ = self._known.get((host, port), (None, 0.0))
        if found is not None and found.done:
            del self._known[host, port]

    def _work(self, begun: LookUp, host: str, port: int) -> None:
        begun.run(host, port)
        self._wake()
