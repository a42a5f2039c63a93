"""The listener of a session: checks of queries at their start, and folds while they run."""

import logging
import re
from functools import partial

import pytest
from pyspark.errors import StreamingQueryException

from rocket_sink.errors import ConfigurationError
from rocket_sink.ledger.driver.ledger import Ledger
from rocket_sink.spark.sink import RocketSink
from tests.clusters import scripted_cluster
from tests.integration.lanes import stream_writer
from tests.producer.waiting import until
from tests.python import run_python
from tests.spark.streams import ONE, run, stream_of

pytestmark = pytest.mark.spark

DEADLINE_S = 120.0
wait_for = partial(until, poll_s=0.05)


cluster = scripted_cluster(1, flights=1)


@pytest.fixture
def ledger(tmp_path):
    return Ledger(tmp_path / "ledger")


@pytest.fixture
def sink(cluster, ledger):
    return RocketSink(nameServer=cluster.name_server, topic="flights", ledger=ledger.path)


@pytest.mark.parametrize("lane", ["foreach", "source_stream"])
def test_a_continuous_trigger_is_refused_before_an_epoch_is_done(
    spark, cluster, tmp_path, caplog, lane
):
    rows = spark.readStream.format("rate").load().selectExpr("cast(value AS string) AS body")
    options = {"nameServer": cluster.name_server, "topic": "flights"}
    writer = stream_writer(lane, rows, options).option("checkpointLocation", str(tmp_path))
    query = writer.trigger(continuous="1 second").start()
    with pytest.raises(StreamingQueryException):
        query.awaitTermination(DEADLINE_S)
    assert list((tmp_path / "commits").glob("[0-9]*")) == []
    (said,) = [r.getMessage() for r in caplog.records if query.id in r.getMessage()]
    assert "trigger(continuous=...) does not work" in said


SHORT_JOB = """
import sys
from rocket_sink import RocketSink
from rocket_sink.spark.session import build_session
from rocket_sink.testing import FakeCluster

folder = sys.argv[1]
spark = build_session("short", master="local[2]")
with FakeCluster(brokers=1) as cluster:
    cluster.create_topic("flights", queues=1)
    sink = RocketSink(nameServer=cluster.name_server, topic="flights", ledger=f"{folder}/ledger")
    rows = spark.readStream.schema("body STRING").json(f"{folder}/in")
    query = sink.stream(rows).option("checkpointLocation", f"{folder}/checkpoint")
    query.trigger(availableNow=True).start().awaitTermination()
    spark.stop()
"""


def test_a_short_job_leaves_no_rows_to_fold(ledger, tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "1.json").write_text(ONE)
    job = run_python("-c", SHORT_JOB, tmp_path, timeout_s=600)
    assert (ledger.unfolded_epochs(), "1 row in, 1 acknowledged; ledger" in job.stderr) == (0, True)


def test_the_end_of_a_query_in_another_session_than_its_sinks_is_heard(
    spark, sink, tmp_path, caplog
):
    caplog.set_level(logging.INFO)
    rows = stream_of(spark.newSession(), tmp_path)
    query = run(rows.writeStream.foreachBatch(sink.write_batch), tmp_path / "checkpoint")
    end = f"the query {query.id} ended: 1 row in"
    wait_for(lambda: any(end in record.getMessage() for record in caplog.records))


def test_a_query_whose_checkpoint_was_deleted_is_told_of_at_its_start(
    spark, cluster, sink, ledger, tmp_path, caplog
):
    rows = stream_of(spark, tmp_path)
    for checkpoint in ("one", "one", "two"):
        query = run(sink.stream(rows), tmp_path / checkpoint)
        ledger.sync(spark)
    assert len(cluster.messages("flights")) == 2
    wait_for(lambda: "begins at epoch 0" in caplog.text)
    [text] = [r.getMessage() for r in caplog.records if "begins at epoch 0" in r.getMessage()]
    assert query.id in text and "appId" in text


def test_a_ledger_or_checkpoint_inside_the_input_is_refused(spark, cluster, sink, tmp_path, caplog):
    """Spark would read their files: a source of 3 rows gave 154."""
    read, rows = tmp_path / "in", stream_of(spark, tmp_path)
    inside = RocketSink(sink.options.with_(ledger=str(read / "sub" / "ledger")))
    with pytest.raises(ConfigurationError, match=r"ledger .*in/sub/ledger is inside"):
        inside.stream(rows)
    for folder in (read, f"{tmp_path}/i*"):
        with pytest.raises(ConfigurationError, match="is inside"):
            inside.write(spark.read.schema("body STRING").json(str(folder)))
    for writer, checkpoint, words in (
        (rows.writeStream.foreach(inside), tmp_path, r"ledger \S*in/sub/ledger is inside"),
        (rows.writeStream.foreachBatch(inside.write_batch), tmp_path / "batches", "is inside"),
        (sink.stream(rows), read, f"checkpoint file:{read}/checkpoint is inside {read}"),
    ):
        query = writer.option("checkpointLocation", str(checkpoint / "checkpoint")).start()
        with pytest.raises(StreamingQueryException) as caught:
            query.awaitTermination(DEADLINE_S)
        assert re.search(words, f"{caplog.text}\n{caught.value}")
        caplog.clear()
    assert cluster.messages("flights") == []
    assert sink.write(spark.read.schema("body STRING").json(str(read))).acked == 1
