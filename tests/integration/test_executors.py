"""Python workers of an executor share what each learns of a broker."""

import os
import signal
from collections import Counter

import pytest
from pyarrow.dataset import dataset

from rocket_sink import RocketSink
from rocket_sink.testing import Delay
from tests.clusters import scripted_cluster

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]

SLOW = "broker-b"
TASKS = 8


cluster = scripted_cluster(t=4)


def test_workers_share_what_they_learn_and_new_ones_start_warm(spark, cluster, tmp_path):
    """The first write uses one worker, the second all, the third new workers after all were killed.

    The workers are processes of a local session's executor.
    """
    ledger = tmp_path / "ledger"
    read: set[str] = set()
    cluster.broker(SLOW).on_send(Delay(4000), times=None)
    sink = RocketSink(
        nameServer=cluster.name_server, topic="t", ledger=str(ledger), requestMaxMessages=50,
        sendMsgTimeout=60_000, connectTimeoutMs=20_000, suspectAfterMs=30_000,
        # A slow broker stays slow for the whole test.
        faultTable="50:0, 3s:10m",
    )  # fmt: skip

    def write(tasks):
        """Send the rows; return {worker: requests by broker}."""
        sink.write(spark.range(0, 4000, 1, tasks).selectExpr("cast(id AS string) AS body"))
        # Reading files is quick; a query of the view would take longer than all the sending.
        files = dataset(f"{ledger}/kind=send", format="parquet").files
        sends = dataset([file for file in files if file not in read], format="parquet")
        read.update(files)
        sent: dict[int, Counter[str]] = {}
        for row in sends.to_table(columns=["worker", "broker_name"]).to_pylist():
            worker = int(row["worker"].rpartition(":")[2])
            sent.setdefault(worker, Counter())[row["broker_name"]] += 1
        return sent

    ((first, brokers),) = write(1).items()
    assert brokers[SLOW], "the first worker never met the slow broker"
    shared = write(TASKS)
    assert set(shared) - {first}, "no other worker had a task"
    for worker in {first, *shared}:
        os.kill(worker, signal.SIGKILL)
    warm = write(TASKS)
    assert warm and not {first, *shared} & set(warm)
    assert not any(brokers[SLOW] for brokers in (*shared.values(), *warm.values()))
