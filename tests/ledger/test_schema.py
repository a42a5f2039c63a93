"""The ledger's definition: Arrow schema, DDL, and the names that others rely on."""

import dataclasses

import pyarrow as pa
import pytest

from rocket_sink.ledger.records import RunContext
from rocket_sink.ledger.schema import (
    COLUMNS,
    KINDS,
    LEDGER_SCHEMA,
    STATS_COLUMNS,
    columns_of,
    ledger_ddl,
)
from rocket_sink.rows.row_batch import RowBatch


def test_names_are_unique_and_every_column_has_a_comment():
    names = [column.name for column in COLUMNS]
    assert len(set(names)) == len(names)
    assert all(column.comment and column.kinds for column in COLUMNS)
    assert set(STATS_COLUMNS) <= set(names)


@pytest.mark.spark
def test_ddl_and_arrow_schema_are_the_same_columns(spark):
    from pyspark.sql.pandas.types import from_arrow_type
    from pyspark.sql.types import StructType

    from_ddl = {f.name: f.dataType for f in StructType.fromDDL(ledger_ddl())}
    assert list(from_ddl) == LEDGER_SCHEMA.names
    for field in LEDGER_SCHEMA:
        assert from_ddl[field.name] == from_arrow_type(field.type), field.name


def test_every_kind_says_who_wrote_its_rows():
    names = {f.name for f in dataclasses.fields(RunContext)}
    assert len(names) == 9
    for kind in KINDS:
        assert names <= set(columns_of(kind))
    with pytest.raises(ValueError, match="no_kind"):
        columns_of("no_kind")


def test_a_dead_letter_has_the_columns_of_the_row_contract():
    """A letter has all columns of a row except these, which differ on purpose."""
    differ = {
        "body_is_text", "order_by",  # A letter's body is bytes, and `ordinal` is its order.
        "delivery_timestamp_ms", "event_time_ms",  # Letters have these under other names.
        "traceparent", "tracestate",  # Letters have these as properties.
    }  # fmt: skip
    of_rows = {f.name for f in dataclasses.fields(RowBatch)} - differ
    letters = set(columns_of("dead_letter"))
    assert of_rows <= letters
    assert {"delivery_timestamp", "event_time"} <= letters


def test_numbers_of_rows_that_a_broker_would_refuse_still_fit():
    """Keep any number of a refused row's level, flag or queue: the row contract has int64."""
    for name in ("delay_level", "flag", "queue_id", "delay_ms", "delivery_timestamp"):
        assert LEDGER_SCHEMA.field(name).type == pa.int64()
