"""Access to the table by delta-rs: opening it, reading an epoch, committing.

Each operation takes some milliseconds and no Spark job. delta-rs commits only to plain tables, in
local folders that the driver sees and on S3 stores that `exclusive` accepts. Spark's Delta commits
to all other tables, because it knows more table features and more kinds of stores. `last_version`
raises LedgerError if the store cannot be read now.

delta-rs creates a commit's file by a hard link, or on S3 by a conditional write. Both fail if the
file exists. Then delta-rs reads the other commit, and tries the next version unless the two commits
conflict. Spark's Delta first checks that the file is missing, and then renames (locally, within
microseconds) or writes (on S3). That is safe only within one JVM. So if delta-rs commits to a
table, nothing else may commit to it while queries run."""

from __future__ import annotations

import contextlib
import datetime as dt
import itertools
import json
import os
import re
import tempfile
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow as pa

from rocket_sink.errors import LedgerError
from rocket_sink.ledger.notes import create_first_commit, now_ms, read_bytes
from rocket_sink.ledger.path import LOG_FOLDER, LedgerPath, failing
from rocket_sink.ledger.schema import KINDS
from rocket_sink.ledger.storage import delta_rs_address, has_delta_rs, keeps_transactions
from rocket_sink.ledger.transport.data_files import DataFile
from rocket_sink.producer.process_end import native_calls

if TYPE_CHECKING:
    from deltalake import DeltaTable
    from pyarrow import dataset, fs

_TRIES: Final = 10
"""Number of attempts at a commit. In each attempt delta-rs alone makes at least 15 requests."""
_USER_METADATA: Final = "userMetadata"
"""Field of a commit that the table's history shows. Spark's Delta sets it by an option."""
_ESCAPED: Final = frozenset("%#?")
"""Characters that delta-rs may decode in a path, or take for the path's end."""
_COLOURS: Final = re.compile(r"\x1b\[[0-9;]*m")
_STACK: Final = re.compile(r"\n\s+0: ")
_LONGEST_REASON: Final = 400
_UNSUPPORTED: Final = "Unsupported"
"""A word of delta-rs's error about a table with features that it does not know."""
_BACKUP: Final = (
    "When files of its _delta_log are damaged or missing, put them back from a backup. Without "
    "one, begin a new ledger in another folder and move _spool there: it has the rows that are "
    "not folded yet"
)
_DATA_FILE: Final = re.compile(r"(?:[\w=-][\w=.-]*/)*[\w=-][\w=.-]*", re.ASCII)
"""Paths of data files below the table, in which no reader sees an escape or a pattern."""

_seen: set[LedgerPath] = set()
"""Tables on stores that pyarrow could read once."""


def open_table(place: LedgerPath, *, must: bool = False) -> DeltaTable | None:
    """Open the newest version; None if there is no table, or if only Spark's Delta may use the
    table.

    Raise LedgerError if the table's log is damaged, or has links or pipes in it. Set `must` if only
    delta-rs may commit: then raise LedgerError also if the store cannot be read now. The error says
    that nothing was appended."""
    if place.is_local:
        check_files(place, log_only=True)
    table = open_any(place, must=must)
    return table if table is not None and _is_plain(table) else None


def _is_plain(table: DeltaTable) -> bool:
    protocol = table.protocol()
    # Tables name their features from the writer's version 7 on.
    return protocol.min_reader_version == 1 and protocol.min_writer_version <= 2


_CommitFile = tuple[int, int]
"""(time of the last change in ns, size) of a commit's file."""
_opened: dict[tuple[int, LedgerPath], tuple[_CommitFile, DeltaTable]] = {}
"""{(process id, ledger): (file of the table's last commit, table)}, for `newest_for_readers`."""


@native_calls.uninterrupted()
def newest_for_readers(place: LedgerPath) -> DeltaTable | None:
    """Return the newest version. The process keeps the table and reads only later commits, because
    the time to open a table grows with its log. Do not commit by this object: Delta checks a commit
    against the version that was opened."""
    key = os.getpid(), place
    kept = _opened.pop(key, None)
    table = None if kept is None else _updated(place, *kept)
    if table is None:
        table = open_table(place)
    if table is not None:
        last_commit = _last_commit(place, table)
        if last_commit is not None:
            _opened[key] = last_commit, table
    return table


def _updated(place: LedgerPath, last_commit: _CommitFile, table: DeltaTable) -> DeltaTable | None:
    """Return the table with the commits that followed; None if it has to be opened again. If the
    table's last commit is not in the log, or has changed, the log is another one: the folder was
    deleted, made anew or restored."""
    from deltalake.exceptions import DeltaError

    if _last_commit(place, table) != last_commit:
        return None
    try:
        table.update_incremental()
    except (DeltaError, OSError):
        return None
    return table if _is_plain(table) else None


def _last_commit(place: LedgerPath, table: DeltaTable) -> _CommitFile | None:
    path = f"{place.root}/{LOG_FOLDER}/{table.version():020}.json"
    info = place.filesystem().get_file_info(path)
    return (info.mtime_ns, info.size) if info.is_file else None


@native_calls.uninterrupted()
def open_any(place: LedgerPath, *, must: bool = False) -> DeltaTable | None:
    """Open the newest version, even if the table has features that only Spark's Delta knows."""
    if not _takes(place):
        return None
    from deltalake import DeltaTable
    from deltalake.exceptions import DeltaError, TableNotFoundError

    try:
        if not _has_log(place):
            return None
        uri, options = _where(place)
        return DeltaTable(uri, storage_options=options)
    except (DeltaError, OSError, LedgerError) as error:
        is_read = isinstance(error, DeltaError) and not isinstance(error, TableNotFoundError)
        if is_read and _UNSUPPORTED not in str(error):
            _refuse_damage(place, error)
        if must and not isinstance(error, TableNotFoundError):
            raise _away(place.uri, error, ". Nothing was appended") from error
        return None


def _refuse_damage(place: LedgerPath, error: Exception) -> None:
    """Raise LedgerError with the remedy if files of the log are damaged or missing; return if only
    the store failed. Readers and writers open the table first, so nothing was sent before."""
    spoilt = _spoilt_files(place)
    if spoilt is None:
        return
    if spoilt:
        raise damaged(
            place,
            _reason(error),
            f"Delete {' and '.join(spoilt)}: a copy of the log without that could be read. No row "
            "is lost, because a checkpoint only sums up commits, and no commit is missing",
        ) from error
    if place.is_local:
        raise damaged(place, _reason(error)) from error


def _spoilt_files(place: LedgerPath) -> list[str] | None:
    """Return the files (`_last_checkpoint`, checkpoints) to remove to make the log readable. The
    function tries this with a copy of the log. The list is empty if no removal helps. Return None
    if the whole copy can be read: then the log is sound, and the store failed for a moment."""
    from deltalake import DeltaTable
    from deltalake.exceptions import DeltaError
    from pyarrow import fs

    filesystem = place.filesystem()
    selector = fs.FileSelector(f"{place.root}/{LOG_FOLDER}", allow_not_found=True)
    with tempfile.TemporaryDirectory() as folder:
        log_folder = Path(folder, LOG_FOLDER)
        log_folder.mkdir()
        sums = []
        try:
            for info in filesystem.get_file_info(selector):
                if info.is_file and not info.base_name.startswith("."):
                    copy = log_folder / info.base_name
                    if place.is_local:
                        copy.symlink_to(info.path)
                    else:
                        copy.write_bytes(read_bytes(filesystem, info.path) or b"")
                    sums += [info.base_name] if "checkpoint" in info.base_name else []
            with contextlib.suppress(DeltaError):
                DeltaTable(folder)
                return None
            # Remove `_last_checkpoint`, which names a checkpoint, then checkpoints, newest first.
            sums.sort(reverse=True)
            for count, name in enumerate(sums, 1):
                log_folder.joinpath(name).unlink()
                with contextlib.suppress(DeltaError):
                    DeltaTable(folder)
                    return [f"{place.root}/{LOG_FOLDER}/{base_name}" for base_name in sums[:count]]
        except OSError:
            return []
    return []


@native_calls.uninterrupted()
def create_table(place: LedgerPath, schema: pa.Schema, properties: Mapping[str, str]) -> bool:
    """Make an empty table, partitioned by `kind`, in one commit. Return False if only Spark's Delta
    may make the table, or if another process has made it first. Raise LedgerError if the folder
    cannot be written."""
    if not _takes(place):
        return False
    from deltalake import CommitProperties, DeltaTable
    from deltalake.exceptions import DeltaError

    uri, options = _where(place)
    try:
        if place.is_local:  # delta-rs would make the folder by the umask.
            place.filesystem().create_dir(f"{place.root}/{LOG_FOLDER}", recursive=True)
        DeltaTable.create(
            uri, schema, mode="error", partition_by=["kind"], storage_options=options,
            configuration=dict(properties), raise_if_key_not_exists=False,
            # A retry after another process's commit would give the table a second id.
            commit_properties=CommitProperties(max_commit_retries=0),
        )  # fmt: skip
    except (DeltaError, OSError) as error:
        if open_table(place) is not None:
            return False
        raise LedgerError(
            f"cannot make the ledger table at {place}: {_reason(error)}", path=place.uri
        ) from error
    return True


def try_commit(place: LedgerPath) -> None:
    """Let delta-rs make and remove a table below the ledger's folder. Raise LedgerError if delta-rs
    cannot, because it may need other settings than pyarrow."""
    folder = f"_tries/{uuid.uuid4().hex}"
    log = f"{place.root}/{folder}/{LOG_FOLDER}/{0:020}.json"
    error = create_first_commit(place, folder)
    # If the answer to a commit is lost, delta-rs repeats the commit, and the store refuses it.
    with failing("delta-rs cannot commit to it", place.uri):
        if error is not None and read_bytes(place.filesystem(), log) is None:
            raise LedgerError(f"delta-rs cannot commit to it: {_reason(error)}", path=place.uri)
    with contextlib.suppress(OSError):
        place.filesystem().delete_dir(f"{place.root}/{folder}")


def _takes(place: LedgerPath) -> bool:
    if place.is_local:
        return keeps_transactions() and not _ESCAPED.intersection(place.root)
    return has_delta_rs(place.uri) and not _ESCAPED.intersection(place.uri)


def _where(place: LedgerPath) -> tuple[str, dict[str, str] | None]:
    if place.is_local:
        return place.root, None
    return delta_rs_address(place.uri, place.storage)


def has_commits(place: LedgerPath) -> bool:
    """Return whether a local folder has a Delta table: a log with commits, of any features."""
    return any(Path(place.root, LOG_FOLDER).glob("*.json"))


def _has_log(place: LedgerPath) -> bool:
    """Return whether the table has a log. On stores ask pyarrow, which fails sooner than delta-rs.
    Raise LedgerError or OSError if the store cannot be read."""
    if place.is_local:
        return Path(place.root, LOG_FOLDER).is_dir()
    if place.problem:
        raise LedgerError(place.problem, path=place.uri)
    if place not in _seen:
        info = place.filesystem().get_file_info(f"{place.root}/{LOG_FOLDER}")
        if info.type.name != "Directory":
            return False
        _seen.add(place)
    return True


@native_calls.uninterrupted()
def last_version(place: LedgerPath, table: DeltaTable, app_id: str) -> int | None:
    """Return the last transaction of `app_id` in this version of the table, or None."""
    from deltalake.exceptions import DeltaError

    try:
        version: int | None = table.transaction_version(app_id)
    except (DeltaError, OSError) as error:
        raise _away(place.uri, error) from error
    return version


def added_rows(place: LedgerPath, token: str, since: int, newest: int) -> int | None:
    """Return the number of rows that the commit with this `token` has added, after the version
    `since` and up to `newest`; None if there is no such commit. (delta-rs's `history` reads all
    commits and holds the GIL meanwhile.)

    Raises:
        LedgerError: the log cannot be read now, or does not tell the number of rows.
        FileNotFoundError: the log no longer reaches back to `since`.
    """
    filesystem = place.filesystem()
    for version in range(newest, since, -1):
        try:
            actions = _commit_at(place, filesystem, version)
        except OSError as error:
            raise _away(place.uri, error) from error
        if actions is None:
            raise FileNotFoundError(f"the log no longer has the version {version}")
        if any(action.get("commitInfo", {}).get(_USER_METADATA) == token for action in actions):
            return sum(_rows_of(place, action["add"]) for action in actions if "add" in action)
    return None


def _rows_of(place: LedgerPath, add: Mapping[str, Any]) -> int:
    rows = json.loads(add.get("stats") or "{}").get("numRecords")
    if rows is None:
        raise uncounted(place)
    return int(rows)


def uncounted(place: LedgerPath) -> LedgerError:
    """Return the error about a commit without row counts, which cannot be checked."""
    return LedgerError(
        f"the log of the ledger {place} does not tell how many rows a commit has added, so it is "
        "not known whether all are in: leave spark.databricks.delta.stats.collect and "
        "spark.databricks.delta.history.metricsEnabled at their default, true",
        path=place.uri,
    )


def commits_after(
    place: LedgerPath, filesystem: fs.FileSystem, version: int
) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Yield (version, actions) of the commits after a version, up to the first missing commit.

    Raises:
        OSError: a commit cannot be read now.
        ValueError: a commit is not JSON.
    """
    for number in itertools.count(version + 1):
        actions = _commit_at(place, filesystem, number)
        if actions is None:
            return
        yield number, actions


def _commit_at(
    place: LedgerPath, filesystem: fs.FileSystem, version: int
) -> list[dict[str, Any]] | None:
    data = read_bytes(filesystem, f"{place.root}/{LOG_FOLDER}/{version:020}.json")
    return None if data is None else [json.loads(line) for line in data.splitlines()]


def as_dataset(table: DeltaTable) -> dataset.Dataset:
    """Return the rows for pyarrow, with times of all years. Spark's OPTIMIZE writes INT96, and
    pyarrow's default unit for INT96, ns, has only the years 1678 to 2262."""
    from pyarrow.dataset import ParquetReadOptions

    options = ParquetReadOptions(coerce_int96_timestamp_unit="us")
    return table.to_pyarrow_dataset(parquet_read_options=options)


@native_calls.uninterrupted()
def selected_rows(
    table: DeltaTable, row_filter: dataset.Expression, columns: Sequence[str], before: str = ""
) -> pa.Table:
    """Return rows. Files whose statistics exclude the filter are not opened. Raise LedgerError,
    whose text begins with `before`, if files that the table names are gone or damaged, or cannot be
    read now."""
    try:
        return as_dataset(table).to_table(columns=list(columns), filter=row_filter)
    except (OSError, pa.ArrowException) as error:
        is_gone = isinstance(error, (FileNotFoundError, pa.ArrowException))
        if not is_gone and "not found" not in str(error):
            raise _away(table.table_uri, error, before=before) from error
        raise unreadable(table.table_uri, error, before) from error


class StoredFile(NamedTuple):
    """A data file of the table.

    Attributes:
        path: below the table's folder.
        oldest: lower bound of the column `at`; None if the file has no such statistics.
    """

    path: str
    kind: str
    size: int
    rows: int
    oldest: dt.datetime | None


def stored_files(place: LedgerPath, table: DeltaTable) -> list[StoredFile]:
    """Return the data files of this version of the table. Raise LedgerError if the log names files
    that are not the ledger's."""
    facts = _added(place, table, "path", "partition.kind", "size_bytes", "num_records", "min.at")
    return [StoredFile(path, kind, size, rows or 0, at) for path, kind, size, rows, at in facts]


def data_files(place: LedgerPath, table: DeltaTable) -> dict[str, list[str]]:
    """Return the table's files by kind, as paths below its folder. Raise LedgerError if the log
    names files that are not the ledger's, or if the folder holds links or pipes."""
    if place.is_local:
        check_files(place)
    files: dict[str, list[str]] = {}
    for path, kind in _added(place, table, "path", "partition.kind"):
        files.setdefault(kind, []).append(path)
    return dict(sorted(files.items()))


def _added(place: LedgerPath, table: DeltaTable, *names: str) -> list[tuple[Any, ...]]:
    """Return facts of each data file, path and kind first, after `check_named`; None for statistics
    that the log does not have."""
    # `pa.table` would import pandas, and so would a timestamp that becomes a Python value.
    facts = pa.RecordBatchReader.from_stream(table.get_add_actions(flatten=True)).read_all()
    rows = facts.select([name for name in names if name in facts.column_names]).to_pylist()
    files = [tuple(map(row.get, names)) for row in rows]
    check_named(place.uri, files)
    return files


def damaged(place: LedgerPath, why: str, remedy: str = _BACKUP, before: str = "") -> LedgerError:
    """Return the error about a table that exists but cannot be read."""
    text = f"{before}Delta cannot read the ledger {place}: {why.rstrip('.')}. {remedy}"
    return LedgerError(text, path=place.uri)


def check_named(uri: str, files: Iterable[Sequence[Any]]) -> None:
    """Check that the files (path, kind, ...) in a table's log belong to the ledger. The log may be
    forged by anybody who can write to the folder. Raise LedgerError if a file is not below the
    folder, or if its kind is not one of a ledger."""
    for name, kind, *_ in files:
        if kind not in KINDS or _DATA_FILE.fullmatch(name) is None:
            raise LedgerError(
                f"the ledger {uri} is not read: its log names the file {name!a} of kind {kind!a}, "
                "which no rocket-sink wrote. See who can write to its folder, and put its "
                "_delta_log back from a backup",
                path=uri,
            )


def check_files(place: LedgerPath, *, log_only: bool = False) -> None:
    """Check that a local table consists of plain files; else raise a LedgerError that names another
    file. Delta's readers follow links and wait for pipes, and VACUUM deletes files behind links."""
    # Import here: processes that plan and commit a stream import this module, but open no table,
    # so they need not load `plain_files`.
    from rocket_sink.plain_files import check_plain

    with failing(f"the ledger {place} is not used", place.uri):
        root = Path(place.root)
        names = [] if log_only or not root.is_dir() else [path.name for path in root.iterdir()]
        folders = [name for name in names if name.startswith("kind=")]
        check_plain(place.root, LOG_FOLDER, *folders)


def unreadable(path: str, error: BaseException, before: str = "") -> LedgerError:
    """Return the LedgerError for a reader's error: files of the table are gone or damaged."""
    return LedgerError(
        f"{before}the ledger {path} cannot be read: {_reason(error)}. Files that the table names "
        "are gone or damaged: put them back from a backup",
        path=path,
    )


@native_calls.uninterrupted()
def commit(
    place: LedgerPath, table: DeltaTable, files: Sequence[DataFile], app_id: str, version: int,
    token: str = "",
) -> None:  # fmt: skip
    """Append the files, as the transaction `version` of `app_id` (empty: no transaction).

    Raise LedgerError if another process has committed the transaction meanwhile, or if the commit
    failed. No row is appended then, or the error says that this is unknown.

    Args:
        table: a version without the transaction.
        token: the commit's `userMetadata` in the table's history.
    """
    from deltalake.exceptions import CommitFailedError, DeltaError

    filesystem = place.filesystem()
    # On a store each check costs a request, so check one file, which is gone if the folder is.
    looked_at = [file.path for file in (files if place.is_local else files[:1])]
    ledger_id = table.metadata().id
    if read_bytes(filesystem, f"{place.root}/{LOG_FOLDER}/{table.version():020}.json") is None:
        # The log's file is gone: another driver has cleaned up the log, or the folder was deleted.
        # A commit without its predecessor would begin a log that nobody can read.
        newer = open_table(place)
        if newer is None or newer.metadata().id != ledger_id:
            raise _failed(place, "its log is gone; was the folder deleted?")
        table = newer
    for info in filesystem.get_file_info([f"{place.root}/{path}" for path in looked_at]):
        if not info.is_file:
            # Do not commit a version that names a missing file, because nobody could read it.
            raise _failed(
                place, f"{info.path} is gone; was the folder deleted, or vacuumed for 0 hours?"
            )
    for tries in itertools.count(1):
        try:
            write_version(table, add_actions(files, has_new_rows=True), app_id, version, token)
            break
        except (DeltaError, OSError) as error:
            try:
                newer, is_unknown = open_table(place), False
            except LedgerError:
                newer, is_unknown = None, True
            if is_unknown or (newer is None and not place.is_local):
                raise _failed(
                    place,
                    f"{_reason(error)}. The ledger cannot be read now, so it is not known whether "
                    "the rows are in",
                ) from error
            if newer is None or newer.metadata().id != ledger_id or tries == _TRIES:
                raise _failed(place, _reason(error)) from error
            # File names are unique to one commit, so the first file tells whether it is in.
            if files and any(uri.endswith(f"/{files[0].path}") for uri in newer.file_uris()):
                break  # The answer to our own commit was lost, and delta-rs repeated the commit.
            last = last_version(place, newer, app_id) if app_id else None
            if last is not None and last >= version:
                raise _failed(place, f"another process has committed {app_id} {last}") from error
            if not isinstance(error, CommitFailedError):
                raise _failed(place, _reason(error)) from error
            table = newer


def add_actions(files: Iterable[DataFile], *, has_new_rows: bool) -> list[Any]:
    """Return Delta's actions that add the files. Streams skip files without new rows."""
    from deltalake.transaction import AddAction

    return [
        AddAction(f.path, f.size, {"kind": f.kind}, f.modified_ms, has_new_rows, f.stats)
        for f in files
    ]


def write_version(
    table: DeltaTable, actions: list[Any], app_id: str, version: int, token: str = ""
) -> None:
    """Write the table's next version, as the transaction `version` of `app_id` (see `commit`)."""
    from deltalake import CommitProperties, PostCommitHookProperties, Transaction

    transactions = [Transaction(app_id, version, now_ms())] if app_id else None
    metadata = {_USER_METADATA: token} if token else None
    table.create_write_transaction(
        actions, "append", table.schema(), ["kind"],
        commit_properties=CommitProperties(metadata, app_transactions=transactions),
        # Run no hooks after the commit. If a hook failed, the commit would seem to have failed.
        post_commithook_properties=PostCommitHookProperties(False, False),
    )  # fmt: skip


def _failed(place: LedgerPath, reason: str) -> LedgerError:
    return LedgerError(f"cannot commit to the ledger {place}: {reason}", path=place.uri)


def _away(uri: str, error: BaseException, after: str = "", before: str = "") -> LedgerError:
    text = f"{before}the ledger {uri} cannot be read now: {_reason(error)}{after}"
    return LedgerError(text, path=uri)


def _reason(error: BaseException) -> str:
    """Return delta-rs's error text on one line, without colours and stack."""
    text = _STACK.split(_COLOURS.sub("", str(error)))[0][:_LONGEST_REASON]
    lines = [line.strip(" \u21b3") for line in text.splitlines()]
    return ": ".join(line.rstrip(":.") for line in lines if line) or type(error).__name__
