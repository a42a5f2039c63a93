"""Ids that a replay of an epoch gives to the same rows again (`delivery=effectively_once`).

A row's id is a 128-bit digest (BLAKE2b) of its message as it would be encoded, of query, epoch and
partition, and of its place among equal rows of its task. The partition is in it because two equal
rows in two partitions are two messages: with one id, the one that was stored would hide the other
that was not. So a replay that parts an epoch into other partitions makes other ids; a `message_id`
column of the row's own knows no partition.

The cost is one digest per row (about 0.8 us for 300 bytes) and 8 bytes of memory per row of the
task.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from typing import Any, Final, TypeAlias

import numpy as np
import pyarrow as pa

from rocket_sink.ledger.records import RunContext
from rocket_sink.spark.contract_rows import RowBatch
from rocket_sink.wire.columns import MessageColumns, encode_columns, hex_column
from rocket_sink.wire.columns_properties import property_pieces

UInt64s: TypeAlias = "np.ndarray[Any, np.dtype[np.uint64]]"
Int64s: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"

_BYTES: Final = 16
_SPREAD: Final = np.uint64(0x9E3779B97F4A7C15)
"""An odd number: its multiples differ, so equal rows get different ids."""


class ContentIds:
    """Makes the ids of one task; `rocket_sink.spark.task_ids.MessageIds`."""

    def __init__(self, ctx: RunContext) -> None:
        text = json.dumps([ctx.query_id, ctx.epoch, ctx.partition])
        self._base = hashlib.blake2b(text.encode(), digest_size=_BYTES)
        self._seen = _Seen()

    def ids(self, rows: RowBatch) -> pa.Array:
        digests = self._digests(rows).reshape(len(rows), _BYTES)
        halves = digests.view(np.uint64)
        ordinals = self._seen.ordinals(halves[:, 0])
        halves[:, 1] += ordinals.astype(np.uint64) * _SPREAD
        return hex_column(digests)

    def _digests(self, rows: RowBatch) -> np.ndarray[Any, np.dtype[np.uint8]]:
        assert isinstance(rows.topic, str)
        base = self._base.copy()
        base.update(rows.topic.encode() + b"\0")
        encoded = encode_columns(
            MessageColumns(
                rows.topic,
                rows.body,
                property_pieces(len(rows), **rows.property_columns()),
                0 if rows.flag is None else rows.flag,
            )
        )
        data, bounds, copy = memoryview(encoded.data), encoded.offsets.tolist(), base.copy
        digests = bytearray()
        for start, end in itertools.pairwise(bounds):
            one = copy()
            one.update(data[start:end])
            digests += one.digest()
        return np.frombuffer(digests, np.uint8)


class _Seen:
    """How often each digest came before; sorted runs that are merged as they grow."""

    def __init__(self) -> None:
        self._runs: list[UInt64s] = []

    def ordinals(self, digests: UInt64s) -> Int64s:
        """For each digest the number of equal ones before it, in this call and all before."""
        order = np.argsort(digests, kind="stable")
        ranked = digests[order]
        changes = np.flatnonzero(ranked[1:] != ranked[:-1]) + 1
        starts = np.concatenate(([0], changes)) if len(ranked) else changes
        found = np.arange(len(ranked)) - np.repeat(starts, np.diff([*starts, len(ranked)]))
        for run in self._runs:
            found += np.searchsorted(run, ranked, "right") - np.searchsorted(run, ranked, "left")
        ordinals = np.empty(len(ranked), np.int64)
        ordinals[order] = found
        self._keep(ranked)
        return ordinals

    def _keep(self, run: UInt64s) -> None:
        while self._runs and len(self._runs[-1]) <= 2 * len(run):
            run = np.sort(np.concatenate((self._runs.pop(), run)), kind="stable")
        self._runs.append(run)
