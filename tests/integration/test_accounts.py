"""The accounts of a query by foreach, of which Spark reads more rows than it hands over."""

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from rocket_sink import Ledger, RocketSink
from tests.clusters import scripted_cluster
from tests.spark.streams import confirmed_epochs, run

from .lanes import read_stream

pytestmark = [pytest.mark.spark, pytest.mark.timeout(1800)]

PATIENT = {"sendMsgTimeout": 60_000, "connectTimeoutMs": 20_000}


cluster = scripted_cluster(1, t=4)


def test_an_epoch_of_foreach_is_confirmed_with_sparks_rows(spark, cluster, tmp_path):
    """Count no loss if a filter leaves the sink fewer rows than Spark has read."""
    (tmp_path / "source").mkdir()
    bodies = [None if n % 5 == 0 else str(n) for n in range(100)]
    table = pa.table({"body": bodies, "n": range(100)})
    pq.write_table(table, tmp_path / "source" / "rows.parquet")
    options = {"nameServer": cluster.name_server, "topic": "t", "foldIntervalMs": 0, **PATIENT}
    rows = read_stream(spark, tmp_path / "source").where("n < 60")
    runs = {}
    for app_id in ("", "orders"):
        sink = RocketSink(**options, ledger=str(tmp_path / "ledger"), appId=app_id)
        query = run(rows.writeStream.foreach(sink), tmp_path / f"checkpoint-{app_id}")
        runs[app_id or query.id] = query.runId
    confirmed = confirmed_epochs(spark, Ledger(tmp_path / "ledger"))
    assert {epoch.query_id: epoch.run_id for epoch in confirmed} == runs
    for epoch in confirmed:
        assert (epoch.rows_in, epoch.num_input_rows, epoch.missing_rows) == (60, 100, 0)
        assert epoch.adds_up
    rows = DeltaTable(tmp_path / "ledger").to_pyarrow_dataset().to_table()
    rows = rows.filter(pc.equal(rows["kind"], "epoch"))
    spark_rows = rows.filter(pc.is_null(rows["complete"]))
    assert spark_rows["rows_in"].to_pylist() == [60, 60]  # Spark handed over these rows.
