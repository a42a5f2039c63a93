"""A token proves that driver and tasks use the same folder as the ledger.

The token is a note (kind `tokens`) with a random name. Before the driver hands the sink to its
tasks, it writes the note or takes an existing one. The sink's configuration contains the name, and
each task looks for the note before its first send. If a worker has another folder of the same path
on its own disk, the note is missing there. Without this check, given-up rows would be lost in that
folder although the query succeeds.

The check also proves that the task can write to the ledger, by a test folder (local) or a test
object that is removed at once. Otherwise the write would fail after the rows were sent, and each
retry would send them again. Each task checks a local ledger; each worker process checks an object
store once. Two drivers that start at once may both write a token: any token proves the folder."""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from rocket_sink.errors import LedgerError
from rocket_sink.ledger.notes import NoteStore
from rocket_sink.ledger.path import (
    LOG_FOLDER,
    NOTES,
    LedgerPath,
    is_remote,
    make_folder_of,
    resolve_path,
)
from rocket_sink.ledger.records import worker_name
from rocket_sink.ledger.storage import Properties, remember
from rocket_sink.options import SinkOptions
from rocket_sink.private_file import check_folder

TOKENS: Final = "tokens"
_FOLDER: Final = f"{NOTES}/{TOKENS}"
_LOOKS: Final = 4
_BETWEEN_LOOKS_S: Final = 1.0
"""Pause between two looks for the token. NFS clients cache that a file is missing."""

_ENDS: Final = "The task ends before it sends or writes a row"
"""Part of an error's text that is true of each task that checks a token, also of a fold's task."""

_tried: set[LedgerToken] = set()
"""Tokens of ledgers to which this process, or its parent before a fork, has written."""


@dataclass(frozen=True)
class LedgerToken:
    """The token that a task must find in the ledger's folder before it sends.

    Attributes:
        uri: of the ledger, as in `LedgerPath`.
        name: name of the note. It is empty if a Spark Connect client made the token, because the
            client does not see the driver's files. Then tasks look for the table's log instead.
        spools: whether tasks write spool files.
        storage: address and credentials of the store, which only the driver's session knows.
    """

    uri: str
    name: str
    spools: bool
    storage: Properties = field(default_factory=dict, compare=False, repr=False)

    def use(self) -> None:
        """Remember the store's properties in this process, before a task looks for the ledger."""
        if self.storage:
            remember(self.storage, self.uri)

    def check(self) -> None:
        """Check that this is the driver's ledger. A task calls this before its first send. Raise
        LedgerError if the folder is not the driver's, or cannot be reached or written."""
        self.use()
        if self in _tried and not self.uri.startswith("file:"):
            return
        place = resolve_path(self.uri)
        try:
            self._check_same(place)
            if self not in _tried:
                _write(place, spools=self.spools)
        except OSError as error:
            raise LedgerError(
                f"this task, in {worker_and_user()}, cannot read and "
                f"write the ledger {self.uri}: {error}. {_ENDS}; {place.remedy}",
                path=self.uri,
            ) from error
        _tried.add(self)

    def _check_same(self, place: LedgerPath) -> None:
        name = f"{_FOLDER}/{self.name}.json" if self.name else LOG_FOLDER
        files = place.filesystem()
        for look in range(_LOOKS):
            if files.get_file_info(f"{place.root}/{name}").type.name != "NotFound":
                return
            if not place.is_local:
                break
            if look < _LOOKS - 1:
                time.sleep(_BETWEEN_LOOKS_S)
        remedy = (
            "A path without a scheme is a folder of each host: mount storage that the driver and "
            "all executors share there, or give a ledger on a store that all of them reach (s3://, "
            "gs://, abfs://, hdfs://). In foreach and the data source you can also set "
            "ledgerVia=spark, by which only the driver writes there. If the folder was deleted or "
            "restored while the query ran, start the query again"
            if place.is_local
            else f"Driver and executors reach different stores by that name; {place.remedy}"
        )
        raise LedgerError(
            f"the ledger {self.uri} that this task sees in {worker_and_user()} is not the one "
            f"that the driver sees: {name}, which is there on the driver, is not here. "
            f"{_ENDS}. {remedy}",
            path=self.uri,
        )


def token_names(place: LedgerPath) -> list[str]:
    """Return the names of the ledger's tokens; list a local folder without pyarrow, which is slow
    to load in the data source's processes that live for one call."""
    folder = f"{place.root}/{_FOLDER}"
    if place.is_local:
        with contextlib.suppress(FileNotFoundError):
            return [path.stem for path in Path(folder).iterdir() if path.suffix == ".json"]
        return []
    return NoteStore(place, TOKENS).names()


def _write(place: LedgerPath, *, spools: bool) -> None:
    """Make and remove a test folder (local) or a test object where the task will write."""
    files, name = place.filesystem(), f"_try-{uuid.uuid4().hex}"
    if place.is_local:
        check_folder(Path(place.spool))
        path, remove = f"{place.spool if spools else place.root}/{name}", files.delete_dir
        files.create_dir(path, recursive=True)
    else:
        path, remove = f"{place.root}/_tries/{name}", files.delete_file
        make_folder_of(files, path)
        with files.open_output_stream(path) as file:
            file.write(b"-")
    # Tasks may lack the right to delete. Then one byte per worker process remains.
    with contextlib.suppress(OSError):
        remove(path)


def worker_and_user() -> str:
    """Return this process's worker name and user, for messages."""
    user = os.geteuid() if hasattr(os, "geteuid") else os.environ.get("USERNAME", "?")
    return f"{worker_name()} as user {user}"


def may_hand_over(options: SinkOptions) -> bool:
    """Return whether tasks hand their ledger rows to the driver (`ledgerVia=spark`), or do so if
    they do not reach the ledger's store (`auto`). Hosts share the folder of a local ledger, or
    `LedgerToken.check` raises an error; and notes of tasks cannot be handed over."""
    if options.ledger_via == "auto":
        return is_remote(options.ledger) and not options.using_ledger_files
    return bool(options.ledger) and options.ledger_via == "spark"
