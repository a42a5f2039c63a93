"""Retention: removes old rows, and bodies of settled dead letters. Old rows that are needed stay:

- pending dead letters, their epochs' accounts and their backfills' marks;
- accounts and marks of parked and dropped letters that stay, because they may be unparked;
- half messages of open transactions, and the ends of transactions whose half messages stay;
- resolutions of dead letters that stay, because without them the letters would be pending;
- sends of killed attempts, as long as the accounts of their epochs;
- the last two epochs of each streaming query, which a restart may run again.

The accounts of an epoch go all at once, and so do its sends: a part of them would not add up."""
# ruff: noqa: S608 (the SQL has our own names only)

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.compute as pc

from rocket_sink.ledger.append.delta_rs import StoredFile, stored_files
from rocket_sink.ledger.append.table import check_table, is_table, missing, open_for_commits
from rocket_sink.ledger.notes import NoteStore, now_ms
from rocket_sink.ledger.path import LedgerPath
from rocket_sink.ledger.query.duckdb_reader import reader_of
from rocket_sink.ledger.records import digests, replaced
from rocket_sink.ledger.schema import (
    BACKFILL,
    DEAD_LETTER,
    EPOCH,
    KINDS,
    RESOLUTION,
    SEND,
    TRANSACTION,
    columns_of,
)
from rocket_sink.ledger.sql import Query, micros
from rocket_sink.ledger.upkeep.growth import clean_up
from rocket_sink.ledger.upkeep.rewrite import (
    SPARK_REMOVES_NONE,
    open_for_rewrites,
    read_file,
    rewrite,
)
from rocket_sink.net import log

if TYPE_CHECKING:
    from deltalake import DeltaTable
    from pyspark.sql import SparkSession

_LOG: Final = log.logger(__name__)
_KIND: Final = "upkeep"
_NOTE: Final = "expired"
_DAY_MS: Final = 86_400_000
_LAST_EPOCHS: Final = 2
_ASKED: Final = ("at", "letter_id", "query_id", "epoch", "task_attempt_id")
"""Columns that decide whether a row is dropped."""
_warned: set[LedgerPath] = set()
"""Ledgers with a warning that their rows do not expire."""


@dataclass(frozen=True)
class Retention:
    """How long rows stay (ms) by kind, and bodies of settled dead letters; None: as long as their
    rows. Rows of other kinds stay for ever."""

    rows_ms: Mapping[str, int] = field(default_factory=dict)
    bodies_ms: int | None = None

    def or_longer(self, other: Retention) -> Retention:
        """Return the retention of two queries with one ledger: the longer time for each kind, or
        the only one given. Bodies stay as long as their rows if one query says so."""
        rows_ms = {
            kind: max(self.rows_ms.get(kind, 0), other.rows_ms.get(kind, 0))
            for kind in {*self.rows_ms, *other.rows_ms}
        }
        if self.bodies_ms is None or other.bodies_ms is None:
            return Retention(rows_ms)
        return Retention(rows_ms, max(self.bodies_ms, other.bodies_ms))


@dataclass(frozen=True)
class Expired:
    """The result of an expiry, or of a dry run, which only counts.

    Attributes:
        rows: number of dropped rows by kind.
        kept: number of old rows that stay because they are still needed.
        bodies: number of dropped bodies.
        files: number of files that were dropped or written anew.
        busy: another process rewrote the table meanwhile, so nothing was done.
    """

    rows: dict[str, int]
    kept: dict[str, int]
    bodies: int
    files: int
    busy: bool


def expire_ledger(
    spark: SparkSession, place: LedgerPath, retention: Retention, *, dry_run: bool = False
) -> Expired:
    """Drop rows and bodies that are older than their retention, and delete files that were replaced
    long enough ago. Raise LedgerError if there is no ledger, or if Spark's Delta commits to it:
    Delta cannot take rows out of an append-only table."""
    check_table(spark, place)
    table, query = open_for_rewrites(spark, place), reader_of(spark, place)
    if query is None:
        raise missing(place)
    expired = expire(place, table, query, retention, dry_run=dry_run)
    if not dry_run and (newest := open_for_commits(spark, place)) is not None:
        clean_up(place, newest)
    return expired


def expire_daily(spark: SparkSession, place: LedgerPath, retention: Retention) -> None:
    """Expire a ledger if the last expiry by any process is at least a day ago. The first expiry
    comes a day after the first call. If Spark's Delta commits to the ledger, only warn, once, that
    rows do not expire. Raise LedgerError or OSError for a ledger out of reach."""
    notes, at_ms = None if place.problem else NoteStore(place, _KIND), now_ms()
    last_ms = None if notes is None else notes.read(_NOTE)
    if last_ms is not None and at_ms - int(last_ms) < _DAY_MS:
        return
    if notes is None or open_for_commits(spark, place) is None:
        # Write no note: if the ledger was deleted, the note would create its folder again.
        is_new = retention.rows_ms and place not in _warned
        if is_new and (notes is None or is_table(spark, place)):
            _warned.add(place)
            _LOG.warning(
                "ledgerRetention has no effect on the ledger %s: %s", place, SPARK_REMOVES_NONE
            )
        return
    notes.write(_NOTE, at_ms)
    if last_ms is not None:
        expired = expire_ledger(spark, place, retention)
        if expired.files:
            _LOG.info("rows of the ledger %s have expired: %s", place, expired)


def expire(
    place: LedgerPath, table: DeltaTable, query: Query, retention: Retention, *,
    dry_run: bool = False,
) -> Expired:  # fmt: skip
    """Drop the rows, and the bodies, that are older than their retention. `query` runs queries over
    the views of this ledger. Raise LedgerError if the table cannot be read or written."""
    now_us = time.time_ns() // 1000
    before_us = {kind: now_us - ms * 1000 for kind, ms in retention.rows_ms.items()}
    needed = {kind: _needed(query, kind, before_us) for kind in before_us}
    bodies = pa.array([], pa.string())
    if retention.bodies_ms is not None:
        bodies = _spent_letters(query, now_us - retention.bodies_ms * 1000)

    def judged(batch: pa.RecordBatch, kind: str) -> tuple[pa.Array, pa.Array]:
        """Return two masks: the old rows, and the rows to drop."""
        if kind not in before_us:
            none = pa.repeat(False, batch.num_rows)
            return none, none
        is_old = pc.less(batch["at"].cast(pa.int64()), before_us[kind]).fill_null(False)
        epoch, task = (batch[name].cast(pa.string()) for name in ("epoch", "task_attempt_id"))
        epochs = pc.binary_join_element_wise(batch["query_id"], epoch, " ")
        attempts = pc.binary_join_element_wise(epochs, task, " ")
        goes = is_old
        for names in (batch["letter_id"], epochs, attempts):
            goes = pc.and_not(goes, pc.is_in(names, needed[kind]))
        return is_old, goes

    rows, kept, cleared = Counter[str](), Counter[str](), 0
    dropped: list[StoredFile] = []
    changed: list[StoredFile] = []
    for file in stored_files(place, table):
        before = before_us.get(file.kind)
        is_old = before is not None and (file.oldest is None or micros(file.oldest) < before)
        has_bodies = file.kind == DEAD_LETTER and bool(len(bodies))
        if not (is_old or has_bodies):
            continue
        gone = old = spent = 0
        columns = [name for name in _ASKED if name in columns_of(file.kind)]
        for batch in read_file(place, file, columns):
            is_old_row, goes = judged(batch, file.kind)
            gone, old = gone + goes.true_count, old + is_old_row.true_count
            if has_bodies:
                spent += pc.and_not(pc.is_in(batch["letter_id"], bodies), goes).true_count
        if old:
            rows[file.kind] += gone
            kept[file.kind] += old - gone
        if gone and gone == file.rows:
            dropped.append(file)
        elif gone or spent:
            changed.append(file)
            cleared += spent
    is_done = True
    if not dry_run and (dropped or changed):

        def change(batch: pa.RecordBatch) -> pa.RecordBatch:
            kind = batch["kind"][0].as_py()
            batch = batch.filter(pc.invert(judged(batch, kind)[1]))
            return _without_bodies(batch, bodies) if kind == DEAD_LETTER else batch

        is_done = rewrite(place, table, [[file] for file in changed], change, dropped)
    return Expired(dict(rows), dict(kept), cleared, len(dropped) + len(changed), not is_done)


_KEY: Final = "concat(query_id, ' ', CAST(epoch AS STRING)) AS name"
_OPEN: Final = f"SELECT {_KEY} FROM transactions WHERE open"
_LAST: Final = f"""
    SELECT query_id, epoch FROM (
        SELECT query_id, epoch, row_number() OVER (PARTITION BY query_id ORDER BY epoch DESC) AS nth
        FROM (
            SELECT DISTINCT query_id, epoch FROM ledger_rows
            WHERE lane IN ('foreach', 'datasource', 'foreach_batch')
        ) e
    ) n WHERE nth <= {_LAST_EPOCHS}"""
_IN_USE: Final = (_OPEN, f"SELECT {_KEY} FROM ({_LAST}) l")
_PENDING: Final = "SELECT letter_id AS name FROM pending_letters"
_STAYING: Final = f"""
    SELECT letter_id, query_id, epoch FROM (
        SELECT letter_id, query_id, epoch, at, {_KEY} FROM letters
    ) l WHERE {{young_{DEAD_LETTER}}} OR name IN ({" UNION ALL ".join(_IN_USE)})"""
"""Query for settled dead letters that stay, and some that are pending."""
_PARKED: Final = f"SELECT l.* FROM ({_STAYING}) l SEMI JOIN parked p ON l.letter_id = p.letter_id"


def _cut_epochs(rows: str, kind: str) -> str:
    """Return the query for epochs that have both old and young rows of a kind."""
    young = f"{{young_{kind}}}"
    return (
        f"SELECT {_KEY} FROM {rows} GROUP BY query_id, epoch "
        f"HAVING bool_or({young}) AND NOT bool_and({young})"
    )


_ACCOUNTS: Final = (
    *_IN_USE,
    f"SELECT {_KEY} FROM pending_letters",
    f"SELECT {_KEY} FROM ({_PARKED}) k",
    _cut_epochs("epoch_rows", EPOCH),
)
_SENDS: Final = (
    *_IN_USE,
    _cut_epochs("send_rows", SEND),
    f"""SELECT concat(k.name, ' ', CAST(task_attempt_id AS STRING)) AS name
    FROM (SELECT task_attempt_id, {_KEY} FROM killed_attempts) k
    SEMI JOIN (
        SELECT {_KEY} FROM epoch_rows WHERE {{young_{EPOCH}}}
        UNION ALL {" UNION ALL ".join(_ACCOUNTS)}
    ) a ON k.name = a.name""",
)
_NEEDED: Final = {
    SEND: _SENDS,
    DEAD_LETTER: (*_IN_USE, _PENDING),
    EPOCH: _ACCOUNTS,
    TRANSACTION: (*_SENDS, f"SELECT {_KEY} FROM decided_halves WHERE {{young_{SEND}}}"),
    RESOLUTION: (_PENDING, f"SELECT letter_id AS name FROM ({_STAYING}) s"),
    BACKFILL: (
        """SELECT m.letter_id AS name FROM backfills m
        ANTI JOIN settled s ON m.letter_id = s.letter_id""",
        f"SELECT letter_id AS name FROM ({_PARKED}) k",
    ),
}
"""{kind: queries for the names of old rows that stay}. A name is a letter's id, `<query id>
<epoch>`, or `<query id> <epoch> <task attempt>`."""


def _needed(query: Query, kind: str, before_us: Mapping[str, int]) -> pa.Array:
    """Return the names of a kind's rows that stay at any age; see `_NEEDED`."""
    if kind not in KINDS:
        raise ValueError(f"{kind!r} is no kind of ledger row")
    young = {f"young_{name}": f"at >= timestamp_micros({before_us.get(name, 0)})" for name in KINDS}
    sources = " UNION ALL ".join(_NEEDED.get(kind, ())).format(**young)
    return _names(query, sources) if sources else pa.array([], pa.string())


def _names(query: Query, source: str) -> pa.Array:
    select = f"SELECT DISTINCT name FROM ({source}) s"
    return query(select)["name"].combine_chunks().cast(pa.string())


def _spent_letters(query: Query, before_us: int) -> pa.Array:
    """Return the ids of letters whose bodies no backfill will need: letters that were resent or
    dropped before this time, and older letters of attempts that do not count, except in the last
    epochs of a query. A parked letter may be unparked, so its body stays."""
    return _names(
        query,
        f"""
        SELECT l.letter_id AS name FROM (SELECT letter_id, query_id, epoch, at FROM letters
            WHERE body IS NOT NULL) l
        LEFT JOIN (
            SELECT letter_id, max(at) AS settled_at,
                bool_or(resolution = 'resent')
                    OR max_by(resolution, sequence) = 'dropped' AS is_over
            FROM resolutions GROUP BY letter_id
        ) r ON l.letter_id = r.letter_id
        LEFT JOIN (SELECT DISTINCT letter_id, true AS counts FROM counted_letters) c
            ON l.letter_id = c.letter_id
        LEFT JOIN (SELECT DISTINCT query_id, epoch, true AS is_last FROM ({_LAST}) n) n
            ON l.query_id = n.query_id AND l.epoch = n.epoch
        WHERE (r.is_over AND r.settled_at < timestamp_micros({before_us}))
            OR (c.counts IS NULL AND n.is_last IS NULL AND l.at < timestamp_micros({before_us}))
        """,
    )


def _without_bodies(batch: pa.RecordBatch, letters: pa.Array) -> pa.RecordBatch:
    """Return the rows with a digest instead of the body for the letters with these ids."""
    bare = pc.is_in(batch["letter_id"], letters)
    nothing = pa.scalar(None, pa.binary())
    dropped = digests(pc.if_else(bare, batch["body"], nothing))
    return replaced(
        batch,
        {
            "body": pc.if_else(bare, nothing, batch["body"]),
            "body_sha256": pc.coalesce(dropped, batch["body_sha256"]),
        },
    )
