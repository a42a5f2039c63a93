"""Memory of what waits for a stuck queue: bounded, whatever the input; the rest goes to a file.

A waiting request is at first a slice of its batch's buffer. That keeps the whole batch alive, most
of which is sent long ago, so after some more batches what still waits is copied out: into memory
up to a limit, beyond it into a temporary file. A sink that keeps up never copies anything.
"""

from __future__ import annotations

import os
import tempfile
from collections import deque
from typing import IO, Final

import pyarrow as pa

from rocket_sink.spark.pending import Parked, PendingRequest, Piece
from rocket_sink.spark.sorting import scratch_folder

_BATCHES_KEPT: Final = 2
"""Input batches that waiting requests may keep alive."""


class Overflow:
    """Where waiting requests are kept.

    Args:
        memory_bytes: limit of the copies in memory.
    """

    def __init__(self, memory_bytes: int) -> None:
        self._limit = memory_bytes
        self._in_memory = 0
        self._batches: deque[list[PendingRequest]] = deque([[]])
        self._file: IO[bytes] | None = None

    def park(self, request: PendingRequest) -> None:
        """A request begins to wait."""
        request.parked = Parked.SLICE
        self._batches[-1].append(request)

    def next_batch(self) -> None:
        """A new input batch begins; copy out what has waited for too long."""
        self._batches.append([])
        if len(self._batches) > _BATCHES_KEPT:
            for request in self._batches.popleft():
                if request.parked is Parked.SLICE:
                    self._copy_out(request)

    def bring_back(self, request: PendingRequest) -> None:
        """A request ends to wait: its bytes are in memory afterwards."""
        if request.parked is Parked.FILE:
            request.pieces = [self._read(piece) for piece in request.pieces]
        elif request.parked is Parked.COPY:
            self._in_memory -= request.byte_count
        request.parked = Parked.NOT

    def close(self) -> None:
        """Give the file back."""
        self._batches.clear()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _copy_out(self, request: PendingRequest) -> None:
        if self._in_memory + request.byte_count <= self._limit:
            request.pieces = [piece.detached() for piece in request.pieces]
            request.parked = Parked.COPY
            self._in_memory += request.byte_count
        else:
            request.pieces = [self._written(piece) for piece in request.pieces]
            request.parked = Parked.FILE

    def _written(self, piece: Piece) -> Piece:
        if self._file is None:
            # The file has no name, so a killed worker leaves nothing behind.
            self._file = tempfile.TemporaryFile(  # noqa: SIM115 (closed by close())
                prefix="rocket-sink-", dir=scratch_folder()
            )
        position = self._file.seek(0, os.SEEK_END)
        self._file.write(piece.body)
        return Piece(pa.py_buffer(b""), piece.offsets - piece.offsets[0] + position)

    def _read(self, piece: Piece) -> Piece:
        assert self._file is not None
        self._file.seek(int(piece.offsets[0]))
        return Piece(
            pa.py_buffer(self._file.read(piece.byte_count)), piece.offsets - piece.offsets[0]
        )
