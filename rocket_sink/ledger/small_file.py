"""Small files beside the ledger, whole or not at all, also when several processes write one."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from rocket_sink.ledger.spool_files import PARTIAL

if TYPE_CHECKING:
    from pyarrow import fs


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
