"""The content of a spool file: an Arrow IPC stream with the ledger's schema.

Each batch has in its custom metadata the CRC-32 of its buffers, as
they are in the file, begun with that of the batch before it, and the first one's with the columns'
names: so a batch that is missing, doubled or out of place shows as well as one that is changed.
Files of older versions have none; there only what the values look like can be checked.
"""

from __future__ import annotations

import contextlib
import struct
import zlib
from collections.abc import Iterable, Iterator
from typing import IO, TYPE_CHECKING, Any, Final

import pyarrow as pa

from rocket_sink.errors import DamagedSpoolError, LedgerError, Outcome
from rocket_sink.ledger.path import is_object_store
from rocket_sink.ledger.schema import (
    IN_FLIGHT,
    KINDS,
    LEDGER_SCHEMA,
    MOMENTS_US,
    REASONS,
    RESOLUTIONS,
)

if TYPE_CHECKING:
    from pyarrow import fs

_SCHEMA_MARK: Final = b"rocket-sink.checksums"
"""Schema metadata: all batches of the file have a checksum."""
_CRC: Final = b"rocket-sink.crc32"
_END: Final = b"\xff\xff\xff\xff\0\0\0\0"
"""Arrow's end-of-stream mark: without it a cut between two batches would look like an end."""
_MARK: Final = b"\xff\xff\xff\xff"
"""The first bytes of each Arrow message, that is of the schema and of each batch."""
_CHUNK: Final = 4 * 1024 * 1024

_TIMES: Final = ("at", "isolated_from", "isolated_until")
_ALWAYS: Final = ("kind", "at", "query_id", "run_id", "epoch")
_KNOWN: Final = {
    "outcome": (*(outcome.value for outcome in Outcome), IN_FLIGHT),
    "reason": REASONS,
    "resolution": RESOLUTIONS,
}
_NEVER_NEGATIVE: Final = (
    "epoch", "partition", "stage_id", "stage_attempt", "task_attempt_id", "attempt_number",
    "body_bytes", "request", "attempt", "message_count", "wire_bytes", "ordinal", "attempts",
    "generation", "rows_in", "acked", "degraded", "dead", "unknown", "filtered", "invalid",
    "held_back", "duplicates_possible", "found_stored", "requests", "moved_keys",
    "num_input_rows", "committed", "refused",
)  # fmt: skip


class BatchWriter:
    """Writes one file's stream. Closing it writes the end mark and leaves the file open."""

    def __init__(self, file: IO[bytes]) -> None:
        schema = LEDGER_SCHEMA.with_metadata({_SCHEMA_MARK: b"1"})
        self._stream = pa.ipc.new_stream(file, schema)
        self._crc = _first_crc(LEDGER_SCHEMA)

    def write(self, batch: pa.RecordBatch) -> None:
        # The batch is made as a reader gets it: slices are cut, and validity maps without nulls go.
        written = pa.ipc.read_record_batch(batch.serialize(), LEDGER_SCHEMA)
        self._crc = _next_crc(self._crc, written)
        self._stream.write_batch(written, custom_metadata={_CRC: str(self._crc)})

    def close(self) -> None:
        self._stream.close()


def is_whole(path: str, filesystem: fs.FileSystem) -> bool:
    """True when the file ends as a closed stream does; a dead owner's does not."""
    with filesystem.open_input_file(path) as file:
        size = file.size()
        return bool(size > len(_END) and file.read_at(len(_END), size - len(_END)) == _END)


def read_batches(path: str, filesystem: fs.FileSystem) -> Iterator[pa.RecordBatch]:
    """Yield the file's batches in today's schema; of a cut file all before the cut.

    Raises:
        DamagedSpoolError: the file holds something else than what was written, and is not only cut.
        LedgerError: it is of a newer rocket-sink, or its storage cannot be read.
        FileNotFoundError
    """
    # Arrow reads a stream in small parts, each of which would be a request to a store.
    buffer_bytes = _CHUNK if is_object_store(filesystem) else None
    with filesystem.open_input_stream(path, buffer_size=buffer_bytes) as stream:
        batches = checked_batches(stream, path)
        number = 0
        while True:
            try:
                batch = next(batches, None)
            except LedgerError:
                raise
            # Arrow raises what it likes: its own errors, OSError, ValueError, MemoryError.
            except Exception as error:
                _check_storage(path, filesystem)
                if is_whole(path, filesystem):
                    damage = "was written whole and is damaged"
                elif _goes_on(path, filesystem, number):
                    damage = "is not only cut: it is damaged before its last batch"
                else:
                    return
                raise DamagedSpoolError(
                    f"the spool file {path} {damage}: {_first_line(error)}", path=path
                ) from error
            if batch is None:
                return
            yield batch
            number += 1


def _goes_on(path: str, filesystem: fs.FileSystem, number: int) -> bool:
    """Whether a whole batch is anywhere behind the first `number` ones and what follows them.

    Behind a cut there is none. Where the next batch begins cannot be asked of a damaged one.
    """
    with filesystem.open_input_file(path) as file:
        data = file.read()
    stream, at = pa.BufferReader(data), 0
    with contextlib.suppress(pa.ArrowException, OSError, EOFError):
        for _ in range(1 + number):  # the schema comes first
            pa.ipc.read_message(stream)
            at = stream.tell()
    while (at := data.find(_MARK, at + 1)) >= 0:
        stream.seek(at)
        with contextlib.suppress(pa.ArrowException, OSError, EOFError):
            message = pa.ipc.read_message(stream)
            # The mark must be ours: the body of a dead letter may be an Arrow stream, too.
            if message.type == "record batch" and _CRC in message.metadata.to_pybytes():
                return True
    return False


def checked_batches(stream: Any, path: str) -> Iterator[pa.RecordBatch]:
    """Yield the batches of a closed stream in today's schema; errors name `path`.

    Raises:
        LedgerError: it is of a newer rocket-sink.
        pyarrow.ArrowInvalid: it is damaged, as far as Arrow does not raise something else.
    """
    reader = pa.ipc.open_stream(stream)
    has_checksums = _SCHEMA_MARK in (reader.schema.metadata or {})
    crc = _first_crc(reader.schema)
    while True:
        try:
            batch, metadata = reader.read_next_batch_with_custom_metadata()
        except StopIteration:
            break
        stored_crc = (metadata or {}).get(_CRC)
        if stored_crc is not None or has_checksums:
            crc = _next_crc(crc, batch)
            if stored_crc != str(crc).encode():
                raise pa.ArrowInvalid("the checksum of a batch is wrong")
        batch.validate(full=True)
        names = set(batch.schema.names)
        batch = _fitted(batch, path)
        _check_values(batch, names)
        if stored_crc is None:
            _check_old_values(batch)
        yield batch
    if stream.read(1):
        raise pa.ArrowInvalid("bytes follow the end of the stream")


def _first_crc(schema: pa.Schema) -> int:
    return zlib.crc32("\n".join(schema.names).encode())


def _next_crc(crc: int, batch: pa.RecordBatch) -> int:
    crc = zlib.crc32(struct.pack("<q", batch.num_rows), crc)
    for column in batch.columns:
        crc = zlib.crc32(struct.pack("<q", column.null_count), crc)
        for buffer in column.buffers():
            crc = zlib.crc32(struct.pack("<q", -1 if buffer is None else buffer.size), crc)
            if buffer is not None:
                crc = zlib.crc32(buffer, crc)
    return crc


def _check_values(batch: pa.RecordBatch, names: set[str]) -> None:
    """Check what readers of the table rely on; `names` are the columns that the file has.

    After a power cut, blocks that were never written read as zeros: nulls and empty texts.
    """
    import pyarrow.compute as pc

    _check_known(batch, "kind", KINDS)
    for name in _ALWAYS:
        if name in names and batch.column(name).null_count:
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


def _check_old_values(batch: pa.RecordBatch) -> None:
    """Refuse values that the versions without checksums cannot have written."""
    import pyarrow.compute as pc

    for name, values in _KNOWN.items():
        _check_known(batch, name, values)
    for name in _NEVER_NEGATIVE:
        least = pc.min(batch.column(name)).as_py()
        if least is not None and least < 0:
            raise pa.ArrowInvalid(f"{name} is negative")


def _check_known(batch: pa.RecordBatch, name: str, known: Iterable[str]) -> None:
    import pyarrow.compute as pc

    column = batch.column(name).drop_null()
    if not pc.all(pc.is_in(column, pa.array(known, pa.string())), min_count=0).as_py():
        raise pa.ArrowInvalid(f"{name} has a value that rocket-sink never writes")


def _fitted(batch: pa.RecordBatch, path: str) -> pa.RecordBatch:
    """Return the batch in `LEDGER_SCHEMA`; an older rocket-sink's columns are fewer."""
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    unknown = set(columns) - set(LEDGER_SCHEMA.names)
    if unknown:
        raise LedgerError(
            f"the spool file {path} has columns that this rocket-sink does not know "
            f"({', '.join(sorted(map(ascii, unknown)))}): it is of a newer version; fold with that "
            "one",
            path=path,
        )
    if len(columns) != batch.num_columns:
        raise pa.ArrowInvalid("two columns have one name")
    for field in LEDGER_SCHEMA:
        if field.name in columns and columns[field.name].type != field.type:
            raise pa.ArrowInvalid(f"{field.name} is of another type")
    arrays = [
        columns[field.name] if field.name in columns else pa.nulls(batch.num_rows, field.type)
        for field in LEDGER_SCHEMA
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=LEDGER_SCHEMA)


def _check_storage(path: str, filesystem: fs.FileSystem) -> None:
    """Tell damage from a file system that cannot be read now: Arrow has one error for both."""
    try:
        with filesystem.open_input_stream(path) as stream:
            while stream.read(_CHUNK):
                pass
    except FileNotFoundError:
        raise
    except OSError as error:
        raise LedgerError(f"the spool file {path} cannot be read: {error}", path=path) from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
