"""Requests of the task body that are not answered yet: encoded messages with queue and attempts.

A `PendingRequest` holds its messages as a batch's body has them (`rocket_sink.wire.batch`), and no
rows. Dead letters are decoded from these bytes, so the rows of an input batch are freed as soon as
they are encoded.
"""

from __future__ import annotations

import enum
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
from rocket_sink.wire.properties import LITE_TOPIC, SHARDING_KEY

_HEAD: Final = struct.Struct(">iiiii")
"""A message's head: size, magic, body CRC, flag, body length (MessageDecoder.encodeMessage)."""
_SHORT: Final = struct.Struct(">h")


class Piece(NamedTuple):
    """Neighbouring messages of one encoded batch.

    `offsets` has the start of each message in `data` and the last end; it need not begin at 0.
    """

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
        """Copy the messages into a buffer of their own, so that other messages' memory can be
        freed."""
        return Piece(pa.py_buffer(self.body.to_pybytes()), self.offsets - self.offsets[0])

    def singles(self) -> Iterator[Piece]:
        """Yield a piece per message."""
        for index in range(self.message_count):
            yield Piece(self.data, self.offsets[index : index + 2])


class DecodedMessage(NamedTuple):
    """A message of a piece; `properties` is the wire text."""

    body: bytes
    flag: int
    properties: str

    def property(self, name: str) -> str | None:
        """Return the value of a property, or None."""
        for part in self.properties.split("\x02"):
            if part.startswith(name) and part[len(name) : len(name) + 1] == "\x01":
                return part[len(name) + 1 :]
        return None

    def order_key(self) -> str | None:
        """Return the key whose messages stay in order: the sharding key, or the lite topic."""
        return self.property(SHARDING_KEY) or self.property(LITE_TOPIC)


def decode_message(piece: Piece, index: int = 0) -> DecodedMessage:
    """Read one message of a piece that this process encoded."""
    start, end = int(piece.offsets[index]), int(piece.offsets[index + 1])
    raw = piece.data.slice(start, end - start).to_pybytes()
    _total, _magic, _crc, flag, body_length = _HEAD.unpack_from(raw)
    body_end = _HEAD.size + body_length
    (properties_length,) = _SHORT.unpack_from(raw, body_end)
    text = raw[body_end + 2 : body_end + 2 + properties_length].decode()
    return DecodedMessage(raw[_HEAD.size : body_end], flag, text)


class SingleColumns(NamedTuple):
    """The columns of a group of single messages, in addition to its piece."""

    body: pa.Array
    properties: pa.Array
    """The wire property strings, binary."""
    message_ids: pa.Array
    flag: int | Int64s
    least_version: int
    """MQVersion ordinal of the oldest broker that supports the properties; 0: any."""
    sys_flag: int | Int64s | None = None
    """MessageSysFlag bits; set once the bodies have their final form (compressed)."""

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
    """The place of a waiting request's bytes (`rocket_sink.task.ordering`)."""

    NOT = "not waiting"
    SLICE = "slices of their batches"
    COPY = "copied out of them"
    FILE = "in a file; offsets are positions in it"


@dataclass(eq=False)
class PendingRequest:
    """Messages that will travel in one request.

    Attributes:
        queue: the home queue, or the row's own; None lets the engine choose.
        fixed: the queue was the row's own choice (`queue_id`): it never changes.
        timed: messages with a delay, a time, a priority or a lite topic, which no batch carries.
        alone: each message is sent by itself: a half message, or one of a refused batch, in which
            one message may be to blame.
        waits_for_store: the messages' WAIT, which is one value per batch.
        lacks_keys: at least one message of a batch has no keys.
        attempts: number of attempts so far, over all submissions.
        maybe_duplicate: an earlier submission ended without a known outcome.
        first_error: the first failed submission's error.
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
    submissions: int = 0
    maybe_duplicate: bool = False
    first_error: SendError | None = None
    parked: SpillState = SpillState.NOT
    number: int = 0
    """Number of the submission in its task attempt; in a group, the number of its first message."""
    columns: SingleColumns | None = None
    """The columns of messages that are sent as a group of single ones, or have left a group."""
    waits_since_s: float = 0.0
    """Time at which the request began to wait for its turn in the queue (the task's clock)."""
    waited_ms: float = 0.0
    """Time that the request waited for its turn in the queue before it was submitted."""
    lacks_keys: bool = False
    sys_flag: int = 0
    """MessageSysFlag bits of each message, whose body in the pieces is compressed accordingly."""
    message_count: int = field(init=False)
    byte_count: int = field(init=False)

    def __post_init__(self) -> None:
        self.message_count = sum(piece.message_count for piece in self.pieces)
        self.byte_count = sum(piece.byte_count for piece in self.pieces)

    @property
    def requests(self) -> int:
        """Number of requests on the wire in one attempt."""
        return 1 if self.columns is None else self.message_count

    def bodies(self) -> Sequence[pa.Buffer]:
        """Return the request body as buffers to write in order; nothing is copied."""
        return [piece.body for piece in self.pieces]

    @lazy
    def first_message_id(self) -> str:
        """Return `UNIQ_KEY` of the first message."""
        return decode_message(self.pieces[0]).property("UNIQ_KEY") or ""

    @property
    def last_message_id(self) -> str:
        """`UNIQ_KEY` of the last message."""
        piece = self.pieces[-1]
        return decode_message(piece, piece.message_count - 1).property("UNIQ_KEY") or ""

    def messages(self, places: Iterable[int] | None = None) -> Iterator[DecodedMessage]:
        """Decode messages, one by one. This is slow, so batches and groups are sent undecoded.

        Args:
            places: places in a group; None: all messages.
        """
        for piece in self.pieces:
            for index in range(piece.message_count) if places is None else places:
                message = decode_message(piece, index)
                if self.sys_flag:
                    kind = CompressionType.of_sys_flag(self.sys_flag)
                    message = message._replace(body=inflate(message.body, kind))
                yield message

    def can_absorb(self, other: PendingRequest, *, max_messages: int, max_bytes: int) -> bool:
        """Return whether `other`, the next in the same queue, fits into this request."""
        return (
            self.topic == other.topic
            and self.sharded == other.sharded
            and self.fixed == other.fixed
            and self.waits_for_store == other.waits_for_store
            and self.sys_flag == other.sys_flag
            and not (self.timed or other.timed or self.alone or other.alone)
            and not (self.submissions or other.submissions)
            and self.parked is SpillState.SLICE
            and self.message_count + other.message_count <= max_messages
            and self.byte_count + other.byte_count <= max_bytes
        )

    def absorb(self, other: PendingRequest) -> None:
        """Append the messages of `other`."""
        self.pieces.extend(other.pieces)
        self.message_count += other.message_count
        self.byte_count += other.byte_count
        self.lacks_keys |= other.lacks_keys

    def split(self) -> list[PendingRequest]:
        """Return a request per message, in order, marked `alone`."""
        return [
            self._like([single], alone=True) for piece in self.pieces for single in piece.singles()
        ]

    def select(self, wanted: Sequence[bool]) -> PendingRequest | None:
        """Return a request of the messages whose flag is true; None if all flags are false."""
        singles = [single for piece in self.pieces for single in piece.singles()]
        kept = [single for single, keep in zip(singles, wanted, strict=True) if keep]
        return self._like(kept, alone=self.alone) if kept else None

    def take_part(self, first: int, last: int) -> PendingRequest:
        """Move messages from the group to a new request, and return the request."""
        assert self.columns is not None
        [piece] = self.pieces
        part = self._like([Piece(piece.data, piece.offsets[first : last + 1])], alone=True)
        part.submissions, part.number = self.submissions, self.number + first
        part.columns = self.columns.slice(first, last)
        self.message_count -= part.message_count
        self.byte_count -= part.byte_count
        return part

    def _like(self, pieces: list[Piece], *, alone: bool) -> PendingRequest:
        return PendingRequest(
            self.topic, self.queue, pieces, self.fixed, self.sharded, self.timed, alone,
            self.waits_for_store, self.attempts, 0, self.maybe_duplicate, self.first_error,
            lacks_keys=self.lacks_keys, sys_flag=self.sys_flag,
        )  # fmt: skip
