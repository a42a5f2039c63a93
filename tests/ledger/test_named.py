"""A ledger by its table's name: found, made, dropped and made anew, and as it was."""

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rocket_sink import Ledger, RocketSink, TableProducer, register
from rocket_sink.errors import LedgerError
from rocket_sink.testing import FakeCluster
from tests.clusters import scripted_cluster

pytestmark = pytest.mark.spark


cluster = scripted_cluster(1, scope="module", t=4)


@pytest.fixture
def schema(spark: Any, tmp_path: Path) -> Iterator[str]:
    name = f"spark_catalog.s{uuid.uuid4().hex[:8]}"
    spark.sql(f"CREATE SCHEMA {name} LOCATION '{tmp_path / 'tables'}'")
    yield name
    spark.sql(f"DROP SCHEMA {name} CASCADE")


def acked(spark: Any, ledger: Ledger | str) -> int:
    ledger = Ledger(ledger) if isinstance(ledger, str) else ledger
    report = ledger.report(spark)
    assert report.ledger == ledger.path
    return report.totals.acked


def test_a_name_is_found_and_is_no_identity(spark: Any, schema: str, cluster: FakeCluster) -> None:
    name, rows = f"{schema}.ledger", spark.range(10).selectExpr("cast(id AS string) AS body")
    with pytest.raises(LedgerError, match=f"there is no table {name}: a sink makes it"):
        Ledger(name)
    options = {"nameServer": cluster.name_server, "topic": "t", "ledger": name}
    sink = RocketSink(**options)
    sink.write(rows)
    ledger = Ledger(name)
    assert ledger.uri == sink.options.ledger
    assert ledger.rows(spark).count() == spark.table(name).count() > 0
    past = ledger.at(ledger.version(spark))
    RocketSink(**options).write(rows)
    assert (acked(spark, past), acked(spark, name)) == (10, 20)
    assert past.epochs(spark).count() == 1
    with pytest.raises(LedgerError, match="the table has no such version"):
        ledger.at(99).rows(spark)

    # A table that was dropped and made anew is another ledger; the old sink keeps to its own.
    spark.sql(f"DROP TABLE {name}")
    RocketSink(**options).write(rows)
    sink.write(rows)
    assert (acked(spark, name), acked(spark, sink.options.ledger)) == (10, 30)


def test_the_data_source_knows_the_name_from_register(
    spark: Any, schema: str, cluster: FakeCluster
) -> None:
    name, rows = f"{schema}.ledger", spark.range(10).selectExpr("cast(id AS string) AS body")
    options = {"nameServer": cluster.name_server, "topic": "t", "ledger": name}
    register(spark, ledger=name)
    rows.write.format("rocketmq").mode("append").options(**options).save()
    assert acked(spark, name) == 10
    register(spark)
    with pytest.raises(Exception, match=r"call register\(spark, ledger=...\)"):
        rows.write.format("rocketmq").mode("append").options(**options).save()


def test_what_a_name_cannot_be(spark: Any, schema: str, cluster: FakeCluster) -> None:
    rows = pa.table({"body": ["row"]})
    spark.sql(f"CREATE TABLE {schema}.other (a INT) USING parquet")
    with pytest.raises(LedgerError, match="is no Delta table"):
        Ledger(f"{schema}.other")
    spark.sql(f"CREATE TABLE {schema}.foreign (a INT) USING delta")
    with pytest.raises(LedgerError, match="is not a ledger"):
        Ledger(f"{schema}.foreign").rows(spark)
    with pytest.raises(LedgerError, match="is the name of a table: give its location"):
        TableProducer(nameServer=cluster.name_server, topic="t", ledger="a-b.c-d.t").send(rows)
