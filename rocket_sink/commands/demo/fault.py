"""Freezes or kills one broker during the run, repairs it, and restarts others that have died."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from rocket_sink.cluster.local import LocalCluster
    from rocket_sink.cluster.node import Broker

_DOWN_S: Final = 2.0
"""Time before a dead broker is restarted, so that the sink meets the outage."""
_RESTART_TIMEOUT_S: Final = 60.0


class FaultInjector:
    """`step` is called often and acts when due.

    Args:
        fault: freeze (SIGSTOP), kill (SIGKILL) or none.
        seconds: how long the broker stays frozen or down.
        say: gets a line of text for each action.
    """

    def __init__(
        self,
        cluster: LocalCluster,
        *,
        fault: str,
        seconds: float,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster = cluster
        self._fault = fault
        self._seconds = seconds
        self._say = say
        self._clock = clock
        self._victim: Broker | None = None
        self._repair_at_s: float | None = None
        self._down_since_s: dict[str, float] = {}
        self.done = fault == "none"

    def report_to(self, say: Callable[[str], None]) -> None:
        self._say = say

    def step(self, *, due: bool) -> None:
        """Break the broker when first `due`; repair it when its time is over."""
        now_s = self._clock()
        if due and not self.done:
            self.done = True
            self._break(now_s)
        elif self._repair_at_s is not None and now_s >= self._repair_at_s:
            self.repair()
        self._restart_dead(now_s)

    def repair(self) -> None:
        """End the fault now."""
        victim, self._victim, self._repair_at_s = self._victim, None, None
        if victim is None:
            return
        if victim.alive:
            victim.thaw()
            self._say(f"{victim.name} goes on (SIGCONT)")
        else:
            self._restart(victim)

    def restart_all(self) -> None:
        """End the fault, and restart all dead brokers at once."""
        self.repair()
        for broker in self._cluster.brokers:
            if not broker.alive:
                self._restart(broker)

    def _break(self, now_s: float) -> None:
        victim = self._cluster.brokers[-1]
        if not victim.alive:
            return
        if self._fault == "freeze":
            victim.freeze()
            self._say(f"{victim.name} is frozen for {self._seconds:g} s (SIGSTOP)")
        else:
            victim.kill()
            self._say(f"{victim.name} is killed (SIGKILL) and will be down for {self._seconds:g} s")
        self._victim = victim
        self._repair_at_s = now_s + self._seconds

    def _restart_dead(self, now_s: float) -> None:
        for broker in self._cluster.brokers:
            if broker.alive or broker is self._victim:
                self._down_since_s.pop(broker.name, None)
                continue
            since_s = self._down_since_s.setdefault(broker.name, now_s)
            if since_s == now_s:
                self._say(f"{broker.name} has died")
            elif now_s - since_s >= _DOWN_S:
                self._restart(broker)

    def _restart(self, broker: Broker) -> None:
        started_s = self._clock()
        broker.restart(timeout_s=_RESTART_TIMEOUT_S)
        self._down_since_s.pop(broker.name, None)
        self._say(f"{broker.name} runs again, started in {self._clock() - started_s:.1f} s")
