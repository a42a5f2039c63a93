"""The spool files of task attempts, which a fold moves into the table."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Final

import pyarrow as pa
from pyarrow import fs

from rocket_sink.errors import LedgerError
from rocket_sink.ledger.path import LedgerPath, is_object_store, make_folder_of, resolve_path
from rocket_sink.ledger.records import RunContext
from rocket_sink.ledger.transport.files import OPEN, SEALED, new_name, next_number
from rocket_sink.ledger.transport.stream import BatchWriter

_CHUNK: Final = 4 * 1024 * 1024
_MKDIR_TRIES: Final = 20
_PARTIAL: Final = ".part"
"""Suffix of a file that is still being written."""


class SpoolWriter:
    """A `RowTransport` that writes a task attempt's rows to a file of the spool; for one thread.

    `ledger_path` is an absolute path or a URI (`Ledger(path).uri`, from the driver). The first
    `append` makes the file. After a `seal` the next `append` makes another file.

    `append`, `sync` and `seal` raise LedgerError if the file cannot be written, or if a fold has
    taken it because this process seemed dead. Rows may be missing, so the task must fail."""

    keeps_failed = True

    def __init__(self, ledger_path: str | LedgerPath, ctx: RunContext) -> None:
        self._place = resolve_path(ledger_path)
        self._ctx = ctx
        self._file: IO[bytes] | None = None
        self._stream: BatchWriter | None = None
        self._leaves_torn = True
        self._path = ""
        self._name = ""

    def append(self, *batches: pa.RecordBatch) -> None:
        """Write rows. A local file survives a kill of this process, but not a crash of the host."""
        with self._errors():
            for batch in batches:
                if batch.num_rows:
                    self._stream = self._stream or BatchWriter(self._open())
                    self._stream.write(batch)
            if self._stream is not None:
                self._stream.flush()

    def put(self, contents: Iterable[bytes]) -> None:
        """Write and seal one file with the rows of several contents (`handed.HandedRows`). After an
        error there is no such file, so the caller may write the rows again."""
        self._leaves_torn = False
        try:
            with self._errors():
                self._stream = BatchWriter(self._open())
                for content in contents:
                    self._stream.copy(content)
                self._stream.flush()
            self.seal()
        except BaseException:
            self._forget()
            if self._place.is_local:
                with contextlib.suppress(OSError):
                    self._place.filesystem().delete_file(self._path)
            raise

    def sync(self) -> None:
        """Make all appended rows durable. A local file stays open; a store's file is sealed."""
        if not self._place.is_local:
            self.seal()
            return
        with self._errors():
            if self._file is not None:
                os.fsync(self._file.fileno())
                # Make the file's name durable, too.
                folder = os.open(Path(self._path).parent, os.O_RDONLY)
                try:
                    os.fsync(folder)
                finally:
                    os.close(folder)

    def seal(self) -> str | None:
        """Make the rows durable, and the file ready for a fold. Return the file's path in the
        ledger's file system; None if there was no open file."""
        if self._file is None:
            return None
        with self._errors():
            seal = self._seal_local if self._place.is_local else self._upload
            sealed_path = seal(self._file)
            self._forget()
            return sealed_path

    def finish(self) -> None:
        """Seal the file. Dead letters must be durable before Spark may count the task as done."""
        self.seal()

    def abort(self) -> None:
        """End a failed attempt, but keep its rows. Never raises; idempotent."""
        with contextlib.suppress(Exception):
            self.seal()

    def _open(self) -> IO[bytes]:
        filesystem = self._place.filesystem()
        number = next_number(self._ctx, self._place, filesystem)
        self._name = new_name(self._ctx, number, folders=self._place.is_local)
        if self._place.is_local:
            self._path = f"{self._place.spool}/{self._name}{OPEN}"
            self._file = _create(filesystem, self._path)
        else:
            handle = tempfile.NamedTemporaryFile(prefix="rocket-sink-", suffix=OPEN)  # noqa: SIM115
            self._path, self._file = handle.name, handle
        return self._file

    def _seal_local(self, file: IO[bytes]) -> str:
        os.fsync(file.fileno())
        sealed = self._path.removesuffix(OPEN) + SEALED
        self._place.filesystem().move(self._path, sealed)
        return sealed

    def _upload(self, file: IO[bytes]) -> str:
        remote = self._place.filesystem()
        sealed = f"{self._place.spool}/{self._name}{SEALED}"
        # Rename the file when it is complete. Object stores show complete objects only.
        whole_at_once = is_object_store(remote)
        target = sealed if whole_at_once else sealed + _PARTIAL
        make_folder_of(remote, sealed)
        file.seek(0)
        try:
            with remote.open_output_stream(target) as out:
                while chunk := file.read(_CHUNK):
                    out.write(chunk)
        except OSError:
            # The object may exist although the answer was lost. Do not write its rows twice.
            if not (whole_at_once and _is_there(remote, sealed)):
                raise
        if not whole_at_once:
            remote.move(target, sealed)
        return sealed

    def _forget(self) -> None:
        file, self._file, self._stream = self._file, None, None
        if file is not None:
            # Closing writes the buffered bytes again, which fails on a full disk.
            with contextlib.suppress(OSError):
                file.close()

    def _leave(self) -> None:
        """Let a fold take the incomplete file now, because this process may live for days."""
        self._forget()
        if self._place.is_local and self._leaves_torn:
            # A file that was sealed, or never opened, is not there.
            with contextlib.suppress(OSError):
                self._place.filesystem().move(self._path, self._path.removesuffix(OPEN) + SEALED)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Turn an error into a LedgerError, and end the use of the file."""
        text = f"cannot write the spool of the ledger {self._place}"
        try:
            yield
        except FileNotFoundError as error:
            self._forget()
            text = self._gone() if self._place.is_local else f"{text}: {error}"
            raise LedgerError(text, path=self._path) from error
        except (OSError, pa.ArrowException) as error:
            self._leave()
            text = f"{text}: {error}. The executors need to write below the ledger's folder"
            raise LedgerError(text, path=self._path) from error

    def _gone(self) -> str:
        """Return the reason why the open file is gone, as far as this process can tell."""
        if not Path(self._place.spool).is_dir():
            # Folds remove folders in the spool, but not the spool itself.
            return (
                f"the folder {self._place.spool} was deleted while tasks wrote to it, and with it "
                "the rows that were not folded yet; the task must run again. Leave _spool alone "
                "while queries run"
            )
        sealed_path = self._path.removesuffix(OPEN) + SEALED
        how = "it was deleted, or a fold took it"
        if Path(sealed_path).exists():
            how = f"a fold took it, as {sealed_path},"
        return (
            f"the spool file {self._path} is gone: {how} because this process seemed dead; the "
            "task must run again"
        )


def _is_there(filesystem: fs.FileSystem, path: str) -> bool:
    """Return whether a file exists and has content: on Azure pyarrow first makes an empty file."""
    with contextlib.suppress(OSError):
        return bool(filesystem.get_file_info(path).size)
    return False


def _create(filesystem: fs.FileSystem, path: str) -> IO[bytes]:
    """Create a file. Retry, because a fold may remove its empty folder first."""
    for _ in range(_MKDIR_TRIES):
        with contextlib.suppress(FileNotFoundError):
            make_folder_of(filesystem, path)
            file: IO[bytes] = filesystem.handler.open(path, "xb")
            return file
    raise OSError(f"the folder of {path} is removed again and again")
