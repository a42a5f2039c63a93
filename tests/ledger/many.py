"""A ledger of very many send rows, made by columns: files of a million rows, each added often."""

import datetime as dt
import json
import os
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rocket_sink.ledger.records import in_order
from rocket_sink.ledger.schema import EPOCH, LEDGER_SCHEMA, SEND, columns_of

from .night import store
from .values import confirmed, context

QUERY: Final = "0a1b2c3d-4e5f-4a6b-8c7d-9e0f1a2b3c4d"
START: Final = dt.datetime(2026, 3, 1, tzinfo=dt.timezone.utc)
REQUESTS: Final = 100
"""The requests of a task attempt."""
PARTITIONS: Final = 10
_FILES: Final = {
    kind: pa.schema([LEDGER_SCHEMA.field(name) for name in columns_of(kind)])
    for kind in (EPOCH, SEND)
}
"""The schemas of the files that folds write, by kind."""


def many(folder: Path, *, rows: int, per_file: int = 1_000_000, distinct: int = 20) -> str:
    """Make a ledger with send rows: half before the answers, half answers, as the foreach lane.

    After `distinct` files the same files follow again under other names.
    """
    epochs_per_file = per_file // 2 // REQUESTS // PARTITIONS
    files = rows // per_file
    folder.mkdir(exist_ok=True)
    path = store(folder, in_order([confirmed(context(query_id=QUERY), 0)], 1 << 32))
    _write_epochs(folder / "kind=epoch", min(files, distinct) * epochs_per_file)
    adds = [_add(folder, "kind=epoch/accounts.parquet", "epoch")]
    for number in range(files):
        name = f"kind=send/part-{number:05d}.parquet"
        file = folder / name
        file.parent.mkdir(exist_ok=True)
        if number < distinct:
            _write(file, number, per_file, epochs_per_file)
        else:
            os.link(folder / f"kind=send/part-{number % distinct:05d}.parquet", file)
        adds.append(_add(folder, name, "send"))
    log = folder / "_delta_log" / f"{2:020}.json"
    log.write_text("\n".join(map(json.dumps, adds)))
    return path


def _add(folder: Path, name: str, kind: str) -> dict[str, Any]:
    return {"add": {
        "path": name, "partitionValues": {"kind": kind}, "size": (folder / name).stat().st_size,
        "modificationTime": 0, "dataChange": True,
    }}  # fmt: skip


def _write_epochs(folder: Path, epochs: int) -> None:
    """Write an account per task, and a confirmation per epoch."""
    tasks = np.arange(epochs * PARTITIONS)
    count = len(tasks) + epochs
    is_task = np.arange(count) < len(tasks)
    epoch = np.concatenate([tasks // PARTITIONS, np.arange(epochs)])
    rows = np.where(is_task, 50 * REQUESTS, 50 * REQUESTS * PARTITIONS)
    columns = {
        "at": pa.array(_moments(epoch, 6_000_000), pa.timestamp("us", tz="UTC")),
        "query_id": _same(QUERY, count), "run_id": _same("run-1", count), "epoch": epoch,
        "partition": pa.array(np.arange(count) % PARTITIONS, mask=~is_task),
        "task_attempt_id": pa.array(np.arange(count), mask=~is_task),
        "worker": _same("host:1", count), "lane": _same("foreach", count),
        "sequence": np.full(count, 1 << 32), "rows_in": rows, "num_input_rows": rows,
        "acked": pa.array(rows, mask=~is_task), "complete": pa.array(is_task, mask=~is_task),
    }  # fmt: skip
    folder.mkdir(exist_ok=True)
    arrays = [_column(columns.get(field.name), field, count) for field in _FILES[EPOCH]]
    accounts = pa.Table.from_arrays(arrays, schema=_FILES[EPOCH])
    pq.write_table(accounts, folder / "accounts.parquet")


def _moments(epoch: Any, later_us: Any) -> Any:
    return int(START.timestamp() * 1e6) + epoch * 10_000_000 + later_us


def _write(file: Path, number: int, rows: int, epochs: int) -> None:
    rng = np.random.default_rng(number)
    half = rows // 2
    request = np.arange(half) % REQUESTS + 1
    task = np.arange(half) // REQUESTS + number * epochs * PARTITIONS
    epoch = task // PARTITIONS
    failed = rng.random(half) < 0.001
    broker = rng.integers(0, 8, half)
    both: dict[str, Any] = {
        "at": pa.array(_moments(epoch, request * 50_000), pa.timestamp("us", tz="UTC")),
        "query_id": _same(QUERY, half), "run_id": _same("run-1", half), "epoch": epoch,
        "partition": (task % PARTITIONS).astype(np.int32), "task_attempt_id": task,
        "worker": _same("host:1", half), "lane": _same("foreach", half),
        "topic": _names("topic", rng.integers(0, 4, half)), "request": request,
        "message_count": np.full(half, 50, np.int32), "body_bytes": np.full(half, 20_000),
        "message_id": pa.array(np.char.add("0A0000", (task * REQUESTS + request).astype(str))),
    }  # fmt: skip
    answered = both | {
        "outcome": pa.array(np.where(failed, "unknown", "acked")),
        "broker_name": _names("broker", broker), "attempt": np.ones(half, np.int32),
        "queue_id": rng.integers(0, 8, half), "queue_wait_ms": rng.exponential(2.0, half),
        "connect_ms": np.zeros(half), "rtt_ms": rng.lognormal(1.6, 0.6, half),
        "wire_bytes": np.full(half, 21_000),
        "response_code": pa.array(np.zeros(half), pa.int32(), mask=failed),
        "error_code": pa.array(np.where(failed, "REQUEST_TIMEOUT", ""), mask=~failed),
    }  # fmt: skip
    waiting = both | {"outcome": _same("in_flight", half)}
    schema = _FILES[SEND]
    with pq.ParquetWriter(file, schema, compression="snappy") as writer:
        for columns in (waiting, answered):
            arrays = [_column(columns.get(field.name), field, half) for field in schema]
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema), row_group_size=100_000)


def _column(value: Any, field: pa.Field, count: int) -> pa.Array:
    if value is None:
        return pa.nulls(count, field.type)
    array = value if isinstance(value, pa.Array) else pa.array(value)
    return array.cast(field.type)


def _same(text: str, count: int) -> pa.Array:
    return pa.repeat(pa.scalar(text), count)


def _names(what: str, numbers: Any) -> pa.Array:
    names = pa.array([f"{what}-{n}" for n in range(8)])
    return names.take(pa.array(numbers))
