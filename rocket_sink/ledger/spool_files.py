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

from rocket_sink.errors import LedgerError
from rocket_sink.ledger.place import Place, path_part
from rocket_sink.ledger.records import RunContext
from rocket_sink.owner import Owner, this_process

if TYPE_CHECKING:
    from pyarrow import fs

OPEN: Final = ".open"
SEALED: Final = ".arrow"
PARTIAL: Final = ".part"
"""An upload to a remote file system that has no atomic writes."""

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
