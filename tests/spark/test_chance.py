"""Queries whose rows are computed anew in each run: effectively once cannot know them again."""

from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException

from rocket_sink import RocketSink
from rocket_sink.errors import ConfigurationError
from rocket_sink.testing import FakeCluster

pytestmark = pytest.mark.spark


@pytest.mark.parametrize("lane", ["write", "stream", "foreachBatch"])
def test_rows_of_chance_need_a_message_id(spark: Any, tmp_path: Path, lane: str) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "1.json").write_text('{"n": "1"}\n{"n": "2"}\n')
    with FakeCluster() as cluster:
        cluster.create_topic("t", 4)
        sink = RocketSink(
            nameServer=cluster.name_server, topic="t", ledger=str(tmp_path / "ledger"),
            delivery="effectively_once",
        )  # fmt: skip

        def send(*columns: str) -> None:
            reader = spark.read if lane == "write" else spark.readStream
            rows = reader.schema("n STRING").json(str(tmp_path / "in")).selectExpr(*columns)
            if lane == "write":
                sink.write(rows)
                return
            writer = (
                sink.stream(rows)
                if lane == "stream"
                else rows.writeStream.foreachBatch(sink.write_batch)
            )
            writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint"))
            writer.trigger(availableNow=True).start().awaitTermination()

        with pytest.raises((ConfigurationError, StreamingQueryException), match="computes it anew"):
            send("concat(n, uuid()) AS body")
        assert cluster.messages("t") == []
        send("concat(n, uuid()) AS body", "n AS message_id")
        assert len(cluster.messages("t")) == 2
