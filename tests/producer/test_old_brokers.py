"""Timed messages and brokers before 5.0, which would deliver such messages at once."""

import pytest

from rocket_sink.errors import BrokerTooOldError, NotSentError
from rocket_sink.message import Message
from rocket_sink.wire.codes import RequestCode, mq_version
from tests.producer.waiting import until

TIMED = [{"delay_ms": 60_000}, {"delay_s": 60}, {"delivery_timestamp_ms": 4_000_000_000_000}]
OLD = mq_version(4, 9, 7)


def age(brokers, version=OLD):
    for broker in brokers:
        broker.version = version


def sends(cluster):
    return cluster.requests(RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE)


@pytest.mark.parametrize("timer", TIMED)
def test_refused_with_the_version_and_before_a_byte_is_sent(cluster, producer, timer):
    age(cluster.brokers)
    queue = producer.fetch_publish_message_queues("orders")[0]
    for send in (
        producer.send,
        producer.send_oneway,
        lambda message: producer.send_async(message).result(5),
        lambda message: producer.send(message, queue=queue),
    ):
        with pytest.raises(BrokerTooOldError, match=r"RocketMQ 4\.9\.7") as caught:
            send(Message("orders", b"x", **timer))
        assert caught.value.broker_version == "4.9.7" and caught.value.topic == "orders"
    assert sends(cluster) == []


@pytest.mark.parametrize(
    ("fields", "least", "older"),
    [({"priority": 0}, (5, 4, 0), (5, 3, 9)), ({"lite_topic": "s"}, (5, 5, 0), (5, 4, 9))],
)
def test_kinds_of_messages_need_their_release(cluster, make_producer, fields, least, older):
    message = Message("orders", b"x", **fields)
    age(cluster.brokers, mq_version(*older))
    with pytest.raises(BrokerTooOldError, match=next(iter(fields)).replace("_", " ")):
        make_producer().send(message)
    assert sends(cluster) == []
    age(cluster.brokers, mq_version(*least))
    assert make_producer().send(message).status == "SEND_OK"


@pytest.mark.parametrize("timer", TIMED)
def test_a_newer_broker_is_found(cluster, producer, timer):
    age(cluster.brokers[:1])
    for _ in range(4):
        producer.send_async(Message("orders", b"x", **timer)).result(5)
        producer.send(Message("orders", b"x", **timer))
    assert len(cluster.brokers[1].store.messages("orders")) == 8
    # Untimed messages go to both brokers.
    for _ in range(8):
        producer.send(Message("orders", b"plain"))
    assert cluster.brokers[0].store.messages("orders")


def test_oneway_goes_to_a_new_broker(cluster, make_producer):
    make_producer().send_oneway(Message("orders", b"x", delay_ms=1000))
    until(lambda: len(cluster.messages("orders")) == 1)


def test_an_older_broker_at_the_same_address_is_known(cluster, make_producer):
    producer = make_producer(sendMsgTimeout=3000)
    producer.send(Message("orders", b"x", delay_ms=1000))
    cluster.kill()
    age(cluster.brokers)
    for broker in cluster.brokers:
        broker.restart()
    before = len(sends(cluster))
    with pytest.raises(NotSentError):
        producer.send(Message("orders", b"x", delay_ms=1000))
    assert len(sends(cluster)) == before
