"""The streaming reader: `spark.readStream.format("rocketmq").option("topic", ...)`.

Spark's checkpoint has the offsets: {topic: {"broker-a:0": the next offset to read}}. So a query
that starts again reads on where its last epoch ended, and a repeated epoch reads the same messages.

- A queue that appears while the query runs is read from offset 0.
- If a broker is away (no route, or no answer), its queues keep their offsets. Nothing is skipped,
  and the query reads on when the broker is back.
- `failOnDataLoss` is for messages that cannot be read any more: retention has deleted them, the
  topic was made anew with fewer messages, or brokers refuse to read the queue.

Spark calls all methods but `read` in one process per query."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition

from rocket_sink.errors import (
    ConfigurationError,
    NameServerUnavailableError,
    OptionError,
    RocketSinkError,
    SendError,
)
from rocket_sink.message import MessageQueue
from rocket_sink.message_rules import with_namespace
from rocket_sink.net import log
from rocket_sink.options import SinkOptions
from rocket_sink.producer.admin.admin import Admin
from rocket_sink.spark.reading.batch import MessageReader, QueueRange, parts_of, queue_name
from rocket_sink.spark.reading.options import ReadOptions

try:
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadMaxRows,
        ReadMinRows,
        SupportsTriggerAvailableNow,
    )
except ImportError:  # Spark 4.0 and 4.1 tell a reader neither its start nor a limit.
    ReadAllAvailable = None  # type: ignore[assignment, misc]
    SupportsTriggerAvailableNow = object  # type: ignore[assignment, misc]

_LOG: Final = log.logger(__name__)
Offsets: TypeAlias = "dict[str, int]"
"""{name of a queue: offset}."""


@dataclass(eq=False)
class TopicStream(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans the epochs of a stream on the driver, and reads them in the tasks.

    Raises:
        OptionError: a limit of epochs before Spark 4.2; an offset of a queue that is not there.
        NoRouteError: the name servers do not know the topic.
        ConfigurationError: the checkpoint is of another topic; with failOnDataLoss, messages that
            cannot be read any more.
    """

    asked: ReadOptions
    options: SinkOptions
    _admin: Admin | None = field(default=None, init=False, repr=False)
    _ends: Offsets = field(default_factory=dict, init=False)
    """The ends of the queues, as of the last look."""
    _queues: list[MessageQueue] = field(default_factory=list, init=False)
    _last_offsets: Offsets | None = field(default=None, init=False)
    """The ends at the start of a query with the trigger availableNow."""
    _epoch_s: float = field(default=-math.inf, init=False)
    """The time at which the last epoch began."""

    def __post_init__(self) -> None:
        asked = self.asked
        if ReadAllAvailable is None and (
            asked.max_offsets_per_trigger or asked.min_offsets_per_trigger
        ):
            raise OptionError(
                "maxOffsetsPerTrigger and minOffsetsPerTrigger need Spark 4.2: earlier versions do "
                "not tell a data source in Python where an epoch starts"
            )
        self._batch = MessageReader(asked, self.options)

    def initialOffset(self) -> dict[str, Offsets]:  # noqa: N802 (Spark's names)
        admin, topic = self._connected(), self.options.topic
        queues = admin.queues(topic)
        self._batch.check_named(queues)
        ranges = [self._batch.range_of(admin, queue) for queue in queues]
        return {topic: {queue_name(each.queue): each.begin for each in ranges}}

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._last_offsets = self._look({})

    def getDefaultReadLimit(self) -> Any:  # noqa: N802
        if self.asked.max_offsets_per_trigger:
            return ReadMaxRows(self.asked.max_offsets_per_trigger)
        if self.asked.min_offsets_per_trigger:
            return ReadMinRows(self.asked.min_offsets_per_trigger)
        return ReadAllAvailable()

    def latestOffset(self, start: Any = None, limit: Any = None) -> dict[str, Offsets]:  # noqa: N802
        """Return the end of the next epoch; `start` if no epoch is due. Spark 4.0 and 4.1 pass no
        arguments."""
        begins = self._offsets(start or {})
        ends = self._look(begins)
        if self._last_offsets is not None:
            last = {**begins, **self._last_offsets}
            ends = {name: min(end, last[name]) for name, end in ends.items() if name in last}
        waiting = {name: max(0, end - begins.get(name, 0)) for name, end in ends.items()}
        if not self._is_due(sum(waiting.values()), limit):
            return {self.options.topic: begins}
        if most := getattr(limit, "max_rows", 0):
            ends = {
                name: min(ends[name], begins.get(name, 0) + share)
                for name, share in _shares(waiting, most).items()
            }
        self._epoch_s = time.monotonic()
        return {self.options.topic: ends}

    def reportLatestOffset(self) -> dict[str, Offsets]:  # noqa: N802
        """Return the ends as of the last look; with them Spark's progress shows the lag."""
        return {self.options.topic: self._ends}

    def partitions(self, start: Any, end: Any) -> Sequence[InputPartition]:
        begins, ends = self._offsets(start), self._offsets(end)
        ranges = [
            self._range(name, begins.get(name, 0), stop)
            for name, stop in ends.items()
            if stop != begins.get(name, 0)
        ]
        most = self.asked.max_messages_per_partition
        return [part for whole in ranges for part in parts_of(whole, most)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return self._batch.read(partition)

    def commit(self, end: Any) -> None:
        """Note the offsets of a finished epoch under `consumerGroup`. A failure is only logged,
        because the query itself does not need the note."""
        if not (group := self.asked.consumer_group):
            return
        for name, offset in self._offsets(end).items():
            try:
                self._connected().set_consumer_offset(self._queue(name), group, offset)
            except RocketSinkError as error:
                _LOG.warning(
                    "the broker of %s did not note the offset %d of the consumer group %s: %s",
                    name, offset, group, error,
                )  # fmt: skip

    def stop(self) -> None:
        if self._admin is not None:
            self._admin.close()
            self._admin = None

    def _connected(self) -> Admin:
        if self._admin is None:
            self._admin = Admin(self.options)
        return self._admin

    def _offsets(self, checkpoint: Mapping[str, Any]) -> Offsets:
        topic = self.options.topic
        if checkpoint and topic not in checkpoint:
            raise ConfigurationError(
                f"the checkpoint is of the topic {next(iter(checkpoint))}, and this query reads "
                f"{topic}: take another checkpointLocation"
            )
        return dict(checkpoint.get(topic, {}))

    def _queue(self, name: str) -> MessageQueue:
        broker, _, number = name.rpartition(":")
        topic = with_namespace(self.options.namespace, self.options.topic)
        return MessageQueue(topic, broker, int(number))

    def _look(self, begins: Offsets) -> Offsets:
        """Return the ends of all queues. Queues of a broker that is away keep their offsets."""
        ends, failures = dict(begins), dict[str, SendError | str]()
        try:
            self._queues = self._connected().queues(self.options.topic)
        except NameServerUnavailableError as error:
            if not self._queues:
                raise
            _LOG.warning("the queues of the last epoch are read: %s", error)
        queues = self._queues
        brokers = {queue.broker_name for queue in queues}
        for queue in queues:
            if queue.broker_name in failures:
                continue
            try:
                ends[queue_name(queue)] = self._connected().max_offset(queue)
            except SendError as error:
                failures[queue.broker_name] = error
        errors = [error for error in failures.values() if isinstance(error, SendError)]
        if errors and failures.keys() == brokers:
            raise errors[0]
        names = {queue_name(queue) for queue in queues}
        for name in begins.keys() - names:
            if (broker := self._queue(name).broker_name) in brokers:
                self._batch.report_loss(f"the topic {self.options.topic} has no queue {name} now")
            else:
                failures[broker] = "no name server has a route to it"
        for broker, failure in failures.items():
            _LOG.warning(
                "the broker %s is away, and its queues are read when it is back: %s",
                broker, failure, extra={"peer": broker},
            )  # fmt: skip
        self._ends = ends
        return dict(ends)

    def _is_due(self, waiting: int, limit: Any) -> bool:
        """Return whether `minOffsetsPerTrigger` lets an epoch begin."""
        takes_all = ReadAllAvailable is None or isinstance(limit, ReadAllAvailable)
        if takes_all or self._last_offsets is not None:
            return True
        delay_s = self.asked.max_trigger_delay_ms / 1000
        is_late = time.monotonic() - self._epoch_s >= delay_s
        return is_late or waiting >= self.asked.min_offsets_per_trigger

    def _range(self, name: str, begin: int, end: int) -> QueueRange:
        whole = QueueRange(self._queue(name), begin, end)
        lowest = self._connected().min_offset(whole.queue)
        if begin > end:
            self._batch.report_loss(
                f"{whole.queue} ends at offset {end}; the checkpoint has {begin}, so the topic was "
                "made anew, or its broker has lost messages"
            )
            return QueueRange(whole.queue, lowest, end)
        self._batch.check_begin(whole, lowest)
        return QueueRange(whole.queue, max(begin, min(lowest, end)), end)


def _shares(waiting: Mapping[str, int], most: int) -> Offsets:
    """Return how many messages of each queue an epoch of about `most` messages takes: by what waits
    there, and at least one of each queue that has any, as Spark's Kafka source does."""
    total = sum(waiting.values())
    if total <= most:
        return dict(waiting)
    return {name: max(count * most // total, min(count, 1)) for name, count in waiting.items()}
