"""The rows that come into a ledger's table, commit by commit, each once."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from rocket_sink.ledger.append.delta_rs import commit_actions
from rocket_sink.ledger.path import LedgerPath
from rocket_sink.ledger.schema import LEDGER_SCHEMA

_LOG: Final = "_delta_log"
_COMMIT: Final = re.compile(r"([0-9]{20})\.json")


class LedgerFollower:
    """Reads Delta's log from its end on, and the files that commits add.

    Files that OPTIMIZE wrote anew have no new rows and are passed over. A commit is read once it
    is there whole; its log file is kept by Delta for 30 days.
    """

    def __init__(self, place: LedgerPath, columns: tuple[str, ...]) -> None:
        """
        Args:
            columns: of the rows that are wanted; `kind` is told apart.

        Raises:
            LedgerError: pyarrow has no file system for the ledger.
            OSError: it cannot be reached.
        """
        self._place = place
        self._columns = columns
        self._files = place.filesystem()
        self._version = self._newest()

    def new_rows(self) -> Iterator[tuple[str, pa.Table]]:
        """(kind, rows) of each file that was added since the last call.

        Raises:
            OSError: the folder cannot be read now. The next call begins with the commit that
                this one could not read.
            ValueError: a commit is no JSON.
        """
        while (actions := self._commit(self._version + 1)) is not None:
            found = [
                (str(add["partitionValues"]["kind"]), self._rows(unquote(add["path"])))
                for add in actions
                if add["dataChange"]
            ]
            self._version += 1
            yield from found

    def _newest(self) -> int:
        selector = fs.FileSelector(f"{self._place.root}/{_LOG}", allow_not_found=True)
        names = (_COMMIT.fullmatch(info.base_name) for info in self._files.get_file_info(selector))
        return max((int(name[1]) for name in names if name), default=-1)

    def _commit(self, version: int) -> list[dict[str, Any]] | None:
        """The files that a commit adds; None: it is not there."""
        actions = commit_actions(self._place, self._files, version)
        return actions and [action["add"] for action in actions if "add" in action]

    def _rows(self, path: str) -> pa.Table:
        """The wanted columns; null where an older rocket-sink wrote the file without them."""
        with self._files.open_input_file(f"{self._place.root}/{path}") as file:
            rows = pq.read_table(file, columns=list(self._columns))
        arrays = {}
        for name in self._columns:
            type_ = LEDGER_SCHEMA.field(name).type
            known = name in rows.column_names
            arrays[name] = rows.column(name).cast(type_) if known else pa.nulls(len(rows), type_)
        return pa.table(arrays)
