"""Rows sorted by `order_by`, in memory and over spilled runs."""

from __future__ import annotations

import pyarrow as pa
import pytest

from rocket_sink.rows.row_batch import RowBatch
from rocket_sink.rows.sort import RowSorter


@pytest.mark.parametrize("memory_bytes", [1, 1 << 20])
def test_order_of_rows_without_a_key(memory_bytes: int) -> None:
    """A batch in which no row has a key lacks the column."""
    sorter = RowSorter(memory_bytes=memory_bytes)
    sorter.add(RowBatch(pa.array([b"5"]), "t", order_by=pa.array([5])))
    keys = pa.array([None, "k", None])
    sorter.add(RowBatch(pa.array([b"1", b"k", b"7"]), "t", sharding_key=keys,
                        order_by=pa.array([1, 2, 7])))  # fmt: skip
    sorter.add(RowBatch(pa.array([b"4"]), "t", order_by=pa.array([4])))
    bodies = [body for rows in sorter.sorted_rows() for body in rows.body.to_pylist()]
    sorter.close()
    assert [body for body in bodies if body != b"k"] == [b"1", b"4", b"5", b"7"]
