"""Frames of many single messages (SEND_MESSAGE_V2), made for a group at a time.

The header of a group is a template with holes: what all its frames share is made once, what differs
(properties, opaque ids, flags) are columns. No Python runs per message but where each header needs
it: with credentials (a signature covers the body) and in the binary serialisation.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from json.encoder import encode_basestring
from typing import Any, Final, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rocket_sink.forks import lazy
from rocket_sink.wire.columns.buffers import (
    Int64s,
    Piece,
    as_binary,
    bytes_of,
    join_pieces,
    lengths_of,
    offsets_of,
    uniform,
)
from rocket_sink.wire.headers import Frame, encode_json_header
from rocket_sink.wire.send_header import SendTemplate

Ints: TypeAlias = "int | Int64s"

_ESCAPED: Final = np.zeros(256, np.bool_)
_ESCAPED[:0x20] = True
_ESCAPED[[ord('"'), ord("\\")]] = True
_HEAD_BYTES: Final = 8


@dataclass(frozen=True, eq=False)
class SingleMessages:
    """n messages of one topic, each to be sent in a frame of its own.

    Attributes:
        body: binary or large binary, compressed already where it is to be.
        properties: the wire property strings (binary, UTF-8, no nulls).
        sys_flag, flag: one for all, or n of them (int64).
        suffix: property strings that follow those of each message.
    """

    body: pa.Array
    properties: pa.Array
    sys_flag: Ints = 0
    flag: Ints = 0
    suffix: bytes = b""

    def __len__(self) -> int:
        return len(self.body)

    @lazy
    def body_bytes(self) -> int:
        return int(lengths_of(self.body).sum())

    def bytes_of(self, indices: Int64s) -> int:
        """Bytes of some bodies."""
        return int(lengths_of(self.body)[indices].sum())

    def frames(
        self,
        template: SendTemplate,
        *,
        first_opaque: int,
        queue_id: int,
        born_ms: int,
        broker_name: str,
    ) -> pa.Buffer:
        """Return all frames, one after the other, with consecutive opaque ids.

        Raises:
            LocalProtocolError: a frame passes the limits.
        """
        parts = template.parts(queue_id, born_ms, broker_name)
        if parts is None:
            frames = template.frames(
                self._messages(), first_opaque=first_opaque, queue_id=queue_id, born_ms=born_ms,
                broker_name=broker_name,
            )  # fmt: skip
            return pa.py_buffer(frames)
        pieces: list[Piece] = [
            parts.start, _text(self.sys_flag), parts.before_flag, _text(self.flag),
            parts.before_properties, _json_text(self.properties),
            _json_suffix(self.suffix) + parts.before_opaque, _opaques(first_opaque, len(self)),
            parts.end,
        ]  # fmt: skip
        header_bytes = _header_bytes(pieces, len(self))
        lengths = header_bytes + lengths_of(self.body)
        template.check_lengths(int(header_bytes.max()), int(lengths.max()))
        return _framed([*pieces, as_binary(self.body)], header_bytes, lengths)

    def _messages(self) -> Iterator[tuple[bytes, str, int, int]]:
        """Yield (body, properties, sys_flag, flag) of each message, for `SendTemplate.frames`."""
        texts = ((text + self.suffix).decode() for text in self.properties.to_pylist())
        flags = (_list(values, len(self)) for values in (self.sys_flag, self.flag))
        return zip(self.body.to_pylist(), texts, *flags, strict=True)


_OPAQUE: Final = 1_987_654_321
"""Stands for the ids in a header that is cut at its holes."""


def fill_frames(frame: Frame, columns: Mapping[str, pa.Array], first_opaque: int) -> pa.Buffer:
    """JSON frames without a body that differ in some header fields, with consecutive opaque ids.

    Args:
        frame: what they share.
        columns: {header field: its text in each frame}.
    """
    count = len(next(iter(columns.values())))
    marks = {name: f"\ue000{number}\ue001" for number, name in enumerate(columns)}
    header = encode_json_header(replace(frame, ext={**(frame.ext or {}), **marks}, opaque=_OPAQUE))
    values = {mark: uniform(_json_text(columns[name])) for name, mark in marks.items()}
    before, name, after = header.decode().partition(f'"opaque":{_OPAQUE}')
    values[name] = _opaques(first_opaque, count)
    marked = re.split(f"({'|'.join(marks.values())})", before)
    parts = [*marked, '"opaque":', name, after]
    pieces = [values[part] if part in values else part.encode() for part in parts]
    header_bytes = _header_bytes(pieces, count)
    return _framed(pieces, header_bytes, header_bytes)


def _opaques(first: int, count: int) -> Piece:
    return _text(np.arange(first, first + count))


def _header_bytes(pieces: Sequence[Piece], count: int) -> Int64s:
    sizes = np.zeros(count, np.int64)
    for piece in pieces:
        sizes += _sizes(piece)
    return sizes


def _framed(pieces: Sequence[Piece], header_bytes: Int64s, lengths: Int64s) -> pa.Buffer:
    """The pieces behind their frames' two lengths (`wire.frame`); `lengths` with the bodies."""
    prefix = np.empty((len(lengths), 2), ">u4")
    prefix[:, 0] = lengths + 4
    prefix[:, 1] = header_bytes
    joined = join_pieces([prefix, *pieces], len(lengths))
    offsets, data = offsets_of(joined), joined.buffers()[2]
    assert data is not None
    return data.slice(int(offsets[0]), int(offsets[-1] - offsets[0]))


def _list(values: Ints, count: int) -> list[int]:
    return [values] * count if isinstance(values, int) else values.tolist()


def _text(values: Ints) -> Piece:
    """The numbers in decimal."""
    if isinstance(values, int):
        return str(values).encode()
    return uniform(as_binary(pa.array(values).cast(pa.string())))


def _sizes(piece: Piece) -> Any:
    """Bytes of the piece in each row."""
    if isinstance(piece, bytes):
        return len(piece)
    return piece.dtype.itemsize if isinstance(piece, np.ndarray) else lengths_of(piece)


def _json_suffix(text: bytes) -> bytes:
    return encode_basestring(text.decode())[1:-1].encode()


def _json_text(texts: pa.Array) -> pa.Array:
    """UTF-8 texts as they stand between the quotes of a JSON string."""
    texts = as_binary(texts)
    present = np.unique(bytes_of(texts)[_ESCAPED[bytes_of(texts)]])
    # The backslash first: the others' escapes have one.
    for byte in sorted(present.tolist(), key=lambda byte: byte != ord("\\")):
        raw = chr(byte)
        texts = pc.replace_substring(texts, pattern=raw, replacement=encode_basestring(raw)[1:-1])
    return texts
