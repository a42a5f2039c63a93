"""The content of a spool file: a stream as `pyarrow.ipc.new_stream` writes it, and a seal.

The seal is Arrow's end of a stream, a byte that is 1 if the attempt is complete (it has awaited all
its answers), and the CRC32 of all bytes before. Each batch has the CRC32 of all bytes before it as
custom metadata. So the next batch or the seal shows that bytes are changed, missing, doubled or
misplaced.

`flush` writes a seal that the next batch overwrites. So only a file that was cut in the middle of a
write has no seal. After a power cut its last blocks may be zeros, also those in the middle of a
batch. So the last batch of such a file counts only if a byte other than zero follows it."""

from __future__ import annotations

import io
import re
import zlib
from collections.abc import Iterator
from typing import IO, Any, Final

import pyarrow as pa
from pyarrow import fs

from rocket_sink.errors import DamagedSpoolError, LedgerError
from rocket_sink.ledger.path import failing, first_line, is_object_store
from rocket_sink.ledger.schema import IN_FLIGHT, KINDS, LEDGER_SCHEMA, SEND

_END: Final = b"\xff\xff\xff\xff\0\0\0\0"
_SEAL_SIZE: Final = len(_END) + 5
_CRC: Final = b"crc32"
_PIECES: Final = 64 * 1024
"""Size of the buffer that gathers the hundreds of small pieces in which Arrow writes a batch."""
_AT_ONCE: Final = 64 * 1024 * 1024
"""Size up to which a store's file is read by one request."""


class BatchWriter:
    """Writes the content of one file, which it leaves open."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._summed = _Summed(file)
        self._pieces = pa.output_stream(self._summed, buffer_size=_PIECES)
        self._stream = pa.ipc.new_stream(self._pieces, LEDGER_SCHEMA)
        self._is_complete = False

    def write(self, batch: pa.RecordBatch) -> None:
        self._stream.write_batch(batch, custom_metadata={_CRC: f"{self._summed.crc:010d}"})
        self._pieces.flush()
        if batch.num_rows == 1 and batch["complete"][0].as_py():
            self._is_complete = True

    def copy(self, content: bytes) -> None:
        """Write the batches of another file. Raise DamagedSpoolError if its content was changed."""
        for batch in _batches("rows of a task", pa.BufferReader(content)):
            self.write(batch)
        self._is_complete = False  # The file may get rows of an incomplete attempt, too.

    def flush(self) -> None:
        """Hand all batches to the system, with a seal that the next batch overwrites."""
        self._file.write(_seal(b"\1" if self._is_complete else b"\0", self._summed.crc))
        self._file.flush()
        self._file.seek(-_SEAL_SIZE, io.SEEK_CUR)


class _Summed:
    """A file that Arrow writes or reads in turn; `crc` is the CRC32 of the bytes so far."""

    closed = False

    def __init__(self, file: Any, path: str = "") -> None:
        self._file = file
        self._path = path
        self.crc = 0

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self.crc = zlib.crc32(data, self.crc)

    def read(self, size: int) -> bytes:
        # Errors of the storage become LedgerErrors, in contrast to Arrow's errors about the bytes.
        with failing(f"the spool file {self._path} cannot be read", self._path):
            # A damaged length must not ask for more memory than the file has bytes.
            data: bytes = self._file.read(min(size, self._file.size() - self._file.tell()))
        self.crc = zlib.crc32(data, self.crc)
        return data

    def flush(self) -> None:
        """Do nothing: `BatchWriter.flush` flushes the file."""

    close = flush


def _seal(state: bytes, crc: int) -> bytes:
    """Return the seal that follows bytes with the CRC32 `crc`."""
    return _END + state + zlib.crc32(_END + state, crc).to_bytes(4, "little")


def _state(file: Any) -> bytes:
    """Return the state in the file's seal; empty if the file has no seal."""
    seal = file.read_at(_SEAL_SIZE, max(0, file.size() - _SEAL_SIZE))
    return bytes(seal[8:9]) if seal.startswith(_END) else b""


def read_batches(path: str, filesystem: fs.FileSystem) -> Iterator[pa.RecordBatch]:
    """Yield the file's batches, or those before the cut if the file was cut. If the attempt is
    complete, leave out rows about requests in flight, because each request has its answer. Columns
    that the file lacks are null, and columns that the ledger lacks are left out.

    Raises:
        DamagedSpoolError: the content was changed, not only cut.
        LedgerError: the file cannot be read now, also for lack of memory.
        FileNotFoundError: the file is gone.
    """
    try:
        with filesystem.open_input_file(path) as file:
            if is_object_store(filesystem) and file.size() <= _AT_ONCE:
                file = pa.BufferReader(file.read())
            yield from _batches(path, file)
    except FileNotFoundError:
        raise
    except (OSError, MemoryError) as error:
        text = f"the spool file {path} cannot be read: {first_line(error)}"
        raise LedgerError(text, path=path) from error


def _batches(path: str, file: Any) -> Iterator[pa.RecordBatch]:
    is_complete = _state(file) == b"\1"
    file.seek(0)
    summed = _Summed(file, path)
    last: pa.RecordBatch | None = None
    crc = end = 0  # Arrow writes the schema together with the first batch.
    try:
        stream = pa.ipc.open_stream(pa.PythonFile(summed, mode="r"))
        while True:
            batch, metadata = stream.read_next_batch_with_custom_metadata()
            if metadata[_CRC] != b"%010d" % crc:
                raise _damaged(path, f"the bytes before byte {end} have another checksum")
            rows = _ledger_rows(batch, is_complete=is_complete)
            if last is not None:
                yield last
            last, crc, end = rows, summed.crc, file.tell()
    except (LedgerError, MemoryError):
        raise
    except StopIteration:
        why = f"no seal follows byte {end}"
    except Exception as error:  # Arrow raises OSError, ValueError or its own errors.
        why = first_line(error)
    after = file.tell() - end
    file.seek(end)
    tail = file.read()
    is_sealed = tail.startswith(_seal(tail[8:9], crc)) and not tail[_SEAL_SIZE:].strip(b"\0")
    # A live task may have overwritten the seal since, so look for the seal again.
    if not is_sealed and (_state(file) or len(tail[after:].rstrip(b"\0")) >= _SEAL_SIZE):
        raise _damaged(path, why)
    # The header of a batch that was cut may be whole: then it names the bytes before it.
    checksums = re.findall(rb"\d{10}", tail[: 8 + int.from_bytes(tail[4:8], "little")])
    if checksums and b"%010d" % crc not in checksums:
        raise _damaged(path, f"the bytes before byte {end} have another checksum")
    if last is not None and tail.strip(b"\0"):
        yield last


def _ledger_rows(batch: pa.RecordBatch, *, is_complete: bool) -> pa.RecordBatch:
    """Return checked rows with the ledger's columns. Raise an error of Arrow."""
    import pyarrow.compute as pc

    batch.validate(full=True)
    if not batch.schema.equals(LEDGER_SCHEMA):
        tables = [LEDGER_SCHEMA.empty_table(), pa.Table.from_batches([batch])]
        table = pa.concat_tables(tables, promote_options="default").select(LEDGER_SCHEMA.names)
        [batch] = table.combine_chunks().to_batches()
    if not set(batch["kind"].unique().to_pylist()).issubset(KINDS):
        raise pa.ArrowInvalid("kind has a value that rocket-sink never writes")
    if is_complete:
        is_waiting = pc.and_(pc.equal(batch["kind"], SEND), pc.equal(batch["outcome"], IN_FLIGHT))
        batch = batch.filter(pc.invert(pc.fill_null(is_waiting, False)))
    return batch


def _damaged(path: str, why: str) -> DamagedSpoolError:
    return DamagedSpoolError(f"the spool file {path} is damaged: {why}", path=path)
