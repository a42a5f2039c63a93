"""What one Python worker learns of a broker, all workers of its executor know."""

from __future__ import annotations

import os
import signal
from collections import Counter
from typing import Any

import pytest
from pyarrow.dataset import dataset

from rocket_sink import RocketSink
from rocket_sink.testing import Delay, FakeCluster

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]

SLOW = "broker-b"
TASKS = 8
ROWS = 4000


@pytest.fixture(scope="module")
def writes(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[int, Counter[str]]]:
    """Requests per worker and broker: of one worker, of all, of new ones after these were killed.

    The executor is the one of a local session; its workers are processes.
    """
    ledger = tmp_path_factory.mktemp("executors") / "ledger"
    read: set[str] = set()
    found: list[dict[int, Counter[str]]] = []
    with FakeCluster(brokers=2) as cluster:
        cluster.create_topic("t")
        cluster.broker(SLOW).on_send(Delay(4000), times=None)
        sink = RocketSink(
            nameServer=cluster.name_server, topic="t", ledger=str(ledger), requestMaxMessages=50,
            sendMsgTimeout=60_000, connectTimeoutMs=20_000, suspectAfterMs=30_000,
            # Slow is slow for the whole test.
            latencyMax="50,3000", notAvailableDuration="0,600000", startDetectorEnable=False,
        )  # fmt: skip

        def write(tasks: int) -> None:
            rows = spark.range(0, ROWS, 1, tasks).selectExpr("cast(id AS string) AS body")
            sink.write(rows)
            # The files, not the view: a query with Delta would take longer than all the sending.
            files = dataset(f"{ledger}/kind=send", format="parquet").files
            sends = dataset([file for file in files if file not in read], format="parquet")
            read.update(files)
            sent: dict[int, Counter[str]] = {}
            for row in sends.to_table(columns=["worker", "broker_name"]).to_pylist():
                worker = int(row["worker"].rpartition(":")[2])
                sent.setdefault(worker, Counter())[row["broker_name"]] += 1
            found.append(sent)

        write(1)
        write(TASKS)
        for worker in {*found[0], *found[1]}:
            os.kill(worker, signal.SIGKILL)
        write(TASKS)
    return found


def test_a_slow_broker_is_avoided_by_all_workers_of_the_executor(
    writes: list[dict[int, Counter[str]]],
) -> None:
    ((first, brokers),) = writes[0].items()
    assert brokers[SLOW], "the first worker never met the slow broker"
    assert set(writes[1]) - {first}, "no other worker had a task"
    assert not any(brokers[SLOW] for brokers in writes[1].values())


def test_new_workers_start_warm(writes: list[dict[int, Counter[str]]]) -> None:
    after = writes[2]
    assert after
    assert not {*writes[0], *writes[1]} & set(after)
    assert not any(brokers[SLOW] for brokers in after.values())
