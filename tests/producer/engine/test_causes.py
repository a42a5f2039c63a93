"""A broker that is bad for a lesser cause gets all requests: each pair of causes, in each mode."""

import contextlib
import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest

from rocket_sink.errors import SendError
from rocket_sink.message import Message, MessageQueue
from rocket_sink.options import SinkOptions
from rocket_sink.producer.engine.engine import SendEngine
from rocket_sink.producer.producer import Producer
from rocket_sink.producer.send_group import group_request
from rocket_sink.routing.fault import BUSY, FAILING, SLOW, UNREACHABLE, FaultItem
from rocket_sink.testing import Answer, Delay, FakeCluster
from rocket_sink.testing.broker import FakeBroker
from rocket_sink.testing.script import is_send
from rocket_sink.wire.codes import ResponseCode
from tests.producer.conftest import request

MODES = ("sync", "async", "groups")
CAUSES = (0, SLOW, BUSY, FAILING, UNREACHABLE)
BUSY_ANSWER = Answer(ResponseCode.SYSTEM_BUSY, "[PCBUSY_CLEAN_QUEUE]broker busy")
ERROR = Answer(ResponseCode.SYSTEM_ERROR, "store broken")


def sends(broker: FakeBroker) -> int:
    return sum(map(is_send, broker.requests))


def entry(name: str, cause: int, until_s: float) -> FaultItem:
    """Return the entry of a broker that is isolated for this cause until `until_s`."""
    if cause == SLOW:
        return FaultItem(name, slow_until_s=until_s)
    if cause == BUSY:
        return FaultItem(name, busy_until_s=until_s)
    is_reachable = cause != UNREACHABLE
    end_s = until_s if cause else 0.0
    return FaultItem(name, failing_until_s=end_s, reachable=is_reachable, check_s=until_s)


@pytest.fixture(scope="module", params=[2, 3, 4, 5])
def of_several(request):
    with FakeCluster(brokers=request.param) as cluster:
        cluster.create_topic("orders", 2)
        # A pause of this machine must not make a broker suspect.
        options = {"suspectAfterMs": "60s", "sendMsgTimeout": "120s", "faultTable": "1h:10m"}
        engine = SendEngine(SinkOptions.parse(nameServer=cluster.name_server, **options))
        engine.publish_info("orders")
        yield cluster, engine
        engine.close(0.2)


def send_all(engine: SendEngine, mode: str) -> None:
    """Send 60 messages: each after the answer to the one before, all at once, or in groups."""
    if mode == "groups":
        for _ in range(2):
            engine.submit(group_request([request(number) for number in range(30)]))
    else:
        for number in range(60):
            engine.submit(request(number))
            if mode == "sync":
                engine.drain()
    engine.drain()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("better", "worse"), [*itertools.combinations(CAUSES, 2)])
def test_the_broker_with_the_lesser_cause_gets_all_requests(of_several, better, worse, mode):
    cluster, engine = of_several
    good, *others = cluster.brokers
    until_s = engine.clock() + 3600
    table = engine.brokers.faults
    for broker, cause in zip((good, *others), (better, *[worse] * 4), strict=False):
        table.store[broker.name] = entry(broker.name, cause, until_s)
    table.isolate_topic("another", good.name, engine.clock(), "NO_PERMISSION")
    engine.brokers.view(engine.clock() + 1)
    before = [sends(broker) for broker in cluster.brokers]
    send_all(engine, mode)
    counts = [sends(broker) - n for broker, n in zip(cluster.brokers, before, strict=True)]
    assert counts == [60, *[0] * len(others)]


@pytest.mark.parametrize("mode", MODES)
def test_a_slow_broker_that_stores_is_preferred_to_a_busy_and_to_a_failing_one(mode):
    with FakeCluster(brokers=3) as cluster:
        cluster.create_topic("orders", 4)
        slow, failing, busy = cluster.brokers
        options = {"faultTable": "50:10m", "sendMsgTimeout": "60s"}
        options |= {"suspectAfterMs": "60s", "autoBatch": False}
        with Producer(nameServer=cluster.name_server, **options) as producer:

            def send_to(broker: FakeBroker, times: int) -> None:
                queue = MessageQueue("orders", broker.name, 0)
                for _ in range(times):
                    with contextlib.suppress(SendError):
                        producer.send(Message("orders", b"x"), queue=queue, timeout_ms=5000)

            slow.on_send(Delay(60), times=None)
            failing.on_send(ERROR, times=None)
            busy.on_send(BUSY_ANSWER, times=2)
            for broker in cluster.brokers:
                send_to(broker, 1)
            assert not any(health.available for health in producer.broker_health())
            before = sends(failing), sends(busy)
            if mode == "sync":
                with ThreadPoolExecutor(16) as threads:
                    results = [
                        threads.submit(producer.send, Message("orders", b"m")) for _ in range(200)
                    ]
                assert all(result.result().outcome.delivered for result in results)
            else:
                size = 200 if mode == "async" else 20
                for _ in range(200 // size):
                    futures = [producer.send_async(Message("orders", b"m")) for _ in range(size)]
                    assert all(future.result(60).outcome.delivered for future in futures)
            assert (sends(failing), sends(busy)) == before
