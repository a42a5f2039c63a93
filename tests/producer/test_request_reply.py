"""Request-reply and recall."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from rocket_sink import errors
from rocket_sink.message import Message
from rocket_sink.producer.producer import Producer
from rocket_sink.testing import Answer
from rocket_sink.wire.codes import RequestCode, ResponseCode
from rocket_sink.wire.headers import Frame
from rocket_sink.wire.ids import RecallHandle
from tests.decoding import encode_recall_handle
from tests.producer.waiting import until


def reply_frame(correlation_id, body=b"pong"):
    ext = {
        "producerGroup": "g", "topic": "FakeCluster_REPLY_TOPIC", "queueId": "0", "sysFlag": "0",
        "bornTimestamp": "1", "storeTimestamp": "2", "flag": "0",
        "properties": f"CORRELATION_ID\x01{correlation_id}\x02MSG_TYPE\x01reply\x02",
    }  # fmt: skip
    return Frame(RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT, ext, body, opaque=77)


def push(broker, correlation_id):
    broker.send_request(reply_frame(correlation_id))


def test_a_reply_comes_from_any_broker(cluster, producer):
    with ThreadPoolExecutor(1) as threads:
        asking = threads.submit(producer.request, Message("orders", b"ping"), 5.0)
        until(lambda: cluster.messages("orders"))
        (asked,) = cluster.messages("orders")
        assert asked.properties["REPLY_TO_CLIENT"] == producer._session.engine.identity.client_id
        assert asked.properties["TTL"] == "5000"
        for broker in cluster.brokers:  # All brokers know the client that asks.
            until(lambda b=broker: any(f.code == RequestCode.HEART_BEAT for f in b.requests))
        other = next(b for b in cluster.brokers if not b.store.messages("orders"))
        push(other, asked.properties["CORRELATION_ID"])
        assert asking.result(5).body == b"pong"
    until(lambda: any(f.is_response and f.opaque == 77 for f in other.requests))


@pytest.mark.parametrize("namespace", ["", "ns"])
def test_the_replier_answers_what_it_received(cluster, namespace):
    cluster.create_topic("ns%orders", 4)
    options = {"nameServer": cluster.name_server, "namespace": namespace}
    with (
        Producer(**options, producerGroup="asks") as asker,
        Producer(**options) as replier,
        ThreadPoolExecutor(1) as threads,
    ):
        topic = asker._session.builder.topic("orders")
        asking = threads.submit(asker.request, Message("orders", b"ping"), 60.0)
        until(lambda: cluster.messages(topic))
        (asked,) = cluster.messages(topic)
        sent = replier.reply(asked, b"pong", keys=["k"], properties={"x": "1"})
        reply = asking.result(60)
    assert sent.queue.topic == reply.topic == "FakeCluster_REPLY_TOPIC"
    assert reply.body == b"pong" and reply.properties["x"] == "1"
    kept = {name: asked.properties[name] for name in ("CORRELATION_ID", "REPLY_TO_CLIENT", "TTL")}
    assert {**kept, "MSG_TYPE": "reply"}.items() <= reply.properties.items()
    assert asker.late_replies == 0


RECEIVED = {"CLUSTER": "FakeCluster", "CORRELATION_ID": "c", "REPLY_TO_CLIENT": "10.0.0.1@7"}
"""The properties of a request as its consumer gets them."""


def test_a_reply_needs_a_request(producer):
    for name in RECEIVED:
        with pytest.raises(errors.MessageError, match=name):
            producer.reply({key: value for key, value in RECEIVED.items() if key != name}, b"x")
    assert producer.reply(RECEIVED, b"x").queue.topic == "FakeCluster_REPLY_TOPIC"


@pytest.mark.parametrize("handle", ["", "%%%", "djEgYQ==", "a"])
def test_a_bad_handle_is_refused_here(cluster, producer, handle):
    with pytest.raises(errors.MessageError, match="recall handle"):
        producer.recall("orders", handle)
    lost = encode_recall_handle(RecallHandle("orders", "broker-z", "1", "ID"))
    with pytest.raises(errors.NoRouteError):
        producer.recall("orders", lost)


@pytest.mark.parametrize(
    ("remark", "error", "asked"),
    [
        ("fail, channel of <10.0.0.1@7> not found.", errors.RequesterGoneError, 2),
        ("to 10.0.0.1@7fail.", errors.ReplyNotTakenError, 1),
    ],
)
def test_a_requester_that_is_gone_is_no_brokers_fault(cluster, producer, remark, error, asked):
    """The remarks are those of ReplyMessageProcessor.pushReplyMessage."""
    cluster.create_topic("FakeCluster_REPLY_TOPIC", 1)
    answer = Answer(ResponseCode.SYSTEM_ERROR, f"push reply message {remark}")
    cluster.on_send(answer, times=None)
    with pytest.raises(error):
        producer.reply(RECEIVED, b"pong")
    code = RequestCode.SEND_REPLY_MESSAGE_V2
    counts = [[frame.code for frame in broker.requests].count(code) for broker in cluster.brokers]
    assert sum(counts) == asked and max(counts) == 1
    assert not producer.isolations()
    assert all(health.available for health in producer.broker_health())
