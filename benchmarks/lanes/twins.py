"""Sinks that do nothing, which show Spark's own cost of each lane."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import datasource as spark_datasource
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceStreamWriter,
    WriterCommitMessage,
)

if TYPE_CHECKING:
    import pyarrow as pa

FORMAT: Final = "rocketmq_nothing"
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
    """A data source with no-op writers."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def writer(self, schema: Any, overwrite: bool) -> BatchWriter:
        return BatchWriter()

    def streamWriter(self, schema: Any, overwrite: bool) -> Any:  # noqa: N802
        return RowStreamWriter() if _StreamArrowWriter is None else ArrowStreamWriter()


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
