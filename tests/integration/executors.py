"""Run by `test_executors.py` in a process of its own: a real executor, real worker processes.

Arguments: name server, ledger, topic. Prints one JSON line per write:
{pid of a worker: {broker: requests}}.
"""

from __future__ import annotations

import json
import os
import signal
import sys

from pyarrow.dataset import dataset

from rocket_sink import RocketSink
from rocket_sink.spark.session import build_session

TASKS = 4
ROWS = 2000


def main(name_server: str, ledger: str, topic: str) -> None:
    spark = build_session(
        "rocket-sink-executors",
        master="local-cluster[1,2,1024]",
        conf={
            "spark.executor.memory": "512m",
            "spark.locality.wait": "0",
            "spark.executor.extraJavaOptions": "-XX:TieredStopAtLevel=1",
        },
    )
    sink = RocketSink(
        nameServer=name_server, topic=topic, ledger=ledger, requestMaxMessages=50,
        sendMsgTimeout=60_000, connectTimeoutMs=20_000, suspectAfterMs=30_000,
        # Slow is slow for the whole test.
        latencyMax="50,3000", notAvailableDuration="0,600000", startDetectorEnable=False,
    )  # fmt: skip
    seen: set[int] = set()
    read: set[str] = set()

    def write(tasks: int) -> None:
        rows = spark.range(0, ROWS, 1, tasks).selectExpr("cast(id AS string) AS body")
        sink.write(rows)
        # The files, not the view: a query with Delta would take longer than all the sending.
        files = dataset(f"{ledger}/kind=send", format="parquet").files
        rows_sent = dataset([file for file in files if file not in read], format="parquet")
        read.update(files)
        sent: dict[int, dict[str, int]] = {}
        for row in rows_sent.to_table(columns=["worker", "broker_name"]).to_pylist():
            brokers = sent.setdefault(int(row["worker"].rpartition(":")[2]), {})
            brokers[row["broker_name"]] = brokers.get(row["broker_name"], 0) + 1
        seen.update(sent)
        print(json.dumps(sent), flush=True)

    write(1)
    write(TASKS)
    for pid in seen:
        os.kill(pid, signal.SIGKILL)
    write(TASKS)
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
