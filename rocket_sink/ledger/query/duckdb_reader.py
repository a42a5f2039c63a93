"""A ledger's views without Spark and its JVM: delta-rs reads the table, DuckDB runs the views' SQL.

Commands use it, because Spark and Delta need half a minute to start. The reader folds nothing;
`unfolded_epochs` counts the epochs that are not in the table yet. Needs the extra `fast`.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from itertools import starmap
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from rocket_sink.ledger.append.delta_rs import (
    as_dataset,
    damaged,
    data_files,
    open_table,
    unreadable,
)
from rocket_sink.ledger.append.table import is_table, read_table
from rocket_sink.ledger.path import LOG_FOLDER, LedgerPath, is_remote, resolve_path
from rocket_sink.ledger.schema import COLUMNS, KINDS, SCHEMA_VERSION, VERSION_PROPERTY, columns_of
from rocket_sink.ledger.sql import Query
from rocket_sink.ledger.transport.files import quarantined, spooled_epochs, unfolded_rows
from rocket_sink.ledger.views import VIEWS, reader, views_of

if TYPE_CHECKING:
    from deltalake import DeltaTable
    from pyspark.sql import SparkSession

_MEMORY: Final = "1GB"
"""Memory of queries; what exceeds it goes to temporary files."""
_MANY: Final = 16
_SMALL: Final = 64 * 1024
"""Largest mean size of files that `_gather` copies into a table: they take longer to open than to
read."""
_GLOB: Final = frozenset("*?[")
"""Characters that make a path a pattern for DuckDB."""
_TYPES: Final = {
    "STRING": "VARCHAR", "BINARY": "BLOB", "BOOLEAN": "BOOLEAN", "INT": "INTEGER",
    "BIGINT": "BIGINT", "DOUBLE": "DOUBLE", "TIMESTAMP": "TIMESTAMP WITH TIME ZONE",
    "ARRAY<STRING>": "VARCHAR[]", "MAP<STRING,STRING>": "MAP(VARCHAR, VARCHAR)",
}  # fmt: skip
"""DuckDB's types by the names of `schema.COLUMNS`."""
_SPARKS: Final = (
    "SET TimeZone = 'UTC'",
    "CREATE MACRO unix_micros(moment) AS epoch_us(moment)",
    "CREATE MACRO timestamp_micros(us) AS make_timestamptz(us)",
    "CREATE MACRO collect_set(x) AS list(DISTINCT x)",
    "CREATE MACRO sort_array(x) AS list_sort(x)",
    # DuckDB's own max_by skips rows whose x is null.
    "CREATE MACRO max_by(x, y) AS arg_max_null(x, y)",
)
"""Statements that define Spark's functions in DuckDB, by their names in Spark."""


_TABLES: Final = frozenset(
    {"confirmations", "repeated_epochs", "repeated_accounts", "died_in_flight"}
)
"""Views with few rows that many other views read; they become tables, computed once."""
_ONE_KIND: Final = re.compile(r"FROM ledger_rows\s+WHERE kind = '(\w+)'(?!\s+OR)")


class QuickLedger:
    """A version of a ledger's table, as it was when `open_quick` was called."""

    def __init__(self, place: LedgerPath, table: DeltaTable) -> None:
        import duckdb

        self.path = place.root
        self.unfolded_epochs = len(spooled_epochs(place))
        """Number of epochs with rows in the spool that are not in the table yet."""
        self.quarantined_files = len(quarantined(place))
        # Rows that do not fit into memory go to this folder. They may be letters' bodies, which
        # nobody else may read.
        self._scratch = tempfile.TemporaryDirectory(prefix="rocket-sink-duckdb-")
        self._session = duckdb.connect(config={
            "memory_limit": _MEMORY,
            "temp_directory": self._scratch.name,
            "preserve_insertion_order": "false",
        })  # fmt: skip
        # DuckDB's progress bar would go to standard output, amid the JSON, when a query takes 2 s.
        # In a notebook without ipywidgets it has no bar, and the setting is an error.
        with contextlib.suppress(duckdb.InvalidInputException):
            self._session.execute("SET enable_progress_bar = false")
        for statement in _SPARKS:
            self._session.execute(statement)
        self._session.register("unfolded_rows", unfolded_rows(place.spools))
        self._queries = 0
        self._files: dict[str, list[str]] = {}
        self._sources: dict[str, str] = {}
        self._views: set[str] = set()
        with _readable(self.path):
            self._open(place, table)

    def _open(self, place: LedgerPath, table: DeltaTable) -> None:
        """Make `ledger_rows`, by DuckDB's own reader if the path is no pattern. DuckDB then knows
        the files' row counts, which helps it to plan joins; a scan through Arrow takes four times
        as long and twice the memory."""
        files = data_files(place, table)
        if _GLOB.intersection(self.path):
            self._session.register("table_rows", as_dataset(table))
            self._lock([])
            self._define_rows({}, "SELECT * FROM table_rows")
            return
        paths = {kind: [f"{self.path}/{name}" for name in names] for kind, names in files.items()}
        self._lock([path for names in paths.values() for path in names])
        self._files = paths
        self._define_rows({kind: _source_of(kind, names) for kind, names in paths.items()})

    def _define_rows(self, sources: dict[str, str], folded: str = "") -> None:
        """Make the view of all rows, including unfolded ones, and a view of each kind. DuckDB plans
        a view each time that a query names it, which takes 40 ms for the view of all rows.

        Args:
            sources: {kind: DuckDB's table, or call of a table function, with the kind's rows}.
            folded: a query for all rows of the table, used instead of `sources`.
        """
        no_rows = f"SELECT {_terms({})} WHERE false"
        folded = folded or " UNION ALL ".join(starmap(_rows_of, sources.items())) or no_rows
        rows = f"{folded} UNION ALL BY NAME SELECT * FROM unfolded_rows"  # noqa: S608
        self._session.execute(f"CREATE OR REPLACE TEMP VIEW ledger_rows AS {rows}")
        for kind in KINDS:
            rows = f"SELECT * FROM ({folded if not sources else no_rows}) WHERE kind = '{kind}'"  # noqa: S608
            if kind in sources:
                terms = {"kind": _quoted([kind])} | _names_of(kind)
                rows = f"SELECT {_aliased(terms)} FROM {sources[kind]}"  # noqa: S608
            self._session.execute(f"CREATE OR REPLACE TEMP VIEW rows_of_{kind} AS {rows}")
        self._sources = sources

    def _gather(self) -> None:
        """Copy the rows of kinds with many small files, once for all queries that follow.

        A fold's files have few rows; opening them takes longer than reading them.
        """
        sources = dict(self._sources)
        for kind, paths in self._files.items():
            if len(paths) < _MANY or sum(map(os.path.getsize, paths)) > _SMALL * len(paths):
                continue
            select = f"SELECT {_aliased(_names_of(kind))} FROM {sources[kind]}"  # noqa: S608
            self._session.execute(f"CREATE TEMP TABLE gathered_{kind} AS {select}")
            sources[kind] = f"gathered_{kind}"
        self._define_rows(sources)

    def _lock(self, paths: list[str]) -> None:
        """Let the session read these files only, and neither write nor load anything."""
        for statement in (
            f"SET allowed_paths = [{_quoted(paths)}]",
            "SET enable_external_access = false",
            "SET lock_configuration = true",
        ):
            self._session.execute(statement)

    def query(self, select: str) -> pa.Table:
        """Run a query over the views; return its rows.

        Raises:
            LedgerError: files of the table are gone or damaged.
        """
        with _readable(self.path):
            self._queries += 1
            if self._queries == 2 and self._files:
                self._gather()
            # Use views: DuckDB reads all columns of a WITH query that is named twice.
            for name in views_of(select):
                if name not in self._views:
                    kind = "TABLE" if name in _TABLES else "VIEW"
                    text = f"CREATE TEMP {kind} {name} AS {_in_duckdb(VIEWS[name])}"
                    self._session.execute(text)
                    self._views.add(name)
            return self._session.sql(_in_duckdb(select)).to_arrow_table()


@contextlib.contextmanager
def _readable(path: str) -> Iterator[None]:
    import duckdb

    try:
        yield
    # DuckDB raises a RuntimeError if its message contains damaged bytes, and a PermissionException
    # for a missing file: it searches by pattern, which the locked session forbids.
    except (
        duckdb.IOException, duckdb.InvalidInputException, duckdb.ConversionException,
        duckdb.PermissionException, RuntimeError, OSError,
    ) as error:  # fmt: skip
        raise unreadable(path, error) from error
    except duckdb.Error as error:
        # DuckDB raises the base class for a damaged Parquet file, a subclass for lack of memory.
        if type(error) is not duckdb.Error:
            raise
        raise unreadable(path, error) from error


def _source_of(kind: str, paths: list[str]) -> str:
    """Return the table function for the rows of one kind in its own columns.

    The function gets the schema, so DuckDB does not open all files to learn it, and reads columns
    that a writer left out as nulls.
    """
    names = _names_of(kind)
    columns = ", ".join(
        f"'{c.name}': {{name: '{c.name}', type: '{_TYPES[c.sql_type]}', default_value: NULL}}"
        for c in COLUMNS
        if c.name in names
    )
    return f"read_parquet([{_quoted(paths)}], hive_partitioning=false, schema=MAP{{{columns}}})"


def _rows_of(kind: str, source: str) -> str:
    """Return the query for all columns of the rows of one kind."""
    return f"SELECT {_terms({'kind': _quoted([kind])} | _names_of(kind))} FROM {source}"  # noqa: S608


def _names_of(kind: str) -> dict[str, str]:
    """Return {column: its term} for the columns of a kind."""
    # A row without query_id comes from a file with a damaged column name.
    checked = {"query_id": "coalesce(query_id, error('no query_id'))"}
    return {name: _name(name) for name in columns_of(kind)} | checked


def _name(column: str) -> str:
    return f'"{column}"'


def _quoted(texts: list[str]) -> str:
    return ", ".join("'" + text.replace("'", "''") + "'" for text in texts)


def _terms(terms: Mapping[str, str]) -> str:
    """Return all columns of the table by their terms; without a term a column is null."""
    nulls = {c.name: f"CAST(NULL AS {_TYPES[c.sql_type]})" for c in COLUMNS}
    return _aliased({**nulls, **terms})


def _aliased(terms: Mapping[str, str]) -> str:
    return ", ".join(f"{term} AS {_name(column)}" for column, term in terms.items())


def _in_duckdb(text: str) -> str:
    """Return SQL for DuckDB, which reads rows of one kind from the kind's view. Quote the column
    `at`, because it is a keyword of DuckDB; leave literals as they are."""
    text = _ONE_KIND.sub(r"FROM rows_of_\1 WHERE kind = '\1'", text)
    return re.sub(r"('[^']*')|\bat\b", lambda match: match[1] or '"at"', text)


def reader_of(spark: SparkSession, place: LedgerPath) -> Query | None:
    """Return a runner of queries over the ledger's views, by DuckDB if possible; None if there is
    no table.

    Raises:
        LedgerError: the table is no ledger of this version.
    """
    # Prefer DuckDB: Spark takes seconds for a query, and a live display would freeze meanwhile.
    quick = open_quick(place.root) if place.is_local else None
    if quick is not None:
        return quick.query
    if not is_table(spark, place):
        return None
    return reader(read_table(spark, place), unfolded_rows(place.spools))


def open_quick(path: str | os.PathLike[str]) -> QuickLedger | None:
    """Open the ledger at a path; return None if Spark must read it, or say what is wrong with it.

    Spark is needed without the extra `fast`, on a remote file system, and in a folder whose name
    delta-rs may read differently; also if there is no table, or a table that is foreign, of another
    schema version, or has features that delta-rs does not know.

    Raises:
        LedgerError: its log is damaged, has no commit, or names files that are not a ledger's.
    """
    if find_spec("duckdb") is None or is_remote(path):
        return None
    place = resolve_path(path)
    table, log_folder = open_table(place), Path(place.root, LOG_FOLDER)
    if table is None and log_folder.is_dir() and not [*log_folder.glob("*.json")]:
        raise damaged(place, "its log has no commit")
    if table is None or table.metadata().configuration.get(VERSION_PROPERTY) != str(SCHEMA_VERSION):
        return None
    return QuickLedger(place, table)
