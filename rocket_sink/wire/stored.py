"""Stored messages, in the form in which brokers send them (MessageDecoder.decode).

    int total size, int magic, int body CRC, int queue id, int flag, long queue offset,
    long commit-log offset, int sys flag, long born time, born host (4 or 16 bytes, int port),
    long store time, store host, int reconsume times, long prepared transaction offset,
    int body length, body, byte topic length (short with the second magic), topic,
    short properties length, properties

A malformed message raises RemoteProtocolError; Java's decoder stops there without an error.
A broker that is killed during a write leaves zeros after the written bytes. At restart it checks
only the body's CRC (CommitLog.checkMessageAndReturnSize), so it keeps a message that is complete
except for its properties: such a message is `torn`."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from ipaddress import ip_address
from typing import Final, TypeAlias

from rocket_sink.errors import RemoteProtocolError
from rocket_sink.text import clean
from rocket_sink.wire.batch import iter_batch
from rocket_sink.wire.codes import SysFlag
from rocket_sink.wire.compress import CompressionType, inflate
from rocket_sink.wire.headers import INT64_MAX, Body, Limits, stored_text
from rocket_sink.wire.ids import offset_message_id
from rocket_sink.wire.properties import (
    PROPERTY_SEPARATOR,
    UNIQ_KEY,
    decode_properties,
    encode_properties,
)

MAGIC_V1: Final = -626_843_481
MAGIC_V2: Final = -626_843_477
"""The magic code of a message whose topic is longer than 127 bytes."""

_HEAD: Final = struct.Struct(">iiiiiqqiq")
_IS_BATCH: Final = SysFlag.INNER_BATCH | SysFlag.NEED_UNWRAP


@dataclass(frozen=True)
class StoredMessage:
    """A stored message; `body` is inflated, `properties` are decoded. Hosts are `(numeric address,
    port)`. `sys_flag` has the compression bits of the stored body. `torn`: the broker was killed
    while it wrote the properties, and some are missing. `replaced`: bytes of the topic or of the
    properties are not UTF-8, and U+FFFD replaces them."""

    topic: str
    body: bytes
    queue_id: int = 0
    queue_offset: int = 0
    commit_log_offset: int = 0
    flag: int = 0
    sys_flag: int = 0
    born_ms: int = 0
    born_host: tuple[str, int] = ("127.0.0.1", 0)
    store_ms: int = 0
    store_host: tuple[str, int] = ("127.0.0.1", 0)
    reconsume_times: int = 0
    prepared_transaction_offset: int = 0
    body_crc: int = 0
    properties: dict[str, str] = field(default_factory=dict)
    torn: bool = False
    replaced: bool = False

    @property
    def message_id(self) -> str | None:
        """The client message id (UNIQ_KEY)."""
        return self.properties.get(UNIQ_KEY)

    @property
    def offset_message_id(self) -> str:
        """The broker's id, from its address and the commit-log offset."""
        return offset_message_id(*self.store_host, self.commit_log_offset)


@dataclass(slots=True)
class Allowance:
    """A memory limit (bytes) for the decoded messages of one or several answers. An answer of
    500 kB can hold gigabytes of compressed bodies."""

    remaining_bytes: int = Limits.ANSWER_BYTES

    def take(self, size: int) -> None:
        """Use up some bytes; raise RemoteProtocolError if the limit is exceeded."""
        self.remaining_bytes -= size
        if self.remaining_bytes < 0:
            raise RemoteProtocolError(
                "the messages of an answer take too much memory when they are decoded: ask for "
                "fewer at a time, or pull them by their offsets"
            )


IsCopy: TypeAlias = Callable[[StoredMessage], bool]
"""A function that tells whether a stored message with the right id is the one that is sought."""
Wanted: TypeAlias = Callable[[Mapping[str, str]], bool]
"""A function that selects messages by their properties."""


def decode_stored(
    buffer: Body | None,
    *,
    allowance: Allowance | None = None,
    wanted: Wanted | None = None,
    bodies: bool = True,
) -> list[StoredMessage]:
    """Return the messages in the body of a query or view answer; inner batches are unwrapped.

    Args:
        allowance: a memory limit that several answers share; None: `Limits.ANSWER_BYTES`.
        wanted: selects messages; the bodies of other messages are not inflated.
        bodies: if False, bodies are empty, and not inflated.

    Raises:
        RemoteProtocolError: the messages or bodies are malformed, or need too much memory.
        ConfigurationError: the library of a body's compression is not installed.
    """
    allowance = Allowance() if allowance is None else allowance
    messages = []
    for message in iter_stored(buffer or b"", wanted, bodies, allowance):
        allowance.take(memory_bytes(message))
        messages.append(message)
    return messages


def memory_bytes(message: StoredMessage) -> int:
    """Return an upper estimate of the memory that the message takes."""
    properties = message.properties
    texts = len("".join(properties)) + len("".join(properties.values()))
    return _VALUE_BYTES + len(message.body) + _PROPERTY_BYTES * len(properties) + 4 * texts


_VALUE_BYTES: Final = 1024
_PROPERTY_BYTES: Final = 200
"""Memory of a property (two texts, a mapping entry) without its characters (up to 4 bytes each)."""


def iter_stored(
    buffer: Body,
    wanted: Wanted | None = None,
    bodies: bool = True,
    allowance: Allowance | None = None,
) -> Iterator[StoredMessage]:
    """Yield the messages one by one. All messages of an inner batch count against the allowance."""
    view = memoryview(buffer)
    while len(view):
        size = int.from_bytes(view[:4], "big", signed=True)
        if not _HEAD.size <= size <= len(view):
            raise RemoteProtocolError(f"a stored message of {size} bytes, {len(view)} are left")
        message = _decode_one(view[:size], bodies)
        view = view[size:]
        if message.sys_flag & _IS_BATCH == _IS_BATCH:
            for inner in _unwrap(_inflated(message), allowance):
                if wanted is None or wanted(inner.properties):
                    yield inner if bodies else replace(inner, body=b"")
        elif wanted is None or wanted(message.properties):
            yield _inflated(message)


def first_offset(buffer: bytes) -> int:
    """Return the queue offset of the first message in the answer to a pull; 0 if it is cut."""
    return int(_HEAD.unpack_from(buffer)[5]) if len(buffer) >= _HEAD.size else 0


@lru_cache
def _tail(born_v6: bool, store_v6: bool) -> struct.Struct:
    """Return the layout of the fields from the born host to the body length."""
    return struct.Struct(f">{16 if born_v6 else 4}siq{16 if store_v6 else 4}siiqi")


@lru_cache
def _host(packed: bytes) -> str:
    return str(ip_address(packed))


def _sized(view: memoryview, begin: int, length: int) -> tuple[bytes, int]:
    """Return the field of `length` bytes from `begin` on, and its end."""
    end = begin + length
    if end > len(view):
        raise RemoteProtocolError(f"a field of {length} bytes passes a stored message's end")
    return bytes(view[begin:end]), end


def _decode_one(view: memoryview, bodies: bool) -> StoredMessage:
    """Return a message with its stored body; without `bodies` only an inner batch has a body."""
    _, magic, crc, queue_id, flag, queue_offset, offset, sys_flag, born_ms = _HEAD.unpack_from(view)
    if magic not in (MAGIC_V1, MAGIC_V2):
        raise RemoteProtocolError(f"{magic} is not the magic code of a stored message")
    tail = _tail(bool(sys_flag & SysFlag.BORNHOST_V6), bool(sys_flag & SysFlag.STOREHOST_V6))
    if _HEAD.size + tail.size > len(view):
        raise RemoteProtocolError("a stored message ends too early")
    born_ip, born_port, store_ms, store_ip, store_port, reconsume_times, prepared_offset, size = (
        tail.unpack_from(view, _HEAD.size)
    )
    body, end = _sized(view, _HEAD.size + tail.size, max(size, 0))
    length, end = _sized(view, end, 1 if magic == MAGIC_V1 else 2)
    topic, end = _sized(view, end, int.from_bytes(length, "big"))
    length, end = _sized(view, end, 2)
    properties, _ = _sized(view, end, int.from_bytes(length, "big"))
    torn = properties.endswith(b"\0")
    if torn:
        # Cut the zeros before decoding, because they may begin inside a character.
        properties = properties[: properties.rfind(PROPERTY_SEPARATOR.encode()) + 1]
    topic_text, replaced = stored_text(topic)
    properties_text, more = stored_text(properties)
    return StoredMessage(
        topic=topic_text,
        body=body if bodies or sys_flag & _IS_BATCH == _IS_BATCH else b"",
        queue_id=queue_id,
        queue_offset=queue_offset,
        commit_log_offset=offset,
        flag=flag,
        sys_flag=sys_flag,
        born_ms=born_ms,
        born_host=(_host(born_ip), born_port),
        store_ms=store_ms,
        store_host=(_host(store_ip), store_port),
        reconsume_times=reconsume_times,
        prepared_transaction_offset=prepared_offset,
        body_crc=crc,
        properties=decode_properties(properties_text),
        torn=torn,
        replaced=replaced or more,
    )


def inflated_body(
    body: bytes, sys_flag: int, topic: str, queue_id: int, queue_offset: int
) -> bytes:
    """Return a stored body, inflated if the flag says that it is compressed. Raise like `inflate`;
    the error names the message."""
    if not body or not sys_flag & SysFlag.COMPRESSED:
        return body
    try:
        return inflate(body, CompressionType.of_sys_flag(sys_flag))
    except RemoteProtocolError as error:
        raise RemoteProtocolError(
            f"the message at offset {queue_offset} of queue {queue_id} of {clean(topic, 127)}: "
            f"{error}; to read on, begin at the next offset"
        ) from None


def _inflated(message: StoredMessage) -> StoredMessage:
    body = inflated_body(
        message.body, message.sys_flag, message.topic, message.queue_id, message.queue_offset
    )
    return message if body is message.body else replace(message, body=body)


def _unwrap(message: StoredMessage, allowance: Allowance | None) -> Iterator[StoredMessage]:
    """Yield the messages inside an inner batch (MessageDecoder.decodeMessage). All messages count
    against the allowance, wanted or not: some hundred bytes can hold millions of them."""
    for position, inner in enumerate(iter_batch(message.body)):
        if allowance is not None:
            allowance.take(_VALUE_BYTES + len(inner.body))
        if message.queue_offset + position > INT64_MAX:
            raise RemoteProtocolError("the offsets of an inner batch pass 64 bits")
        yield replace(
            message,
            body=inner.body,
            flag=inner.flag,
            properties=inner.properties,
            replaced=message.replaced or inner.replaced,
            queue_offset=message.queue_offset + position,
        )


def encode_stored(message: StoredMessage, *, stored_body: bytes | None = None) -> bytes:
    """Return the bytes of a message in a broker's answer, for fake brokers. `stored_body` is
    compressed if `sys_flag` has COMPRESSED. The CRC is over the stored bytes. A lone surrogate in a
    property stands for a byte that is not UTF-8 (the error handler surrogateescape)."""
    body = message.body if stored_body is None else stored_body
    born = ip_address(message.born_host[0]).packed
    host = ip_address(message.store_host[0]).packed
    sys_flag = message.sys_flag & ~(SysFlag.BORNHOST_V6 | SysFlag.STOREHOST_V6)
    sys_flag |= SysFlag.BORNHOST_V6 if len(born) == 16 else 0
    sys_flag |= SysFlag.STOREHOST_V6 if len(host) == 16 else 0
    topic = message.topic.encode()
    properties = encode_properties(message.properties).encode("utf-8", "surrogateescape")
    properties += b"\0" * message.torn
    long_topic = len(topic) > 127
    tail = b"".join(
        (
            _tail(len(born) == 16, len(host) == 16).pack(
                born, message.born_host[1], message.store_ms, host, message.store_host[1],
                message.reconsume_times, message.prepared_transaction_offset, len(body),
            ),
            body,
            len(topic).to_bytes(2 if long_topic else 1, "big"),
            topic,
            len(properties).to_bytes(2, "big"),
            properties,
        )
    )  # fmt: skip
    head = _HEAD.pack(
        _HEAD.size + len(tail),
        MAGIC_V2 if long_topic else MAGIC_V1,
        # Java uses the low 31 bits of the CRC (UtilAll.crc32).
        zlib.crc32(body) & 0x7FFFFFFF,
        message.queue_id,
        message.flag,
        message.queue_offset,
        message.commit_log_offset,
        sys_flag,
        message.born_ms,
    )
    return head + tail
