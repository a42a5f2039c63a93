"""Files of the harnesses: sources of numbered rows, and signals to drivers."""

import os

import pyarrow as pa
import pyarrow.parquet as pq

from tests.producer.waiting import until

WAIT_S = 900.0


def write_whole(path, text):
    """Write a file at once, so that readers see all of it or none."""
    partial = path.with_name(path.name + ".part")
    partial.write_text(text)
    partial.rename(path)


def write_rows(path, keys, numbers, order, **columns):
    """Write a source's file of rows "KEY:NUMBER". Spark reads the files of a source by `order`."""
    bodies = [f"{key}:{number}" for key, number in zip(keys, numbers, strict=True)]
    rows = pa.table({"body": bodies, "sharding_key": keys, **columns})
    pq.write_table(rows, path, compression="none")
    os.utime(path, (1_700_000_000 + order, 1_700_000_000 + order))


def await_file(path):
    """Wait for a file; raise AssertionError if nobody writes it."""
    until(path.exists, WAIT_S, 0.05, f"{path} did not come")
