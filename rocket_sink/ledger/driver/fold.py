"""Fold: move all finished spool files into the Delta table, each row exactly once.

    lock -> complete the folds that have begun -> list the files
         -> take a number -> complete the folds that have begun meanwhile
         -> read the files -> write the manifest
         -> append with txnAppId = the ledger, txnVersion = the number
         -> delete the files -> remove the manifest

A fold may be killed at any point and repeated. It takes all finished files, not only those of the
event that started it, because Spark's listener events come late, or at a shutdown not at all.

A manifest is a note (kind `folds`) of the files that one fold takes. It exists from before the
append until all its files are deleted. A fold that finds a manifest completes it with the same
number and token. **No file is deleted until the table's log has a commit with the manifest's token
and as many rows as the files have.** A manifest whose number another commit has taken can never be
appended, so it is dropped, and its files are folded anew.

The lock only saves work: hosts may not share it, and a lease may have two holders. Without it each
row is folded once, too. If another fold commits before this one takes its number, then either its
manifest is still there, or its files are gone. If it commits later, Delta refuses this one's
number, and this fold folds the remaining files under another one."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow as pa
from pyarrow import fs

from rocket_sink.errors import DamagedSpoolError, LedgerError
from rocket_sink.ledger.append.appender import begin_append, short
from rocket_sink.ledger.append.table import (
    ensure_table,
    fold_app_id,
    is_table,
    last_txn_version,
    ledger_token,
    open_for_commits,
    prove_executors,
    rows_of_commit,
    table_version,
)
from rocket_sink.ledger.lock import LedgerLock, ledger_lock
from rocket_sink.ledger.notes import NoteStore, remove_file
from rocket_sink.ledger.path import SPOOL, LedgerPath, failing, first_line, resolve_path
from rocket_sink.ledger.query.pending_keys import release
from rocket_sink.ledger.records import in_order
from rocket_sink.ledger.storage import is_classic
from rocket_sink.ledger.transport.data_files import OverBatches
from rocket_sink.ledger.transport.files import SEALED, SPOOL_FILE, put_aside, sealed_files
from rocket_sink.ledger.transport.stream import read_batches
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
        rows: number of rows of these files.
        token: name of the fold's commit in Delta's log.
        table_version: a version of the table from before the fold.
    """

    ledger_id: str
    number: int
    files: tuple[str, ...]
    bytes: int
    rows: int
    token: str
    table_version: int

    def __post_init__(self) -> None:
        """Refuse paths that are not spool files: a fold deletes the files of a manifest."""
        for name in self.files:
            if SPOOL_FILE.fullmatch(name) is None or not name.endswith(SEALED):
                raise ValueError(f"{name!a} is no spool file")

    @property
    def name(self) -> str:
        return f"{self.number}-{self.token}"

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
        manifest = Manifest(**{**values, "files": tuple(values["files"])})
        if manifest.name != name:
            raise ValueError(f"it belongs in {manifest.name!a}")
        return manifest


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
_ReadFile = Callable[[_File, fs.FileSystem], Iterator[pa.RecordBatch]]

_LOG: Final = log.logger(__name__)
_apart: set[tuple[str, LedgerPath]] = set()
"""(application, ledger) pairs whose executors did not find the ledger's folder. The answer is kept,
because the failing job holds slots of the query for seconds."""
_LOOK_DDL: Final = "path STRING, rows BIGINT, damaged BOOLEAN, text STRING"


class _Contents(NamedTuple):
    """Spool files as they were read; files that are gone are left out.

    Attributes:
        counts: {path: number of rows} of the files that can be folded, in their order.
        errors: {path: error} of the other files.
        rows: {path: rows}; None if tasks have read the files.
    """

    counts: dict[str, int]
    errors: dict[str, LedgerError]
    rows: dict[str, _Rows] | None


@dataclass(frozen=True)
class FoldSummary:
    """The result of a call of `fold`.

    `damaged` names files whose content has changed; they are in quarantine. `left` names files that
    cannot be read now and stay in the spool. `recovered` folds were begun by a process that died.
    `busy`: another live process, the `holder`, had the lock, and this call did not fold all
    files."""

    folds: int = 0
    files: int = 0
    rows: int = 0
    bytes: int = 0
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
    if place.is_local and open_for_commits(spark, place) is None and is_table(spark, place):
        prove_executors(spark, place)  # Tasks of Spark's Delta read and write this table.
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
    for folder in list(spark.sparkContext.__dict__.get(FOLDERS, ())):
        with contextlib.suppress(Exception):  # its session may be gone
            folder.await_ended(_ENDED_S)


def spools_in_use(place: LedgerPath) -> list[LedgerPath]:
    """Return the ledger's spools that exist. Raise LedgerError or OSError if one is unreadable."""
    for spool in place.spools:
        if spool.is_local:
            check_folder(Path(spool.spool))
    if not place.is_local:
        _warn_of_other_hosts(place)
    there = fs.FileType.Directory
    return [s for s in place.spools if s.filesystem().get_file_info(s.spool).type == there]


def _warn_of_other_hosts(place: LedgerPath) -> None:
    """Warn of rows that wait for a ledger of this URI on another host. The host may be this store's
    by another name, or may not have been known to the process that wrote the rows."""
    own = Path(place.driver_folder.spool)
    for spool in own.parent.parent.glob(f"*/{SPOOL}"):
        if spool != own and any(spool.glob(f"q-*/*/*{SEALED}")):
            _LOG.warning(
                "rows of %s wait in %s, written by a process that reached the store at another "
                "address; if the store is the same, move the content to %s", place, spool, own,
            )  # fmt: skip


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
        self._fs = spool.filesystem()
        self._notes = NoteStore(spool, _KIND)
        self._step = on_step
        self._summary = summary

    def run(self) -> FoldSummary:
        self._step("locked")
        files = sealed_files(self._spool, self._fs)
        if not files and not self._notes.names():
            return self._summary
        ledger_id = ensure_table(self._spark, self._place)
        self._complete_begun(ledger_id)
        self._step("listed")
        is_read_by_tasks = self._is_read_by_tasks(sum(info.size or 0 for info in files))
        for share in _shares(files, FOLD_BYTES if is_read_by_tasks else DRIVER_BYTES):
            is_folded = False
            while not is_folded:
                # Take the number from Delta's log, which is lost only together with the rows.
                last = last_txn_version(self._spark, self._place, self._app_id(ledger_id))
                version = table_version(self._spark, self._place)
                self._complete_begun(ledger_id)
                contents = self._read([i.path for i in share], sum(i.size or 0 for i in share))
                number = 0 if last is None else last + 1
                is_folded = self._fold(ledger_id, number, version, contents)
            self._set_aside(contents)
        return self._summary

    def _app_id(self, ledger_id: str) -> str:
        """Return the id of the spool's folds in Delta's log; each spool numbers its own folds."""
        if self._spool == self._place:
            return fold_app_id(ledger_id)
        return f"{fold_app_id(ledger_id)}/{ledger_token(self._spool, spools=True).name}"

    def _complete_begun(self, ledger_id: str) -> None:
        for manifest in unfinished(self._notes):
            if manifest.ledger_id == ledger_id:
                self._complete(manifest)
                self._add(recovered=1)
            else:  # The manifest is for a deleted table: fold its files into this table.
                self._notes.remove(manifest.name)

    def _complete(self, manifest: Manifest) -> None:
        """Complete a fold that another process has begun, and may still work on."""
        paths = manifest.paths(self._spool)
        # Look for the files before the log: files that a fold has deleted are in the log then.
        gone = [info.path for info in self._fs.get_file_info(paths) if not info.is_file]
        if self._settle(manifest):
            return
        if gone:
            raise LedgerError(
                f"{len(gone)} spool files of an unfinished fold are gone, {gone[0]} the first: "
                "restore them, or their rows are lost. To go on without them, delete "
                f"{self._notes.where(manifest.name)}",
                path=gone[0],
            )
        contents = self._read(paths, manifest.bytes)
        if contents.errors:
            # Files were damaged since. Append the others under the same number, which the process
            # that has begun this fold can no longer take then. `run` puts the files aside.
            self._fold(manifest.ledger_id, manifest.number, manifest.table_version, contents)
            self._notes.remove(manifest.name)
        else:
            self._append(manifest, contents)

    def _settle(self, manifest: Manifest) -> bool:
        """End a fold whose number is in the table's log; return whether the number is there. Delete
        the files if the rows are in; else another fold took the number, so keep the files."""
        last = last_txn_version(self._spark, self._place, self._app_id(manifest.ledger_id))
        if last is None or last < manifest.number:
            return False
        if self._is_in(manifest):
            self._delete(manifest)
        else:
            self._notes.remove(manifest.name)
        return True

    def _fold(self, ledger_id: str, number: int, version: int, contents: _Contents) -> bool:
        """Begin a fold of the files that can be folded, and complete it. Return False if another
        fold took the number, so that files may remain."""
        if not contents.counts:
            return True
        infos = self._fs.get_file_info(list(contents.counts))
        names = tuple(info.path.removeprefix(f"{self._spool.spool}/") for info in infos)
        size, rows = sum(info.size or 0 for info in infos), sum(contents.counts.values())
        manifest = Manifest(ledger_id, number, names, size, rows, uuid.uuid4().hex, version)
        self._step("manifest")
        self._notes.write(manifest.name, asdict(manifest))
        return self._append(manifest, contents)

    def _set_aside(self, contents: _Contents) -> None:
        """Move damaged files away, and report all files that are not folded."""
        for path, error in contents.errors.items():
            if isinstance(error, DamagedSpoolError):
                moved = put_aside(self._spool, self._fs, path)
                _LOG.error("%s; it is put aside as %s; the table lacks its rows", error, moved)
                self._add(damaged=(moved,))
            else:
                _LOG.warning("%s; it stays there; the table lacks its rows", error)
                self._add(left=(path,))

    def _is_read_by_tasks(self, size: int) -> bool:
        """Return whether tasks read files of this size in all. Executors may have another folder at
        the spool's path: then the driver reads, who has written the files (`ledgerVia=spark`)."""
        # Executors cannot see a spool on the driver's host.
        if self._spool != self._place or size <= DRIVER_BYTES:
            return False
        key = (str(self._spark.sparkContext.applicationId), self._place)
        if key not in _apart:
            try:
                prove_executors(self._spark, self._place)
                return True
            except LedgerError as error:
                _LOG.warning("the driver reads all files of each fold itself: %s", error)
                _apart.add(key)
        return False

    def _read(self, paths: list[str], size: int) -> _Contents:
        """Read the files, several at a time, because each answer of a store takes some
        milliseconds. If they are large, let tasks only look at them.

        The tasks of the append read each file a second time. A file may exceed their memory, so
        without this first pass they would append its first rows before they see a fault."""
        if self._is_read_by_tasks(size):
            tasks, look = self._tasks(paths, _look_at)
            looks = {row.path: row for row in tasks.mapInArrow(look, _LOOK_DDL).collect()}
            counts = {path: looks[path].rows for path in paths if path in looks}
            errors = {
                path: (DamagedSpoolError if row.damaged else LedgerError)(row.text)
                for path, row in looks.items()
                if row.text is not None
            }
            sound = {path: rows for path, rows in counts.items() if path not in errors}
            return _Contents(sound, errors, None)
        read = partial(_rows_or_error, self._fs)
        try:
            with ThreadPoolExecutor(_AT_ONCE) as pool:
                results = dict(zip(paths, pool.map(read, paths), strict=True))
        except RuntimeError:  # Python starts no threads while it exits.
            results = {path: read(path) for path in paths}
        rows = {path: result for path, result in results.items() if isinstance(result, list)}
        errors = {p: result for p, result in results.items() if isinstance(result, LedgerError)}
        counts = {path: sum(batch.num_rows for batch in rows[path]) for path in rows}
        return _Contents(counts, errors, rows)

    def _append(self, manifest: Manifest, contents: _Contents) -> bool:
        """Append the rows, and delete the files when the log shows the commit. Return False if
        another fold took the number meanwhile: hosts may not share the lock."""
        self._step("append")
        paths = manifest.paths(self._spool)
        app_id = self._app_id(manifest.ledger_id)
        append = begin_append(self._spark, self._place, app_id, manifest.number, manifest.token)
        try:
            if contents.rows is not None:
                batches = [
                    batch
                    for number, path in enumerate(paths)
                    for batch in in_order(contents.rows[path], append.sequence, number)
                ]
                append.save_rows(batches)
            else:
                tasks = self._tasks(paths, partial(_read_file, append.sequence))
                append.save(append.made_by_tasks(*tasks), manifest.rows)
            if append.rows is None:
                raise LedgerError(f"another fold has taken the number {manifest.number}")
        except Exception as error:
            with contextlib.suppress(LedgerError, OSError):
                if self._settle(manifest):
                    return False
            raise LedgerError(
                f"cannot append to the ledger {self._place}: {first_line(error)}. The files "
                "stay in its _spool until a fold has added their rows",
                path=self._place.uri,
            ) from error
        self._add(rows=append.rows)
        keep_small(append)
        self._delete(manifest)
        return True

    def _delete(self, manifest: Manifest) -> None:
        """Delete the files of a fold that is in the table."""
        self._step("appended")
        for path in manifest.paths(self._spool):
            self._step("delete")
            self._delete_file(path)
        self._step("deleted")
        self._notes.remove(manifest.name)
        self._step("finished")
        self._add(folds=1, files=len(manifest.files), bytes=manifest.bytes)

    def _tasks(self, paths: list[str], read: _ReadFile) -> tuple[DataFrame, OverBatches]:
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

    def _is_in(self, manifest: Manifest) -> bool:
        """Return whether the table has the manifest's rows, all of them."""
        path = self._notes.where(manifest.name)
        try:
            added = rows_of_commit(self._spark, self._place, manifest.token, manifest.table_version)
        except FileNotFoundError as error:
            raise LedgerError(
                f"it is not known whether the rows of an unfinished fold of the ledger "
                f"{self._place} are in, for the table's log no longer reaches back to it. If "
                f"the table holds the rows of the spool files that {path} lists (query and epoch "
                "are in their names), delete these files, then the manifest; else delete the "
                "manifest",
                path=path,
            ) from error
        if added is not None and added != manifest.rows:
            raise short(self._place, manifest.token, added, manifest.rows)
        return added is not None

    def _delete_file(self, path: str) -> None:
        remove_file(self._fs, path)
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


def _rows_or_error(filesystem: fs.FileSystem, path: str) -> _Rows | LedgerError | None:
    """Return the file's rows, or why it cannot be folded; None if another fold has deleted it."""
    try:
        return list(read_batches(path, filesystem))
    except FileNotFoundError:
        return None
    except LedgerError as error:
        return error


def _look_at(file: _File, filesystem: fs.FileSystem) -> Iterator[pa.RecordBatch]:
    """Yield a row (`_LOOK_DDL`) about a file, unless another fold has deleted it."""
    look: dict[str, Any] = {"path": file[1], "rows": 0, "damaged": False, "text": None}
    try:
        look["rows"] = sum(batch.num_rows for batch in read_batches(file[1], filesystem))
    except FileNotFoundError:
        return
    except LedgerError as error:
        look |= {"damaged": isinstance(error, DamagedSpoolError), "text": str(error)}
    schema = pa.schema(
        {"path": pa.string(), "rows": pa.int64(), "damaged": pa.bool_(), "text": pa.string()}
    )
    yield pa.RecordBatch.from_pylist([look], schema)
