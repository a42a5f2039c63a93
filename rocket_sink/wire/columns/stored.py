"""The stored messages of pull answers as columns (`rocket_sink.wire.stored` has the layout).

Only four lengths in a message vary. So a loop over the sizes gives the starts of the messages, and
numpy gathers each field of all messages at once. Variable fields are cut out by Arrow: an array has
the fields and the gaps between them as values, without a copy, and `take` copies the fields.

`StoredColumns.regular` marks the messages that have columns. The caller decodes the others one by
one (`iter_stored`): inner batches, hosts with IPv6 addresses, topics of more than 127 bytes, text
that is not UTF-8, properties that repeat or that a killed broker has torn, and malformed messages,
for which `iter_stored` raises the error."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rocket_sink.wire.codes import SysFlag
from rocket_sink.wire.columns.buffers import Int64s, Mask, bytes_of, fixed_width, offsets_of
from rocket_sink.wire.headers import Limits
from rocket_sink.wire.stored import MAGIC_V1, inflated_body

_FIXED: Final = np.dtype(
    [
        ("size", ">i4"), ("magic", ">i4"), ("body_crc", ">i4"), ("queue_id", ">i4"),
        ("flag", ">i4"), ("queue_offset", ">i8"), ("commit_log_offset", ">i8"),
        ("sys_flag", ">i4"), ("born_ms", ">i8"), ("born_host", "V8"), ("store_ms", ">i8"),
        ("store_host", "V8"), ("reconsume_times", ">i4"), ("prepared_offset", ">i8"),
        ("body_length", ">i4"),
    ]
)  # fmt: skip
"""The fields before the body, with hosts of 4 bytes."""
_LEAST_BYTES: Final = _FIXED.itemsize + 3
"""The size of a message without a body, a topic and properties."""
_IRREGULAR_FLAGS: Final = SysFlag.BORNHOST_V6 | SysFlag.STOREHOST_V6 | SysFlag.INNER_BATCH
_HEX: Final = np.array([f"{byte:02X}".encode() for byte in range(256)])
_VALUE_BEGIN, _PAIR_END = 1, 2


@dataclass(frozen=True, eq=False)
class StoredColumns:
    """Messages that lie one after the other in `data`.

    Attributes:
        bounds: the positions of the messages, and the end of the last one. It is before the end of
            `data` if a malformed size follows.
        fixed: the fields of `_FIXED` of each message.
        regular: whether the columns hold the message. They hold any values for others.
        properties: the properties of all messages.
    """

    data: bytes
    bounds: Int64s
    fixed: npt.NDArray[Any]
    regular: Mask
    properties: PropertyTable
    topics: pa.Array
    _cuts: npt.NDArray[np.int32]
    """The start and the end of body, topic and properties of each message."""

    @classmethod
    def of(cls, data: bytes) -> StoredColumns:
        bounds = _message_bounds(data)
        starts, ends = bounds[:-1], bounds[1:]
        windows = np.ndarray(max(0, len(data) - _FIXED.itemsize + 1), _FIXED, data, 0, (1,))
        fixed = windows[starts]
        octets = np.frombuffer(data, np.uint8)
        length = fixed["body_length"].astype(np.int64)
        is_plain = fixed["sys_flag"].astype(np.int32) & _IRREGULAR_FLAGS == 0
        regular = is_plain & (fixed["magic"] == MAGIC_V1) & (length >= 0)
        regular &= starts + _LEAST_BYTES + length <= ends
        body = starts + _FIXED.itemsize
        body_end = body + np.where(regular, length, 0)
        topic_end = body_end + 1 + octets[body_end]
        regular &= topic_end + 2 <= ends
        topic_end = np.where(regular, topic_end, body_end + 1)
        text = topic_end + 2
        text_end = text + (octets[topic_end].astype(np.int64) << 8 | octets[topic_end + 1])
        regular &= text_end <= ends
        text_end = np.where(regular, text_end, text)
        # Zeros at the end of the properties mean that they are torn.
        regular &= (text_end == text) | (octets[text_end - 1] != 0)
        cuts = np.stack((body, body_end, body_end + 1, topic_end, text, text_end), axis=1)
        cuts = cuts.astype(np.int32)
        parts = _parts(cuts, data, pa.binary())
        topics, is_text = _as_text(parts.take(pa.array(_every(6, 2, len(fixed)))))
        texts, more = _as_text(parts.take(pa.array(_every(6, 4, len(fixed)))))
        table = PropertyTable.of(texts)
        regular &= is_text & more & ~table.repeats
        return cls(data, bounds, fixed, regular, table, topics, cuts)

    def __len__(self) -> int:
        return len(self.fixed)

    def bodies(self, begin: int, end: int) -> tuple[pa.Array, int]:
        """Return the inflated bodies from message `begin` on, and the message after the last one:
        `end`, or an earlier one if more bodies would exceed `Limits.POLL_BYTES`. Raise like
        `inflated_body`."""
        parts = _parts(self._cuts[begin:end, :2], self.data, pa.binary())
        stored = parts.take(pa.array(_every(2, 0, end - begin)))
        fixed = self.fixed[begin:end]
        packed = (fixed["sys_flag"] & SysFlag.COMPRESSED != 0) & (fixed["body_length"] > 0)
        inflated: list[bytes] = []
        room_bytes, size = Limits.POLL_BYTES - len(self.data), 0
        for row in np.flatnonzero(packed).tolist():
            body = inflated_body(
                stored[row].as_py(), int(fixed["sys_flag"][row]), self.topics[begin + row].as_py(),
                int(fixed["queue_id"][row]), int(fixed["queue_offset"][row]),
            )  # fmt: skip
            size += len(body)
            if size > room_bytes and inflated:
                stored, packed, end = stored[:row], packed[:row], begin + row
                break
            inflated.append(body)
        if not inflated:
            return stored, end
        bodies = pa.array(inflated, pa.binary())
        if len(bodies) == len(stored):
            return bodies, end
        return pc.replace_with_mask(stored, pa.array(packed), bodies), end

    def offset_message_ids(self) -> pa.Array:
        """Return the brokers' ids (`ids.offset_message_id`) in a string array."""
        fields = np.empty(len(self), [("host", "V8"), ("offset", ">i8")])
        fields["host"] = self.fixed["store_host"]
        fields["offset"] = self.fixed["commit_log_offset"]
        octets = fields.view(np.uint8).reshape(len(self), 16)
        return fixed_width(_HEX[octets]).view(pa.string())


@dataclass(frozen=True, eq=False)
class PropertyTable:
    """The properties of n messages, pair by pair. Incomplete pairs are left out, as
    `decode_properties` does.

    Attributes:
        names: the different names.
        codes: the index of each pair's name in `names`.
        repeats: whether a message has a name twice.
    """

    names: list[str]
    codes: npt.NDArray[np.int32]
    repeats: Mask
    _rows: Int64s
    """The message of each pair."""
    _parts: pa.Array
    """Four texts per pair: the name, a separator, the value, a separator."""

    @classmethod
    def of(cls, texts: pa.Array) -> PropertyTable:
        """Read the wire texts (string, without nulls) of the messages."""
        octets, rows = bytes_of(texts), offsets_of(texts)
        if (octets[rows[1:][np.diff(rows) > 0] - 1] != _PAIR_END).any():
            # The separator after the last pair is optional. An empty pair is incomplete.
            end = chr(_PAIR_END)
            texts = pc.binary_join_element_wise(texts, end, "")
            octets, rows = bytes_of(texts), offsets_of(texts)
        ends = np.flatnonzero(octets == _PAIR_END)
        begins = np.concatenate(([0], ends[:-1] + 1))[: len(ends)]
        bounds = np.searchsorted(ends, rows)
        marks = np.flatnonzero(octets == _VALUE_BEGIN)
        if len(marks) != len(ends) or ((marks < begins) | (marks > ends)).any():
            marks = np.append(marks, len(octets))[np.searchsorted(marks, begins)]
        complete = (begins < marks) & (marks + 1 < ends)
        if not complete.all():
            bounds = np.concatenate(([0], np.cumsum(complete)))[bounds]
            begins, marks, ends = begins[complete], marks[complete], ends[complete]
        cuts = np.stack((begins, marks, marks + 1, ends), axis=1).astype(np.int32)
        parts = _parts(cuts, octets, pa.string())
        encoded = parts.take(pa.array(_every(4, 0, len(ends)))).dictionary_encode()
        codes, names = encoded.indices.to_numpy(), encoded.dictionary.to_pylist()
        of_rows = np.repeat(np.arange(len(texts)), np.diff(bounds))
        cells, sizes = np.unique(of_rows * len(names) + codes, return_counts=True)
        repeats = np.zeros(len(texts), np.bool_)
        repeats[cells[sizes > 1] // max(len(names), 1)] = True
        return cls(names, codes, repeats, of_rows, parts)

    def texts(self, name: str) -> pa.Array:
        """Return the values of a property, null where a message does not have the property."""
        pairs = self._pairs(np.array([each == name for each in self.names], np.bool_))
        cells = np.full(len(self.repeats), -1)
        cells[self._rows[pairs]] = 4 * pairs + 2
        return self._parts.take(pa.array(cells, mask=cells < 0))

    def maps(self, takes: Callable[[str], bool]) -> pa.Array:
        """Return the properties whose names `takes` accepts, in their order, as a map for each
        message; null if it has none."""
        pairs = self._pairs(np.array([takes(name) for name in self.names], np.bool_))
        counts = np.bincount(self._rows[pairs], minlength=len(self.repeats))
        bounds = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        return pa.MapArray.from_arrays(
            pa.array(bounds, mask=np.append(counts == 0, [False])),
            self._parts.take(pa.array(4 * pairs)),
            self._parts.take(pa.array(4 * pairs + 2)),
        )

    def _pairs(self, takes: Mask) -> Int64s:
        """Return the pairs whose names are chosen by their codes."""
        return np.flatnonzero(takes[self.codes] if len(takes) else self.codes)


def _message_bounds(data: bytes) -> Int64s:
    end, at, size_at = len(data), 0, struct.Struct(">i").unpack_from
    bounds = [0]
    while at <= end - _LEAST_BYTES:
        (size,) = size_at(data, at)
        if not _LEAST_BYTES <= size <= end - at:
            break
        at += size
        bounds.append(at)
    return np.array(bounds, np.int64)


def _parts(cuts: npt.NDArray[np.int32], data: Any, kind: pa.DataType) -> pa.Array:
    """Return the fields between the cuts, in ascending order, and the gaps between the fields."""
    if not cuts.size:
        return pa.array([], kind)
    offsets = pa.py_buffer(np.ascontiguousarray(cuts))
    return pa.Array.from_buffers(kind, cuts.size - 1, [None, offsets, pa.py_buffer(data)])


def _every(step: int, first: int, count: int) -> Int64s:
    return np.arange(first, step * count, step)


def _as_text(values: pa.Array) -> tuple[pa.Array, Mask]:
    """Return binary values as strings, and whether each one is UTF-8; other values get empty."""
    is_text = np.ones(len(values), np.bool_)
    try:
        return values.cast(pa.string()), is_text
    except pa.ArrowInvalid:
        texts = [value.decode("utf-8", "ignore") for value in values.to_pylist()]
        pairs = zip(texts, values.to_pylist(), strict=True)
        is_text[:] = [text.encode() == value for text, value in pairs]
        return pa.array(texts, pa.string()), is_text
