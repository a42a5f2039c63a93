"""Sorts a task's rows by `order_by` in bounded memory. Rows beyond the memory limit are sorted and
written to a temporary file, a *run*. At the end of the input the runs are merged by blocks. A merge
takes at most `_RUNS` runs, so that the blocks fit into memory; more runs are merged in steps."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rocket_sink.rows.row_batch import RowBatch

_RUNS: Final = 64
"""Largest number of runs in a merge. A block has the memory limit divided by this number."""
_MEMORY_BYTES: Final = 32 << 20
_ROW: Final = "__row"
"""The column with a row's number in the input, by which rows with equal values are sorted."""


class RowSorter:
    """Collects rows, in files beyond the memory limit, and yields them sorted."""

    def __init__(self, memory_bytes: int = _MEMORY_BYTES) -> None:
        self._limit = memory_bytes
        self._bytes = 0
        self._count = 0
        self._batches: list[RowBatch] = []
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self._runs: list[Path] = []
        self._files = 0

    def add(self, rows: RowBatch) -> None:
        """Add rows, which must have the column `order_by`."""
        self._batches.append(rows)
        self._like = rows
        self._bytes += sum(array.nbytes for array in rows.columns().values())
        if self._bytes > self._limit:
            self._spill()

    def sorted_rows(self) -> Iterator[RowBatch]:
        """Yield all rows, sorted by `order_by`. Rows with equal values keep their order."""
        if self._directory is None:
            if self._batches:
                yield _rows(self._take_sorted(), self._like)
            return
        self._spill()
        while len(self._runs) > _RUNS:
            self._runs = [*self._runs[_RUNS:], self._write(_merge_runs(self._runs[:_RUNS]))]
        for table in _merge_runs(self._runs):
            yield _rows(table, self._like)

    def close(self) -> None:
        """Delete the files and forget the rows."""
        self._batches = []
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None

    def _take_sorted(self) -> pa.Table:
        """Remove the rows that are in memory, and return them sorted."""
        table = _table(self._batches)
        numbers = np.arange(self._count, self._count + len(table))
        self._count += len(table)
        self._batches, self._bytes = [], 0
        table = table.append_column(_ROW, pa.array(numbers))
        return table.take(_sort_indices(table))

    def _spill(self) -> None:
        if not self._batches:
            return
        if self._directory is None:
            self._directory = tempfile.TemporaryDirectory(
                prefix="rocket-sink-", dir=scratch_folder()
            )
        self._runs.append(self._write([self._take_sorted()]))

    def _write(self, tables: Iterable[pa.Table]) -> Path:
        assert self._directory is not None
        path = Path(self._directory.name) / f"{self._files}.arrow"
        self._files += 1
        out = None
        with pa.OSFile(str(path), "wb") as file:
            for table in tables:
                out = out or pa.ipc.new_stream(file, table.schema)
                block_rows = len(table) * self._limit // (_RUNS * max(1, table.nbytes))
                out.write_table(table, max_chunksize=max(1, block_rows))
            if out is not None:
                out.close()
        return path


class _Run:
    """A run that is being merged; `rows` are those that are in memory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = pa.OSFile(str(path), "rb")
        self._blocks = pa.ipc.open_stream(self._file)
        self._block_rows = 1
        self.rows: pa.Table = self._blocks.schema.empty_table()
        self.is_read = False
        """Whether all of the file has been read."""

    def fill(self) -> None:
        """Read blocks until at least half a block is in memory, or the file ends."""
        while not self.is_read and 2 * len(self.rows) < self._block_rows:
            try:
                block = pa.Table.from_batches([self._blocks.read_next_batch()])
            except StopIteration:
                self.is_read = True
                self._file.close()
                self._path.unlink()
                return
            self._block_rows = len(block)
            self.rows = pa.concat_tables([self.rows, block])


def scratch_folder() -> str | None:
    """Return the first of Spark's local directories; None if it is unset or not writable."""
    local = os.environ.get("SPARK_LOCAL_DIRS", "").split(",")[0]
    return local if os.access(local, os.W_OK) else None  # No path is empty.


def _merge_runs(paths: Sequence[Path]) -> Iterator[pa.Table]:
    """Yield the rows of sorted runs, sorted; delete the files."""
    runs = [_Run(path) for path in paths]
    # A run may lack columns, which are null in its rows.
    empty = pa.concat_tables([run.rows for run in runs], promote_options="permissive")
    while True:
        for run in runs:
            run.fill()
        runs = [run for run in runs if len(run.rows)]
        if not runs:
            return
        table = pa.concat_tables([empty, *(run.rows for run in runs)], promote_options="permissive")
        order = _sort_indices(table).to_numpy()
        place = np.empty(len(order), np.int64)
        place[order] = np.arange(len(order))
        ends = np.cumsum([len(run.rows) for run in runs])
        # Rows that are still in a file sort after the run's last row in memory. So yield the rows
        # up to the smallest of these last rows.
        lasts = [place[end - 1] for run, end in zip(runs, ends, strict=True) if not run.is_read]
        count = int(min(lasts)) + 1 if lasts else len(order)
        yield table.take(pa.array(order[:count]))
        for run, places in zip(runs, np.split(place, ends[:-1]), strict=True):
            run.rows = run.rows.slice(int(np.count_nonzero(places < count)))


def _sort_indices(table: pa.Table) -> pa.Array:
    # Sort by row number, too, because Arrow's sort is not stable.
    by = [_ROW] if pa.types.is_null(table["order_by"].type) else ["order_by", _ROW]
    return pc.sort_indices(table, sort_keys=[(name, "ascending") for name in by])


def _table(batches: list[RowBatch]) -> pa.Table:
    """Return the batches as one table. Columns that a batch lacks are null in its rows."""
    tables = []
    for rows in batches:
        columns: dict[str, Any] = rows.columns()
        if isinstance(rows.topic, str):
            columns.pop("topic", None)
        tables.append(pa.table(columns))
    return pa.concat_tables(tables, promote_options="permissive")


def _rows(order: pa.Table, like: RowBatch) -> RowBatch:
    names = [item.name for item in fields(RowBatch)]
    columns = {n: order[n].combine_chunks() for n in names if n in order.column_names}
    base = {"body": columns["body"], "topic": like.topic, "body_is_text": like.body_is_text}
    return RowBatch(**{**base, **columns, "order_by": None})
