"""Message traces: in the dashboards' form, sent apart, and never in the way of a send."""

import functools
import time

import pytest

from rocket_sink.message import Message
from rocket_sink.producer.transactions import COMMIT
from rocket_sink.wire.trace import EndTransactionTrace, PubTrace
from tests.decoding import decode_message_id, decode_trace
from tests.producer.waiting import until

TOPIC = "RMQ_SYS_TRACE_TOPIC"


@pytest.fixture
def make(cluster, make_producer):
    cluster.create_topic(TOPIC, 1)
    return functools.partial(make_producer, traceSample=1)


def traces(cluster, topic=TOPIC):
    return [t for m in cluster.messages(topic) for t in decode_trace(m.body.decode())]


def test_a_sample_has_both_ends_of_a_transaction(cluster, make):
    producer = make(traceSample=0.5)
    for _ in range(40):
        producer.send_in_transaction(Message("orders", b"y"), lambda m, a: COMMIT)
    producer.close()
    lines = traces(cluster)
    ends = {line.message_id for line in lines if isinstance(line, EndTransactionTrace)}
    assert ends == {line.message_id for line in lines if isinstance(line, PubTrace)}
    assert 0 < len(ends) < 40


def test_every_message_has_its_line(cluster, make):
    producer = make(producerGroup="g")
    single = producer.send(Message("orders", b"abc"))
    (batch,) = producer.send_batch([Message("orders", b"x")] * 2)
    result = producer.send_in_transaction(Message("orders", b"y"), lambda m, a: COMMIT)
    producer.close()
    lines = traces(cluster)
    sent = {line.message_id: line for line in lines if isinstance(line, PubTrace)}
    assert set(sent) == {single.message_id, *batch.message_id.split(","), result.transaction_id}
    (end,) = (line for line in lines if isinstance(line, EndTransactionTrace))
    assert (end.state, end.message_id) == ("COMMIT_MESSAGE", result.transaction_id)
    now_ms = int(time.time() * 1000)
    times_ms = end.time_ms, decode_message_id(single.message_id).nearest_time_ms(now_ms)
    assert all(0 <= now_ms - time_ms < 600_000 for time_ms in times_ms)


def test_traces_go_together_and_are_not_traced(cluster, make):
    producer = make()
    for future in [producer.send_async(Message("orders", b"x")) for _ in range(250)]:
        future.result(5)
    until(lambda: len(traces(cluster)) >= 200)
    producer.close()
    assert len(traces(cluster)) == 250 and len(cluster.messages(TOPIC)) <= 25
    assert {line.topic for line in traces(cluster)} == {"orders"}


@pytest.mark.parametrize("key", ["0" * 400, "\u8ba2" * 130])
def test_long_keys_go_in_several_trace_messages(cluster, make, key):
    """A message's properties have room for 32,767 bytes."""
    producer = make()
    for number in range(200):
        producer.send_async(Message("orders", b"x", keys=[f"{number}{key}"]))
    until(lambda: len(traces(cluster)) == 200)
