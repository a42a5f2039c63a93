"""Erasure: deletes the contents of dead letters for good, and keeps their accounts.

The files of these dead letters are rewritten without the contents. All old files with the contents
are deleted at once, also those of earlier versions of the table. A running reader of such a file
then fails. The table's log has no contents, because its statistics are of ids and times."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import fs

from rocket_sink.errors import LedgerError
from rocket_sink.ledger.append.delta_rs import StoredFile, stored_files
from rocket_sink.ledger.path import LedgerPath
from rocket_sink.ledger.records import replaced
from rocket_sink.ledger.schema import DEAD_LETTER, LEDGER_SCHEMA
from rocket_sink.ledger.upkeep.rewrite import open_for_rewrites, read_file, rewrite

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ERASED: Final = "erased: "
"""First word of an erased letter's `last_error`; the reason follows."""
_CONTENTS: Final = (
    "body", "body_sha256", "tags", "keys", "sharding_key", "properties", "first_error",
)  # fmt: skip
_TRIES: Final = 5


@dataclass(frozen=True)
class Erased:
    """The result of an erasure.

    Attributes:
        letters: dead letters whose contents are gone.
        dropped: number of these letters that were pending; they have the resolution `dropped` now.
        deleted_files: number of deleted files with such contents.
        loose_files: number of files that are kept although they may have such contents. They cannot
            be read, or none of their letters is in the newest version of the table (running or dead
            attempts wrote them, or they expired). A vacuum deletes those that stay unused.
        quarantined: damaged spool files, which may have such contents, too.
    """

    letters: int
    dropped: int = 0
    deleted_files: int = 0
    loose_files: int = 0
    quarantined: tuple[str, ...] = ()


def erase_letters(
    spark: SparkSession, place: LedgerPath, letter_ids: Iterable[str], reason: str
) -> Erased:
    """Erase the contents of these dead letters, and finish earlier erasures that were killed. Raise
    LedgerError if Spark's Delta commits to the ledger, or if other processes keep rewriting it."""
    wanted = pa.array(list(letter_ids), pa.string())
    for _ in range(_TRIES):
        table = open_for_rewrites(spark, place)
        files = [file for file in stored_files(place, table) if file.kind == DEAD_LETTER]
        counts = {file: _count(place, file, wanted)[0] for file in files}
        touched = [file for file, count in counts.items() if count]
        change = partial(_without_contents, letters=wanted, reason=reason)
        if not touched or rewrite(place, table, [[file] for file in touched], change):
            deleted, loose = _delete_old(spark, place)
            return Erased(sum(counts.values()), 0, deleted, loose)
    raise LedgerError(
        f"other processes rewrite the ledger {place} all the time: nothing was erased; try again",
        path=place.uri,
    )


def _count(place: LedgerPath, file: StoredFile, *letters: Any) -> list[int]:
    """Return for each list of letter ids how many dead letters of the file are in the list."""
    batches = read_file(place, file, ["letter_id"])
    letter_ids = pa.chunked_array([batch["letter_id"] for batch in batches], pa.string())
    return [pc.sum(pc.is_in(letter_ids, each)).as_py() or 0 for each in letters]


def _without_contents(batch: pa.RecordBatch, letters: pa.Array, reason: str) -> pa.RecordBatch:
    goes = pc.is_in(batch["letter_id"], letters)
    rows = pc.if_else(goes, None, pa.array(range(batch.num_rows), pa.int64()))
    columns = {name: batch[name].take(rows) for name in _CONTENTS}
    columns["last_error"] = pc.if_else(goes, f"{ERASED}{reason}", batch["last_error"])
    return replaced(batch, columns)


def _delete_old(spark: SparkSession, place: LedgerPath) -> tuple[int, int]:
    """Delete files that hold an erased letter and are not in the table's newest version. Return the
    numbers of deleted files and of `loose_files` (see `Erased`)."""
    newest = open_for_rewrites(spark, place)
    files = [file for file in stored_files(place, newest) if file.kind == DEAD_LETTER]
    columns = ["letter_id", "last_error"]
    batches = [batch for file in files for batch in read_file(place, file, columns)]
    letters = pa.Table.from_batches(batches, LEDGER_SCHEMA).select(columns).combine_chunks()
    erased = letters.filter(pc.starts_with(letters["last_error"], ERASED))
    filesystem = place.filesystem()
    named = {f"{place.root}/{file.path}" for file in files}
    selector = fs.FileSelector(f"{place.root}/kind={DEAD_LETTER}", allow_not_found=True)
    deleted = loose = 0
    for info in filesystem.get_file_info(selector):
        if not info.is_file or info.path in named:
            continue
        old = StoredFile(f"kind={DEAD_LETTER}/{info.base_name}", DEAD_LETTER, 0, 0, None)
        try:
            of_table, of_erased = _count(place, old, letters["letter_id"], erased["letter_id"])
        except (OSError, pa.ArrowException):  # The file is being written, or was cut.
            loose += 1
            continue
        loose += of_table == 0
        if of_erased:
            with contextlib.suppress(FileNotFoundError):
                filesystem.delete_file(info.path)
            deleted += 1
    return deleted, loose
