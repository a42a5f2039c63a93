"""Arrow's variable-length arrays seen as numpy offsets and bytes, without copies.

Works on binary, string and their large forms, sliced or not. A null slot has the length 0 here,
whatever its offsets say: Arrow leaves the bytes under a null undefined.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Int64s: TypeAlias = npt.NDArray[np.int64]
Bytes: TypeAlias = npt.NDArray[np.uint8]
Mask: TypeAlias = npt.NDArray[np.bool_]

INT32_MAX: Final = 2**31 - 1


def is_text(kind: pa.DataType) -> bool:
    """True for string and large string (and binary: bytes that hold text)."""
    return kind in (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())


def offsets_of(array: pa.Array) -> npt.NDArray[Any]:
    """The n + 1 offsets of `array` into its values buffer (int32, or int64 for large types)."""
    large = pa.types.is_large_binary(array.type) or pa.types.is_large_string(array.type)
    buffer = array.buffers()[1]
    dtype = np.dtype(np.int64 if large else np.int32)
    if buffer is None or buffer.size == 0:
        return np.zeros(1, dtype)
    first = array.offset * dtype.itemsize
    return np.frombuffer(buffer, dtype, count=len(array) + 1, offset=first)


def bytes_of(array: pa.Array) -> Bytes:
    """The bytes between the first and the last offset of `array`."""
    offsets = offsets_of(array)
    buffer = array.buffers()[2]
    if buffer is None or buffer.size == 0:
        return np.zeros(0, np.uint8)
    count = int(offsets[-1] - offsets[0])
    return np.frombuffer(buffer, np.uint8, count=count, offset=int(offsets[0]))


def lengths_of(array: pa.Array) -> Int64s:
    """Bytes of each value; 0 for a null."""
    lengths = np.diff(offsets_of(array)).astype(np.int64, copy=False)
    return np.where(nulls_of(array), 0, lengths) if array.null_count else lengths


def nulls_of(array: pa.Array) -> Mask:
    """True where `array` is null."""
    if not array.null_count:
        return np.zeros(len(array), np.bool_)
    mask: Mask = array.is_null().to_numpy(zero_copy_only=False)
    return mask


def ints_of(array: pa.Array, null: int) -> Int64s:
    """An integer array as int64, with `null` in the place of nulls."""
    if array.null_count:
        array = array.fill_null(null)
    values: Int64s = array.to_numpy(zero_copy_only=False).astype(np.int64, copy=False)
    return values


def as_binary(array: pa.Array) -> pa.Array:
    """The same buffers with the type binary (or large binary): no copy, no check of UTF-8."""
    if pa.types.is_string(array.type):
        return array.view(pa.binary())
    if pa.types.is_large_string(array.type):
        return array.view(pa.large_binary())
    return array


def binary_array(offsets: npt.NDArray[Any], data: pa.Buffer) -> pa.Array:
    """A binary array (large if the offsets are int64) over `data`, without a copy."""
    large = offsets.dtype == np.int64
    return pa.Array.from_buffers(
        pa.large_binary() if large else pa.binary(),
        len(offsets) - 1,
        [None, pa.py_buffer(np.ascontiguousarray(offsets)), data],
    )


def fixed_width(rows: npt.NDArray[Any]) -> pa.Array:
    """The rows of a C-contiguous array as a binary array, each as wide as one row's bytes.

    Large binary when 32-bit offsets cannot reach the end.
    """
    width = rows.nbytes // max(len(rows), 1)
    offsets = np.arange(len(rows) + 1, dtype=np.int64 if rows.nbytes > INT32_MAX else np.int32)
    offsets *= width
    return binary_array(offsets, pa.py_buffer(rows.view(np.uint8)))
