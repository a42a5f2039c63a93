"""Real-time mode (`trigger(realTime=...)`): Spark starts our foreach lane, and a `TableProducer` in
`mapInArrow`, which sends each row as it comes."""

import os
import signal

import pyarrow as pa
import pyspark
import pytest
from pyspark.sql import DataFrame

from rocket_sink import Ledger, RocketSink, TableProducer
from tests.clusters import scripted_cluster
from tests.ledger.views import view_rows
from tests.producer.waiting import until
from tests.spark.settings import setting

pytestmark = [
    pytest.mark.spark,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        tuple(map(int, pyspark.__version__.split(".")[:2])) < (4, 1),
        reason="Spark 4.1 has it first",
    ),
]
EPOCH = "5 seconds"
"""The shortest duration that Spark accepts."""
ALLOWLIST = "spark.sql.streaming.realTimeMode.allowlistCheck"


class Source:
    """Spark's own source for tests of real-time mode: a column of texts."""

    def __init__(self, spark):
        jvm = spark._jvm
        stream = jvm.org.apache.spark.sql.execution.streaming.sources.LowLatencyMemoryStream.apply(
            spark._jsparkSession, 1, jvm.org.apache.spark.sql.Encoders.STRING()
        )
        self._jvm, self._stream = jvm, stream
        self.frame = DataFrame(stream.toDF(), spark)

    def put(self, text):
        rows = self._jvm.java.util.ArrayList()
        rows.add(text)
        self._stream.addData(self._jvm.scala.jdk.javaapi.CollectionConverters.asScala(rows).toSeq())


def start(writer, folder):
    writer = writer.outputMode("update").option("checkpointLocation", str(folder / "checkpoint"))
    return writer.trigger(realTime=EPOCH).start()


cluster = scripted_cluster()


@pytest.fixture
def options(cluster, tmp_path):
    ledger = str(tmp_path / "ledger")
    where = {"nameServer": cluster.name_server, "topic": "t", "ledger": ledger}
    return {**where, "sendMsgTimeout": 60_000}


def accounts(spark, options):
    """Return the numbers of acknowledged rows and of dead letters."""
    ledger = Ledger(options["ledger"])
    ledger.sync(spark)
    [sums] = view_rows(ledger.path, "SELECT sum(acked) AS acked, sum(dead) AS dead FROM epochs")
    return sums.acked, sums.dead


def test_foreach_sends_each_row_once(spark, cluster, options, tmp_path):
    source = Source(spark)
    query = start(source.frame.writeStream.foreach(RocketSink(**options)), tmp_path)
    try:
        for number in range(20):
            source.put(str(number))
        until(lambda: len(cluster.messages("t")) == 20 or not query.isActive, 300)
        assert query.exception() is None
        # An epoch counts only after its end.
        until(lambda: any(each["numInputRows"] for each in query.recentProgress), 300)
    finally:
        query.stop()
    assert sorted(int(message.body) for message in cluster.messages("t")) == list(range(20))
    assert accounts(spark, options) == (20, 0)


@pytest.fixture
def row_by_row(spark):
    """Let Spark hand over each row alone. It reads `spark.buffer.size` anew for each task."""
    env = spark._jvm.org.apache.spark.SparkEnv.get().conf()
    size = env.get("spark.buffer.size", "65536")
    env.set("spark.buffer.size", "256")
    batch_rows = setting(spark, "spark.sql.execution.arrow.maxRecordsPerBatch", "1")
    with batch_rows, setting(spark, ALLOWLIST, "false"):
        yield
    env.set("spark.buffer.size", size)


@pytest.mark.usefixtures("row_by_row")
def test_map_in_arrow_sends_each_row_as_it_comes(spark, cluster, options, tmp_path):
    """Kill the worker, too: Spark repeats the task, which sends the epoch's rows again."""
    source, pid = Source(spark), tmp_path / "pid"

    def send(batches):
        pid.write_text(str(os.getpid()))
        with TableProducer(**options) as producer:
            result = producer.send(batch.rename_columns(["body"]) for batch in batches)
        yield pa.RecordBatch.from_pydict({"acked": [result.summary.acked]})

    def stored():
        return {int(message.body) for message in cluster.messages("t")}

    def put(query, numbers):
        """Put each row when the one before is stored: Spark keeps back the last one."""
        for number in numbers:
            source.put(f"{number:0300}")
            before = {number - 1} if number > numbers.start else set[int]()
            until(lambda before=before: before <= stored() or not query.isActive, 300, 0.005)
            assert query.isActive, query.exception()

    frame = source.frame.mapInArrow(send, "acked BIGINT")
    query = start(frame.writeStream.format("noop"), tmp_path)
    put(query, range(20))
    os.kill(int(pid.read_text()), signal.SIGKILL)
    put(query, range(20, 40))
    until(lambda: 39 in stored(), 300, 0.05)
    query.stop()
    assert stored() == set(range(40))
    acked, dead = accounts(spark, options)
    assert acked >= 20 and dead == 0
