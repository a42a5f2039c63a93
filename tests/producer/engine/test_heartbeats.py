"""The engine's work beside sending, on clocks of the test: idle connections, probes, old routes."""

import time

import pytest

from rocket_sink.net.identity import new_message_ids
from rocket_sink.routing.fault import FAILING
from rocket_sink.testing import Answer
from tests.decoding import decode_message_id
from tests.producer.conftest import drive_until

IN_USE_S = 60.0


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
    drive_until(engine, lambda: engine.routes.get("orders", clock()))
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


def test_a_route_is_dropped_when_it_is_missing_twice(cluster, make_engine):
    """A name server that has just started knows nothing yet; Java keeps such a route for ever."""
    engine = make_engine(clock=HandClock(), createTopic="")
    drive_until(engine, lambda: engine.routes.get("orders", engine.clock()))
    for is_kept in (True, False):
        cluster.on_route(Answer(17, "no such topic"), times=1)
        engine.clock.now_s += 2
        engine.routes.refresh("orders", engine.clock())
        drive_until(engine, lambda: not engine.routes.fetching("orders"))
        assert (engine.routes._topics["orders"].info is not None) is is_kept
    assert engine.routes.is_unresolvable("orders")


def test_two_processes_of_one_address_and_number_make_other_ids():
    """Containers have processes of the same number, and a message id has 16 bits for it."""
    first, other = (decode_message_id(new_message_ids("10.0.0.1").next(1)) for _ in range(2))
    assert (first.ip, first.pid) == (other.ip, other.pid)
    assert first.class_hash != other.class_hash
