"""Proof that driver and tasks have one ledger: a file that the driver made and the tasks find.

    <ledger>/_tokens/<random name>

The driver makes one, or takes the one that is there, before it hands the sink to its tasks; the
name travels with the sink's configuration, and a task looks for it before its first send. A folder
of the same path on a worker's own disk has another one or none: rows that were given up would end
up there while the query succeeds. The same look proves that the task can write to the ledger:
otherwise that shows after the rows were sent, and each retry sends them again.

A file of any name proves it, so two drivers that start on a new ledger at once need no agreement.
Local paths are looked at by each task, object stores once per worker process. What is written to
try it is a folder (local) or an object, which goes at once. Delta looks into no folder whose name
starts with `_`.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rocket_sink.errors import LedgerError
from rocket_sink.ledger.place import Place, locate
from rocket_sink.ledger.records import worker_name
from rocket_sink.ledger.schema import ledger_ddl
from rocket_sink.ledger.table import first_line, is_classic

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

_FOLDER: Final = "_tokens"
_LOOKS: Final = 4
_BETWEEN_LOOKS_S: Final = 1.0
"""NFS clients remember for some seconds that a file was not there."""

_proved: set[tuple[str, Place]] = set()
"""Applications whose executors have looked at a ledger."""
_tried: set[LedgerToken] = set()
"""What this process has written to, or its parent before a fork, which has the same rights."""


@dataclass(frozen=True)
class LedgerToken:
    """What tasks must find in the ledger's folder before they send; made by `ledger_token`.

    Attributes:
        uri: of the ledger, as Spark names it.
        name: of the file. Empty: the driver's files are out of reach (from a Spark Connect
            client), and the table must be there, which the driver has made.
        spools: tasks write spool files.
    """

    uri: str
    name: str
    spools: bool

    def check(self) -> None:
        """Called by a task before its first send.

        Raises:
            LedgerError: another folder than the driver's, or one that cannot be written or
                reached; says what to change.
        """
        if self in _tried and not self.uri.startswith("file:"):
            return
        place = locate(self.uri)
        try:
            self._check_same(place)
            if self not in _tried:
                _write(place, spools=self.spools)
        except OSError as error:
            raise LedgerError(
                f"this task, in {_who()}, cannot read and "
                f"write the ledger {self.uri}: {error}. No row of it was sent; {place.remedy}",
                path=self.uri,
            ) from error
        _tried.add(self)

    def _check_same(self, place: Place) -> None:
        name = f"{_FOLDER}/{self.name}" if self.name else "_delta_log"
        for look in range(_LOOKS):
            if _exists(place, f"{place.root}/{name}"):
                return
            if not place.is_local:
                break
            if look < _LOOKS - 1:
                time.sleep(_BETWEEN_LOOKS_S)
        remedy = (
            "A path without a scheme is a folder of each host: mount storage that the driver and "
            "all executors share there, or give a ledger on a store that all of them reach (s3://, "
            "gs://, abfs://, hdfs://). If the folder was deleted or restored while the query ran, "
            "start the query again"
            if place.is_local
            else f"Driver and executors reach different stores by that name; {place.remedy}"
        )
        raise LedgerError(
            f"the ledger {self.uri} that this task sees in {_who()} is not the one "
            f"that the driver sees: {name}, which is there on the driver, is not here. No row of "
            f"this task was sent. {remedy}",
            path=self.uri,
        )


def ledger_token(place: Place, *, spools: bool) -> LedgerToken:
    """The token of a ledger, made where there is none; called in a process of the driver's host.

    Raises:
        LedgerError: the folder cannot be read or written here; says what to change.
    """
    try:
        names = _names(place)
        if not names:
            from rocket_sink.ledger.notes import NoteStore

            names = [uuid.uuid4().hex]
            NoteStore(place).write(f"{_FOLDER}/{names[0]}", "rocket-sink")
        return LedgerToken(place.uri, min(names), spools)
    except OSError as error:
        raise LedgerError(
            f"the driver, in {_who()}, cannot read and write "
            f"the ledger {place.uri}: {error}. Nothing was sent; {place.remedy}",
            path=place.uri,
        ) from error


def proved(frame: DataFrame, place: Place) -> DataFrame:
    """Ledger rows whose tasks look for the driver's ledger before they write them there.

    Spark's tasks write data files: on disks of their own these would be lost to the table, which
    names them, and a fold deletes what it has appended.
    """
    if not place.is_local or not _has_executors(frame.sparkSession):
        return frame
    token = ledger_token(place, spools=False)

    def look(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        token.check()
        yield from batches

    return frame.mapInArrow(look, ledger_ddl())


def prove_executors(spark: SparkSession, place: Place) -> None:
    """Let executors look once per session, before Spark's own tasks read the table's log.

    These would fail with a missing file and no word of the reason. Executors that come later are
    looked at by what they run.

    Raises:
        LedgerError: an executor has another folder, or cannot write; says what to change.
    """
    if not place.is_local or not _has_executors(spark):
        return
    context = spark.sparkContext
    key = (str(context.applicationId), place)
    if key in _proved:
        return
    token = ledger_token(place, spools=False)
    tasks = max(2, context.defaultParallelism)
    try:
        context.parallelize(range(tasks), tasks).foreachPartition(lambda _: token.check())
    except Exception as error:
        name, _, text = first_line(error).partition(": ")
        if name != LedgerError.__name__:
            raise
        raise LedgerError(text, path=place.uri) from error
    _proved.add(key)


def _has_executors(spark: SparkSession) -> bool:
    """local[...] has its tasks in the driver, local-cluster[...] has executors."""
    return is_classic(spark) and str(spark.sparkContext.master).partition("[")[0] != "local"


# The data source asks in processes that live for one call: pyarrow's file systems and what writes
# files are imported where they are needed.


def _names(place: Place) -> list[str]:
    folder = f"{place.root}/{_FOLDER}"
    if place.is_local:
        with contextlib.suppress(FileNotFoundError):
            return [path.name for path in Path(folder).iterdir() if path.name.isalnum()]
        return []
    from pyarrow import fs

    found = place.filesystem().get_file_info(fs.FileSelector(folder, allow_not_found=True))
    return [info.base_name for info in found if info.is_file and info.base_name.isalnum()]


def _exists(place: Place, path: str) -> bool:
    """Errors other than "not there" are raised."""
    if place.is_local:
        with contextlib.suppress(FileNotFoundError):
            Path(path).stat()
            return True
        return False
    return bool(place.filesystem().get_file_info(path).type.name != "NotFound")


def _write(place: Place, *, spools: bool) -> None:
    """Make and remove something where the task will write.

    A folder, where there are folders: the fold takes files in the spool for rows.
    """
    name = f"_try-{uuid.uuid4().hex}"
    if place.is_local:
        folder = Path(place.spool if spools else place.root)
        folder.mkdir(parents=True, exist_ok=True)
        tried = folder / name
        tried.mkdir()
        with contextlib.suppress(OSError):
            tried.rmdir()
        return
    filesystem, path = place.filesystem(), f"{place.root}/_tries/{name}"
    filesystem.create_dir(f"{place.root}/_tries", recursive=True)
    with filesystem.open_output_stream(path) as file:
        file.write(b"-")
    # Tasks need no right to delete; what stays is one byte per worker process.
    with contextlib.suppress(OSError):
        filesystem.delete_file(path)


def _who() -> str:
    user = os.geteuid() if hasattr(os, "geteuid") else os.environ.get("USERNAME", "?")
    return f"{worker_name()} as user {user}"
