"""Erasure: deletes the contents of dead letters for good, and keeps their accounts.

The files of these dead letters are rewritten without the contents. Accounts of their task attempts
lose the text of the first error, because it may quote a key, a tag or a property. All old files
with the contents are deleted at once, also those of earlier versions of the table. A running reader
of such a file then fails. The table's log has no contents, because its statistics are of ids and
times. Texts of brokers (`remark`) stay: brokers quote topics and limits, but no message."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import fs

from rocket_sink.errors import LedgerError
from rocket_sink.ledger.append.delta_rs import StoredFile, stored_files
from rocket_sink.ledger.notes import remove_file
from rocket_sink.ledger.path import LedgerPath
from rocket_sink.ledger.records import replaced
from rocket_sink.ledger.schema import DEAD_LETTER, EPOCH, LEDGER_SCHEMA
from rocket_sink.ledger.upkeep.rewrite import open_for_rewrites, read_file, rewrite
from rocket_sink.ledger.views import ATTEMPT

if TYPE_CHECKING:
    from deltalake import DeltaTable
    from pyspark.sql import SparkSession

ERASED: Final = "erased: "
"""First word of the error text (`_ERRORS`) of an erased row; the reason follows."""
_ERRORS: Final = {DEAD_LETTER: "last_error", EPOCH: "first_error"}
"""{kind of rows with contents: column of the error text that tells of the erasure}."""
_CONTENTS: Final = (
    "body", "body_sha256", "tags", "keys", "sharding_key", "properties", "lite_topic",
    "first_error",
)  # fmt: skip
_TRIES: Final = 5


@dataclass(frozen=True)
class Erased:
    """The result of an erasure.

    Attributes:
        letters: dead letters whose contents are gone.
        dropped: number of these letters that were pending; they have the resolution `dropped` now.
        deleted_files: number of deleted files with such contents, or with accounts that quote them.
        loose_files: number of files that are kept although they may have such contents. They cannot
            be read, or none of their rows is in the newest version of the table (running or dead
            attempts wrote them, or they expired). A vacuum deletes those that stay unused.
        quarantined: damaged spool files, which may have such contents, too.
        unfolded: epochs (`query id/epoch`) with rows that no fold could take before the erasure.
            These rows may have such contents, and come into the table later.
    """

    letters: int
    dropped: int
    deleted_files: int
    loose_files: int
    quarantined: tuple[str, ...] = ()
    unfolded: tuple[str, ...] = ()


def erase_letters(
    spark: SparkSession, place: LedgerPath, letter_ids: Iterable[str], reason: str
) -> Erased:
    """Erase the contents of these dead letters, and finish earlier erasures that were killed. Raise
    LedgerError if Spark's Delta commits to the ledger, or if other processes keep rewriting it."""
    wanted = pa.array(list(letter_ids), pa.string())
    for _ in range(_TRIES):
        table = open_for_rewrites(spark, place)
        rows = _stored_rows(place, table)
        letters = _joined(rows, DEAD_LETTER)
        attempts = letters["attempt"].filter(pc.is_in(letters["name"], wanted))
        goes = {DEAD_LETTER: wanted, EPOCH: attempts.combine_chunks()}
        counts = {file: _count(names["name"], goes[file.kind]) for file, names in rows.items()}
        touched = [file for file, count in counts.items() if count]
        change = partial(_without_contents, goes=goes, reason=reason)
        if not touched or rewrite(place, table, [[file] for file in touched], change):
            deleted, loose = _delete_old(spark, place)
            erased = sum(counts[file] for file in touched if file.kind == DEAD_LETTER)
            return Erased(erased, 0, deleted, loose)
    raise LedgerError(
        f"other processes rewrite the ledger {place} all the time: nothing was erased; try again",
        path=place.uri,
    )


def _attempts(rows: pa.RecordBatch | pa.Table) -> Any:
    """Return the row's task attempt as one text."""
    parts = [rows[name].cast(pa.string()) for name in ATTEMPT]
    return pc.binary_join_element_wise(*parts, "\n", null_handling="replace", null_replacement="")


def _rows(place: LedgerPath, file: StoredFile) -> pa.Table:
    """Return `name`, `attempt` and `is_erased` of a file's dead letters, or of its accounts with an
    error text. The name is the letter's id, or the account's attempt."""
    error, is_letter = _ERRORS[file.kind], file.kind == DEAD_LETTER
    columns = [*ATTEMPT, error, *(["letter_id"] if is_letter else [])]
    rows = pa.Table.from_batches(read_file(place, file, columns), LEDGER_SCHEMA)
    rows = rows if is_letter else rows.filter(pc.is_valid(rows[error]))
    attempts = _attempts(rows)
    names = rows["letter_id"] if is_letter else attempts
    is_erased = pc.starts_with(rows[error], ERASED)
    return pa.table({"name": names, "attempt": attempts, "is_erased": is_erased})


def _stored_rows(place: LedgerPath, table: DeltaTable) -> dict[StoredFile, pa.Table]:
    """Return the table of `_rows` for each file that may hold contents."""
    files = stored_files(place, table)
    return {file: _rows(place, file) for file in files if file.kind in _ERRORS}


def _joined(rows: Mapping[StoredFile, pa.Table], kind: str) -> pa.Table:
    none = pa.schema({"name": pa.string(), "attempt": pa.string(), "is_erased": pa.bool_()})
    tables = [table for file, table in rows.items() if file.kind == kind]
    return pa.concat_tables([none.empty_table(), *tables])


def _count(names: pa.ChunkedArray, others: pa.Array) -> int:
    """Return how many of the names are among the others."""
    return pc.sum(pc.is_in(names, others)).as_py() or 0


def _without_contents(
    batch: pa.RecordBatch, goes: Mapping[str, pa.Array], reason: str
) -> pa.RecordBatch:
    kind = batch["kind"][0].as_py()
    error, columns = _ERRORS[kind], {}
    if kind == DEAD_LETTER:
        is_erased = pc.is_in(batch["letter_id"], goes[kind])
        rows = pc.if_else(is_erased, None, pa.array(range(batch.num_rows), pa.int64()))
        columns = {name: batch[name].take(rows) for name in _CONTENTS}
    else:
        is_erased = pc.and_(pc.is_in(_attempts(batch), goes[kind]), pc.is_valid(batch[error]))
    columns[error] = pc.if_else(is_erased, f"{ERASED}{reason}", batch[error])
    return replaced(batch, columns)


def _delete_old(spark: SparkSession, place: LedgerPath) -> tuple[int, int]:
    """Delete files that hold an erased row's contents and are not in the table's newest version.
    Return the numbers of deleted files and of `loose_files` (see `Erased`)."""
    rows = _stored_rows(place, open_for_rewrites(spark, place))
    named = {f"{place.root}/{file.path}" for file in rows}
    filesystem = place.filesystem()
    deleted = loose = 0
    for kind in _ERRORS:
        stored = _joined(rows, kind)
        stored_names = stored["name"].combine_chunks()
        erased = stored_names.filter(stored["is_erased"].combine_chunks())
        selector = fs.FileSelector(f"{place.root}/kind={kind}", allow_not_found=True)
        for info in filesystem.get_file_info(selector):
            if not info.is_file or info.path in named:
                continue
            old = StoredFile(f"kind={kind}/{info.base_name}", kind, 0, 0, None)
            try:
                names = _rows(place, old)["name"]
            except (OSError, pa.ArrowException):  # The file is being written, or was cut.
                loose += 1
                continue
            if _count(names, erased):
                remove_file(filesystem, info.path)
                deleted += 1
            elif len(names) and not _count(names, stored_names):
                loose += 1
    return deleted, loose
