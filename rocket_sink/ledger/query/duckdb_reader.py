"""Queries over a ledger's views without Spark: delta-rs opens the table, DuckDB runs the SQL.

Commands prefer this reader, because Spark and Delta need half a minute to start. The reader needs
the extra `fast`, and folds nothing. Rows that are not folded yet are only in the views
`latest_answers` and `latest_isolations`.

If only Spark's Delta may read the table, DuckDB gets the rows from Spark, unless they are many. The
views are deep: Spark needs seconds to plan a query over them, and a report has two dozen."""
# ruff: noqa: S608 (the SQL has our own names; texts of users are checked or quoted)

from __future__ import annotations

import contextlib
import itertools
import math
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from rocket_sink.ledger.append.delta_rs import (
    as_dataset,
    damaged,
    data_files,
    has_commits,
    open_table,
    unreadable,
)
from rocket_sink.ledger.append.table import is_table, read_table, reading
from rocket_sink.ledger.path import LOG_FOLDER, LedgerPath, is_remote, resolve_path
from rocket_sink.ledger.schema import (
    COLUMNS,
    KINDS,
    LEDGER_SCHEMA,
    SCHEMA_VERSION,
    VERSION_PROPERTY,
    columns_of,
)
from rocket_sink.ledger.sql import Query
from rocket_sink.ledger.storage import is_classic
from rocket_sink.ledger.transport.files import (
    letters_in,
    quarantined,
    spooled_epochs,
    spooled_rows,
    unfolded_rows,
)
from rocket_sink.ledger.views import VIEWS, reader, views_of

if TYPE_CHECKING:
    from deltalake import DeltaTable
    from pyspark.sql import DataFrame, SparkSession

_MEMORY: Final = "1GB"
"""Memory limit of a session; DuckDB writes the excess to temporary files."""
_MANY: Final = 16
_SMALL: Final = 64 * 1024
"""Mean size up to which `_gather` copies files: they take longer to open than to read."""
_GLOB: Final = frozenset("*?[")
"""Characters that make a path a pattern for DuckDB."""
_TYPES: Final = {
    "STRING": "VARCHAR", "BINARY": "BLOB", "BOOLEAN": "BOOLEAN", "INT": "INTEGER",
    "BIGINT": "BIGINT", "DOUBLE": "DOUBLE", "TIMESTAMP": "TIMESTAMP WITH TIME ZONE",
    "ARRAY<STRING>": "VARCHAR[]", "MAP<STRING,STRING>": "MAP(VARCHAR, VARCHAR)",
}  # fmt: skip
"""DuckDB's names of the types in `schema.COLUMNS`."""
_SPARKS: Final = (
    "SET TimeZone = 'UTC'",
    "CREATE MACRO unix_micros(moment) AS epoch_us(moment)",
    "CREATE MACRO timestamp_micros(us) AS make_timestamptz(us)",
    "CREATE MACRO collect_set(x) AS list(DISTINCT x)",
    "CREATE MACRO sort_array(x) AS list_sort(x)",
    # DuckDB's own max_by skips rows whose x is null.
    "CREATE MACRO max_by(x, y) AS arg_max_null(x, y)",
)
"""Statements that define functions of Spark's SQL in DuckDB."""


_TABLES: Final = frozenset(
    {"confirmations", "repeated_epochs", "repeated_accounts", "died_in_flight"}
)
"""Views with few rows that many other views read. They become tables, so they are computed once."""
_ONE_KIND: Final = re.compile(r"FROM ledger_rows\s+WHERE kind = '(\w+)'(?!\s+OR)")


_DRIVER_BYTES: Final = 16 * 1024 * 1024
"""Bytes of a table (Parquet) up to which Spark brings its rows to the driver for DuckDB."""


class QuickLedger:
    """A ledger as it was when its rows were opened: a table of delta-rs, or rows from Spark."""

    def __init__(self, place: LedgerPath, table: DeltaTable | pa.Table) -> None:
        import duckdb

        self.path = place.root
        rows = spooled_rows(place.spools)
        self.unfolded_epochs, self.unfolded_letters = len(spooled_epochs(place)), letters_in(rows)
        """Numbers of epochs and of dead letters in the spool, which are not in the table yet."""
        self.quarantined_files = len(quarantined(place))
        # A private folder for rows that exceed DuckDB's memory: they may be dead letters' bodies.
        self._scratch = tempfile.TemporaryDirectory(prefix="rocket-sink-duckdb-")
        self._session = duckdb.connect(config={
            "memory_limit": _MEMORY,
            "temp_directory": self._scratch.name,
            "preserve_insertion_order": "false",
        })  # fmt: skip
        # DuckDB would print a progress bar amid a command's JSON if a query takes 2 s. In a
        # notebook without ipywidgets the setting is an error, but there is no bar either.
        with contextlib.suppress(duckdb.InvalidInputException):
            self._session.execute("SET enable_progress_bar = false")
        for statement in _SPARKS:
            self._session.execute(statement)
        self._session.register("unfolded_rows", unfolded_rows(rows))
        self._queries = 0
        self._files: dict[str, list[str]] = {}
        self._sources: dict[str, str] = {}
        """{kind: table, query, or call of a table function that has the kind's rows}"""
        self._views: set[str] = set()
        with _readable(self.path):
            self._open(place, table)

    def _open(self, place: LedgerPath, table: DeltaTable | pa.Table) -> None:
        """Define the views of rows. DuckDB reads the files itself. Only if DuckDB would take the
        path for a pattern, Arrow scans the files. This takes four times as long and twice the
        memory, and DuckDB plans joins without the row counts."""
        rows = table if isinstance(table, pa.Table) else None
        if rows is None and _GLOB.intersection(self.path):
            rows = as_dataset(table)
        if rows is not None:
            self._session.register("table_rows", rows)
            self._sources = {k: f"(SELECT * FROM table_rows WHERE kind = '{k}')" for k in KINDS}
        else:
            for kind, names in data_files(place, table).items():
                self._files[kind] = [f"{self.path}/{name}" for name in names]
                self._sources[kind] = _source_of(kind, self._files[kind])
        # Let the session read only these files, write no file and load no extension.
        for statement in (
            f"SET allowed_paths = [{_quoted(itertools.chain(*self._files.values()))}]",
            "SET enable_external_access = false",
            "SET lock_configuration = true",
        ):
            self._session.execute(statement)
        self._define_rows()

    def _define_rows(self) -> None:
        """Define a view of each kind's rows, and one of all rows, including unfolded ones. DuckDB
        needs 40 ms to plan the view of all rows, each time that a query names it."""
        nulls = {c.name: f"CAST(NULL AS {_TYPES[c.sql_type]})" for c in COLUMNS}
        no_rows = f"(SELECT {_aliased(nulls)} WHERE false)"
        for kind in KINDS:
            terms = {"kind": f"'{kind}'"} | _names_of(kind)
            rows = f"SELECT {_aliased(terms)} FROM {self._sources.get(kind, no_rows)}"
            self._session.execute(f"CREATE OR REPLACE TEMP VIEW rows_of_{kind} AS {rows}")
        views = [*(f"rows_of_{kind}" for kind in KINDS), "unfolded_rows"]
        rows = " UNION ALL BY NAME ".join(f"SELECT * FROM {view}" for view in views)
        self._session.execute(f"CREATE OR REPLACE TEMP VIEW ledger_rows AS {rows}")

    def _gather(self) -> None:
        """Copy kinds with many small files into tables: each query would open all files again."""
        for kind, paths in self._files.items():
            if len(paths) >= _MANY and sum(map(os.path.getsize, paths)) <= _SMALL * len(paths):
                select = f"SELECT {_aliased(_names_of(kind))} FROM {self._sources[kind]}"
                self._session.execute(f"CREATE TEMP TABLE gathered_{kind} AS {select}")
                self._sources[kind] = f"gathered_{kind}"
        self._define_rows()

    def query(self, select: str) -> pa.Table:
        """Run a query over the views; return its rows. Raise LedgerError if files of the table are
        gone or damaged."""
        with _readable(self.path):
            self._queries += 1
            if self._queries == 2 and self._files:
                self._gather()
            # Define views: DuckDB would read all columns of a WITH query that is named twice.
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
    # DuckDB raises RuntimeError if its message contains damaged bytes. For a missing file DuckDB
    # searches by pattern, which the locked session forbids (PermissionException).
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
    """Return the call of `read_parquet` for the rows of one kind. With the schema as an argument,
    DuckDB need not open all files to learn it, and reads columns that a file lacks as null."""
    names = _names_of(kind)
    columns = ", ".join(
        f"'{c.name}': {{name: '{c.name}', type: '{_TYPES[c.sql_type]}', default_value: NULL}}"
        for c in COLUMNS
        if c.name in names
    )
    return f"read_parquet([{_quoted(paths)}], hive_partitioning=false, schema=MAP{{{columns}}})"


def _names_of(kind: str) -> dict[str, str]:
    """Return {column: SQL term} for the columns of a kind."""
    # Each row has a query_id. So a null shows that the column's name in the file is damaged.
    checked = {"query_id": "coalesce(query_id, error('no query_id'))"}
    return {name: f'"{name}"' for name in columns_of(kind)} | checked


def _quoted(texts: Iterable[str]) -> str:
    return ", ".join("'" + text.replace("'", "''") + "'" for text in texts)


def _aliased(terms: Mapping[str, str]) -> str:
    return ", ".join(f'{term} AS "{column}"' for column, term in terms.items())


def _in_duckdb(text: str) -> str:
    """Return the SQL for DuckDB: read rows of one kind from the kind's view, and quote the column
    `at`, which is a keyword of DuckDB. Literals stay as they are."""
    text = _ONE_KIND.sub(r"FROM rows_of_\1 WHERE kind = '\1'", text)
    return re.sub(r"('[^']*')|\bat\b", lambda match: match[1] or '"at"', text)


def reader_of(spark: SparkSession, place: LedgerPath) -> Query | None:
    """Return a function that runs queries over the ledger's views, by DuckDB if possible. Return
    None if there is no table. Raise LedgerError if the table is no ledger of this version."""
    # Prefer DuckDB: Spark takes seconds for a query, and a live display would freeze meanwhile.
    quick = open_quick(place.root) if place.is_local else None
    if quick is not None:
        return quick.query
    if not is_table(spark, place):
        return None
    rows = read_table(spark, place)
    if find_spec("duckdb") is not None and _size(rows) <= _DRIVER_BYTES:
        with reading(place):
            return QuickLedger(place, rows.toArrow()).query
    return reader(rows, unfolded_rows(spooled_rows(place.spools)))


def _size(rows: DataFrame) -> float:
    """Return the bytes of the files that a frame reads; infinite over Spark Connect."""
    if not is_classic(rows.sparkSession):
        return math.inf
    frame: Any = rows
    return int(frame._jdf.queryExecution().optimizedPlan().stats().sizeInBytes())


def open_spool(path: str | os.PathLike[str]) -> QuickLedger | None:
    """Open a ledger without its table, which the first fold makes: only views of unfolded rows have
    rows. Return None without the extra `fast`, and on a remote file system."""
    if find_spec("duckdb") is None or is_remote(path):
        return None
    return QuickLedger(resolve_path(path), LEDGER_SCHEMA.empty_table())


def open_quick(path: str | os.PathLike[str]) -> QuickLedger | None:
    """Open the ledger at a path for DuckDB; None if Spark has to read it or report the error.

    Spark reads it without the extra `fast`, on a remote file system, in a folder whose name
    delta-rs may read differently, and if delta-rs does not know a feature of the table. Spark
    reports an error if there is no table, or one that is foreign or of another schema version.
    Raise LedgerError if the log is damaged, has no commit, or names files of no ledger."""
    if find_spec("duckdb") is None or is_remote(path):
        return None
    place = resolve_path(path)
    table, root = open_table(place), Path(place.root)
    # Without data files, another process is just making the table.
    has_log = root.joinpath(LOG_FOLDER).is_dir() and any(root.glob("kind=*"))
    if table is None and has_log and not has_commits(place):
        raise damaged(place, "its log has no commit")
    if table is None or table.metadata().configuration.get(VERSION_PROPERTY) != str(SCHEMA_VERSION):
        return None
    return QuickLedger(place, table)
