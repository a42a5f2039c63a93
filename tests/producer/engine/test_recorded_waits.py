"""Waits in which no broker was asked are on record: with the attempts they make up all the time."""

from rocket_sink.errors import Outcome
from rocket_sink.message import MessageQueue
from tests.producer.conftest import request, send

SHARE = 0.9
"""The least share of the time until the answer that is recorded; the rest is the engine's work."""


def submit_to_away(cluster, engine):
    """Take the second broker's master out of the route, and submit a strict request to it.

    Return the time of the submission."""
    send(engine)
    broker = cluster.brokers[1]
    broker.is_master = False
    broker.kill()
    while broker.name in engine.publish_info("orders").masters:
        engine.routes.refresh("orders", engine.clock())
        engine.drive()
    began_s = engine.clock()
    engine.submit(request(1, queue=MessageQueue("orders", broker.name, 0), ordered=True))
    return began_s


def test_the_wait_for_a_strict_queues_broker_is_one_row(cluster, make_engine):
    engine = make_engine(pollNameServerInterval="200ms", orderWaitMs="60s")
    began_s = submit_to_away(cluster, engine)
    engine.drive_for(1.5)
    cluster.brokers[1].fail_over()
    cluster.brokers[1].is_master = True
    (completion,) = engine.drain(engine.clock() + 30)
    took_s = engine.clock() - began_s
    assert completion.outcome is Outcome.ACKED
    *waits, stored = completion.attempts
    numbers = [attempt.attempt for attempt in completion.attempts]
    assert numbers == sorted(set(numbers))
    waited = waits[-1]
    assert (waited.wire_bytes, waited.broker_address, waited.rtt_ms) == (0, "", 0.0)
    assert (waited.broker_name, waited.queue_id) == (stored.broker_name, 0)
    assert waited.outcome is Outcome.NOT_SENT and waited.error_code
    assert stored.attempt == waited.attempt + 1
    spent_ms = sum(attempt.queue_wait_ms + attempt.rtt_ms for attempt in completion.attempts)
    assert SHARE * took_s <= spent_ms / 1000 <= took_s
