"""Conversion of messages to requests: limits, compression, ids, properties, namespace, batches."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from rocket_sink.errors import MessageError
from rocket_sink.message import Message, MessageQueue
from rocket_sink.message_rules import BATCH_MAX_MESSAGES, check_topic, with_namespace
from rocket_sink.net.telemetry import trace_context
from rocket_sink.options import SinkOptions
from rocket_sink.producer.engine.attempt import SendRequest
from rocket_sink.wire.batch import INNER_OVERHEAD_BYTES, check_batch, encode_inner
from rocket_sink.wire.compress import CompressionType, compress_body
from rocket_sink.wire.ids import MessageIds
from rocket_sink.wire.properties import ENCODED_LIMIT, least_version, properties_of

_ANY_ID: Final = "0" * 56
"""A placeholder as long as the longest message id of a client (with an IPv6 address)."""
_PROPERTY_BYTES: Final = len(_ANY_ID) + 30
"""Bytes of a message's properties, not counting the values of tags, keys and user properties."""


@dataclass(frozen=True)
class Part:
    """A request of `Producer.send_batch`, with its messages and their client ids."""

    request: SendRequest
    messages: tuple[Message, ...]
    ids: tuple[str, ...]


def with_trace_context(message: Message) -> Message:
    """Add the trace context of the current span, unless the message has a `traceparent` of its own.
    Other properties of the message win."""
    context = trace_context()
    if not context or "traceparent" in message.properties:
        return message
    return replace(message, properties={**context, **message.properties})


def with_message_id(message: Message, message_id: str) -> Message:
    return message if message.message_id == message_id else replace(message, message_id=message_id)


class RequestBuilder:
    """Makes requests from messages, and checks their sizes. Thread-safe, and for signal handlers
    too. The driving thread has a builder of its own, because it must not wait for a caller."""

    def __init__(
        self,
        options: SinkOptions,
        ids: MessageIds,
        batch_limit: Callable[[str], int | None] = lambda topic: None,
    ) -> None:
        """`batch_limit` returns the most bytes of a batch that the topic's brokers take, if it is
        known (`SendEngine.batch_limit`)."""
        self._ids = ids
        self._batch_limit = batch_limit
        self._lock = threading.RLock()
        self._namespace = options.namespace
        self._limit = options.max_message_size_bytes
        self._compress_over = options.compress_over_bytes
        self._level = options.compress_level
        self._kind = CompressionType.of_option(options.compress_type)
        self._extra = {"INSTANCE_ID": options.namespace} if options.namespace else None

    def topic(self, name: str) -> str:
        """Return the topic's name with its namespace; raises MessageError if it is too long."""
        if not self._namespace:
            return name
        topic = with_namespace(self._namespace, name)
        check_topic(topic)
        return topic

    def queue(self, queue: MessageQueue) -> MessageQueue:
        """Return the queue with the namespace in its topic (Java: queueWithNamespace)."""
        if not self._namespace:
            return queue
        return MessageQueue(self.topic(queue.topic), queue.broker_name, queue.queue_id)

    def single(self, message: Message, extra: Mapping[str, str] | None = None) -> SendRequest:
        """Return a request of one message; raises MessageError if it is too large."""
        body, sys_flag = message.body, 0
        if len(body) > self._limit:
            raise self._too_large(message)
        if len(body) >= self._compress_over:
            body, sys_flag = compress_body(body, self._kind, self._level, self._compress_over)
        message_id = message.message_id or self._new_id()
        if self._extra is not None:
            extra = {**self._extra, **(extra or {})}
        return SendRequest(
            self.topic(message.topic),
            body,
            properties=(properties := properties_of(message, message_id=message_id, extra=extra)),
            timed=message.is_single,
            sys_flag=sys_flag,
            flag=message.flag,
            message_id=message_id,
            least_version=least_version(properties) if message.is_single else 0,
        )

    def batches(self, messages: Sequence[Message], limit: int | None = None) -> Iterator[Part]:
        """Yield requests in order, each with at most BATCH_MAX_MESSAGES messages and an encoded
        body of at most `limit` bytes (`maxMessageSize`), and of a size that no broker of the topic
        has refused. A message that shares no batch is sent as a single one, whose encoding is
        smaller. Raises MessageError: INVALID_BATCH (Java: MessageBatch.generateFromList), or as
        `single`."""
        check_batch(messages)
        ids = self.ids(messages)
        for start, encoded in self.encoded_batches(messages, ids, limit or self._limit):
            end = start + len(encoded)
            own, own_ids = messages[start:end], tuple(ids[start:end])
            yield Part(self.request(own, encoded, own_ids), tuple(own), own_ids)

    def ids(self, messages: Sequence[Message]) -> list[str]:
        """Return the client ids of messages; a message without an id gets a new one."""
        with self._lock:
            new_ids = self._ids.several(len(messages), time.time_ns() // 1_000_000)
        return [
            message.message_id or new_id for message, new_id in zip(messages, new_ids, strict=True)
        ]

    def encoded_batches(
        self, messages: Sequence[Message], ids: Sequence[str], limit: int
    ) -> Iterator[tuple[int, list[bytes]]]:
        """Yield (index of first message, encoded messages) per batch of at most BATCH_MAX_MESSAGES
        messages and `limit` bytes, or fewer bytes if a broker of the topic has refused larger
        batches; a single message may be larger. Raise as `single`."""
        start, size, batch, extra = 0, 0, list[bytes](), self._extra
        limit = min(limit, self._batch_limit(self.topic(messages[0].topic)) or limit)
        for number, (message, message_id) in enumerate(zip(messages, ids, strict=True)):
            body = message.body
            if len(body) > self._limit:
                raise self._too_large(message)
            properties = properties_of(message, message_id=message_id, extra=extra)
            encoded_message = encode_inner(body, properties, message.flag)
            if batch and (size + len(encoded_message) > limit or len(batch) == BATCH_MAX_MESSAGES):
                yield start, batch
                start, size, batch = number, 0, []
            batch.append(encoded_message)
            size += len(encoded_message)
        yield start, batch

    def batch_bytes(self, message: Message) -> int:
        """Return the approximate number of bytes that the message takes inside a batch. Raises
        MessageError if body or properties are too large."""
        size = len(message.body)
        if size > self._limit:
            raise self._too_large(message)
        tags, keys = message.tags, message.keys
        texts = _PROPERTY_BYTES if tags is None else _PROPERTY_BYTES + len(tags)
        if keys:
            texts += len(keys[0]) if len(keys) == 1 else sum(map(len, keys))
        if message.message_id is not None:
            texts += len(message.message_id)
        if message.properties or self._extra is not None or texts * 4 > ENCODED_LIMIT:
            texts = len(properties_of(message, message_id=_ANY_ID, extra=self._extra).encode())
        return size + texts + INNER_OVERHEAD_BYTES

    def split(self, part: Part) -> list[Part]:
        """Return the parts of a refused batch, each with at most half of its bytes, or a single
        message. The messages keep their ids."""
        messages = [with_message_id(*pair) for pair in zip(part.messages, part.ids, strict=True)]
        parts = list(self.batches(messages, len(part.request.body) // 2))
        for each in parts:
            each.request.queue = part.request.queue
            each.request.timeout_s = part.request.timeout_s
        return parts

    def _new_id(self) -> str:
        with self._lock:
            return self._ids.next(time.time_ns() // 1_000_000)

    def request(
        self, messages: Sequence[Message], encoded: Sequence[bytes], ids: Sequence[str]
    ) -> SendRequest:
        """Return a request of one message, or of a batch from `encoded_batches`; raise like
        `single`."""
        first = messages[0]
        if len(messages) == 1:
            return self.single(with_message_id(first, ids[0]))
        return SendRequest(
            self.topic(first.topic),
            b"".join(encoded),
            message_count=len(messages),
            batch=True,
            properties=f"WAIT\x01{'true' if first.wait_store else 'false'}\x02",
            message_id=",".join(ids),
            # If the first key is white space, a broker may see no key (StringUtils.isBlank).
            lacks_keys=any(not message.keys or message.keys[0].isspace() for message in messages),
        )

    def _too_large(self, message: Message) -> MessageError:
        return MessageError(
            f"a body of {len(message.body)} bytes (topic {message.topic!r}, keys "
            f"{message.keys!r}); the limit maxMessageSize is {self._limit}",
            code="BODY_TOO_LARGE",
            topic=message.topic,
            keys=message.keys,
            size=len(message.body),
            limit=self._limit,
        )
