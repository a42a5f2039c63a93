"""Retention: old rows leave the table, and so do bodies of settled letters. Some old rows stay,
because they are still needed:

- pending dead letters, their epochs' accounts and their backfills' marks;
- half messages of open transactions, and the ends of transactions whose half messages stay;
- resolutions of dead letters that stay, which would otherwise be pending;
- the last two epochs of each streaming query, which a restart may run again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from rocket_sink.errors import LedgerError
from rocket_sink.ledger.append.table import check_table, open_for_commits
from rocket_sink.ledger.notes import NoteStore
from rocket_sink.ledger.path import LedgerPath
from rocket_sink.ledger.query.duckdb_reader import reader_of
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
from rocket_sink.ledger.sql import Query
from rocket_sink.ledger.upkeep.rewrite import StoredFile, read_file, rewrite, stored_files
from rocket_sink.net import log

if TYPE_CHECKING:
    from deltalake import DeltaTable
    from pyspark.sql import SparkSession

_LOG: Final = log.logger(__name__)
_KIND: Final = "upkeep"
_NOTE: Final = "expired"
_DAY_MS: Final = 86_400_000
_BY_EPOCH: Final = (SEND, EPOCH, TRANSACTION, DEAD_LETTER)
_LAST_EPOCHS: Final = 2
_ASKED: Final = {
    kind: [n for n in ("at", "letter_id", "query_id", "epoch") if n in columns_of(kind)]
    for kind in KINDS
}
"""Columns by which rows are judged."""


@dataclass(frozen=True)
class Retention:
    """How long rows stay, in ms; a kind that is not named stays for ever.

    Attributes:
        rows_ms: by kind.
        bodies_ms: of bodies of settled dead letters; None: as long as their rows.
    """

    rows_ms: Mapping[str, int] = field(default_factory=dict)
    bodies_ms: int | None = None

    def or_longer(self, other: Retention) -> Retention:
        """Return the longer limits of both, for two queries with one ledger."""
        rows_ms = {
            kind: max(self.rows_ms.get(kind, 0), other.rows_ms.get(kind, 0))
            for kind in {*self.rows_ms, *other.rows_ms}
        }
        bodies = [ms for ms in (self.bodies_ms, other.bodies_ms) if ms is not None]
        return Retention(rows_ms, max(bodies, default=None))


@dataclass(frozen=True)
class Expired:
    """The result of an expiry, or of a trial.

    Attributes:
        rows: number of dropped rows by kind.
        kept: number of old rows that stay because they are still needed.
        bodies: number of dropped bodies.
        files: number of files that were dropped or written anew.
        busy: another process rewrote the table meanwhile, so nothing was done.
    """

    rows: dict[str, int]
    kept: dict[str, int]
    bodies: int = 0
    files: int = 0
    busy: bool = False


def expire_ledger(
    spark: SparkSession, place: LedgerPath, retention: Retention, *, dry_run: bool = False
) -> Expired:
    """Drop rows and bodies that are older than their retention, and delete files that were replaced
    long enough ago.

    Raises:
        LedgerError: no ledger there, or Spark's Delta commits to it, which takes no rows out of an
            append-only table.
    """
    check_table(spark, place)
    table, query = open_for_commits(spark, place), reader_of(spark, place)
    if table is None or query is None:
        raise LedgerError(
            f"rows of the ledger {place.uri} cannot be taken out: Spark's Delta commits to it, "
            "which takes none out of an append-only table. A ledger in a folder of the driver, or "
            "on S3 with Hadoop 3.4.2 and later, can expire",
            path=place.uri,
        )
    expired = expire(place, table, query, retention, dry_run=dry_run)
    if not dry_run and (newest := open_for_commits(spark, place)) is not None:
        newest.vacuum(dry_run=False)
    return expired


def expire_daily(spark: SparkSession, place: LedgerPath, retention: Retention) -> None:
    """Expire a ledger if its last expiry, by any process, was a day ago.

    A new ledger is a day old before the first one.

    Raises:
        LedgerError, OSError: the ledger cannot be read or written.
    """
    notes, now_ms = NoteStore(place, _KIND), time.time_ns() // 1_000_000
    last_ms = notes.read(_NOTE)
    if last_ms is not None and now_ms - int(last_ms) < _DAY_MS:
        return
    if open_for_commits(spark, place) is None:
        # Spark's Delta commits, or the ledger was deleted, and a note would make its folder again.
        return
    notes.write(_NOTE, now_ms)
    if last_ms is not None:
        expired = expire_ledger(spark, place, retention)
        if expired.files:
            _LOG.info("of the ledger %s expired: %s", place.uri, expired)


def expire(
    place: LedgerPath, table: DeltaTable, query: Query, retention: Retention, *,
    dry_run: bool = False,
) -> Expired:  # fmt: skip
    """Drop the rows, and the bodies, that are older than their retention.

    Args:
        query: runs queries over the views of this ledger.

    Raises:
        LedgerError: the table cannot be read or written.
    """
    now_us = time.time_ns() // 1000
    before_us = {kind: now_us - ms * 1000 for kind, ms in retention.rows_ms.items()}
    rule = _Rule(query, before_us)
    bodies = pa.array([], pa.string())
    if retention.bodies_ms is not None:
        bodies = _spent_letters(query, now_us - retention.bodies_ms * 1000)
    expired = Expired({}, {})
    dropped: list[StoredFile] = []
    changed: list[StoredFile] = []
    cleared = 0
    for file in stored_files(place, table):
        before = before_us.get(file.kind)
        is_old = before is not None and (file.oldest is None or _micros(file.oldest) < before)
        has_bodies = file.kind == DEAD_LETTER and len(bodies) > 0
        if not (is_old or has_bodies):
            continue
        gone = old = spent = 0
        for batch in read_file(place, file, _ASKED[file.kind]):
            is_old_row, goes = rule.rows_that_go(batch, file.kind)
            gone, old = gone + _count(goes), old + _count(is_old_row)
            if has_bodies:
                spent += _count(_and_not(_is_among(batch, bodies), goes))
        if old:
            expired.rows[file.kind] = expired.rows.get(file.kind, 0) + gone
            expired.kept[file.kind] = expired.kept.get(file.kind, 0) + old - gone
        if gone and gone == file.rows:
            dropped.append(file)
        elif gone or spent:
            changed.append(file)
            cleared += spent
    is_done = True
    if not dry_run and (dropped or changed):

        def change(batch: pa.RecordBatch) -> pa.RecordBatch:
            kind = batch["kind"][0].as_py()
            _, goes = rule.rows_that_go(batch, kind)
            batch = batch.filter(_not(goes))
            return without_bodies(batch, bodies) if kind == DEAD_LETTER else batch

        is_done = rewrite(place, table, [[file] for file in changed], change, dropped)
    return Expired(expired.rows, expired.kept, cleared, len(dropped) + len(changed), not is_done)


class _Rule:
    """The choice of rows to drop: older than their kind's limit, and not needed any more."""

    def __init__(self, query: Query, before_us: Mapping[str, int]) -> None:
        self._before_us = before_us
        unknown = before_us.keys() - set(KINDS)
        if unknown:
            raise ValueError(f"no kind of ledger row: {', '.join(sorted(unknown))}")
        if not before_us:
            return
        self._letters: dict[str, pa.Array] = {}
        self._epochs: dict[str, pa.Array] = {}
        needed = _ids(query, _KEY, f"({_OPEN} UNION ALL {_LAST})")
        pending = "(SELECT letter_id, query_id, epoch FROM pending_letters)"
        if DEAD_LETTER in before_us:
            self._letters[DEAD_LETTER] = _ids(query, "letter_id", pending)
        if BACKFILL in before_us:
            marks = (
                "(SELECT m.* FROM (SELECT letter_id FROM ledger_rows WHERE kind = 'backfill') m "
                "ANTI JOIN settled s ON m.letter_id = s.letter_id)"
            )
            self._letters[BACKFILL] = _ids(query, "letter_id", marks)
        if RESOLUTION in before_us:
            letters = _ids(query, "letter_id", f"({self._staying('letters', DEAD_LETTER)})")
            self._letters[RESOLUTION] = _join(letters, _ids(query, "letter_id", pending))
        for kind in _BY_EPOCH:
            self._epochs[kind] = needed
        if EPOCH in before_us:
            self._epochs[EPOCH] = _join(needed, _ids(query, _KEY, pending))
        if TRANSACTION in before_us:
            halves = _ids(query, _KEY, f"({self._staying('decided_halves', SEND)})")
            self._epochs[TRANSACTION] = _join(needed, halves)

    def _staying(self, view: str, kind: str) -> str:
        """Return the query for the rows of a view that are too young to go."""
        before = self._before_us.get(kind)
        young = "true" if before is None else f"at >= timestamp_micros({before})"
        return f"SELECT * FROM {view} WHERE {young}"  # noqa: S608 (names of ours)

    def rows_that_go(self, batch: pa.RecordBatch, kind: str) -> tuple[pa.Array, pa.Array]:
        """Return masks of the old rows, and of those that are dropped."""
        import pyarrow.compute as pc

        before = self._before_us.get(kind)
        if before is None:
            none = pa.repeat(False, batch.num_rows)
            return none, none
        is_old = pc.less(batch["at"].cast(pa.int64()), before).fill_null(False)
        goes = is_old
        if kind in self._letters:
            goes = _and_not(goes, _is_among(batch, self._letters[kind]))
        if kind in self._epochs:
            goes = _and_not(goes, pc.is_in(_keys(batch), self._epochs[kind]))
        return is_old, goes


_KEY: Final = "concat(query_id, ' ', CAST(epoch AS STRING))"
_OPEN: Final = "SELECT query_id, epoch FROM transactions WHERE open"
_LAST: Final = f"""
    SELECT query_id, epoch FROM (
        SELECT query_id, epoch, row_number() OVER (PARTITION BY query_id ORDER BY epoch DESC) AS nth
        FROM (
            SELECT DISTINCT query_id, epoch FROM ledger_rows
            WHERE lane IN ('foreach', 'datasource', 'foreach_batch')
        ) e
    ) n WHERE nth <= {_LAST_EPOCHS}"""  # noqa: S608 (a number of ours)


def _ids(query: Query, term: str, source: str) -> pa.Array:
    select = f"SELECT DISTINCT {term} AS id FROM {source} s"  # noqa: S608 (names of ours)
    return query(select)["id"].combine_chunks().cast(pa.string())


def _keys(batch: pa.RecordBatch) -> pa.Array:
    import pyarrow.compute as pc

    epochs = batch["epoch"].cast(pa.string())
    return pc.binary_join_element_wise(batch["query_id"], epochs, " ")


def _spent_letters(query: Query, before_us: int) -> pa.Array:
    """Return letters whose body no backfill will need: stored or dropped before this moment, or
    of an attempt that does not count. A parked letter may be taken back, so its body stays."""
    return _ids(
        query,
        "letter_id",
        f"""(
            SELECT l.letter_id FROM (SELECT letter_id, query_id, epoch, at FROM letters
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
        )""",  # noqa: S608 (names of ours)
    )


def without_bodies(batch: pa.RecordBatch, letters: pa.Array) -> pa.RecordBatch:
    """Return the dead letters; those with these ids have a digest instead of a body."""
    import hashlib

    import pyarrow.compute as pc

    bare = pc.and_(_is_among(batch, letters), pc.is_valid(batch["body"]))
    digests = [
        hashlib.sha256(body).hexdigest() if goes else None
        for goes, body in zip(bare.to_pylist(), batch["body"].to_pylist(), strict=True)
    ]
    columns: dict[str, Any] = {
        "body": pc.if_else(bare, pa.scalar(None, pa.binary()), batch["body"]),
        "body_sha256": pc.coalesce(pa.array(digests, pa.string()), batch["body_sha256"]),
    }
    return replaced(batch, columns)


def replaced(batch: pa.RecordBatch, columns: Mapping[str, pa.Array]) -> pa.RecordBatch:
    """Return the rows with these columns replaced."""
    for name, values in columns.items():
        place = batch.schema.get_field_index(name)
        batch = batch.set_column(place, batch.schema.field(place), values)
    return batch


def _is_among(batch: pa.RecordBatch, letters: pa.Array) -> pa.Array:
    import pyarrow.compute as pc

    return pc.is_in(batch["letter_id"], letters)


def _join(first: pa.Array, second: pa.Array) -> pa.Array:
    return pa.concat_arrays([first, second])


def _not(mask: pa.Array) -> pa.Array:
    import pyarrow.compute as pc

    return pc.invert(mask)


def _and_not(mask: pa.Array, other: pa.Array) -> pa.Array:
    import pyarrow.compute as pc

    return pc.and_(mask, pc.invert(other))


def _count(mask: pa.Array) -> int:
    import pyarrow.compute as pc

    return int(pc.sum(mask).as_py() or 0)


def _micros(moment: Any) -> int:
    return int(moment.timestamp() * 1_000_000)
