"""The engine's work beside sending, on clocks of the test: idle connections, probes, old routes."""

import time

import pytest

from rocket_sink.message import Message
from rocket_sink.net.identity import new_message_ids
from rocket_sink.producer.engine.routes import IN_USE_S
from rocket_sink.producer.producer import Producer
from rocket_sink.routing.fault import FAILING
from rocket_sink.testing import Answer, Drop
from rocket_sink.wire.codes import RequestCode
from tests.decoding import decode_message_id
from tests.producer.conftest import drive_until, send
from tests.producer.waiting import until
from tests.routing.fault_views import is_reachable


class Clock:
    """A clock that runs, and that a test can put forward."""

    def __init__(self):
        self.ahead_s = 0.0

    def __call__(self):
        return time.monotonic() + self.ahead_s


@pytest.fixture
def make(make_engine):
    return lambda **options: make_engine(clock=Clock(), **options)


class HandClock:
    """A clock that stands still until a test puts it forward."""

    def __init__(self):
        self.now_s = time.monotonic()

    def __call__(self):
        return self.now_s


@pytest.fixture
def engine_and_clock(make_engine):
    """Return an engine that has a route, and its clock."""
    clock = HandClock()
    engine = make_engine(clock=clock)
    while not engine.routes.get("orders", clock()):
        engine.drive(0.01)
        clock.now_s += 0.01
    return engine, clock


@pytest.mark.parametrize("is_used", [True, False])
def test_a_broker_of_topics_that_nobody_sends_to_is_not_probed(
    cluster, engine_and_clock, is_used, monkeypatch
):
    """It was probed every 2 s for ever, also after its topic and itself were deleted."""
    engine, clock = engine_and_clock
    bad = cluster.brokers[0]
    bad.kill()
    table = engine.brokers.faults
    table.update(bad.name, 1.0, clock(), rank=FAILING, reachable=False, cause="CONNECT")
    probed_s = []
    monkeypatch.setattr(table, "note_probe", lambda *args, **more: probed_s.append(clock()))
    began_s = clock()
    while clock() < began_s + 10 * IN_USE_S:
        if is_used:
            engine.routes.get("orders", clock())
        engine.drive(0.0)
        clock.now_s += 0.5
    late = [at_s for at_s in probed_s if at_s > began_s + 2 * IN_USE_S]
    assert len(probed_s) - len(late) >= 10
    assert bool(late) is is_used


def test_a_sync_producer_finds_a_broker_that_is_back_between_its_sends(cluster):
    """Only the heartbeat thread sends the probe and reads its answer."""
    options = {"heartbeatBrokerInterval": "1h", "faultTable": "50:10m"}
    with Producer(nameServer=cluster.name_server, **options) as producer:
        broker = cluster.brokers[0]
        table = producer._session.engine.brokers.faults
        producer.send(Message("orders", b"first"))
        broker.kill()
        until(
            lambda: producer.send(Message("orders", b"x")) and not is_reachable(table, broker.name)
        )
        broker.restart()
        until(lambda: is_reachable(table, broker.name), 30.0)


def test_a_route_is_dropped_when_it_is_missing_twice(cluster, make):
    """A name server that has just started knows nothing yet; Java keeps such a route for ever."""
    engine = make(createTopic="")
    engine.publish_info("orders")
    for is_kept in (True, False):
        cluster.on_route(Answer(17, "no such topic"), times=1)
        engine.clock.ahead_s += 2
        engine.routes.refresh("orders", engine.clock())
        drive_until(engine, lambda: not engine.routes.fetching("orders"))
        assert (engine.routes._topics["orders"].info is not None) is is_kept
    assert engine.routes.is_unresolvable("orders")


def test_two_processes_of_one_address_and_number_make_other_ids():
    """Containers have processes of the same number, and a message id has 16 bits for it."""
    first, other = (decode_message_id(new_message_ids("10.0.0.1").next(1)) for _ in range(2))
    assert (first.ip, first.pid) == (other.ip, other.pid)
    assert first.class_hash != other.class_hash


def test_brokers_hear_of_the_end_although_a_heartbeat_is_not_answered(cluster, engine):
    cluster.on(RequestCode.HEART_BEAT, Drop(), times=None)
    send(engine)
    drive_until(engine, lambda: cluster.requests(RequestCode.HEART_BEAT))
    engine.close()
    assert cluster.requests(RequestCode.UNREGISTER_CLIENT)
