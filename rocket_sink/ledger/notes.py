"""Notes beside the ledger's table: small files, whole or not at all, also with several writers.

Each is one JSON value. Delta looks into no folder whose name starts with `_`.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rocket_sink.ledger.path import PARTIAL, LedgerPath, make_folder_of

if TYPE_CHECKING:
    from pyarrow import fs


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
        """The note's place in the terms of the ledger's file system, for messages."""
        return f"{self._place.root}/{path}"

    def write(self, path: str, value: Any, *, replace: bool = True) -> bool:
        """Write a note durably; False when another's was left there (`replace=False`)."""
        full = self.where(path)
        make_folder_of(self._files, full)
        data = json.dumps(value).encode()
        local = self._place.is_local
        return write_bytes(self._files, full, data, is_local=local, replace=replace)

    def read(self, path: str) -> Any:
        """Return the content of a note; None if there is no note.

        Raises:
            ValueError: no JSON.
        """
        data = read_bytes(self._files, self.where(path))
        return None if data is None else json.loads(data)

    def remove(self, path: str) -> None:
        """Remove a note, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            self._files.delete_file(self.where(path))

    def remove_folder(self, path: str) -> None:
        self._files.delete_dir(self.where(path))

    def paths(self, folder: str) -> list[str]:
        """The notes in a folder and below."""
        from pyarrow import fs

        selector = fs.FileSelector(self.where(folder), recursive=True, allow_not_found=True)
        infos = self._files.get_file_info(selector)
        names = [info.path for info in infos if info.is_file and info.path.endswith(".json")]
        return [name.removeprefix(self.where("")) for name in names]


def now_ms() -> int:
    """Return the time of this process's clock, in ms since 1970."""
    return time.time_ns() // 1_000_000


def read_bytes(filesystem: fs.FileSystem, path: str) -> bytes | None:
    """A file's content; None when it is not there."""
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
        replace: False leaves a file that is there alone. Remote file systems have no such call in
            pyarrow: there it is looked at first, and the later of two writers at once wins.

    Returns:
        False when another's file was left there.
    """
    if not is_local:
        if not replace and filesystem.get_file_info(path).is_file:
            return False
        with filesystem.open_output_stream(path) as out:
            out.write(data)
        return True
    # A name of its own: two writers of one partial file would cut each other's text.
    partial = Path(f"{path}.{uuid.uuid4().hex}{PARTIAL}")
    with partial.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    try:
        if replace:
            partial.rename(path)
            return True
        # A link, unlike a rename, fails where the name is taken.
        os.link(partial, path)
    except FileExistsError:
        return False
    else:
        return True
    finally:
        partial.unlink(missing_ok=True)
        fsync_folder(partial.parent)


def fsync_folder(folder: Path) -> None:
    """A rename or a new name is durable when its folder is."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
