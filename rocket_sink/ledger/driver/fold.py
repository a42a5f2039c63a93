"""Fold: move all finished spool files into the Delta table, each row exactly once.

    lock -> complete a dead fold's manifest -> list the files -> write the manifest
         -> append with txnAppId = the ledger, txnVersion = the number
         -> delete the files -> remove the manifest

A fold may be killed at any point and repeated. It takes all finished files, not only those of the
event that started it, because Spark's listener events come late, or at a shutdown not at all.

A manifest is a note (kind `folds`) of the files that one fold takes; its name is the fold's number.
It exists from before the append until all its files are deleted. A fold that finds a manifest
completes it with the same files and the same number. If another process still appends these files,
Delta accepts only one of the two appends."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import pyarrow as pa
from pyarrow import fs

from rocket_sink.errors import DamagedSpoolError, LedgerError
from rocket_sink.ledger.append.appender import begin_append
from rocket_sink.ledger.append.table import (
    ensure_table,
    fold_app_id,
    is_in,
    last_txn_version,
    ledger_token,
    prove_executors,
    table_version,
)
from rocket_sink.ledger.lock import LedgerLock, ledger_lock
from rocket_sink.ledger.notes import NoteStore
from rocket_sink.ledger.path import LedgerPath, failing, first_line, resolve_path
from rocket_sink.ledger.query.pending_keys import release
from rocket_sink.ledger.records import in_order
from rocket_sink.ledger.storage import is_classic
from rocket_sink.ledger.transport.data_files import OverBatches
from rocket_sink.ledger.transport.files import SEALED, SPOOL_FILE, put_aside, sealed_files
from rocket_sink.ledger.transport.stream import is_whole, read_batches
from rocket_sink.ledger.upkeep.growth import keep_small
from rocket_sink.net import log
from rocket_sink.private_file import check_folder

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


_KIND: Final = "folds"


@dataclass(frozen=True)
class Manifest:
    """The files of a fold and the table that it appends them to.

    Attributes:
        files: paths below the spool.
        token: name of the fold's commit in Delta's log.
        table_version: a version of the table from before the fold.
    """

    ledger_id: str
    number: int
    files: tuple[str, ...]
    bytes: int
    token: str
    table_version: int

    def __post_init__(self) -> None:
        """Refuse paths that are not spool files: a fold deletes the files of a manifest."""
        for name in self.files:
            if SPOOL_FILE.fullmatch(name) is None or not name.endswith(SEALED):
                raise ValueError(f"{name!a} is no spool file")

    @property
    def name(self) -> str:
        return str(self.number)

    def paths(self, place: LedgerPath) -> list[str]:
        return [f"{place.spool}/{file}" for file in self.files]


def unfinished(store: NoteStore) -> list[Manifest]:
    """Return the manifests of folds that died, in their order. Raise a LedgerError that names the
    manifest if one cannot be read."""
    manifests = (_read(store, name) for name in store.names())
    return sorted(manifests, key=lambda manifest: manifest.number)


def _read(store: NoteStore, name: str) -> Manifest:
    where = store.where(name)
    with failing(
        f"the fold manifest {where} cannot be read", where,
        ". If the table has the rows of the spool files that it lists, delete these files, then "
        "the manifest; else delete the manifest only",
        (OSError, ValueError, TypeError, KeyError),
    ):  # fmt: skip
        values = store.read(name)
        return Manifest(**{**values, "files": tuple(values["files"])})


_AT_ONCE: Final = 8
"""Number of files that the driver reads at a time."""
DRIVER_BYTES: Final = 32 * 1024 * 1024
"""Bytes up to which the driver reads the files itself, because starting tasks takes longer."""
TASK_BYTES: Final = 128 * 1024 * 1024
"""Spool bytes that one task of a fold reads. As Parquet they take about a tenth."""
FOLD_FILES: Final = 10_000  # `records.in_order` has room for 16,384
FOLD_BYTES: Final = 16 * 1024**3
"""Limit of an append's bytes, besides `FOLD_FILES`. Further files go into the next append."""

OnStep = Callable[[str], None]
_File = tuple[int, str]
"""(number of a spool file in its fold, its path)."""
_Rows = list[pa.RecordBatch]
_Read = Callable[[_File, fs.FileSystem], Iterator[pa.RecordBatch]]

_LOG: Final = log.logger(__name__)
_ERROR_DDL: Final = "path STRING, damaged BOOLEAN, text STRING"


@dataclass(frozen=True)
class FoldSummary:
    """The result of a call of `fold`.

    `torn_files` were cut by a crash; the table has their complete batches. `damaged` names files
    whose content has changed; they are in quarantine. `left` names files that cannot be read now
    and stay in the spool. `recovered` folds were begun by a process that died. `busy`: another live
    process, the `holder`, had the lock, and this call did not fold all files."""

    folds: int = 0
    files: int = 0
    rows: int = 0
    bytes: int = 0
    torn_files: int = 0
    damaged: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    recovered: int = 0
    busy: bool = False
    holder: str = ""
    duration_ms: float = 0.0


def fold(
    spark: SparkSession, ledger_path: str | LedgerPath, *, wait_s: float = 60.0,
    on_step: OnStep | None = None,
) -> FoldSummary:  # fmt: skip
    """Move the rows of all finished spool files into the table; make the table if it is missing.
    Raise LedgerError for lost files or another schema version, or without a classic session with
    Delta.

    Args:
        wait_s: longest wait for another process's fold; after it the summary has `busy`.
        on_step: called with a name before each step; tests raise an error in it.
    """
    if not is_classic(spark):
        raise LedgerError(
            "a Spark Connect session cannot fold the spool: run `rocket-sink ledger fold`, or "
            "Ledger.sync with a classic session"
        )
    started_s = time.monotonic()
    place = resolve_path(ledger_path)
    spools = spools_in_use(place)
    if not spools:
        return FoldSummary()
    prove_executors(spark, place)
    summary = FoldSummary()
    for spool in spools:
        with ledger_lock(spool, wait_s) as lock:
            if lock is None:
                return replace(summary, busy=True, holder=LedgerLock(spool).holder())
            step = on_step or (lambda step: None)
            # The file system refuses links, which another user may have put there.
            with failing(f"cannot fold the ledger {place}", place.uri, "", (PermissionError,)):
                summary = _Folder(spark, place, spool, step, summary).run()
    if place in spools:
        release(spark, place)
    return replace(summary, duration_ms=(time.monotonic() - started_s) * 1000)


FOLDERS: Final = "_rocket_sink_folders"
"""Attribute of a Spark context: {session: thread that folds its queries' ledgers}."""
_ENDED_S: Final = 5.0


def await_ended_queries(spark: SparkSession) -> None:
    """Wait some seconds at most for Spark's last events of this process's ended queries."""
    if not is_classic(spark):
        return
    for folder in list(spark.sparkContext.__dict__.get(FOLDERS, {}).values()):
        with contextlib.suppress(Exception):  # its session may be gone
            folder.await_ended(_ENDED_S)


def spools_in_use(place: LedgerPath) -> list[LedgerPath]:
    """Return the ledger's spools that exist. Raise LedgerError or OSError if one is unreadable."""
    for spool in place.spools:
        if spool.is_local:
            check_folder(Path(spool.spool))
    there = fs.FileType.Directory
    return [s for s in place.spools if s.filesystem().get_file_info(s.spool).type == there]


class _Folder:
    """Moves rows from a spool into the table, for the lock's holder.

    Args:
        place: path of the table.
        spool: path of the spool files. It differs from `place` if they are on the driver's host.
        summary: the counts so far, to which this object adds its own.
    """

    def __init__(
        self, spark: SparkSession, place: LedgerPath, spool: LedgerPath, on_step: OnStep,
        summary: FoldSummary,
    ) -> None:  # fmt: skip
        self._spark = spark
        self._place = place
        self._spool = spool
        # Executors cannot see a folder on the driver's host.
        self._driver_reads = spool != place
        self._fs = spool.filesystem()
        self._notes = NoteStore(spool, _KIND)
        self._step = on_step
        self._summary = summary

    def run(self) -> FoldSummary:
        self._step("locked")
        manifests = unfinished(self._notes)
        files = sealed_files(self._spool, self._fs)
        if not manifests and not files:
            return self._summary
        ledger_id = ensure_table(self._spark, self._place)
        folded_paths: set[str] = set()
        for manifest in manifests:
            if manifest.ledger_id == ledger_id:
                self._complete(manifest)
                self._add(recovered=1)
                folded_paths.update(manifest.paths(self._spool))
            else:  # The manifest is for a deleted table: fold its files into this table.
                self._notes.remove(manifest.name)
        files = [info for info in files if info.path not in folded_paths]
        self._step("listed")
        for share in _shares(files, DRIVER_BYTES if self._driver_reads else FOLD_BYTES):
            self._complete(self._next_manifest(ledger_id, share))
        return self._summary

    def _app_id(self, ledger_id: str) -> str:
        """Return the id of the spool's folds in Delta's log; each spool numbers its own folds."""
        if self._spool == self._place:
            return fold_app_id(ledger_id)
        return f"{fold_app_id(ledger_id)}/{ledger_token(self._spool, spools=True).name}"

    def _next_manifest(self, ledger_id: str, files: list[fs.FileInfo]) -> Manifest:
        # Take the number from Delta's log, which is lost only together with the rows.
        last = last_txn_version(self._spark, self._place, self._app_id(ledger_id))
        number = 0 if last is None else last + 1
        version = table_version(self._spark, self._place)
        self._step("manifest")
        return self._write_manifest(ledger_id, number, files, version)

    def _write_manifest(
        self, ledger_id: str, number: int, files: list[fs.FileInfo], version: int
    ) -> Manifest:
        names = tuple(info.path.removeprefix(f"{self._spool.spool}/") for info in files)
        size = sum(info.size or 0 for info in files)
        manifest = Manifest(ledger_id, number, names, size, uuid.uuid4().hex, version)
        self._notes.write(manifest.name, asdict(manifest))
        return manifest

    def _complete(self, manifest: Manifest) -> None:
        app_id = self._app_id(manifest.ledger_id)
        last = last_txn_version(self._spark, self._place, app_id)
        self._step("append")
        is_own = False
        if last is None or last < manifest.number:
            self._check_there(manifest)
            rows = None
            if self._driver_reads or manifest.bytes <= DRIVER_BYTES:
                rows = self._read(manifest)
            manifest = self._sound(manifest, self._errors(manifest, rows))
            if not manifest.files:
                self._notes.remove(manifest.name)
                return
            is_own = self._append(manifest, rows, app_id)
        if not is_own:
            self._check_ours(manifest)
        self._step("appended")
        for path in manifest.paths(self._spool):
            self._step("delete")
            self._delete(path)
        self._step("deleted")
        self._notes.remove(manifest.name)
        self._step("finished")
        self._add(folds=1, files=len(manifest.files), bytes=manifest.bytes)

    def _sound(self, manifest: Manifest, wrong: Mapping[str, LedgerError]) -> Manifest:
        """Return the manifest without the files that cannot be folded, and set damaged files aside.
        Replace the stored manifest before files are moved, so that it never names a missing file.
        This is possible because the fold is not committed yet."""
        if not wrong:
            return manifest
        paths = [path for path in manifest.paths(self._spool) if path not in wrong]
        infos = self._fs.get_file_info(paths)
        manifest = self._write_manifest(
            manifest.ledger_id, manifest.number, infos, manifest.table_version
        )
        for path, error in wrong.items():
            if isinstance(error, DamagedSpoolError):
                moved = put_aside(self._spool, self._fs, path)
                _LOG.error("%s; it is put aside as %s; the table lacks its rows", error, moved)
                self._add(damaged=(moved,))
            else:
                _LOG.warning("%s; it stays there; the table lacks its rows", error)
                self._add(left=(path,))
        return manifest

    def _read(self, manifest: Manifest) -> dict[str, _Rows | LedgerError]:
        """Read several files at a time, because each answer of a store takes some milliseconds."""
        paths = manifest.paths(self._spool)
        read = partial(_rows_or_error, self._fs)
        try:
            with ThreadPoolExecutor(_AT_ONCE) as pool:
                return dict(zip(paths, pool.map(read, paths), strict=True))
        except RuntimeError:  # Python starts no threads while it exits.
            return {path: read(path) for path in paths}

    def _errors(
        self, manifest: Manifest, rows: Mapping[str, _Rows | LedgerError] | None
    ) -> dict[str, LedgerError]:
        """Return, by path, why files cannot be folded. If the driver has read no `rows`, let tasks
        read the files.

        The tasks of the append read each file a second time. A file may exceed their memory, so
        without this first pass they would append its first rows before they see a fault."""
        if rows is not None:
            return {path: error for path, error in rows.items() if isinstance(error, LedgerError)}
        tasks, read = self._tasks(manifest.paths(self._spool), _error_rows)
        return {
            row.path: (DamagedSpoolError if row.damaged else LedgerError)(row.text)
            for row in tasks.mapInArrow(read, _ERROR_DDL).collect()
        }

    def _check_there(self, manifest: Manifest) -> None:
        paths = manifest.paths(self._spool)
        gone = [i.path for i in self._fs.get_file_info(paths) if not i.is_file]
        if gone:
            raise LedgerError(
                f"{len(gone)} spool files of an unfinished fold are gone, {gone[0]} the first: "
                "restore them, or their rows are lost. To go on without them, delete "
                f"{self._notes.where(manifest.name)}",
                path=gone[0],
            )

    def _append(
        self, manifest: Manifest, read: Mapping[str, _Rows | LedgerError] | None, app_id: str
    ) -> bool:
        """Append rows that the driver has read, or let tasks read them; return `Append.is_own`."""
        paths = manifest.paths(self._spool)
        # Stores get complete files, so only a local file can be torn.
        torn = sum(not is_whole(path, self._fs) for path in paths) if self._spool.is_local else 0
        append = begin_append(self._spark, self._place, app_id, manifest.number, manifest.token)
        try:
            if read is not None:
                batches = [
                    batch
                    for number, path in enumerate(paths)
                    for batch in in_order(cast(_Rows, read[path]), append.sequence, number)
                ]
                append.save_rows(batches)
                rows = sum(batch.num_rows for batch in batches)
            else:
                tasks = self._tasks(paths, partial(_read_file, append.sequence))
                append.save(append.made_by_tasks(*tasks))
                rows = append.row_count()
        except Exception as error:
            raise LedgerError(
                f"cannot append to the ledger {self._place}: {first_line(error)}. The rows are "
                "safe in its _spool; the next fold takes them",
                path=self._place.uri,
            ) from error
        self._add(torn_files=torn, rows=rows)
        keep_small(append)
        return append.is_own

    def _tasks(self, paths: list[str], read: _Read) -> tuple[DataFrame, OverBatches]:
        """Return a frame with a row per task, and a function that reads each task's files."""
        files, infos = iter(enumerate(paths)), self._fs.get_file_info(paths)
        bins = [list(islice(files, len(share))) for share in _shares(infos, TASK_BYTES)]
        spool = self._spool

        def read_bins(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            filesystem = spool.filesystem()
            for batch in batches:
                for index in batch.column(0).to_pylist():
                    for file in bins[index]:
                        yield from read(file, filesystem)

        return self._spark.range(0, len(bins), 1, len(bins)), read_bins

    def _check_ours(self, manifest: Manifest) -> None:
        """Check that Delta accepted this manifest's fold. Two folds may run at once: rarely in a
        store, and where hosts do not share locks. Then both append under one number."""
        path = self._notes.where(manifest.name)
        is_ours = is_in(self._spark, self._place, manifest.token, manifest.table_version)
        if is_ours is None:
            raise LedgerError(
                f"it is not known whether the rows of an unfinished fold of the ledger "
                f"{self._place} are in, for the table's log no longer reaches back to it. If "
                f"the table holds the rows of the spool files that {path} lists (query and epoch "
                "are in their names), delete these files, then the manifest; else delete the "
                "manifest",
                path=path,
            )
        if not is_ours:
            raise LedgerError(
                f"two folds of the ledger {self._place} ran at once, and the other one took the "
                f"number {manifest.number}; delete {path} and fold again: no row is lost",
                path=path,
            )

    def _delete(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._fs.delete_file(path)
        if self._spool.is_local:
            # Remove the folders of epoch and query, unless a task writes there.
            with contextlib.suppress(OSError):
                Path(path).parent.rmdir()
                Path(path).parent.parent.rmdir()

    def _add(self, **more: Any) -> None:
        sums = {name: getattr(self._summary, name) + value for name, value in more.items()}
        self._summary = replace(self._summary, **sums)


def _shares(files: list[fs.FileInfo], most_bytes: int) -> Iterator[list[fs.FileInfo]]:
    """Yield groups of files within the limits; a larger file is alone in its group."""
    share: list[fs.FileInfo] = []
    size = 0
    for info in files:
        if share and (len(share) >= FOLD_FILES or size + (info.size or 0) > most_bytes):
            yield share
            share, size = [], 0
        share.append(info)
        size += info.size or 0
    if share:
        yield share


def _read_file(sequence: int, file: _File, filesystem: fs.FileSystem) -> Iterator[pa.RecordBatch]:
    number, path = file
    return in_order(read_batches(path, filesystem), sequence, number)


def _rows_or_error(filesystem: fs.FileSystem, path: str) -> _Rows | LedgerError:
    try:
        return list(read_batches(path, filesystem))
    except LedgerError as error:
        return error


def _error_rows(file: _File, filesystem: fs.FileSystem) -> Iterator[pa.RecordBatch]:
    try:
        for _ in read_batches(file[1], filesystem):
            pass
    except LedgerError as error:
        damaged = isinstance(error, DamagedSpoolError)
        row = {"path": file[1], "damaged": damaged, "text": str(error)}
        yield pa.RecordBatch.from_pylist([row])
