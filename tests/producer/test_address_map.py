"""Brokers that register addresses which lead nowhere from here."""

import pytest

from rocket_sink import Message
from rocket_sink.errors import ConnectError
from rocket_sink.message import MessageQueue
from rocket_sink.producer.admin.admin import Admin
from tests.run_command import run_command

MAP = "addressMap"


@pytest.fixture
def nowhere(cluster):
    """Let the brokers register ports at which nobody listens; return the map to the real ones."""
    for number, broker in enumerate(cluster.brokers, 1):
        broker.registered = f"127.0.0.1:{number}"
    return ";".join(f"{broker.registered}={broker.address}" for broker in cluster.brokers)


def test_the_map_reaches_producer_admin_and_topics_that_are_made(cluster, nowhere, make_producer):
    cluster.create_topic("TBW102", 4)
    producer = make_producer(addressMap=nowhere)
    for topic in ("orders", "new"):
        for _ in range(4):
            producer.send(Message(topic, b"x"))
    assert len(cluster.messages("orders")) == 4
    with Admin(nameServer=cluster.name_server, addressMap=nowhere) as admin:
        assert admin.cluster() == {b.name: {0: b.address} for b in cluster.brokers}
        assert admin.max_offset(MessageQueue("orders", "broker-a", 0)) >= 0
        admin.create_topic("made", queues=2)
    assert "made" in cluster.brokers[1].topics
    by_name = ";".join(f"{b.name}:*={b.address}" for b in cluster.brokers)
    make_producer(addressMap=by_name).send(Message("orders", b"x"))


def test_an_address_that_leads_nowhere_is_explained(cluster, nowhere, make_producer):
    words = r"the broker broker-[ab], which registered it \(brokerIP1.*option addressMap"
    with pytest.raises(ConnectError, match=words) as caught:
        make_producer(sendMsgTimeout=2000).send(Message("orders", b"x"))
    assert str(caught.value).count("brokerIP1") == 1
    with Admin(nameServer=cluster.name_server) as admin, pytest.raises(ConnectError, match=words):
        admin.max_offset(MessageQueue("orders", "broker-a", 0))


def test_check_shows_both_addresses(cluster, nowhere):
    def texts(*options):
        done = run_command("check", "-n", cluster.name_server, "-t", "orders", *options, "--json")
        return {each["what"]: (each["state"], each["text"]) for each in done.json()["findings"]}

    state, text = texts()["broker broker-a"]
    assert state == "fail" and "127.0.0.1:1" in text and MAP in text
    state, text = texts("-O", f"{MAP}={nowhere}")["broker broker-a"]
    assert state == "ok"
    assert f"{cluster.brokers[0].address} (registered as 127.0.0.1:1) answers" in text
