"""All brokers of the known route are gone: they have moved, or are away for a while."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from rocket_sink.errors import Outcome
from rocket_sink.options import SinkOptions
from rocket_sink.producer.engine import SendEngine
from rocket_sink.producer.shared import SharedHealth
from rocket_sink.producer.stored import StoredMessages
from rocket_sink.testing import CloseConnection, Delay, FakeCluster
from rocket_sink.wire.codes import RequestCode
from tests.producer.conftest import request, send


def _move(cluster: FakeCluster) -> None:
    for broker in cluster.brokers:
        broker.fail_over()


@pytest.mark.parametrize("look_up_s", [0.0, 0.3])
def test_a_route_shared_by_an_earlier_worker_may_be_stale(
    cluster: FakeCluster, tmp_path: Path, look_up_s: float
) -> None:
    """A new worker starts warm, by a route that no broker of is at its address any more."""
    options = SinkOptions(name_server=cluster.name_server)
    one, other = (SharedHealth.open(options, directory=str(tmp_path)) for _ in range(2))
    engine = SendEngine(options, shared=one)
    send(engine)
    engine.close()
    _move(cluster)
    cluster.on_route(Delay(look_up_s), times=None)
    engine = SendEngine(options, shared=other)
    for number in range(50):
        engine.submit(request(number))
    assert {c.outcome for c in engine.drain()} == {Outcome.ACKED}
    engine.close()


def test_bulk_senders_wait_for_brokers_that_are_all_away(
    cluster: FakeCluster, make_engine: Any
) -> None:
    """No answer would come sooner for attempts used up."""
    engine = make_engine(sendMsgTimeout=60_000)
    send(engine)
    for broker in cluster.brokers:
        broker.kill()
    timer = threading.Timer(1.5, lambda: [broker.restart() for broker in cluster.brokers])
    timer.start()
    for number in range(50):
        engine.submit(request(number, patient=True))
    done = engine.drain()
    timer.join()
    assert {c.outcome for c in done} == {Outcome.ACKED} and len(done) == 50
    assert max(len(c.attempts) for c in done) > 3


def test_look_ups_follow_brokers_that_move(cluster: FakeCluster, make_engine: Any) -> None:
    engine = make_engine(storedCheckTimeout=5000)
    engine.submit(request(1))
    engine.drain()
    _move(cluster)
    stored = StoredMessages(engine, since_ms=0)
    assert stored.find("orders", ["ID1", "none"], timed=False) == {"ID1"}


def test_an_inquiry_follows_a_broker_that_moves(cluster: FakeCluster, make_engine: Any) -> None:
    engine = make_engine(storedCheckTimeout=5000, storedCheckDelay=50)
    engine.publish_info("orders")
    for broker in cluster.brokers:
        broker.on_send(CloseConnection())
        broker.on(RequestCode.QUERY_MESSAGE, CloseConnection())
    engine.submit(request(1, proof=("ID1",)))
    until_s = engine.clock() + 10
    while not any(RequestCode.QUERY_MESSAGE in _codes(b) for b in cluster.brokers):
        assert engine.clock() < until_s
        engine.drive(0.005)
    _move(cluster)
    (completion,) = engine.drain()
    assert (completion.outcome, completion.found_stored) == (Outcome.ACKED, True)


def _codes(broker: Any) -> set[int]:
    return {request.code for request in broker.requests}
