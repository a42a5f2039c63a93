"""A task sends nothing to a bad broker while it has a better one: batches, groups, moved keys."""

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from rocket_sink.options import SinkOptions
from rocket_sink.producer.engine.attempt import SendRequest
from rocket_sink.producer.engine.engine import SendEngine
from rocket_sink.producer.engine.shared_state import SharedBrokerState
from rocket_sink.producer.pool import ProducerPool
from rocket_sink.routing.fault import FAILING, SILENT, SLOW
from rocket_sink.rows.contract import resolve_columns
from rocket_sink.task.runner import TaskRunner
from rocket_sink.testing import Answer, Delay
from tests.clusters import scripted_cluster
from tests.producer.test_bad_brokers import LONG, keep_the_others_well, queue_of, rank_of, sends
from tests.producer.waiting import until
from tests.task.test_groups import CTX, delayed

ROWS = 200
ROOM = {"backPressureForAsyncSendNum": 2000, "requestMaxMessages": 3, "topic": "orders"}
KINDS: dict[str, tuple[Callable[[int], dict[str, Any]], dict[str, Any]]] = {
    "batches": (lambda count: {"body": [b"%d" % n for n in range(count)]}, {}),
    "groups": (delayed, {}),
    "keys": (
        lambda count: {
            "body": [b"%d" % n for n in range(count)],
            "sharding_key": [str(n % 500) for n in range(count)],
        },
        {"ordering": "best_effort"},
    ),
}


cluster = scripted_cluster(orders=4)


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        (kind, fault)
        for kind in KINDS
        for fault in ("late", "error", "frozen", "elsewhere")
        # The later rows of a key wait behind the stuck ones.
        if (kind, fault) != ("keys", "frozen")
    ],
)
def test_a_bad_broker_gets_nothing_new(cluster, tmp_path, closing, kind, fault):
    columns, more = KINDS[kind]
    options = SinkOptions.parse(
        nameServer=cluster.name_server, ledger=str(tmp_path), deliveryTimeoutMs="600s",
        **{**LONG, "faultTable": "3s:10m"}, **ROOM, **more,
    )  # fmt: skip
    bad, well = cluster.brokers
    shared = SharedBrokerState.open(options, directory=str(tmp_path))
    engine, other = (closing(SendEngine(options, shared=shared)) for _ in range(2))
    task = TaskRunner(options, CTX, pool=ProducerPool(make=lambda _: engine))

    def feed(count, times):
        for _ in range(times):
            batch = pa.RecordBatch.from_pydict(columns(count))
            task.feed(batch, resolve_columns(batch.schema, options))
            task.drive()

    def drive(is_over):
        until(lambda: (task.drive(), engine.drive(0.01), is_over())[-1])

    # Both brokers get requests, so that they have an expected latency.
    feed(20, times=8)
    drive(lambda: not engine.pending)
    if fault == "frozen":
        bad.freeze()
    else:
        bad.on_send(Delay(3500) if fault == "late" else Answer(1, "an error"))
    if fault == "elsewhere":
        other.submit(SendRequest("orders", b"bad", queue=queue_of(bad), attempts=1))
        other.drain()
    else:
        feed(20, times=8)
    drive(lambda: rank_of(engine, bad) & (SILENT if fault == "frozen" else SLOW | FAILING))
    stuck = engine.brokers.of(bad.name).in_flight if fault == "frozen" else 0
    drive(lambda: engine.pending <= stuck)
    keep_the_others_well(engine, bad)
    before = sends(bad)
    well.on_send(Delay(20), times=None)
    feed(ROWS, times=1 if kind == "keys" else 10)
    drive(lambda: engine.pending <= stuck)
    bad.thaw()
    summary = task.finish()
    assert summary.acked > ROWS and not summary.dead
    # A frozen broker counts nothing of what came until it thaws.
    assert sends(bad) == before + stuck
