"""The files of the spool, which holds the ledger rows of task attempts until a fold.

On a local (or mounted) file system a task appends its rows to an `.open` file as they come. So the
next fold finds the rows of a killed worker. Object stores can neither append nor rename. There the
rows go to a local temporary file, and each `seal` uploads one object. If the worker is killed, its
rows are lost with the temporary file.

    <ledger>/_spool/<query id>/<epoch>/<partition>-<task attempt>-<number>-<unique>~<owner>.open
    the same, renamed to .arrow                        sealed, by its owner or for a dead owner
    <ledger>/_spool/_quarantine/...                    the same, put aside because it is damaged

On object stores all files are sealed, and their names have no folders (`<query id>_<epoch>_<...>`).
A folder would be an object that stays after each batch write.

A new file's number is one above the highest number in its epoch. So a fold knows which of two runs'
files is the later one, independent of clocks. `transport.stream` describes the content. A file
belongs to the process that has renamed it. If a fold has renamed the file of a live owner, the
owner's task fails, because rows that it writes afterwards would be lost."""

from __future__ import annotations

import contextlib
import re
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import pyarrow as pa
from pyarrow import fs

from rocket_sink.errors import LedgerError
from rocket_sink.ledger.path import LedgerPath, failing, folder_part, make_folder_of
from rocket_sink.ledger.records import RunContext
from rocket_sink.ledger.schema import DEAD_LETTER, LEDGER_SCHEMA, UNFOLDED, columns_of
from rocket_sink.ledger.transport.stream import read_batches
from rocket_sink.owner import Owner, this_process

OPEN: Final = ".open"
SEALED: Final = ".arrow"
SPOOL_FILE: Final = re.compile(r"q-[^/]*(/-?[0-9]+)?[/_][^/]+\.(arrow|open)")
"""The path of a spool file, below the spool."""

_DRIVER: Final = "driver"
"""Replaces the partition in the name of the file that marks an epoch as done."""
STALE_AFTER_S: Final = 3600.0
"""Time without a write after which another host's open file counts as abandoned."""

_MOST_UNFOLDED_BYTES: Final = 64 * 1024 * 1024


def new_name(ctx: RunContext, number: int = 1, *, folders: bool = True) -> str:
    """Return a new file name: `<query>/<epoch>/<file>`, without suffix; stores have `_` for `/`."""
    task = "" if ctx.task_attempt_id is None else ctx.task_attempt_id
    file = f"{_partition(ctx)}-{task}-{number}-{uuid.uuid4().hex}~{this_process()}"
    return ("/" if folders else "_").join((folder_part(ctx.query_id), str(ctx.epoch), file))


def next_number(ctx: RunContext, place: LedgerPath, filesystem: fs.FileSystem) -> int:
    """Return the number for a new file of the epoch; raise OSError if a folder cannot be listed."""
    names = _names_of_epoch(ctx, place, filesystem)
    return 1 + max((name.number for name in names), default=0)


def has_earlier_attempt(ctx: RunContext, place: LedgerPath) -> bool:
    """Return whether an attempt at this partition of the epoch has written here. Call this before
    the attempt's own first file. Raise LedgerError if a folder cannot be listed."""
    with failing("cannot list the spool", place.spool):
        names = _names_of_epoch(ctx, place, place.filesystem())
    return any(name.partition == _partition(ctx) for name in names)


def _partition(ctx: RunContext) -> str:
    return _DRIVER if ctx.partition is None else str(ctx.partition)


def _names_of_epoch(ctx: RunContext, place: LedgerPath, filesystem: fs.FileSystem) -> list[_Name]:
    folder, start = place.spool, f"{folder_part(ctx.query_id)}_{ctx.epoch}_"
    if place.is_local:
        folder, start = f"{folder}/{folder_part(ctx.query_id)}/{ctx.epoch}", ""
    selector = fs.FileSelector(folder, allow_not_found=True)
    try:
        infos = filesystem.get_file_info(selector)
    except FileNotFoundError:
        # Arrow lists first, and then checks that the folder exists. A task made it in between.
        infos = filesystem.get_file_info(selector)
    return [_parsed(info) for info in infos if info.base_name.startswith(start)]


def sealed_files(place: LedgerPath, filesystem: fs.FileSystem) -> list[fs.FileInfo]:
    """Seal the open files of dead owners, and return all sealed files. The query with the oldest
    file comes first. A query's files are sorted by epoch, then by number."""
    infos = _files(place, filesystem)
    # A file is empty on Azure until pyarrow has written it, so leave empty files of stores alone.
    sealed = (info for info in infos if info.extension == SEALED[1:])
    files = [info for info in sealed if info.size or place.is_local]
    latest: defaultdict[tuple[str, str, str], int] = defaultdict(int)
    for query, epoch, partition, number in map(_parsed, files):
        latest[query, epoch, partition] = max(number, latest[query, epoch, partition])
    for info in infos:
        if info.extension == OPEN[1:]:
            query, epoch, partition, number = _parsed(info)
            later = max(latest[query, epoch, name] for name in (partition, _DRIVER))
            if _is_abandoned(info, is_over=number < later):
                files += _take(info, filesystem)
    files.sort(key=lambda info: info.mtime_ns or 0)
    first_ns: dict[str, int] = {}
    for info in files:
        first_ns.setdefault(_parsed(info).query, info.mtime_ns or 0)

    def order(info: fs.FileInfo) -> tuple[int, str, int, int, int, str]:
        query, epoch, _, number = _parsed(info)
        epoch_number = int(epoch) if epoch.isdigit() else -1
        return first_ns[query], query, epoch_number, number, info.mtime_ns or 0, info.path

    return sorted(files, key=order)


class _Name(NamedTuple):
    """The parts of a spool file's name: query as in `folder_part`, epoch, partition and number."""

    query: str
    epoch: str
    partition: str
    number: int


def _parsed(info: fs.FileInfo) -> _Name:
    """Return the parts of the file's name; the number is 0 if this module did not make the name."""
    query, epoch, name = info.path.split("/")[-3:]
    if name.startswith("q-"):
        query, epoch, name = name.split("_", 2)
    parts = name.partition("~")[0].split("-")
    is_ours = len(parts) >= 4 and parts[-2].isdigit()
    return _Name(query, epoch, parts[0], int(parts[-2]) if is_ours else 0)


def open_files(place: LedgerPath, queries: re.Pattern[str]) -> Iterator[fs.FileInfo]:
    """Yield the files that their owners still write, of queries whose whole id matches. The ids
    have only characters that `path_part` keeps."""
    for info in _files(place, place.filesystem()):
        query = _parsed(info).query.removeprefix(folder_part(""))
        if info.extension == OPEN[1:] and queries.fullmatch(query) and not _is_abandoned(info):
            yield info


def spooled_epochs(place: LedgerPath) -> set[tuple[str, str]]:
    """Return (query as in `path_part`, epoch) of the ledger's spool files, open and sealed."""
    infos = (info for spool in place.spools for info in _files(spool, spool.filesystem()))
    names = map(_parsed, infos)
    return {(name.query.removeprefix(folder_part("")), name.epoch) for name in names}


def spooled_rows(places: Sequence[LedgerPath]) -> pa.Table:
    """Return the rows that no fold has taken yet. Some of them come from tasks that still run. Some
    may be in the table already, if a fold has not deleted their file yet. If there are many files,
    only the newest are read."""
    batches: list[pa.RecordBatch] = []
    size = 0
    for place in places:
        filesystem = place.filesystem()
        for info in sorted(_files(place, filesystem), key=lambda info: -(info.mtime_ns or 0)):
            size += info.size or 0
            # A fold reports damaged files. The rows of deleted files are in the table now.
            with contextlib.suppress(LedgerError, OSError):
                if size <= _MOST_UNFOLDED_BYTES:
                    batches += read_batches(info.path, filesystem)
    return pa.Table.from_batches(batches, LEDGER_SCHEMA)


def letters_in(rows: pa.Table) -> int:
    """Count the dead letters among `spooled_rows`."""
    return int(rows["kind"].to_pylist().count(DEAD_LETTER))


def unfolded_rows(rows: pa.Table) -> pa.Table:
    """Return the sends and isolations among `spooled_rows`, under the kinds of `UNFOLDED`."""
    import pyarrow.compute as pc

    if not rows:
        return rows  # `pa.array` would import pandas, which takes 0.3 s.
    kinds = pa.array([UNFOLDED.get(kind) for kind in rows["kind"].to_pylist()], pa.string())
    names = dict.fromkeys(name for kind in UNFOLDED for name in columns_of(kind))
    return rows.select([*names]).append_column("kind", kinds).filter(pc.is_valid(kinds))


def quarantined(place: LedgerPath) -> list[str]:
    """Return the paths of damaged files that folds of the ledger have set aside."""
    folders = [(spool.filesystem(), spool.quarantine) for spool in place.spools]
    return sorted(info.path for each in folders for info in _listed(*each) if info.is_file)


def put_aside(place: LedgerPath, filesystem: fs.FileSystem, path: str) -> str:
    """Move a damaged file into quarantine; return its new path."""
    target = place.quarantine + path.removeprefix(place.spool)
    make_folder_of(filesystem, target)
    filesystem.move(path, target)
    return target


def _files(place: LedgerPath, filesystem: fs.FileSystem) -> list[fs.FileInfo]:
    infos = _listed(filesystem, place.spool)
    names = len(place.spool) + 1
    return [info for info in infos if info.is_file and SPOOL_FILE.fullmatch(info.path[names:])]


def _listed(filesystem: fs.FileSystem, folder: str) -> list[fs.FileInfo]:
    selector = fs.FileSelector(folder, recursive=True, allow_not_found=True)
    with failing("cannot list the spool", folder):
        infos: list[fs.FileInfo] = filesystem.get_file_info(selector)
        return infos


def _is_abandoned(info: fs.FileInfo, *, is_over: bool = False) -> bool:
    """Return whether an open file has lost its owner. Set `is_over` if a later attempt at the
    file's partition is sealed, or if the driver has marked the epoch as done. Spark takes the
    result of one attempt only, so the owner is dead or superseded then. The fold takes the owner's
    rows, too, because they show what may be stored twice."""
    owner = Owner.parse(info.base_name.removesuffix(OPEN).partition("~")[2])
    alive = owner.is_alive() if owner else None
    if alive is not None:
        return not alive
    if is_over:
        return True
    age_s = time.time() - (info.mtime_ns or time.time_ns()) / 1e9
    return age_s > STALE_AFTER_S


def _take(info: fs.FileInfo, filesystem: fs.FileSystem) -> list[fs.FileInfo]:
    target = info.path.removesuffix(OPEN) + SEALED
    try:
        filesystem.move(info.path, target)
    except FileNotFoundError:
        return []  # The owner, or another fold, has moved the file meanwhile.
    target_info = filesystem.get_file_info(target)
    return [target_info] if target_info.is_file else []
