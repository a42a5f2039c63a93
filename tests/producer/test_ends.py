"""Every send ends with a result or an error of its own, even if another one fails beside it."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from rocket_sink import Message, Producer, errors
from rocket_sink.net.hooks import RpcHook
from rocket_sink.net.transport import Transport
from rocket_sink.producer.hooks import SendHook
from rocket_sink.testing import Answer, CloseConnection, Drop
from rocket_sink.wire.codes import ResponseCode
from tests.clusters import scripted_cluster
from tests.producer.test_request_reply import push
from tests.producer.waiting import until

WAIT_S = 10.0


cluster = scripted_cluster(1, orders=4)


def test_an_error_of_the_encoder_reaches_all_futures_of_a_batch(make_producer, monkeypatch):
    # The bad message joins the batch of the good ones, however busy the machine is.
    producer = make_producer(autoBatch="30m")
    monkeypatch.setattr(producer._session.builder, "batch_bytes", lambda message: 300)
    ids = [None, None, None, "i" * 33_000]
    messages = [Message("orders", b"body", message_id=own) for own in ids]
    futures = [producer.send_async(message) for message in messages]
    producer.flush()
    for future in futures:
        assert isinstance(future.exception(WAIT_S), errors.MessageError)


@pytest.mark.parametrize("options", [{}, {"autoBatch": True}, {"enableTrace": True}])
def test_without_a_thread_an_asynchronous_send_ends_before_it_returns(
    cluster, monkeypatch, options
):
    cluster.create_topic("RMQ_SYS_TRACE_TOPIC", 1)
    with Producer(nameServer=cluster.name_server, sendMsgTimeout=60_000, **options) as producer:
        start = threading.Thread.start

        def refused(thread):
            if thread.name.startswith("rocket-sink-"):
                raise RuntimeError("can't start new thread")
            start(thread)

        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refused)
            ends = []
            future = producer.send_async(Message("orders", b"body"), lambda *end: ends.append(end))
            assert future.done() and ends == [(future.result(), None)]
            if "enableTrace" in options:
                assert len(cluster.messages("RMQ_SYS_TRACE_TOPIC")) == 1
        assert producer.send_async(Message("orders", b"body")).result(WAIT_S).status == "SEND_OK"


def test_a_connection_that_cannot_be_made_keeps_no_place(cluster, monkeypatch):
    with Producer(nameServer=cluster.name_server, backPressureForAsyncSendNum=10) as producer:
        producer.fetch_publish_message_queues("orders")
        with monkeypatch.context() as patched:
            patched.setattr("rocket_sink.net.client.Channel", lambda *given, **more: 1 / 0)
            for _ in range(2):
                with pytest.raises(errors.ConnectError, match="ZeroDivisionError"):
                    producer.send(Message("orders", b"body"))
        assert producer._session.engine.pending == 0
        assert producer.send(Message("orders", b"body")).status == "SEND_OK"


def test_messages_of_a_batch_that_is_refused_are_sent_singly_while_the_producer_closes(cluster):
    cluster.brokers[0].on_send(Answer(ResponseCode.MESSAGE_ILLEGAL, "illegal"), times=1)
    with Producer(nameServer=cluster.name_server, autoBatch="30s") as producer:
        producer.fetch_publish_message_queues("orders")
        futures = [producer.send_async(Message("orders", b"%d" % n)) for n in range(3)]
    assert [future.result(WAIT_S).status for future in futures] == ["SEND_OK"] * 3
    assert {message.body for message in cluster.messages("orders")} == {b"0", b"1", b"2"}


def test_a_look_up_of_a_route_takes_no_longer_than_the_message_may(cluster, make_producer):
    cluster.on_route(Drop(), times=None)
    producer = make_producer(ordering="strict", sendMsgTimeout=60_000)
    for way in ({"selector": lambda queues, message, arg: queues[0]}, {}):
        message = Message("orders", b"body", sharding_key=None if way else "key")
        with pytest.raises(errors.NotSentError):
            producer.send(message, timeout_ms=200, **way)
    with pytest.raises(errors.NotSentError):
        producer.request(Message("orders", b"body"), timeout_s=0.2)


@pytest.fixture
def full(monkeypatch):
    """Return an event; while it is set, the kernel accepts no bytes."""
    full, write = threading.Event(), Transport.write
    monkeypatch.setattr(
        Transport, "write", lambda self, buffers: 0 if full.is_set() else write(self, buffers)
    )
    return full


def test_a_oneway_message_is_not_lost_when_its_broker_is_suspected(cluster, make_producer, full):
    """What no byte was sent of is sent again, here to the same broker."""
    producer = make_producer()
    producer.send(Message("orders", b"first"))
    engine, (broker,) = producer._session.engine, cluster.brokers
    full.set()
    with ThreadPoolExecutor(1) as threads:
        sending = threads.submit(producer.send_oneway, Message("orders", b"oneway"))
        channel = engine.client.peek(broker.address)
        until(lambda: channel.write_queue)
        producer._session.driver.call(
            lambda: engine.flow.move_unsent(broker.name, engine.clock()) or True
        )
        assert not sending.done()
        full.clear()
        sending.result(WAIT_S)
    producer.send(Message("orders", b"last"))
    bodies = [message.body for message in cluster.messages("orders")]
    assert bodies == [b"first", b"oneway", b"last"]


def test_a_oneway_message_that_is_said_not_to_be_sent_is_not_sent_later(cluster, full):
    with Producer(nameServer=cluster.name_server, sendMsgTimeout=300) as producer:
        producer.send(Message("orders", b"first"))
        full.set()
        with pytest.raises(errors.UnwrittenError, match="took no more bytes before the deadline"):
            producer.send_oneway(Message("orders", b"oneway"))
        full.clear()
        producer.send(Message("orders", b"last"))
    assert [message.body for message in cluster.messages("orders")] == [b"first", b"last"]


def test_a_oneway_message_is_sent_when_its_broker_closes_the_connection_after_it(cluster):
    cluster.brokers[0].on_send(CloseConnection(stores=True), times=None)
    with Producer(nameServer=cluster.name_server) as producer:
        producer.fetch_publish_message_queues("orders")
        producer.send_oneway(Message("orders", b"oneway"))
    until(lambda: cluster.messages("orders"))


def test_a_request_that_cannot_be_served_does_not_end_the_producers_thread(
    cluster, producer, monkeypatch
):
    assert producer.send_async(Message("orders", b"body")).result(WAIT_S)
    session, frames = producer._session, []

    def broken(channel, frame):
        frames.append(frame)
        raise RuntimeError("no thread can be started")

    monkeypatch.setattr(session.request_reply, "take_reply", broken)
    push(cluster.brokers[0], "none")
    until(lambda: frames)
    assert producer.send_async(Message("orders", b"body")).result(WAIT_S)


class Cancelled(SendHook, RpcHook):
    def after_send(self, context):
        raise asyncio.CancelledError

    def after_response(self, address, request, response):
        raise asyncio.CancelledError


def test_hooks_and_callbacks_that_are_cancelled_leave_no_future_without_an_end(cluster, producer):
    producer.add_hook(Cancelled())
    producer.add_rpc_hook(Cancelled())

    def cancelled(result, error):
        raise asyncio.CancelledError

    futures = [producer.send_async(Message("orders", b"body"), cancelled) for _ in range(40)]
    producer.flush()
    assert {future.result(WAIT_S).status for future in futures} == {"SEND_OK"}
