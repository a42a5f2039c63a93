"""A bad broker gets no new request while there is a better one, however many are in flight.

The brokers' own request logs show who was sent what.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest

from rocket_sink.message import Message, MessageQueue
from rocket_sink.routing.fault import FAILING, SILENT, SLOW, FaultProfile
from rocket_sink.testing import Answer, Delay
from rocket_sink.testing.script import is_send
from tests.producer.waiting import until

IN_FLIGHT = (16, 64, 200, 500, 2000)
LONG = {"faultTable": "500:10m", "sendMsgTimeout": "600s", "retryBackoffMs": "1"}
"""Options by which a broker that was late, or failed, stays isolated for the whole test."""


def sends(broker):
    return sum(map(is_send, list(broker.requests)))


def rank_of(engine, broker):
    engine.brokers.view(engine.clock())
    return int(engine.brokers.rank(broker.name, "orders"))


def keep_the_others_well(engine, bad):
    """Keep the other brokers from isolation and suspicion, however slow this machine is."""
    engine.brokers.faults.profile = FaultProfile.of("3600000:600000")
    connections = engine.heartbeats.connections
    engine.heartbeats.connections = lambda: (
        connection for connection in connections() if connection[0] == bad.name
    )


def made_bad(producer, bad, fault):
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


def queue_of(broker):
    return MessageQueue("orders", broker.name, 0)


def by_async(producer, count):
    futures = [producer.send_async(Message("orders", b"x")) for _ in range(count)]
    assert all(future.result(120) for future in futures)


def by_threads(producer, count):
    with ThreadPoolExecutor(64) as threads:
        list(threads.map(lambda _: producer.send(Message("orders", b"x")), range(count)))


def by_key(producer, count):
    """Send by key; keys may move."""
    messages = [Message("orders", b"x", sharding_key=str(key)) for key in range(count)]
    assert all(future.result(120) for future in map(producer.send_async, messages))


MODES = {
    "async": (by_async, {}, IN_FLIGHT),
    "automatic batches": (by_async, {"autoBatch": "1ms"}, IN_FLIGHT),
    "threads": (by_threads, {}, (64, 256)),
    "best effort": (by_key, {"ordering": "best_effort"}, (200,)),
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
