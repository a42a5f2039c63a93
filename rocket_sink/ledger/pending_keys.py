"""Sharding keys with pending dead letters, for tasks that must not overtake them (`onPendingKey`).

    <ledger>/_pending/<query>~<epoch>~<partition>~<run>.<task attempt>.<unique>.json
                                                                   {topic: [keys]}

A task attempt that gave up messages of sharding keys writes its keys before its end; the tasks of
later epochs, and of other queries with this ledger, read all such files when they begin: one
listing, of an empty folder as a rule. A complete attempt removes the files of attempts that went
before it, for its rows are theirs. A driver lets go of keys (`release`): of those of attempts that
do not count, and of those with no pending dead letter any more; whenever the spool is folded, and
before each epoch of the foreachBatch lane. Only files whose attempt the ledger can know about are
looked at, so dead letters that are still on their way hold their keys.

Rows that were refused for what they are (reason `data`) hold no key: nothing sends them as they
are. Rows that were held back (`held_back`) hold theirs only behind a dead letter that was given up
and
counts: else keys of an attempt that never counted would hold themselves for ever. Delta looks into
no folder whose name starts with `_`.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Final, NamedTuple

from rocket_sink.errors import LedgerError
from rocket_sink.ledger.notes import NoteStore
from rocket_sink.ledger.path import LedgerPath, failing, path_part, path_part_sql
from rocket_sink.ledger.records import RunContext
from rocket_sink.ledger.spool.files import spooled_epochs
from rocket_sink.ledger.table import is_table, reading
from rocket_sink.ledger.views import queried

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_FOLDER: Final = "_pending"
_SUFFIX: Final = ".json"

Keys = dict[str, set[str]]
"""{topic: sharding keys}."""


class _Note(NamedTuple):
    """The parts of a note file's name."""

    path: str
    query: str
    epoch: int
    partition: str
    run: str
    task: str

    @property
    def place(self) -> tuple[str, int, str]:
        """Query, epoch and partition, which a task attempt and its repetitions share."""
        return self.query, self.epoch, self.partition

    @property
    def attempt(self) -> tuple[str, int, str, str, str]:
        """Names the task attempt."""
        return (*self.place, self.run, self.task)


class PendingKeys:
    """The held keys of one ledger, as one task attempt sees them.

    Raises from all methods:
        LedgerError: the ledger's folder cannot be read or written.
    """

    def __init__(self, place: LedgerPath) -> None:
        self._place = place
        self._earlier: list[str] = []

    def held_for(self, ctx: RunContext) -> Keys:
        """Return the keys that a task must hold back, except those of its epoch's attempts."""
        query, held_keys = path_part(ctx.query_id), Keys()
        own = query, ctx.epoch, str(ctx.partition)
        with _errors(self._place):
            store = NoteStore(self._place)
            for note in _notes(store):
                if note.place == own:
                    self._earlier.append(note.path)
                if note.query == query and note.epoch >= ctx.epoch:
                    continue
                for topic, keys in _read(store, note.path).items():
                    held_keys.setdefault(topic, set()).update(keys)
        return held_keys

    def note(self, ctx: RunContext, keys: Mapping[str, Iterable[str]]) -> None:
        """Hold these keys from now on; durable on return."""
        lists = {topic: sorted(names) for topic, names in keys.items() if names}
        if not lists:
            return
        attempt = f"{_run_part(ctx.run_id)}.{ctx.task_attempt_id}.{uuid.uuid4().hex}"
        parts = (path_part(ctx.query_id), ctx.epoch, ctx.partition, attempt)
        with _errors(self._place):
            name = "~".join(map(str, parts))
            NoteStore(self._place).write(f"{_FOLDER}/{name}{_SUFFIX}", lists)

    def withdraw_earlier(self) -> None:
        """Hold no longer what earlier attempts noted; for an attempt that is complete and durable.

        Earlier ones are those that `held_for` found: a worker that outlives its driver must not
        remove what the attempt after it has noted.
        """
        if self._earlier:
            with _errors(self._place):
                store = NoteStore(self._place)
                for path in self._earlier:
                    store.remove(path)


def withdraw(place: LedgerPath, query_id: str) -> None:
    """Let go of all keys of a batch write that failed: its dead letters are in no ledger.

    Raises:
        LedgerError: the ledger's folder cannot be read or written.
    """
    query = path_part(query_id)
    with _errors(place):
        store = NoteStore(place)
        for note in _notes(store):
            if note.query == query:
                store.remove(note.path)


def release(spark: SparkSession, place: LedgerPath) -> int:
    """Let go of the keys that need not be held any more; returns how many files went.

    Costs a listing while no key is held, the spool's and three queries of the ledger otherwise.

    Raises:
        LedgerError: the ledger's folder cannot be read or written.
    """
    with _errors(place):
        store = NoteStore(place)
        notes = list(_notes(store))
        if not notes or not is_table(spark, place):
            return 0
        # Before the table is read: a fold deletes what is in it.
        unfolded = {
            epoch for spool in place.spools for epoch in spooled_epochs(spool, spool.filesystem())
        }
        with reading(place):
            rows = spark.read.format("delta").load(place.uri)
            attempts = _Attempts(rows, notes, unfolded)
            known_notes = [note for note in notes if attempts.knows(note)]
            counted = any(not attempts.overruled(note) for note in known_notes)
            pending = _pending(rows) if counted else set()
        gone = 0
        for note in known_notes:
            keys = {} if attempts.overruled(note) else _read(store, note.path)
            if not any((t, k) in pending for t, names in keys.items() for k in names):
                store.remove(note.path)
                gone += 1
        return gone


def forget(place: LedgerPath, keys: Iterable[tuple[str, str]]) -> None:
    """Take these keys (topic, sharding key) out of all notes: no dead letter of theirs is pending.

    Raises:
        LedgerError: the ledger's folder cannot be read or written.
    """
    gone = set(keys)
    with _errors(place):
        store = NoteStore(place)
        for note in _notes(store):
            names = _read(store, note.path)
            held = {t: [k for k in keys if (t, k) not in gone] for t, keys in names.items()}
            if not any(held.values()):
                store.remove(note.path)
            elif held != names:
                store.write(note.path, held)


class _Attempts:
    """The complete task attempts in the table that the notes ask for, and each query's last epoch.

    Args:
        unfolded: (query, epoch) with files in the spool.
    """

    def __init__(self, rows: DataFrame, notes: list[_Note], unfolded: set[tuple[str, str]]) -> None:
        from pyspark.sql import functions as F  # noqa: N812 (Spark's own habit)

        self._unfolded = unfolded
        self._last: dict[str, int] = {}
        self._places: set[tuple[str, int, str]] = set()
        self._counts: dict[tuple[str, int, str, str, str], bool] = {}
        first_epoch = min(note.epoch for note in notes)
        attempts = queried(
            rows,
            f"SELECT {path_part_sql('query_id')} AS query, epoch, "  # noqa: S608 (names of ours)
            "coalesce(CAST(partition AS STRING), 'None') AS partition, run_id, "
            "CAST(task_attempt_id AS STRING) AS task, counts FROM accounts "
            f"WHERE complete AND epoch >= {first_epoch}",
        )
        # The driver gets a row per query that holds keys, whatever else the ledger has.
        places = {f"{note.epoch}~{note.partition}" for note in notes}
        is_asked = F.concat_ws("~", "epoch", "partition").isin(*places)
        attempt = F.struct("epoch", "partition", "run_id", "task", "counts")
        by_query = attempts.where(F.col("query").isin(*{note.query for note in notes}))
        queries = by_query.groupBy("query").agg(
            F.max("epoch").alias("last"), F.collect_list(F.when(is_asked, attempt)).alias("asked")
        )
        for query, last, rows_asked in queries.collect():
            self._last[query] = last
            for epoch, partition, run_id, task, counts in rows_asked:
                self._places.add((query, epoch, partition))
                self._counts[query, epoch, partition, _run_part(run_id), str(task)] = counts

    def knows(self, note: _Note) -> bool:
        """Return whether the table has the dead letters of the note's attempt, if they count.

        Another attempt in its place is not enough: this one may be newer, and on its way.
        """
        if not note.run:  # a file of an older rocket-sink does not tell its attempt
            return note.place in self._places or self._is_past(note)
        return note.attempt in self._counts or self._is_past(note)

    def overruled(self, note: _Note) -> bool:
        """Return whether another attempt is known to count in the place of this one."""
        return bool(note.run) and not self._counts.get(note.attempt, False)

    def _is_past(self, note: _Note) -> bool:
        """Return whether later epochs are folded; a fold may have left out an unreadable file."""
        is_left = (note.query, str(note.epoch)) in self._unfolded
        return not is_left and self._last.get(note.query, note.epoch) > note.epoch


def _pending(rows: DataFrame) -> set[tuple[str, str]]:
    """Return keys that have a pending dead letter, and one (settled or not) that was given up for
    itself: by its outcome, or refused by the broker. Rows that the sink refused hold no key."""
    keys = queried(
        rows,
        """
        SELECT DISTINCT p.topic, p.sharding_key FROM pending_letters p
        SEMI JOIN (
            SELECT topic, sharding_key FROM counted_letters
            WHERE reason <> 'held_back' AND (reason <> 'data' OR attempts > 0)
        ) g ON p.topic = g.topic AND p.sharding_key = g.sharding_key
        WHERE p.reason <> 'data'""",
    )
    return {tuple(row) for row in keys.collect()}


def _run_part(run_id: str) -> str:
    """Return a run's id as part of a file's name, which has 255 characters at most."""
    return path_part(run_id)[:40]


def _notes(store: NoteStore) -> Iterator[_Note]:
    for path in store.paths(_FOLDER):
        name = path.removeprefix(f"{_FOLDER}/")
        if name.count("~") == 3:
            query, epoch, partition, attempt = name.removesuffix(_SUFFIX).split("~")
            # An older rocket-sink's has only the unique part.
            run, task = attempt.rsplit(".", 2)[:2] if attempt.count(".") > 1 else ("", "")
            yield _Note(path, query, int(epoch), partition, run, task)


def _read(store: NoteStore, path: str) -> dict[str, list[str]]:
    try:
        return store.read(path) or {}  # released meanwhile
    except ValueError as error:
        path = store.where(path)
        raise LedgerError(
            f"{path} cannot be read ({error}); its keys are in the ledger's dead letters. Delete "
            "it when they are resolved",
            path=path,
        ) from error


def _errors(place: LedgerPath) -> AbstractContextManager[None]:
    return failing(
        f"the pending keys of the ledger {place.uri} cannot be read or written", place.uri,
        ". onPendingKey=hold needs a ledger folder that tasks can write to",
    )  # fmt: skip
