"""Streams that keep state before the sink: joins and duplicates, with watermarks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rocket_sink.ledger.ledger import Ledger
from rocket_sink.spark.sink import RocketSink
from rocket_sink.testing import FakeCluster

pytestmark = pytest.mark.spark

DEADLINE_S = 180.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster(brokers=1) as cluster:
        yield cluster


class World:
    """Folders of files that streams read, one file a micro-batch, and a sink with a ledger."""

    def __init__(self, spark: Any, cluster: FakeCluster, folder: Path) -> None:
        self._spark, self._cluster, self._folder = spark, cluster, folder
        self._topic = folder.name
        cluster.create_topic(self._topic, queues=1)
        self.ledger = Ledger(folder / "ledger")
        self.sink = RocketSink(
            nameServer=cluster.name_server, topic=self._topic, ledger=self.ledger.path
        )

    def stream(self, name: str, *files: list[tuple[str, str]]) -> Any:
        """A stream of rows (id, at), the files in their order."""
        folder = self._folder / name
        folder.mkdir()
        for number, file_rows in enumerate(files):
            lines = (json.dumps({"id": id_, "at": at}) for id_, at in file_rows)
            (folder / f"{number}.json").write_text("\n".join(lines))
        reader = self._spark.readStream.schema("id STRING, at TIMESTAMP")
        frame = reader.option("maxFilesPerTrigger", "1").json(str(folder))
        return frame.withWatermark("at", "1 minute")

    def send(self, frame: Any) -> list[str]:
        """Send by foreach, and return the bodies; the accounts have to agree with them."""
        writer = self.sink.stream(frame).trigger(availableNow=True)
        query = writer.option("checkpointLocation", str(self._folder / "checkpoint")).start()
        assert query.awaitTermination(DEADLINE_S)
        bodies = [message.body.decode() for message in self._cluster.messages(self._topic)]
        self.ledger.sync(self._spark)
        epochs = self.ledger.epochs(self._spark).collect()
        assert sum(epoch.acked for epoch in epochs) == len(bodies)
        assert all(epoch.adds_up and epoch.confirmed for epoch in epochs)
        return sorted(bodies)


@pytest.fixture
def world(spark: Any, cluster: FakeCluster, tmp_path: Path) -> World:
    return World(spark, cluster, tmp_path)


EARLY = "2024-01-01T00:00:00Z"


def test_duplicates_that_spark_drops_are_not_sent(world: World) -> None:
    frame = world.stream("in", [("a", EARLY), ("a", EARLY)], [("a", EARLY), ("b", EARLY)])
    assert world.send(frame.dropDuplicates(["id", "at"]).selectExpr("id AS body")) == ["a", "b"]


def test_a_join_of_streams_is_sent(world: World) -> None:
    departures = world.stream("departures", [("a", EARLY), ("b", EARLY)])
    arrivals = world.stream("arrivals", [("a", EARLY)]).withColumnRenamed("at", "landed")
    assert world.send(departures.join(arrivals, "id").selectExpr("id AS body")) == ["a"]
