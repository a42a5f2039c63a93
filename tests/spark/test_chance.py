"""Queries whose rows are computed anew in each run: effectively once cannot know them again."""

import pytest
from pyspark.errors import StreamingQueryException

from rocket_sink.errors import ConfigurationError
from tests.clusters import scripted_cluster
from tests.integration.lanes import stream_writer, write
from tests.spark.streams import run, stream_of

pytestmark = pytest.mark.spark


cluster = scripted_cluster(t=4)


@pytest.mark.parametrize("lane", ["write", "packs", "foreach_batch"])
def test_rows_of_chance_need_a_message_id(spark, cluster, tmp_path, lane):
    stream = stream_of(spark, tmp_path, '{"n": "1"}\n{"n": "2"}\n', "n STRING")
    batch = spark.read.schema("n STRING").json(str(tmp_path / "in"))
    options = {
        "nameServer": cluster.name_server, "topic": "t", "ledger": str(tmp_path / "ledger"),
        "delivery": "effectively_once",
    }  # fmt: skip

    def send(*columns):
        if lane == "write":
            write(lane, batch.selectExpr(*columns), options)
        else:
            writer = stream_writer(lane, stream.selectExpr(*columns), options)
            run(writer, tmp_path / "checkpoint")

    with pytest.raises((ConfigurationError, StreamingQueryException), match="computes it anew"):
        send("concat(n, uuid()) AS body")
    assert cluster.messages("t") == []
    send("concat(n, uuid()) AS body", "n AS message_id")
    assert len(cluster.messages("t")) == 2
