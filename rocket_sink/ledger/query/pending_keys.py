"""Sharding keys with pending dead letters, for tasks that must not overtake them (`onPendingKey`).

A task attempt that gave up messages with sharding keys writes a note of the kind `pending` before
its end. The note is {topic: [keys]}, by the name

    <query>~<epoch>~<partition>~<run>.<task attempt>.<unique>

Tasks of later epochs, and of other queries with this ledger, read all notes when they begin (one
listing, usually of an empty folder). A complete attempt removes the notes of earlier attempts at
its task, because it has handled the same rows. After each fold, and before each epoch of the
foreachBatch lane, the driver releases keys (`release`): it keeps in a note the keys that have a
pending dead letter, and removes a note without such keys. If the note's attempt does not count, the
note is removed. If the attempt is not in the ledger yet, the note stays as it is.

Rows that were refused for their content (reason `data`) hold no key, because they are never sent as
they are. Delayed rows hold no key, because no order counts for them. Rows that were held back
(`held_back`) hold their key only if another dead letter of the key was sent, failed and counts.
Otherwise they would hold their own key for ever.

All functions and methods raise LedgerError if the ledger's folder cannot be read or written."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Final, NamedTuple

from rocket_sink.errors import LedgerError
from rocket_sink.ledger.append.table import reading
from rocket_sink.ledger.notes import NoteStore
from rocket_sink.ledger.path import LedgerPath, failing, path_part
from rocket_sink.ledger.records import RunContext
from rocket_sink.ledger.sql import Query, is_text
from rocket_sink.ledger.transport.files import spooled_epochs
from rocket_sink.ledger.views import rows_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_KIND: Final = "pending"

Keys = dict[str, set[str]]
"""{topic: sharding keys}."""


class _Note(NamedTuple):
    """A note's name, and the task's query, epoch and partition in it."""

    name: str
    query: str
    epoch: int
    partition: str

    @property
    def attempt(self) -> str:
        """The name without its last part, as `_attempt_name` gives it."""
        return self.name.rpartition(".")[0]


class PendingKeys:
    """The held keys of one ledger, as one task attempt sees them."""

    def __init__(self, place: LedgerPath) -> None:
        self._place = place
        self._earlier: list[str] = []

    def held_for(self, ctx: RunContext) -> Keys:
        """Return the keys that other queries, or earlier epochs of the task's query, hold."""
        query, held_keys = path_part(ctx.query_id), Keys()
        own = query, ctx.epoch, str(ctx.partition)
        with _errors(self._place):
            store = NoteStore(self._place, _KIND)
            for note in _notes(store):
                if (note.query, note.epoch, note.partition) == own:
                    self._earlier.append(note.name)
                if note.query == query and note.epoch >= ctx.epoch:
                    continue
                for topic, keys in _read(store, note.name).items():
                    held_keys.setdefault(topic, set()).update(keys)
        return held_keys

    def note(self, ctx: RunContext, keys: Mapping[str, Iterable[str]]) -> None:
        """Hold these keys from now on; the note is durable on return."""
        lists = {topic: sorted(names) for topic, names in keys.items() if names}
        if not lists:
            return
        task = ctx.query_id, ctx.epoch, ctx.partition
        attempt = _attempt_name(*task, ctx.run_id, ctx.task_attempt_id)
        with _errors(self._place):
            NoteStore(self._place, _KIND).write(f"{attempt}.{uuid.uuid4().hex}", lists)

    def withdraw_earlier(self) -> None:
        """Remove the notes of earlier attempts at this task; called when this attempt is complete
        and durable. Remove only notes that `held_for` saw: a worker that outlives its driver must
        not remove the notes of a later attempt."""
        if self._earlier:
            with _errors(self._place):
                NoteStore(self._place, _KIND).remove(*self._earlier)


def withdraw(place: LedgerPath, query_id: str) -> None:
    """Release all keys of a failed batch write, because its dead letters are in no ledger."""
    query = path_part(query_id)
    with _errors(place):
        store = NoteStore(place, _KIND)
        store.remove(*(note.name for note in _notes(store) if note.query == query))


def release(spark: SparkSession, place: LedgerPath, erased: Keys | None = None) -> int:
    """Remove keys that need not be held any more from the notes; return how many were removed.
    This costs one listing, and if there are notes, a listing of the spool and three queries.
    `erased` keys without a pending letter also leave the notes of attempts that the ledger lacks:
    an attempt that died would keep the key's text for ever."""
    # Import here: tasks import this module, too, but do not read the table.
    from rocket_sink.ledger.query.duckdb_reader import reader_of

    with _errors(place):
        store = NoteStore(place, _KIND)
        notes = list(_notes(store))
        if not notes:
            return 0
        # List the spool before the table is read. A fold adds a file's rows to the table, then
        # deletes the file. In the other order, a reader could miss the rows in both.
        unfolded = spooled_epochs(place)
        with reading(place):
            query = reader_of(spark, place)
            if query is None:
                return 0
            known_notes = _known(query, notes, unfolded)
            pending = _pending(query) if erased or any(known_notes.values()) else Keys()
        released = 0
        for note in notes:
            keys = _read(store, note.name)
            if note not in known_notes:
                goes = _without(erased or {}, pending)
            else:
                goes = _without(keys, pending) if known_notes[note] else keys
            kept = _without(keys, goes)
            released += sum(len(names - kept.get(topic, set())) for topic, names in keys.items())
            if not kept:
                store.remove(note.name)
            elif kept != keys:
                store.write(note.name, {topic: sorted(names) for topic, names in kept.items()})
        return released


def _without(keys: Keys, others: Keys) -> Keys:
    """Return the keys that are not among the others, without topics that have none."""
    kept = {topic: names - others.get(topic, set()) for topic, names in keys.items()}
    return {topic: names for topic, names in kept.items() if names}


def _known(query: Query, notes: list[_Note], unfolded: set[tuple[str, str]]) -> dict[_Note, bool]:
    """Return {note: whether its attempt counts} of the notes whose attempt the table knows.

    The table knows a complete attempt. It knows all attempts at an epoch if it has later epochs of
    the query, and the epoch has no file in the spool: is not among `unfolded` (query, epoch).
    Another attempt at the same task proves nothing, because the note's attempt may be newer."""
    parts = {note.query for note in notes}
    last = "SELECT query_id, max(epoch) AS last FROM accounts WHERE complete GROUP BY query_id"
    ids = {row["query_id"]: row["last"] for row in rows_of(query(last))}
    ids = {query_id: epoch for query_id, epoch in ids.items() if path_part(query_id) in parts}
    if not ids:
        return {}
    # Query the attempts at the notes' tasks only, because the ledger may be large.
    places = ", ".join({f"'{note.epoch}~{note.partition}'" for note in notes})
    queries = " OR ".join(is_text("query_id", query_id) for query_id in ids)
    attempts = query(
        "SELECT query_id, epoch, coalesce(CAST(partition AS STRING), 'None') AS part, run_id, "  # noqa: S608
        "CAST(task_attempt_id AS STRING) AS task, counts FROM accounts WHERE complete "
        "AND concat_ws('~', CAST(epoch AS STRING), coalesce(CAST(partition AS STRING), 'None'))"
        f" IN ({places}) AND ({queries})"
    )
    counts: dict[str, bool] = {}
    for row in rows_of(attempts):
        *attempt, is_counted = row.values()
        counts[_attempt_name(*attempt)] = is_counted
    last_epochs = {path_part(query_id): epoch for query_id, epoch in ids.items()}
    known = {}
    for note in notes:
        is_spooled = (note.query, str(note.epoch)) in unfolded
        is_past = not is_spooled and last_epochs.get(note.query, note.epoch) > note.epoch
        if note.attempt in counts or is_past:
            known[note] = counts.get(note.attempt, False)
    return known


def _pending(query: Query) -> Keys:
    """Return the keys that pending dead letters hold. A letter that was refused for its content
    (`data`) holds no key, nor does a delayed message. Another pending letter holds its key if a
    letter of the key, settled or not, was neither held back nor refused unsent."""
    in_order = "coalesce(delay_level, 0) = 0 AND delay_ms IS NULL AND delivery_timestamp IS NULL"
    pending = query(f"""
        SELECT DISTINCT p.topic, p.sharding_key FROM (
            SELECT topic, sharding_key FROM pending_letters WHERE reason <> 'data' AND {in_order}
        ) p SEMI JOIN (
            SELECT topic, sharding_key FROM counted_letters WHERE reason <> 'held_back'
            AND (reason <> 'data' OR attempts > 0) AND {in_order}
        ) g ON p.topic = g.topic AND p.sharding_key = g.sharding_key""")  # noqa: S608
    keys = Keys()
    for row in rows_of(pending):
        keys.setdefault(row["topic"], set()).add(row["sharding_key"])
    return keys


def _attempt_name(query: str, epoch: int, partition: object, run: str, task: object) -> str:
    # The run's id is cut because a file's name has 255 characters at most.
    return f"{path_part(query)}~{epoch}~{partition}~{path_part(run)[:40]}.{task}"


def _notes(store: NoteStore) -> Iterator[_Note]:
    for name in store.names():
        if name.count("~") == 3:
            query, epoch, partition, _ = name.split("~")
            if partition == "None" or partition.isdigit():
                yield _Note(name, query, int(epoch), partition)


def _read(store: NoteStore, name: str) -> Keys:
    try:
        # Another process may release the keys meanwhile, so the note may be gone.
        return {topic: set(names) for topic, names in (store.read(name) or {}).items()}
    except ValueError as error:
        path = store.where(name)
        raise LedgerError(
            f"{path} cannot be read ({error}); its keys are in the ledger's dead letters. Delete "
            "it when they are resolved",
            path=path,
        ) from error


def _errors(place: LedgerPath) -> AbstractContextManager[None]:
    return failing(
        f"the pending keys of the ledger {place} cannot be read or written", place.uri,
        ". onPendingKey=hold needs a ledger folder that tasks can write to",
    )  # fmt: skip
