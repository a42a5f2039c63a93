"""A ledger by its table's name: found, made, dropped and made anew, and as it was."""

import re
import uuid
from unittest.mock import MagicMock

import pytest

from rocket_sink import Ledger, RocketSink, register
from rocket_sink.errors import LedgerError
from rocket_sink.ledger.append import named
from tests.clusters import scripted_cluster

from .values import refusal

cluster = scripted_cluster(1, scope="module", t=4)


@pytest.fixture
def schema(spark, tmp_path):
    name = f"spark_catalog.s{uuid.uuid4().hex[:8]}"
    spark.sql(f"CREATE SCHEMA {name} LOCATION '{tmp_path / 'tables'}'")
    yield name
    spark.sql(f"DROP SCHEMA {name} CASCADE")


@pytest.fixture
def options(schema, cluster):
    return {"nameServer": cluster.name_server, "topic": "t", "ledger": f"{schema}.ledger"}


@pytest.fixture
def rows(spark):
    return spark.range(10).selectExpr("cast(id AS string) AS body")


def acked(spark, ledger):
    ledger = Ledger(ledger) if isinstance(ledger, str) else ledger
    return ledger.report(spark).totals.acked


@pytest.mark.parametrize(
    ("is_there", "makes", "location", "format_", "answer"),
    [
        (True, False, "", "delta", "file:/l"), (True, True, "", "parquet", "is no Delta table"),
        (False, False, "file:/s", "delta", "there is no table c.s.t: a sink makes it"),
        (False, True, "", "delta", "the schema of c.s.t has no location"),
        (False, True, "file:/s/", "delta", "file:/l"),
    ],
)  # fmt: skip
def test_what_a_catalog_says(monkeypatch, is_there, makes, location, format_, answer):
    made, spark = list[str](), MagicMock()
    monkeypatch.setattr(named, "ensure_table", lambda spark, place: made.append(place.uri))
    monkeypatch.setattr(named, "active_session", lambda: spark)
    spark.catalog.tableExists.return_value = is_there
    detail = {"format": format_, "location": "file:/l"}
    spark.sql.return_value.select.return_value.head.return_value = detail
    spark.sql.return_value.collect.return_value = [("Catalog", "c"), ("Location", location)]
    if answer == "file:/l":
        assert named.located("c.s.t", None, makes=makes) == answer
    else:
        with refusal("c.s.t", answer):
            named.located("c.s.t", spark, makes=makes)
    spark.catalog.tableExists.assert_called_once_with("`c`.`s`.`t`")
    assert len(made) == (not is_there and bool(location) and makes)
    for uri in made:
        assert re.fullmatch("file:/s/t-[0-9a-f]{8}", uri)
        spark.catalog.createTable.assert_called_once_with("`c`.`s`.`t`", uri, "delta")


def test_without_a_session_a_process_knows_names_that_it_was_told(monkeypatch):
    monkeypatch.setattr(named, "active_session", lambda: None)
    monkeypatch.setattr(named, "_known", {"c.s.u": "file:/of/an/earlier/session"})
    named.know_locations({"c.s.t": "file:/l"})
    assert [named.located(ledger) for ledger in ("c.s.t", "/l")] == ["file:/l", "/l"]
    with refusal("c.s.u", "needs a Spark session to be found"):
        named.located("c.s.u")


@pytest.mark.spark
def test_a_name_is_found_and_is_no_identity(spark, options, rows):
    name = options["ledger"]
    with pytest.raises(LedgerError, match=f"there is no table {name}: a sink makes it"):
        Ledger(name)
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


@pytest.mark.spark
def test_the_data_source_knows_the_name_from_register(spark, options, rows):
    name = options["ledger"]
    register(spark, ledger=name)
    rows.write.format("rocketmq").mode("append").options(**options).save()
    assert acked(spark, name) == 10
    register(spark)
    with pytest.raises(Exception, match=r"call register\(spark, ledger=...\)"):
        rows.write.format("rocketmq").mode("append").options(**options).save()
