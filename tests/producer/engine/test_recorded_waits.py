"""Waits in which no broker was asked are on record: with the attempts they make up all the time."""

import time
from typing import Any

import pytest

from rocket_sink.errors import Outcome
from rocket_sink.message import MessageQueue
from rocket_sink.testing import FakeCluster
from tests.producer.conftest import request, send

SHARE = 0.9
"""The least share of the time until the answer that is recorded; the rest is the engine's work."""


def _away(cluster: FakeCluster, engine: Any) -> Any:
    """Take a broker's master out of the route; return the broker when the engine knows."""
    broker = cluster.brokers[1]
    broker.is_master = False
    broker.kill()
    until_s = engine.clock() + 20
    while broker.name in engine.publish_info("orders").masters and engine.clock() < until_s:
        engine.routes.refresh("orders", engine.clock())
        engine.drive()
    return broker


def _strict(engine: Any, broker: Any) -> Any:
    engine.submit(request(1, queue=MessageQueue("orders", broker.name, 0), ordered=True))


@pytest.fixture
def engine(cluster: FakeCluster, make_engine: Any) -> Any:
    send_engine = make_engine(pollNameServerInterval="200ms", orderWaitMs="60s")
    send(send_engine)
    return send_engine


def _spent(completion: Any) -> float:
    return sum(attempt.queue_wait_ms + attempt.rtt_ms for attempt in completion.attempts) / 1000


def _waited(cluster: FakeCluster, engine: Any) -> tuple[Any, float]:
    """Send a strict request whose broker comes back after a while; return it and its time (s)."""
    broker = _away(cluster, engine)
    began_s = time.monotonic()
    _strict(engine, broker)
    while time.monotonic() < began_s + 1.5:
        engine.drive()
    broker.fail_over()
    broker.is_master = True
    (completion,) = engine.drain(engine.clock() + 30)
    return completion, time.monotonic() - began_s


def test_the_wait_for_a_strict_queues_broker_is_one_row(cluster: FakeCluster, engine: Any) -> None:
    completion, took_s = _waited(cluster, engine)
    assert completion.outcome is Outcome.ACKED
    *waits, stored = completion.attempts
    assert [attempt.attempt for attempt in completion.attempts] == sorted(
        {attempt.attempt for attempt in completion.attempts}
    )
    waited = waits[-1]
    assert (waited.wire_bytes, waited.broker_address, waited.rtt_ms) == (0, "", 0.0)
    assert (waited.broker_name, waited.queue_id) == (stored.broker_name, 0)
    assert waited.outcome is Outcome.NOT_SENT and waited.error_code
    assert stored.attempt == waited.attempt + 1
    assert SHARE * took_s <= _spent(completion) <= took_s


def test_a_wait_in_vain_is_on_record(cluster: FakeCluster, make_engine: Any) -> None:
    engine = make_engine(pollNameServerInterval="200ms", orderWaitMs="800ms")
    send(engine)
    broker = _away(cluster, engine)
    _strict(engine, broker)
    (completion,) = engine.drain(engine.clock() + 30)
    assert not completion.outcome.delivered
    waited = completion.attempts[-1]
    assert (waited.broker_name, waited.wire_bytes) == (broker.name, 0)
    assert waited.queue_wait_ms >= SHARE * 800
    assert waited.attempt > 1, "many looks at the route are one row"
