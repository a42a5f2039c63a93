"""Spark Connect: the data source and foreach lanes from a client without a JVM.

This is a long form with a requirement of its own: pip install "pyspark[connect]", then
pytest -m slow tests/integration/test_connect.py
"""

import sys

import pytest

from rocket_sink.testing import FakeCluster
from tests.integration.test_found_by_spark import bodies, put_rows, run, wanted

pytestmark = [pytest.mark.slow, pytest.mark.spark, pytest.mark.timeout(900)]

CLIENT = """
import sys
from pyspark.sql import SparkSession
from rocket_sink import RocketSink, register

name_server, folder = sys.argv[1:]
spark = SparkSession.builder.remote("local[2]").getOrCreate()
assert type(spark).__module__.startswith("pyspark.sql.connect"), type(spark)
options = {"nameServer": name_server, "topic": "t"}
for kind in ("found", "registered"):
    rows = spark.range(10).selectExpr(f"concat('{kind} ', cast(id AS string)) AS body")
    rows.write.format("rocketmq").mode("append").options(**options).save()
    register(spark)
stream = spark.readStream.schema("body string").json(f"{folder}/in")
for lane in ("source", "foreach"):
    writer = stream.selectExpr(f"concat('{lane} ', body) AS body").writeStream
    if lane == "source":
        writer = writer.format("rocketmq").options(**options)
    else:
        writer = writer.foreach(RocketSink(**options))
    writer = writer.option("checkpointLocation", f"{folder}/{lane}")
    writer.trigger(availableNow=True).start().awaitTermination()
spark.stop()
"""


def test_rows_from_a_connect_client(tmp_path):
    pytest.importorskip("grpc", reason='pip install "pyspark[connect]"')
    put_rows(tmp_path)
    with FakeCluster(brokers=2) as cluster:
        cluster.create_topic("t", 4)
        run([sys.executable, "-c", CLIENT, cluster.name_server, str(tmp_path)])
        lanes = "source stream", "foreach stream"
        assert bodies(cluster) == wanted("found", "registered", *lanes)
