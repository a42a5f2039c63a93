"""The user's view of brokers in `Producer`: health, isolations, weights, machine room."""

from collections import Counter

import pytest

from rocket_sink.errors import Outcome, SendError
from rocket_sink.message import Message, MessageQueue
from rocket_sink.producer.producer import Producer
from rocket_sink.testing import Answer
from tests.clusters import scripted_cluster

rooms = scripted_cluster(["r1@a", "r1@b", "r2@c"], scope="module", orders=4)


def sent_to(cluster, count, **options):
    with Producer(nameServer=cluster.name_server, **options) as producer:
        results = [producer.send(Message("orders", b"x")) for _ in range(count)]
    return Counter(result.queue.broker_name for result in results)


def test_the_own_machine_room_comes_first(rooms):
    # However slow this machine is, no healthy broker looks slow.
    near = sent_to(rooms, 12, machineRoom="r1", faultTable="off")
    assert near.keys() == {"r1@a", "r1@b"}
    for broker in rooms.brokers[:2]:
        broker.kill()
    assert sent_to(rooms, 3, machineRoom="r1").keys() == {"r2@c"}
    for broker in rooms.brokers[:2]:
        broker.restart()


def test_weights_are_the_users(rooms):
    weights = "r1@a=0, r1@b=0, r2@c=2.5"
    assert sent_to(rooms, 12, queueSelector=weights).keys() == {"r2@c"}


def test_health_and_isolations_are_values(cluster, make_producer):
    producer = make_producer(retryTimesWhenSendFailed=0)
    bad, good = (broker.name for broker in cluster.brokers)
    producer.send(Message("orders", b"x"), queue=MessageQueue("orders", good, 0))
    cluster.broker(bad).on_send(Answer(14, "disk full"))
    with pytest.raises(SendError):
        producer.send(Message("orders", b"x"), queue=MessageQueue("orders", bad, 0))
    isolated, well = producer.broker_health()
    assert (isolated.broker_name, isolated.available, isolated.reachable) == (bad, False, True)
    assert 0 < isolated.available_in_ms <= 10_000 and isolated.in_flight == 0
    assert (well.broker_name, well.available, well.available_in_ms) == (good, True, 0)
    assert well.latency_ms > 0
    (event,) = producer.isolations()
    assert (event.broker_name, event.cause) == (bad, "SERVICE_NOT_AVAILABLE")
    assert producer.isolations() == []


@pytest.mark.parametrize("ordering", ["strict", "best_effort"])
def test_ordered_sends_feed_the_table(cluster, make_producer, ordering):
    """In Java neither sends to a queue nor those by a selector do so (DefaultMQProducerImpl)."""
    producer = make_producer(ordering=ordering)
    home = producer.send(Message("orders", b"x", sharding_key="k")).queue.broker_name
    cluster.broker(home).on_send(Answer(14, "shutting down"))
    again = producer.send(Message("orders", b"x", sharding_key="k"))
    assert again.outcome is Outcome.ACKED
    assert [event.broker_name for event in producer.isolations()] == [home]
