"""Sorting a task's rows by `order_by` in bounded memory.

Only the order inside a sharding key matters. So rows are partitioned by a hash of the key, spilled
to temporary files above a memory limit, and each part is sorted at the end of the input.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

from rocket_sink.routing.hashing import siphash_array
from rocket_sink.rows.row_batch import RowBatch

_PARTS: Final = 64
_MEMORY_BYTES: Final = 32 << 20


class RowSorter:
    """Collects rows; returns them sorted."""

    def __init__(self, memory_bytes: int = _MEMORY_BYTES) -> None:
        self._limit = memory_bytes
        self._bytes = 0
        self._batches: list[RowBatch] = []
        self._directory: tempfile.TemporaryDirectory[str] | None = None

    def add(self, rows: RowBatch) -> None:
        """Add rows that have `order_by`."""
        self._batches.append(rows)
        self._bytes += sum(array.nbytes for array in rows.columns().values())
        if self._bytes > self._limit:
            self._spill()

    def sorted_rows(self) -> Iterator[RowBatch]:
        """All rows, sorted by `order_by` within each sharding key; equal values keep order."""
        if self._directory is None:
            if self._batches:
                yield _sorted(_table(self._batches), self._batches[0])
            self._batches = []
            return
        like = self._batches[0] if self._batches else self._like
        self._spill()
        for part in range(_PARTS):
            tables = [_read(path) for path in self._files(part)]
            if tables:
                yield _sorted(pa.concat_tables(tables, promote_options="default"), like)

    def close(self) -> None:
        """Delete the files."""
        self._batches = []
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None

    def _spill(self) -> None:
        if not self._batches:
            return
        if self._directory is None:
            self._directory = tempfile.TemporaryDirectory(
                prefix="rocket-sink-", dir=scratch_folder()
            )
            self._runs = 0
        self._like = self._batches[0]
        table = _table(self._batches)
        self._batches, self._bytes = [], 0
        parts = _part_of(table)
        for part in np.unique(parts).tolist():
            path = Path(self._directory.name) / f"{part}-{self._runs}.arrow"
            rows = table.take(pa.array(np.flatnonzero(parts == part)))
            with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, rows.schema) as out:
                out.write_table(rows)
        self._runs += 1

    def _files(self, part: int) -> list[Path]:
        assert self._directory is not None
        paths = [Path(self._directory.name) / f"{part}-{run}.arrow" for run in range(self._runs)]
        return [path for path in paths if path.exists()]


def scratch_folder() -> str | None:
    """Spark's local directory of this executor; None: use the system's."""
    local = os.environ.get("SPARK_LOCAL_DIRS", "").split(",")[0]
    return local if local and os.access(local, os.W_OK) else None


def _read(path: Path) -> pa.Table:
    with pa.OSFile(str(path), "rb") as file:
        return pa.ipc.open_stream(file).read_all()


def _part_of(table: pa.Table) -> np.ndarray[Any, Any]:
    if "sharding_key" not in table.column_names:
        # The order of rows without a key goes over all runs, and other runs may have keys.
        keys = pa.nulls(table.num_rows, pa.string())
    else:
        keys = table["sharding_key"]
    return siphash_array(keys).view(np.uint64) % _PARTS


def _table(batches: list[RowBatch]) -> pa.Table:
    """One table; columns that a batch lacks are null there."""
    tables = []
    for rows in batches:
        columns: dict[str, Any] = rows.columns()
        if isinstance(rows.topic, str):
            columns.pop("topic", None)
        tables.append(pa.table(columns))
    return pa.concat_tables(tables, promote_options="permissive")


def _sorted(table: pa.Table, like: RowBatch) -> RowBatch:
    # Arrow's sort is not stable: the row number decides between equal values.
    numbered = table.append_column("__row", pa.array(np.arange(table.num_rows)))
    by = ["__row"] if pa.types.is_null(table["order_by"].type) else ["order_by", "__row"]
    order = numbered.sort_by([(name, "ascending") for name in by])
    names = [item.name for item in fields(RowBatch)]
    columns = {n: order[n].combine_chunks() for n in names if n in order.column_names}
    base = {"body": columns["body"], "topic": like.topic, "body_is_text": like.body_is_text}
    return RowBatch(**{**base, **columns, "order_by": None})
