"""Old routes, on a clock of the test."""

import time

from rocket_sink.testing import Answer
from tests.producer.conftest import drive_until


class HandClock:
    """A clock that stands still until a test puts it forward."""

    def __init__(self):
        self.now_s = time.monotonic()

    def __call__(self):
        return self.now_s


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
