"""The content of a spool file: frames with checksums around Arrow record batches.

A frame has a header (mark, number, length of the content, checksum) and a content. The first frame
has random bytes and the names of the ledger's columns. Each further frame is a record batch. The
last frame has no content; its mark tells whether the attempt is complete.

Each checksum includes the frame's number and the checksum of the file's first frame. So a reader
notices a frame that is changed, missing, doubled, misplaced, or from another file. (A dead letter's
body may contain the bytes of another spool file.)"""

from __future__ import annotations

import re
import struct
import uuid
import zlib
from collections.abc import Iterator
from typing import IO, Any, Final

import pyarrow as pa
from pyarrow import fs

from rocket_sink.errors import DamagedSpoolError, LedgerError
from rocket_sink.ledger.path import first_line, is_object_store
from rocket_sink.ledger.schema import IN_FLIGHT, KINDS, LEDGER_SCHEMA, MOMENTS_US, SEND

_HEADER: Final = struct.Struct("<4sIQQ")
_SIZE: Final = _HEADER.size
_FIRST: Final = b"\xffRS0"
_BATCH: Final = b"\xffRS1"
_END: Final = b"\xffRS2"
_COMPLETE: Final = b"\xffRS3"
"""The last frame's mark if the attempt is complete: it has awaited all its answers."""
_MARKS: Final = re.compile(rb"\xffRS[0-3]")
_COLUMNS: Final = "\n".join(f"{f.name} {f.type}" for f in LEDGER_SCHEMA).encode()
_OTHER_COLUMNS: Final = "its columns are not those of the ledger"
_AT_ONCE: Final = 64 * 1024 * 1024
"""Size up to which a store's file is read by one request."""

_TIMES: Final = ("at", "isolated_from", "isolated_until")
_ALWAYS: Final = ("kind", "at", "query_id", "run_id", "epoch")


class BatchWriter:
    """Writes the content of one file. `close` writes the last frame, and leaves the file open."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._number = self._seed = 0
        self._end = _END
        self._seed = self._frame(_FIRST, uuid.uuid4().bytes + _COLUMNS)

    def write(self, batch: pa.RecordBatch) -> None:
        self._frame(_BATCH, batch.serialize())
        if batch.num_rows == 1 and batch.column("complete")[0].as_py():
            self._end = _COMPLETE

    def copy(self, content: bytes) -> None:
        """Write the batches of another file's content. Raise DamagedSpoolError if it was changed,
        or if another version of rocket-sink has written it."""
        name = "rows of a task"
        for number, frame, _ in _frames(name, pa.BufferReader(content), len(content)):
            if number > 0:
                self._frame(_BATCH, frame)
            elif frame.to_pybytes()[16:] != _COLUMNS:
                raise _damaged(name, _OTHER_COLUMNS)

    def close(self) -> None:
        self._frame(self._end, b"")

    def _frame(self, mark: bytes, content: Any) -> int:
        crc = _crc(self._seed, mark, self._number, content)
        self._file.write(_HEADER.pack(mark, self._number, len(content), crc))
        self._file.write(content)
        self._number += 1
        return crc


def is_whole(path: str, filesystem: fs.FileSystem) -> bool:
    """Return whether the file has its last frame, which is missing if its owner died."""
    with filesystem.open_input_file(path) as file:
        return _tail(file, file.size())[0] in (_END, _COMPLETE)


def read_batches(path: str, filesystem: fs.FileSystem) -> Iterator[pa.RecordBatch]:
    """Yield the file's batches, or those before the cut if the file was cut. If the attempt is
    complete, leave out rows about requests in flight, because each request has its answer.

    Raises:
        DamagedSpoolError: the content was changed, not only cut.
        LedgerError: the file cannot be read now.
        FileNotFoundError: the file is gone.
    """
    try:
        with filesystem.open_input_file(path) as file:
            size = file.size()
            if is_object_store(filesystem) and size <= _AT_ONCE:
                file = pa.BufferReader(file.read())
            is_complete = False
            for number, content, seed in _frames(path, file, size):
                if number == 0:
                    if content.to_pybytes()[16:] != _COLUMNS:
                        raise _damaged(path, _OTHER_COLUMNS)
                    mark, end, _, crc = _tail(file, size)
                    is_complete = mark == _COMPLETE and crc == _crc(seed, mark, end, b"")
                    file.seek(_SIZE + len(content))
                else:
                    yield _decoded(path, content, is_complete=is_complete)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise LedgerError(f"the spool file {path} cannot be read: {error}", path=path) from error


def _frames(path: str, file: Any, size: int) -> Iterator[tuple[int, pa.Buffer, int]]:
    """Yield (number, content, checksum of the first frame) of each frame before the last one. Stop
    at a damaged frame if no undamaged frame follows, because then the file was cut there."""
    seed = number = at = 0
    while at < size:
        mark, frame, length, crc = _unpacked(file.read(_SIZE))
        content = file.read_buffer(length) if frame == number and length <= size - at else b""
        is_sound = len(content) == length and crc == _crc(seed, mark, number, content)
        if not is_sound or (mark == _FIRST) != (number == 0):
            if _has_frame(file.read_at(size - at, at), seed):
                raise _damaged(path, f"byte {at} begins no frame, and frames follow")
            return
        at += _SIZE + length
        if mark in (_END, _COMPLETE):
            if at != size:
                raise _damaged(path, "bytes follow the end of the stream")
            return
        seed = crc if number == 0 else seed
        yield number, content, seed
        number += 1


def _has_frame(data: bytes, seed: int) -> bool:
    """Return whether an undamaged frame follows the first byte. While the first frame's checksum
    (`seed`) is unknown, a frame's mark is enough."""
    for match in _MARKS.finditer(data, 1):
        mark, number, length, crc = _unpacked(data[match.start() : match.start() + _SIZE])
        content = memoryview(data)[match.start() + _SIZE :][:length]
        if seed == 0 or (len(content) == length and crc == _crc(seed, mark, number, content)):
            return True
    return False


def _tail(file: Any, size: int) -> tuple[bytes, int, int, int]:
    """Return the header of a last frame without content; zeros if there is none."""
    header = _unpacked(file.read_at(_SIZE, size - _SIZE) if size > _SIZE else b"")
    return header if header[2] == 0 else (b"", 0, 0, 0)


def _unpacked(data: bytes) -> tuple[bytes, int, int, int]:
    mark, number, length, crc = _HEADER.unpack(data) if len(data) == _SIZE else (b"", 0, 0, 0)
    return mark, number, length, crc


def _crc(seed: int, mark: bytes, number: int, content: Any) -> int:
    return zlib.crc32(content, zlib.crc32(_HEADER.pack(mark, number, len(content), 0), seed))


def _decoded(path: str, content: pa.Buffer, *, is_complete: bool) -> pa.RecordBatch:
    import pyarrow.compute as pc

    try:
        batch = pa.ipc.read_record_batch(content, LEDGER_SCHEMA)
        batch.validate(full=True)
        _check_values(batch)
    # Arrow raises OSError, ValueError, MemoryError or its own errors.
    except Exception as error:
        raise _damaged(path, first_line(error)) from error
    if is_complete:
        is_send = pc.equal(batch.column("kind"), SEND)
        is_waiting = pc.and_(is_send, pc.equal(batch.column("outcome"), IN_FLIGHT))
        batch = batch.filter(pc.invert(pc.fill_null(is_waiting, False)))
    return batch


def _check_values(batch: pa.RecordBatch) -> None:
    import pyarrow.compute as pc

    kinds = batch.column("kind").drop_null()
    if not pc.all(pc.is_in(kinds, pa.array(KINDS)), min_count=0).as_py():
        raise pa.ArrowInvalid("kind has a value that rocket-sink never writes")
    for name in _ALWAYS:
        if batch.column(name).null_count:
            raise pa.ArrowInvalid(f"{name} is null")
    for name in _TIMES:
        bounds = pc.min_max(batch.column(name).cast(pa.int64())).as_py()
        if bounds["min"] is not None and (bounds["min"] < 0 or bounds["max"] > MOMENTS_US[1]):
            raise pa.ArrowInvalid(f"{name} is a time before 1970 or after 9999")
    for field in batch.schema:
        if pa.types.is_floating(field.type):
            finite = pc.is_finite(batch.column(field.name))
            if not pc.all(finite, min_count=0).as_py():
                raise pa.ArrowInvalid(f"{field.name} is not a finite number")


def _damaged(path: str, why: str) -> DamagedSpoolError:
    return DamagedSpoolError(f"the spool file {path} is damaged: {why}", path=path)
