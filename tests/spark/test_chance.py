"""Queries whose rows are computed anew in each run: effectively once cannot know them again."""

import pytest
from pyspark.errors import StreamingQueryException

from rocket_sink import RocketSink
from rocket_sink.errors import ConfigurationError
from rocket_sink.testing import FakeCluster
from tests.spark.streams import run, stream_of

pytestmark = pytest.mark.spark


@pytest.mark.parametrize("lane", ["write", "stream", "foreachBatch"])
def test_rows_of_chance_need_a_message_id(spark, tmp_path, lane):
    stream = stream_of(spark, tmp_path, '{"n": "1"}\n{"n": "2"}\n', "n STRING")
    with FakeCluster() as cluster:
        cluster.create_topic("t", 4)
        sink = RocketSink(
            nameServer=cluster.name_server, topic="t", ledger=str(tmp_path / "ledger"),
            delivery="effectively_once",
        )  # fmt: skip

        def send(*columns):
            rows = stream.selectExpr(*columns)
            if lane == "write":
                batch = spark.read.schema("n STRING").json(str(tmp_path / "in"))
                sink.write(batch.selectExpr(*columns))
            elif lane == "stream":
                run(sink.stream(rows), tmp_path / "checkpoint")
            else:
                run(rows.writeStream.foreachBatch(sink.write_batch), tmp_path / "checkpoint")

        with pytest.raises((ConfigurationError, StreamingQueryException), match="computes it anew"):
            send("concat(n, uuid()) AS body")
        assert cluster.messages("t") == []
        send("concat(n, uuid()) AS body", "n AS message_id")
        assert len(cluster.messages("t")) == 2
