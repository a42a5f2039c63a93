"""Columns of messages to the bytes of batch requests, without work per row.

Each message is encoded in the inner form of a batch (MessageDecoder.encodeMessage)::

    total size   int32     all that follows and itself
    magic code   int32     0
    body CRC     int32     0
    flag         int32
    body length  int32
    body
    properties   int16     length in bytes, at most 32,767
    properties

so that any run of rows of an `EncodedBatch` is the body of one SEND_BATCH_MESSAGE request: a slice
of one buffer, written without a copy. Values are checked before (`rocket_sink.spark.checks`); the
only limit looked at here is the one that would corrupt the frame, the properties' int16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import pyarrow as pa

from rocket_sink.errors import LocalProtocolError
from rocket_sink.lazy import lazy
from rocket_sink.message_rules import PROPERTIES_MAX_BYTES
from rocket_sink.wire.columns_buffers import Int64s, ints_of, lengths_of, offsets_of
from rocket_sink.wire.columns_cut import QueueGroups, RequestSlice, cut_requests, group_by_queue
from rocket_sink.wire.columns_ids import message_id_column
from rocket_sink.wire.columns_join import join_pieces
from rocket_sink.wire.columns_properties import (
    PropertyPieces,
    property_column,
    property_pieces,
)

__all__ = [
    "EncodedBatch",
    "MessageColumns",
    "PropertyPieces",
    "QueueGroups",
    "RequestSlice",
    "cut_requests",
    "encode_columns",
    "group_by_queue",
    "message_id_column",
    "property_column",
    "property_pieces",
]

_FRAME_BYTES: Final = 22
"""What an encoded message has beside its body and properties."""
Flags: TypeAlias = "int | pa.Array"


@dataclass(frozen=True)
class MessageColumns:
    """What the encoder needs of n messages of one topic; no nulls but in `flags` (0).

    `body` is binary or large binary (string types count as their UTF-8 bytes), `properties` the
    wire property strings of `property_column`, or faster the pieces of `property_pieces`.
    """

    topic: str
    body: pa.Array
    properties: pa.Array | PropertyPieces
    flags: Flags = 0


@dataclass(frozen=True, eq=False)
class EncodedBatch:
    """n encoded messages one after the other in one buffer."""

    messages: pa.Array
    """Binary or large binary, without nulls."""

    def __len__(self) -> int:
        return len(self.messages)

    @lazy
    def offsets(self) -> Int64s:
        """n + 1 offsets into `data`."""
        return offsets_of(self.messages).astype(np.int64, copy=False)

    @lazy
    def data(self) -> pa.Buffer:
        """The buffer that `offsets` point into."""
        return self.messages.buffers()[2] or pa.py_buffer(b"")

    def body(self, first: int, last: int) -> memoryview:
        """The request body that holds the messages `first` to `last` (exclusive); no copy."""
        return memoryview(self.data)[int(self.offsets[first]) : int(self.offsets[last])]

    def take(self, groups: QueueGroups) -> EncodedBatch:
        """The messages in the order of `groups`."""
        if groups.sorted_already:
            return self
        return EncodedBatch(self.messages.take(pa.array(groups.order)))


def encode_columns(columns: MessageColumns) -> EncodedBatch:
    """Encode all messages, in their order.

    Raises:
        LocalProtocolError: a property string is longer than its int16 length can say.
    """
    properties = columns.properties
    if isinstance(properties, pa.Array):
        properties = PropertyPieces((properties,), lengths_of(properties))
    longest = int(properties.sizes.max(initial=0))
    if longest > PROPERTIES_MAX_BYTES:
        raise LocalProtocolError(
            f"properties of {longest} bytes; the limit is {PROPERTIES_MAX_BYTES}",
            size=longest, limit=PROPERTIES_MAX_BYTES,
        )  # fmt: skip
    body_bytes = lengths_of(columns.body)
    head = np.zeros((len(body_bytes), 5), ">i4")
    head[:, 0] = body_bytes + properties.sizes + _FRAME_BYTES
    head[:, 3] = columns.flags if isinstance(columns.flags, int) else ints_of(columns.flags, 0)
    head[:, 4] = body_bytes
    property_bytes = properties.sizes.astype(">i2")
    pieces = (head, columns.body, property_bytes, *properties.pieces)
    return EncodedBatch(join_pieces(pieces, len(head)))
