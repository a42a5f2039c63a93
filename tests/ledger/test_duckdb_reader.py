"""A ledger's views by delta-rs and DuckDB; `test_report.py` compares them with Spark's."""

from __future__ import annotations

from pathlib import Path

from rocket_sink.ledger.duckdb_reader import QuickLedger, open_quick

from .night import store
from .values import accounts, context


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
