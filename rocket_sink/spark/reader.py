"""The batch reader: `spark.read.format("rocketmq").option("topic", ...)`.

A partition is a queue, or `maxMessagesPerPartition` messages of it. Its range of offsets is fixed
when the read is planned, so a task that runs again reads the same messages. The reader uses no
consumer group and stores no offset, so consumers do not notice it. It is meant for verification and
dead-letter topics (`%DLQ%group`), because it decodes messages one by one. The sink has the
connection options (name servers, credentials, TLS, time-outs) and `topic`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from rocket_sink.errors import ConfigurationError, OptionError
from rocket_sink.message import MessageQueue
from rocket_sink.option_spec import Kind, Option, option, option_of
from rocket_sink.options import OPTIONS, SinkOptions, constructor_options
from rocket_sink.producer.admin.admin import Admin
from rocket_sink.rows.stored_rows import STORED_SCHEMA, stored_batch
from rocket_sink.text import nearest
from rocket_sink.wire.stored import StoredMessage, memory_bytes

# ruff: noqa: E501 (one option per line: it is read as a table)


_R: Final = "reading"
EARLIEST: Final = -2
LATEST: Final = -1
"""The numbers that mean "earliest" and "latest", as in Spark's Kafka source."""
_WORDS: Final = {"earliest": EARLIEST, "latest": LATEST}


@dataclass(frozen=True)
class ReadOptions:
    """The options of a read; made by `ReadOptions.parse`."""

    # fmt: off
    starting_offsets: str = option("startingOffsets", Kind.TEXT, "earliest", _R, "earliest, latest, or an offset per queue as JSON: {\"broker-a:0\": 12, \"broker-b:3\": \"latest\"}; queues that are not named: earliest")
    ending_offsets: str = option("endingOffsets", Kind.TEXT, "latest", _R, "as startingOffsets, exclusive; queues that are not named: latest, as it is when the read is planned")
    start_timestamp: int = option("startTimestamp", Kind.INTEGER, -1, _R, "messages stored at or after this time, ms since 1970; instead of startingOffsets", low=-1)
    end_timestamp: int = option("endTimestamp", Kind.INTEGER, -1, _R, "messages stored before this time, ms since 1970; instead of endingOffsets", low=-1)
    max_messages_per_partition: int = option("maxMessagesPerPartition", Kind.INTEGER, 0, _R, "a longer queue is read by several tasks; 0: one task per queue", low=0)
    fail_on_data_loss: bool = option("failOnDataLoss", Kind.BOOLEAN, True, _R, "fail when offsets that were asked for are not there any more (retention); else read what is left")
    # fmt: on

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> tuple[ReadOptions, SinkOptions]:
        """Split options in any spelling into the reader's and the sink's. Raise an OptionError for
        an unknown name, a bad value, a contradiction, or a missing topic or name server."""
        read_options: dict[str, Any] = {}
        sink_options: dict[str, Any] = {}
        for name, value in given.items():
            option = _BY_NAME.get(_plain(name))
            if option is None:
                sink_options[name] = value
            else:
                read_options[option.attribute] = option.parse(value)
        read = cls(**read_options)
        if not (sink := _sink_options(sink_options)).topic:
            raise OptionError("option topic is missing: which topic is read?", option="topic")
        _ = sink.name_servers
        for side in ("start", "end"):
            if {f"{side}_timestamp", f"{side}ing_offsets"} <= read_options.keys():
                name = f"{side}Timestamp"
                raise OptionError(f"give {name} or {side}ingOffsets, not both", option=name)
        read.starts, read.ends  # noqa: B018 (checked now, where the user sees it)
        return read, sink

    @property
    def starts(self) -> tuple[int, dict[str, int]]:
        """The first offsets: (default, {"broker:queue": offset of this queue})."""
        return _offsets(self.starting_offsets, "startingOffsets", EARLIEST)

    @property
    def ends(self) -> tuple[int, dict[str, int]]:
        """The end offsets, in the form of `starts`."""
        return _offsets(self.ending_offsets, "endingOffsets", LATEST)


READ_OPTIONS: Final[tuple[Option, ...]] = tuple(option_of(item) for item in fields(ReadOptions))


def _plain(name: str) -> str:
    return "".join(c for c in name.lower().removeprefix("rocketmq.") if c not in "_.-")


_BY_NAME: Final = {_plain(option.name): option for option in READ_OPTIONS}


def _sink_options(given: Mapping[str, Any]) -> SinkOptions:
    try:
        return constructor_options(None, given)
    except OptionError as error:
        name = str(getattr(error, "option", ""))
        near = nearest(_plain(name), _BY_NAME)
        if not near or any(_plain(option.name) == _plain(name) for option in OPTIONS):
            raise
        raise OptionError(
            f"unknown option {name!r}; did you mean {_BY_NAME[near].name!r}?", option=name
        ) from None


def _offsets(text: str, name: str, default: int) -> tuple[int, dict[str, int]]:
    word = _WORDS.get(text.strip().lower())
    if word is not None:
        return word, {}
    try:
        values = json.loads(text)
        offsets = {str(queue): _offset(value) for queue, value in values.items()}
    except (ValueError, AttributeError, TypeError):
        raise OptionError(
            f'option {name}: {text!r} is neither earliest nor latest nor JSON as {{"broker-a:0": 12'
            "}, with offsets of 0 and more, earliest or latest",
            option=name,
        ) from None
    return default, offsets


def _offset(value: Any) -> int:
    offset = _WORDS.get(value.lower()) if isinstance(value, str) else value
    if type(offset) is not int or offset < EARLIEST:
        raise ValueError(value)
    return offset


_BATCH_ROWS: Final = 2000
_BATCH_BYTES: Final = 8 << 20


@dataclass(frozen=True)
class QueueRange(InputPartition):
    """A range of offsets of one queue; `end` is exclusive."""

    queue: MessageQueue
    begin: int
    end: int


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

    def partitions(self) -> Sequence[InputPartition]:
        with Admin(self.options) as admin:
            queues = admin.queues(self.options.topic)
            self._check_named(queues)
            return [
                part
                for queue in queues
                for part in _parts(self._range(admin, queue), self.asked.max_messages_per_partition)
            ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, QueueRange)
        with Admin(self.options) as admin:
            self._check_there(partition, admin.min_offset(partition.queue))
            rows: list[tuple[str, StoredMessage]] = []
            size, next_offset = 0, partition.begin
            for message in admin.read_queue(partition.queue, partition.begin, partition.end):
                next_offset = message.queue_offset + 1
                if self._takes(message):
                    rows.append((partition.queue.broker_name, message))
                    size += memory_bytes(message)
                if len(rows) >= _BATCH_ROWS or size >= _BATCH_BYTES:
                    yield stored_batch(rows)
                    rows, size = [], 0
            if rows:
                yield stored_batch(rows)
            if next_offset < partition.end:
                self._lost(
                    f"{partition.queue} gave messages up to {next_offset} only, not to "
                    f"{partition.end}"
                )

    def _range(self, admin: Admin, queue: MessageQueue) -> QueueRange:
        read, lowest, highest = self.asked, admin.min_offset(queue), admin.max_offset(queue)
        begin = _resolved(read.starts, queue, lowest, highest)
        end = _resolved(read.ends, queue, lowest, highest)
        if begin > highest:
            self._lost(f"{queue} ends at offset {highest}; startingOffsets asks for {begin}")
        if read.start_timestamp >= 0:
            begin = max(admin.offset_by_time(queue, read.start_timestamp), lowest)
        if read.end_timestamp >= 0:
            # For a time after the newest message, brokers before 5.2 return that message's offset,
            # not the next offset. So add 1; `_takes` drops a message that is too new.
            end = min(admin.offset_by_time(queue, read.end_timestamp) + 1, highest)
        queue_range = QueueRange(queue, begin, end)
        if end > highest:
            self._lost(f"{queue} ends at offset {highest}; endingOffsets asks for {end}")
            end = highest
        self._check_there(queue_range, lowest)
        return replace(queue_range, begin=max(begin, lowest), end=end)

    def _takes(self, message: StoredMessage) -> bool:
        """Return whether the message is in the time range; brokers' offsets by time are inexact."""
        to_ms = self.asked.end_timestamp
        is_early = to_ms < 0 or message.store_ms < to_ms
        return is_early and message.store_ms >= self.asked.start_timestamp

    def _check_named(self, queues: Sequence[MessageQueue]) -> None:
        there = {_name(queue) for queue in queues}
        read = self.asked
        each = (("startingOffsets", read.starts), ("endingOffsets", read.ends))
        for option_name, (_, offsets) in each:
            for name in offsets:
                if name not in there:
                    raise OptionError(
                        f"option {option_name}: the topic {self.options.topic} has no queue "
                        f"{name!r}; it has {', '.join(sorted(there))}",
                        option=option_name,
                    )

    def _check_there(self, wanted: QueueRange, lowest: int) -> None:
        if wanted.begin < min(lowest, wanted.end):
            self._lost(
                f"{wanted.queue} begins at offset {lowest} now; {wanted.begin} was asked for"
            )

    def _lost(self, text: str) -> None:
        if self.asked.fail_on_data_loss:
            raise ConfigurationError(
                f"{text}: retention deletes old messages. Begin later (startingOffsets, "
                "startTimestamp), or read what is left with failOnDataLoss=false"
            )


def check_schema(schema: StructType) -> None:
    """Raise a ConfigurationError for a schema of the user's: the reader has its own."""
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


def _resolved(
    offsets: tuple[int, dict[str, int]], queue: MessageQueue, lowest: int, highest: int
) -> int:
    default, by_queue = offsets
    offset = by_queue.get(_name(queue), default)
    return {EARLIEST: lowest, LATEST: highest}.get(offset, offset)
