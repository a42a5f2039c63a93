"""Latency fault tolerance: which brokers are isolated, for which cause, and until when.

Sources: MQFaultStrategy and LatencyFaultToleranceImpl of RocketMQ 5.3 and 4.9, with their tables of
`latencyMax` and `notAvailableDuration` (here `faultTable`). Java knows one isolation per broker,
whatever its cause. If all brokers are isolated, Java 5.3 therefore sends to a failing broker as
often as to a slow one. Here each cause has its own end, and the worst cause that has not ended
gives the broker's rank.

A broker without an entry in the fault table is available and reachable. Every isolation has an end
(apache/rocketmq#7812); a failed probe moves the end. Workers of an executor may share the table
(`FaultStore`): if two update a broker at once, one update may be lost. Times are monotonic
seconds."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Collection, Container
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

FAR: Final = 1
"""The broker is in another machine room, or has the weight 0. This is no fault."""
SUSPECT: Final = 2
"""A request to the broker has been unanswered for longer than usual."""
SLOW: Final = 4
"""The broker is isolated because it stored a message late."""
BUSY: Final = 8
"""The broker is isolated because it said that it is busy."""
FAILING: Final = 16
"""The broker is isolated because it failed in another way: it refused a message, or did not answer
in time, or lost the connection."""
SILENT: Final = 32
"""The broker does not answer heartbeats: it is frozen, or cut off."""
LAST: Final = 64
"""The request's previous attempt failed at the broker."""
UNREACHABLE: Final = 128
"""The broker is isolated, and nothing has answered at its address since."""
# A broker's rank is the sum of the constants that apply, so the largest constant decides. The table
# in docs/guarantees/brokers.md has the same order.


@dataclass(frozen=True)
class FaultProfile:
    """For how long a broker is isolated, by the latency of an answer.

    Attributes:
        classes: (latency, isolation after a latency from this one on) in ms, by latency.
    """

    classes: tuple[tuple[int, int], ...]
    isolation_latency_ms: int
    """A failed request is treated like an answer with this latency."""
    success_resets: bool
    """True (4.x): each update replaces the isolation, so a quick success ends it. False (5.x): an
    update can only extend it."""

    def duration_ms(self, latency_ms: float, *, isolation: bool) -> int:
        """Return for how many ms to isolate a broker after an answer with this latency. If the
        request failed (`isolation`), `isolation_latency_ms` replaces the latency."""
        latency_ms = self.isolation_latency_ms if isolation else latency_ms
        place = bisect_right(self.classes, (latency_ms, math.inf))
        return self.classes[place - 1][1] if place else 0

    @property
    def isolates_from_ms(self) -> float:
        """The lowest latency that isolates a broker."""
        return min((limit for limit, duration in self.classes if duration), default=math.inf)

    @staticmethod
    def of(table: str) -> FaultProfile:
        """Return the profile of a value of `faultTable`: that of 4.x, or of 5.x with the table."""
        return PROFILES.get(table) or replace(PROFILES["5.x"], classes=_classes(table))

    @property
    def table(self) -> str:
        """The latency classes as a value of `faultTable`."""
        return ",".join(f"{latency}:{duration}" for latency, duration in self.classes)


def _classes(table: str) -> tuple[tuple[int, int], ...]:
    pairs = (pair.partition(":") for pair in table.split(","))
    return tuple((int(latency), int(duration)) for latency, _, duration in pairs)


PROFILES: Final = {
    "5.x": FaultProfile(
        _classes("50:0,100:0,550:2000,1800:5000,3000:6000,5000:10000,15000:30000"),
        isolation_latency_ms=10_000,
        success_resets=False,
    ),
    "4.x": FaultProfile(
        _classes("50:0,100:0,550:30000,1000:60000,2000:120000,3000:180000,15000:600000"),
        isolation_latency_ms=30_000,
        success_resets=True,
    ),
}


TOPIC_ISOLATION_MS: Final = 30_000
"""Isolation of a topic on a broker, which gives time to look up a route without the broker."""
EXTENSION_S: Final = 1.0
"""Shortest extension that makes another event, so that a thousand failures at once make one."""
PROBE_INTERVAL_S: Final = 2.0
"""Time between probes of a broker by all processes that share the table (Java: detectInterval)."""
_FORGOTTEN_S: Final = 600.0
"""Time after an isolation until an unreachable broker that no process probes is removed."""
_EVENTS_MAX: Final = 10_000
_PAIR: Final = "\x00"
"""Separates topic and broker in the name of a topic's entry."""


@dataclass(frozen=True, slots=True)
class FaultItem:
    """An entry of the fault table, for a broker or for a topic on a broker. Each cause has the end
    of its isolation."""

    broker_name: str
    latency_ms: float = 0.0
    slow_until_s: float = 0.0
    busy_until_s: float = 0.0
    failing_until_s: float = 0.0
    reachable: bool = True
    check_s: float = 0.0
    """The time of the next probe while the broker is unreachable."""
    announced_s: float = 0.0
    """The end of the isolation as the last event reported it."""

    @property
    def until_s(self) -> float:
        """The end of the isolation (Java: startTimestamp, the start of availability)."""
        return max(self.slow_until_s, self.busy_until_s, self.failing_until_s)

    def rank(self, now_s: float) -> int:
        """Return the rank by the worst cause that has not ended; 0 if the broker is available. A
        broken table may have NaN as an end: the broker is available then."""
        rank = 0
        if now_s < self.slow_until_s:
            rank = SLOW
        if now_s < self.busy_until_s:
            rank = BUSY
        if now_s < self.failing_until_s:
            rank = FAILING
        return rank if self.reachable or not rank else UNREACHABLE


_END_OF: Final = {SLOW: "slow_until_s", BUSY: "busy_until_s", FAILING: "failing_until_s"}
"""{rank: the field of `FaultItem` with the end of the isolation for this cause}"""


class FaultStore(Protocol):
    """The part of dict that the fault table uses: {broker name, or topic + NUL + broker: item}."""

    def get(self, name: str, /) -> FaultItem | None: ...

    def __setitem__(self, name: str, item: FaultItem, /) -> None: ...

    def pop(self, name: str, default: None, /) -> object: ...

    def values(self) -> Collection[FaultItem]: ...


@dataclass(frozen=True, slots=True)
class Isolation:
    """An event: a broker, or one topic on it, was isolated. Times are monotonic seconds."""

    broker_name: str
    cause: str
    latency_ms: float
    from_s: float
    until_s: float
    reachable: bool = True
    topic: str | None = None
    """The isolated topic; None for all topics."""


class FaultTable:
    """The fault table and its rules (Java: LatencyFaultToleranceImpl).

    Attributes:
        events: isolations that nobody has taken yet; the last `_EVENTS_MAX` of them.
        stale_s: the time at which readers read `ranks` again; they set it, and each event resets it
            to the past.

    Args:
        store: the storage of the table; None: a new dictionary.
        enabled: whether brokers are isolated at all.
    """

    def __init__(
        self,
        profile: FaultProfile = PROFILES["5.x"],
        store: FaultStore | None = None,
        *,
        enabled: bool = True,
    ) -> None:
        self.profile = profile
        self.store: FaultStore = dict[str, FaultItem]() if store is None else store
        self.events: deque[Isolation] = deque(maxlen=_EVENTS_MAX)
        self.stale_s = float("-inf")
        self.enabled = enabled
        self.notable_ms = profile.isolates_from_ms
        """Latency from which a stored message isolates its broker."""

    def update(
        self,
        name: str,
        latency_ms: float,
        now_s: float,
        *,
        rank: int,
        reachable: bool = True,
        cause: str = "LATENCY",
    ) -> Isolation | None:
        """Enter the result of a request to a broker (Java: MQFaultStrategy.updateFaultItem). Return
        an event if the broker's rank becomes worse, or its isolation longer by EXTENSION_S or more.

        Args:
            rank: SLOW for a message that was stored, however quickly; BUSY or FAILING for a
                failure, which is isolated like an answer of `isolation_latency_ms`.
        """
        if not self.enabled:
            return None
        duration_ms = self.profile.duration_ms(latency_ms, isolation=rank != SLOW)
        old = self.store.get(name)
        if old is None:
            if not duration_ms and reachable:
                return None
            old = FaultItem(name)
        until_s = now_s + duration_ms / 1000 if duration_ms else 0.0
        ends: dict[str, Any]
        if self.profile.success_resets:
            ends = {**dict.fromkeys(_END_OF.values(), 0.0), _END_OF[rank]: until_s}
        else:
            ends = {_END_OF[rank]: max(until_s, getattr(old, _END_OF[rank]))}
        check_s = now_s + PROBE_INTERVAL_S if old.reachable else old.check_s
        item = replace(old, latency_ms=latency_ms, reachable=reachable, check_s=check_s, **ends)
        return self._isolate(old, item, now_s, cause)

    def isolate_topic(self, topic: str, broker_name: str, now_s: float, cause: str) -> None:
        """Isolate one topic on a broker that refuses the topic."""
        if not self.enabled:
            return
        name = entry_name(topic, broker_name)
        until_s = now_s + TOPIC_ISOLATION_MS / 1000
        self.store[name] = FaultItem(name, failing_until_s=until_s, announced_s=until_s)
        self._announce(Isolation(broker_name, cause, 0.0, now_s, until_s, topic=topic))

    def ranks(self, now_s: float) -> dict[str, int]:
        """Return {entry's name (`entry_name`): rank} of the brokers that are isolated or
        unreachable, and of the topics that are isolated on a broker. Remove topics whose isolation
        is over, so that they do not fill a shared store."""
        ranks: dict[str, int] = {}
        if not self.enabled:
            return ranks
        for item in list(self.store.values()):
            rank = item.rank(now_s)
            if rank or not item.reachable:
                ranks[item.broker_name] = rank
            elif _PAIR in item.broker_name:
                self.store.pop(item.broker_name, None)
        return ranks

    def due_for_probe(self, now_s: float, known: Container[str]) -> list[str]:
        """Return the unreachable brokers, of the `known` ones, that the caller must probe now.
        Other processes leave these to the caller for one interval. A broker that no process knows
        is removed after `_FORGOTTEN_S`."""
        due = []
        for item in self.items():
            if item.reachable or now_s < item.check_s:
                continue
            if item.broker_name in known:
                due.append(item)
            elif now_s >= item.until_s + _FORGOTTEN_S:
                self.store.pop(item.broker_name, None)
        for item in due:
            self.store[item.broker_name] = replace(item, check_s=now_s + PROBE_INTERVAL_S)
        return [item.broker_name for item in due]

    def note_probe(self, name: str, now_s: float, *, alive: bool) -> Isolation | None:
        """Enter the result of a probe; return an event like `update`. A broker that answers is
        reachable again, and its isolation ends as planned (as in 5.x). Otherwise the isolation is
        extended beyond the next probe."""
        old = self.store.get(name)
        if old is None:
            return None
        if alive:
            self.store[name] = replace(old, reachable=True)
            return None
        until_s = max(old.until_s, now_s + 2 * PROBE_INTERVAL_S)
        item = replace(old, failing_until_s=until_s, reachable=False)
        return self._isolate(old, item, now_s, "PROBE_FAILED")

    def items(self) -> list[FaultItem]:
        """Return the entries of brokers, sorted by name."""
        brokers = (item for item in self.store.values() if _PAIR not in item.broker_name)
        return sorted(brokers, key=lambda item: item.broker_name)

    def _isolate(
        self, old: FaultItem, item: FaultItem, now_s: float, cause: str
    ) -> Isolation | None:
        begins = item.rank(now_s) > old.rank(now_s)
        if item.until_s <= now_s or not (begins or item.until_s >= old.announced_s + EXTENSION_S):
            self.store[item.broker_name] = item
            return None
        self.store[item.broker_name] = replace(item, announced_s=item.until_s)
        return self._announce(
            Isolation(item.broker_name, cause, item.latency_ms, now_s, item.until_s, item.reachable)
        )

    def _announce(self, event: Isolation) -> Isolation:
        """Keep an event, and make readers of the table read it again at once."""
        self.events.append(event)
        self.stale_s = float("-inf")
        return event


def entry_name(topic: str, broker_name: str) -> str:
    """Return the name of a topic's entry for one broker."""
    return topic + _PAIR + broker_name
