"""A ledger's views without Spark and its JVM: delta-rs reads the table, DuckDB runs the views' SQL.

For people who wait: Spark and Delta need half a minute to start. It reads what is in the table and
folds nothing; `unfolded_epochs` tells what is missing. Needs the extra `fast`.
"""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from rocket_sink.ledger.path import LedgerPath, resolve_path
from rocket_sink.ledger.schema import SCHEMA_VERSION, VERSION_PROPERTY
from rocket_sink.ledger.spool import quarantined, waiting_epochs
from rocket_sink.ledger.views import VIEWS

if TYPE_CHECKING:
    from deltalake import DeltaTable

_SPARKS: Final = (
    "SET TimeZone = 'UTC'",
    "CREATE MACRO unix_micros(moment) AS epoch_us(moment)",
    "CREATE MACRO timestamp_micros(us) AS make_timestamptz(us)",
    "CREATE MACRO percentile_approx(x, share) AS quantile_disc(x, share)",
    "CREATE MACRO collect_set(x) AS list(DISTINCT x)",
    "CREATE MACRO sort_array(x) AS list_sort(x)",
    # DuckDB's own passes over rows whose x is null.
    "CREATE MACRO max_by(x, y) AS arg_max_null(x, y)",
)
"""Functions of Spark's under their names."""


class QuickLedger:
    """One version of a ledger's table, as it was when `open_quick` was called."""

    def __init__(self, place: LedgerPath, table: DeltaTable) -> None:
        import duckdb

        self.path = place.root
        self.unfolded_epochs = waiting_epochs(place, place.filesystem())
        """Epochs of which tasks have written rows that are not in the table yet, or not all."""
        self.quarantined_files = len(quarantined(place, place.filesystem()))
        self._session = duckdb.connect()
        for statement in _SPARKS:
            self._session.execute(statement)
        self._session.register("ledger_rows", table.to_pyarrow_dataset())
        # Not as WITH: what is named twice there is read whole, in all its columns.
        for name, text in VIEWS.items():
            self._session.execute(f"CREATE TEMP VIEW {name} AS {_in_duckdb(text)}")

    def query(self, select: str) -> pa.Table:
        """A query over the views."""
        return self._session.sql(_in_duckdb(select)).to_arrow_table()


def _in_duckdb(text: str) -> str:
    """`at` is a word of DuckDB's own."""
    return re.sub(r"\bat\b", '"at"', text)


def open_quick(path: str | os.PathLike[str]) -> QuickLedger | None:
    """The ledger at a path; None where only Spark can read it, or say what is wrong.

    That is: without the extra `fast`, on a remote file system, and where there is no table, a
    foreign one, or one of another schema version or with features that delta-rs does not know.
    """
    if find_spec("duckdb") is None or "://" in os.fspath(path):
        return None
    place = resolve_path(path)
    if not Path(place.root, "_delta_log").is_dir():
        return None
    from deltalake import DeltaTable
    from deltalake.exceptions import DeltaError

    try:
        table = DeltaTable(place.root)
        if table.metadata().configuration.get(VERSION_PROPERTY) != str(SCHEMA_VERSION):
            return None
        return QuickLedger(place, table)
    except DeltaError:
        return None
