"""Sends by all lanes from a plain session: without Delta's jars, and without pytest.

    PYTHONPATH=. ENVIRONMENT/bin/python -m tests.versions.lanes FOLDER

Runs in the environment of a platform, into which only rocket-sink was installed. Each lane sends
200 rows to a scripted cluster; the brokers' messages and the ledger's sums have to agree with them.
"""

import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from rocket_sink import Ledger
from rocket_sink.testing import FakeCluster
from tests.integration.lanes import LANES

ROWS = 200


def main(folder):
    spark = (
        SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    (folder / "source").mkdir(parents=True)
    rows = pa.table({"body": [str(n) for n in range(ROWS)], "keys": [f"k{n}" for n in range(ROWS)]})
    pq.write_table(rows, folder / "source" / "rows.parquet")
    with FakeCluster(brokers=2) as cluster:
        for lane in LANES:
            ledger = Ledger(folder / lane.name)
            topic = f"t-{lane.name}"
            options = {"nameServer": cluster.name_server, "topic": topic, "ledger": ledger.path}
            lane.run(spark, folder / "source", folder / f"{lane.name}-checkpoint", options)
            ledger.sync(spark)
            bodies = sorted(int(message.body) for message in cluster.messages(topic))
            acked = sum(row.acked for row in ledger.epochs(spark).collect())
            assert (bodies, acked) == (list(range(ROWS)), ROWS), (lane.name, len(bodies), acked)
            print(f"{lane.name}: {ROWS} rows sent, and in the ledger", flush=True)
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
