"""Automatic batching: fewer requests, and a result for each message."""

import functools

import pytest

from rocket_sink.errors import MessageError, ProducerClosedError, RejectedError
from rocket_sink.message import Message
from rocket_sink.testing import Answer
from rocket_sink.wire.codes import RequestCode


@pytest.fixture
def make(make_producer):
    return functools.partial(make_producer, autoBatch=True)


def test_each_message_has_its_own_result(cluster, make):
    producer = make(autoBatch="5ms")
    futures = {b"%d" % n: producer.send_async(Message("orders", b"%d" % n)) for n in range(50)}
    results = {body: future.result(5) for body, future in futures.items()}
    stored = {m.body: m for m in cluster.messages("orders")}
    assert set(stored) == set(results)
    for body, result in results.items():
        message = stored[body]
        assert (message.message_id, message.queue_offset) == (
            result.message_id,
            result.queue_offset,
        )
        assert message.offset_message_id == result.offset_message_id
    assert len(cluster.requests(RequestCode.SEND_BATCH_MESSAGE)) < 25


def test_by_size_without_waiting(cluster, make):
    producer = make(autoBatch="30s, 2000")
    futures = [producer.send_async(Message("orders", b"x" * 300)) for _ in range(20)]
    futures[0].result(5)
    assert all(len(f.body) <= 2000 for f in cluster.requests() if f.body)
    assert not futures[-1].done()  # The last message waits for others.
    producer.close(2)
    assert len({future.result(0).message_id for future in futures}) == 20


def test_texts_that_take_more_bytes_than_characters(cluster, make):
    producer = make(autoBatch="30s, 2000")
    futures = [producer.send_async(Message("orders", b"x", keys=("ü" * 300,))) for _ in range(20)]
    producer.close(2)
    assert len({future.result(0).message_id for future in futures}) == 20
    bodies = [len(f.body) for f in cluster.requests() if f.body]
    assert max(bodies) <= 2000 and len(bodies) < 20


def test_properties_that_are_too_large_are_refused_at_once(make):
    producer = make(autoBatch="30s")
    for texts in ({"keys": ("ü" * 20_000,)}, {"properties": {"p": "x" * 40_000}}):
        with pytest.raises(MessageError, match="the limit is") as caught:
            producer.send_async(Message("orders", b"x", **texts))
        assert caught.value.code == "PROPERTIES_TOO_LARGE"


def test_what_cannot_be_batched_is_sent_alone(cluster, make):
    producer = make(autoBatch="30s, 1000")
    queue = producer.fetch_publish_message_queues("orders")[0]
    futures = [
        producer.send_async(Message("orders", b"x", sharding_key="k")),
        producer.send_async(Message("orders", b"x", delay_level=1)),
        producer.send_async(Message("orders", b"x" * 1000)),
        producer.send_async(Message("orders", b"x"), queue=queue),
        producer.send_async(Message("%RETRY%group", b"x")),
    ]
    for future in futures:
        future.result(5)
    assert len(cluster.requests(RequestCode.SEND_BATCH_MESSAGE)) == 0


def test_topics_and_wait_store_are_kept_apart(cluster, make):
    cluster.create_topic("other", 1)
    producer = make()
    kinds = [("orders", True), ("orders", False), ("other", True)]
    futures = [producer.send_async(Message(t, b"x", wait_store=w)) for t, w in kinds * 3]
    for future in futures:
        future.result(5)
    assert len(cluster.messages("orders")) == 6 and len(cluster.messages("other")) == 3
    waits = [m.properties["WAIT"] for m in cluster.messages("orders")]
    assert sorted(waits) == ["false"] * 3 + ["true"] * 3


def test_a_callback_that_raises_stops_no_other(cluster, make):
    def broken(result, error):
        raise RuntimeError("callback")

    producer = make()
    futures = [producer.send_async(Message("orders", b"x"), broken) for _ in range(5)]
    assert len({future.result(5).message_id for future in futures}) == 5


def test_a_refused_batch_is_sent_singly_and_failures_reach_every_future(cluster, make):
    cluster.on(RequestCode.SEND_BATCH_MESSAGE, Answer(13, "too big"), times=None)
    ends = []
    producer = make()
    futures = [
        producer.send_async(Message("orders", b"%d" % n), lambda *end: ends.append(end))
        for n in range(5)
    ]
    ids = {future.result(5).message_id for future in futures}
    assert ids == {m.message_id for m in cluster.messages("orders")} and len(ids) == 5
    cluster.on_send(Answer(13, "illegal"), times=None)
    failed = [producer.send_async(Message("orders", b"x")) for _ in range(3)]
    for future in failed:
        with pytest.raises(RejectedError):
            future.result(5)
    producer.close()
    assert len(ends) == 5
    with pytest.raises(ProducerClosedError):
        producer.send_async(Message("orders", b"x"))
