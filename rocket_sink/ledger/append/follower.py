"""A reader that follows the table's commits and reads each new row once. The reader finds new files
in the `add` actions of Delta's log (`_delta_log/<version>.json`).

A ledger's folder may be deleted and made anew while a reader follows it. So the reader remembers
the content of the commit that it read last. If the log has another commit of that version, or if
the log ends before that version, the folder has a new table, and all its rows are new."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from rocket_sink.ledger.append.delta_rs import commits_after
from rocket_sink.ledger.path import LOG_FOLDER, LedgerPath
from rocket_sink.net import log

_LOG: Final = log.logger(__name__)
_COMMIT: Final = re.compile(r"([0-9]{20})\.json")


class FollowerState(NamedTuple):
    """What happened to the table that a `LedgerFollower` reads.

    Attributes:
        tables: number of tables that were read at this path, one after the other.
        gaps: how often commits or files were gone before they were read.
        has_table: whether the log had a commit at the last reading.
    """

    tables: int = 1
    gaps: int = 0
    has_table: bool = False


class LedgerFollower:
    """Reads the rows of the files that new commits add. The reader skips files that OPTIMIZE wrote,
    because such files have no new rows. Delta keeps a commit's log file for two days. After a
    longer pause the reader logs a warning, and goes on with the oldest commit that is there.

    Attributes:
        state: what happened to the table so far.
    """

    def __init__(
        self, place: LedgerPath, columns: Mapping[str, Sequence[str]], since: int | None = None,
        *, skips_gone: bool = False,
    ) -> None:  # fmt: skip
        """Begin after a version of the table.

        Args:
            columns: {kind of rows to read: columns to read}. A file has its kind's columns only.
            since: version after which reading begins; None: the newest version now.
            skips_gone: skip files that VACUUM has removed after OPTIMIZE copied their rows.

        Raises:
            LedgerError: pyarrow has no file system for the ledger.
            OSError: the ledger cannot be reached.
            FileNotFoundError: the log no longer has the version `since`.
        """
        self._place = place
        self._columns = columns
        self._files = place.filesystem()
        self._version = max(self._versions(), default=-1) if since is None else since
        self._skips_gone = skips_gone
        self.state = FollowerState(has_table=self._version >= 0)
        self._last = self._mark_at(self._version)
        """The mark of the last commit that was read; None if its file is gone."""
        if since is not None and self._last is None:
            raise FileNotFoundError(
                "its log no longer reaches back so far; start the backfill again"
            )

    def reach(self, place: LedgerPath) -> None:
        """Read by the store's keys of `place` from now on, which is this ledger's path, too."""
        self._files = place.filesystem()

    def new_rows(self) -> Iterator[tuple[str, pa.Table]]:
        """Yield (kind, rows) of each file that was added since the last call.

        Raises:
            OSError: the folder or a file cannot be read now. The next call begins again with the
                commit that could not be read.
            ValueError: a commit is not JSON.
        """
        self._begin_new_table()
        self._pass_removed()
        for version, actions in commits_after(self._place, self._files, self._version):
            added = [action["add"] for action in actions if "add" in action]
            file_rows = [
                (kind, rows)
                for add in added
                if add["dataChange"] and (kind := add["partitionValues"]["kind"]) in self._columns
                if (rows := self._rows(kind, unquote(add["path"]))) is not None
            ]
            self._version, self._last = version, _mark(actions)
            yield from file_rows

    def _begin_new_table(self) -> None:
        """Go back before the first commit if the log is not the one that was read last."""
        last, mark = self._last, self._mark_at(self._version)
        versions = [] if mark is not None else list(self._versions())
        has_table = mark is not None or bool(versions)
        self.state = self.state._replace(has_table=has_table)
        # A missing commit proves nothing: the folder may be unmounted, or a clean-up was there.
        is_new = mark != last if mark and last else 0 <= max(versions, default=-1) < self._version
        if is_new:
            self._version, self._last = -1, None
            self.state = self.state._replace(tables=self.state.tables + 1)

    def _mark_at(self, version: int) -> bytes | None:
        """Return the mark of a commit; None if the commit is not there."""
        commits = commits_after(self._place, self._files, version - 1) if version >= 0 else ()
        return next((_mark(actions) for _, actions in commits), None)

    def _pass_removed(self) -> None:
        """Go on with the oldest commit that is there, if a clean-up removed the next one."""
        following = self._version + 1
        if self._is_there(following):
            return
        oldest = min((n for n in self._versions() if n > self._version), default=following)
        if oldest > following:
            _LOG.warning(
                "the log of the ledger %s no longer has the commits %d to %d: their rows are not "
                "in the figures", self._place, following, oldest - 1,
            )  # fmt: skip
            self._version, self._last = oldest - 1, None
            self._note_gap()

    def _is_there(self, version: int) -> bool:
        info = self._files.get_file_info(f"{self._place.root}/{LOG_FOLDER}/{version:020}.json")
        return info.type is not fs.FileType.NotFound

    def _versions(self) -> Iterator[int]:
        """Yield the versions of the commits that the log folder has, in any order."""
        selector = fs.FileSelector(f"{self._place.root}/{LOG_FOLDER}", allow_not_found=True)
        for info in self._files.get_file_info(selector):
            if name := _COMMIT.fullmatch(info.base_name):
                yield int(name[1])

    def _rows(self, kind: str, path: str) -> pa.Table | None:
        try:
            with self._files.open_input_file(f"{self._place.root}/{path}") as file:
                return pq.read_table(file, columns=[*self._columns[kind]], partitioning=None)
        except FileNotFoundError:
            if not self._skips_gone:
                raise
            _LOG.warning(
                "the ledger's file %s/%s is gone: its rows are not in the figures",
                self._place.root, path,
            )  # fmt: skip
            self._note_gap()
            return None

    def _note_gap(self) -> None:
        self.state = self.state._replace(gaps=self.state.gaps + 1)


def _mark(actions: list[dict[str, Any]]) -> bytes:
    """Return a digest of a commit. Two commits differ, because names of data files are unique."""
    return hashlib.sha256(json.dumps(actions).encode()).digest()
