"""The client message ids (`UNIQ_KEY`) of rows that bring none.

The one place where a row's identity is decided: a strategy that repeats the ids of a replayed
epoch (`delivery=effectively_once`) is another class with the same method.
"""

from __future__ import annotations

import calendar
import os
import socket
import time
from typing import Protocol

import pyarrow as pa

from rocket_sink.routing.hashing import java_hash
from rocket_sink.spark.contract_rows import RowBatch
from rocket_sink.wire.columns import message_id_column


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
        self._address = _local_address()
        self._salt = java_hash(salt)
        self._month_ms = _start_of_month_ms()
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


def _start_of_month_ms() -> int:
    now = time.gmtime()
    return calendar.timegm((now.tm_year, now.tm_mon, 1, 0, 0, 0)) * 1000


def _local_address() -> bytes:
    """The address that packets to elsewhere would leave from; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("10.255.255.255", 1))
            return socket.inet_aton(probe.getsockname()[0])
        except OSError:
            return socket.inet_aton("127.0.0.1")
