"""Automatic batching of asynchronous sends (`autoBatch`; Java's ProduceAccumulator).

Messages with the same topic and `wait_store` form a batch. A batch is sent when it has the size of
`autoBatch`, when its first message has the age of `autoBatch`, or when the producer closes. Bodies
in batches are not compressed. A message is sent alone if it has a queue, selector, time-out,
sharding key, delay, priority or lite topic, a retry topic, or a body of the size of a batch (or of
`maxMessageSize`) or more."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from rocket_sink.errors import MessageIllegalError, ProducerClosedError
from rocket_sink.message import Message, SendResult
from rocket_sink.message_rules import RETRY_PREFIX
from rocket_sink.options import SinkOptions
from rocket_sink.producer.driver import Driver
from rocket_sink.producer.engine.attempt import Completion, SendRequest
from rocket_sink.producer.engine_thread import State
from rocket_sink.producer.future import SendFuture, end_all
from rocket_sink.producer.request_builder import RequestBuilder, with_message_id
from rocket_sink.wire.properties import properties_of

_WAITING: Final = 16
"""Callers wait while so many full batches wait for the driving thread."""
Entry: TypeAlias = "tuple[Message, SendFuture]"


@dataclass(slots=True)
class _OpenBatch:
    due_s: float
    entries: list[Entry] = field(default_factory=list)
    size: int = 0


class BatchAccumulator:
    """Collects messages in batches; the timer task that sends due batches. Callers of `add` only
    append, and the thread that drives the engine does the work. So no caller who is interrupted
    holds a lock, or messages of others."""

    def __init__(self, options: SinkOptions, builder: RequestBuilder, driver: Driver) -> None:
        """`builder` is for the driving thread alone."""
        self._builder, self._driver = builder, driver
        delay_ms, batch_bytes = options.auto_batch or (0, 0)
        self._max_bytes = min(batch_bytes, options.max_message_size_bytes)
        self._requests = driver.thread.queue.requests
        self._limit = _WAITING * self._max_bytes
        self._delay_s = delay_ms / 1000
        self._new: deque[tuple[Entry, int]] = deque()
        self._new_bytes = 0
        """About the bytes in `_new`: threads add without a lock, and `run` resets."""
        self._open: dict[tuple[str, bool], _OpenBatch] = {}
        self._is_scheduled = False
        """Whether the driving thread knows the first due time of `_open`."""

    def takes(self, message: Message) -> bool:
        return (
            message.sharding_key is None
            and not message.is_single
            and not message.topic.startswith(RETRY_PREFIX)
            and len(message.body) < self._max_bytes
        )

    def add(self, message: Message, size: int, future: SendFuture) -> None:
        """Append the message to its batch; `future` gets the message's result or error. `size` is
        that of `RequestBuilder.batch_bytes`. Wait while too much waits for the window. Raises
        WindowFullError or ProducerClosedError."""
        driver, entry = self._driver, ((message, future), size)
        driver.check_open()
        if self._new_bytes >= self._limit or (self._requests and not driver.has_room()):
            properties = properties_of(message, message_id="")
            driver.await_room(SendRequest(message.topic, message.body, properties=properties))
        self._new.append(entry)
        self._new_bytes += size
        if not self._is_scheduled or self._new_bytes >= self._max_bytes:
            self._is_scheduled = True
            driver.thread.wake()
        if driver.thread.state is State.CLOSED and entry in self._new:
            raise ProducerClosedError("the producer is closed")

    # --- the timer task ---------------------------------------------------------------------------

    def run(self, now_s: float) -> float:
        """Put new messages into batches, and send full batches and due ones."""
        self._is_scheduled, self._new_bytes = False, 0
        due_s = self._driver.engine.clock() + self._delay_s
        for _ in range(len(self._new)):
            entry, size = self._new.popleft()
            key = entry[0].topic, entry[0].wait_store
            batch = self._open.get(key)
            if batch is not None and batch.size + size > self._max_bytes:
                self.send(self._open.pop(key).entries, self._max_bytes)
                batch = None
            if batch is None:
                batch = self._open[key] = _OpenBatch(due_s)
            batch.entries.append(entry)
            batch.size += size
            if batch.size >= self._max_bytes:
                self.send(self._open.pop(key).entries, self._max_bytes)
        for key in [key for key, batch in self._open.items() if batch.due_s <= now_s]:
            self.send(self._open.pop(key).entries, self._max_bytes)
        if self._open:
            self._is_scheduled = True
        return min((batch.due_s for batch in self._open.values()), default=math.inf)

    # --- sending a batch ---------------------------------------------------------------------

    def send(self, entries: list[Entry], limit: int) -> None:
        """Send messages in as few requests as possible, in batches of at most `limit` bytes."""
        builder, messages = self._builder, [message for message, _ in entries]
        submitted = 0
        try:
            ids = builder.ids(messages)
            for start, encoded in builder.encoded_batches(messages, ids, limit):
                end = start + len(encoded)
                own, own_ids = entries[start:end], ids[start:end]
                request = builder.request(messages[start:end], encoded, own_ids)
                token = SentBatch(self, own, own_ids, len(request.body))
                self._driver.submit_again(request, token)
                submitted = end
        except Exception as error:
            # The callers of `add` have returned, so only the futures can report the error.
            for _, future in entries[submitted:]:
                future.resolve(None, error)


@dataclass(slots=True, eq=False)
class SentBatch:
    """The token of a batch's request; completes the futures of the batch's messages."""

    _accumulator: BatchAccumulator
    _entries: list[Entry]
    _ids: list[str]
    _body_bytes: int

    def on_done(self, completion: Completion) -> None:
        entries, result = self._entries, completion.result
        if result is not None:
            results = results_of(result, self._ids)
            end_all((future, own, None) for (_, future), own in zip(entries, results, strict=True))
        elif isinstance(completion.error, MessageIllegalError) and len(entries) > 1:
            # Halve the batch until only the illegal message fails.
            named_entries = [
                (with_message_id(message, message_id), future)
                for (message, future), message_id in zip(entries, self._ids, strict=True)
            ]
            self._accumulator.send(named_entries, self._body_bytes // 2)
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
