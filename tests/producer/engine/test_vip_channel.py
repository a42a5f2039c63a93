"""vipChannelEnabled: the broker's port minus two, for routes from any source."""

from __future__ import annotations

import pytest

from rocket_sink.message import Message
from rocket_sink.producer.engine.routes import vip_route
from rocket_sink.producer.producer import Producer
from rocket_sink.wire.route import BrokerData, TopicRoute


@pytest.mark.parametrize("topic", ["orders", "made-on-the-fly"])
def test_sends_go_two_ports_below_the_route(cluster, monkeypatch, topic):
    route_of = cluster.route

    def two_above(name):
        route = route_of(name)
        moved = [
            BrokerData(b.cluster, b.name, {n: _moved(a) for n, a in b.addresses.items()})
            for b in route.brokers
        ]
        return TopicRoute(route.queues, tuple(moved), route.order_topic_conf)

    monkeypatch.setattr(cluster, "route", two_above)
    with Producer(nameServer=cluster.name_server, vipChannelEnabled=True) as producer:
        result = producer.send(Message(topic, b"x"))
    assert result.broker_address in {broker.address for broker in cluster.brokers}


def test_only_the_port_changes():
    route = TopicRoute((), (BrokerData("c", "b", {0: "[::1]:10911", 1: "host:12"}),))
    assert vip_route(route).brokers[0].addresses == {0: "[::1]:10909", 1: "host:10"}


@pytest.mark.parametrize("address", ["host:\u00b2", "host:" + "1" * 5000, "host:", "host"])
def test_what_is_no_port_stays(address):
    route = TopicRoute((), (BrokerData("c", "b", {0: address}),))
    assert vip_route(route).brokers[0].addresses == {0: address}


def _moved(address):
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + 2}"
