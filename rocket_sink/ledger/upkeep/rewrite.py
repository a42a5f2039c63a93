"""The commit that replaces data files of the table; nothing else takes rows out of a ledger.

The table is append-only (`delta.appendOnly`), so Delta refuses DELETE, UPDATE and MERGE by any
writer. Delta accepts compactions, whose removals are marked `dataChange=false`. A rewrite is such a
commit by delta-rs, even if it drops rows. Streams that read the table skip it, so they neither fail
nor see a row twice.

Two rewrites of one file at once would double its rows, or bring dropped rows back: delta-rs 1.6
does not notice that both commits remove the file, not even for two `optimize.compact`. So each
rewrite is the next transaction of one application id. If two start from one version of the table,
Delta refuses the second commit. It is tried again if its files are still in the table. Appends are
no such transactions, so they neither wait for a rewrite nor fail because of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from rocket_sink.errors import LedgerError
from rocket_sink.ledger.append.delta_rs import (
    StoredFile,
    add_actions,
    last_version,
    open_table,
    stored_files,
    write_version,
)
from rocket_sink.ledger.append.table import open_for_commits
from rocket_sink.ledger.notes import now_ms
from rocket_sink.ledger.path import LedgerPath
from rocket_sink.ledger.schema import LEDGER_SCHEMA
from rocket_sink.ledger.transport.data_files import write_data_files

if TYPE_CHECKING:
    from deltalake import DeltaTable
    from pyspark.sql import SparkSession

_BATCH_ROWS: Final = 8192
_TRIES: Final = 10
SPARK_REMOVES_NONE: Final = (
    "Spark's Delta commits to it, and removes no rows from an append-only table. A ledger in a "
    "folder of the driver, on Azure, Google's store or HDFS, or on S3 with Hadoop 3.4.2 and "
    "later, can expire and be erased; "
    "elsewhere begin a new ledger from time to time"
)


def open_for_rewrites(spark: SparkSession, place: LedgerPath) -> DeltaTable:
    """Open the table to take rows or contents out of it. Raise LedgerError if Spark's Delta commits
    to the ledger: it may overwrite a rewrite, whose old files are already deleted."""
    table = open_for_commits(spark, place)
    if table is None:
        raise LedgerError(
            f"rows of the ledger {place} cannot be removed: {SPARK_REMOVES_NONE}", path=place.uri
        )
    return table


def read_file(
    place: LedgerPath, file: StoredFile, columns: Sequence[str] | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a data file with all columns of the table; unread columns are null."""
    import pyarrow.parquet as pq

    with place.filesystem().open_input_file(f"{place.root}/{file.path}") as source:
        # Spark's OPTIMIZE writes INT96. Read it in microseconds: nanoseconds begin in 1677.
        parquet = pq.ParquetFile(source, coerce_int96_timestamp_unit="us")
        for batch in parquet.iter_batches(_BATCH_ROWS, columns=columns):
            values = {f.name: pa.nulls(batch.num_rows, f.type) for f in LEDGER_SCHEMA}
            values.update(zip(batch.schema.names, batch.columns, strict=True))
            values["kind"] = pa.repeat(file.kind, batch.num_rows)
            arrays = [values[f.name].cast(f.type) for f in LEDGER_SCHEMA]
            yield pa.RecordBatch.from_arrays(arrays, schema=LEDGER_SCHEMA)


def rewrite(
    place: LedgerPath, table: DeltaTable, groups: Sequence[Sequence[StoredFile]],
    change: Callable[[pa.RecordBatch], pa.RecordBatch] = lambda batch: batch,
    dropped: Sequence[StoredFile] = (),
) -> bool:  # fmt: skip
    """Replace each group of files by one file per kind with the rows that `change` returns.

    Return False if another process has rewritten some of the files since `table` was opened.
    Nothing has changed then. Raise LedgerError if the commit failed for another reason.

    Args:
        change: a function that takes a batch and returns the rows that stay, perhaps changed.
        dropped: files that are removed with all their rows.
    """
    from deltalake.exceptions import CommitFailedError, DeltaError
    from deltalake.transaction import RemoveAction

    added = []
    for group in groups:
        batches = (change(batch) for file in group for batch in read_file(place, file))
        added += write_data_files(place, (batch for batch in batches if batch.num_rows))
    app_id = f"rocket-sink/rewrites/{table.metadata().id}"
    removed = [file for group in (*groups, dropped) for file in group]
    removals: list[Any] = [
        RemoveAction(file.path, False, now_ms(), file.size, {"kind": file.kind}) for file in removed
    ]
    actions = removals + add_actions(added, has_new_rows=False)
    for _ in range(_TRIES):
        number = (last_version(place, table, app_id) or 0) + 1
        try:
            write_version(table, actions, app_id, number)
            return True
        except (DeltaError, OSError) as error:
            # Keep the new files: if only the store's answer was lost, the table names them.
            newer = open_table(place)
            names = set() if newer is None else {f.path for f in stored_files(place, newer)}
            if added and added[0].path in names:
                return True
            if newer is None or not isinstance(error, CommitFailedError):
                raise LedgerError(
                    f"cannot rewrite files of the ledger {place}: {error}", path=place.uri
                ) from error
            if not names.issuperset(file.path for file in removed):
                return False
            table = newer  # Try again: the other rewrite has left these files in place.
    return False
