"""Bodies of `bodyFormat=json`: the lanes that pack them, and the lanes that refuse."""

import pytest
from pyspark.sql.types import StructType

from rocket_sink.errors import ColumnError
from rocket_sink.ledger.driver.ledger import Ledger
from rocket_sink.options import SinkOptions
from rocket_sink.rows.normalise import normalise
from rocket_sink.spark import console
from rocket_sink.spark.backfill.sources import Selection, Table
from rocket_sink.spark.datasource import RocketMQDataSource
from rocket_sink.spark.frames import plan_of, select_needed
from tests.spark.settings import setting

NOON = "timestamp_ntz'2026-07-01 12:00:00.000001'"
AS_WRITTEN = '"2026-07-01T12:00:00.000001"'


@pytest.fixture
def new_york(spark):
    """The session, with a zone in which no time is that of UTC."""
    with setting(spark, "spark.sql.session.timeZone", "America/New_York"):
        yield spark


def pending_of(spark, folder, frame, options):
    """Return the rows that a backfill of the frame would send."""
    return Table(frame, "t", options).pending(spark, Ledger(folder / "ledger"), Selection())


@pytest.mark.spark
@pytest.mark.parametrize(
    ("body_format", "expected"),
    [
        ("json", f'{{"at":{AS_WRITTEN},"leg":{{"off":[{AS_WRITTEN}]}}}}'),
        (
            "json_nulls",
            f'{{"at":{AS_WRITTEN},"gate":null,"leg":{{"off":[{AS_WRITTEN}],"on":null}}}}',
        ),
    ],
)
def test_lanes_and_backfills_pack_the_same_text(new_york, tmp_path, body_format, expected):
    """`write`, `write_batch` and `stream` send what `select_needed` returns, and a backfill sends
    its source's pending rows. A time without a zone stays as it is written, at any depth."""
    frame = new_york.sql(
        f"SELECT {NOON} AS at, CAST(NULL AS STRING) AS gate, "
        f"named_struct('off', array({NOON}), 'on', CAST(NULL AS TIMESTAMP_NTZ)) AS leg"
    )
    options = SinkOptions.parse(topic="t", bodyFormat=body_format)
    packed, _ = select_needed(frame, plan_of(frame, options))
    pending = pending_of(new_york, tmp_path, frame, options)
    assert [packed.first().body, pending.first().body] == [expected, expected]


@pytest.mark.spark
@pytest.mark.parametrize(("policy", "offset"), [("CORRECTED", "-04:56:02"), ("LEGACY", "-05:00")])
def test_json_keeps_microseconds_and_seconds_of_zones(new_york, policy, offset):
    """The legacy formatter has no pattern for an offset with seconds."""
    parser = "spark.sql.legacy.timeParserPolicy"
    frame = new_york.sql(
        "SELECT timestamp'1883-11-18 12:03:57.999999' AS past, timestamp'2026-07-01' AS now"
    )
    options = SinkOptions.parse(topic="t", bodyFormat="json")
    with setting(new_york, parser, policy):
        packed, _ = select_needed(frame, plan_of(frame, options))
        body = packed.first().body
    assert body == (
        f'{{"past":"1883-11-18T12:03:57.999999{offset}","now":"2026-07-01T00:00:00.000000-04:00"}}'
    )


@pytest.mark.spark
@pytest.mark.parametrize("ansi", ["true", "false"])
def test_a_decimal_key_has_the_same_text_in_lanes_and_backfills(spark, tmp_path, ansi, caplog):
    """The text of a key chooses its queue. Tasks cast Arrow's decimals, a backfill Spark's."""
    texts = ["0.0000000000", "0.0000000001", "-0.0000000010", "-12.5000000000", "7.0000000000"]
    keys = ", ".join(f"({text!r})" for text in texts)
    frame = spark.sql(
        "SELECT 'b' AS body, 3 AS delay_level, CAST(k AS DECIMAL(20, 10)) AS sharding_key "
        f"FROM VALUES {keys} AS t(k)"
    )
    options = SinkOptions.parse(topic="t", ordering="strict")
    console._warn_of_delays.cache_clear()
    with setting(spark, "spark.sql.ansi.enabled", ansi):
        pending = pending_of(spark, tmp_path, frame, options)
        backfilled = sorted(row.sharding_key for row in pending.collect())
    sent = normalise(frame.toArrow(), plan_of(frame, options)).sharding_key
    assert backfilled == sorted(sent.to_pylist()) == sorted(texts)
    assert caplog.text.count("does not hold for rows with a delay (delay_level)") == 1


@pytest.mark.parametrize("writer", ["writer", "streamWriter"])
def test_a_data_source_refuses_to_pack(writer):
    """The bare foreach lane refuses, too: `test_json_needs_the_driver`."""
    options = {"nameServer": "127.0.0.1:9", "topic": "t", "bodyFormat": "json"}
    source = RocketMQDataSource(options)
    with pytest.raises(ColumnError, match=r"to_json\(struct\('\*'\), formats\)"):
        getattr(source, writer)(StructType().add("at", "timestamp_ntz"), overwrite=False)
