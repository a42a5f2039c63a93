"""The client message ids (`UNIQ_KEY`) of rows that bring none.

The one place where a row's identity is decided: a strategy that repeats the ids of a replayed
epoch (`delivery=effectively_once`) is another class with the same method.
"""

from __future__ import annotations

import os
import socket
import time
from datetime import timezone
from typing import Protocol

import pyarrow as pa

from rocket_sink.producer.identity import local_ip
from rocket_sink.routing.hashing import java_hash
from rocket_sink.spark.contract_rows import RowBatch
from rocket_sink.wire.columns import message_id_column
from rocket_sink.wire.ids import month_start_ms


class MessageIds(Protocol):
    """Makes ids for rows, in row order."""

    def ids(self, rows: RowBatch) -> pa.Array:
        """One id per row; rows that have a `message_id` of their own keep that instead."""


class FreshIds:
    """Ids that are new in each attempt of a task, made as Java's client makes them.

    Args:
        salt: tells two tasks of one process apart (Java: the class loader's hash), so that ids
            of one process and one millisecond differ.
    """

    def __init__(self, salt: str) -> None:
        self._address = socket.inet_aton(local_ip())
        self._salt = java_hash(salt)
        self._month_ms = month_start_ms(time.time_ns() // 1_000_000, timezone.utc)
        self._counter = 0

    def ids(self, rows: RowBatch) -> pa.Array:
        count = len(rows)
        made = message_id_column(
            ip=self._address,
            pid=os.getpid(),
            class_hash=self._salt,
            start_ms=self._month_ms,
            now_ms=int(time.time() * 1000) + (self._counter >> 16),
            counter=self._counter,
            count=count,
        )
        self._counter += count
        return made
