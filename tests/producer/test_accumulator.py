"""Automatic batching: fewer requests, and a result for each message."""

import functools
import math
from types import SimpleNamespace

import pytest

from rocket_sink.errors import ProducerClosedError, RejectedError
from rocket_sink.message import Message
from rocket_sink.options import SinkOptions
from rocket_sink.producer.accumulator import BatchAccumulator
from rocket_sink.producer.engine_thread import State
from rocket_sink.producer.future import SendFuture
from rocket_sink.producer.request_builder import RequestBuilder
from rocket_sink.testing import Answer
from rocket_sink.wire.codes import RequestCode
from rocket_sink.wire.ids import MessageIds


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
        for name in ("message_id", "offset_message_id", "queue_offset"):
            assert getattr(stored[body], name) == getattr(result, name)
    assert len(cluster.requests(RequestCode.SEND_BATCH_MESSAGE)) < 25


class Driven(BatchAccumulator):
    """An accumulator whose driver notes (time, size of each batch), wakes and waits."""

    def __init__(self, **options):
        self.now_s, self.sent, self.wakes, self.waits = 0.0, [], [], []
        self.thread = SimpleNamespace(
            queue=SimpleNamespace(requests=[]), state=State.OPEN, wake=lambda: self.wakes.append(1)
        )
        driver = SimpleNamespace(
            thread=self.thread, engine=SimpleNamespace(clock=lambda: self.now_s),
            check_open=list, has_room=list, await_room=self.waits.append,
            submit_again=lambda request, _: self.sent.append((self.now_s, request.message_count)),
        )  # fmt: skip
        parsed, ids = SinkOptions.parse(**options), MessageIds(ip=bytes(4), pid=1, class_hash=1)
        super().__init__(parsed, RequestBuilder(parsed, ids), driver)

    def add(self, *sizes, topic="orders"):
        for size in sizes:
            super().add(Message(topic, b"x"), size, SendFuture(None, None, None, None))

    def run(self, now_s):
        self.now_s = now_s
        return super().run(now_s)


def test_a_batch_is_sent_when_its_first_message_is_due():
    driven = Driven(autoBatch="10s, 1000")
    driven.add(1)
    assert driven.run(1.0) == 11.0
    driven.add(1)
    driven.add(1, topic="other")
    assert driven.run(4.0) == 11.0
    assert driven.run(10.9) == 11.0 and driven.sent == []
    assert driven.run(11.0) == 14.0 and driven.sent == [(11.0, 2)]
    assert driven.run(14.0) == math.inf and driven.sent == [(11.0, 2), (14.0, 1)]


@pytest.mark.parametrize(
    ("sizes", "at_once", "later"),
    [
        ([400, 623], [], [2]), ([400, 624], [2], []), ([400, 625], [1], [1]),
        ([400, 625, 399], [1, 2], []),
    ],
)  # fmt: skip
def test_a_full_batch_is_sent_at_once(sizes, at_once, later):
    driven = Driven(autoBatch="10s, 5000", maxMessageSize=1024)
    driven.add(*sizes)
    driven.run(0.0)
    driven.run(10.0)
    assert driven.sent == [(0.0, count) for count in at_once] + [(10.0, count) for count in later]


def test_what_cannot_be_submitted_fails_and_what_was_submitted_does_not():
    driven, ends = Driven(autoBatch="10s, 1000"), []

    def submit_once(request, token):
        if driven.sent:
            raise ProducerClosedError("closed")
        driven.sent.append(request)

    driven._driver.submit_again = submit_once
    futures = [SimpleNamespace(resolve=lambda *end, n=n: ends.append((n, *end))) for n in range(3)]
    driven.send([(Message("orders", b"x"), future) for future in futures], 1)
    assert [(n, result, type(error)) for n, result, error in ends] == [
        (1, None, ProducerClosedError), (2, None, ProducerClosedError)
    ]  # fmt: skip


def test_callers_wake_the_thread_and_wait_for_it():
    """The first message and a full batch wake the thread. While 16 batches wait for the thread, or
    requests for the window, callers wait."""
    driven, counts = Driven(autoBatch="10s, 1000"), []
    for sizes in ([1], [998], [1], [1000] * 14, [999], [1], [1]):
        driven.add(*sizes)
        counts.append((len(driven.wakes), len(driven.waits)))
    assert counts == [(1, 0), (1, 0), (2, 0), (16, 0), (17, 0), (18, 0), (19, 1)]
    driven.run(0.0)
    driven.add(1)
    driven.thread.queue.requests.append("request")
    driven.add(1)
    assert (len(driven.wakes), len(driven.waits)) == (19, 2), "a batch is open"
    driven.run(10.0)
    driven.add(1)
    assert len(driven.wakes) == 20
    driven.thread.state = State.CLOSED
    with pytest.raises(ProducerClosedError):
        driven.add(1)
    driven.thread.wake = lambda: driven.run(0.0)
    driven.add(1000)  # The thread takes it before it ends.


def test_what_cannot_be_batched_is_sent_alone(cluster, make):
    producer = make(autoBatch="30s, 1000")
    queue = producer.fetch_publish_message_queues("orders")[0]
    for message, more in (
        (Message("orders", b"x", sharding_key="k"), {}),
        (Message("orders", b"x", delay_level=1), {}),
        (Message("orders", b"x" * 1000), {}),
        (Message("orders", b"x"), {"queue": queue}),
        (Message("%RETRY%group", b"x"), {}),
    ):
        producer.send_async(message, **more).result(5)
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
    cluster.behave()
    cluster.on_send(Answer(16, "no"), times=None)
    failed = [producer.send_async(Message("orders", b"x")) for _ in range(3)]
    failures = [future.exception(5) for future in failed]
    assert len(set(map(id, failures))) == 3, "each message has an error of its own"
    assert all(isinstance(failure, RejectedError) for failure in failures)
    producer.close()
    assert len(ends) == 5
    with pytest.raises(ProducerClosedError):
        producer.send_async(Message("orders", b"x"))
