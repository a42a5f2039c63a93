"""Frames of many single messages (SEND_MESSAGE_V2), made together.

A header consists of texts that all frames share, and of columns of values that differ (properties,
opaque ids, flags). Python code runs per message only for signatures and binary serialisation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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
    uniform,
)
from rocket_sink.wire.frame import check_lengths
from rocket_sink.wire.headers import Frame, cut_json_header
from rocket_sink.wire.send_header import SendTemplate

Ints: TypeAlias = "int | Int64s"

_ESCAPED: Final = np.zeros(256, np.bool_)
_ESCAPED[:0x20] = True
_ESCAPED[[ord('"'), ord("\\")]] = True


@dataclass(frozen=True, eq=False)
class SingleMessages:
    """n messages of one topic, each to be sent in a frame of its own.

    Attributes:
        body: binary or large binary, in its final form (compressed or not).
        properties: the wire property strings (binary, UTF-8, no nulls).
        sys_flag, flag: one value for all messages, or n values (int64).
        suffix: wire text to append to the properties of each message.
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
        """Return the total size of these bodies in bytes."""
        return int(lengths_of(self.body)[indices].sum())

    def frames(
        self, template: SendTemplate, *, first_opaque: int, queue_id: int, born_ms: int,
        broker_name: str,
    ) -> pa.Buffer:  # fmt: skip
        """Return all frames, one after the other, with consecutive opaque ids. Raise
        LocalProtocolError if a frame exceeds the limits."""
        if not template.takes_columns:
            frames = template.frames(
                self._messages(), first_opaque=first_opaque, queue_id=queue_id, born_ms=born_ms,
                broker_name=broker_name,
            )  # fmt: skip
            return pa.py_buffer(frames)
        texts = as_binary(self.properties)
        if self.suffix:
            suffix = pa.scalar(self.suffix, texts.type)
            texts = pc.binary_join_element_wise(texts, suffix, pa.scalar(b"", texts.type))
        model = template.frame(queue_id, born_ms, "-", broker_name)
        columns = {"f": self.sys_flag, "h": self.flag, "i": texts}
        return fill_frames(model, columns, first_opaque, self.body)

    def _messages(self) -> Iterator[tuple[bytes, str, int, int]]:
        """Yield the messages in the form of `SendTemplate.frames`."""
        texts = ((text + self.suffix).decode() for text in self.properties.to_pylist())
        flags = (
            [values] * len(self) if isinstance(values, int) else values.tolist()
            for values in (self.sys_flag, self.flag)
        )
        return zip(self.body.to_pylist(), texts, *flags, strict=True)


def fill_frames(
    frame: Frame, columns: Mapping[str, pa.Array | Ints], first_opaque: int,
    bodies: pa.Array | None = None,
) -> pa.Buffer:  # fmt: skip
    """Return JSON frames that differ in some header fields, with consecutive opaque ids. Raise
    LocalProtocolError if a frame exceeds the limits.

    Args:
        frame: has the fields that all frames share.
        columns: {header field: its values, or one value for all frames}, in the header's order.
        bodies: binary; None: the frames have no bodies.
    """
    rows: Any = next(iter(columns.values())) if bodies is None else bodies
    count = len(rows)
    parts = [text.encode() for text in cut_json_header(frame, list(columns))]
    values = [*columns.values(), np.arange(first_opaque, first_opaque + count)]
    pieces: list[Piece] = [parts[0]]
    for value, part in zip(values, parts[1:], strict=True):
        pieces += (_text(value), part)
    header_bytes = np.zeros(count, np.int64) + sum(map(_sizes, pieces))
    body_bytes = np.zeros(count, np.int64) if bodies is None else lengths_of(bodies)
    check_lengths(int(header_bytes.max()), int((header_bytes + body_bytes).max()))
    prefix = np.empty((count, 2), ">u4")
    prefix[:, 0] = header_bytes + body_bytes + 4
    prefix[:, 1] = header_bytes
    if bodies is not None:
        pieces.append(as_binary(bodies))
    return pa.py_buffer(bytes_of(join_pieces([prefix, *pieces], count)))


def _text(values: pa.Array | Ints) -> Piece:
    """Return the values as the contents of JSON strings."""
    if isinstance(values, int):
        return str(values).encode()
    if isinstance(values, np.ndarray):
        return uniform(as_binary(pa.array(values).cast(pa.string())))
    return uniform(_json_text(values))


def _sizes(piece: Piece) -> Any:
    """Return the bytes of the piece in each row: an array, or a number if all are equal."""
    if isinstance(piece, bytes):
        return len(piece)
    return piece.dtype.itemsize if isinstance(piece, np.ndarray) else lengths_of(piece)


def _json_text(texts: pa.Array) -> pa.Array:
    """Escape UTF-8 texts for JSON strings, without adding quotes."""
    texts = as_binary(texts)
    present = np.unique(bytes_of(texts)[_ESCAPED[bytes_of(texts)]])
    # Escape the backslash first, because the other escapes contain one.
    for byte in sorted(present.tolist(), key=lambda byte: byte != ord("\\")):
        raw = chr(byte)
        texts = pc.replace_substring(texts, pattern=raw, replacement=encode_basestring(raw)[1:-1])
    return texts
