"""A ledger's views and its report by delta-rs and DuckDB, in a fraction of Spark's time.

`test_views.py::test_spark_says_the_same` compares the views with Spark's, and `test_report.py` the
reports.
"""

from types import SimpleNamespace

from rocket_sink.ledger.query.duckdb_reader import open_quick
from rocket_sink.ledger.report import Scope, figures


def quick_ledger(path):
    """Open a ledger that DuckDB can read."""
    quick = open_quick(path)
    assert quick is not None, "the extra `fast` is part of the extra `test`"
    return quick


def view_rows(path, select):
    """Return the rows of a query over the views, with columns as attributes."""
    return [SimpleNamespace(**row) for row in quick_ledger(path).query(select).to_pylist()]


def report_of(
    path,
    scope=Scope(),  # noqa: B008 (frozen)
    **lists,
):
    """Return the report; `lists` are arguments of `figures`."""
    quick = quick_ledger(path)
    return figures(quick.query, quick.path, scope, **lists)
