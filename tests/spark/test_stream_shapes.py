"""Streams that keep state before the sink: joins, duplicates, late rows, state of a program."""

import json
import os
import time

import pytest
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

from rocket_sink.ledger.driver.ledger import Ledger
from rocket_sink.spark.sink import RocketSink
from tests.clusters import scripted_cluster
from tests.spark.settings import setting
from tests.spark.streams import run

pytestmark = pytest.mark.spark


cluster = scripted_cluster(1, scope="module")


class World:
    """Folders of files that streams read, one file a micro-batch, and a sink with a ledger."""

    def __init__(self, spark, cluster, folder):
        self._spark, self._cluster, self._folder = spark, cluster, folder
        self._topic = folder.name
        cluster.create_topic(self._topic, queues=1)
        self.ledger = Ledger(folder / "ledger")
        self.sink = RocketSink(
            nameServer=cluster.name_server, topic=self._topic, ledger=self.ledger.path
        )

    def stream(self, name, *files):
        """A stream of rows (id, at), the files in their order."""
        folder = self._folder / name
        folder.mkdir()
        for number, file_rows in enumerate(files):
            lines = (json.dumps({"id": id_, "at": at}) for id_, at in file_rows)
            (folder / f"{number}.json").write_text("\n".join(lines))
            at_s = time.time() - 1000 + number  # Spark reads the oldest file first
            os.utime(folder / f"{number}.json", (at_s, at_s))
        reader = self._spark.readStream.schema("id STRING, at TIMESTAMP")
        frame = reader.option("maxFilesPerTrigger", "1").json(str(folder))
        return frame.withWatermark("at", "1 minute")

    def send(self, frame, *, in_batches=False):
        """Send by foreach, or foreachBatch, and return the bodies; the accounts have to agree."""
        batches = frame.writeStream.foreachBatch(self.sink.write_batch) if in_batches else None
        run(batches or self.sink.stream(frame), self._folder / "checkpoint")
        bodies = [message.body.decode() for message in self._cluster.messages(self._topic)]
        self.ledger.sync(self._spark)
        epochs = self.ledger.epochs(self._spark).collect()
        assert sum(epoch.acked for epoch in epochs) == len(bodies)
        assert all(epoch.adds_up and epoch.confirmed for epoch in epochs)
        return sorted(bodies)


@pytest.fixture
def world(spark, cluster, tmp_path):
    return World(spark, cluster, tmp_path)


EARLY = "2024-01-01T00:00:00Z"


def test_late_rows_that_spark_drops_are_not_sent(world):
    """Spark compares rows with the watermark of the micro-batch before the last one."""
    files = [[("a", EARLY)], [("b", "2024-01-02T00:00:00Z")], [("c", "2024-01-02T00:00:10Z")]]
    frame = world.stream("in", *files, [("late", EARLY), ("d", "2024-01-02T00:00:20Z")])
    counts = frame.groupBy("id", "at").count()
    assert world.send(counts.selectExpr("id AS body")) == ["a"]


@pytest.mark.parametrize("in_batches", [False, True], ids=["foreach", "foreachBatch"])
def test_rows_of_a_stateful_processor_are_sent(spark, world, in_batches):
    """Spark keeps the state of transformWithState in RocksDB only."""

    class Numbers(StatefulProcessor):
        """Numbers a key's rows over all micro-batches."""

        def init(self, handle):
            self._count = handle.getValueState("count", "count INT")

        def handleInputRows(self, key, rows, timers):
            count = self._count.get()[0] if self._count.exists() else 0
            for _ in rows:
                yield Row(body=f"{key[0]}{count}")
                count += 1
            self._count.update((count,))

        def close(self):
            pass

    store = "spark.sql.streaming.stateStore.providerClass"
    rocks_db = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    with setting(spark, store, rocks_db):
        frame = world.stream("in", [("a", EARLY), ("a", EARLY)], [("b", EARLY), ("a", EARLY)])
        numbered = frame.groupBy("id").transformWithState(
            Numbers(), "body STRING", outputMode="append", timeMode="none"
        )
        assert world.send(numbered, in_batches=in_batches) == ["a0", "a1", "a2", "b0"]
