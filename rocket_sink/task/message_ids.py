"""The client message ids (`UNIQ_KEY`) of rows without a `message_id`.

`TaskIds` are for `delivery=at_least_once`. If another attempt of the task gets the same batches,
the rows get the same ids, so readers can recognise messages that are stored twice. An id is a
digest and the row's index in its batch. The digest covers the query (or batch write), the epoch,
the partition, and all rows of the task up to the end of the batch. So no two rows share an id, and
other rows or batches get other ids. The ids have the form of Java's (MessageClientIDSetter), with
the digest instead of address, process and class loader, and 0 for the milliseconds since the month
began. Tools therefore search from the start of the month (getNearlyTimeFromID).

`ContentIds` are for `delivery=effectively_once`, and for callers that cut batches by the clock.
They do not depend on batches, but take five times as long: about 0.8 us for a row of 300 bytes, and
8 bytes of memory per row until the task ends. An id is a 128-bit digest (BLAKE2b) of the encoded
message, the query, the epoch, the partition, and the number of equal rows before it in the task.
Without the partition, equal rows in two partitions would share an id, and a stored row would hide
that the other is missing. So a replay with other partitions makes other ids."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import socket
import struct
import time
from collections.abc import Iterator
from datetime import timezone
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
import pyarrow as pa

from rocket_sink.ledger.records import RunContext
from rocket_sink.net.identity import local_ip
from rocket_sink.routing.hashing import java_hash
from rocket_sink.rows.row_batch import RowBatch
from rocket_sink.wire.columns.buffers import Int64s, bytes_of, is_text, lengths_of, nulls_of
from rocket_sink.wire.columns.encode import hex_column, message_id_column
from rocket_sink.wire.ids import month_start_ms


class MessageIds(Protocol):
    """Makes ids for rows, in row order."""

    def ids(self, rows: RowBatch) -> pa.Array:
        """Return an id for each row. Callers use it only if the row has no `message_id`."""


class FreshIds:
    """Ids that are new in each attempt of a task, made as Java's client makes them. The `salt`
    differs between the tasks of a process (Java: the class loader's hash)."""

    def __init__(self, salt: str) -> None:
        self._address = socket.inet_aton(local_ip())
        self._salt = java_hash(salt)
        self._counter = 0

    def ids(self, rows: RowBatch) -> pa.Array:
        count, now_ms = len(rows), time.time_ns() // 1_000_000
        new_ids = message_id_column(
            ip=self._address, pid=os.getpid(), class_hash=self._salt,
            span_ms=now_ms - month_start_ms(now_ms, timezone.utc) + (self._counter >> 16),
            counter=self._counter, count=count,
        )  # fmt: skip
        self._counter += count
        return new_ids


TABLE_LANE: Final = "table"
"""`RunContext.lane` of a `TableProducer`."""
_NOBODY: Final = frozenset({"local", "unknown"})
"""Query ids of writes without a name (`run_context`)."""
_DIGEST_BYTES: Final = 16
_CHUNK: Final = 1 << 14
"""Number of words per step, so that they stay in the cache for both hashes."""
_HALF: Final = np.uint64(32)
_WEIGHTS: Final = np.random.Generator(np.random.PCG64(20_240_611)).integers(
    0, 1 << 64, (2, _CHUNK), np.uint64
) | np.uint64(1)
"""Random but fixed numbers: attempts on all machines must agree (numpy keeps PCG64's stream)."""


def task_ids(ctx: RunContext, *, timed: bool = False) -> MessageIds | None:
    """Return the source of a task's ids; None if the task needs `FreshIds`. A write without a name
    needs `FreshIds`, because another such write could make the same ids. A `TableProducer` uses
    `FreshIds`, because they cost less and no send is run again. With `timed`, batches are cut by
    the clock, so another attempt may get other batches."""
    if ctx.lane == TABLE_LANE:
        return None
    # Use the run's id for a batch write. All batch writes of a job have one query id (the appId),
    # but a second write of equal rows is no replay, so it needs other ids.
    write = ctx.run_id if ctx.lane == "batch" else ctx.query_id
    if write in _NOBODY:
        return None
    return ContentIds(ctx, dated=True) if timed else TaskIds(write, ctx.epoch, ctx.partition)


class TaskIds:
    """Ids of one task that depend on its batches (see the module)."""

    def __init__(self, write: str, epoch: int, partition: int | None) -> None:
        text = json.dumps([write, epoch, partition])
        self._state = _digest(text.encode()).digest()

    def ids(self, rows: RowBatch) -> pa.Array:
        state = _digest(self._state)
        state.update(str(rows.topic).encode())
        for name, column in rows.columns().items():
            state.update(f"\0{name}\0{len(column)}\0".encode())
            for part in _fingerprints(column):
                state.update(part)
        self._state = digest = state.digest()
        return message_id_column(
            ip=digest[:4], pid=int.from_bytes(digest[4:6], "big"),
            class_hash=int.from_bytes(digest[6:10], "big"), span_ms=0, counter=0, count=len(rows),
        )  # fmt: skip


def _digest(text: bytes) -> Any:
    return hashlib.blake2b(text, digest_size=_DIGEST_BYTES)


def _fingerprints(column: pa.Array) -> Iterator[bytes]:
    """Yield bytes that differ if the column's values differ."""
    if is_text(column.type):
        yield fingerprint(lengths_of(column).view(np.uint8))
        if column.null_count:
            yield np.packbits(nulls_of(column)).tobytes()
        yield fingerprint(bytes_of(column))
        return
    # Numbers, lists and maps are short compared with the bodies, so a digest is fast enough.
    batch = pa.RecordBatch.from_arrays([column], ["c"])
    yield _digest(batch.serialize().to_pybytes()).digest()


def fingerprint(data: np.ndarray[Any, np.dtype[np.uint8]]) -> bytes:
    """Return multilinear hashes modulo 2**64, which are much faster than a digest. Each chunk has
    two: the first is over its 64-bit words, the second over their upper halves. If two texts differ
    in the lower half of a word, the first hashes are equal with a chance of at most 2**-32. If they
    differ only in upper halves, the same holds for the second hashes. Equal hashes affect only ids
    of one task, and help no attacker."""
    words_end = len(data) & ~7
    words = data[:words_end].view(np.uint64)
    halves = np.empty(min(len(words), _CHUNK), np.uint64)
    sums = []
    for at in range(0, len(words), _CHUNK):
        part = words[at : at + _CHUNK]
        upper = np.right_shift(part, _HALF, out=halves[: len(part)])
        sums += [int(np.dot(part, _WEIGHTS[0, : len(part)]))]
        sums += [int(np.dot(upper, _WEIGHTS[1, : len(part)]))]
    packed = struct.pack(f"<{len(sums)}Q", *sums)
    return packed + struct.pack("<Q", len(data)) + data[words_end:].tobytes()


UInt64s: TypeAlias = "np.ndarray[Any, np.dtype[np.uint64]]"

_SPREAD: Final = np.uint64(0x9E3779B97F4A7C15)
"""An odd number. Its multiples modulo 2**64 all differ, so equal rows get different ids."""


class ContentIds:
    """Ids of one task that depend on the rows' contents (see the module). With `dated` the
    milliseconds since the month began are 0, as in `TaskIds`."""

    def __init__(self, ctx: RunContext, *, dated: bool = False) -> None:
        self._dated = dated
        text = json.dumps([ctx.query_id, ctx.epoch, ctx.partition])
        self._base = _digest(text.encode())
        self._runs: list[UInt64s] = []
        """Digests of earlier rows, in sorted arrays that are merged as they grow."""

    def ids(self, rows: RowBatch) -> pa.Array:
        digests = self._digests(rows).reshape(len(rows), _DIGEST_BYTES)
        halves = digests.view(np.uint64)
        ordinals = self._ordinals(halves[:, 0])
        halves[:, 0 if self._dated else 1] += ordinals.astype(np.uint64) * _SPREAD
        if self._dated:
            digests[:, 10:14] = 0
        return hex_column(digests)

    def _digests(self, rows: RowBatch) -> np.ndarray[Any, np.dtype[np.uint8]]:
        assert isinstance(rows.topic, str)
        base = self._base.copy()
        base.update(rows.topic.encode() + b"\0")
        encoded = rows.encoded_batch()
        data, bounds, copy = memoryview(encoded.data), encoded.offsets.tolist(), base.copy
        digests = bytearray()
        for start, end in itertools.pairwise(bounds):
            hasher = copy()
            hasher.update(data[start:end])
            digests += hasher.digest()
        return np.frombuffer(digests, np.uint8)

    def _ordinals(self, digests: UInt64s) -> Int64s:
        """Return the number of equal digests before each digest, in this and earlier calls."""
        order = np.argsort(digests, kind="stable")
        ranked = digests[order]
        changes = np.flatnonzero(ranked[1:] != ranked[:-1]) + 1
        starts = np.concatenate(([0], changes)) if len(ranked) else changes
        counts = np.arange(len(ranked)) - np.repeat(starts, np.diff([*starts, len(ranked)]))
        for run in self._runs:
            counts += np.searchsorted(run, ranked, "right") - np.searchsorted(run, ranked, "left")
        ordinals = np.empty(len(ranked), np.int64)
        ordinals[order] = counts
        self._keep(ranked)
        return ordinals

    def _keep(self, run: UInt64s) -> None:
        while self._runs and len(self._runs[-1]) <= 2 * len(run):
            run = np.sort(np.concatenate((self._runs.pop(), run)), kind="stable")
        self._runs.append(run)
