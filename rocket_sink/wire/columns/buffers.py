"""Views of Arrow's variable-length arrays as numpy offsets and bytes, and joins of columns.

The views copy nothing. They take binary, string and their large forms, sliced or not. A null has
the length 0, because Arrow leaves its bytes undefined.

`join_pieces` is the inner loop of the column encoder. A piece is bytes that all rows share, a numpy
array of fixed-width items (one per row), or a binary array. Arrow's kernel takes about 15 ns per
row and piece (measured), so numpy first packs neighbours of the first two kinds into one piece."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Int64s: TypeAlias = npt.NDArray[np.int64]
Bytes: TypeAlias = npt.NDArray[np.uint8]
Mask: TypeAlias = npt.NDArray[np.bool_]

INT32_MAX: Final = 2**31 - 1


def is_text(kind: pa.DataType) -> bool:
    """Return whether `kind` is string or binary, or the large form of one."""
    return kind in (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())


def offsets_of(array: pa.Array) -> npt.NDArray[Any]:
    """Return the n + 1 offsets of `array` into its values buffer (int32; int64 for large types)."""
    large = pa.types.is_large_binary(array.type) or pa.types.is_large_string(array.type)
    buffer = array.buffers()[1]
    dtype = np.dtype(np.int64 if large else np.int32)
    if buffer is None or buffer.size == 0:
        return np.zeros(1, dtype)
    first = array.offset * dtype.itemsize
    return np.frombuffer(buffer, dtype, count=len(array) + 1, offset=first)


def bytes_of(array: pa.Array) -> Bytes:
    """Return the bytes between the first and the last offset of `array`."""
    offsets = offsets_of(array)
    buffer = array.buffers()[2]
    if buffer is None or buffer.size == 0:
        return np.zeros(0, np.uint8)
    count = int(offsets[-1] - offsets[0])
    return np.frombuffer(buffer, np.uint8, count=count, offset=int(offsets[0]))


def lengths_of(array: pa.Array) -> Int64s:
    """Return the length in bytes of each value; 0 for a null."""
    lengths = np.diff(offsets_of(array)).astype(np.int64, copy=False)
    return np.where(nulls_of(array), 0, lengths) if array.null_count else lengths


def nulls_of(array: pa.Array) -> Mask:
    """Return a mask that is true where `array` is null."""
    if not array.null_count:
        return np.zeros(len(array), np.bool_)
    mask: Mask = array.is_null().to_numpy(zero_copy_only=False)
    return mask


def ints_of(array: pa.Array, null: int) -> Int64s:
    """Return an integer array as int64, with nulls replaced by `null`."""
    if array.null_count:
        array = array.fill_null(null)
    values: Int64s = array.to_numpy(zero_copy_only=False).astype(np.int64, copy=False)
    return values


def as_binary(array: pa.Array) -> pa.Array:
    """Return the array as binary (or large binary), without a copy."""
    if pa.types.is_string(array.type):
        return array.view(pa.binary())
    if pa.types.is_large_string(array.type):
        return array.view(pa.large_binary())
    return array


def binary_array(offsets: npt.NDArray[Any], data: pa.Buffer) -> pa.Array:
    """Return a binary array (large if the offsets are int64) over `data`, without a copy."""
    large = offsets.dtype == np.int64
    return pa.Array.from_buffers(
        pa.large_binary() if large else pa.binary(),
        len(offsets) - 1,
        [None, pa.py_buffer(np.ascontiguousarray(offsets)), data],
    )


def fixed_width(rows: npt.NDArray[Any]) -> pa.Array:
    """Return the bytes of each row of a C-contiguous array as a binary array; large binary if
    32-bit offsets cannot reach the end."""
    width = rows.nbytes // max(len(rows), 1)
    offsets = np.arange(len(rows) + 1, dtype=np.int64 if rows.nbytes > INT32_MAX else np.int32)
    offsets *= width
    return binary_array(offsets, pa.py_buffer(rows.view(np.uint8)))


Fixed: TypeAlias = npt.NDArray[Any]
Piece: TypeAlias = "bytes | Fixed | pa.Array"


def join_pieces(pieces: Sequence[Piece], count: int, nulls: str = "replace") -> pa.Array:
    """Join the pieces of each row, in order, to a binary value per row. `nulls`: "replace" takes a
    null in a column for an empty value; "emit_null" makes the row null. The result is large binary
    if it exceeds 32-bit offsets."""
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
    """Return fixed-width items if all values have one length and none is null; else the array."""
    lengths = lengths_of(array)
    if not len(lengths) or array.null_count or not lengths[0] or (lengths != lengths[0]).any():
        return array
    return bytes_of(array).view(f"V{lengths[0]}")


def _packed(pieces: Sequence[Piece], count: int) -> list[Piece]:
    """Return the pieces, after packing neighbouring bytes and fixed-width items into one piece."""
    packed: list[Piece] = []
    for is_array, run in itertools.groupby(pieces, lambda piece: isinstance(piece, pa.Array)):
        neighbours = list(run)
        packed += neighbours if is_array else _block(neighbours, count)
    if all(isinstance(piece, bytes) for piece in packed):
        text = b"".join(piece for piece in packed if isinstance(piece, bytes))
        # Repeat the text in a column: the join kernel takes the number of rows from a column.
        return [np.full(count, np.void(text)) if text else pa.nulls(count, pa.binary())]
    return packed


def _block(run: Sequence[bytes | Fixed], count: int) -> list[bytes | Fixed]:
    """Pack neighbouring pieces into one piece; return no piece if all are empty."""
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


def _items(rows: Fixed, width: int) -> Fixed:
    """Return the rows of a C-contiguous array as `width` opaque bytes each."""
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
