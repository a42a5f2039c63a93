"""Latency fault tolerance: which brokers are isolated, and until when.

Sources: MQFaultStrategy and LatencyFaultToleranceImpl of RocketMQ 5.3 and 4.9, with their tables of
`latencyMax` and `notAvailableDuration`. A broker that is not in the table is available and
reachable. An isolation always ends by time (apache/rocketmq#7812); a failed probe extends it. The
workers of an executor may share the table (`FaultStore`); if two update the same broker at once,
one update may be lost. Times are monotonic seconds.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass, replace
from typing import Final, Protocol


@dataclass(frozen=True)
class FaultProfile:
    """Latency classes (ms, ascending) and the isolation after a latency of each class (ms)."""

    name: str
    latency_max_ms: tuple[int, ...]
    not_available_ms: tuple[int, ...]
    isolation_latency_ms: int
    """The latency that stands for a failure."""
    success_resets: bool
    """True (4.x): every update replaces the isolation. False (5.x): updates only extend it."""
    better_half: bool
    """If no broker is available, 4.x takes a broker of the better half, 5.x a reachable broker."""

    def duration_ms(self, latency_ms: float, *, isolation: bool) -> int:
        """Return the isolation (ms) for this latency; if `isolation`, for a failure instead."""
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
        """Return the profile "5.x" or "4.x", optionally with other tables.

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


TOPIC_ISOLATION_MS: Final = 30_000
"""Isolation of a topic on a broker. A route looked up in that time should omit the broker."""
EXTENSION_S: Final = 1.0
"""Shortest extension of an isolation that is reported as another event, so that a thousand requests
that fail together cause one event."""
_FORGOTTEN_S: Final = 600.0
"""Time from the end of an isolation until the entry is dropped, if no process probes the broker."""
_PAIR: Final = "\x00"
"""The separator of topic and broker in names of the store."""


@dataclass(frozen=True, slots=True)
class FaultItem:
    """The table's entry of a broker. Times are monotonic seconds."""

    broker_name: str
    latency_ms: float = 0.0
    start_s: float = 0.0
    """Time at which the isolation ends."""
    reachable: bool = True
    check_s: float = 0.0
    """Time of the next probe, while the broker is not reachable."""
    announced_s: float = 0.0
    """The end of the isolation in the last reported event."""

    def is_available(self, now_s: float) -> bool:
        """Return whether the broker is not isolated (Java: FaultItem.isAvailable)."""
        return not now_s < self.start_s  # NaN, from a broken table, is no isolation.


class FaultStore(Protocol):
    """The storage of the fault table; a write replaces a whole item."""

    def get(self, name: str) -> FaultItem | None:
        """Return the item, or None."""

    def put(self, name: str, item: FaultItem) -> None:
        """Store or replace an item. `name` is the broker's name, or topic + NUL + broker."""

    def remove(self, name: str) -> None:
        """Remove an item, if there is one."""

    def items(self) -> list[FaultItem]:
        """Return a snapshot of the items, in any order."""


class MemoryFaultStore:
    """A fault table in the memory of this process."""

    def __init__(self) -> None:
        self._items: dict[str, FaultItem] = {}

    def get(self, name: str) -> FaultItem | None:
        return self._items.get(name)

    def put(self, name: str, item: FaultItem) -> None:
        self._items[name] = item

    def remove(self, name: str) -> None:
        self._items.pop(name, None)

    def items(self) -> list[FaultItem]:
        return list(self._items.values())


@dataclass(frozen=True, slots=True)
class Isolation:
    """The event that a broker, or one topic on it, was isolated. Times are monotonic seconds."""

    broker_name: str
    cause: str
    latency_ms: float
    from_s: float
    until_s: float
    reachable: bool = True
    topic: str | None = None
    """The isolated topic; None if all topics are."""


class LatencyFaultTolerance:
    """The fault table and its rules.

    Args:
        profile: the rules and tables of RocketMQ 4.x or 5.x.
        store: the storage of the items; None: a new dictionary.
        detector: unreachable brokers are probed. Without probes no broker is marked unreachable,
            because nothing would remove the mark.
        detect_interval_ms: time between two probes of a broker by all that share the store.
    """

    def __init__(
        self,
        profile: FaultProfile = PROFILES["5.x"],
        store: FaultStore | None = None,
        *,
        detector: bool = True,
        detect_interval_ms: float = 2000,
    ) -> None:
        self.profile = profile
        self.store: FaultStore = store if store is not None else MemoryFaultStore()
        self.detector = detector
        self._interval_s = detect_interval_ms / 1000

    def update(
        self,
        name: str,
        latency_ms: float,
        now_s: float,
        *,
        isolation: bool,
        reachable: bool,
        cause: str = "",
    ) -> Isolation | None:
        """Note the end of a request to a broker; return an event if the broker is now isolated.

        Java: MQFaultStrategy.updateFaultItem. Quick successes add no entry to the table.
        """
        reachable = reachable or not self.detector
        duration_ms = self.profile.duration_ms(latency_ms, isolation=isolation)
        old = self.store.get(name)
        if old is None:
            if not duration_ms and reachable:
                return None
            old = FaultItem(name)
        start_s = old.start_s
        if self.profile.success_resets or duration_ms:
            start_s = now_s + duration_ms / 1000
            if not self.profile.success_resets:
                start_s = max(start_s, old.start_s)
        check_s = old.check_s if reachable or not old.reachable else now_s + self._interval_s
        item = replace(
            old, latency_ms=latency_ms, start_s=start_s, reachable=reachable, check_s=check_s
        )
        return self._isolate(old, item, now_s, cause or "LATENCY")

    def isolate_topic(self, topic: str, broker_name: str, now_s: float, cause: str) -> Isolation:
        """Isolate one topic on one broker, which refuses the topic."""
        name = topic + _PAIR + broker_name
        until_s = now_s + TOPIC_ISOLATION_MS / 1000
        self.store.put(name, FaultItem(name, 0.0, until_s, announced_s=until_s))
        return Isolation(broker_name, cause, 0.0, now_s, until_s, topic=topic)

    def view(self, now_s: float) -> tuple[set[str], set[str], set[tuple[str, str]]]:
        """Return the isolated brokers, the unreachable brokers, and the isolated pairs of topic and
        broker. Remove pairs whose isolation is over, because there may be many, and a shared store
        is small."""
        isolated, unreachable, pairs = set[str](), set[str](), set[tuple[str, str]]()
        for item in self.store.items():
            topic, separator, broker_name = item.broker_name.partition(_PAIR)
            available = item.is_available(now_s)
            if separator and available:
                self.store.remove(item.broker_name)
            elif separator:
                pairs.add((topic, broker_name))
            else:
                if not available:
                    isolated.add(item.broker_name)
                if not item.reachable:
                    unreachable.add(item.broker_name)
        return isolated, unreachable, pairs

    def better_half(self, names: Iterable[str], now_s: float) -> set[str]:
        """Return the better half of these brokers, at least one. Profile 4.x chooses among them if
        no broker is available.

        Java: LatencyFaultToleranceImpl.pickOneAtLeast of 4.9. In Java a dead broker counts as the
        fastest, because its connections are refused quickly; here unreachable brokers come last.
        """
        items = [self.store.get(name) or FaultItem(name) for name in names]
        items.sort(
            key=lambda i: (not i.is_available(now_s), not i.reachable, i.latency_ms, i.start_s)
        )
        return {item.broker_name for item in items[: max(len(items) // 2, 1)]}

    def remove(self, name: str) -> None:
        """Forget a broker."""
        self.store.remove(name)

    def due_for_probe(self, now_s: float, known: Container[str]) -> list[str]:
        """Return the unreachable brokers to probe now, and reserve them for this caller for one
        interval.

        Args:
            known: the brokers that this process can probe; other processes that share the table may
                know others. A broker that no process knows is forgotten after a while (Java removes
                brokers without an address).
        """
        due = []
        for item in self._items():
            if item.reachable or now_s < item.check_s:
                continue
            if item.broker_name in known:
                due.append(item)
            elif now_s >= item.start_s + _FORGOTTEN_S:
                self.remove(item.broker_name)
        for item in due:
            self.store.put(item.broker_name, replace(item, check_s=now_s + self._interval_s))
        return [item.broker_name for item in due]

    def probed(self, name: str, now_s: float, *, alive: bool) -> Isolation | None:
        """Note the result of a probe.

        A broker that answers is reachable again, and its isolation ends as planned (as in 5.x).
        Otherwise its isolation is extended beyond the next probe.
        """
        old = self.store.get(name)
        if old is None:
            return None
        if alive:
            self.store.put(name, replace(old, reachable=True))
            return None
        until_s = max(old.start_s, now_s + 2 * self._interval_s)
        item = replace(old, start_s=until_s, reachable=not self.detector)
        return self._isolate(old, item, now_s, "PROBE_FAILED")

    def items(self) -> list[FaultItem]:
        """Return the entries of brokers, by name."""
        return sorted(self._items(), key=lambda item: item.broker_name)

    def _isolate(
        self, old: FaultItem, item: FaultItem, now_s: float, cause: str
    ) -> Isolation | None:
        begins = now_s >= old.start_s
        if item.start_s <= now_s or not (begins or item.start_s >= old.announced_s + EXTENSION_S):
            self.store.put(item.broker_name, item)
            return None
        self.store.put(item.broker_name, replace(item, announced_s=item.start_s))
        return Isolation(
            item.broker_name, cause, item.latency_ms, now_s, item.start_s, item.reachable
        )

    def _items(self) -> list[FaultItem]:
        return [item for item in self.store.items() if _PAIR not in item.broker_name]
