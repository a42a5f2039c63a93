"""The streaming reader: `spark.readStream.format("rocketmq").option("topic", ...)`.

Spark's checkpoint has the offsets: {topic: {"broker-a:0": the next offset to read}}. So a query
that starts again reads on where its last epoch ended, and a repeated epoch reads the same messages.

- Spark logs the end of the first epoch, but not its start. If this epoch runs again, Spark asks for
  the start anew, and `latest` would be a later one. So the end has the start, too (`_BEGINS`).
- A queue that appears while the query runs is read from offset 0.
- If brokers or all name servers are away, their queues keep their offsets. Nothing is skipped, and
  the query reads on when they are back. Only a start needs one name server and one broker.
- `failOnDataLoss` is for messages that cannot be read any more: retention has deleted them, the
  topic was deleted or made anew with fewer messages, or brokers refuse to read the queue. It is
  also for offsets of another cluster, which an epoch's end names from Spark 4.2 on (`_CLUSTER`).

Spark calls all methods but `read` in one process per query. Before 4.2 it tells the reader no start
of an epoch, and asks for the first offset after the first end. So the reader remembers both: the
former is where its last look ended."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final, TypeAlias

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition

from rocket_sink.errors import ConfigurationError, OptionError, RocketSinkError, SendError
from rocket_sink.message import MessageQueue
from rocket_sink.message_rules import with_namespace
from rocket_sink.net import log
from rocket_sink.net.resolve import resolved
from rocket_sink.options import SinkOptions
from rocket_sink.producer.admin.admin import Admin, is_away
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
_BEGINS: Final = "begins at"
"""The key of an epoch's start in its end. No topic can have this name."""
_CLUSTER: Final = "read from"
"""The key of the cluster in an epoch's end: its name servers, their addresses and the brokers'."""
Offsets: TypeAlias = "dict[str, int]"
"""{name of a queue: offset}."""


@dataclass(eq=False)
class TopicStream(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans the epochs of a stream on the driver, and reads them in the tasks.

    Raises:
        OptionError: a limit of epochs before Spark 4.2; an offset of a queue that is not there.
        NoRouteError: the name servers do not know the topic.
        ConfigurationError: the checkpoint is of another topic; with failOnDataLoss, the checkpoint
            is of another cluster, or messages cannot be read any more; before Spark 4.2, an epoch
            without the queues of a broker.
    """

    asked: ReadOptions
    options: SinkOptions
    _admin: Admin | None = field(default=None, init=False, repr=False)
    _ends: Offsets = field(default_factory=dict, init=False)
    """The ends of the queues, as of the last look; before it, of the epoch that runs again."""
    _queues: list[MessageQueue] = field(default_factory=list, init=False)
    _last_offsets: Offsets | None = field(default=None, init=False)
    """The ends at the start of a query with the trigger availableNow."""
    _epoch_s: float = field(default=-math.inf, init=False)
    """The time at which the last epoch began."""
    _first: Offsets | None = field(default=None, init=False)
    """The offsets with which a new query begins."""
    _noted: Offsets = field(default_factory=dict, init=False)
    """The offsets that brokers have noted for the consumer group."""

    def __post_init__(self) -> None:
        asked = self.asked
        if ReadAllAvailable is None and (
            asked.max_offsets_per_trigger or asked.min_offsets_per_trigger
        ):
            raise OptionError(
                "maxOffsetsPerTrigger and minOffsetsPerTrigger need Spark 4.2: earlier versions do "
                "not tell a data source in Python where an epoch starts"
            )
        # A start that is given by time is for the first epoch only: a later start of the query may
        # give another, and reads on from the checkpoint.
        self._batch = MessageReader(replace(asked, start_timestamp=-1), self.options)
        self._topic = self.options.full_topic

    def initialOffset(self) -> dict[str, Offsets]:  # noqa: N802 (Spark's names)
        if self._first is None:
            admin, batch = self._connect(), MessageReader(self.asked, self.options)
            queues = admin.queues(self.options.topic)
            batch.check_named(queues)
            begins = {queue: batch.range_of(admin, queue).begin for queue in queues}
            if self.asked.start_timestamp >= 0:
                begins = {queue: self._after(queue, begin) for queue, begin in begins.items()}
            self._first = {queue_name(queue): begin for queue, begin in begins.items()}
        return {self._topic: self._first}

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._last_offsets = self._look({})

    def getDefaultReadLimit(self) -> Any:  # noqa: N802
        if self.asked.max_offsets_per_trigger:
            return ReadMaxRows(self.asked.max_offsets_per_trigger)
        if self.asked.min_offsets_per_trigger:
            return ReadMinRows(self.asked.min_offsets_per_trigger)
        return ReadAllAvailable()

    def latestOffset(self, start: Any = None, limit: Any = None) -> dict[str, Any]:  # noqa: N802
        """Return the end of the next epoch; `start` if no epoch is due. Spark 4.0 and 4.1 pass no
        arguments."""
        if start is None:
            # A failure is Spark's to see: it asks again if the query is a new one.
            with contextlib.suppress(ConfigurationError):
                self.initialOffset()
        # Spark before 4.2 sets no limit, so its epoch before ended where the last look did.
        begins = dict(self._ends) if start is None else self._offsets(start)
        if start is not None:
            self._note(begins)  # The epoch before is finished, and Spark may commit it much later.
        ends = self._look(begins, is_whole=start is not None)
        # A new query with `latest` may begin after the end that it saw for availableNow.
        last = ends if self._last_offsets is None else {**begins, **self._last_offsets}
        waiting = {
            name: max(0, min(end, last[name]) - begins.get(name, 0))
            for name, end in ends.items()
            if name in last
        }
        if not self._is_due(sum(waiting.values()), limit):
            return start or {self._topic: begins}
        shares = _shares(waiting, getattr(limit, "max_rows", 0))
        ends = {name: min(ends[name], begins.get(name, 0) + n) for name, n in shares.items()}
        self._epoch_s = time.monotonic()
        first = {_BEGINS: begins} if start and begins == self._first else {}
        # Spark before 4.2 compares the end with the start, to see whether messages wait.
        cluster = {_CLUSTER: self._cluster} if start else {}
        return start if start and ends == begins else {self._topic: ends, **first, **cluster}

    def reportLatestOffset(self) -> dict[str, Offsets]:  # noqa: N802
        """Return the ends as of the last look; with them Spark's progress shows the lag."""
        return {self._topic: self._ends}

    def partitions(self, start: Any, end: Any) -> Sequence[InputPartition]:
        for servers in filter(None, (start.get(_CLUSTER), end.get(_CLUSTER))):
            if set(servers).isdisjoint(self._cluster):
                self._batch.report_loss(
                    f"the checkpoint's offsets are of a cluster with {', '.join(servers)}, and "
                    f"this one has {', '.join(self._cluster)}. There they name other messages"
                )
        begins, ends = end.get(_BEGINS) or self._offsets(start), self._offsets(end)
        if begins == self._first and not self._ends:
            # The first epoch runs again. Before Spark 4.2 its new start may be after its end.
            begins = {name: min(begins.get(name, end), end) for name, end in ends.items()}
        self._ends = {**begins, **ends, **self._ends}
        if missing := begins.keys() - ends.keys():
            raise ConfigurationError(
                f"the broker of {', '.join(sorted(missing))} was away when the query started again,"
                " and Spark before 4.2 does not tell a source its offsets, so the epoch would lose "
                "them: when the broker is back, delete the newest file in the folder offsets of "
                "the checkpoint and start the query, or use Spark 4.2"
            )
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
        self._note(self._offsets(end))

    def stop(self) -> None:
        if self._admin is not None:
            self._admin.close()
            self._admin = None

    @cached_property
    def _cluster(self) -> list[str]:
        """Addresses by which the cluster is known again: it has one of them at least."""
        servers = self.options.name_servers
        addresses = {*servers, *resolved(servers)}
        with contextlib.suppress(RocketSinkError):
            for broker in self._connect().topic_route(self.options.topic).brokers:
                addresses.update(broker.addresses.values())
        return sorted(addresses)

    def _connect(self) -> Admin:
        if self._admin is None:
            self._admin = Admin(self.options)
        return self._admin

    def _offsets(self, checkpoint: Mapping[str, Any]) -> Offsets:
        if checkpoint and self._topic not in checkpoint:
            raise ConfigurationError(
                f"the checkpoint is of the topic {next(iter(checkpoint))}, and this query reads "
                f"{self._topic}: take another checkpointLocation"
            )
        return dict(checkpoint.get(self._topic, {}))

    def _after(self, queue: MessageQueue, offset: int) -> int:
        """Return the offset after a message that is older than `startTimestamp`: for a time after
        the newest message, brokers before 5.2 return that message's offset."""
        messages, _ = self._connect().pull(queue, offset, max_messages=1)
        return offset + any(each.store_ms < self.asked.start_timestamp for each in messages)

    def _note(self, offsets: Offsets) -> None:
        """Note the offsets of finished epochs under `consumerGroup`. A failure is only logged,
        because the query itself does not need the note."""
        away = set[str]()
        for name, offset in offsets.items() if self.asked.consumer_group else ():
            queue = self._queue(name)
            if self._noted.get(name) == offset or queue.broker_name in away:
                continue
            try:
                self._connect().set_consumer_offset(queue, self.asked.consumer_group, offset)
                self._noted[name] = offset
            except RocketSinkError as error:
                away.add(queue.broker_name)
                _LOG.warning(
                    "the broker of %s did not note the offset %d of the consumer group %s: %s",
                    name, offset, self.asked.consumer_group, error,
                )  # fmt: skip

    def _queue(self, name: str) -> MessageQueue:
        broker, _, number = name.rpartition(":")
        topic = with_namespace(self.options.namespace, self.options.topic)
        return MessageQueue(topic, broker, int(number))

    def _look(self, begins: Offsets, *, is_whole: bool = True) -> Offsets:
        """Return the ends of all queues. Queues of a broker that is away keep their offsets, so
        raise its error if `begins` lacks them and is not `is_whole`."""
        ends, failures = dict(begins), dict[str, SendError | str]()
        try:
            self._queues = self._connect().queues(self.options.topic)
        except SendError as error:
            # Without a route, either the topic is deleted, and brokers say so by its ends, or all
            # its brokers are away.
            if not self._queues or not is_away(error):
                raise
            _LOG.warning("the queues of the last epoch are read: %s", error)
        queues = self._queues
        brokers = {queue.broker_name for queue in queues}
        for queue in queues:
            if queue.broker_name in failures:
                continue
            try:
                ends[queue_name(queue)] = self._connect().max_offset(queue)
            except SendError as error:
                is_kept = is_whole or queue_name(queue) in begins
                if not is_away(error) or not is_kept:
                    raise
                failures[queue.broker_name] = error
                if failures.keys() == brokers and not self._ends:
                    raise
        names = {queue_name(queue) for queue in queues}
        for name in begins.keys() - names:
            if (broker := self._queue(name).broker_name) in brokers:
                self._batch.report_loss(f"the topic {self.options.topic} has no queue {name} now")
            else:
                failures[broker] = f"no name server has a route to {self._topic} there"
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
        is_late = time.monotonic() - self._epoch_s >= self.asked.max_trigger_delay_ms / 1000
        return is_late or waiting >= self.asked.min_offsets_per_trigger

    def _range(self, name: str, begin: int, end: int) -> QueueRange:
        whole, lowest = QueueRange(self._queue(name), begin, end), 0
        with contextlib.suppress(SendError):  # The task waits for its broker, and checks again.
            lowest = self._connect().min_offset(whole.queue)
        if begin > end:
            self._batch.report_loss(
                f"{whole.queue} ends at offset {end}; the checkpoint has {begin}, so the topic was "
                "made anew, or its broker has lost messages"
            )
            return QueueRange(whole.queue, lowest, end)
        self._batch.check_begin(whole, lowest)
        return QueueRange(whole.queue, max(begin, min(lowest, end)), end)


def _shares(waiting: Mapping[str, int], most: int) -> Offsets:
    """Return how many messages of each queue an epoch of about `most` messages (0: no limit) takes:
    by what waits there, and at least one of each queue that has any, as Spark's Kafka source does.
    """
    total = sum(waiting.values())
    if not most or total <= most:
        return dict(waiting)
    return {name: max(count * most // total, min(count, 1)) for name, count in waiting.items()}
