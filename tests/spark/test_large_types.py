"""Sessions that hand Arrow's large strings and binaries to Python."""

import pytest

from tests.clusters import scripted_cluster
from tests.integration.lanes import write
from tests.spark.settings import setting

pytestmark = pytest.mark.spark

SETTING = "spark.sql.execution.arrow.useLargeVarTypes"
ROWS = "body BINARY, tags STRING, keys ARRAY<STRING>, properties MAP<STRING, STRING>"


cluster = scripted_cluster(1, t=1)


@pytest.mark.parametrize("lane", ["write", "source_batch"])
def test_rows_of_large_types_are_sent(spark, cluster, lane):
    rows = [(b"\xff\x00", "t", ["k", "l"], {"p": "q"}), (b"\x00", None, None, None)]
    with setting(spark, SETTING, "true"):
        options = {"nameServer": cluster.name_server, "topic": "t"}
        write(lane, spark.createDataFrame(rows, ROWS), options)
    messages = {message.body: message.properties for message in cluster.messages("t")}
    assert set(messages) == {b"\xff\x00", b"\x00"}
    full = messages[b"\xff\x00"]
    assert (full["TAGS"], full["KEYS"], full["p"]) == ("t", "k l", "q")
