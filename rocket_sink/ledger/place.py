"""Where a ledger is: one path as Spark names it and as pyarrow's file systems name it.

A path without a scheme is local, whatever Spark's default file system is, so that tasks (pyarrow)
and driver (Spark) cannot mean two places. pyarrow's file systems are imported where one is needed:
the data source names a ledger in processes that live for one call (`spark.datasource`).
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote, urlsplit

from rocket_sink.errors import LedgerError

if TYPE_CHECKING:
    from pyarrow import fs

SPOOL: Final = "_spool"
"""Below the table's folder; Delta looks into no folder whose name starts with `_`."""
FOLDS: Final = "_folds"
QUARANTINE: Final = "_quarantine"

_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")
"""Two characters and more: one is a Windows drive."""
_ARROW_SCHEMES: Final = {"s3a": "s3", "s3n": "s3", "wasbs": "abfs", "abfss": "abfs"}
"""Hadoop's names for what pyarrow calls otherwise."""


@dataclass(frozen=True)
class Place:
    """A ledger's table folder.

    Attributes:
        uri: absolute, for Spark; `file:/...` of a local one (with more slashes Delta takes the
            location for another one).
        root: the folder in the terms of `filesystem()`.
        is_local: files are appended, renamed and locked by the operating system.
    """

    uri: str
    root: str
    is_local: bool

    @property
    def spool(self) -> str:
        return f"{self.root}/{SPOOL}"

    @property
    def folds(self) -> str:
        return f"{self.spool}/{FOLDS}"

    @property
    def quarantine(self) -> str:
        """Where damaged spool files go, in folders and by names that they had in the spool."""
        return f"{self.spool}/{QUARANTINE}"

    def filesystem(self) -> fs.FileSystem:
        """pyarrow's file system; made anew, for those handles must not cross a fork.

        Raises:
            LedgerError: pyarrow knows no such file system, or cannot reach it.
        """
        from pyarrow import fs

        if self.is_local:
            return fs.LocalFileSystem()
        return _remote(self.uri)[0]


def path_part(text: str) -> str:
    """`text`, as a query's id, as one component of a path; ids longer than 80 are cut."""
    return re.sub(r"[^A-Za-z0-9.-]", "-", text)[:80]


def locate(path: str | os.PathLike[str]) -> Place:
    """The place of a ledger; a relative path is made absolute here, so call it on the driver.

    Raises:
        LedgerError: no path, or a file system that pyarrow does not know.
    """
    text = os.fspath(path).strip().rstrip("/")
    if not text:
        raise LedgerError("the ledger's path is empty; give a folder, as in ledger=/data/ledger")
    if _SCHEME.match(text) is None:
        return _local(text)
    if text.startswith("file:"):
        return _local(unquote(urlsplit(text).path))
    return Place(text, _remote(text)[1], is_local=False)


def _local(path: str) -> Place:
    root = str(Path(path).absolute())
    return Place(f"file:{root}", os.path.normpath(root), is_local=True)


def _remote(uri: str) -> tuple[fs.FileSystem, str]:
    from pyarrow import fs

    scheme, _, rest = uri.partition(":")
    try:
        filesystem, root = fs.FileSystem.from_uri(f"{_ARROW_SCHEMES.get(scheme, scheme)}:{rest}")
    except (OSError, ValueError, NotImplementedError) as error:
        raise LedgerError(
            f"the spool of the ledger {uri} cannot be used: {error}. Tasks write it by pyarrow.fs "
            "(local, s3, gs, abfs, hdfs); the foreachBatch lane needs none and works with every "
            "file system that Spark knows",
            path=uri,
        ) from error
    return filesystem, root.rstrip("/")
