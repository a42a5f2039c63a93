"""Sessions that hand Arrow's large strings and binaries to Python."""

import pytest

from rocket_sink.spark.datasource import register
from rocket_sink.spark.sink import RocketSink
from rocket_sink.testing import FakeCluster
from tests.spark.settings import setting

pytestmark = pytest.mark.spark

SETTING = "spark.sql.execution.arrow.useLargeVarTypes"
ROWS = "body BINARY, tags STRING, keys ARRAY<STRING>, properties MAP<STRING, STRING>"


@pytest.mark.parametrize("by_name", [False, True], ids=["write", "format"])
def test_rows_of_large_types_are_sent(spark, by_name, tmp_path):
    rows = [(b"\xff\x00", "t", ["k", "l"], {"p": "q"}), (b"\x00", None, None, None)]
    frame = spark.createDataFrame(rows, ROWS)
    with FakeCluster(brokers=1) as cluster, setting(spark, SETTING, "true"):
        cluster.create_topic("large", queues=1)
        options = {"nameServer": cluster.name_server, "topic": "large"}
        if by_name:
            register(spark)
            frame.write.format("rocketmq").options(**options).mode("append").save()
        else:
            RocketSink(**options, ledger=str(tmp_path / "ledger")).write(frame)
        messages = {message.body: message.properties for message in cluster.messages("large")}
    assert set(messages) == {b"\xff\x00", b"\x00"}
    full = messages[b"\xff\x00"]
    assert (full["TAGS"], full["KEYS"], full["p"]) == ("t", "k l", "q")
