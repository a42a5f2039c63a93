"""Routes behind a proxy, which knows no GET_BROKER_CLUSTER_INFO: missing and deleted topics."""

import pytest

from rocket_sink.errors import NoRouteError
from rocket_sink.testing import Answer, FakeCluster
from rocket_sink.wire.codes import RequestCode, ResponseCode
from tests.producer.engine.test_heartbeats import HandClock

PROXY_MISSING_S = 60.0
UNSUPPORTED = Answer(ResponseCode.REQUEST_CODE_NOT_SUPPORTED, " request type 106 not supported")


@pytest.fixture
def cluster():
    """Yield a cluster behind a proxy, without topics on the fly."""
    with FakeCluster(queues=0) as fake:
        fake.on_name_server(RequestCode.GET_BROKER_CLUSTER_INFO, UNSUPPORTED, times=None)
        fake.create_topic("orders", 2)
        yield fake


@pytest.fixture
def engine(make_engine):
    return make_engine(clock=HandClock())


def drive_until(engine, is_over):
    """Drive the engine, a millisecond of its clock at each step, until the condition holds."""
    for _ in range(2000):
        if is_over():
            return
        engine.drive(0.01)
        engine.clock.now_s += 0.001
    raise AssertionError("the condition never held")


def test_an_unknown_topic_is_named_at_once(engine):
    assert not engine.routes.is_unresolvable("nowhere"), "nobody has asked"
    engine.routes.get("nowhere", engine.clock())
    drive_until(engine, lambda: engine.routes.is_unresolvable("nowhere"))
    with pytest.raises(NoRouteError, match="'nowhere' does not exist"):
        engine.publish_info("nowhere")


def test_a_deleted_topic_is_dropped_after_a_while(cluster, engine):
    """The name server behind the proxy may have restarted, so a known route stays for a while."""
    routes, clock = engine.routes, engine.clock
    drive_until(engine, lambda: routes.get("orders", clock()))
    cluster.delete_topic("orders")
    began_s = clock()
    while clock() < began_s + PROXY_MISSING_S - 5:
        clock.now_s += 2.0
        look_ups = routes.look_ups
        routes.refresh("orders", clock())
        drive_until(engine, lambda n=look_ups: routes.look_ups > n)
        assert routes.get("orders", clock()) is not None
    clock.now_s += 10.0
    routes.refresh("orders", clock())
    drive_until(engine, lambda: routes.get("orders", clock()) is None)
    drive_until(engine, lambda: routes.is_unresolvable("orders"))
    cluster.create_topic("orders", 2)
    clock.now_s += 2.0
    drive_until(engine, lambda: routes.get("orders", clock()))
