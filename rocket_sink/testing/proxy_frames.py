"""Frames in a stream that passes: cut out whole once somebody has something to say about them."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator
from dataclasses import dataclass

from rocket_sink.errors import RemoteProtocolError
from rocket_sink.wire.command import DEFAULT_LIMITS, Frame
from rocket_sink.wire.frame import FrameReader

_LENGTH = 4


@dataclass(frozen=True)
class Piece:
    """Bytes to pass on; `frame` where they are one whole frame that can be read."""

    data: bytes
    frame: Frame | None = None


class Cutter:
    """One direction of one connection."""

    def __init__(self) -> None:
        self._prefix = b""
        """The part of the next frame's length that has passed already."""
        self._left = 0
        """Bytes of a frame that has begun to pass."""
        self._held = bytearray()

    def cut(self, data: bytes, *, whole: bool) -> Iterator[Piece]:
        """What may pass now. `whole`: frames from the next one on are held until they are whole;
        not to be taken back. A stream of something else (TLS) passes as it comes."""
        while data:
            if self._left:
                piece, data = data[: self._left], data[self._left :]
                self._left -= len(piece)
                yield Piece(piece)
            elif whole and not self._prefix:
                self._held += data
                data = yield from self._frames()
            else:
                missing = _LENGTH - len(self._prefix)
                piece, data = data[:missing], data[missing:]
                self._prefix += piece
                if len(self._prefix) == _LENGTH:
                    self._left, self._prefix = int.from_bytes(self._prefix, "big"), b""
                yield Piece(piece)

    def _frames(self) -> Generator[Piece, None, bytes]:
        held = self._held
        while len(held) >= _LENGTH:
            size = _LENGTH + int.from_bytes(held[:_LENGTH], "big")
            if size > DEFAULT_LIMITS.frame_bytes:
                self._left, rest = size, bytes(held)
                held.clear()
                return rest
            if len(held) < size:
                break
            data = bytes(held[:size])
            del held[:size]
            yield Piece(data, _read(data))
        return b""


def _read(data: bytes) -> Frame | None:
    reader = FrameReader()
    with contextlib.suppress(RemoteProtocolError):
        reader.receive_data(data)
        frame = reader.next_frame()
        return frame if isinstance(frame, Frame) else None
    return None
