"""The state of the engine's brokers, and the order in which requests use them.

A request that has waited long for the best brokers may use a worse one. While another broker is
reachable, an unreachable broker gets only probes. Processes share isolations in the fault table.

A broker is suspect if it leaves a request unanswered for longer than `suspectAfterMs`, and for much
longer than usual. It is silent if it does not answer heartbeats either. In both cases new and
unwritten requests go to other brokers. A written request still waits until its attempt's deadline:
a retry at every pause of a broker's garbage collector would store messages twice."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Final, NamedTuple

from rocket_sink.message import MessageQueue
from rocket_sink.net import log
from rocket_sink.net.channel import HEARD_RECENTLY_S
from rocket_sink.options import SinkOptions
from rocket_sink.producer.engine.shared_state import SharedBrokerState
from rocket_sink.routing.fault import (
    FAR,
    SILENT,
    SLOW,
    SUSPECT,
    FaultItem,
    FaultProfile,
    FaultTable,
    entry_name,
)
from rocket_sink.routing.rate_limit import PROXY_PLACES, AimdWindow, batch_places
from rocket_sink.routing.selectors import Ranking, RouteBroker, selector_named, weights_of
from rocket_sink.routing.topic_publish_info import TopicCache, TopicPublishInfo

_LOG: Final = log.logger(__name__)
VIEW_S: Final = 0.02
"""Age at which the view of the fault table is read again."""
BATCH_LIMIT_LEAST: Final = 1024
"""Smallest limit of a batch's bytes (that of the option requestMaxBytes)."""
_DEVIATIONS: Final = 4.0
_SUSPECT_MAX_S: Final = 3.0


@dataclass(slots=True, eq=False, repr=False)
class Proxy:
    """A RocketMQ proxy. Its brokers share one connection, and so one window."""

    address: str
    brokers: list[Broker] = field(default_factory=list)
    window: AimdWindow = field(
        default_factory=lambda: AimdWindow(2 * PROXY_PLACES, 0.0, PROXY_PLACES)
    )

    @property
    def in_flight(self) -> int:
        return sum(broker.in_flight for broker in self.brokers)

    def add(self, broker: Broker) -> None:
        """Add a broker. An earlier `Broker` of this name stays while it has requests in flight."""
        self.brokers = [b for b in self.brokers if b.in_flight or b.name != broker.name] + [broker]


@dataclass(slots=True, eq=False, repr=False)
class Broker:
    """The load of one broker, and its latency, smoothed as in RFC 6298."""

    name: str
    proxy: Proxy | None = None
    in_flight: int = 0
    """Requests in flight. Behind a proxy a batch counts as several (`batch_places`)."""
    latency_s: float = 0.0
    deviation_s: float = 0.0
    stored_sent_s: float = 0.0
    """Time at which the latest stored request was written."""
    largest_batch: int = 0
    """Bytes of the largest batch that the broker has stored."""
    batch_limit: int | None = None
    """Limit of a batch's bytes, after the broker has refused a larger batch."""
    suspicion: int = 0
    """SUSPECT, or SUSPECT | SILENT if the broker does not answer heartbeats either."""
    window: AimdWindow | None = None
    """The limit of requests in flight, from the first busy answer until it has grown to the
    engine's limit. A proxy always has a window, which also shrinks when answers are missing."""

    def __post_init__(self) -> None:
        if self.proxy is not None:
            self.window = self.proxy.window
            self.proxy.add(self)

    @property
    def _in_window(self) -> int:
        return self.in_flight if self.proxy is None else self.proxy.in_flight

    def room_for(self, requests: int, reserved: int = 0) -> int:
        """Return how many of `requests` fit after `reserved` others; without a window all fit."""
        if self.window is None:
            return requests
        return self.window.room_for(requests, self._in_window + reserved)

    def batch_places(self, messages: int) -> int:
        """Return how many requests a batch counts as: 1; at a proxy more, at most its window."""
        if self.proxy is None:
            return 1
        return min(batch_places(messages), int(self.proxy.window.limit))

    def busy(self, sent_s: float, now_s: float) -> None:
        """Shrink or create the window after a busy answer, before the request's `release`."""
        if self.window is None:
            self.window = AimdWindow(self.in_flight, now_s)
        else:
            self.window.busy(sent_s, self._in_window, now_s)

    def grow_window(self, full_size: int, requests: int = 1) -> None:
        """Let the window grow. A broker's window ends at `full_size`; a proxy's window stays."""
        for _ in range(requests):
            if self.window is None:
                return
            self.window.grow()
            if self.proxy is None and self.window.limit >= full_size:
                self.window = None

    def batch_refused(self, size: int) -> bool:
        """Halve the limit after the refusal of a batch for its size; return whether the limit is
        new. A refused batch that is no larger than a stored one has one message that is too large,
        so it says nothing about other batches."""
        limit = max(size // 2, self.largest_batch, BATCH_LIMIT_LEAST)
        is_lower = size > self.largest_batch and limit < (self.batch_limit or size)
        if is_lower:
            self.batch_limit = limit
        return is_lower

    def measure(self, rtt_s: float) -> None:
        if not self.latency_s:
            self.latency_s, self.deviation_s = rtt_s, rtt_s / 2
            return
        difference = rtt_s - self.latency_s
        self.latency_s += difference * 0.125
        self.deviation_s += (abs(difference) - self.deviation_s) * 0.25

    def suspect_after_s(self, floor_s: float) -> float:
        """Return the age of an unanswered request that makes the broker suspect."""
        usual_s = self.latency_s + _DEVIATIONS * self.deviation_s
        return max(floor_s, min(usual_s, _SUSPECT_MAX_S))


class SendTarget(NamedTuple):
    """The queue and the broker that a request goes to. For a static topic `queue` names a logical
    broker, and `home` the real one. `address` is the master's; empty if there is no master."""

    queue: MessageQueue
    home: str
    address: str
    broker: Broker


@dataclass(frozen=True, slots=True)
class BrokerHealth:
    """A producer's view of one broker at one moment.

    Attributes:
        available: the broker is not isolated.
        available_in_ms: time until the isolation ends.
        reachable: the broker answered the last request, or a later probe.
        suspect: a request has waited longer than usual; new requests prefer other brokers.
        latency_ms: smoothed time from write to answer; 0 before the first answer.
        in_flight: requests sent to the broker and not answered.
    """

    broker_name: str
    available: bool
    available_in_ms: float
    reachable: bool
    suspect: bool
    latency_ms: float
    in_flight: int


class _TopicRanking(NamedTuple):
    """The ranking of a route by `ranks`."""

    info: TopicPublishInfo
    ranks: dict[str, int]
    ranking: Ranking[SendTarget]


class Brokers:
    """The brokers of an engine, with the fault table."""

    def __init__(
        self, options: SinkOptions, shared: SharedBrokerState, rng: Random | None = None
    ) -> None:
        enabled = options.fault_table != "off"
        profile = FaultProfile.of(options.fault_table if enabled else "5.x")
        self.faults = FaultTable(profile, shared, enabled=enabled)
        self.ranks: dict[str, int] = {}
        """{name of a broker, or of an entry of `faults`: rank} without FAR. A new dictionary takes
        its place whenever a rank has changed."""
        self._floor_s = options.suspect_after_ms / 1000
        self._brokers: dict[str, Broker] = {}
        self._worsened: set[str] = set()
        self._weights = weights_of(options.queue_selector)
        self._name_servers = options.name_servers
        # Names have the form `room@broker`, as in Java's AllocateMessageQueueByMachineRoom. (Its
        # SelectMessageQueueByMachineRoom is a stub that returns null.)
        self._near = f"{options.machine_room}@" if options.machine_room else ""
        self._selector = selector_named(options.queue_selector)
        self._rng = rng or Random()
        self._rankings: TopicCache[str, _TopicRanking] = TopicCache()

    def of(self, name: str) -> Broker:
        """Return the state of a broker; create it on the first call."""
        broker = self._brokers.get(name)
        if broker is None:
            broker = self._brokers[name] = Broker(name)
        return broker

    def target(self, info: TopicPublishInfo, queue: MessageQueue) -> SendTarget:
        home = info.broker_of(queue)
        return SendTarget(queue, home, info.masters.get(home, ""), self._of_route(info, home))

    def _of_route(self, info: TopicPublishInfo, name: str) -> Broker:
        """Return the state of a broker of the route; a new state if its proxy has changed."""
        broker, address = self.of(name), info.proxy(self._name_servers)
        if address and (broker.proxy is None or broker.proxy.address != address):
            # The new state does not count requests that are in flight at the former proxy.
            proxies = (other.proxy for other in self._brokers.values() if other.proxy)
            proxy = next((p for p in proxies if p.address == address), None)
            broker = self._brokers[name] = Broker(name, proxy or Proxy(address))
            self.ranks = dict(self.ranks)  # wake requests that wait for room at the former proxy
        return broker

    # --- the order of brokers ----------------------------------------------------------------

    def ranking(self, info: TopicPublishInfo, now_s: float) -> Ranking[SendTarget]:
        """Return the brokers of a route in the order of their ranks now."""
        if now_s >= self.faults.stale_s:
            self.view(now_s)
        kept = self._rankings.get(info.topic)
        if kept is None or kept.info is not info or kept.ranks is not self.ranks:
            kept = self._rankings[info.topic] = self._rank_brokers(info, kept)
        return kept.ranking

    def open_to(self, info: TopicPublishInfo, worse: bool, now_s: float) -> list[Broker]:
        """Return the brokers to which requests of this route go now. With `worse`, include worse
        brokers, which a request may use after a long wait."""
        ranking = self.ranking(info, now_s)
        return [self.of(broker.name) for broker in (ranking.usable if worse else ranking.best)]

    def rank(self, name: str, topic: str) -> int:
        """Return the broker's rank for a topic; 0 is the best."""
        rank = self.ranks.get(name, 0)
        rank = max(rank, self.ranks.get(entry_name(topic, name), 0) | rank & (SUSPECT | SILENT))
        is_far = not name.startswith(self._near) or self._weights.get(name) == 0
        return rank | FAR if is_far else rank

    def view(self, now_s: float) -> None:
        """Rank the brokers anew if `VIEW_S` has passed, or something has changed."""
        if now_s < self.faults.stale_s:
            return
        self.faults.stale_s = now_s + VIEW_S
        before, ranks = self.ranks, self.faults.ranks(now_s)
        for name, broker in self._brokers.items():
            if broker.suspicion:
                ranks[name] = ranks.get(name, 0) | broker.suspicion
        if ranks != before:
            worse = {name for name, rank in ranks.items() if rank > before.get(name, 0)}
            self._worsened |= worse & self._brokers.keys()
            self.ranks = ranks

    def _rank_brokers(self, info: TopicPublishInfo, old: _TopicRanking | None) -> _TopicRanking:
        """Rank the brokers of a route anew. Each broker keeps its next queue (`turn`)."""
        if old is not None and old.info is info:
            brokers = old.ranking.brokers
        else:
            turns = {} if old is None else {b.name: b.turn for b in old.ranking.brokers}
            brokers = self._route_brokers(info, turns)
        ranks = {broker.name: self.rank(broker.name, info.topic) for broker in brokers}
        if old is not None and old.info is info and old.ranking.ranks == ranks:
            return old._replace(ranks=self.ranks)
        ranking = Ranking(brokers, ranks, self._selector, self._rng)
        return _TopicRanking(info, self.ranks, ranking)

    def _route_brokers(
        self, info: TopicPublishInfo, turns: dict[str, int]
    ) -> Sequence[RouteBroker[SendTarget]]:
        brokers = []
        for name, indices in info.queues_by_broker.items():
            if name in info.masters and indices:
                broker = self._of_route(info, name)
                targets = [
                    SendTarget(info.queues[index], name, info.masters[name], broker)
                    for index in indices
                ]
                share = (self._weights.get(name, 1.0) or 1.0) if self._weights else len(targets)
                turn = turns.get(name, self._rng.randrange(len(targets))) % len(targets)
                brokers.append(RouteBroker(name, targets, broker, share, turn))
        return brokers

    # --- events ------------------------------------------------------------------------------

    def note_answer(self, broker: Broker, rtt_s: float, now_s: float, *, stored: bool) -> None:
        """Note an answer. A quick answer of a healthy broker leaves the fault table untouched."""
        broker.measure(rtt_s)
        if not stored:
            return
        broker.stored_sent_s = max(broker.stored_sent_s, now_s - rtt_s)
        rtt_ms, faults = rtt_s * 1000, self.faults
        if rtt_ms >= faults.notable_ms or broker.name in self.ranks:
            faults.update(broker.name, rtt_ms, now_s, rank=SLOW)

    def note_batch_refused(self, name: str, size: int) -> None:
        """Remember that a batch of `size` bytes is too large for the broker."""
        broker = self.of(name)
        if broker.batch_refused(size):
            _LOG.warning(
                "%s refused a batch of %d bytes, because its maxMessageSize is smaller: batches of "
                "its topics have at most %d bytes from now on. Set requestMaxBytes to the broker's "
                "maxMessageSize, or raise maxMessageSize there",
                name, size, broker.batch_limit,
            )  # fmt: skip

    def batch_limit(self, info: TopicPublishInfo) -> int | None:
        """Return the smallest `Broker.batch_limit` of the route's brokers; None if none is set."""
        brokers = (self._brokers.get(name) for name in info.masters)
        limits = [b.batch_limit for b in brokers if b is not None and b.batch_limit]
        return min(limits, default=None)

    def health(self, now_s: float) -> list[BrokerHealth]:
        """Return the health of each broker that was used, or is in the fault table, by name."""
        items = {item.broker_name: item for item in self.faults.items()}
        health = []
        for name in sorted(self._brokers.keys() | items.keys()):
            broker = self._brokers.get(name) or Broker(name)
            item = items.get(name) or FaultItem(name)
            wait_s = max(0.0, item.until_s - now_s)
            health.append(
                BrokerHealth(
                    name,
                    available=wait_s == 0,
                    available_in_ms=wait_s * 1000,
                    reachable=item.reachable,
                    suspect=bool(broker.suspicion),
                    latency_ms=broker.latency_s * 1000,
                    in_flight=broker.in_flight,
                )
            )
        return health

    def update_suspicion(
        self, connections: Iterable[tuple[str, float | None, float]], now_s: float
    ) -> None:
        """Decide anew which brokers are suspect and which are silent, and rank the brokers. Each
        item of `connections` has a broker, the time at which its oldest unanswered request was
        written (None: there is none), and the time at which the last byte came."""
        ages: dict[str, float] = {}
        heard: dict[str, float] = {}
        for name, sent_s, heard_s in connections:
            heard[name] = max(heard.get(name, heard_s), heard_s)
            if sent_s is not None:
                ages[name] = max(ages.get(name, 0.0), now_s - sent_s)
        for broker in self._brokers.values():
            age_s = ages.get(broker.name, 0.0)
            quiet_s = min(age_s, now_s - heard.get(broker.name, now_s))
            # `Heartbeats` asks quiet brokers for an answer, which slow sends do not delay.
            suspicion = 0
            if age_s > self._floor_s and quiet_s > HEARD_RECENTLY_S:
                suspicion = SUSPECT | SILENT
            elif age_s > broker.suspect_after_s(self._floor_s):
                suspicion = SUSPECT
            if suspicion != broker.suspicion:
                broker.suspicion, self.faults.stale_s = suspicion, float("-inf")
        self.view(now_s)

    def take_worsened(self) -> list[str]:
        """Return brokers that became isolated, suspect or silent since the last call. Leave out
        brokers of the best rank: their requests have no better broker."""
        worsened, self._worsened = self._worsened, set()
        if not worsened:
            return []
        best = min((self.rank(name, "") for name in self._brokers), default=0)
        return sorted(name for name in worsened if self.rank(name, "") > best)
