"""A scripted name server and brokers in one thread of this process, without Java.

with FakeCluster(brokers=2) as cluster:
    cluster.brokers[0].on_send(Answer(2, "[TIMEOUT_CLEAN_QUEUE]broker busy"), times=3)
    producer = Producer(nameServer=cluster.name_server)
    ...
    assert [m.body for m in cluster.messages("orders")] == [b"..."]
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from rocket_sink.testing.broker import FakeBroker, TopicConfig
from rocket_sink.testing.script import Behaviour, Script, perform, unsupported
from rocket_sink.testing.server import Loop, Peer, Port
from rocket_sink.testing.store import CLUSTER_NAME
from rocket_sink.wire.codes import PermName, RequestCode, ResponseCode
from rocket_sink.wire.headers import Frame, response_to
from rocket_sink.wire.route import BrokerData, QueueData, TopicRoute, encode_route
from rocket_sink.wire.stored import StoredMessage


class FakeCluster:
    """A scripted cluster; the module has an example.

    Args:
        brokers: the number of brokers (broker-a, broker-b, ...), or their names.
        queues: queues per broker of an automatically created topic; 0: create no topics.
        seed: the seed of the random generators.
        legacy_json: send routes with bare numeric keys, as before 4.9.4.
    """

    def __init__(
        self, brokers: int | Sequence[str] = 2, *, queues: int = 4, seed: int = 0,
        legacy_json: bool = False,
    ) -> None:  # fmt: skip
        self._loop = Loop("fake-rocketmq")
        self._legacy_json = legacy_json
        self._script = Script(seed)
        self._port = Port(self._loop, self._handle)
        self._loop.call(self._port.open)
        self.brokers: list[FakeBroker] = []
        self.order_topic_conf: dict[str, str] = {}
        if isinstance(brokers, int):
            brokers = [f"broker-{_letters(number)}" for number in range(brokers)]
        for number, name in enumerate(brokers):
            topics = {"TBW102": TopicConfig(queues)} if queues else {}
            self.brokers.append(FakeBroker(self._loop, name, topics, seed=seed + 1 + number))
        self._registered = set(brokers)

    def __enter__(self) -> FakeCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def name_server(self) -> str:
        """The address for the option nameServer."""
        return self._port.address

    def broker(self, name: str) -> FakeBroker:
        return next(broker for broker in self.brokers if broker.name == name)

    def create_topic(
        self, topic: str, queues: int = 4, *, perm: int = PermName.READ | PermName.WRITE,
        brokers: list[str] | None = None, attributes: Mapping[str, str] | None = None,
        read_queues: int | None = None,
    ) -> None:  # fmt: skip
        """Create or change a topic on some brokers (by default on all), with the same number of
        queues for reading unless `read_queues` is set."""
        for broker in self.brokers if brokers is None else map(self.broker, brokers):
            broker.topics[topic] = TopicConfig(queues, perm, attributes or {}, read_queues)

    def delete_topic(self, topic: str) -> None:
        """Delete a topic with its messages."""
        for broker in self.brokers:
            broker.topics.pop(topic, None)
            broker.store.forget(topic)

    def on_route(self, behaviour: Behaviour, *, times: int | None = 1) -> None:
        """Apply a behaviour to the next `times` route queries."""
        self.on_name_server(RequestCode.GET_ROUTEINFO_BY_TOPIC, behaviour, times=times)

    def on_name_server(self, code: int, behaviour: Behaviour, *, times: int | None = 1) -> None:
        """Apply a behaviour to the next `times` requests of this code to the name server."""
        self._script.add(behaviour, matches=lambda frame: frame.code == code, times=times)

    def stop_name_server(self) -> None:
        self._loop.call(self._port.close)

    def start_name_server(self) -> None:
        self._loop.call(self._port.open)

    def forget_brokers(self) -> None:
        """Forget all brokers and topics, as a name server that has just started."""
        self._registered.clear()

    def register(self, *names: str) -> None:
        """Register brokers (by default all) again, with their topics."""
        self._registered |= set(names or (broker.name for broker in self.brokers))

    def on_send(self, behaviour: Behaviour, *, times: int | None = 1, chance: float = 1.0) -> None:
        """Apply a behaviour to the next `times` sends to each broker (None: to all sends)."""
        for broker in self.brokers:
            broker.on_send(behaviour, times=times, chance=chance)

    def on(self, code: int, behaviour: Behaviour, *, times: int | None = 1) -> None:
        """Apply a behaviour to the next `times` requests of this code to each broker."""
        for broker in self.brokers:
            broker.on(code, behaviour, times=times)

    def behave(self) -> None:
        """Remove all behaviours of all brokers."""
        for broker in self.brokers:
            broker.behave()

    def freeze(self) -> None:
        """Freeze all brokers (`FakeBroker.freeze`)."""
        for broker in self.brokers:
            broker.freeze()

    def kill(self) -> None:
        """Kill all brokers (`FakeBroker.kill`)."""
        for broker in self.brokers:
            broker.kill()

    def check_transactions(self) -> None:
        """Let all brokers ask for the state of their half messages."""
        for broker in self.brokers:
            broker.check_transactions()

    def requests(self, *codes: int) -> list[Frame]:
        """Return the requests to all brokers, broker by broker; without codes, those of any."""
        frames = [frame for broker in self.brokers for frame in broker.requests]
        return [frame for frame in frames if not codes or frame.code in codes]

    def messages(self, topic: str) -> list[StoredMessage]:
        """Return a topic's stored messages, broker by broker, in the order of storing."""
        return [message for broker in self.brokers for message in broker.store.messages(topic)]

    def close(self) -> None:
        """Stop the thread and close every socket. Idempotent."""
        if not self._loop.is_running:
            return
        self.kill()
        self._loop.call(self._port.close)
        self._loop.stop()

    def route(self, topic: str) -> TopicRoute:
        brokers = [b for b in self._registered_brokers() if topic in b.topics]
        settings = [(b.name, b.topics[topic]) for b in brokers]
        return TopicRoute(
            queues=tuple(QueueData(n, c.readable, c.queues, c.perm) for n, c in settings),
            brokers=tuple(BrokerData(CLUSTER_NAME, b.name, b.addresses) for b in brokers),
            order_topic_conf=self.order_topic_conf.get(topic),
        )

    def _registered_brokers(self) -> list[FakeBroker]:
        return [broker for broker in self.brokers if broker.name in self._registered]

    def _handle(self, peer: Peer, request: Frame) -> None:
        perform(peer, self._script.decide(request), self._answer(request))

    def _answer(self, request: Frame) -> Frame:
        if request.code == RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER:
            names = sorted({topic for broker in self.brokers for topic in broker.topics})
            body = json.dumps({"topicList": names}).encode()
        elif request.code == RequestCode.GET_BROKER_CLUSTER_INFO:
            body = json.dumps(self._cluster_info()).encode()
        elif request.code == RequestCode.GET_ROUTEINFO_BY_TOPIC:
            topic = (request.ext or {}).get("topic", "")
            route = self.route(topic)
            if not route.queues:
                return response_to(
                    request, ResponseCode.TOPIC_NOT_EXIST,
                    remark=f"No topic route info in name server for the topic: {topic}",
                )  # fmt: skip
            body = encode_route(route, legacy_keys=self._legacy_json)
        else:
            return unsupported(request)
        return response_to(request, ResponseCode.SUCCESS, body=body)

    def _cluster_info(self) -> dict[str, object]:
        """Return the fields of a ClusterInfo (RouteInfoManager.getAllClusterInfo)."""
        registered = self._registered_brokers()
        return {
            "brokerAddrTable": {
                broker.name: {
                    "brokerAddrs": {str(number): at for number, at in broker.addresses.items()},
                    "brokerName": broker.name,
                    "cluster": CLUSTER_NAME,
                }
                for broker in registered
            },
            "clusterAddrTable": {CLUSTER_NAME: [broker.name for broker in registered]},
        }


def _letters(number: int) -> str:
    return chr(ord("a") + number) if number < 26 else f"a{number}"
