"""Batches that brokers measure differently from this client, and messages too large for a batch."""

import pytest

from rocket_sink.errors import MessageIllegalError, OptionError
from rocket_sink.message import Message, MessageQueue
from rocket_sink.message_rules import BATCH_MAX_MESSAGES
from rocket_sink.options import SinkOptions
from rocket_sink.testing import Answer
from rocket_sink.wire.codes import RequestCode
from tests.producer.test_hooks import Recorder


def limit_bodies(cluster, most, code=13, remark="the message body is too large"):
    """Let brokers refuse larger bodies, as with a smaller maxMessageSize of their own."""
    for broker in cluster.brokers:
        broker.script.add(
            Answer(code, remark), matches=lambda frame: len(frame.body or b"") > most, times=None
        )


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


def test_an_id_with_a_comma_is_one_id(cluster, producer):
    hook = Recorder()
    producer.add_hook(hook)
    first, second = (Message("orders", b"x", message_id=f"order,{n}") for n in range(2))
    producer.send(first)
    for broker in cluster.brokers:
        broker.script.add(Answer(13), matches=lambda f: f.code == RequestCode.SEND_BATCH_MESSAGE)
    producer.send_batch([first, second])
    ids = [context.message_ids for context in hook.before]
    assert ids == [("order,0",), ("order,0", "order,1"), ("order,0",), ("order,1",)]
    stored = [message.message_id for message in cluster.messages("orders")]
    assert sorted(stored) == ["order,0", "order,0", "order,1"]


def test_only_the_illegal_message_fails(cluster, producer):
    hook = Recorder()
    producer.add_hook(hook)
    limit_bodies(cluster, 600)
    bodies = [b"%100d" % n for n in range(6)]
    bodies[4] = bytes(601)
    with pytest.raises(MessageIllegalError) as caught:
        producer.send_batch([Message("orders", body) for body in bodies])
    stored = cluster.messages("orders")
    assert sorted(m.body for m in stored) == sorted(bodies[:4] + bodies[5:])
    ids = [i for result in caught.value.results for i in result.message_id.split(",")]
    assert sorted(ids) == sorted(m.message_id for m in stored)
    whole, *parts = [context.message_ids for context in hook.before]
    assert (whole[4],) in parts, "the guilty one was tried alone, under its own id"


def test_no_option_makes_a_batch_that_brokers_cannot_count():
    """With 33,000 messages, a real broker of 5.3.3 lost everything that its queue got later."""
    assert BATCH_MAX_MESSAGES <= 32_767
    with pytest.raises(OptionError, match="requestMaxMessages"):
        SinkOptions.parse(nameServer="h:1", requestMaxMessages=BATCH_MAX_MESSAGES + 1)
