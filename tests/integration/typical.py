"""The usual work of tests with Spark, done once, so that `tests.jvms` can archive its classes."""

import tempfile
from pathlib import Path

from rocket_sink import Ledger
from rocket_sink.spark.session import build_session
from rocket_sink.testing import FakeCluster
from tests.integration.lanes import LANES
from tests.run_command import run_command


def main(folder):
    """Send rows by all lanes with some dead letters, read their ledgers, and backfill them."""
    spark = build_session("rocket-sink-typical", master="local[2]")
    gateway = spark.sparkContext._gateway
    assert gateway is not None
    rows = [{"body": f"body {n}" if n % 5 else "", "sharding_key": f"k{n}"} for n in range(50)]
    source = folder / "in"
    spark.createDataFrame(rows, "body string, sharding_key string").write.parquet(str(source))
    with FakeCluster(brokers=1) as cluster:
        cluster.create_topic("t")
        for lane in LANES:
            ledger = folder / lane.name
            options = {"nameServer": cluster.name_server, "topic": "t", "ledger": str(ledger)}
            lane.run(spark, source, folder / f"checkpoint-{lane.name}", options)
            Ledger(ledger).sync(spark)
            Ledger(ledger).epochs(spark).collect()
            words = ("backfill", "-l", str(ledger), "-n", cluster.name_server, "--json")
            run_command(*words, spark=spark)
    spark.stop()
    # The JVM writes its archive after the last connection is closed.
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        main(Path(name))
