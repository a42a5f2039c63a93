"""A test whether a folder supports hard links, which delta-rs needs to commit to a local table.

delta-rs makes each version's file by a hard link, because a link fails if the name exists, and a
rename does not. On a file system without hard links (blobfuse, some FUSE and SMB mounts, FAT), one
of two drivers would overwrite the other's commit."""

from __future__ import annotations

import contextlib
import errno
import os
import uuid
from pathlib import Path
from typing import Any, Final

import psutil

from rocket_sink.errors import LedgerError

_WITHOUT: Final = frozenset(
    {
        errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL, errno.EMLINK, errno.EACCES,
        errno.EXDEV,
    }
)  # fmt: skip
"""Error numbers of file systems that have no hard links, or refuse them for this file."""


def check_links(folder: str) -> None:
    """Check that the folder, or its nearest existing parent, supports hard links.

    Raises:
        LedgerError: there are no hard links; the text names the file system, and says what to do.
        OSError: the folder cannot be written.
    """
    place = Path(folder)
    while not place.is_dir():
        place = place.parent
    tried = place / f"_try-{uuid.uuid4().hex}"
    second = tried.with_suffix(".link")
    tried.touch(exist_ok=False)
    try:
        os.link(tried, second)
    except OSError as error:
        if error.errno not in _WITHOUT:
            raise
        raise LedgerError(
            f"the ledger {folder} cannot be on {_file_system(place)}: it has no hard links "
            f"({error.strerror}), by which Delta makes each commit once. Nothing was sent or "
            "changed. Name a folder on a disk or on NFS, or the store itself by its address "
            "(s3://, gs://, abfss://, hdfs://)",
            path=folder,
        ) from error
    finally:
        for path in (second, tried):
            with contextlib.suppress(FileNotFoundError):
                path.unlink()


def _file_system(place: Path) -> str:
    """Return words for an error: the folder's file system, its type and mount point."""
    disks: list[Any] = []
    with contextlib.suppress(OSError):
        disks = psutil.disk_partitions(all=True)
    above = {str(place.resolve()), *map(str, place.resolve().parents)}
    matches = [disk for disk in disks if disk.mountpoint in above]
    if not matches:
        return "this file system"
    disk = max(matches, key=lambda disk: len(disk.mountpoint))
    return f"the file system {disk.fstype} at {disk.mountpoint}"
