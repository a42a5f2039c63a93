"""A replay of recorded attempts through a fault table with other thresholds.

Each host has a table. An attempt whose broker is isolated when it starts goes to the broker that
was quickest last and is not isolated; it takes as long as that broker's last answer, and the
request's later recorded attempts are left out. Isolations end by time alone, as they do without a
detector. The record cannot say how slow a broker would have been for requests that avoided it, or
how the moved load would have slowed other brokers.
"""

from __future__ import annotations

import heapq
from typing import Final, NamedTuple

import numpy as np

from rocket_sink.ledger.sql import GROUP_SHARES
from rocket_sink.ledger.tune.attempts import Attempts
from rocket_sink.routing.fault import FaultProfile, LatencyFaultTolerance

_FRESH_S: Final = 60.0
"""Largest age of a broker's last answer for a move to it."""
_NONE: Final = (0.0, 0)


class Replayed(NamedTuple):
    """The result of a profile for the recorded attempts. `isolations` counts those of all hosts,
    and `isolated_s` sums their lengths. `moved` and `unsent` (last attempt failed) count messages.
    `latency_ms` has those of all other messages, ascending; `weight` is the number of messages up
    to each."""

    isolations: int
    isolated_s: float
    moved: int
    unsent: int
    latency_ms: np.ndarray
    weight: np.ndarray

    def percentile(self, share: float) -> float | None:
        """Return the latency (ms) that a share of the messages did not exceed; None without
        messages."""
        if not len(self.weight) or not self.weight[-1]:
            return None
        return float(self.latency_ms[np.searchsorted(self.weight, share * self.weight[-1])])


class _Ended(NamedTuple):
    at_s: float
    number: int
    host: int
    broker: int
    latency_ms: float
    isolates: bool


class _Tables:
    """The fault tables of the hosts, and the isolations that they begin."""

    def __init__(self, attempts: Attempts, profile: FaultProfile) -> None:
        self._names = attempts.brokers
        self._tables = [LatencyFaultTolerance(profile, detector=False) for _ in attempts.hosts]
        self._until_s: dict[tuple[int, int], float] = {}
        self.isolations = 0
        self.isolated_s = 0.0

    def available(self, host: int, broker: int, at_s: float) -> bool:
        return at_s >= self._until_s.get((host, broker), 0.0)

    def ended(self, one: _Ended) -> None:
        event = self._tables[one.host].update(
            self._names[one.broker], one.latency_ms, one.at_s, isolation=one.isolates,
            reachable=True,
        )  # fmt: skip
        if event is None:
            return
        before_s = self._until_s.get((one.host, one.broker), 0.0)
        self.isolations += one.at_s >= before_s
        self.isolated_s += max(0.0, event.until_s - max(one.at_s, before_s))
        self._until_s[one.host, one.broker] = event.until_s


def replay(attempts: Attempts, profile: FaultProfile | None) -> Replayed:
    """Replay the attempts under a profile; None: as they were recorded."""
    tables = None if profile is None else _Tables(attempts, profile)
    in_flight: list[_Ended] = []
    last_good: dict[int, tuple[float, float]] = {}
    moved_requests: set[int] = set()
    failed: dict[int, tuple[float, int]] = {}
    """{request whose attempts failed so far: (duration in ms, messages)}"""
    latencies: list[float] = []
    weights: list[float] = []
    moved = 0
    columns = zip(
        *(
            getattr(attempts, name).tolist()
            for name in ("start_s", "wait_ms", "rtt_ms", "group_ms", "messages", "frames",
                         "broker", "host", "stored", "isolates", "request")
        ), strict=True,
    )  # fmt: skip
    for number, (start_s, wait_ms, rtt_ms, group_ms, messages, frames, broker, host, stored,
                 isolates, request) in enumerate(columns):  # fmt: skip
        while in_flight and in_flight[0].at_s <= start_s:
            attempt = heapq.heappop(in_flight)
            if tables is not None:
                tables.ended(attempt)
            if not attempt.isolates:
                last_good[attempt.broker] = (attempt.at_s, attempt.latency_ms)
        if request in moved_requests:
            continue
        if tables is not None and not tables.available(host, broker, start_s):
            other = _quickest(tables, host, broker, start_s, last_good)
            if other is not None:
                rtt_ms = last_good[other][1]
                latencies.append(failed.pop(request, _NONE)[0] + wait_ms + rtt_ms)
                weights.append(messages)
                moved += messages
                moved_requests |= {request} - {-1}
                at_s = start_s + (wait_ms + rtt_ms) / 1000
                heapq.heappush(in_flight, _Ended(at_s, number, host, other, rtt_ms, False))
                continue
        at_s = start_s + (wait_ms + rtt_ms) / 1000
        heapq.heappush(in_flight, _Ended(at_s, number, host, broker, rtt_ms, isolates))
        if not stored:
            before = failed.get(request, _NONE)[0]
            failed[request] = (before + wait_ms + rtt_ms, messages)
            continue
        before = failed.pop(request, _NONE)[0] + wait_ms
        if frames > 1 and group_ms[0] == group_ms[0]:
            latencies += [before + ms for ms in (*group_ms, rtt_ms)]
            weights += [messages * share for _, share in GROUP_SHARES]
        else:
            latencies.append(before + rtt_ms)
            weights.append(messages)
    order = np.argsort(latencies, kind="stable")
    return Replayed(
        isolations=tables.isolations if tables else 0,
        isolated_s=tables.isolated_s if tables else 0.0,
        moved=moved,
        unsent=sum(messages for _, messages in failed.values()),
        latency_ms=np.asarray(latencies, "float64")[order],
        weight=np.cumsum(np.asarray(weights, "float64")[order]),
    )


def _quickest(
    tables: _Tables, host: int, broker: int, at_s: float, last_good: dict[int, tuple[float, float]]
) -> int | None:
    fresh = [
        (latency_ms, other)
        for other, (answered_s, latency_ms) in last_good.items()
        if other != broker and answered_s >= at_s - _FRESH_S and tables.available(host, other, at_s)
    ]
    return min(fresh)[1] if fresh else None
