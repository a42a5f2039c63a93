"""Spool files of a store, fetched once and several at a time: a fold reads each three times."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from rocket_sink.ledger.path import is_object_store

if TYPE_CHECKING:
    from pyarrow import fs

_AT_ONCE: Final = 8


class FetchedFiles:
    """What is in the files, in memory; as much of a file system as `spool.stream` reads by.

    A file that could not be fetched is opened in the store, which says why.
    """

    type_name = "memory"

    def __init__(self, filesystem: fs.FileSystem, paths: Sequence[str]) -> None:
        self._filesystem = filesystem
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            self._files = dict(
                zip(paths, pool.map(partial(_fetch, filesystem), paths), strict=True)
            )

    def open_input_file(self, path: str) -> Any:
        data = self._files[path]
        return self._filesystem.open_input_file(path) if data is None else pa.BufferReader(data)

    def open_input_stream(self, path: str, buffer_size: int | None = None) -> Any:
        return self.open_input_file(path)


def fetched(filesystem: fs.FileSystem, paths: Sequence[str]) -> fs.FileSystem | FetchedFiles:
    """For files that fit into memory together; `filesystem` itself where reading is cheap."""
    return FetchedFiles(filesystem, paths) if is_object_store(filesystem) else filesystem


def _fetch(filesystem: fs.FileSystem, path: str) -> bytes | None:
    try:
        # A file's size is known, so that one request reads it; of a stream each part is one.
        with filesystem.open_input_file(path) as file:
            return bytes(file.read())
    except OSError:
        return None
