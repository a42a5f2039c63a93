"""The unanswered requests of a task. A `PendingRequest` holds encoded messages, in the format of
`wire.batch`. Dead letters are decoded from these bytes, so rows are freed once they are encoded."""

from __future__ import annotations

import enum
import itertools
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import pyarrow as pa

from rocket_sink.errors import SendError
from rocket_sink.forks import lazy
from rocket_sink.message import MessageQueue
from rocket_sink.wire.columns.buffers import Int64s
from rocket_sink.wire.compress import CompressionType, inflate
from rocket_sink.wire.properties import LITE_TOPIC, SHARDING_KEY, UNIQ_KEY, decode_properties

_HEAD: Final = struct.Struct(">iiiii")
"""A message's head: size, magic, body CRC, flag, body length (MessageDecoder.encodeMessage)."""


class Piece(NamedTuple):
    """Consecutive messages of an encoded batch; `offsets` has each start in `data`, and the end."""

    data: pa.Buffer
    offsets: Int64s

    @property
    def message_count(self) -> int:
        return len(self.offsets) - 1

    @property
    def byte_count(self) -> int:
        return int(self.offsets[-1] - self.offsets[0])

    @property
    def body(self) -> pa.Buffer:
        start = int(self.offsets[0])
        return self.data.slice(start, int(self.offsets[-1]) - start)

    def detached(self) -> Piece:
        """Return a copy in a buffer of its own, so that the batch's buffer can be freed."""
        return Piece(pa.py_buffer(self.body.to_pybytes()), self.offsets - self.offsets[0])


class DecodedMessage(NamedTuple):
    """A decoded message; `properties` is the wire text."""

    body: bytes
    flag: int
    properties: str

    def property(self, name: str) -> str | None:
        return decode_properties(self.properties).get(name)

    def order_key(self) -> str | None:
        """Return the key whose messages stay in order: the sharding key, else the lite topic."""
        properties = decode_properties(self.properties)
        return properties.get(SHARDING_KEY) or properties.get(LITE_TOPIC)


def decode_message(piece: Piece, index: int = 0) -> DecodedMessage:
    start, end = int(piece.offsets[index]), int(piece.offsets[index + 1])
    raw = piece.data.slice(start, end - start).to_pybytes()
    _total, _magic, _crc, flag, body_length = _HEAD.unpack_from(raw)
    body_end = _HEAD.size + body_length
    # The properties end a message, behind their length in two bytes.
    return DecodedMessage(raw[_HEAD.size : body_end], flag, raw[body_end + 2 :].decode())


class SingleColumns(NamedTuple):
    """The messages of a group of single messages, as columns."""

    body: pa.Array
    properties: pa.Array
    """Wire property strings, as binary."""
    message_ids: pa.Array
    flag: int | Int64s
    least_version: int
    """MQVersion ordinal of the oldest broker that knows the properties; 0: any broker."""
    sys_flag: int | Int64s | None = None
    """MessageSysFlag bits; None until the bodies are compressed as the options say."""

    def slice(self, first: int, last: int) -> SingleColumns:
        """Return the messages `first` to `last` (exclusive), without a copy."""
        count, flag, sys_flag = last - first, self.flag, self.sys_flag
        return SingleColumns(
            self.body.slice(first, count), self.properties.slice(first, count),
            self.message_ids.slice(first, count),
            flag if isinstance(flag, int) else flag[first:last], self.least_version,
            sys_flag if isinstance(sys_flag, int | None) else sys_flag[first:last],
        )  # fmt: skip


class SpillState(enum.Enum):
    """The location of a waiting request's bytes (`rocket_sink.task.ordering`)."""

    NOT = "not waiting"
    SLICE = "slices of their batches"
    COPY = "copied out of them"
    FILE = "in a file; offsets are positions in it"


@dataclass(eq=False)
class PendingRequest:
    """Messages that are sent as one request, or as a group of single messages.

    Attributes:
        queue: the home queue, or the queue that the rows name; None lets the engine choose.
        fixed: the rows name the queue (`queue_id`), so it never changes.
        sharded: `queue` is a home queue.
        timed: a delay, delivery time, priority or lite topic keeps the messages out of batches.
        delayed: the messages have a delay or delivery time, so no order per key counts for them.
        alone: the messages are sent one by one: half messages, or messages of a refused batch.
        waits_for_store: the property WAIT of all messages.
        lacks_keys: at least one message of a batch has no keys.
        attempts: number of attempts that reached a broker, also as a part of a larger request.
        maybe_duplicate: an earlier submission ended without a known outcome.
        first_error: the first error of the messages.
    """

    topic: str
    queue: MessageQueue | None
    pieces: list[Piece]
    fixed: bool = False
    sharded: bool = False
    timed: bool = False
    alone: bool = False
    waits_for_store: bool = True
    attempts: int = 0
    maybe_duplicate: bool = False
    first_error: SendError | None = None
    parked: SpillState = SpillState.NOT
    number: int = 0
    """The request's number in the task attempt; for a group, the number of its first message."""
    delayed: bool = False
    columns: SingleColumns | None = None
    """The messages as columns, if they are a group of single messages, or have left a group."""
    waits_since_s: float = 0.0
    """Time at which the request began to wait for its queue; 0 if it never waited."""
    waited_ms: float = 0.0
    lacks_keys: bool = False
    sys_flag: int = 0
    """MessageSysFlag bits of each message. They say how the bodies in the pieces are compressed."""
    message_count: int = field(init=False)
    byte_count: int = field(init=False)

    def __post_init__(self) -> None:
        self.message_count = sum(piece.message_count for piece in self.pieces)
        self.byte_count = sum(piece.byte_count for piece in self.pieces)

    @property
    def requests(self) -> int:
        """Number of requests on the wire in an attempt."""
        return 1 if self.columns is None else self.message_count

    @lazy
    def first_message_id(self) -> str:
        return decode_message(self.pieces[0]).property(UNIQ_KEY) or ""

    @property
    def last_message_id(self) -> str:
        piece = self.pieces[-1]
        return decode_message(piece, piece.message_count - 1).property(UNIQ_KEY) or ""

    def messages(self, indices: Iterable[int] | None = None) -> Iterator[DecodedMessage]:
        """Yield decoded messages: those at the `indices` of each piece, by default all. This is
        slow, so batches and groups are sent without it."""
        for piece in self.pieces:
            for index in range(piece.message_count) if indices is None else indices:
                message = decode_message(piece, index)
                if self.sys_flag:
                    kind = CompressionType.of_sys_flag(self.sys_flag)
                    message = message._replace(body=inflate(message.body, kind))
                yield message

    def absorbs(self, other: PendingRequest, *, max_messages: int, max_bytes: int) -> bool:
        """Take the messages of the next request for the queue, and return True, if they fit into
        this request."""
        fits = (
            self.fixed == other.fixed
            and self.waits_for_store == other.waits_for_store
            and self.sys_flag == other.sys_flag
            and not (self.alone or other.alone)
            and not self.attempts  # New messages have another error, and other attempts.
            and self.parked is SpillState.SLICE
            and self.message_count + other.message_count <= max_messages
            and self.byte_count + other.byte_count <= max_bytes
        )
        if fits:
            self.pieces.extend(other.pieces)
            self.message_count += other.message_count
            self.byte_count += other.byte_count
            self.lacks_keys |= other.lacks_keys
        return fits

    def split(self) -> list[PendingRequest]:
        """Return a request per message, in order, marked `alone`."""
        return [self._like([single], alone=True) for single in self._singles()]

    def parts(self, max_bytes: int) -> list[PendingRequest]:
        """Return requests of at most `max_bytes` each, in order. A request of one message is marked
        `alone`, because brokers count fewer bytes of a single message than of a batch."""
        parts: list[list[Piece]] = [[]]
        size = 0
        for piece in self.pieces:
            first, offsets = 0, piece.offsets
            while first < piece.message_count:
                end = offsets[first] + max_bytes - size
                last = int(offsets.searchsorted(end, side="right")) - 1
                if last <= first and size:
                    parts.append([])
                    size = 0
                    continue
                last = max(last, first + 1)
                parts[-1].append(Piece(piece.data, offsets[first : last + 1]))
                size += parts[-1][-1].byte_count
                first = last
        counts = [sum(piece.message_count for piece in pieces) for pieces in parts]
        return [self._like(p, alone=count == 1) for p, count in zip(parts, counts, strict=True)]

    def select(self, wanted: Sequence[bool]) -> PendingRequest | None:
        """Return a request of the messages whose flag is true; None if no flag is."""
        kept = list(itertools.compress(self._singles(), wanted))
        return self._like(kept, alone=self.alone) if kept else None

    def take_part(self, first: int, last: int) -> PendingRequest:
        """Move the group's messages `first` to `last` (exclusive) to a new request; return it."""
        assert self.columns is not None
        [piece] = self.pieces
        part = self._like([Piece(piece.data, piece.offsets[first : last + 1])], alone=True)
        part.number = self.number + first
        part.columns = self.columns.slice(first, last)
        self.message_count -= part.message_count
        self.byte_count -= part.byte_count
        return part

    def _singles(self) -> Iterator[Piece]:
        for piece in self.pieces:
            for index in range(piece.message_count):
                yield Piece(piece.data, piece.offsets[index : index + 2])

    def _like(self, pieces: list[Piece], *, alone: bool) -> PendingRequest:
        return PendingRequest(
            self.topic, self.queue, pieces, self.fixed, self.sharded, self.timed, alone,
            self.waits_for_store, self.attempts, self.maybe_duplicate, self.first_error,
            delayed=self.delayed, lacks_keys=self.lacks_keys, sys_flag=self.sys_flag,
        )  # fmt: skip
