"""Sinks that do nothing, which show Spark's own cost of each lane."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import datasource as spark_datasource
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamWriter,
    InputPartition,
    WriterCommitMessage,
)

from rocket_sink.rows.stored_rows import STORED_DDL, stored_batch
from rocket_sink.wire.stored import StoredMessage

if TYPE_CHECKING:
    import pyarrow as pa

FORMAT: Final = "rocketmq_nothing"
_BATCH_BYTES: Final = 2 << 20
_StreamArrowWriter: Final[Any] = getattr(spark_datasource, "DataSourceStreamArrowWriter", None)
"""From Spark 4.1 on."""


class Nothing:
    """A no-op foreach sink."""

    def open(self, partition_id: int, epoch_id: int) -> bool:
        return True

    def process(self, row: Any) -> None:
        pass

    def close(self, error: BaseException | None) -> None:
        pass


def drain(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """For `mapInArrow`: takes all batches and returns none."""
    for _ in batches:
        pass
    yield from ()


class NothingSource(DataSource):
    """A data source with no-op writers, and a reader that makes up its rows."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> str:
        return STORED_DDL

    def reader(self, schema: Any) -> BatchReader:
        return BatchReader(int(self.options["rows"]), int(self.options["bytes"]))

    def writer(self, schema: Any, overwrite: bool) -> BatchWriter:
        return BatchWriter()

    def streamWriter(self, schema: Any, overwrite: bool) -> Any:  # noqa: N802
        return RowStreamWriter() if _StreamArrowWriter is None else ArrowStreamWriter()


class BatchReader(DataSourceReader):
    """Yields the same stored messages again and again, as a topic of eight queues."""

    def __init__(self, rows: int, body_bytes: int) -> None:
        self._rows, self._body_bytes = rows, body_bytes

    def partitions(self) -> Sequence[InputPartition]:
        return [InputPartition(self._rows // 8)] * 8

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        count = max(1, min(partition.value, _BATCH_BYTES // (self._body_bytes + 300)))
        properties = {"TAGS": "tag", "KEYS": "key1", "UNIQ_KEY": "0" * 32, "WAIT": "true"}
        message = StoredMessage("read", bytes(self._body_bytes), properties=properties)
        batch = stored_batch([("broker-a", message)] * count)
        for begin in range(0, partition.value, count):
            yield batch.slice(0, min(count, partition.value - begin))


class BatchWriter(DataSourceArrowWriter):
    """Takes all batches."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        for _ in iterator:
            pass
        return WriterCommitMessage()


class _Stream:
    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        for _ in iterator:
            pass
        return WriterCommitMessage()

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        pass

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        pass


class RowStreamWriter(_Stream, DataSourceStreamWriter):
    """On Spark 4.0, whose stream writers get rows."""


if _StreamArrowWriter is not None:

    class ArrowStreamWriter(_Stream, _StreamArrowWriter):  # type: ignore[misc]
        """On Spark 4.1 and later."""
