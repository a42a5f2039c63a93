"""Each send ends, with its own result or error, whatever fails beside it."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from rocket_sink import Message, Producer
from rocket_sink.errors import MessageError, ProducerClosedError, RejectedError
from rocket_sink.message import MessageQueue
from rocket_sink.net.channel import Channel
from rocket_sink.producer.hooks import SendHook
from rocket_sink.testing import FakeCluster

WAIT_S = 10.0


@pytest.fixture
def cluster():
    with FakeCluster(brokers=1) as cluster:
        cluster.create_topic("orders", 4)
        yield cluster


@pytest.mark.parametrize("is_long", [True, False])
def test_a_message_that_cannot_be_encoded_takes_no_batch_with_it(cluster, monkeypatch, is_long):
    with Producer(nameServer=cluster.name_server, autoBatch=True) as producer:
        good = [producer.send_async(Message("orders", b"body")) for _ in range(3)]
        bad = Message("orders", b"body", message_id="i" * 33_000)
        if is_long:
            with pytest.raises(MessageError, match="properties take"):
                producer.send_async(bad)
            assert [one.result(WAIT_S).status for one in good] == ["SEND_OK"] * 3
            return
        # Whatever the encoder raises: the futures are told.
        monkeypatch.setattr(producer._session.builder, "batch_bytes", lambda message: 300)
        futures = [*good, producer.send_async(bad)]
        for future in futures:
            assert isinstance(future.exception(WAIT_S), MessageError)


def test_a_callback_that_is_cancelled_does_not_end_the_producers_thread(cluster):
    def cancelled(result, error):
        raise asyncio.CancelledError

    with Producer(nameServer=cluster.name_server) as producer:
        first = producer.send_async(Message("orders", b"body"), cancelled)
        assert first.result(WAIT_S).status == "SEND_OK"
        assert producer.send_async(Message("orders", b"body")).result(WAIT_S).status == "SEND_OK"


def test_a_thread_that_cannot_be_started_is_tried_again(cluster, monkeypatch):
    with Producer(nameServer=cluster.name_server) as producer:
        producer.fetch_publish_message_queues("orders")
        start = threading.Thread.start

        def refused(thread):
            if thread.name == "rocket-sink-producer":
                raise RuntimeError("can't start new thread")
            start(thread)

        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refused)
            with pytest.raises(RuntimeError, match="new thread"):
                producer.send_async(Message("orders", b"body"))
        assert producer.send_async(Message("orders", b"body")).result(WAIT_S).status == "SEND_OK"


def test_unsent_messages_of_a_connection_have_an_error_each():
    cause = ProducerClosedError("the producer was closed")
    channel = object.__new__(Channel)
    first, second = (channel._lost(cause, "closed", written=False) for _ in range(2))
    first.facts["topic"] = "orders"
    assert first is not second
    assert "topic" not in second.facts
    assert first.__cause__ is cause


def test_a_closed_producer_says_so(cluster):
    producer = Producer(nameServer=cluster.name_server)
    producer.send(Message("orders", b"body"))
    producer.close()
    with pytest.raises(ProducerClosedError):
        producer.fetch_publish_message_queues("orders")


def test_late_messages_do_not_share_the_deadline_of_one_that_waited(cluster):
    with Producer(nameServer=cluster.name_server, sendMsgTimeout=1000) as producer:
        producer.send(Message("orders", b"body"))
        began = threading.Event()

        def slow(result, error):
            began.set()
            time.sleep(1.5)

        producer.send_async(Message("orders", b"body"), slow)
        assert began.wait(WAIT_S)
        early = producer.send_async(Message("orders", b"early"))
        time.sleep(1.2)
        late = [producer.send_async(Message("orders", b"late")) for _ in range(20)]
        assert early.exception(WAIT_S) is not None
        assert {type(one.exception(WAIT_S)) for one in late} == {type(None)}


class Seen(SendHook):
    def __init__(self) -> None:
        self.calls: list[str] = []

    def before_send(self, context):
        self.calls.append("before")

    def after_send(self, context):
        self.calls.append("after")


def test_hooks_are_called_after_a_oneway_send_to_no_queue(cluster):
    seen = Seen()
    with Producer(nameServer=cluster.name_server) as producer:
        producer.add_hook(seen)
        with pytest.raises(RejectedError):
            producer.send_oneway(
                Message("orders", b"body"), queue=MessageQueue("orders", "broker-a", 99)
            )
    assert seen.calls == ["before", "after"]


def test_a_look_up_that_is_over_lets_a_sender_lead(cluster):
    """A thread that was woken to lead, and need not, leaves it to the next one."""
    with Producer(nameServer=cluster.name_server) as producer:
        producer.send(Message("orders", b"body"))
        driver = producer._session.driver
        woken = []

        class Follower:
            asleep = True

            def wake(self):
                self.asleep = False
                woken.append(self)

        driver._followers[Follower()] = None
        driver.call(lambda: True)
        assert len(woken) == 1
        driver._followers.clear()
