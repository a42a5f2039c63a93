"""Automatic batching of asynchronous sends (`autoBatch`; Java's ProduceAccumulator).

Messages with the same topic and `wait_store` form a batch. A batch is sent when it has
`batchMaxBytes`, when its first message is `batchMaxDelayMs` old, or when the producer closes.
Bodies in batches are not compressed. A message is sent alone if it has a queue, selector, time-out,
sharding key, delay, priority or lite topic, a retry topic, or a body of `batchMaxBytes` (or of
`maxMessageSize`) or more."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from rocket_sink.errors import MessageIllegalError, NotSentError, ProducerClosedError
from rocket_sink.message import Message, SendResult
from rocket_sink.message_rules import RETRY_PREFIX
from rocket_sink.options import SinkOptions
from rocket_sink.producer.driver import Driver
from rocket_sink.producer.engine.attempt import Completion
from rocket_sink.producer.future import SendFuture, end_all
from rocket_sink.producer.request_builder import RequestBuilder, named

Entry: TypeAlias = "tuple[Message, SendFuture]"


@dataclass(slots=True)
class _OpenBatch:
    due_s: float
    entries: list[Entry] = field(default_factory=list)
    size: int = 0


class BatchAccumulator:
    """Collects messages in batches; the timer task that sends due batches. Thread-safe."""

    def __init__(self, options: SinkOptions, builder: RequestBuilder, driver: Driver) -> None:
        self._builder, self._driver = builder, driver
        self._clock = driver.engine.clock
        self._max_bytes = min(options.batch_max_bytes, options.max_message_size_bytes)
        self._delay_s = options.batch_max_delay_ms / 1000
        self._lock = threading.Lock()
        self._open: dict[tuple[str, bool], _OpenBatch] = {}
        self.due_s = math.inf

    def takes(self, message: Message) -> bool:
        return (
            message.sharding_key is None
            and not message.is_single
            and not message.topic.startswith(RETRY_PREFIX)
            and len(message.body) < self._max_bytes
        )

    def add(self, message: Message, size: int, future: SendFuture) -> None:
        """Append the message to its batch; `future` gets the message's result or error. `size` is
        that of `RequestBuilder.batch_bytes`. Raises ProducerClosedError."""
        key = (message.topic, message.wait_store)
        full: list[_OpenBatch] = []
        is_first = due_earlier = False
        with self._lock:
            if self._driver.closing:
                raise ProducerClosedError("the producer is closed")
            batch = self._open.get(key)
            if batch is not None and batch.size + size > self._max_bytes:
                full.append(self._open.pop(key))
                batch = None
            if batch is None:
                batch = self._open[key] = _OpenBatch(self._clock() + self._delay_s)
                is_first = True
            batch.entries.append((message, future))
            batch.size += size
            if batch.size >= self._max_bytes:
                full.append(self._open.pop(key))
            if full or is_first:
                before_s, self.due_s = self.due_s, self._next_due_s()
                due_earlier = self.due_s < before_s
        for full_batch in full:
            self._send(full_batch)
        if due_earlier:
            self._driver.reschedule()

    def _next_due_s(self) -> float:
        return min((batch.due_s for batch in self._open.values()), default=math.inf)

    # --- the timer task ---------------------------------------------------------------------------

    def run(self, now_s: float) -> None:
        with self._lock:
            due = [key for key, batch in self._open.items() if batch.due_s <= now_s]
            batches = [self._open.pop(key) for key in due]
            self.due_s = self._next_due_s()
        for batch in batches:
            self._send(batch)

    # --- sending a batch ---------------------------------------------------------------------

    def _send(self, batch: _OpenBatch) -> None:
        """Send a batch in as few requests as possible."""
        builder, messages = self._builder, [message for message, _ in batch.entries]
        end = 0
        try:
            ids = builder.ids(messages)
            for start, encoded in builder.encoded(messages, ids, self._max_bytes):
                end = start + len(encoded)
                self._submit(batch.entries[start:end], ids[start:end], encoded)
        except Exception as error:
            # The callers of `add` have returned, so only the futures can report the error.
            for _, future in batch.entries[end:]:
                future.ended(None, error)

    def _submit(self, entries: list[Entry], ids: list[str], encoded: list[bytes]) -> None:
        request = self._builder.batch_of([message for message, _ in entries], encoded, ids)
        # The producer sends what it accepted before it closed.
        driver = self._driver
        submit = driver.submit_again if driver.closing else driver.submit_nowait
        try:
            submit(request, SentBatch(self, entries, ids))
        except NotSentError as error:
            for _, future in entries:
                future.ended(None, error)

    def send_singly(self, entries: Iterator[tuple[Entry, str]]) -> None:
        """Send the messages of a refused batch one by one. Then only the illegal message fails."""
        for (message, future), message_id in entries:
            try:
                self._driver.submit_again(self._builder.single(named(message, message_id)), future)
            except NotSentError as error:
                future.ended(None, error)


class SentBatch:
    """The token of a batch's request; completes the futures of the batch's messages."""

    __slots__ = ("_accumulator", "_entries", "_ids", "_singles")

    def __init__(self, accumulator: BatchAccumulator, entries: list[Entry], ids: list[str]) -> None:
        self._accumulator, self._entries, self._ids = accumulator, entries, ids
        self._singles = zip(entries, ids, strict=True)
        """For `send_singly`: after Ctrl-C the driver's second call continues where it stopped."""

    @property
    def in_engine(self) -> bool | None:
        """See `driver.Token`."""
        return self._entries[0][1].in_engine

    @in_engine.setter
    def in_engine(self, value: bool | None) -> None:
        for _, future in self._entries:
            future.in_engine = value

    def done(self) -> bool:
        return all(future.done() for _, future in self._entries)

    def on_done(self, completion: Completion) -> None:
        entries, result = self._entries, completion.result
        if result is not None:
            results = results_of(result, self._ids)
            end_all((future, own, None) for (_, future), own in zip(entries, results, strict=True))
        elif isinstance(completion.error, MessageIllegalError) and len(entries) > 1:
            self._accumulator.send_singly(self._singles)
        else:
            error = completion.error
            assert error is not None
            end_all((future, None, error.copy()) for _, future in entries)


def results_of(result: SendResult, message_ids: list[str]) -> list[SendResult]:
    """Return one result per message of a batch; the queue offsets are consecutive."""
    offset_ids = result.offset_message_id.split(",")
    if len(offset_ids) != len(message_ids):
        offset_ids = [result.offset_message_id] * len(message_ids)
    first = result.queue_offset
    return [
        # `_replace` would take three times as long.
        SendResult(
            result.outcome, result.status, message_id, offset_id, result.queue, first + number,
            result.broker_address, result.attempts, result.latency_ms, result.maybe_duplicate,
            result.transaction_id, result.region_id, result.recall_handle, result.trace_on
        )
        for number, (message_id, offset_id) in enumerate(zip(message_ids, offset_ids, strict=True))
    ]  # fmt: skip
