"""The latency tables of both generations of MQFaultStrategy.

`latencyMax` and `notAvailableDuration` of RocketMQ 5.1.4 and later, and of 4.x (and 5.0).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final


@dataclass(frozen=True)
class FaultProfile:
    """Latency classes (ms, ascending) and how long each makes a broker unavailable (ms)."""

    name: str
    latency_max_ms: tuple[int, ...]
    not_available_ms: tuple[int, ...]
    isolation_latency_ms: int
    """The latency that stands for a failure."""
    success_resets: bool
    """4.x: any update replaces the isolation; 5.x: it can only grow."""
    better_half: bool
    """4.x: with no broker available, one of the better half; 5.x: one that is reachable."""

    def duration_ms(self, latency_ms: float, *, isolation: bool) -> int:
        """How long a request of that latency, or a failure, makes its broker unavailable."""
        latency_ms = self.isolation_latency_ms if isolation else latency_ms
        for limit, duration in zip(
            reversed(self.latency_max_ms), reversed(self.not_available_ms), strict=True
        ):
            if latency_ms >= limit:
                return duration
        return 0

    @staticmethod
    def of(
        name: str, latency_max_ms: tuple[int, ...] = (), not_available_ms: tuple[int, ...] = ()
    ) -> FaultProfile:
        """The profile "5.x" or "4.x", with other tables when they are given.

        Raises:
            KeyError: no such profile.
        """
        profile = PROFILES[name]
        if latency_max_ms:
            pairs = sorted(zip(latency_max_ms, not_available_ms, strict=True))
            profile = replace(
                profile,
                latency_max_ms=tuple(limit for limit, _ in pairs),
                not_available_ms=tuple(duration for _, duration in pairs),
            )
        return profile


PROFILES: Final = {
    "5.x": FaultProfile(
        "5.x",
        (50, 100, 550, 1800, 3000, 5000, 15000),
        (0, 0, 2000, 5000, 6000, 10000, 30000),
        isolation_latency_ms=10_000,
        success_resets=False,
        better_half=False,
    ),
    "4.x": FaultProfile(
        "4.x",
        (50, 100, 550, 1000, 2000, 3000, 15000),
        (0, 0, 30000, 60000, 120000, 180000, 600000),
        isolation_latency_ms=30_000,
        success_resets=True,
        better_half=True,
    ),
}
