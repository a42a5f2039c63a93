"""Heartbeats and probes of a producer that nobody uses.

A synchronous producer is driven by its callers. Between their calls a broker hears nothing of it,
drops the channel after 120 s (ClientChannelManager) and forgets the group: nothing is lost, but
`producerConnection` does not list it any more, and the next send connects anew. Java's client has
scheduled tasks for it (MQClientInstance.startScheduledTask, and
LatencyFaultToleranceImpl.startDetector for the probes of brokers that did not answer).
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable


class Keeper:
    """A daemon thread that calls `look` every now and then until that says False.

    Args:
        look: a bound method; its object is not kept alive, and the thread ends with it.
    """

    def __init__(self, look: Callable[[], bool], every_s: float) -> None:
        self._look = weakref.WeakMethod(look)
        self._every_s = every_s
        self._stop = threading.Event()
        self._started = False

    def start(self) -> None:
        """Begin; nothing the second time."""
        if self._started:
            return
        self._started = True
        # no new thread at the end of the interpreter: a last message may still be sent
        with contextlib.suppress(RuntimeError):
            threading.Thread(
                target=_keep, args=(self._look, self._stop, self._every_s),
                name="rocket-sink-heartbeat", daemon=True,
            ).start()  # fmt: skip

    def stop(self) -> None:
        self._stop.set()


def _keep(
    look: weakref.WeakMethod[Callable[[], bool]], stop: threading.Event, every_s: float
) -> None:
    while not stop.wait(every_s):
        found = look()
        if found is None or not found():
            return
        del found
