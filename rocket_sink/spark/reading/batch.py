"""The batch reader: `spark.read.format("rocketmq").option("topic", ...)`.

A partition is a queue, or `maxMessagesPerPartition` messages of it. Its range of offsets is fixed
when the read is planned, so a task that runs again reads the same messages. The reader uses no
consumer group and stores no offset, so consumers do not notice it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from rocket_sink.errors import ConfigurationError, OptionError
from rocket_sink.message import MessageQueue
from rocket_sink.options import SinkOptions
from rocket_sink.producer.admin.admin import Admin
from rocket_sink.producer.engine.stored_check import warn_of_replaced
from rocket_sink.rows.stored_rows import STORED_SCHEMA, stored_batches
from rocket_sink.spark.reading.filters import ALL_TAGS, Narrowed
from rocket_sink.spark.reading.options import EARLIEST, LATEST, ReadOptions

_BATCH_BYTES: Final = 2 << 20
"""The bytes of answers that are decoded together."""
AWAY_S: Final = 120.0
"""The time for which a task waits for a broker or name servers that are away. Spark's Kafka source
waits as long (spark.network.timeout)."""


@dataclass(frozen=True)
class QueueRange(InputPartition):
    """A range of offsets of one queue; `end` is exclusive. `expression` filters by tags."""

    queue: MessageQueue
    begin: int
    end: int
    expression: str = ALL_TAGS


@dataclass(eq=False)
class MessageReader(DataSourceReader):
    """Plans the ranges of queues on the driver, and reads them in the tasks.

    Raises, from `partitions`:
        NoRouteError: the name servers do not know the topic.
        OptionError: an offset of a queue that the topic does not have.
        ConfigurationError: with failOnDataLoss, offsets whose messages are gone.
    """

    asked: ReadOptions
    options: SinkOptions
    narrowed: Narrowed = field(default_factory=Narrowed)

    def partitions(self) -> Sequence[InputPartition]:
        with Admin(self.options) as admin:
            queues = admin.queues(self.options.topic)
            self.check_named(queues)
            # Spark has pickled this reader for the tasks before it asks for the partitions.
            expression = self._expression(admin)
            return [
                replace(part, expression=expression)
                for queue in queues
                for part in parts_of(
                    self.range_of(admin, queue), self.asked.max_messages_per_partition
                )
            ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, QueueRange):
            return  # Spark runs a task with a partition of its own if there is nothing to read.
        with Admin(self.options, patience_s=AWAY_S) as admin:
            self.check_begin(partition, admin.min_offset(partition.queue))
            queue, broker_name = partition.queue, partition.queue.broker_name
            on_single = partial(warn_of_replaced, broker=broker_name)
            takes = partial(self._takes, partition)
            answers: list[bytes] = []
            size, following = 0, partition.begin
            for (data, first), begin, following in admin.read_bytes(  # noqa: B007 (read later)
                queue, partition.begin, partition.end, expression=partition.expression
            ):
                # A compaction topic keeps the newest message of each key.
                if first > begin and not self._has(admin, "cleanup.policy", "COMPACTION"):
                    self.report_loss(f"{queue} has no messages from {begin} to {first} now")
                answers.append(data)
                size += len(data)
                if size >= _BATCH_BYTES:
                    yield from stored_batches(answers, broker_name, takes, on_single)
                    answers, size = [], 0
            yield from stored_batches(answers, broker_name, takes, on_single)
            if following < partition.end:
                self.report_loss(
                    f"{queue} gave messages up to {following} only, not to {partition.end}"
                )

    def range_of(self, admin: Admin, queue: MessageQueue) -> QueueRange:
        """Return the range that the options ask for; report messages of it that are gone."""
        read, narrowed = self.asked, self.narrowed
        lowest, highest = admin.min_offset(queue), admin.max_offset(queue)
        begin = _offset_of(read.starts, queue, lowest, highest)
        end = _offset_of(read.ends, queue, lowest, highest)
        if begin > highest:
            self.report_loss(f"{queue} ends at offset {highest}; startingOffsets asks for {begin}")
        if (start_ms := max(read.start_timestamp, narrowed.start_ms)) >= 0:
            begin = max(begin, admin.offset_by_time(queue, start_ms))
        ends_ms = [time for time in (read.end_timestamp, narrowed.end_ms) if time >= 0]
        if ends_ms:
            # For a time after the newest message, brokers before 5.2 return that message's offset,
            # not the next offset. So add 1; `_takes` drops a message that is too new.
            end = min(end, admin.offset_by_time(queue, min(ends_ms)) + 1)
        queue_range = QueueRange(queue, begin, end)
        if end > highest:
            self.report_loss(f"{queue} ends at offset {highest}; endingOffsets asks for {end}")
            end = highest
        self.check_begin(queue_range, lowest)
        return replace(queue_range, begin=max(begin, lowest), end=end)

    def _takes(self, partition: QueueRange, offset: Any, store_ms: Any) -> Any:
        """Return whether messages are in the ranges of offsets and times; brokers' offsets by time
        are inexact. The arguments are integers, or arrays of integers."""
        end_ms = self.asked.end_timestamp
        is_early = (store_ms < end_ms) | (end_ms < 0)
        is_between = (offset >= partition.begin) & (offset < partition.end)
        return is_between & is_early & (store_ms >= self.asked.start_timestamp)

    def _expression(self, admin: Admin) -> str:
        """Return the brokers' filter. If queues hold batches, the brokers do not know the tags in
        them, so pull all messages."""
        has_tags = self.narrowed.tags and not self._has(admin, "queue.type", "BatchCQ")
        return self.narrowed.expression if has_tags else ALL_TAGS

    def _has(self, admin: Admin, attribute: str, value: str) -> bool:
        """Return whether the topic has this attribute on any broker."""
        attributes = admin.topic_attributes(self.options.topic).values()
        return any(each.get(attribute) == value for each in attributes)

    def check_named(self, queues: Sequence[MessageQueue]) -> None:
        """Raise an OptionError if an option names a queue that the topic does not have."""
        there = {queue_name(queue) for queue in queues}
        each = (("startingOffsets", self.asked.starts), ("endingOffsets", self.asked.ends))
        for option_name, (_, offsets) in each:
            for name in offsets.keys() - there:
                raise OptionError(
                    f"option {option_name}: the topic {self.options.topic} has no queue "
                    f"{name!r}; it has {', '.join(sorted(there))}",
                    option=option_name,
                )

    def check_begin(self, wanted: QueueRange, lowest: int) -> None:
        """Report a loss if the range begins before the queue's oldest message."""
        if wanted.begin < min(lowest, wanted.end):
            self.report_loss(
                f"{wanted.queue} begins at offset {lowest} now; {wanted.begin} was asked for"
            )

    def report_loss(self, text: str) -> None:
        """Raise a ConfigurationError with `failOnDataLoss`; `text` names the queue and offset."""
        if self.asked.fail_on_data_loss:
            raise ConfigurationError(
                f"{text}: retention deletes old messages. Begin later (startingOffsets, "
                "startTimestamp), or read what is left with failOnDataLoss=false"
            )


class FilteringReader(MessageReader):
    """The reader of sessions that pass filters to readers, from Spark 4.1 on."""

    def pushFilters(self, filters: list[Any]) -> Iterable[Any]:  # noqa: N802 (Spark's name)
        self.narrowed = Narrowed.by(filters)
        return filters


def check_schema(schema: StructType) -> None:
    """Raise a ConfigurationError for a schema of the user's: the reader has its own."""
    if schema.names != STORED_SCHEMA.names:
        raise ConfigurationError(
            'format("rocketmq") reads the columns '
            f"{', '.join(STORED_SCHEMA.names)}; leave .schema(...) out and select from these"
        )


def parts_of(whole: QueueRange, most: int) -> Iterator[QueueRange]:
    """Yield the range in parts of at most `most` offsets; 0: as a whole."""
    step = most or max(1, whole.end - whole.begin)
    for begin in range(whole.begin, whole.end, step):
        yield replace(whole, begin=begin, end=min(begin + step, whole.end))


def queue_name(queue: MessageQueue) -> str:
    """Return the queue's name in options and checkpoints, such as `broker-a:0`."""
    return f"{queue.broker_name}:{queue.queue_id}"


def _offset_of(
    offsets: tuple[int, dict[str, int]], queue: MessageQueue, lowest: int, highest: int
) -> int:
    default, by_queue = offsets
    offset = by_queue.get(queue_name(queue), default)
    return {EARLIEST: lowest, LATEST: highest}.get(offset, offset)
