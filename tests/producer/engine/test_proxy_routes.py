"""Routes behind a proxy, which knows no GET_BROKER_CLUSTER_INFO: missing and deleted topics."""

from collections.abc import Callable, Iterator

import pytest

from rocket_sink.errors import NoRouteError
from rocket_sink.options import SinkOptions
from rocket_sink.producer.engine.engine import SendEngine
from rocket_sink.producer.engine.routes import PROXY_MISSING_S
from rocket_sink.testing import Answer, FakeCluster
from rocket_sink.wire.codes import RequestCode, ResponseCode
from tests.producer.engine.test_heartbeats import HandClock

UNSUPPORTED = Answer(ResponseCode.REQUEST_CODE_NOT_SUPPORTED, " request type 106 not supported")


@pytest.fixture
def proxied() -> Iterator[tuple[FakeCluster, SendEngine, HandClock]]:
    """Yield a cluster behind a proxy, without topics on the fly, and an engine with its clock."""
    with FakeCluster(queues=0) as cluster:
        cluster.on_name_server(RequestCode.GET_BROKER_CLUSTER_INFO, UNSUPPORTED, times=None)
        cluster.create_topic("orders", 2)
        clock = HandClock()
        engine = SendEngine(SinkOptions.parse(nameServer=cluster.name_server), clock=clock)
        yield cluster, engine, clock
        engine.close(0.2)


def drive_until(engine: SendEngine, clock: HandClock, is_over: Callable[[], object]) -> None:
    """Drive the engine, a millisecond of its clock at each step, until the condition holds."""
    for _ in range(2000):
        if is_over():
            return
        engine.drive(0.01)
        clock.now_s += 0.001
    raise AssertionError("the condition never held")


def test_an_unknown_topic_is_named_at_once(
    proxied: tuple[FakeCluster, SendEngine, HandClock],
) -> None:
    _, engine, clock = proxied
    engine.routes.get("nowhere", clock())
    drive_until(engine, clock, lambda: engine.routes.is_unresolvable("nowhere"))
    with pytest.raises(NoRouteError, match="'nowhere' does not exist"):
        engine.publish_info("nowhere")


def test_a_deleted_topic_is_dropped_after_a_while(
    proxied: tuple[FakeCluster, SendEngine, HandClock],
) -> None:
    """The name server behind the proxy may have restarted, so a known route stays for a while."""
    cluster, engine, clock = proxied
    routes = engine.routes
    drive_until(engine, clock, lambda: routes.get("orders", clock()))
    cluster.delete_topic("orders")
    began_s = clock()
    while clock() < began_s + PROXY_MISSING_S - 5:
        clock.now_s += 2.0
        look_ups = routes.look_ups
        routes.refresh("orders", clock())
        drive_until(engine, clock, lambda n=look_ups: routes.look_ups > n)
        assert routes.get("orders", clock()) is not None
    clock.now_s += 10.0
    routes.refresh("orders", clock())
    drive_until(engine, clock, lambda: routes.get("orders", clock()) is None)
    drive_until(engine, clock, lambda: routes.is_unresolvable("orders"))
    cluster.create_topic("orders", 2)
    clock.now_s += 2.0
    drive_until(engine, clock, lambda: routes.get("orders", clock()))
