"""Asynchronous sends are handed over without a lock: none is lost, overtaken or left waiting."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from rocket_sink.errors import ProducerClosedError, UnwrittenError, WindowFullError
from rocket_sink.message import Message
from rocket_sink.producer import engine_thread
from rocket_sink.producer.engine.attempt import SendRequest
from rocket_sink.testing import Drop
from tests.producer.waiting import in_threads

BODY = b"x" * 20_000
"""A body too large to be handed over without the lock."""


def test_a_sync_send_does_not_overtake_asynchronous_ones(cluster, make_producer):
    producer = make_producer(ordering="strict", maxInFlight=4)
    for number in range(0, 90, 3):
        producer.send_async(Message("orders", b"%d" % number, sharding_key="k"))
        producer.send_async(Message("orders", b"%d" % (number + 1) + BODY, sharding_key="k"))
        producer.send(Message("orders", b"%d" % (number + 2), sharding_key="k"))
    stored = sorted(cluster.messages("orders"), key=lambda message: message.queue_offset)
    assert [int(m.body.rstrip(b"x")) for m in stored] == list(range(90))


@pytest.mark.parametrize("is_async", [True, False])
def test_a_thread_that_waits_for_room_is_woken(cluster, make_producer, monkeypatch, is_async):
    monkeypatch.setattr(engine_thread, "_IDLE_S", 3600.0)
    producer, ends = make_producer(maxInFlight=3), []

    def send(worker):
        for number in range(100):
            message = Message("orders", b"%d-%d" % (worker, number))
            if is_async:
                producer.send_async(message, lambda *end: ends.append(end))
            else:
                ends.append((producer.send(message), None))

    in_threads(3, send)
    producer.close(20)
    assert len(ends) == 300 and all(error is None for _, error in ends)
    assert len({message.body for message in cluster.messages("orders")}) == 300


def test_a_request_that_comes_when_the_thread_has_ended_is_refused(make_producer, monkeypatch):
    """The producer was closed since the sender looked."""
    driver = make_producer()._session.driver
    driver.close(1.0)
    monkeypatch.setattr(driver, "check_open", lambda: None)
    with pytest.raises(ProducerClosedError):
        driver.submit(SendRequest("orders", b"x"), None)
    assert not driver._queue.requests


def test_a_callback_may_send_into_a_full_window(cluster, make_producer):
    producer, is_over = make_producer(maxInFlight=2), threading.Event()
    remaining = [40]

    def again(result, error):
        assert error is None
        remaining[0] -= 1
        if remaining[0] > 0:
            for _ in range(2):
                producer.send_async(Message("orders", b"x"), again)
        else:
            is_over.set()

    producer.send_async(Message("orders", b"x"), again)
    assert is_over.wait(60)


def test_the_time_before_the_engine_takes_it_counts(make_engine):
    engine = make_engine(sendMsgTimeout=60_000)
    engine.publish_info("orders")
    request = SendRequest("orders", b"x", since_s=engine.clock() - 61)
    engine.submit(request)
    (completion,) = engine.drain()
    assert isinstance(completion.error, UnwrittenError)


def test_closing_answers_for_what_was_not_taken(cluster, make_producer):
    cluster.on_send(Drop(), times=10_000)
    producer = make_producer(maxInFlight=8, sendMsgTimeout=60_000)
    started, futures = threading.Event(), []

    def send():
        for number in range(1000):
            futures.append(producer.send_async(Message("orders", b"%d" % number)))
            if number == 3:
                started.set()

    with ThreadPoolExecutor(2) as threads:
        ends = [threads.submit(send) for _ in range(2)]
        assert started.wait(60)
        producer.close(0.1)
        for end in ends:
            assert isinstance(end.exception(60), (ProducerClosedError, WindowFullError))
    for future in futures:
        assert future.exception(60) is not None
