"""Namespaces on the wire: in names (`namespace`) or in headers (`namespaceV2`)."""

import pytest

from rocket_sink.message import Message, MessageQueue
from rocket_sink.producer.admin.admin import Admin
from rocket_sink.producer.producer import Producer
from rocket_sink.producer.transactions import COMMIT
from rocket_sink.testing import Drop, FaultProxy
from rocket_sink.wire.codes import RequestCode
from tests.decoding import sign
from tests.producer.waiting import until


@pytest.fixture
def producer(cluster, make_producer):
    cluster.create_topic("ns%orders", 2)
    return make_producer(namespace="ns", producerGroup="g")


def test_every_request_names_the_group_in_its_namespace(cluster, producer):
    message = Message("orders", b"x")
    producer.send(message)
    producer.send_batch([message, message])
    producer.send_oneway(message)
    producer.send_in_transaction(message, lambda m, a: COMMIT)
    until(lambda: len(cluster.messages("ns%orders")) == 5)

    # Heartbeats go with the work: an unused producer has no thread to send them.
    until(lambda: producer.send(message) and cluster.requests(RequestCode.HEART_BEAT))
    producer.close()
    codes = set()
    for frame in cluster.requests():
        ext = frame.ext or {}
        codes.add(int(frame.code))
        if frame.code == RequestCode.GET_TOPIC_CONFIG:
            assert ext["topic"] == "ns%orders"  # The request has no group.
            continue
        group = ext.get("a") or ext.get("producerGroup")
        assert group == "ns%g" or b'"groupName":"ns%g"' in (frame.body or b""), frame
    assert codes >= {
        RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE, RequestCode.END_TRANSACTION,
        RequestCode.HEART_BEAT, RequestCode.UNREGISTER_CLIENT,
    }  # fmt: skip


def test_a_queue_is_named_without_its_namespace(cluster, producer):
    queue = MessageQueue("orders", cluster.brokers[1].name, 1)
    message = Message("orders", b"x")
    assert producer.send(message, queue=queue).queue.queue_id == 1
    producer.send_batch([message, message], queue=queue)
    producer.send_oneway(message, queue=queue)
    producer.send(message, selector=lambda queues, message, arg: queue)
    until(lambda: len(cluster.messages("ns%orders")) == 5)
    assert {(m.queue_id, m.store_host) for m in cluster.messages("ns%orders")} == {
        (1, ("127.0.0.1", int(cluster.brokers[1].address.rpartition(":")[2])))
    }


@pytest.mark.parametrize("secret", ["", "s3"])
def test_every_header_names_the_namespace_of_version_2(cluster, secret):
    frames = []
    message = Message("orders", b"x")
    with FaultProxy(cluster.name_server) as front:
        front.on(-1, Drop())
        front.script.add(Drop(), matches=frames.append, times=None)
        options = {
            "nameServer": front.address, "namespaceV2": "prod",
            **({"accessKey": "alice", "secretKey": secret} if secret else {}),
        }  # fmt: skip
        with Producer(**options) as producer:
            producer.send(message)
            producer.send_batch([message, message])
            producer.send_oneway(message)
            # Column kernels make the frames of groups, which need so many sends.
            for future in [producer.send_async(message) for _ in range(200)]:
                future.result(30)
            producer.send_in_transaction(message, lambda m, a: COMMIT)
            until(lambda: len(cluster.messages("orders")) == 205)
        with Admin(**options) as admin:
            admin.topic_attributes("orders")
    frames += cluster.requests()
    for frame in frames:
        ext = dict(frame.ext or {})
        assert (ext.get("ns"), ext.get("nsd")) == ("prod", "true"), frame
        if secret:
            signature, _ = ext.pop("Signature"), ext.pop("AccessKey")
            assert sign(ext, frame.body, "alice", secret)["Signature"] == signature
    assert {int(frame.code) for frame in frames} >= {
        RequestCode.GET_ROUTEINFO_BY_TOPIC, RequestCode.SEND_MESSAGE_V2,
        RequestCode.SEND_BATCH_MESSAGE, RequestCode.END_TRANSACTION, RequestCode.HEART_BEAT,
        RequestCode.UNREGISTER_CLIENT, RequestCode.GET_TOPIC_CONFIG,
    }  # fmt: skip
