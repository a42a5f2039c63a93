"""Two proxies in front of the same brokers: a frozen one and a dead one are avoided as brokers are.

The name server of each has routes in which every broker has the proxy's address, and both are
behind one switch, because a proxy is one process.
"""

from dataclasses import replace

import pytest

from rocket_sink.errors import Outcome
from rocket_sink.message import Message
from rocket_sink.producer.producer import Producer
from rocket_sink.testing import FaultProxy
from rocket_sink.wire.route import decode_route, encode_route
from tests.producer.waiting import until


class ScriptedProxy:
    """A proxy that serves routes and messages; the messages of all brokers go to the first."""

    def __init__(self, cluster):
        self.front = FaultProxy(cluster.name_server)
        self.back = FaultProxy(cluster.brokers[0].address)
        self.front.on_route(self._to_back)

    def _to_back(self, answer):
        route = decode_route(bytes(answer.body or b""))
        brokers = tuple(replace(b, addresses={0: self.back.address}) for b in route.brokers)
        return replace(answer, body=encode_route(replace(route, brokers=brokers)))

    def freeze(self):
        self.front.freeze()
        self.back.freeze()

    def thaw(self):
        self.front.thaw()
        self.back.thaw()

    def close(self):
        self.front.close()
        self.back.close()


@pytest.fixture
def proxies(cluster, closing):
    return [closing(ScriptedProxy(cluster)) for _ in range(2)]


def in_use(producer, proxies):
    address = producer.send(Message("orders", b"first")).broker_address
    return next(proxy for proxy in proxies if proxy.back.address == address)


def servers(proxies):
    return ";".join(proxy.front.address for proxy in proxies)


def test_new_messages_do_not_wait_for_a_frozen_proxy(proxies):
    with Producer(nameServer=servers(proxies), sendMsgTimeout=90_000) as producer:
        in_use(producer, proxies).freeze()
        # These take all places of a proxy. On a busy machine the proxy may be silent before the
        # last of them is submitted, which then goes to the other proxy.
        stuck = [producer.send_async(Message("orders", b"stuck")) for _ in range(120)]
        later = [producer.send_async(Message("orders", b"later")) for _ in range(300)]
        until(lambda: all(future.done() for future in later))
        assert {future.result().outcome for future in later} == {Outcome.ACKED}
        assert not stuck[0].done()
        for proxy in proxies:
            proxy.thaw()
        assert {future.result(60).outcome for future in stuck} == {Outcome.ACKED}


def test_messages_wait_for_the_route_of_the_other_proxy(proxies):
    with Producer(nameServer=servers(proxies), sendMsgTimeout=20_000) as producer:
        in_use(producer, proxies).close()
        futures = [producer.send_async(Message("orders", b"x")) for _ in range(300)]
        assert {future.result(60).outcome for future in futures} == {Outcome.ACKED}


def test_a_failed_look_up_is_repeated_while_all_brokers_are_silent(proxies):
    with Producer(nameServer=servers(proxies), sendMsgTimeout=90_000) as producer:
        frozen = in_use(producer, proxies)
        frozen.freeze()
        (other,) = (proxy for proxy in proxies if proxy is not frozen)
        other.front.freeze()
        stuck = [producer.send_async(Message("orders", b"stuck")) for _ in range(150)]
        routes = producer._session.engine.routes
        look_ups = routes.look_ups
        until(lambda: routes.look_ups > look_ups)
        other.front.thaw()
        # After 30 s the next regular look-up follows, and an attempt's share of the time is over.
        until(lambda: stuck[-1].done(), 15)
        assert stuck[-1].result().outcome is Outcome.ACKED
        frozen.thaw()
