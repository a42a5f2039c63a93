"""Frames (RemotingCommand.encode, big-endian):

int  length of all that follows
byte serialisation (0 JSON, 1 ROCKETMQ), then 24 bits: header length
header, then body"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from rocket_sink.errors import LocalProtocolError, RemoteProtocolError
from rocket_sink.wire.headers import (
    PREFIX,
    Frame,
    Limits,
    decode_binary_header,
    decode_json_header,
    encode_json_header,
)

if TYPE_CHECKING:
    from rocket_sink.wire.answers import Answers, AnswerShapes

_JSON: Final = 0
_ROCKETMQ: Final = 1
_HEADER_LENGTH_MASK: Final = 0xFFFFFF


def check_lengths(header_length: int, body_length: int) -> None:
    """Raise LocalProtocolError for a frame so long that servers would close the connection."""
    length = 4 + header_length + body_length
    if 4 + length > Limits.FRAME_BYTES or header_length > Limits.HEADER_BYTES:
        raise LocalProtocolError(
            f"a frame of {4 + length} bytes with a header of {header_length}: the limits are "
            f"{Limits.FRAME_BYTES} and {Limits.HEADER_BYTES}; send fewer or "
            "smaller messages at once",
            size=4 + length,
            limit=Limits.FRAME_BYTES,
        )


def encode_head(frame: Frame, body_length: int) -> bytes:
    """Return the bytes of `frame` before its body. Raise LocalProtocolError if the frame is too
    long, or a field cannot be encoded."""
    header = encode_json_header(frame)
    check_lengths(len(header), body_length)
    return PREFIX.pack(4 + len(header) + body_length, _JSON << 24 | len(header)) + header


def encode_frame(frame: Frame) -> bytes:
    """Return the whole frame, with a copy of its body."""
    body = frame.body if frame.body is not None else b""
    return encode_head(frame, len(memoryview(body))) + body


class FrameReader:
    """Cuts received bytes into frames. After an error every later call raises the same error. The
    buffer holds at most an incomplete frame (`Limits.FRAME_BYTES`) and the last received bytes."""

    __slots__ = ("_at", "_data", "_error", "_shapes", "_small")

    def __init__(self, shapes: AnswerShapes | None = None) -> None:
        self._data: bytes | bytearray = b""
        self._at = 0
        self._error: RemoteProtocolError | None = None
        self._shapes = shapes
        self._small = min(Limits.FRAME_BYTES, Limits.HEADER_BYTES) - 8
        """Largest frame length that needs no check of the limits."""

    def receive_data(self, data: bytes | bytearray | memoryview) -> None:
        """Append received bytes; `data` may be reused after the call."""
        if self._error is not None:
            raise self._error
        if self._at == len(self._data):
            self._data = bytes(data)  # no copy if `data` is bytes
        elif type(self._data) is bytearray:
            # Deleting the front of a bytearray copies nothing, so a long frame is copied once.
            del self._data[: self._at]
            self._data += data
        else:
            self._data = bytearray(memoryview(self._data)[self._at :])
            self._data += data
        self._at = 0

    def next_answers(self) -> Sequence[Answers]:
        """Return the next frames, grouped by length, if many successful answers of a known form
        follow. Otherwise return nothing, and leave the frames to `next_frame`."""
        if self._shapes is None:
            return []
        answers, read_bytes = self._shapes.read_many(self._data, self._at)
        self._at += read_bytes
        return answers

    def next_frame(self) -> Frame | None:
        """Return the next frame; None if the buffer holds no complete frame. Raise
        RemoteProtocolError if the bytes cannot be a frame within the limits."""
        if self._error is not None:
            raise self._error
        data, at = self._data, self._at
        available = len(data) - at
        try:
            if available < PREFIX.size:
                if available >= 4:  # A TLS alert has seven bytes, and no more may follow.
                    self._check_lengths(int.from_bytes(data[at : at + 4], "big"), 0)
                return None
            length, mark = PREFIX.unpack_from(data, at)
            header_length = mark & _HEADER_LENGTH_MASK
            if length > self._small or header_length + 4 > length:
                self._check_lengths(length, header_length)
            if available < 4 + length:
                return None
            body_at = at + 8 + header_length
            self._at = end = at + 4 + length
            frame = self._read(mark >> 24, bytes(data[at + 8 : body_at]))
        except RemoteProtocolError as error:
            self._error, self._data, self._at = error, b"", 0
            raise
        if end > body_at:
            frame.body = bytes(memoryview(data)[body_at:end])
        return frame

    def _read(self, kind: int, header: bytes) -> Frame:
        if kind == _JSON:
            shapes = self._shapes
            if shapes is not None and (answer := shapes.read(header)) is not None:
                return answer
            frame = decode_json_header(header)
            if shapes is not None:
                shapes.learn(frame, header)
            return frame
        if kind == _ROCKETMQ:
            return decode_binary_header(header)
        raise RemoteProtocolError(f"a header of the unknown serialisation {kind}")

    def _check_lengths(self, length: int, header_length: int) -> None:
        if 4 + length > Limits.FRAME_BYTES:
            raise RemoteProtocolError(
                f"a frame of {4 + length} bytes; the limit is {Limits.FRAME_BYTES}. Is this a "
                "RocketMQ port, and does it speak TLS?"
            )
        if header_length > Limits.HEADER_BYTES or header_length + 4 > length:
            raise RemoteProtocolError(
                f"a header of {header_length} bytes in a frame of {length}; the limit is "
                f"{Limits.HEADER_BYTES}"
            )
