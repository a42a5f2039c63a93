"""Notes beside the ledger's table: small files, whole or not at all, also with several writers.

Each is one JSON value. Delta looks into no folder whose name starts with `_`.

Writers that must agree on one note (`replace=False`) link a file in a local folder. A store has no
such call in pyarrow. There each writer puts its text into the note's claim, below `_claims`, unless
a claim is there. It waits until all writers that saw none have put theirs, and makes the claim's
text the note. On S3 the put is conditional (`If-None-Match`): delta-rs puts the first commit of a
table so, and the claim is that commit. A store that ignores the condition keeps the last claim that
was put before the wait is over.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rocket_sink.errors import LedgerError
from rocket_sink.ledger.path import LOG_FOLDER, LedgerPath, make_folder_of
from rocket_sink.ledger.storage import delta_rs_options, is_s3, keeps_transactions

if TYPE_CHECKING:
    from pyarrow import fs

_CLAIMS: Final = "_claims"
_SETTLE_S: Final = 3.0
"""Longest time that a writer may take between finding no claim and having put one."""


class NoteStore:
    """The notes of one ledger, by their paths below its folder; made anew for each use, for a file
    system's handles must not cross a fork.

    Raises:
        LedgerError: as `LedgerPath.filesystem`.
        OSError: from all methods: the folder cannot be read or written.
    """

    def __init__(self, place: LedgerPath) -> None:
        self._place = place
        self._files = place.filesystem()

    def where(self, path: str) -> str:
        """Return the note's place in the terms of the ledger's file system, for messages."""
        return f"{self._place.root}/{path}"

    def write(self, path: str, value: Any, *, replace: bool = True) -> bool:
        """Write a note durably. Return False if another's stays there (`replace=False`)."""
        full = self.where(path)
        make_folder_of(self._files, full)
        data = json.dumps(value).encode()
        if self._place.is_local or replace:
            local = self._place.is_local
            return write_bytes(self._files, full, data, is_local=local, replace=replace)
        if read_bytes(self._files, full) is not None:
            return False
        agreed = self._agreed(path, data)
        write_bytes(self._files, full, agreed, is_local=False)
        return agreed == data

    def _agreed(self, path: str, data: bytes) -> bytes:
        """Return the text that all writers of a note take which is not there yet."""
        claim, error = self._claim(path), None
        if is_s3(self._place.uri) and keeps_transactions():
            error = _commit_claim(self._place, path, data)
        # A store may know no conditions, or let delta-rs in by other credentials only.
        if read_bytes(self._files, claim) is None:
            make_folder_of(self._files, claim)
            text = json.dumps({"metaData": {"description": data.decode()}})
            write_bytes(self._files, claim, text.encode(), is_local=False)
        time.sleep(_SETTLE_S)
        agreed = read_bytes(self._files, self.where(path))
        if agreed is not None:
            return agreed
        commit = read_bytes(self._files, claim)
        if commit is None:
            raise OSError(f"{claim} cannot be made: {error or 'another process removed it'}")
        actions = map(json.loads, commit.splitlines())
        text = next(action["metaData"]["description"] for action in actions if "metaData" in action)
        return str(text).encode()

    def _claim(self, path: str) -> str:
        return self.where(f"{_CLAIMS}/{path}/{LOG_FOLDER}/{0:020}.json")

    def read(self, path: str) -> Any:
        """Return the content of a note; None if there is no note.

        Raises:
            ValueError: no JSON.
        """
        data = read_bytes(self._files, self.where(path))
        return None if data is None else json.loads(data)

    def remove(self, path: str, *, claimed: bool = False) -> None:
        """Remove a note, if it is there; `claimed`: it was written with `replace=False`."""
        # The claim first: a writer leaves a note alone that is there, with a claim or without.
        paths = [self._claim(path)] if claimed and not self._place.is_local else []
        for full in (*paths, self.where(path)):
            with contextlib.suppress(FileNotFoundError):
                self._files.delete_file(full)

    def remove_folder(self, path: str) -> None:
        self._files.delete_dir(self.where(path))

    def paths(self, folder: str) -> list[str]:
        """Return the notes in a folder and below."""
        from pyarrow import fs

        selector = fs.FileSelector(self.where(folder), recursive=True, allow_not_found=True)
        infos = self._files.get_file_info(selector)
        names = [info.path for info in infos if info.is_file and info.path.endswith(".json")]
        return [name.removeprefix(self.where("")) for name in names]


def _commit_claim(place: LedgerPath, path: str, data: bytes) -> Exception | None:
    """Put a note's text into its claim unless one is there; returns the error, if any."""
    import pyarrow as pa
    from deltalake import CommitProperties, DeltaTable
    from deltalake.exceptions import DeltaError

    try:
        DeltaTable.create(
            f"s3://{place.root}/{_CLAIMS}/{path}", pa.schema({"note": pa.string()}), mode="error",
            description=data.decode(), storage_options=delta_rs_options(place.uri, place.storage),
            commit_properties=CommitProperties(max_commit_retries=0),
        )  # fmt: skip
    except (DeltaError, LedgerError, OSError) as error:
        return error
    return None


def now_ms() -> int:
    """Return the time of this process's clock, in ms since 1970."""
    return time.time_ns() // 1_000_000


def read_bytes(filesystem: fs.FileSystem, path: str) -> bytes | None:
    """Return a file's content; None if it is not there."""
    try:
        with filesystem.open_input_stream(path) as file:
            return bytes(file.read())
    except FileNotFoundError:
        return None


def write_bytes(
    filesystem: fs.FileSystem, path: str, data: bytes, *, is_local: bool, replace: bool = True
) -> bool:
    """Write a file that readers see whole or not at all.

    Args:
        replace: False leaves a local file that is there alone; pyarrow cannot in a store.

    Returns:
        False when another's file was left there.
    """
    if not is_local:
        with filesystem.open_output_stream(path) as out:
            out.write(data)
        return True
    return bool(filesystem.handler.write_whole(path, data, replace=replace))


def fsync_folder(folder: Path) -> None:
    """Sync a folder, which makes a rename or a new name in it durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
