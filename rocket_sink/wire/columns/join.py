"""Joining pieces to one binary value per row: the inner loop of the column encoder.

A piece is bytes that all rows share, a numpy array of fixed-width items (one per row), or a binary
array. Arrow's kernel takes about 15 ns per row and piece (measured), so numpy first packs
neighbouring shared and fixed-width pieces into one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rocket_sink.wire.columns.buffers import (
    INT32_MAX,
    as_binary,
    bytes_of,
    fixed_width,
    lengths_of,
)

Fixed: TypeAlias = npt.NDArray[Any]
Piece: TypeAlias = "bytes | Fixed | pa.Array"


def join_pieces(pieces: Sequence[Piece], count: int, nulls: str = "replace") -> pa.Array:
    """One binary value per row: the row's pieces in order.

    `nulls`: "replace" a null in a column by nothing, or "emit_null". The result is large binary
    when it exceeds 32-bit offsets.
    """
    if count == 0:
        return pa.array([], pa.binary())
    packed = _packed(pieces, count)
    large = sum(_bytes_in(piece, count) for piece in packed) > INT32_MAX
    kind = pa.large_binary() if large else pa.binary()
    return pc.binary_join_element_wise(
        *(_argument(piece, kind) for piece in packed),
        pa.scalar(b"", kind),
        null_handling=nulls,
        null_replacement="",
    )


def uniform(array: pa.Array) -> Piece:
    """Fixed-width items if all values have one length and none is null, else the array."""
    lengths = lengths_of(array)
    if not len(lengths) or array.null_count or not lengths[0] or (lengths != lengths[0]).any():
        return array
    return bytes_of(array).view(f"V{lengths[0]}")


def _packed(pieces: Sequence[Piece], count: int) -> list[Piece]:
    """The pieces with each run of neighbours that are not columns packed into one."""
    packed: list[Piece] = []
    run: list[bytes | Fixed] = []
    for piece in pieces:
        if isinstance(piece, pa.Array):
            packed += [*_block(run, count), piece]
            run = []
        else:
            run.append(piece)
    packed += _block(run, count)
    if all(isinstance(piece, bytes) for piece in packed):
        return [_shared_by_all(b"".join(p for p in packed if isinstance(p, bytes)), count)]
    return packed


def _block(run: Sequence[bytes | Fixed], count: int) -> list[bytes | Fixed]:
    """Neighbouring pieces packed into at most one."""
    fields: list[bytes | Fixed] = []
    for piece in run:
        if fields and isinstance(piece, bytes) and isinstance(fields[-1], bytes):
            fields[-1] += piece
        elif len(piece):
            fields.append(piece)
    if len(fields) < 2:
        return fields
    widths = [len(f) if isinstance(f, bytes) else f.nbytes // count for f in fields]
    block = np.empty(count, [(f"f{i}", f"V{width}") for i, width in enumerate(widths)])
    for i, item in enumerate(fields):
        block[f"f{i}"] = np.void(item) if isinstance(item, bytes) else _items(item, widths[i])
    return [block]


def _shared_by_all(text: bytes, count: int) -> Piece:
    """As a column: the kernel needs one for the number of rows."""
    return np.full(count, np.void(text)) if text else pa.nulls(count, pa.binary())


def _items(rows: Fixed, width: int) -> Fixed:
    """The rows of a C-contiguous array as `width` opaque bytes each."""
    return rows.reshape(-1).view(np.uint8).view(f"V{width}")


def _bytes_in(piece: Piece, count: int) -> int:
    if isinstance(piece, bytes):
        return len(piece) * count
    return int(piece.nbytes) if isinstance(piece, np.ndarray) else len(bytes_of(piece))


def _argument(piece: Piece, kind: pa.DataType) -> pa.Array | pa.Scalar:
    if isinstance(piece, bytes):
        return pa.scalar(piece, kind)
    column = fixed_width(piece) if isinstance(piece, np.ndarray) else as_binary(piece)
    return column if column.type == kind else column.cast(kind)
