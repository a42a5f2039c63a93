"""Client message ids (`UNIQ_KEY`) for a whole column, as Java makes them one by one.

Source: MessageClientIDSetter.createUniqID. 4 bytes of address (16 for IPv6), 2 of process id, 4 of
class loader hash, 4 of milliseconds since the month began, 2 of a counter, as upper-case hex.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import pyarrow as pa

from rocket_sink.wire.columns_buffers import INT32_MAX, Int64s

_HEX: Final = np.frombuffer(b"0123456789ABCDEF", np.uint8)
_NTP_STEP_MS: Final = 1_000_000
"""A clock set back by less than this counts as 0 (MessageClientIDSetter)."""


def _hex_of_16_bits() -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    numbers = np.arange(1 << 16)
    digits = np.stack([_HEX[numbers >> shift & 15] for shift in (12, 8, 4, 0)], axis=1)
    return np.ascontiguousarray(digits).view(np.uint32).ravel()


_HEX_16: Final = _hex_of_16_bits()


def message_id_column(
    *, ip: bytes, pid: int, class_hash: int, start_ms: int, now_ms: int, counter: int, count: int
) -> pa.StringArray:
    """`count` ids that follow each other, the first with `counter`.

    The counter wraps at 65,536 as Java's short does; where it wraps inside the column the time part
    moves on by 1 ms, so that the ids of one column differ (Java's would repeat within the
    millisecond). The caller adds `count` to its counter.
    """
    fixed = (
        ip
        + (pid & 0xFFFF).to_bytes(2, "big")
        + (class_hash & 0xFFFFFFFF).to_bytes(4, "big")
    )  # fmt: skip
    counters: Int64s = np.arange(count, dtype=np.int64) + (counter & 0xFFFF)
    times = _span_ms(start_ms, now_ms) + (counters >> 16)
    prefix = np.frombuffer(fixed.hex().upper().encode(), np.uint8)
    words = len(prefix) // 4
    rows = np.empty((count, words + 3), np.uint32)
    rows[:, :words] = prefix.view(np.uint32)
    rows[:, words] = _HEX_16[times >> 16 & 0xFFFF]
    rows[:, words + 1] = _HEX_16[times & 0xFFFF]
    rows[:, words + 2] = _HEX_16[counters & 0xFFFF]
    width = rows.shape[1] * 4
    if count * width > INT32_MAX:
        raise ValueError(f"{count} ids do not fit one Arrow string array")
    offsets = np.arange(0, (count + 1) * width, width, dtype=np.int32)
    return pa.StringArray.from_buffers(count, pa.py_buffer(offsets), pa.py_buffer(rows))


def _span_ms(start_ms: int, now_ms: int) -> int:
    span = now_ms - start_ms
    return 0 if -_NTP_STEP_MS < span < 0 else span


def hex_column(digests: np.ndarray[tuple[int, int], np.dtype[np.uint8]]) -> pa.StringArray:
    """Rows of bytes (an even number of them) as upper-case hex, as message ids are written."""
    words = np.ascontiguousarray(digests).view(">u2")
    text = _HEX_16[words]
    width = text.shape[1] * 4
    if text.nbytes > INT32_MAX:
        raise ValueError(f"{len(text)} ids do not fit one Arrow string array")
    offsets = np.arange(0, (len(text) + 1) * width, width, dtype=np.int32)
    return pa.StringArray.from_buffers(len(text), pa.py_buffer(offsets), pa.py_buffer(text))
