"""Rate limits and busy brokers, through engine and producer, on the scripted cluster."""

import pytest

from rocket_sink.errors import Outcome
from rocket_sink.message import MessageQueue
from rocket_sink.options import SinkOptions
from rocket_sink.producer.engine.limits import RateLimiter
from rocket_sink.testing import Answer, Delay
from tests.producer.conftest import request, send, submit


def pace(**options):
    return RateLimiter.of(SinkOptions.parse(options), 0.0)


def test_a_pace():
    assert RateLimiter.of(SinkOptions(), 0.0) is None
    part = pace(maxMessagesPerSecond=100, rateTasks=20)
    assert not part.allows(1, 0, 0.19) and part.allows(1, 0, 0.21)
    both = pace(maxMessagesPerSecond=10, maxBytesPerSecond="1000b")
    assert not both.allows(1, 500, 0.4) and both.due_s == pytest.approx(0.5)
    assert both.allows(1, 500, 0.5)
    both.spend(1, 500, 0.5)
    assert not both.allows(1, 1, 0.5001), "five messages are saved up, but no bytes"
    limiter = pace(maxMessagesPerSecond=10)
    assert limiter.wait_s(5.0, 0.0) == 5.0, "no request waits yet"
    limiter.allows(1, 0, 0.0)
    assert limiter.wait_s(5.0, 0.02) == pytest.approx(0.08)
    assert limiter.wait_s(0.01, 0.02) == 0.01
    assert limiter.wait_s(5.0, limiter.due_s) == 5.0, "nobody waits any more: no busy loop"


@pytest.mark.parametrize(
    ("limit", "requests", "messages", "least_s"),
    [
        ("maxMessagesPerSecond", 30, 1, 0.29),
        ("maxMessagesPerSecond", 3, 10, 0.29),
        ("maxBytesPerSecond", 5, 1, 0.99 * 5 * len(request(1).body) / 100),
    ],
    ids=["messages", "batches", "bytes"],
)
def test_an_engine_keeps_the_limit(make_engine, limit, requests, messages, least_s):
    engine = make_engine(**{limit: 100})
    started = engine.clock()
    submit(engine, requests, message_count=messages)
    taken_s = engine.clock() - started
    assert len(engine.drain()) == requests
    assert taken_s >= least_s


def test_further_attempts_do_not_count(cluster, make_engine):
    cluster.on_send(Answer(2, "[TIMEOUT_CLEAN_QUEUE]broker busy"))
    engine = make_engine(maxMessagesPerSecond=10, retryBackoffMs=1)
    assert len(send(engine, 1).attempts) > 1
    assert engine.try_submit(request(2, message_count=0)), "a retry left a debt"


# --- busy brokers ------------------------------------------------------------------------------


def test_the_window_bounds_what_is_in_flight_and_everything_arrives(cluster, make_engine):
    engine = make_engine(retryBackoffMs=1, retryBackoffMaxMs=1, sendMsgTimeout="60s",
                         retryTimesWhenSendFailed=100)  # fmt: skip
    broker = cluster.brokers[0]
    inside = engine.brokers.of(broker.name)
    broker.on_send(Answer(2, "[PC_SYNCHRONIZED]broker busy"), times=60, chance=0.5)
    broker.on_send(Delay(2), times=None)
    excess = 0
    for number in range(300):
        before = inside.in_flight
        home = MessageQueue("orders", cluster.brokers[0].name, number % 4)
        engine.submit(request(number, queue=home))
        if inside.window is not None and inside.in_flight > before:
            excess += inside.in_flight > int(inside.window.limit)
    done = engine.drain()
    assert excess == 0, "a request went although the window was full"
    assert [c.outcome for c in done] == [Outcome.ACKED] * 300
    assert {c.token for c in done} == set(range(300))
    assert not engine.flow.waiting.size
    assert inside.in_flight == 0


@pytest.mark.timeout(60)
def test_a_last_attempt_waits_for_a_busy_broker_and_not_for_a_failing_one(cluster, make_engine):
    """The failing broker has room. The engine once looped for ever, because it took this for room
    that the attempt may use."""
    engine = make_engine(retryTimesWhenSendFailed=0)
    for broker, code in zip(cluster.brokers, (2, 14), strict=True):
        broker.on_send(Answer(code, "not now"))
        engine.submit(request("first", queue=MessageQueue("orders", broker.name, 0)))
    engine.drain()
    cluster.brokers[0].on_send(Delay(50), times=None)
    submit(engine, 4)
    assert [c.outcome for c in engine.drain()] == [Outcome.ACKED] * 4
    assert not cluster.brokers[1].store.messages("orders")
