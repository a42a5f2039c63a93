"""Wrong calls of a sink in a session, each answered by what was meant; and queries of others."""

import contextlib

import pytest
from pyspark.errors import StreamingQueryException

from rocket_sink import register
from rocket_sink.spark.sink import RocketSink
from tests.clusters import scripted_cluster
from tests.producer.waiting import until
from tests.spark.streams import run, stream_of

pytestmark = pytest.mark.spark
cluster = scripted_cluster(1, flights=1)


@pytest.fixture
def rows(spark, tmp_path):
    """A stream of one row."""
    return stream_of(spark, tmp_path)


def sink_of(cluster, **options):
    return RocketSink(nameServer=cluster.name_server, topic="flights", **options)


@pytest.mark.parametrize(
    ("lane", "function", "meant"),
    [
        ("foreachBatch", lambda sink: sink, "write foreachBatch(sink.write_batch)"),
        ("foreachBatch", lambda sink: sink.write, "write foreachBatch(sink.write_batch)"),
        ("foreach", lambda sink: sink.write_batch, "for rows write foreach(sink)"),
    ],
)
def test_a_wrong_function_is_answered_by_the_right_one(
    cluster, rows, tmp_path, lane, function, meant
):
    writer = getattr(rows.writeStream, lane)(function(sink_of(cluster)))
    with pytest.raises(StreamingQueryException) as caught:
        run(writer, tmp_path / "checkpoint")
    assert meant in str(caught.value)


@pytest.mark.parametrize(
    ("select", "refused"),
    [
        ("body, cast(now() AS timestamp_ntz) AS event_time", "time without a zone is ambiguous"),
        ("body, 'k' AS shard_key", "did you mean 'sharding_key'"),
    ],
)
def test_a_bare_foreach_is_judged_by_its_schema(cluster, rows, tmp_path, caplog, select, refused):
    """Tasks see values only: a time without a zone was taken in the worker's zone."""
    frame = rows.selectExpr(*select.split(", "))
    for writer in (
        frame.writeStream.foreach(sink_of(cluster)),
        frame.writeStream.foreachBatch(sink_of(cluster).write_batch),
    ):
        with pytest.raises(StreamingQueryException) as caught:
            run(writer, tmp_path / f"checkpoint-{id(writer)}")
        assert refused in str(caught.value) + caplog.text
        caplog.clear()
    assert cluster.messages("flights") == []


@pytest.mark.parametrize(("mode", "sent"), [("complete", ["1", "2"]), ("update", [])])
def test_output_modes_of_the_data_source(spark, cluster, rows, tmp_path, caplog, mode, sent):
    register(spark)
    sums = rows.selectExpr("explode(array(1, 2, 2)) AS n").groupBy("n").count()
    writer = sums.selectExpr("cast(count AS string) AS body").writeStream.outputMode(mode)
    writer = writer.format("rocketmq").options(nameServer=cluster.name_server, topic="flights")
    with contextlib.nullcontext() if sent else pytest.raises(StreamingQueryException):
        run(writer, tmp_path / "checkpoint")
    refusal = "foreach(sink) or foreachBatch(sink.write_batch), which take"
    assert (refusal in caplog.text) == (not sent)
    assert sorted(message.body.decode() for message in cluster.messages("flights")) == sent


def test_a_foreign_foreach_query_runs_beside_a_sink(spark, cluster, rows, tmp_path):
    """Under a continuous trigger as well, where a sink's query is ended."""
    rows.writeStream.foreach(sink_of(cluster))
    rate = spark.readStream.format("rate").load()
    writer = rate.writeStream.foreach(print).option("checkpointLocation", str(tmp_path / "c"))
    query = writer.trigger(continuous="100 milliseconds").start()
    commits = tmp_path / "c" / "commits"
    until(lambda: [*commits.glob("[0-9]*")] or not query.isActive, 120, 0.05)
    assert [*commits.glob("[0-9]*")], query.exception()
    query.stop()
