"""A ledger's views by delta-rs and DuckDB; `test_report.py` compares them with Spark's."""

from __future__ import annotations

from pathlib import Path

import duckdb
import pyarrow as pa
import pytest

from rocket_sink.errors import LedgerError
from rocket_sink.ledger.duckdb_reader import QuickLedger, open_quick
from rocket_sink.ledger.schema import LEDGER_SCHEMA
from rocket_sink.ledger.views import newest, rows_of

from .night import store
from .values import accounts, context, letter


def opened(path: str) -> QuickLedger:
    quick = open_quick(path)
    assert quick is not None, "the extra `fast` is part of the extra `test`"
    return quick


def test_a_word_of_duckdbs_own_is_text_in_a_literal(tmp_path: Path) -> None:
    """It was quoted there, too, so that queries and brokers of such names were not found."""
    quick = opened(store(tmp_path, [accounts(context(query_id="shop-at"), acked=1)]))
    select = "SELECT query_id, at IS NULL AS never FROM epochs WHERE query_id = 'shop-at'"
    assert quick.query(select).to_pylist() == [{"query_id": "shop-at", "never": False}]
    (texts,) = quick.query("SELECT 'at' AS a, 'it''s at' AS b, '' AS c").to_pylist()
    assert texts == {"a": "at", "b": "it's at", "c": ""}


def test_letters_with_a_time_beyond_pythons_are_read(tmp_path: Path) -> None:
    """Tables have such ones from before they were left out."""
    field = LEDGER_SCHEMA.field("event_time")
    years = pa.array([10**18], pa.int64()).cast(field.type)
    place = LEDGER_SCHEMA.get_field_index("event_time")
    far = letter(context(partition=None), b"far").set_column(place, field, years)
    near = letter(context(partition=None), b"near", event_time_ms=pa.array([0]))
    quick = opened(store(tmp_path, [far, near]))
    rows = rows_of(quick.query(newest("pending_letters", 20)))
    moments = {row["body"]: row["event_time"] and row["event_time"].timestamp() for row in rows}
    assert moments == {b"far": None, b"near": 0}


@pytest.mark.parametrize("part", [b"footer", b"name"])
def test_damaged_files_are_a_ledgers_error(tmp_path: Path, part: bytes) -> None:
    """DuckDB has no class of its own for some of it, and no text for bytes that are no text."""
    path = store(tmp_path, [accounts(context(), acked=1)])
    (file,) = tmp_path.glob("kind=epoch/*.parquet")
    data = file.read_bytes()
    footer = int.from_bytes(data[-8:-4], "little")
    begin = len(data) - 8 - footer
    if part == b"footer":
        file.write_bytes(data[:begin] + b"\xff" * footer + data[-8:])
    else:
        file.write_bytes(data[:begin] + data[begin:].replace(b"query_id", b"\xff" * 8))
    with pytest.raises(LedgerError, match="gone or damaged"):
        opened(path)


def test_a_query_that_is_wrong_is_no_damage(tmp_path: Path) -> None:
    quick = opened(store(tmp_path, [accounts(context(), acked=1)]))
    with pytest.raises(duckdb.Error, match="nonsense"):
        quick.query("SELECT nonsense FROM epochs")
