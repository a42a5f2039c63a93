"""Python workers of an executor share what each learns of a broker."""

import os
import signal
from collections import Counter

import pytest
from pyarrow.dataset import dataset

from rocket_sink import RocketSink
from rocket_sink.testing import Delay, FakeCluster

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]

SLOW = "broker-b"
TASKS = 8
ROWS = 4000


@pytest.fixture(scope="module")
def writes(spark, tmp_path_factory):
    """Return requests per worker and broker for three writes.

    The first write uses one worker, the second all, the third new workers after all were killed.
    The workers are processes of a local session's executor.
    """
    ledger = tmp_path_factory.mktemp("executors") / "ledger"
    read: set[str] = set()
    writes_sent: list[dict[int, Counter[str]]] = []
    with FakeCluster(brokers=2) as cluster:
        cluster.create_topic("t")
        cluster.broker(SLOW).on_send(Delay(4000), times=None)
        sink = RocketSink(
            nameServer=cluster.name_server, topic="t", ledger=str(ledger), requestMaxMessages=50,
            sendMsgTimeout=60_000, connectTimeoutMs=20_000, suspectAfterMs=30_000,
            # A slow broker stays slow for the whole test.
            faultTable="50:0, 3s:10m",
        )  # fmt: skip

        def write(tasks):
            rows = spark.range(0, ROWS, 1, tasks).selectExpr("cast(id AS string) AS body")
            sink.write(rows)
            # Reading files is quick; a query of the view would take longer than all the sending.
            files = dataset(f"{ledger}/kind=send", format="parquet").files
            sends = dataset([file for file in files if file not in read], format="parquet")
            read.update(files)
            sent: dict[int, Counter[str]] = {}
            for row in sends.to_table(columns=["worker", "broker_name"]).to_pylist():
                worker = int(row["worker"].rpartition(":")[2])
                sent.setdefault(worker, Counter())[row["broker_name"]] += 1
            writes_sent.append(sent)

        write(1)
        write(TASKS)
        for worker in {*writes_sent[0], *writes_sent[1]}:
            os.kill(worker, signal.SIGKILL)
        write(TASKS)
    return writes_sent


def test_a_slow_broker_is_avoided_by_all_workers_of_the_executor(writes):
    ((first, brokers),) = writes[0].items()
    assert brokers[SLOW], "the first worker never met the slow broker"
    assert set(writes[1]) - {first}, "no other worker had a task"
    assert not any(brokers[SLOW] for brokers in writes[1].values())


def test_new_workers_start_warm(writes):
    after = writes[2]
    assert after
    assert not {*writes[0], *writes[1]} & set(after)
    assert not any(brokers[SLOW] for brokers in after.values())
