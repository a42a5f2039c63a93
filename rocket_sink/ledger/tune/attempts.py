"""The recorded attempts of a ledger, newest first up to a limit, as columns for the replay."""
# ruff: noqa: S608 (the texts are of our own names; what users give is checked or hexadecimal)

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rocket_sink import errors
from rocket_sink.ledger.sql import BROKER, GROUP_SHARES, STORED, Scoped

_REQUEST: Final = "concat_ws('/', run_id, epoch, partition, task_attempt_id, worker, request)"
_ORDER: Final = (
    "at_us", "nth", "broker", "worker", "request", "wait_ms", "rtt_ms", "messages"
)  # fmt: skip
"""Order of the attempts: complete, because engines return equal rows in any order and a replay must
give the same result each time."""
_GROUP: Final = tuple(column for column, _ in GROUP_SHARES if column != "rtt_ms")


@dataclass(frozen=True)
class Attempts:
    """Attempts by the time of their start, as arrays of one length; only the names are lists.

    Attributes:
        start_s: seconds since 1970, float64.
        wait_ms, rtt_ms: until the request was on the wire, and from there to its end, float64.
        group_ms: (p50, p95, p99) of a group's answers, NaN for one request; float64, n by 3.
        messages, bytes, frames: int64.
        broker, host: indices into `brokers` and `hosts`. Workers of a host share one fault table.
        stored: acknowledged.
        isolates: a failure for which the broker is isolated.
        request: number of the request, the same for its attempts; -1: the only one, stored.
    """

    start_s: Any
    wait_ms: Any
    rtt_ms: Any
    group_ms: Any
    messages: Any
    bytes: Any
    frames: Any
    broker: Any
    host: Any
    stored: Any
    isolates: Any
    request: Any
    brokers: Sequence[str]
    hosts: Sequence[str]

    def __len__(self) -> int:
        return len(self.start_s)


def read_attempts(read: Scoped, limit: int) -> Attempts:
    """Return the newest `limit` attempts of the scope, without waits of strict queues."""
    table = read.table(
        f"""SELECT unix_micros(at) AS at_us, worker, {BROKER} AS broker,
            coalesce(message_count, 0) AS messages, coalesce(body_bytes, 0) AS bytes,
            coalesce(frames, 1) AS frames, coalesce(queue_wait_ms, 0) AS wait_ms,
            coalesce(rtt_ms, 0) AS rtt_ms, coalesce(attempt, 1) AS nth,
            {", ".join(_GROUP)}, {STORED} AS stored, error_code,
            CASE WHEN attempt > 1 OR NOT {STORED} THEN {_REQUEST} END AS request
        FROM answered
        WHERE broker_name <> '' AND coalesce(wire_bytes, 1) > 0 AND {read.where}
        ORDER BY at DESC LIMIT {limit}"""
    )
    keys = [(name, "ascending") for name in _ORDER]
    table = table.take(pc.sort_indices(table, keys)).combine_chunks()
    broker, request = (pc.dictionary_encode(table[name]) for name in ("broker", "request"))
    # A worker is `host:pid`.
    hosts = pc.replace_substring_regex(pc.fill_null(table["worker"], ""), r":\d+$", "")
    host = pc.dictionary_encode(hosts)
    codes = table["error_code"]
    return Attempts(
        start_s=_floats(table, "at_us") / 1e6,
        wait_ms=_floats(table, "wait_ms"),
        rtt_ms=_floats(table, "rtt_ms"),
        group_ms=np.column_stack([_floats(table, name) for name in _GROUP]),
        messages=_floats(table, "messages").astype("int64"),
        bytes=_floats(table, "bytes").astype("int64"),
        frames=_floats(table, "frames").astype("int64"),
        broker=_indices(broker),
        host=_indices(host),
        stored=table["stored"].to_numpy(zero_copy_only=False).astype(bool),
        isolates=pc.is_in(codes, value_set=pa.array(sorted(_isolating()))).to_numpy(),
        request=_indices(request),
        brokers=_names(broker),
        hosts=_names(host),
    )


def _isolating() -> set[str]:
    """Return the codes of failures for which a broker is to blame."""
    kinds = [errors.SendError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    return {kind.code for kind in kinds if kind.isolates is errors.Isolate.BROKER}


def _floats(table: pa.Table, name: str) -> Any:
    return table[name].cast(pa.float64()).to_numpy()


def _indices(encoded: pa.ChunkedArray) -> Any:
    if not len(encoded):
        return np.zeros(0, "int64")
    return pc.fill_null(encoded.combine_chunks().indices.cast(pa.int64()), -1).to_numpy()


def _names(encoded: pa.ChunkedArray) -> list[str]:
    return encoded.combine_chunks().dictionary.to_pylist() if len(encoded) else []
