"""The body of SEND_BATCH_MESSAGE: each message in its inner form (MessageDecoder.encodeMessage).

int  size of all          4
int  magic code, 0        4
int  body CRC, 0          4
int  flag                 4
int  body length          4, body
short properties length   2, properties (UTF-8)"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from rocket_sink.errors import MessageError, RemoteProtocolError
from rocket_sink.message import Message
from rocket_sink.message_rules import PROPERTIES_MAX_BYTES, RETRY_PREFIX
from rocket_sink.wire.headers import stored_text
from rocket_sink.wire.properties import decode_properties

INNER_OVERHEAD_BYTES: Final = 22
"""Bytes of a message in a batch, without its body and properties."""

_HEAD: Final = struct.Struct(">iiiii")
_SHORT: Final = struct.Struct(">h")


@dataclass(frozen=True)
class InnerMessage:
    """A message that was read from a batch body."""

    flag: int
    body: bytes
    properties: dict[str, str]
    replaced: bool
    """Whether bytes of the properties are not UTF-8, and U+FFFD replaces them."""


def encode_inner(body: bytes, properties: str, flag: int = 0) -> bytes:
    """Encode a message as a part of a batch. Raise MessageError for too large properties."""
    encoded = properties.encode()
    if len(encoded) > PROPERTIES_MAX_BYTES:
        raise MessageError(
            f"the properties take {len(encoded)} bytes; the limit is {PROPERTIES_MAX_BYTES}",
            code="PROPERTIES_TOO_LARGE",
            size=len(encoded),
            limit=PROPERTIES_MAX_BYTES,
        )
    size = INNER_OVERHEAD_BYTES + len(body) + len(encoded)
    head = _HEAD.pack(size, 0, 0, flag, len(body))
    return b"".join((head, body, _SHORT.pack(len(encoded)), encoded))


def check_batch(messages: Sequence[Message]) -> None:
    """Raise MessageError (INVALID_BATCH) if the messages cannot be in one batch. Java requires one
    topic, one wait-store flag, no delay level and no retry topic (MessageBatch.generateFromList).
    Delivery times, priorities and lite topics are refused, too: brokers read these from the
    properties of the batch, and ignore those of the messages in it."""
    if not messages:
        raise MessageError("a batch has no messages", code="INVALID_BATCH")
    topic, wait_store = messages[0].topic, messages[0].wait_store
    for position, message in enumerate(messages):
        if message.is_single:
            reason = "has a delay, a priority or a lite topic, which a batch cannot carry"
        elif message.topic != topic:
            reason = f"has the topic {message.topic!r}, the first one {topic!r}"
        elif message.wait_store != wait_store:
            reason = "has another wait_store than the first one"
        elif position == 0 and topic.startswith(RETRY_PREFIX):
            reason = "is for a retry topic, which takes no batches"
        else:
            continue
        raise MessageError(
            f"message {position} of the batch {reason}; send it apart",
            code="INVALID_BATCH",
            topic=message.topic,
            keys=message.keys,
        )


def iter_batch(data: bytes | memoryview) -> Iterator[InnerMessage]:
    """Yield the messages of a batch body one by one, because 8 MiB can hold 380,000. Raise
    RemoteProtocolError if lengths contradict each other."""
    view = memoryview(data)
    while remaining := len(view):
        if remaining < INNER_OVERHEAD_BYTES:
            raise RemoteProtocolError(f"a batch ends inside a message: {remaining} bytes are left")
        size, _, _, flag, body_length = _HEAD.unpack_from(view)
        if not INNER_OVERHEAD_BYTES <= size <= remaining:
            raise RemoteProtocolError(f"a message of {size} bytes in a batch with {remaining} left")
        if not 0 <= body_length <= size - INNER_OVERHEAD_BYTES:
            raise RemoteProtocolError(f"a body of {body_length} bytes in a message of {size}")
        body_end = _HEAD.size + body_length
        (length,) = _SHORT.unpack_from(view, body_end)
        properties_at = body_end + _SHORT.size
        if properties_at + length != size:
            raise RemoteProtocolError(f"properties of {length} bytes in a message of {size}")
        properties, replaced = stored_text(view[properties_at:size])
        body = bytes(view[_HEAD.size : body_end])
        yield InnerMessage(flag, body, decode_properties(properties), replaced)
        view = view[size:]
