"""The batch reader: `spark.read.format("rocketmq").option("topic", ...)`.

One partition per queue, or per `maxMessagesPerPartition` of it; each a range of offsets that is
fixed when the read is planned, so that a task that runs again reads the same. No consumer group,
no stored offset: consumers do not notice. It is for verification and for dead-letter topics
(`%DLQ%group`); messages are decoded one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.datasource import DataSourceReader, InputPartition

from rocket_sink.errors import ConfigurationError, OptionError
from rocket_sink.message import MessageQueue
from rocket_sink.options import SinkOptions
from rocket_sink.producer.admin.admin import Admin
from rocket_sink.spark.read_options import EARLIEST, LATEST, ReadOptions
from rocket_sink.spark.stored_rows import STORED_SCHEMA, stored_batch
from rocket_sink.wire.stored import memory_bytes

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from rocket_sink.wire.stored import StoredMessage

_BATCH_ROWS: Final = 2000
_BATCH_BYTES: Final = 8 << 20


@dataclass(frozen=True)
class QueueRange(InputPartition):
    """Offsets of one queue, `end` exclusive; of these the messages stored in `[from_ms, to_ms)`."""

    queue: MessageQueue
    begin: int
    end: int
    from_ms: int = -1
    to_ms: int = -1

    def takes(self, message: StoredMessage) -> bool:
        """Brokers find an offset by time only about: the messages' own times decide."""
        return message.store_ms >= self.from_ms and (
            self.to_ms < 0 or message.store_ms < self.to_ms
        )


class MessageReader(DataSourceReader):
    """Reads the ranges that it planned; pickled to the tasks.

    Raises, from `partitions`:
        NoRouteError: the name servers do not know the topic.
        OptionError: an offset of a queue that the topic does not have.
        ConfigurationError: offsets that are not there any more, with failOnDataLoss.
    """

    def __init__(self, read: ReadOptions, options: SinkOptions) -> None:
        self._read = read
        self._options = options

    def partitions(self) -> Sequence[InputPartition]:
        with Admin(self._options) as admin:
            queues = admin.queues(self._options.topic)
            self._check_named(queues)
            return [
                part
                for queue in queues
                for part in _parts(self._range(admin, queue), self._read.max_messages_per_partition)
            ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, QueueRange)
        with Admin(self._options) as admin:
            self._check_there(partition, admin.min_offset(partition.queue))
            rows: list[tuple[str, StoredMessage]] = []
            size, seen = 0, partition.begin
            for message in admin.read_queue(partition.queue, partition.begin, partition.end):
                seen = message.queue_offset + 1
                if partition.takes(message):
                    rows.append((partition.queue.broker_name, message))
                    size += memory_bytes(message)
                if len(rows) >= _BATCH_ROWS or size >= _BATCH_BYTES:
                    yield stored_batch(rows)
                    rows, size = [], 0
            if rows:
                yield stored_batch(rows)
            self._check_end(partition, seen)

    def _range(self, admin: Admin, queue: MessageQueue) -> QueueRange:
        read, lowest, highest = self._read, admin.min_offset(queue), admin.max_offset(queue)
        begin = _resolved(_named(read.starts, queue), lowest, highest)
        end = _resolved(_named(read.ends, queue), lowest, highest)
        if read.start_timestamp >= 0:
            begin = max(admin.offset_by_time(queue, read.start_timestamp), lowest)
        if read.end_timestamp >= 0:
            # Past the newest message brokers before 5.2 name its offset, not the one after it.
            end = min(admin.offset_by_time(queue, read.end_timestamp) + 1, highest)
        found = QueueRange(queue, begin, end, read.start_timestamp, read.end_timestamp)
        if end > highest:
            self._lost(f"{queue} ends at offset {highest}; endingOffsets asks for {end}")
            end = highest
        self._check_there(found, lowest)
        return replace(found, begin=max(begin, lowest), end=end)

    def _check_named(self, queues: Sequence[MessageQueue]) -> None:
        there = {_name(queue) for queue in queues}
        for _, offsets in (self._read.starts, self._read.ends):
            for name in offsets:
                if name not in there:
                    raise OptionError(
                        f"the topic {self._options.topic} has no queue {name!r}; it has "
                        f"{', '.join(sorted(there))}",
                        option="startingOffsets",
                    )

    def _check_there(self, wanted: QueueRange, lowest: int) -> None:
        if wanted.begin < min(lowest, wanted.end):
            self._lost(
                f"{wanted.queue} begins at offset {lowest} now; {wanted.begin} was asked for"
            )

    def _check_end(self, wanted: QueueRange, seen: int) -> None:
        if seen < wanted.end:
            self._lost(f"{wanted.queue} gave messages up to {seen} only, not to {wanted.end}")

    def _lost(self, text: str) -> None:
        if self._read.fail_on_data_loss:
            raise ConfigurationError(
                f"{text}: retention deletes old messages. Begin later (startingOffsets, "
                "startTimestamp), or read what is left with failOnDataLoss=false"
            )


def check_schema(schema: StructType) -> None:
    """Refuse a schema of the user's own: the reader has its own.

    Raises:
        ConfigurationError
    """
    if schema.names != STORED_SCHEMA.names:
        raise ConfigurationError(
            'format("rocketmq") reads the columns '
            f"{', '.join(STORED_SCHEMA.names)}; leave .schema(...) out and select from these"
        )


def _parts(whole: QueueRange, most: int) -> Iterator[QueueRange]:
    step = most or max(1, whole.end - whole.begin)
    for begin in range(whole.begin, whole.end, step):
        yield replace(whole, begin=begin, end=min(begin + step, whole.end))


def _name(queue: MessageQueue) -> str:
    return f"{queue.broker_name}:{queue.queue_id}"


def _named(offsets: tuple[int, dict[str, int]], queue: MessageQueue) -> int:
    default, by_queue = offsets
    return by_queue.get(_name(queue), default)


def _resolved(offset: int, lowest: int, highest: int) -> int:
    return {EARLIEST: lowest, LATEST: highest}.get(offset, offset)


def reader_of(given: dict[str, Any]) -> MessageReader:
    """The reader for a user's options, checked.

    Raises:
        OptionError
    """
    return MessageReader(*ReadOptions.parse(given))
