"""Heartbeats, probes of unreachable brokers, and unregistration."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from typing import Final

from rocket_sink.errors import ConnectError, SendError
from rocket_sink.message import MessageQueue
from rocket_sink.net.channel import HEARD_RECENTLY_S, Channel
from rocket_sink.net.client import Call, NetworkClient
from rocket_sink.net.identity import Identity
from rocket_sink.options import SinkOptions
from rocket_sink.producer.engine.routes import Routes
from rocket_sink.routing.fault import PROBE_INTERVAL_S, FaultTable
from rocket_sink.routing.topic_publish_info import TopicCache
from rocket_sink.wire import requests
from rocket_sink.wire.headers import Frame

_LOOK_S: Final = 0.5
_DRIVEN_MAX_S: Final = 0.05
"""Limit of the time between two ticks that counts as driven by a thread."""
_HEARTBEAT_TIMEOUT_S: Final = 3.0
_PROBE_TIMEOUT_S: Final = 0.2
"""Java: detectTimeout."""
_ASK_S: Final = HEARD_RECENTLY_S / 2
"""Silence after which a connection with an unanswered request gets a heartbeat. A live broker
answers before `HEARD_RECENTLY_S`, when it would count as silent."""


class Probes:
    """Probes of unreachable brokers (LatencyFaultToleranceImpl.detectByOneRound). A probe without
    an answer fails after `_PROBE_TIMEOUT_S`. Time in which no thread drives the engine does not
    count, because no thread reads answers then."""

    def __init__(self, client: NetworkClient, routes: Routes, faults: FaultTable) -> None:
        self._client = client
        self._routes = routes
        self._faults = faults
        self._open: dict[str, float] = {}
        """{broker name: deadline of its probe, compared with `_driven_s`}"""
        self._driven_s = 0.0
        """The total time for which threads have driven the engine."""
        self._run_s = float("-inf")

    def expire(self, now_s: float) -> None:
        """Fail the probes that have no answer in time."""
        self._driven_s += min(now_s - self._run_s, _DRIVEN_MAX_S)
        self._run_s = now_s
        for name in [name for name, failed_s in self._open.items() if self._driven_s >= failed_s]:
            del self._open[name]
            self._faults.note_probe(name, now_s, alive=False)

    def send(self, addresses: dict[str, str], now_s: float) -> None:
        """Probe the brokers whose probe is due. Nobody waits for a broker whose topics are out of
        use, and it may be gone for good."""
        if not self._faults.enabled:
            return
        in_use = self._routes.topics_in_use(now_s)
        topics = {name: topic for name, topic in in_use.items() if name in addresses}
        for name in self._faults.due_for_probe(now_s, topics):
            if name in self._open:
                continue
            self._open[name] = failed_s = self._driven_s + _PROBE_TIMEOUT_S
            deadline_s = now_s + _PROBE_TIMEOUT_S + 2 * PROBE_INTERVAL_S
            frame = requests.query_max_offset(MessageQueue(topics[name], "", 0))
            on_end = Call(partial(self._end_probe, name, failed_s, deadline_s))
            self._client.call(addresses[name], frame, on_end, deadline_s=deadline_s, now_s=now_s)

    def _end_probe(
        self,
        name: str,
        failed_s: float,
        deadline_s: float,
        answer: Frame | None,
        error: SendError | None,
        now_s: float,
    ) -> None:
        is_pending = self._open.get(name) == failed_s
        if is_pending:
            del self._open[name]
        if answer is not None or (is_pending and now_s < deadline_s):
            self._faults.note_probe(name, now_s, alive=answer is not None)


class Heartbeats:
    """The heartbeats of an engine, whose tick calls `run`. Only `unregister` blocks.

    Attributes:
        stays_connected: keep the known routes fresh, and a connection to each of their brokers. So
            brokers can send requests to the client (transaction check-backs).
        reconnects: connect again, once per interval, to brokers that had a heartbeat. Only the
            producer sets this; in tasks it is enough that sends connect.
    """

    def __init__(
        self,
        options: SinkOptions,
        client: NetworkClient,
        routes: Routes,
        faults: FaultTable,
        identity: Identity,
    ) -> None:
        self._client = client
        self._routes = routes
        self._probes = Probes(client, routes, faults)
        self._identity = identity
        self.stays_connected = self.reconnects = False
        self._interval_s = options.heartbeat_broker_interval_ms / 1000
        self._sent: TopicCache[str, tuple[Channel, float]] = TopicCache()
        """{address: (connection of the latest heartbeat, time of sending)}"""
        self._asked: set[Channel] = set()
        self._next_look_s = 0.0
        self._opened = 0

    def run(self, now_s: float) -> None:
        self._probe_silent(now_s)
        self._probes.expire(now_s)
        opened = self._client.opened
        if now_s < self._next_look_s and opened == self._opened:
            return
        self._next_look_s, self._opened = now_s + _LOOK_S, opened
        if self.stays_connected:
            # A send refreshes old routes, but a producer that waits for check-backs may never send.
            self._routes.refresh_old(now_s)
        addresses = self._routes.addresses()
        for address in set(addresses.values()):
            self._send_heartbeat(address, now_s)
        self._probes.send(addresses, now_s)

    def look_now(self) -> None:
        """Send due heartbeats and probes in the next tick, without the wait of `_LOOK_S`."""
        self._next_look_s = 0.0

    def all_sent(self) -> bool:
        """Return whether each known broker got a heartbeat on its current connection."""
        return all(
            address in self._sent and self._sent[address][0] is self._client.peek(address)
            for address in set(self._routes.addresses().values())
        )

    def connections(self) -> Iterator[tuple[str, float | None, float]]:
        """Yield the items for `Brokers.update_suspicion`, one for each connection and broker."""
        # A proxy has one address for all brokers.
        names: defaultdict[str, list[str]] = defaultdict(list)
        for name, address in self._routes.addresses().items():
            names[address].append(name)
        for channel in self._client.channels:
            for name in names.get(channel.address, ()):
                oldest = channel.connection.oldest
                yield name, None if oldest is None else oldest.sent_s, channel.heard_s

    def _probe_silent(self, now_s: float) -> None:
        """Send a heartbeat on silent connections with an unanswered request. A frozen broker does
        not answer it; a slow one, which for example waits for its slave, does (`SILENT`).
        Each connection has one such heartbeat at a time, which expires with the request."""
        for channel in self._client.channels:
            oldest = channel.connection.oldest
            if oldest is None or channel in self._asked or channel.silent_s(now_s) <= _ASK_S:
                continue
            self._asked.add(channel)
            on_end = Call(lambda *end, peer=channel: self._asked.discard(peer))
            frame = self.frame()
            self._client.call_on(channel, frame, on_end, deadline_s=oldest.deadline_s, now_s=now_s)

    def frame(self) -> Frame:
        return requests.heartbeat(
            client_id=self._identity.client_id, producer_groups=[self._identity.group]
        )

    def _send_heartbeat(self, address: str, now_s: float) -> None:
        """Send the heartbeat that registers the group, on a new connection or if one is due."""
        channel = self._client.peek(address)
        if channel is None and self.stays_connected:
            with contextlib.suppress(ConnectError):
                channel = self._client.channel(address, now_s)
        before = self._sent.get(address)
        is_late = before is not None and now_s - before[1] >= self._interval_s
        if channel is None:
            if before is None or not (is_late and self.reconnects):
                return
            channel = before[0]
        elif not channel.is_open or (before is not None and before[0] is channel and not is_late):
            return
        self._sent[address] = (channel, now_s)
        on_end = Call(partial(self.learn_version, address))
        deadline_s = now_s + _HEARTBEAT_TIMEOUT_S
        self._client.call(address, self.frame(), on_end, deadline_s=deadline_s, now_s=now_s)

    def learn_version(self, address: str, answer: Frame | None, *end: object) -> None:
        """Note the version in the answer to a heartbeat, if there is an answer."""
        channel = self._client.peek(address)
        if answer is not None and channel is not None:
            channel.peer_version = answer.version

    def unregister(self, timeout_s: float) -> None:
        """Unregister the client at the connected brokers, and wait for their answers."""
        client, calls, ends = self._client, 0, list[object]()
        now_s = client.clock()
        frame = requests.unregister_client(
            client_id=self._identity.client_id, producer_group=self._identity.group
        )
        for address in set(self._routes.addresses().values()):
            channel = client.peek(address)
            if channel is not None and channel.is_open:
                calls += 1
                on_end = Call(lambda *end: ends.append(end))
                client.call(address, frame, on_end, deadline_s=now_s + timeout_s, now_s=now_s)
        while len(ends) < calls and client.clock() < now_s + timeout_s:
            client.poll(0.05)
