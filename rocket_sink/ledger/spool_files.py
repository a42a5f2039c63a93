"""Spool files: their names and states, and how to read one that a crash has cut.

    <ledger>/_spool/<query id>/<epoch>/<partition>-<task attempt>-<unique>~<host>~<pid>~<start>.open
    the same, renamed to .arrow                        sealed, by its owner or for a dead owner

Each is an Arrow IPC stream with the schema of the rocket-sink that wrote it. A rename decides who
has a file: an owner that lives and finds its file taken fails its task, so that no row written
after the taking is lost silently.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from rocket_sink.errors import LedgerError
from rocket_sink.ledger.place import Place, path_part
from rocket_sink.ledger.records import RunContext
from rocket_sink.ledger.schema import KINDS, LEDGER_SCHEMA
from rocket_sink.owner import Owner, this_process

if TYPE_CHECKING:
    from pyarrow import fs

OPEN: Final = ".open"
SEALED: Final = ".arrow"
PARTIAL: Final = ".part"
"""An upload to a remote file system that has no atomic writes."""

_END: Final = b"\xff\xff\xff\xff\0\0\0\0"
"""Arrow's end-of-stream mark: without it a cut between two batches would look like an end."""

STALE_AFTER_S: Final = 3600.0
"""An open file of another host that nobody wrote to for so long has lost its owner."""


def new_name(ctx: RunContext) -> str:
    """`<query>/<epoch>/<file>` without the state, unique."""
    partition = "driver" if ctx.partition is None else ctx.partition
    task = "" if ctx.task_attempt_id is None else ctx.task_attempt_id
    file = f"{partition}-{task}-{uuid.uuid4().hex}~{this_process()}"
    return f"{_part(ctx.query_id)}/{ctx.epoch}/{file}"


def _part(text: str) -> str:
    """`text` as one component of a path; never one that starts with `_`, `.` or is empty."""
    return "q-" + path_part(text)


def sealed_files(place: Place, filesystem: fs.FileSystem) -> list[fs.FileInfo]:
    """All sealed files, oldest first; takes the open files whose owners are gone on the way."""
    found = []
    for info in _files(place, filesystem):
        if info.extension == SEALED[1:]:
            found.append(info)
        elif info.extension == OPEN[1:] and _is_abandoned(info):
            found += _take(info, filesystem)
    return sorted(found, key=lambda info: (info.mtime_ns or 0, info.path))


def open_files(place: Place, filesystem: fs.FileSystem, *, query: str) -> list[fs.FileInfo]:
    """Files that their owners still write, of queries whose id starts with `query`."""
    start = f"{place.spool}/{_part(query)}"
    return [
        info
        for info in _files(place, filesystem)
        if info.path.startswith(start) and info.extension == OPEN[1:] and not _is_abandoned(info)
    ]


def waiting_epochs(place: Place, filesystem: fs.FileSystem) -> int:
    """Epochs with files, sealed or still written; nothing is taken."""
    return len({info.path.rpartition("/")[0] for info in _files(place, filesystem)})


def _files(place: Place, filesystem: fs.FileSystem) -> Iterator[fs.FileInfo]:
    from pyarrow import fs

    selector = fs.FileSelector(place.spool, recursive=True, allow_not_found=True)
    try:
        infos = filesystem.get_file_info(selector)
    except OSError as error:
        raise LedgerError(f"cannot list the spool {place.spool}: {error}") from error
    skip = f"{place.folds}/"
    return (i for i in infos if i.is_file and not i.path.startswith(skip))


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


def is_whole(path: str, filesystem: fs.FileSystem) -> bool:
    """True when the file ends as a closed stream does; a dead owner's does not."""
    with filesystem.open_input_file(path) as file:
        size = file.size()
        return bool(size > len(_END) and file.read_at(len(_END), size - len(_END)) == _END)


def read_batches(path: str, filesystem: fs.FileSystem) -> Iterator[pa.RecordBatch]:
    """The file's batches in today's schema; of a cut file all whole ones.

    Raises:
        LedgerError: a file that was closed cannot be read, or is of a newer rocket-sink.
        FileNotFoundError
    """
    whole = is_whole(path, filesystem)
    with filesystem.open_input_stream(path) as stream:
        try:
            reader = pa.ipc.open_stream(stream)
            while True:
                batch = reader.read_next_batch()
                if not whole:
                    _check(batch)
                yield _fitted(batch, path)
        except StopIteration:
            return
        except (pa.ArrowInvalid, OSError) as error:
            if whole:
                raise LedgerError(
                    f"the spool file {path} was written whole and cannot be read: {error}. Nothing "
                    "is deleted; look at its storage, or move the file away to go on without it",
                    path=path,
                ) from error


def _check(batch: pa.RecordBatch) -> None:
    """After a power cut, blocks that were never written read as zeros: nulls and empty texts."""
    batch.validate(full=True)
    import pyarrow.compute as pc

    known = pc.is_in(batch.column("kind"), pa.array(KINDS))
    if not pc.all(known, min_count=0).as_py():
        raise pa.ArrowInvalid("rows of no kind")


def _fitted(batch: pa.RecordBatch, path: str) -> pa.RecordBatch:
    """The batch in `LEDGER_SCHEMA`; an older rocket-sink's columns are fewer."""
    if batch.schema.equals(LEDGER_SCHEMA):
        return batch
    unknown = set(batch.schema.names) - set(LEDGER_SCHEMA.names)
    if unknown:
        raise LedgerError(
            f"the spool file {path} has columns that this rocket-sink does not know "
            f"({', '.join(sorted(unknown))}): it is of a newer version; fold with that one",
            path=path,
        )
    arrays = [
        batch.column(f.name).cast(f.type)
        if f.name in batch.schema.names
        else pa.nulls(len(batch), f.type)
        for f in LEDGER_SCHEMA
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=LEDGER_SCHEMA)
