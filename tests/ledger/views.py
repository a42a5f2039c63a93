"""A ledger's views by delta-rs and DuckDB, in a fraction of Spark's time.

`test_ledger.py::test_spark_says_the_same` compares them with Spark's.
"""

from __future__ import annotations

import os
from types import SimpleNamespace

from rocket_sink.ledger.query.duckdb_reader import open_quick


def view_rows(path: str | os.PathLike[str], select: str) -> list[SimpleNamespace]:
    """Return the rows of a query over the views, with columns as attributes."""
    quick = open_quick(path)
    assert quick is not None, "the extra `fast` is part of the extra `test`"
    return [SimpleNamespace(**row) for row in quick.query(select).to_pylist()]
