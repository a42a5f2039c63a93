"""Notes: small files beside the ledger's table, by which drivers and tasks inform other processes.

    <ledger>/_notes/<kind>/<name>.json

A note is one JSON value. Readers see it whole or not at all, even if several processes write it.
Delta ignores folders whose names start with `_`.

| kind | content | removed |
|---|---|---|
| tokens | proof that a task sees the driver's ledger (`token`) | never |
| starts | a task attempt of an epoch has begun (`epoch_starts`) | three epochs later |
| epochs | the epoch that the driver began last | never, one per query |
| writes | a batch write of an `appId` has begun | when the write has succeeded |
| batches | a batch write with a `batchId` has begun, or is complete | never, one per id |
| queries | a streaming query has started; the query of an `appId` | never, one per query |
| ends | half messages of an epoch are being committed | when the ledger has their end |
| pending | sharding keys of a task's dead letters (`pending_keys`) | key by key, with its letters |
| queues | a topic's queues for ordered rows (`queue_snapshot`) | by batches that leave no letters |
| folds | the spool files that a fold takes (`driver.fold`) | when the files are deleted |
| backfill | token of the backfill that may send (`backfill_marks`) | never, one |
| sources | how a backfilled table's rows are read and known again | never, one per table |
| upkeep | when rows expired last | never, one |

Several writers may have to agree on the content of a note (`agree`). In a local folder the first
writer wins, because it makes the note's name by a hard link. In a store each writer first writes
its text to another file, the note's claim (kind `claims`), unless there is a claim already. After
`_SETTLE_S` all writers that saw no claim have written theirs. Then each writer copies the claim's
text to the note. Where delta-rs can commit, the first claim wins, because delta-rs writes it as the
first commit of a table, which may not exist. On an S3 that ignores this condition, and where
delta-rs cannot commit, the last claim wins."""

from __future__ import annotations

import contextlib
import json
import time
from typing import TYPE_CHECKING, Any, Final

from rocket_sink.errors import LedgerError
from rocket_sink.ledger.path import LOG_FOLDER, NOTES, LedgerPath, make_folder_of
from rocket_sink.ledger.storage import delta_rs_address, has_delta_rs

if TYPE_CHECKING:
    from pyarrow import fs

_CLAIMS: Final = "claims"
_CLAIMED: Final = frozenset({"batches", "queries", "queues", "sources", "writes"})
"""Kinds of notes whose content several writers agree on."""
_SUFFIX: Final = ".json"
_SETTLE_S: Final = 3.0
"""Wait before a writer reads the claim; other writers must have written their claims by then."""
_POLL_S: Final = 0.05


class NoteStore:
    """The notes of one kind in one ledger, by name; a name may contain folders.

    Make a new store for each use, because a file system's handles must not cross a fork.

    Raises:
        LedgerError: from `LedgerPath.filesystem`.
        OSError: from all methods: the folder cannot be read or written.
    """

    def __init__(self, place: LedgerPath, kind: str) -> None:
        self._place = place
        self._kind = kind
        self._files = place.filesystem()

    def where(self, name: str) -> str:
        """Return the note's path in the ledger's file system, for messages."""
        return f"{self._path(name)}{_SUFFIX}"

    def write(self, name: str, value: Any) -> None:
        """Write a note durably; replace an existing note."""
        self._put(self.where(name), json.dumps(value).encode())

    def agree(self, name: str, value: Any) -> tuple[Any, bool]:
        """Return the content that all writers agree on, and whether it is this call's `value`.
        Raise ValueError if the existing note is not JSON."""
        data = json.dumps(value).encode()
        while (note := self.read(name)) is None:
            if not self._place.is_local:
                agreed = self._agree_by_claim(name, data)
                try:
                    self._put(self.where(name), agreed)
                except OSError:
                    # On Azure and HDFS one of two writes fails; the other one writes this text.
                    if self.read(name) is None:
                        raise
                return json.loads(agreed), agreed == data
            if self._put(self.where(name), data, replace=False):
                return value, True
        return note, False

    def read(self, name: str) -> Any:
        """Return a note's content; None if there is no note. Raise ValueError if it is not JSON.

        On Azure and HDFS a note is empty while pyarrow writes it, so wait for its content. A note
        that stays empty is of a writer that died, and counts as none."""
        deadline_s = time.monotonic() + _SETTLE_S
        while (
            data := read_bytes(self._files, self.where(name))
        ) == b"" and not self._place.is_local:
            if time.monotonic() > deadline_s:
                return None
            time.sleep(_POLL_S)
        return None if data is None else json.loads(data)

    def names(self, folder: str = "") -> list[str]:
        """Return the names of the notes in a folder and its subfolders; by default of all notes."""
        from pyarrow import fs

        selector = fs.FileSelector(
            self._path(folder).rstrip("/"), recursive=True, allow_not_found=True
        )
        infos = self._files.get_file_info(selector)
        paths = [info.path for info in infos if info.is_file and info.path.endswith(_SUFFIX)]
        return [path.removeprefix(self._path("")).removesuffix(_SUFFIX) for path in paths]

    def remove(self, *names: str) -> None:
        """Remove notes, if they exist."""
        for name in names:
            # Remove the claim before the note: while the note exists, no writer makes a new claim.
            has_claim = self._kind in _CLAIMED and not self._place.is_local
            for path in ([self._claim(name)] if has_claim else []) + [self.where(name)]:
                remove_file(self._files, path)

    def remove_folder(self, folder: str) -> None:
        """Remove all notes below a folder. Another process may remove notes at the same time."""
        with contextlib.suppress(FileNotFoundError):
            self._files.delete_dir(self._path(folder))

    def _path(self, name: str) -> str:
        return f"{self._place.root}/{NOTES}/{self._kind}/{name}"

    def _claim(self, name: str) -> str:
        return f"{self._place.root}/{self._claim_table(name)}/{LOG_FOLDER}/{0:020}.json"

    def _claim_table(self, name: str) -> str:
        return f"{NOTES}/{_CLAIMS}/{self._kind}/{name}"

    def _put(self, path: str, data: bytes, *, replace: bool = True) -> bool:
        """Write a file that readers see whole or not at all. If `replace` is False, keep an
        existing local file and return False; object stores always replace the file."""
        make_folder_of(self._files, path)
        if self._place.is_local:
            return bool(self._files.handler.write_whole(path, data, replace=replace))
        with self._files.open_output_stream(path) as out:
            out.write(data)
        return True

    def _agree_by_claim(self, name: str, data: bytes) -> bytes:
        """Write the claim, unless there is one; return the text that all writers take."""
        claim, error = self._claim(name), None
        if has_delta_rs(self._place.uri):
            error = create_first_commit(self._place, self._claim_table(name), data.decode())
        # If delta-rs is missing or the store refuses it, nobody has made the claim: write it here.
        if read_bytes(self._files, claim) is None:
            self._put(claim, json.dumps({"metaData": {"description": data.decode()}}).encode())
        time.sleep(_SETTLE_S)
        agreed = read_bytes(self._files, self.where(name))
        if agreed:
            return agreed
        commit = read_bytes(self._files, claim)
        if commit is None:
            raise OSError(f"{claim} cannot be made: {error or 'another process removed it'}")
        actions = map(json.loads, commit.splitlines())
        text = next(action["metaData"]["description"] for action in actions if "metaData" in action)
        return str(text).encode()


def create_first_commit(place: LedgerPath, folder: str, text: str = "") -> Exception | None:
    """Make the log of a table in a folder below the ledger by delta-rs, with `text` as the table's
    description, unless there is a log. Return the error, if any."""
    import pyarrow as pa
    from deltalake import CommitProperties, DeltaTable
    from deltalake.exceptions import DeltaError

    try:
        uri, options = delta_rs_address(f"{place.uri}/{folder}", place.storage)
        DeltaTable.create(
            uri, pa.schema({"note": pa.string()}), mode="error",
            description=text, storage_options=options,
            commit_properties=CommitProperties(max_commit_retries=0),
        )  # fmt: skip
    except (DeltaError, LedgerError, OSError) as error:
        return error
    return None


def now_ms() -> int:
    """Return the wall-clock time of this host, in ms since 1970."""
    return time.time_ns() // 1_000_000


def remove_file(filesystem: fs.FileSystem, path: str) -> None:
    """Delete a file, if it exists. pyarrow's error for a missing file on HDFS is another one."""
    try:
        filesystem.delete_file(path)
    except OSError:
        if filesystem.get_file_info(path).is_file:
            raise


def read_bytes(filesystem: fs.FileSystem, path: str) -> bytes | None:
    """Return a file's content; None if there is no file."""
    try:
        with filesystem.open_input_stream(path) as file:
            return bytes(file.read())
    except FileNotFoundError:
        return None
