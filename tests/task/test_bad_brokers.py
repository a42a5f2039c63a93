"""A task sends nothing to a bad broker while it has a better one: batches, groups, moved keys."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rocket_sink.message import MessageQueue
from rocket_sink.options import SinkOptions
from rocket_sink.producer.engine.attempt import SendRequest
from rocket_sink.producer.engine.engine import SendEngine
from rocket_sink.producer.engine.shared_state import SharedBrokerState
from rocket_sink.producer.pool import ProducerPool
from rocket_sink.routing.fault import FAILING, SILENT, SLOW
from rocket_sink.rows.contract import resolve_columns
from rocket_sink.task.runner import TaskRunner
from rocket_sink.testing import Answer, Delay, FakeCluster
from tests.producer.test_bad_brokers import LONG, keep_the_others_well, rank_of, sends
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


class Trial:
    """A task with its own engine, whose first broker becomes bad."""

    def __init__(self, cluster: FakeCluster, folder: Path, kind: str) -> None:
        self.columns, more = KINDS[kind]
        self.bad, self.well = cluster.brokers
        options = SinkOptions.parse(
            nameServer=cluster.name_server, ledger=str(folder), deliveryTimeoutMs="600s",
            **LONG, **ROOM, **more,
        )  # fmt: skip
        self.shared = SharedBrokerState.open(options, directory=str(folder))
        self.options, self.pool = options, ProducerPool(make=self._make)
        self.run = TaskRunner(options, CTX, pool=self.pool)
        self.engine: Any = None

    def _make(self, options: SinkOptions) -> SendEngine:
        self.engine = SendEngine(options, shared=self.shared)
        return self.engine

    def feed_both(self) -> None:
        """Feed a request for each queue."""
        for _ in range(8):
            self.feed(20)

    def feed(self, count: int) -> None:
        batch = pa.RecordBatch.from_pydict(self.columns(count))
        self.run.feed(batch, resolve_columns(batch.schema, self.options))

    def drive(self, is_over: Callable[[], Any]) -> None:
        until_s = self.engine.clock() + 120
        while not is_over():
            assert self.engine.clock() < until_s
            self.run.drive()
            self.engine.drive(0.01)

    def make_bad(self, fault: str) -> None:
        self.drive(lambda: not self.engine.pending)
        if fault == "elsewhere":
            other = SendEngine(self.options, shared=self.shared)
            self.bad.on_send(Answer(1, "an error"))
            queue = MessageQueue("orders", self.bad.name, 0)
            other.submit(SendRequest("orders", b"bad", queue=queue, attempts=1))
            other.drain()
        elif fault == "frozen":
            self.bad.freeze()
            self.feed_both()
        else:
            self.bad.on_send(Answer(1, "an error") if fault == "error" else Delay(600))
            self.feed_both()
        wanted = SILENT if fault == "frozen" else SLOW | FAILING
        self.drive(lambda: rank_of(self.engine, self.bad) & wanted)
        stuck = self.engine.brokers.of(self.bad.name).in_flight
        self.drive(lambda: self.engine.pending <= (stuck if fault == "frozen" else 0))
        keep_the_others_well(self.engine, self.bad)

    def begin(self) -> None:
        """Send to both brokers, so that they have an expected latency."""
        for broker in (self.bad, self.well):
            broker.on_send(Delay(1), times=None)
        self.feed_both()
        for broker in (self.bad, self.well):
            broker.behave()


@pytest.fixture
def trial(tmp_path: Path) -> Iterator[Callable[[str], Trial]]:
    with FakeCluster(brokers=2, queues=4) as cluster:
        cluster.create_topic("orders", 4)
        trials: list[Trial] = []

        def make(kind: str) -> Trial:
            trials.append(Trial(cluster, tmp_path, kind))
            return trials[-1]

        yield make
        trials[-1].pool.close()


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
def test_a_bad_broker_gets_nothing_new(
    trial: Callable[[str], Trial], kind: str, fault: str
) -> None:
    task = trial(kind)
    task.begin()
    task.make_bad(fault)
    bad, well, engine = task.bad, task.well, task.engine
    stuck = engine.brokers.of(bad.name).in_flight
    before = sends(bad)
    well.on_send(Delay(20), times=None)
    for _ in range(1 if kind == "keys" else 10):
        task.feed(ROWS)
        task.run.drive()
    task.drive(lambda: engine.pending <= (stuck if fault == "frozen" else 0))
    bad.thaw()
    summary = task.run.finish()
    assert summary.acked > ROWS and not summary.dead
    # A frozen broker counts nothing of what came until it thaws.
    assert sends(bad) == before + (stuck if fault == "frozen" else 0)
