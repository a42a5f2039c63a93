"""Hooks on the remoting layer see every request of a client, and the fields they add are signed."""

import pytest

from rocket_sink.errors import SendError, UnwrittenError
from rocket_sink.message import Message, MessageQueue
from rocket_sink.net.hooks import RpcHook
from rocket_sink.producer.transactions import COMMIT
from rocket_sink.testing import Delay
from rocket_sink.wire.codes import RequestCode
from tests.decoding import sign
from tests.producer.waiting import until


class Recorder(RpcHook):
    def __init__(self, **added):
        self.added, self.before, self.after = added, [], []

    def before_request(self, address, request):
        request.ext.update(self.added)
        self.before.append((address, request))

    def after_response(self, address, request, response):
        assert response.is_response
        self.after.append((address, request, response))

    def codes(self):
        return {int(request.code) for _, request in self.before}


class Broken(RpcHook):
    def before_request(self, address, request):
        raise RuntimeError("before")

    def after_response(self, address, request, response):
        raise RuntimeError("after")


def test_hooks_get_every_request_and_their_fields_are_signed(cluster, make_producer):
    producer = make_producer(accessKey="alice", secretKey="s3")
    hook = Recorder(Trace="on")
    producer.add_rpc_hook(Broken())
    producer.add_rpc_hook(hook)
    message = Message("orders", b"x", keys=["k"])
    sent = producer.send(message)
    producer.send_batch([message, message])
    producer.send_oneway(message)
    producer.send_in_transaction(message, lambda m, a: COMMIT)
    until(lambda: len(cluster.messages("orders")) == 5)
    wanted = {
        RequestCode.GET_ROUTEINFO_BY_TOPIC, RequestCode.SEND_MESSAGE_V2,
        RequestCode.SEND_BATCH_MESSAGE, RequestCode.END_TRANSACTION,
    }  # fmt: skip
    assert wanted <= hook.codes()
    (first,) = [request for _, request, answer in hook.after if answer.ext
                and answer.ext.get("msgId") == sent.offset_message_id]  # fmt: skip
    assert (first.body, first.ext["b"]) == (b"x", "orders")
    addresses = {cluster.name_server, *(broker.address for broker in cluster.brokers)}
    assert {address for address, _ in hook.before} <= addresses
    for frame in cluster.requests():
        ext = dict(frame.ext)
        assert ext["Trace"] == "on"
        signature = ext.pop("Signature")
        ext.pop("AccessKey")
        assert sign(ext, frame.body, "alice", "s3")["Signature"] == signature


def test_fields_that_are_no_text_become_text(cluster, make_producer):
    producer = make_producer(accessKey="alice", secretKey="s3")
    producer.add_rpc_hook(Recorder(count=1, on=True, off=False, left=None))
    assert producer.send(Message("orders", b"x")).status == "SEND_OK"
    headers = [frame.ext for frame in cluster.requests()]
    added = ("count", "on", "off", "left")
    assert {tuple(map(ext.get, added)) for ext in headers} == {("1", "true", "false", None)}


def test_after_response_needs_a_response(cluster, make_producer):
    producer = make_producer(sendMsgTimeout=600, retryTimesWhenSendFailed=0)
    producer.send(Message("orders", b"warm"))
    hook = Recorder()
    producer.add_rpc_hook(hook)
    queue = MessageQueue("orders", cluster.brokers[0].name, 0)
    cluster.brokers[0].on_send(Delay(60_000), times=1)
    with pytest.raises(SendError):
        producer.send(Message("orders", b"x"), queue=queue)
    producer.send_oneway(Message("orders", b"y"), queue=queue)
    sends = [r for _, r in hook.before if r.code == RequestCode.SEND_MESSAGE_V2]
    assert [bytes(r.body) for r in sends] == [b"x", b"y"]
    assert not [r for _, r, _ in hook.after if r.code == RequestCode.SEND_MESSAGE_V2]


def test_what_cannot_be_encoded_costs_its_requests_only(cluster, make_producer):
    """The look-up of the route ends, too, so that there can be another one."""
    producer, hook = make_producer(faultTable="1h:10m"), Recorder(bad="\ud800")
    producer.add_rpc_hook(hook)
    with pytest.raises(SendError, match="frame cannot be made"):
        producer.send(Message("orders", b"x"), timeout_ms=300)
    hook.added = {}
    producer.send(Message("orders", b"x"))
    hook.added = {"bad": "\ud800"}
    with pytest.raises(UnwrittenError, match="frame cannot be made"):
        producer.send(Message("orders", b"x"), timeout_ms=300)
    engine = producer._session.engine
    assert not producer.isolations() and not engine.client.in_flight
    assert not any(health.in_flight for health in producer.broker_health())
    assert engine.flow.window.requests == 0
