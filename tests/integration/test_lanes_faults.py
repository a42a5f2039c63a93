"""Frozen and killed brokers of a real cluster under the task body, and under a Spark stream."""

import time
import uuid
from concurrent.futures import Future, ThreadPoolExecutor

import pyarrow as pa
import pytest

from rocket_sink.ledger.records import RunContext
from rocket_sink.options import SinkOptions
from rocket_sink.producer.pool import ProducerPool
from rocket_sink.rows.contract import resolve_columns
from rocket_sink.task.runner import TaskRunner
from tests.clusters import make_topic, read_topic
from tests.damaged import damaged

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(3600)]

ROWS = 8_000
KEYS = 200
CTX = RunContext("q", "r", 0, 0, 1, 7, 0, worker="w:1", lane="foreach")


class Sending:
    """A task that sends the table batch by batch. It calls `during` after a third of the rows."""

    def __init__(self, cluster, ledger, **options):
        self.topic = f"t-{uuid.uuid4().hex[:8]}"
        make_topic(cluster, self.topic)
        self.cluster = cluster
        self.options = SinkOptions.parse(
            nameServer=cluster.name_server, topic=self.topic, ledger=str(ledger), **options
        )
        self._repairs: list[Future[None]] = []

    def later(self, delay_s, action):
        """Repair a broker during the sends; `run` returns after the repair.

        Sends need not wait for a broker that is away, but the later reading and the next test's
        topic do. A broker takes seconds to start, and half a minute on a busy machine.
        """

        def repair():
            time.sleep(delay_s)
            action()

        thread = ThreadPoolExecutor(1)
        self._repairs.append(thread.submit(repair))
        thread.shutdown(wait=False)

    def run(self, during):
        pool = ProducerPool()
        run = TaskRunner(self.options, CTX, pool=pool)
        keys = [f"N{i % KEYS}" for i in range(ROWS)]
        table = pa.table({"body": [f"{i:07d}" for i in range(ROWS)], "sharding_key": keys})
        batches = table.to_batches(max_chunksize=200)
        plan = resolve_columns(batches[0].schema, self.options)
        try:
            for number, batch in enumerate(batches):
                if number == len(batches) // 3:
                    during()
                run.feed(batch, plan)
            return run.finish()
        except BaseException:
            run.abort()
            raise
        finally:
            pool.close()
            for repair in self._repairs:
                repair.result()

    def stored(self):
        """Return all messages of the topic, also those of brokers that were away."""
        self.cluster.await_route(self.topic)
        return list(read_topic(self.cluster.name_server, self.topic))


def in_order(stored):
    """Return whether the first copies of each key's messages are in order."""
    per_key: dict[str, dict[bytes, None]] = {}
    for message in stored:
        if damaged(message):
            continue
        per_key.setdefault(message.properties["__SHARDINGKEY"], {})[message.body] = None
    return all(list(bodies) == sorted(bodies) for bodies in per_key.values())


def run_whole(sending, during, after=lambda: None):
    """Send the rows, of which none may be missing; return the summary and the stored messages."""
    summary = sending.run(during)
    after()
    stored = sending.stored()
    assert summary.acked == ROWS and summary.given_up == 0
    assert {int(m.body) for m in stored} == set(range(ROWS))
    return summary, stored


@pytest.mark.parametrize("fault", ["freeze", "kill"])
def test_strict_keys_wait_for_a_broker_that_comes_back_and_stay_in_order(cluster, tmp_path, fault):
    sending = Sending(cluster, tmp_path, ordering="strict", orderWaitMs=200_000)
    broker = cluster.brokers[0]

    def fail():
        getattr(broker, fault)()
        sending.later(4.0, broker.thaw if fault == "freeze" else lambda: broker.restart(300))

    summary, stored = run_whole(sending, fail)
    assert in_order(stored)
    if fault == "freeze":
        assert len(stored) - ROWS <= summary.duplicates_possible
        status = cluster.admin("topicStatus", "-t", sending.topic)
        offsets = [line.split() for line in status.splitlines() if line.startswith("broker")]
        assert sum(int(parts[3]) - int(parts[2]) for parts in offsets) == len(stored)


@pytest.mark.parametrize("ordering", ["none", "best_effort"])
def test_nothing_is_lost_when_a_broker_is_killed(cluster, tmp_path, ordering):
    sending = Sending(cluster, tmp_path, ordering=ordering, sendMsgTimeout=20_000)
    broker = cluster.brokers[1]
    summary, stored = run_whole(sending, broker.kill, broker.restart)
    assert len(stored) - ROWS <= summary.duplicates_possible
