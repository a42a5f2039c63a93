"""The rows of all senders: a key, a tag, a body that begins with the row's number."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

NUMBER_BYTES: Final = 20
"""Bytes of the row's number in each body, by which lost rows are found."""
ALL_DIFFERENT: Final = -1
"""Instead of a number of sharding keys: all are different."""
_FILE_ROWS: Final = 50_000
_FILE_BYTES: Final = 64 << 20
_EPOCH_FILES: Final = 10
_WARM_UP_FILES: Final = 2


@dataclass(frozen=True)
class Load:
    """Number of rows, size of bodies, numbers of sharding keys.

    `epoch_rows`: of each epoch of a stream; 0: as many as ten files have.
    """

    rows: int
    body_bytes: int
    keys: tuple[int, ...] = ()
    epoch_rows: int = 0

    @classmethod
    def capped(cls, rows: int, body_bytes: int, keys: tuple[int, ...], most_bytes: int) -> Load:
        """With fewer rows if the bodies exceed `most_bytes` together."""
        return cls(max(1000, min(rows, most_bytes // body_bytes)), body_bytes, keys)

    @property
    def file_rows(self) -> int:
        """Rows per file, and so per partition."""
        if self.epoch_rows:
            return self.epoch_rows
        return max(1000, min(_FILE_ROWS, _FILE_BYTES // self.body_bytes))


class RowFiles:
    """Parquet files with a load's rows; `frame` and `stream` select a case's columns."""

    def __init__(self, spark: SparkSession, load: Load, path: Path) -> None:
        self.load = load
        self._spark = spark
        self._path = path
        if not path.exists():
            _write(spark, load, path)
        self._schema = spark.read.parquet(str(path)).schema

    def frame(self, keys: int, more: tuple[str, ...] = (), *, warm_up: bool = False) -> DataFrame:
        """The rows as a batch; `keys` as in `Case`, `more` are further columns (SQL)."""
        frame = self._spark.read.schema(self._schema).parquet(self._source(warm_up))
        return _selected(frame, keys, more)

    def stream(self, keys: int, more: tuple[str, ...] = (), *, warm_up: bool = False) -> DataFrame:
        """The rows as a stream of epochs of some files each."""
        reader = self._spark.readStream.schema(self._schema)
        files = 1 if self.load.epoch_rows else _EPOCH_FILES
        reader = reader.option("maxFilesPerTrigger", files)
        return _selected(reader.parquet(self._source(warm_up)), keys, more)

    def _source(self, warm_up: bool) -> str:
        if not warm_up:
            return str(self._path)
        some = self._path.with_name(f"{self._path.name}-some")
        if not some.exists():
            some.mkdir()
            for file in sorted(self._path.glob("*.parquet"))[:_WARM_UP_FILES]:
                (some / file.name).hardlink_to(file)
        return str(some)


def _selected(frame: DataFrame, keys: int, more: tuple[str, ...]) -> DataFrame:
    columns = ["body", "tags", "keys", *more]
    if keys:
        columns.append(f"{_key_column(keys)} AS sharding_key")
    return frame.selectExpr(*columns)


def _key_column(keys: int) -> str:
    return "key_all" if keys == ALL_DIFFERENT else f"key_{keys}"


def _write(spark: SparkSession, load: Load, path: Path) -> None:
    filler = f"repeat('x', {max(0, load.body_bytes - NUMBER_BYTES)})"
    files = max(1, -(-load.rows // load.file_rows))
    sharding = [
        f"concat('s', cast({'id' if n == ALL_DIFFERENT else f'id % {n}'} AS string)) "
        f"AS {_key_column(n)}"
        for n in load.keys
        if n
    ]
    rows = spark.range(0, load.rows, 1, files).selectExpr(
        f"cast(concat(lpad(cast(id AS string), {NUMBER_BYTES}, '0'), {filler}) AS binary) AS body",
        "concat('tag', cast(id % 10 AS string)) AS tags",
        "concat('key', cast(id AS string)) AS keys",
        *sharding,
    )
    rows.write.parquet(str(path))


def body_of(number: int, size: int) -> bytes:
    """Return the body of a row."""
    return str(number).zfill(NUMBER_BYTES).encode().ljust(size, b"x")[: max(size, NUMBER_BYTES)]


def number_of(body: Any) -> int:
    """The number in a body of any sender; Java's is padded with NUL, ours with zeros."""
    head = bytes(body[:NUMBER_BYTES]).rstrip(b"x\0")
    return int(head)


def record_batch(rows: int, body_bytes: int, keys: int = 0) -> pa.RecordBatch:
    """Return the benchmark's rows as an Arrow batch, as a worker gets them."""
    import pyarrow as pa

    numbers = range(rows)
    columns: dict[str, Any] = {
        "body": pa.array([body_of(n, body_bytes) for n in numbers], pa.binary()),
        "tags": [f"tag{n % 10}" for n in numbers],
        "keys": [f"key{n}" for n in numbers],
    }
    if keys:
        columns["sharding_key"] = [f"s{n if keys == ALL_DIFFERENT else n % keys}" for n in numbers]
    return pa.RecordBatch.from_pydict(columns)


def numbered_table(numbers: range, body_bytes: int) -> pa.Table:
    """The messages with these numbers as columns."""
    import pyarrow as pa
    import pyarrow.compute as pc

    texts = pa.array(numbers, pa.int64()).cast(pa.string())
    padded = pc.utf8_lpad(texts, NUMBER_BYTES, "0")
    suffix = body_of(0, body_bytes)[NUMBER_BYTES:].decode()
    return pa.table(
        {
            "body": pc.binary_join_element_wise(padded, suffix, ""),
            "tags": pa.repeat("tag", len(texts)),
            "keys": pc.binary_join_element_wise("key", texts, ""),
        }
    )
