"""Data files of the table (Parquet), which tasks or the driver write before a commit adds them.
There is one file per kind, with statistics by which Delta's readers skip files. A file that no
commit adds is in no version of the table, and `vacuum` removes it."""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from rocket_sink.ledger.notes import now_ms
from rocket_sink.ledger.path import LedgerPath, failing, is_object_store
from rocket_sink.ledger.schema import LEDGER_SCHEMA, STATS_COLUMNS, columns_of

if TYPE_CHECKING:
    import pyarrow.parquet as pq
    from pyarrow import fs

FILES_DDL: Final = "files STRING"
"""Schema of the rows by which tasks tell the driver the files that they have written."""
OverBatches = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]
"""A function that `mapInArrow` takes."""

_GROUP_BYTES: Final = 16 * 1024 * 1024
"""Bytes of a Parquet row group, at least."""


@dataclass(frozen=True)
class DataFile:
    """A complete file: `path` is below the table's folder, `stats` is Delta's JSON."""

    path: str
    kind: str
    rows: int
    size: int
    modified_ms: int
    stats: str


def write_data_files(place: LedgerPath, batches: Iterable[pa.RecordBatch]) -> list[DataFile]:
    """Write the rows as files of the table, one per kind. Remove the files after an error. Raise
    LedgerError if the files cannot be written."""
    # Import here, because the processes that plan and commit a stream write no files.
    import pyarrow.compute as pc

    errors = partial(
        failing, f"cannot write data files of the ledger {place}", place.uri,
        ". Driver and executors need to write below the ledger's folder",
        (OSError, pa.ArrowException),
    )  # fmt: skip
    filesystem, files = place.filesystem(), dict[str, _KindFile]()
    try:
        for batch in batches:
            column = batch.column("kind")
            kinds = pc.unique(column).to_pylist()
            with errors():
                for kind in kinds:
                    rows = batch if len(kinds) == 1 else batch.filter(pc.equal(column, kind))
                    if kind not in files:
                        files[kind] = _KindFile(place.root, filesystem, kind)
                    files[kind].write(rows)
        with errors():
            return [file.close() for file in files.values()]
    except BaseException:
        # Catch all exceptions, also the GeneratorExit of a killed task.
        for file in files.values():
            file.abort()
        raise


def write_files(
    place: LedgerPath, make: OverBatches, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Write the ledger rows that `make` yields, and yield the files' descriptions (`FILES_DDL`)."""
    files = write_data_files(place, make(batches))
    if files:
        yield pa.RecordBatch.from_pydict({"files": [json.dumps([asdict(file) for file in files])]})


def named_files(rows: Iterable[Any]) -> list[DataFile]:
    """Return the files that collected rows of `FILES_DDL` describe."""
    return [DataFile(**fields) for row in rows for fields in json.loads(row.files)]


class _KindFile:
    def __init__(self, root: str, filesystem: fs.FileSystem, kind: str) -> None:
        self._kind = kind
        self._name = f"kind={kind}/part-{uuid.uuid4()}.zstd.parquet"
        self._path = f"{root}/{self._name}"
        self._filesystem = filesystem
        if not is_object_store(filesystem):
            # Make the kind's folder only: a ledger's folder that was deleted must not come back.
            filesystem.create_dir(f"{root}/kind={kind}", recursive=False)
        import pyarrow.parquet as pq

        # Leave out columns that the kind does not use: readers see null. The commit has the kind.
        self._columns = columns_of(kind)
        self._metadata: list[pq.FileMetaData] = []
        self._file = filesystem.open_output_stream(self._path)
        # Ids of delayed messages are random hex digits, which Zstandard halves and Snappy does not.
        # Bounds of other columns would store whole texts again, and no reader needs them.
        self._writer = pq.ParquetWriter(
            self._file, pa.schema([LEDGER_SCHEMA.field(name) for name in self._columns]),
            store_schema=False, metadata_collector=self._metadata, compression="zstd",
            write_statistics=list(STATS_COLUMNS),
        )  # fmt: skip
        self._waiting: list[pa.RecordBatch] = []
        self._bytes = 0

    def write(self, rows: pa.RecordBatch) -> None:
        self._waiting.append(rows)
        self._bytes += rows.nbytes
        if self._bytes >= _GROUP_BYTES:
            self._flush()

    def close(self) -> DataFile:
        self._flush()
        self._writer.close()
        size = self._file.tell()
        self._file.close()
        metadata = self._metadata[0]
        return DataFile(
            self._name, self._kind, metadata.num_rows, size,
            now_ms(), json.dumps(_stats(metadata)),
        )  # fmt: skip

    def abort(self) -> None:
        """Remove the file; never raises."""
        delete = partial(self._filesystem.delete_file, self._path)
        for step in (self._writer.close, self._file.close, delete):
            with contextlib.suppress(Exception):
                step()

    def _flush(self) -> None:
        waiting, self._waiting, self._bytes = self._waiting, [], 0
        if waiting:
            table = pa.Table.from_batches(waiting, LEDGER_SCHEMA).select(self._columns)
            self._writer.write_table(table, row_group_size=table.num_rows)


def _stats(metadata: pq.FileMetaData) -> dict[str, Any]:
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    places = {groups[0].column(n).path_in_schema: n for n in range(groups[0].num_columns)}
    least, most, nulls = dict[str, Any](), dict[str, Any](), dict[str, int]()
    for name in STATS_COLUMNS:
        if name not in places:
            nulls[name] = metadata.num_rows
            continue
        column_stats = [group.column(places[name]).statistics for group in groups]
        nulls[name] = sum(stats.null_count for stats in column_stats)
        # Delta gets no bounds for columns of nulls, or for groups with very long texts.
        bounded = [stats for stats in column_stats if stats.num_values]
        if bounded and all(stats.has_min_max for stats in bounded):
            least[name] = _in_json(min(stats.min for stats in bounded))
            most[name] = _in_json(max(stats.max for stats in bounded))
    return {
        "numRecords": metadata.num_rows, "minValues": least, "maxValues": most, "nullCount": nulls,
    }  # fmt: skip


def _in_json(value: Any) -> Any:
    return value.strftime("%Y-%m-%dT%H:%M:%S.%fZ") if hasattr(value, "strftime") else value
