"""Streams that keep state before the sink: joins, duplicates, late rows, state of a program."""

import json
import os
import time

import pytest
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

from rocket_sink.ledger.driver.ledger import Ledger
from tests.clusters import scripted_cluster
from tests.integration.lanes import stream_writer
from tests.spark.settings import setting
from tests.spark.streams import confirmed_epochs, run

pytestmark = pytest.mark.spark


cluster = scripted_cluster(1, t=1)
EARLY = "2024-01-01T00:00:00Z"


def stream_of(spark, folder, *files):
    """Return a stream of rows (id, at), a file a micro-batch."""
    (folder / "in").mkdir()
    for number, rows in enumerate(files):
        file = folder / "in" / f"{number}.json"
        file.write_text("\n".join(json.dumps({"id": id_, "at": at}) for id_, at in rows))
        at_s = time.time() - 1000 + number  # Spark reads the oldest file first
        os.utime(file, (at_s, at_s))
    reader = spark.readStream.schema("id STRING, at TIMESTAMP").option("maxFilesPerTrigger", "1")
    return reader.json(str(folder / "in")).withWatermark("at", "1 minute")


def bodies(spark, cluster, folder, lane, frame):
    """Send the frame, and return the stored bodies; the accounts have to agree."""
    ledger = Ledger(folder / "ledger")
    options = {"nameServer": cluster.name_server, "topic": "t", "ledger": ledger.path}
    run(stream_writer(lane, frame, options), folder / "checkpoint")
    stored = [message.body.decode() for message in cluster.messages("t")]
    epochs = confirmed_epochs(spark, ledger)
    assert sum(epoch.acked for epoch in epochs) == len(stored)
    assert all(epoch.adds_up for epoch in epochs)
    return sorted(stored)


def test_late_rows_that_spark_drops_are_not_sent(spark, cluster, tmp_path):
    """Spark compares rows with the watermark of the micro-batch before the last one."""
    files = [[("a", EARLY)], [("b", "2024-01-02T00:00:00Z")], [("c", "2024-01-02T00:00:10Z")]]
    frame = stream_of(spark, tmp_path, *files, [("late", EARLY), ("d", "2024-01-02T00:00:20Z")])
    counts = frame.groupBy("id", "at").count().selectExpr("id AS body")
    assert bodies(spark, cluster, tmp_path, "packs", counts) == ["a"]


@pytest.mark.parametrize("lane", ["packs", "foreach_batch"])
def test_rows_of_a_stateful_processor_are_sent(spark, cluster, tmp_path, lane):
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
        files = [("a", EARLY), ("a", EARLY)], [("b", EARLY), ("a", EARLY)]
        numbered = (
            stream_of(spark, tmp_path, *files)
            .groupBy("id")
            .transformWithState(Numbers(), "body STRING", outputMode="append", timeMode="none")
        )
        assert bodies(spark, cluster, tmp_path, lane, numbered) == ["a0", "a1", "a2", "b0"]
