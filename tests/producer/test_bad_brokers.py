"""A bad broker gets no new request while there is a better one, however many are in flight.

The brokers' own request logs show who was sent what.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from rocket_sink.message import Message, MessageQueue
from rocket_sink.producer.producer import Producer
from rocket_sink.routing.fault import FAILING, SILENT, SLOW, FaultProfile
from rocket_sink.testing import Answer, Delay
from rocket_sink.testing.broker import FakeBroker
from rocket_sink.testing.script import is_send
from tests.producer.conftest import drive_until, request, send, submit
from tests.producer.waiting import until

IN_FLIGHT = (16, 64, 200, 500, 2000)
LONG = {"faultTable": "500:10m", "sendMsgTimeout": "600s", "retryBackoffMs": "1"}
"""Options by which a broker that was late, or failed, stays isolated for the whole test."""


def sends(broker: FakeBroker) -> int:
    return sum(map(is_send, list(broker.requests)))


def rank_of(engine: Any, broker: FakeBroker) -> int:
    engine.brokers.view(engine.clock())
    return int(engine.brokers.rank(broker.name, "orders"))


def keep_the_others_well(engine: Any, bad: FakeBroker) -> None:
    """Keep the other brokers from isolation and suspicion, however slow this machine is."""
    engine.brokers.faults.profile = FaultProfile.of("3600000:600000")
    connections = engine.heartbeats.connections
    engine.heartbeats.connections = lambda: (
        connection for connection in connections() if connection[0] == bad.name
    )


def made_bad(producer: Producer, bad: FakeBroker, fault: str) -> Any:
    """Return the future of the request that is stuck at the broker, or ended badly."""
    bad.behave()
    if fault == "late":
        bad.on_send(Delay(600))
    elif fault == "error":
        bad.on_send(Answer(1, "an error"))
    else:
        bad.freeze()
    stuck = producer.send_async(Message("orders", b"stuck"), queue=queue_of(bad))
    if fault != "frozen":
        stuck.exception(60)
    engine = producer._session.engine
    until(lambda: rank_of(engine, bad) & (SILENT if fault == "frozen" else SLOW | FAILING), 60)
    keep_the_others_well(engine, bad)
    return stuck


def queue_of(broker: FakeBroker) -> MessageQueue:
    return MessageQueue("orders", broker.name, 0)


def by_async(producer: Producer, count: int) -> None:
    futures = [producer.send_async(Message("orders", b"x")) for _ in range(count)]
    assert all(future.result(120) for future in futures)


def by_threads(producer: Producer, count: int) -> None:
    with ThreadPoolExecutor(64) as threads:
        list(threads.map(lambda _: producer.send(Message("orders", b"x")), range(count)))


def by_batches(producer: Producer, count: int) -> None:
    batch = [Message("orders", b"x"), Message("orders", b"y")]
    with ThreadPoolExecutor(32) as threads:
        list(threads.map(lambda _: producer.send_batch(batch), range(count)))


def by_key(producer: Producer, count: int) -> None:
    """Send by key; keys may move."""
    messages = [Message("orders", b"x", sharding_key=str(key)) for key in range(count)]
    assert all(future.result(120) for future in map(producer.send_async, messages))


Mode = Callable[[Producer, int], None]
MODES: dict[str, tuple[Mode, dict[str, Any], tuple[int, ...]]] = {
    "async": (by_async, {}, IN_FLIGHT),
    "automatic batches": (by_async, {"autoBatch": "1ms"}, IN_FLIGHT),
    "threads": (by_threads, {}, (64, 256)),
    "batches": (by_batches, {}, (64,)),
    "best effort": (by_key, {"ordering": "best_effort"}, (200,)),
    "weighted": (by_async, {"queueSelector": "weighted"}, (200,)),
    "least latency": (by_async, {"queueSelector": "least_latency"}, (200,)),
}


@pytest.mark.parametrize("fault", ["late", "error", "frozen"])
@pytest.mark.parametrize("mode", MODES)
def test_a_bad_broker_gets_nothing_new(cluster, make_producer, mode, fault):
    send_all, options, counts = MODES[mode]
    bad, well = cluster.brokers
    producer = make_producer(**LONG, **options)
    for broker in cluster.brokers:
        producer.send(Message("orders", b"warm"), queue=queue_of(broker))
    stuck = made_bad(producer, bad, fault)
    before = sends(bad)
    well.on_send(Delay(20), times=None)
    for count in counts:
        send_all(producer, count)
    if fault == "frozen":
        bad.thaw()
        stuck.result(60)
        before += 1
    assert sends(bad) == before
    assert sends(well) > len(counts)


def test_a_busy_broker_is_waited_for_while_the_other_one_is_worse(cluster, make_engine):
    """A request waits for its share of the time: the first of three attempts has a third."""
    bad, busy = cluster.brokers
    engine = make_engine(**{**LONG, "faultTable": "9s:10m", "suspectAfterMs": 60_000})
    for broker in cluster.brokers:
        send(engine, "warm", queue=queue_of(broker))
    bad.on_send(Answer(1, "an error"))
    send(engine, "bad", queue=queue_of(bad), attempts=1)
    before, inside = sends(bad), engine.brokers.of(busy.name)
    inside.in_flight += 4
    inside.busy(0.0, engine.clock())
    inside.in_flight -= 4
    busy.on_send(Delay(20), times=40)
    for number in range(40):
        engine.submit(request(number))
        assert inside.in_flight <= int(inside.window.limit)
    assert all(completion.outcome.delivered for completion in engine.drain())
    assert sends(bad) == before
    busy.on_send(Delay(3000), times=None)
    places, began_s = int(inside.window.limit), engine.clock()
    submit(engine, places + 10, timeout_s=6.0)
    drive_until(engine, lambda: sends(bad) > before or not engine.pending)
    waited_s = engine.clock() - began_s
    assert all(completion.outcome.delivered for completion in engine.drain())
    assert waited_s > 1.9, "its share of the time was not over"
    assert sends(bad) == before + 10, "a worse one is better than none"
