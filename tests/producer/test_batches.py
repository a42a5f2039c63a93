"""Batches that brokers measure differently from this client, and messages too large for a batch."""

import pytest

from rocket_sink.errors import MessageIllegalError, OptionError
from rocket_sink.message import Message, MessageQueue
from rocket_sink.message_rules import BATCH_MAX_MESSAGES
from rocket_sink.options import SinkOptions
from rocket_sink.producer import request_builder
from rocket_sink.producer.hooks import SendHook
from rocket_sink.testing import Answer
from rocket_sink.wire.batch import iter_batch
from rocket_sink.wire.codes import RequestCode


def limit_bodies(cluster, most, code=13, remark="the message body is too large"):
    """Let brokers refuse larger bodies, as with a smaller maxMessageSize of their own."""
    for broker in cluster.brokers:
        broker.script.add(
            Answer(code, remark), matches=lambda frame: len(frame.body or b"") > most, times=None
        )


def test_a_body_near_the_limit_is_sent_as_a_single_message(cluster, make_producer):
    producer = make_producer(maxMessageSize=1000)
    small, large = Message("orders", bytes(10)), Message("orders", bytes(990))
    limit_bodies(cluster, 1000)
    results = producer.send_batch([small, small, large, small])
    assert len(results) == 3
    alone = cluster.requests(RequestCode.SEND_MESSAGE_V2)
    assert sorted(frame.body for frame in alone) == sorted([large.body, small.body])
    assert len(cluster.requests(RequestCode.SEND_BATCH_MESSAGE)) == 1
    stored = cluster.messages("orders")
    assert sorted(len(m.body) for m in stored) == [10, 10, 10, 990]
    ids = [i for result in results for i in result.message_id.split(",")]
    assert sorted(ids) == sorted(m.message_id for m in stored)


def test_a_refused_batch_is_halved_under_the_same_ids(cluster, producer):
    limit_bodies(cluster, 500)
    queue = MessageQueue("orders", cluster.brokers[1].name, 2)
    results = producer.send_batch([Message("orders", b"%100d" % n) for n in range(11)], queue=queue)
    stored = cluster.brokers[1].store.messages("orders")
    assert [int(m.body) for m in stored] == list(range(11)), "halves keep their order and queue"
    ids = [i for result in results for i in result.message_id.split(",")]
    assert ids == [m.message_id for m in stored]
    assert len(cluster.requests(RequestCode.SEND_BATCH_MESSAGE)) < 11


@pytest.mark.parametrize("automatic", [False, True])
def test_later_batches_have_no_size_that_a_broker_has_refused(cluster, make_producer, automatic):
    limit_bodies(cluster, 20_000, 1, "java.lang.RuntimeException: message body size exceeded")
    producer = make_producer(autoBatch="30s, 1MB" if automatic else "", sendMsgTimeout=60_000)
    messages = [Message("orders", b"%100d" % n) for n in range(2000)]
    requests, refused = [], []
    for repetition in range(3):
        if automatic:
            futures = [producer.send_async(message) for message in messages]
            producer.flush(30)
            assert all(future.result(0) for future in futures)
        else:
            producer.send_batch(messages)
        bodies = [len(f.body) for f in cluster.requests(RequestCode.SEND_BATCH_MESSAGE)]
        requests.append(len(bodies) - sum(requests))
        refused.append(sum(size > 20_000 for size in bodies))
        assert len(cluster.messages("orders")) == 2000 * (repetition + 1)
    assert requests[0] <= 100, "a refused batch is halved and not sent message by message"
    assert requests[1] == requests[2] < requests[0] and len(set(refused)) == 1


class Told(SendHook):
    def __init__(self):
        self.ids = []

    def before_send(self, context):
        self.ids.append(context.message_ids)


@pytest.fixture
def hook(producer):
    told = Told()
    producer.add_hook(told)
    return told


def test_an_id_with_a_comma_is_one_id(cluster, producer, hook):
    first, second = (Message("orders", b"x", message_id=f"order,{n}") for n in range(2))
    producer.send(first)
    for broker in cluster.brokers:
        broker.script.add(Answer(13), matches=lambda f: f.code == RequestCode.SEND_BATCH_MESSAGE)
    producer.send_batch([first, second])
    assert hook.ids == [("order,0",), ("order,0", "order,1"), ("order,0",), ("order,1",)]
    stored = [message.message_id for message in cluster.messages("orders")]
    assert sorted(stored) == ["order,0", "order,0", "order,1"]


def test_only_the_illegal_message_fails(cluster, producer, hook):
    limit_bodies(cluster, 600)
    bodies = [b"%100d" % n for n in range(6)]
    bodies[4] = bytes(601)
    with pytest.raises(MessageIllegalError) as caught:
        producer.send_batch([Message("orders", body) for body in bodies])
    stored = cluster.messages("orders")
    assert sorted(m.body for m in stored) == sorted(bodies[:4] + bodies[5:])
    ids = [i for result in caught.value.results for i in result.message_id.split(",")]
    assert sorted(ids) == sorted(m.message_id for m in stored)
    assert (hook.ids[0][4],) in hook.ids, "the guilty one was tried alone, under its own id"


@pytest.mark.parametrize("automatic", [False, True])
def test_a_batch_has_no_more_messages_than_brokers_count(
    cluster, make_producer, monkeypatch, automatic
):
    monkeypatch.setattr(request_builder, "BATCH_MAX_MESSAGES", 3)
    producer = make_producer(autoBatch=automatic)
    messages = [Message("orders", b"%d" % n) for n in range(8)]
    if automatic:
        for future in [producer.send_async(message) for message in messages]:
            future.result(10)
    else:
        results = producer.send_batch(messages)
        assert [len(result.message_id.split(",")) for result in results] == [3, 3, 2]
    sends = cluster.requests(RequestCode.SEND_BATCH_MESSAGE)
    counts = [len(list(iter_batch(frame.body))) for frame in sends]
    assert max(counts) == 3
    assert sorted(int(message.body) for message in cluster.messages("orders")) == list(range(8))


def test_no_option_makes_a_batch_that_brokers_cannot_count():
    """With 33,000 messages, a real broker of 5.3.3 lost everything that its queue got later."""
    assert BATCH_MAX_MESSAGES <= 32_767
    with pytest.raises(OptionError, match="requestMaxMessages"):
        SinkOptions.parse(nameServer="h:1", requestMaxMessages=BATCH_MAX_MESSAGES + 1)
