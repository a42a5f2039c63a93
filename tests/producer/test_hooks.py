"""Hooks are called for every send, and their errors do not fail it."""

import pytest

from rocket_sink.errors import Outcome, RejectedError
from rocket_sink.message import Message, MessageQueue
from rocket_sink.producer.hooks import SendHook
from rocket_sink.producer.producer import Producer
from rocket_sink.producer.transactions import COMMIT
from rocket_sink.testing import Answer
from tests.producer.waiting import until


class Recorder(SendHook):
    def __init__(self):
        self.before, self.after, self.ends = [], [], []

    def before_send(self, context):
        assert context.result is None and context.error is None
        self.before.append(context)

    def after_send(self, context):
        self.after.append(context)

    def end_transaction(self, context):
        self.ends.append(context)


class Broken(SendHook):
    def before_send(self, context):
        raise RuntimeError("before")

    def after_send(self, context):
        raise RuntimeError("after")

    def end_transaction(self, context):
        raise RuntimeError("end")


@pytest.fixture
def hooked(cluster):
    with Producer(nameServer=cluster.name_server, producerGroup="g") as producer:
        recorder = Recorder()
        producer.add_hook(Broken())
        producer.add_hook(recorder)
        yield producer, recorder


def test_hooks_are_called_in_every_mode(hooked, cluster):
    producer, hook = hooked
    message = Message("orders", b"x")
    result = producer.send(message)
    future = producer.send_async(message)
    future.result(5)
    producer.send_oneway(message)
    producer.send_batch([message, message])
    producer.send_in_transaction(message, lambda m, a: COMMIT)
    until(lambda: len(hook.after) == 5)
    modes = ["sync", "async", "oneway", "batch", "transaction"]
    assert [context.mode for context in hook.before] == modes
    assert {id(c) for c in hook.before} == {id(c) for c in hook.after}
    assert hook.before[0].result is result and hook.before[0].message_ids == (result.message_id,)
    assert hook.before[0].producer_group == "g" and hook.before[0].cost_ms >= result.latency_ms > 0
    assert len(hook.before[3].messages) == len(set(hook.before[3].message_ids)) == 2
    assert all(c.result.outcome is Outcome.ACKED for c in hook.after if c.mode != "oneway")
    (end,) = hook.ends
    assert (end.state, end.error, end.topic) == ("COMMIT_MESSAGE", None, "orders")
    assert end.from_transaction_check is False
    assert end.message_id == hook.before[4].message_ids[0]


@pytest.mark.parametrize("automatic", [True, False])
def test_the_hooks_of_an_asynchronous_send_know_its_id(make_producer, automatic):
    producer, hook = make_producer(autoBatch=automatic), Recorder()
    producer.add_hook(hook)
    for own in ("OWN", None):
        result = producer.send_async(Message("orders", b"x", message_id=own)).result(60)
        assert hook.before.pop().message_ids == (result.message_id,) != ("",)
        assert own is None or result.message_id == own


def test_hooks_get_failures(hooked, cluster):
    producer, hook = hooked
    with pytest.raises(RejectedError):
        producer.send_oneway(Message("orders", b"x"), queue=MessageQueue("orders", "broker-a", 99))
    assert hook.before == hook.after and len(hook.after) == 1
    hook.after.clear()
    cluster.on_send(Answer(13, "illegal"), times=None)
    with pytest.raises(RejectedError) as failure:
        producer.send(Message("orders", b"x"))
    assert hook.after[0].error is failure.value and hook.after[0].result is None
