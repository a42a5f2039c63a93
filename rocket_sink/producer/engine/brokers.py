"""What the engine knows of its brokers right now: load, usual latency, suspicion, isolation.

Suspicion comes long before anything is given up: a broker with a request unanswered for longer
than `suspectAfterMs` (and than its own usual latency explains, or that gives no other sign of life)
gets no new requests while another will do. A request that was written keeps waiting for its
attempt's deadline: an early retry would duplicate messages at every pause of a broker's garbage
collector.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from rocket_sink.message import MessageQueue
from rocket_sink.options import SinkOptions
from rocket_sink.producer.engine.shared_state import SharedBrokerState
from rocket_sink.routing.fault import FaultProfile, Isolation, LatencyFaultTolerance
from rocket_sink.routing.rate_limit import AimdWindow
from rocket_sink.routing.topic_publish_info import TopicPublishInfo
from rocket_sink.wire.connection import HEARD_RECENTLY_S

if TYPE_CHECKING:
    from rocket_sink.net.channel import Channel

VIEW_S: Final = 0.02
"""Age at which the isolated brokers are read again from the (shared) table."""
FREE_IN_FLIGHT: Final = 16
"""Requests that a broker may have in flight however quick the others are."""
LOAD_FACTOR: Final = 1.25
"""Beyond that, so many times the others' mean: a broker that stops answering cannot collect the
whole window before it is even suspect."""
_DEVIATIONS: Final = 4.0
_EVENTS_MAX: Final = 10_000
_SUSPECT_MAX_S: Final = 3.0


class Broker:
    """Load and latency of one broker; smoothed as in RFC 6298."""

    __slots__ = (
        "deviation_s", "in_flight", "latency_s", "name", "silent", "stored_sent_s", "suspect",
        "window",
    )  # fmt: skip

    def __init__(self, name: str) -> None:
        self.name = name
        self.in_flight = 0
        self.latency_s = 0.0
        self.deviation_s = 0.0
        self.stored_sent_s = 0.0
        """When the latest of the requests that it has stored was written."""
        self.suspect = False
        self.silent = False
        """Suspect, and it gives no sign of life when it is asked for one: frozen, or cut off."""
        self.window: AimdWindow | None = None
        """Set from the first busy answer until it has grown to the engine's own."""

    def room_for(self, requests: int, taken: int = 0) -> int:
        """As `AimdWindow.room_for`, behind others for which `taken` places are; all without one."""
        if self.window is None:
            return requests
        return self.window.room_for(requests, self.in_flight + taken)

    def busy(self, sent_s: float, now_s: float) -> None:
        """It has said that it is busy, to a request that is still counted as in flight."""
        if self.window is None:
            self.window = AimdWindow(self.in_flight, now_s)
        else:
            self.window.busy(sent_s, self.in_flight, now_s)

    def stored(self, whole: int, requests: int = 1) -> None:
        """It has stored requests; a window as large as `whole` is none any more."""
        for _ in range(requests):
            if self.window is None:
                return
            self.window.stored()
            if self.window.limit >= whole:
                self.window = None

    def measure(self, rtt_s: float) -> None:
        if not self.latency_s:
            self.latency_s, self.deviation_s = rtt_s, rtt_s / 2
            return
        difference = rtt_s - self.latency_s
        self.latency_s += difference * 0.125
        self.deviation_s += (abs(difference) - self.deviation_s) * 0.25

    def suspect_after_s(self, floor_s: float) -> float:
        usual_s = self.latency_s + _DEVIATIONS * self.deviation_s
        return max(floor_s, min(usual_s, _SUSPECT_MAX_S))


class SendTarget(NamedTuple):
    """Where a request goes: `home` is the real broker (a static topic's queue names a logical
    one), `address` its master's, empty when there is none."""

    queue: MessageQueue
    home: str
    address: str
    broker: Broker


@dataclass(frozen=True, slots=True)
class BrokerHealth:
    """What a producer knows of one broker at one moment.

    Attributes:
        available: it is not isolated; `available_in_ms`: how long it still is.
        reachable: something answered there last, or a probe has since.
        suspect: a request waits there for longer than is usual; no new ones go there while
            another broker will do.
        latency_ms: smoothed write-to-answer; 0 when nothing was answered yet.
        in_flight: requests sent there and not answered.
    """

    broker_name: str
    available: bool
    available_in_ms: float
    reachable: bool
    suspect: bool
    latency_ms: float
    in_flight: int


class Brokers:
    """All brokers of an engine, with the fault table. Routing's `Load`."""

    def __init__(self, options: SinkOptions, shared: SharedBrokerState) -> None:
        profile = FaultProfile.of(
            options.fault_profile, options.latency_max_ms, options.not_available_duration_ms
        )
        self.enabled = options.latency_fault_enable
        self.table = LatencyFaultTolerance(
            profile,
            shared,
            detector=options.start_detector_enable,
            detect_interval_ms=options.detect_interval_ms,
        )
        self.total_in_flight = 0
        self.events: deque[Isolation] = deque(maxlen=_EVENTS_MAX)
        """Until they are taken, which no caller has to."""
        self.versions: dict[str, tuple[Channel | None, int]] = {}
        """MQVersion ordinals by address, from the answers to heartbeats (brokerVersionTable), each
        with its connection: later there may be another broker at the address."""
        self._floor_s = options.suspect_after_ms / 1000
        self._brokers: dict[str, Broker] = {}
        self._notable_ms = min(
            (limit for limit, duration in zip(
                profile.latency_max_ms, profile.not_available_ms, strict=True) if duration),
            default=float("inf"),
        )  # fmt: skip
        self._isolated: Set[str] = frozenset()
        self._unreachable: Set[str] = frozenset()
        self._pairs: Set[tuple[str, str]] = frozenset()
        self._viewed_s = float("-inf")
        self.any_suspect = False
        self.all_well = True
        """None is isolated, unreachable or under suspicion."""

    def of(self, name: str) -> Broker:
        broker = self._brokers.get(name)
        if broker is None:
            broker = self._brokers[name] = Broker(name)
        return broker

    def target(self, info: TopicPublishInfo, queue: MessageQueue) -> SendTarget:
        """Where requests for a queue of the route go."""
        home = info.broker_of(queue)
        return SendTarget(queue, home, info.masters.get(home, ""), self.of(home))

    def release(self, broker: Broker, requests: int = 1) -> None:
        """They are not in flight there any more."""
        broker.in_flight -= requests
        self.total_in_flight -= requests

    # --- routing's Load ----------------------------------------------------------------------

    def latency_ms(self, broker_name: str) -> float:
        return self.of(broker_name).latency_s * 1000

    def in_flight(self, broker_name: str) -> int:
        return self.of(broker_name).in_flight

    # --- predicates --------------------------------------------------------------------------

    def view(self, now_s: float) -> None:
        """Read the table again if the last look is old."""
        if not self.enabled or now_s - self._viewed_s < VIEW_S:
            return
        self._viewed_s = now_s
        self._isolated, self._unreachable, self._pairs = self.table.view(now_s)
        self._sum_up()

    def _sum_up(self) -> None:
        trouble = self._isolated or self.any_suspect or self._pairs or self._unreachable
        self.all_well = not trouble

    def available(self, name: str) -> bool:
        return name not in self._isolated

    def available_for(self, topic: str) -> Callable[[str], bool]:
        """As `available`, for one topic."""
        if not self._pairs:
            return self.available
        return lambda name: name not in self._isolated and (topic, name) not in self._pairs

    def reachable(self, name: str) -> bool:
        return name not in self._unreachable

    def reachable_in(self, info: TopicPublishInfo, last: str | None) -> Callable[[str], bool]:
        """As `reachable`; with the 4.x profile: in the better half of the route's brokers, without
        the one whose attempt just failed."""
        if not (self.enabled and self.table.profile.better_half):
            return self.reachable
        names = [name for name in info.queues_by_broker if name in info.masters and name != last]
        return self.table.better_half(names, self._viewed_s).__contains__

    def suspicion(self, name: str) -> int:
        """How little a broker is to be relied on: 1 suspect, 2 silent, 3 with far more in flight
        than the others."""
        broker = self._brokers.get(name)
        if broker is None:
            return 0
        return 3 if self.overloaded(broker) else 2 * broker.silent or int(broker.suspect)

    def overloaded(self, broker: Broker) -> bool:
        if broker.window is not None and not broker.window.has_room(broker.in_flight):
            return True
        if broker.in_flight <= FREE_IN_FLIGHT:
            return False
        others = len(self._brokers) - 1
        if others < 1:
            return False
        mean = (self.total_in_flight - broker.in_flight) / others
        return broker.in_flight > FREE_IN_FLIGHT + LOAD_FACTOR * mean

    # --- events ------------------------------------------------------------------------------

    def answered(self, broker: Broker, rtt_s: float, now_s: float, *, stored: bool) -> None:
        """An answer came; a quick one of a broker without trouble costs no look at the table."""
        broker.measure(rtt_s)
        rtt_ms = rtt_s * 1000
        if stored:
            broker.stored_sent_s = max(broker.stored_sent_s, now_s - rtt_s)
        if not self.enabled or not stored:
            return
        name = broker.name
        if rtt_ms >= self._notable_ms or name in self._isolated or name in self._unreachable:
            self._add_event(self.table.update(name, rtt_ms, now_s, isolation=False, reachable=True))

    def isolate(
        self, name: str, rtt_ms: float, now_s: float, cause: str, *, reachable: bool
    ) -> None:
        """A failure that the broker answers for."""
        if self.enabled:
            self._add_event(
                self.table.update(
                    name, rtt_ms, now_s, isolation=True, reachable=reachable, cause=cause
                )
            )
            self._viewed_s = float("-inf")

    def isolate_topic(self, topic: str, name: str, now_s: float, cause: str) -> None:
        if self.enabled:
            self._add_event(self.table.isolate_topic(topic, name, now_s, cause))
            self._viewed_s = float("-inf")

    def probed(self, name: str, now_s: float, *, alive: bool) -> None:
        self._add_event(self.table.probed(name, now_s, alive=alive))

    def _add_event(self, event: Isolation | None) -> None:
        if event is not None:
            self.events.append(event)

    def health(self, now_s: float) -> list[BrokerHealth]:
        """Every broker that was sent to or has an item in the fault table, by name."""
        items = {item.broker_name: item for item in self.table.items()}
        found = []
        for name in sorted(self._brokers.keys() | items.keys()):
            broker, item = self._brokers.get(name), items.get(name)
            wait_s = 0.0 if item is None else max(0.0, item.start_s - now_s)
            found.append(
                BrokerHealth(
                    name,
                    available=wait_s == 0,
                    available_in_ms=wait_s * 1000,
                    reachable=item is None or item.reachable,
                    suspect=broker is not None and broker.suspect,
                    latency_ms=0.0 if broker is None else broker.latency_s * 1000,
                    in_flight=0 if broker is None else broker.in_flight,
                )
            )
        return found

    def update_suspicion(
        self, connections: Iterable[tuple[str, float | None, float]], now_s: float
    ) -> list[str]:
        """Set suspicion; the newly suspect.

        Args:
            connections: of each, its broker, when its oldest unanswered request was written (None:
                there is none), and when something was last heard on it.
        """
        ages: dict[str, float] = {}
        heard: dict[str, float] = {}
        for name, sent_s, heard_s in connections:
            heard[name] = max(heard.get(name, heard_s), heard_s)
            if sent_s is not None:
                ages[name] = max(ages.get(name, 0.0), now_s - sent_s)
        fresh = []
        for broker in self._brokers.values():
            age_s = ages.get(broker.name, 0.0)
            quiet_s = min(age_s, now_s - heard.get(broker.name, now_s))
            # A sign of life was asked for (`Heartbeats`), which no usual latency of sends delays.
            broker.silent = age_s > self._floor_s and quiet_s > HEARD_RECENTLY_S
            suspect = broker.silent or age_s > broker.suspect_after_s(self._floor_s)
            if suspect and not broker.suspect:
                fresh.append(broker.name)
            broker.suspect = suspect
        self.any_suspect = any(broker.suspect for broker in self._brokers.values())
        self._sum_up()
        return fresh
