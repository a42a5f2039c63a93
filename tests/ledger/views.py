"""A ledger's views and its report by delta-rs and DuckDB, in a fraction of Spark's time.

`test_ledger.py::test_spark_says_the_same` compares the views with Spark's, and `test_report.py` the
reports.
"""

import os
from types import SimpleNamespace
from typing import Any

from rocket_sink.ledger.query.duckdb_reader import QuickLedger, open_quick
from rocket_sink.ledger.report import Report, Scope, figures


def quick_ledger(path: str | os.PathLike[str]) -> QuickLedger:
    """Open a ledger that DuckDB can read."""
    quick = open_quick(path)
    assert quick is not None, "the extra `fast` is part of the extra `test`"
    return quick


def view_rows(path: str | os.PathLike[str], select: str) -> list[SimpleNamespace]:
    """Return the rows of a query over the views, with columns as attributes."""
    return [SimpleNamespace(**row) for row in quick_ledger(path).query(select).to_pylist()]


def report_of(
    path: str | os.PathLike[str],
    scope: Scope = Scope(),  # noqa: B008 (frozen)
    **lists: Any,
) -> Report:
    """Return the report; `lists` are arguments of `figures`."""
    quick = quick_ledger(path)
    return figures(quick.query, quick.path, scope, **lists)
