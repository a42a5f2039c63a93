"""Rows sorted by `order_by`, in memory and over spilled runs."""

import numpy as np
import pyarrow as pa
import pytest

from rocket_sink.rows import sort
from rocket_sink.rows.row_batch import RowBatch
from rocket_sink.rows.sort import RowSorter


@pytest.mark.parametrize("memory_bytes", [1, 1 << 20])
def test_order_of_rows_without_a_key(memory_bytes, tmp_path, monkeypatch):
    """A batch in which no row has a key has no `order_by` column."""
    monkeypatch.setenv("SPARK_LOCAL_DIRS", f"{tmp_path},/other")
    sorter = RowSorter(memory_bytes=memory_bytes)
    sorter.add(RowBatch(pa.array([b"5"]), "t", order_by=pa.array([5])))
    keys = pa.array([None, "k", None])
    sorter.add(RowBatch(pa.array([b"1", b"k", b"7"]), "t", sharding_key=keys,
                        order_by=pa.array([1, 2, 7])))  # fmt: skip
    sorter.add(RowBatch(pa.array([b"4"]), "t", order_by=pa.array([4])))
    bodies = [body for rows in sorter.sorted_rows() for body in rows.body.to_pylist()]
    assert len(list(tmp_path.iterdir())) == (memory_bytes == 1)
    sorter.close()
    assert not list(tmp_path.iterdir())
    assert [body for body in bodies if body != b"k"] == [b"1", b"4", b"5", b"7"]


KEYS = {"all null": [None] * 500, "one": ["hot"] * 500}


@pytest.mark.parametrize("keys", KEYS.values(), ids=KEYS)
def test_memory_stays_bounded_whatever_the_keys(monkeypatch, keys):
    """80 runs of 50 KB are merged, some of them twice. Arrow's own count of bytes is the judge."""
    monkeypatch.setattr(sort, "_RUNS", 8)
    limit, numbers = 50_000, np.random.default_rng(1).permutation(40_000)
    sorter = RowSorter(memory_bytes=limit)
    before, most = pa.total_allocated_bytes(), 0
    expected = []
    for part in np.split(numbers // 3, 80):
        body = pa.array([b"%099d" % number for number in part])
        keyed = {"sharding_key": pa.array(keys, pa.string()), "order_by": pa.array(part)}
        sorter.add(RowBatch(body, "t", **keyed))
        expected += part.tolist()
        del body, keyed
        most = max(most, pa.total_allocated_bytes() - before)
    bodies = []
    for rows in sorter.sorted_rows():
        most = max(most, pa.total_allocated_bytes() - before)
        bodies += map(int, rows.body.to_pylist())
    sorter.close()
    assert bodies == sorted(expected)
    assert most < 10 * limit, most


@pytest.mark.parametrize("memory_bytes", [1, 700, 1 << 20])
def test_equal_values_keep_their_order(memory_bytes):
    """Python's sort is the judge; nulls come last."""
    values = [None if n % 11 == 0 else n * 7 % 5 for n in range(300)]
    sorter = RowSorter(memory_bytes=memory_bytes)
    for start in range(0, 300, 3):
        part = values[start : start + 3]
        body = pa.array([b"%d" % n for n in range(start, start + 3)])
        sorter.add(RowBatch(body, "t", order_by=pa.array(part, pa.int64())))
    bodies = [int(body) for rows in sorter.sorted_rows() for body in rows.body.to_pylist()]
    sorter.close()
    assert bodies == sorted(range(300), key=lambda n: (values[n] is None, values[n] or 0))
