"""The spool: a task attempt's ledger rows on their way to the driver's fold.

On a local (or mounted) file system rows are appended to an `.open` file as they come, so what a
killed worker wrote is found by the next fold. Object stores know neither appends nor renames: there
rows gather in a local temporary file and go up as one object per `seal`, and a killed worker's
rows are lost with its host's temporary file.

    <ledger>/_spool/<query id>/<epoch>/<partition>-<task attempt>-<number>-<unique>~<owner>.open
    the same, renamed to .arrow                        sealed, by its owner or for a dead owner
    <ledger>/_spool/_quarantine/...                    the same, put aside because it is damaged

On object stores, where files come sealed, the epoch stands before the partition: a folder there is
an object that stays, and cannot be removed without a risk for a file that is just being written.

A file's number is one above those of all files of its epoch that were there when it was made: so a
fold knows which of two runs' files is the later one, whatever their clocks say.

Each is an Arrow IPC stream with the schema of the rocket-sink that wrote it. A rename decides who
has a file: an owner that lives and finds its file taken fails its task, so that no row written
after the taking is lost silently.

Each batch has in its custom metadata the CRC-32 of its buffers, as
they are in the file, begun with that of the batch before it, and the first one's with the columns'
names: so a batch that is missing, doubled or out of place shows as well as one that is changed.
Files of older versions have none; there only what the values look like can be checked.
"""

from __future__ import annotations

import contextlib
import os
import struct
import tempfile
import time
import uuid
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

import pyarrow as pa

from rocket_sink.errors import DamagedSpoolError, LedgerError, Outcome
from rocket_sink.ledger.notes import fsync_folder
from rocket_sink.ledger.path import PARTIAL, LedgerPath, path_part, resolve_path
from rocket_sink.ledger.records import RunContext
from rocket_sink.ledger.schema import IN_FLIGHT, KINDS, LEDGER_SCHEMA, REASONS, RESOLUTIONS
from rocket_sink.owner import Owner, this_process

if TYPE_CHECKING:
    from pyarrow import fs


OPEN: Final = ".open"
SEALED: Final = ".arrow"

_KEPT_FOLDERS: Final = 2
STALE_AFTER_S: Final = 3600.0
"""An open file of another host that was not written to for so long has lost its owner."""


def new_name(ctx: RunContext, number: int = 1, *, folders: bool = True) -> str:
    """`<query>/<epoch>/<file>` without the state, unique; without `folders` one level less."""
    partition = "driver" if ctx.partition is None else ctx.partition
    task = "" if ctx.task_attempt_id is None else ctx.task_attempt_id
    file = f"{partition}-{task}-{number}-{uuid.uuid4().hex}~{this_process()}"
    return f"{_part(ctx.query_id)}/{ctx.epoch}{'/' if folders else '-'}{file}"


def next_number(ctx: RunContext, place: LedgerPath, filesystem: fs.FileSystem) -> int:
    """The number of a new file of the epoch.

    Raises:
        OSError: the folder cannot be listed.
    """
    from pyarrow import fs

    folder, start = f"{place.spool}/{_part(ctx.query_id)}", f"{ctx.epoch}-"
    if place.is_local:
        folder, start = f"{folder}/{ctx.epoch}", ""
    selector = fs.FileSelector(folder, allow_not_found=True)
    try:
        infos = filesystem.get_file_info(selector)
    except FileNotFoundError:
        # Arrow looks whether the folder is there after it could not list it: another task of the
        # epoch has made it in between.
        infos = filesystem.get_file_info(selector)
    names = [info.base_name for info in infos if info.base_name.startswith(start)]
    return 1 + max(map(_number, names), default=0)


def _number(name: str) -> int:
    """0 of a file of an older rocket-sink."""
    parts = name.partition("~")[0].split("-")
    return int(parts[-2]) if len(parts) >= 4 and parts[-2].isdigit() else 0


def _part(text: str) -> str:
    """`text` as one component of a path; never one that starts with `_`, `.` or is empty."""
    return "q-" + path_part(text)


def sealed_files(place: LedgerPath, filesystem: fs.FileSystem) -> list[fs.FileInfo]:
    """All sealed files; takes the open files whose owners are gone on the way.

    Query by query; a query's by epoch, and an epoch's in the order in which they were begun.
    """
    found = []
    for info in _files(place, filesystem):
        if info.extension == SEALED[1:]:
            found.append(info)
        elif info.extension == OPEN[1:] and _is_abandoned(info):
            found += _take(info, filesystem)
    first_ns: dict[str, int] = {}
    for info in found:
        query, _ = _epoch(info)
        first_ns[query] = min(info.mtime_ns or 0, first_ns.get(query, info.mtime_ns or 0))
    return sorted(found, key=lambda info: (first_ns[_epoch(info)[0]], *_order_in_query(info)))


def _order_in_query(info: fs.FileInfo) -> tuple[str, int, int, int, str]:
    query, epoch = _epoch(info)
    number = int(epoch) if epoch.isdigit() else -1
    return query, number, _number(info.base_name), info.mtime_ns or 0, info.path


def open_files(place: LedgerPath, filesystem: fs.FileSystem, *, query: str) -> list[fs.FileInfo]:
    """Files that their owners still write, of queries whose id starts with `query`."""
    start = f"{place.spool}/{_part(query)}"
    return [
        info
        for info in _files(place, filesystem)
        if info.path.startswith(start) and info.extension == OPEN[1:] and not _is_abandoned(info)
    ]


def waiting_epochs(place: LedgerPath, filesystem: fs.FileSystem) -> int:
    """Epochs with files, sealed or still written; nothing is taken."""
    return len({_epoch(info) for info in _files(place, filesystem)})


def _epoch(info: fs.FileInfo) -> tuple[str, str]:
    """The query's folder and the epoch."""
    folder = info.path.rpartition("/")[0]
    above, _, last = folder.rpartition("/")
    return (folder, info.base_name.partition("-")[0]) if last.startswith("q-") else (above, last)


def quarantined(place: LedgerPath, filesystem: fs.FileSystem) -> list[str]:
    """Paths of the damaged files that folds have put aside."""
    from pyarrow import fs

    selector = fs.FileSelector(place.quarantine, recursive=True, allow_not_found=True)
    return sorted(info.path for info in filesystem.get_file_info(selector) if info.is_file)


def put_aside(place: LedgerPath, filesystem: fs.FileSystem, path: str) -> str:
    """Move a damaged file out of the folds' way; returns where it is now."""
    target = place.quarantine + path.removeprefix(place.spool)
    filesystem.create_dir(target.rpartition("/")[0], recursive=True)
    filesystem.move(path, target)
    return target


def drop_empty_folders(place: LedgerPath, filesystem: fs.FileSystem) -> None:
    """Remove the epochs' folders that an older version left on an object store.

    Not the newest ones of a query: a task of that version may just be writing to them.
    """
    from pyarrow import fs

    infos = filesystem.get_file_info(fs.FileSelector(place.spool, recursive=True))
    used = {info.path.rpartition("/")[0] for info in infos if info.is_file}
    epochs: dict[str, list[int]] = {}
    for info in infos:
        query, _, epoch = info.path.removeprefix(f"{place.spool}/").partition("/")
        if not info.is_file and query.startswith("q-") and epoch.isdigit():
            epochs.setdefault(query, []).append(int(epoch))
    for query, numbers in epochs.items():
        for epoch in sorted(numbers)[:-_KEPT_FOLDERS]:
            folder = f"{place.spool}/{query}/{epoch}"
            if folder not in used:
                with contextlib.suppress(OSError):
                    filesystem.delete_dir(folder)


def _files(place: LedgerPath, filesystem: fs.FileSystem) -> Iterator[fs.FileInfo]:
    from pyarrow import fs

    selector = fs.FileSelector(place.spool, recursive=True, allow_not_found=True)
    try:
        infos = filesystem.get_file_info(selector)
    except OSError as error:
        raise LedgerError(f"cannot list the spool {place.spool}: {error}") from error
    start = f"{place.spool}/q-"
    found = (info for info in infos if info.is_file and info.path.startswith(start))
    return _not_linked(place, found) if place.is_local else found


def _not_linked(place: LedgerPath, infos: Iterable[fs.FileInfo]) -> Iterator[fs.FileInfo]:
    """Leave out what is elsewhere: a fold deletes what it has taken."""
    spool = os.path.realpath(place.spool)
    folders: dict[str, bool] = {}
    for info in infos:
        folder = info.path.rpartition("/")[0]
        if folder not in folders:
            own = spool + folder.removeprefix(place.spool)
            folders[folder] = os.path.realpath(folder) == own
        if folders[folder] and not Path(info.path).is_symlink():
            yield info


def _is_abandoned(info: fs.FileInfo) -> bool:
    owner = Owner.parse(info.base_name.removesuffix(OPEN).partition("~")[2])
    alive = owner.is_alive() if owner else None
    if alive is not None:
        return not alive
    age_s = time.time() - (info.mtime_ns or time.time_ns()) / 1e9
    return age_s > STALE_AFTER_S


def _take(info: fs.FileInfo, filesystem: fs.FileSystem) -> list[fs.FileInfo]:
    target = info.path.removesuffix(OPEN) + SEALED
    try:
        filesystem.move(info.path, target)
    except FileNotFoundError:
        return []  # its owner, or another fold, was faster
    taken = filesystem.get_file_info(target)
    return [taken] if taken.is_file else []


_SCHEMA_MARK: Final = b"rocket-sink.checksums"
"""Schema metadata: all batches of the file have a checksum."""
_CRC: Final = b"rocket-sink.crc32"
_END: Final = b"\xff\xff\xff\xff\0\0\0\0"
"""Arrow's end-of-stream mark: without it a cut between two batches would look like an end."""
_CHUNK: Final = 4 * 1024 * 1024

_TIMES: Final = ("at", "isolated_from", "isolated_until")
_LATEST_US: Final = 253_402_300_799_999_999
"""The end of the year 9999, the last one that Python's datetime has."""
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
        # As a reader gets it: slices are cut, and validity maps without a null are left out.
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
    """The file's batches in today's schema; of a cut file all whole ones.

    Raises:
        DamagedSpoolError: a file that was closed holds something else than what was written.
        LedgerError: it is of a newer rocket-sink, or its storage cannot be read.
        FileNotFoundError
    """
    whole = is_whole(path, filesystem)
    with filesystem.open_input_stream(path) as stream:
        found = _checked(stream, path)
        while True:
            try:
                batch = next(found, None)
            except LedgerError:
                raise
            # Arrow raises what it likes: its own errors, OSError, ValueError, MemoryError.
            except Exception as error:
                if not whole:
                    return
                _check_storage(path, filesystem)
                raise DamagedSpoolError(
                    f"the spool file {path} was written whole and is damaged: {_first_line(error)}",
                    path=path,
                ) from error
            if batch is None:
                return
            yield batch


def _checked(stream: Any, path: str) -> Iterator[pa.RecordBatch]:
    reader = pa.ipc.open_stream(stream)
    has_checksums = _SCHEMA_MARK in (reader.schema.metadata or {})
    crc = _first_crc(reader.schema)
    while True:
        try:
            batch, metadata = reader.read_next_batch_with_custom_metadata()
        except StopIteration:
            break
        given = (metadata or {}).get(_CRC)
        if given is not None or has_checksums:
            crc = _next_crc(crc, batch)
            if given != str(crc).encode():
                raise pa.ArrowInvalid("the checksum of a batch is wrong")
        batch.validate(full=True)
        names = set(batch.schema.names)
        batch = _fitted(batch, path)
        _check_values(batch, names)
        if given is None:
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
    """What readers of the table rely on; `names` are the columns that the file has.

    After a power cut, blocks that were never written read as zeros: nulls and empty texts.
    """
    import pyarrow.compute as pc

    _check_known(batch, "kind", KINDS)
    for name in _ALWAYS:
        if name in names and batch.column(name).null_count:
            raise pa.ArrowInvalid(f"{name} is null")
    for name in _TIMES:
        bounds = pc.min_max(batch.column(name).cast(pa.int64())).as_py()
        if bounds["min"] is not None and (bounds["min"] < 0 or bounds["max"] > _LATEST_US):
            raise pa.ArrowInvalid(f"{name} is a time before 1970 or after 9999")
    for field in batch.schema:
        if pa.types.is_floating(field.type):
            finite = pc.is_finite(batch.column(field.name))
            if not pc.all(finite, min_count=0).as_py():
                raise pa.ArrowInvalid(f"{field.name} is not a finite number")


def _check_old_values(batch: pa.RecordBatch) -> None:
    """What the versions without checksums wrote, and no other text and no other sign."""
    import pyarrow.compute as pc

    for name, known in _KNOWN.items():
        _check_known(batch, name, known)
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
    """The batch in `LEDGER_SCHEMA`; an older rocket-sink's columns are fewer."""
    found = dict(zip(batch.schema.names, batch.columns, strict=True))
    unknown = set(found) - set(LEDGER_SCHEMA.names)
    if unknown:
        raise LedgerError(
            f"the spool file {path} has columns that this rocket-sink does not know "
            f"({', '.join(sorted(map(ascii, unknown)))}): it is of a newer version; fold with that "
            "one",
            path=path,
        )
    if len(found) != batch.num_columns:
        raise pa.ArrowInvalid("two columns have one name")
    for field in LEDGER_SCHEMA:
        if field.name in found and found[field.name].type != field.type:
            raise pa.ArrowInvalid(f"{field.name} is of another type")
    arrays = [
        found[field.name] if field.name in found else pa.nulls(batch.num_rows, field.type)
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


_MKDIR_TRIES: Final = 20


class SpoolWriter:
    """One task attempt's rows, in one Arrow stream file under `<ledger>/_spool`.

    The file is made by the first `append`; after a `seal` the next one makes another. For one
    thread of one process.

    Args:
        ledger_path: absolute, or a URI (`Ledger(path).uri`, made on the driver).

    Raises from `append`, `sync` and `seal`:
        LedgerError: the file cannot be written, or a fold has taken it (this process was thought
            dead): the task must fail, for rows may be missing.
    """

    def __init__(self, ledger_path: str | LedgerPath, ctx: RunContext) -> None:
        self._place = (
            ledger_path if isinstance(ledger_path, LedgerPath) else resolve_path(ledger_path)
        )
        self._ctx = ctx
        self._file: IO[bytes] | None = None
        self._stream: BatchWriter | None = None
        self._path = ""
        self._name = ""
        self.rows = 0
        """Appended over the writer's life."""

    def append(self, *batches: pa.RecordBatch) -> None:
        """Write rows; they outlive a kill of this process, not a crash of the machine."""
        with self._errors():
            for batch in batches:
                if batch.num_rows:
                    self._opened().write(batch)
                    self.rows += batch.num_rows
            if self._file is not None:
                self._file.flush()

    def sync(self) -> None:
        """Make all that was appended durable; the file stays open (remote: it is sealed)."""
        if not self._place.is_local:
            self.seal()
            return
        with self._errors():
            if self._file is not None:
                self._file.flush()
                os.fsync(self._file.fileno())
                fsync_folder(Path(self._path).parent)

    def seal(self) -> str | None:
        """Make the rows durable and hand them to the folds.

        Returns the file's path in the ledger's file system, None when there was nothing to seal.
        """
        if self._file is None or self._stream is None:
            return None
        with self._errors():
            self._stream.close()
            self._file.flush()
            if self._place.is_local:
                return self._seal_local(self._file)
            return self._upload(self._file)

    def abort(self) -> None:
        """End a failed attempt: its rows are facts and are kept. Never raises; idempotent."""
        with contextlib.suppress(Exception):
            self.seal()

    def _opened(self) -> BatchWriter:
        if self._stream is None:
            number = next_number(self._ctx, self._place, self._place.filesystem())
            self._name = new_name(self._ctx, number, folders=self._place.is_local)
            if self._place.is_local:
                self._path = f"{self._place.spool}/{self._name}{OPEN}"
                self._file = _create(Path(self._path))
            else:
                handle = tempfile.NamedTemporaryFile(prefix="rocket-sink-", suffix=OPEN)  # noqa: SIM115
                self._path, self._file = handle.name, handle
            self._stream = BatchWriter(self._file)
        return self._stream

    def _seal_local(self, file: IO[bytes]) -> str:
        os.fsync(file.fileno())
        sealed = self._path.removesuffix(OPEN) + SEALED
        Path(self._path).rename(sealed)
        # A fold may have taken the sealed file, and removed the folder, by now.
        with contextlib.suppress(FileNotFoundError):
            fsync_folder(Path(sealed).parent)
        self._forget()
        return sealed

    def _upload(self, file: IO[bytes]) -> str:
        remote = self._place.filesystem()
        sealed = f"{self._place.spool}/{self._name}{SEALED}"
        # Object stores show an object when it is whole; elsewhere a rename does that.
        whole_at_once = remote.type_name in ("s3", "gcs", "abfs")
        target = sealed if whole_at_once else sealed + PARTIAL
        remote.create_dir(sealed.rpartition("/")[0], recursive=True)
        file.seek(0)
        with remote.open_output_stream(target) as out:
            while chunk := file.read(_CHUNK):
                out.write(chunk)
        if not whole_at_once:
            remote.move(target, sealed)
        self._forget()
        return sealed

    def _forget(self) -> None:
        file, self._file, self._stream = self._file, None, None
        if file is not None:
            # On a full disk it tries to write what is left once more.
            with contextlib.suppress(OSError):
                file.close()

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Every failure ends the writer; the text says what became of the rows."""
        try:
            yield
        except FileNotFoundError as error:
            self._forget()
            if not self._place.is_local:
                raise LedgerError(
                    f"cannot write the spool of the ledger {self._place.uri}: {error}",
                    path=self._path,
                ) from error
            raise LedgerError(self._gone(), path=self._path) from error
        except (OSError, pa.ArrowException) as error:
            self._forget()
            raise LedgerError(
                f"cannot write the spool of the ledger {self._place.uri}: {error}. The executors "
                "need to write below the ledger's folder",
                path=self._path,
            ) from error

    def _gone(self) -> str:
        """Why the open file is not there any more, as far as this side can see."""
        query = Path(self._place.spool, self._name.partition("/")[0])
        if not query.is_dir():
            # Folds remove the folders of epochs, and no other.
            return (
                f"the spool folder {query} was deleted while tasks wrote to it, and with it the "
                "rows that were not folded yet; the task must run again. Leave _spool alone while "
                "queries run"
            )
        taken = self._path.removesuffix(OPEN) + SEALED
        if Path(taken).exists():
            return (
                f"the spool file {self._path} is gone: a fold took it, as {taken}, because this "
                "process seemed dead; the task must run again"
            )
        return (
            f"the spool file {self._path} is gone: it was deleted, or a fold took it because this "
            "process seemed dead; the task must run again"
        )


def _create(path: Path) -> IO[bytes]:
    """A new file; a fold may remove its folder, empty as it is, at any moment before."""
    for _ in range(_MKDIR_TRIES):
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            return path.open("xb")
    raise OSError(f"the folder {path.parent} is removed again and again")
