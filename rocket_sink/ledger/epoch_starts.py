"""Notes that record which epochs, batch writes and queries have begun.

`starts`: a task attempt. The attempt writes its note before its first send:

    <query>/<epoch>/<run>~<partition>~<stage>~<generation>-<unique>

The note has the facts on which the ids of the attempt's rows depend (`IdFacts`), so that a replay
that would give its rows other ids notices this.

The attempt then reads the query's other notes. Its epoch may have left messages on the brokers in
three cases: another run of the epoch has a note (a restart), another attempt at the partition or
another stage has one (a retry), or a later epoch has one (the checkpoint was cut back). In all
other cases nothing of the epoch was sent, unless Spark ran the stage again with its rows in other
partitions. No task knows that; the driver counts such rows (`spark.checks.context`). Each run of a
query has a generation, one above the highest generation in earlier notes. A task that sees a later
generation must stop. Either a second driver runs the query, or the driver of this task died and was
started again.

Other kinds of notes:
- `epochs`: the last epoch that a driver of the foreachBatch lane began. An epoch that died before
  Delta's commit has no rows in the ledger, but it may have sent messages.
- `writes`: a batch write of an `appId`. The write removes its note after it has succeeded. If the
  next write finds a note, it repeats the write that the note names.
- `batches`: a batch write with a `batchId`, what is known of its frame, and its summary once it is
  complete.
- `queries`: the id of the streaming query that uses an `appId`; Spark keeps the id in the
  checkpoint. A different id means that the checkpoint was deleted or belongs to another query.
  Epochs would then begin at 0 again, but the ledger's rows of these epochs under this `appId`
  describe other data. Also the ways in which the last runs of a streaming query have left records
  in this ledger, and the epoch that was pending when each way began (`unrecorded_epoch`).
- `ends`: an epoch whose half messages are being committed. The note stays if the process is killed.
"""

from __future__ import annotations

import contextlib
import functools
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from rocket_sink.errors import CheckpointError, LedgerError
from rocket_sink.forks import ForkLock
from rocket_sink.ledger.notes import NoteStore, now_ms
from rocket_sink.ledger.path import LedgerPath, failing, folder_part, path_part, resolve_path
from rocket_sink.ledger.records import RunContext
from rocket_sink.ledger.token import LedgerToken
from rocket_sink.net import log
from rocket_sink.net.resolve import resolved
from rocket_sink.options import SinkOptions

_LOG: Final = log.logger(__name__)
_STARTS: Final = "starts"
_EPOCHS: Final = "epochs"
_WRITES: Final = "writes"
_BATCHES: Final = "batches"
_QUERIES: Final = "queries"
_ENDS: Final = "ends"
_KEPT: Final = 3
"""Number of epochs whose notes are kept; one epoch is enough to detect a cut-back checkpoint."""
ROWS_FACT: Final = "number of rows"
"""The fact of a complete batch's frame that `NamedBatch.end` adds."""
FRAME_FACT: Final = "the frame"
"""The name of a batch write's frame in `IdFacts.planned_by`."""
_CACHED_CLAIMS: Final = 64
_CHECK_S: Final = 1.0
"""Shortest time between two checks. An object store takes some 50 ms to list a folder."""

Brokers = Mapping[str, frozenset[str]]
"""{topic: names of brokers}."""


@dataclass(frozen=True)
class IdFacts:
    """Facts on which the ids of a task attempt's rows depend. An attempt in which they differ gives
    the same rows other ids, so it does not find the rows that are stored.

    Attributes:
        planned_by: settings by which Spark cuts an epoch into partitions.
        written_by: settings and options by which a row becomes a message.
        first_ids: ids of the attempt's first rows.
        pending_epoch: the epoch that the checkpoint's logs showed as begun and not ended when the
            run started; empty if there was none, or if it is not known.
        unrecorded_epoch: the pending epoch, if an earlier run may have sent rows of it of which the
            ledger has no record under the query's id (`unrecorded_epoch`); else empty.
        cluster: addresses of the name servers, and of the topic's brokers. Clusters that share one
            of them are the same: names of brokers, and of clusters, are the same everywhere.
    """

    planned_by: Mapping[str, str] = field(default_factory=dict)
    written_by: Mapping[str, str] = field(default_factory=dict)
    first_ids: Sequence[str] = ()
    pending_epoch: str = ""
    unrecorded_epoch: str = ""
    cluster: Sequence[str] = ()


@dataclass(frozen=True)
class PriorAttempts:
    """Earlier attempts at an epoch, which may have sent messages.

    Attributes:
        since_ms: start of the first attempt, in ms since 1970 by its worker's clock.
        brokers: the brokers that the attempts may have sent to.
        facts: of the attempts of this epoch; `first_ids` only of those of this partition.
        clusters: `IdFacts.cluster` of each attempt.
    """

    since_ms: int
    brokers: Brokers
    facts: Sequence[IdFacts] = ()
    clusters: Sequence[Sequence[str]] = ()


class _Note:
    """A note of the kind `starts`, parsed from its path."""

    def __init__(self, path: str) -> None:
        self.path = path
        epoch, self.name = path.split("/")[-2:]
        self.epoch = int(epoch) if epoch.isdigit() else -1
        self.run, self.partition, self.stage, unique = self.name.split("~")
        self.generation = int(unique.partition("-")[0])


class EpochStarts:
    """The `starts` notes of a query, for one of its task attempts."""

    def __init__(
        self, place: LedgerPath, ctx: RunContext, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._place = place
        self._ctx = ctx
        self._clock = clock
        self._run = path_part(ctx.run_id)
        self._folder = folder_part(ctx.query_id)
        self._generation = 0
        self._checked_s = 0.0
        self._own = self._folder
        self._at_ms = 0
        self._facts = IdFacts()

    def begin(self, brokers: Brokers, facts: IdFacts = IdFacts()) -> PriorAttempts | None:
        """Write this task attempt's note durably; return the earlier attempts, or None.

        Raises:
            CheckpointError: a later run of the query has begun.
            LedgerError: the ledger's folder cannot be read or written.
        """
        store, ctx = NoteStore(self._place, _STARTS), self._ctx
        notes = self._notes(store)
        own = [note.generation for note in notes if note.run == self._run]
        self._generation = max(own or (note.generation + 1 for note in notes), default=1)
        name = f"{self._run}~{ctx.partition}~{ctx.stage_id}~{self._generation}-{uuid.uuid4().hex}"
        self._own, self._at_ms = f"{self._folder}/{ctx.epoch}/{name}", now_ms()
        self.note_brokers(brokers, facts)
        with self._saying(store):
            self.check()
            notes = self._notes(store)
            self._prune(store, {note.epoch for note in notes})
            others = [note for note in notes if note.name != name and self._may_repeat(note)]
            return _earlier(store, ctx, others) if others else None

    def note_brokers(self, brokers: Brokers, facts: IdFacts | None = None) -> None:
        """Note durably which brokers may get the next messages, and new facts if there are some;
        replace the earlier note. Raise LedgerError if the ledger's folder cannot be written."""
        self._facts = facts or self._facts
        topics = {topic: sorted(names) for topic, names in brokers.items()}
        store = NoteStore(self._place, _STARTS)
        with self._saying(store):
            noted = asdict(self._facts)
            store.write(self._own, {"at_ms": self._at_ms, "topics": topics, "facts": noted})

    def withdraw(self) -> None:
        """Remove this attempt's note, because the attempt has sent nothing and is refused."""
        with contextlib.suppress(OSError):
            NoteStore(self._place, _STARTS).remove(self._own)

    def _saying(self, store: NoteStore) -> contextlib.AbstractContextManager[None]:
        path = store.where(self._own)
        return failing(
            f"cannot note the begin of epoch {self._ctx.epoch} at {path}", path,
            ". delivery=effectively_once needs a ledger folder that tasks can write to",
        )  # fmt: skip

    def check(self) -> None:
        """Check, before each request but at most once a second, that no later run has begun. If one
        has begun, raise CheckpointError, also at each later call: this attempt must send nothing
        more. A batch write that has ended has removed all notes, also those of its earlier runs."""
        now_s = self._clock()
        if self._checked_s and now_s - self._checked_s < _CHECK_S:
            return
        own_run = (self._generation, self._run)
        notes = self._notes(NoteStore(self._place, _STARTS))
        runs = [note.run for note in notes if (note.generation, note.run) > own_run]
        if runs or not notes:
            run = runs[0] if runs else "unknown, for it has ended"
            raise CheckpointError(
                f"another driver (run {run}) has taken the query {self._ctx.query_id} over: two "
                "drivers use its checkpoint, or this one was taken for dead. This run sends "
                "nothing more; stop one of the two",
                query_id=self._ctx.query_id, run_id=run,
            )  # fmt: skip
        self._checked_s = now_s

    def _notes(self, store: NoteStore) -> list[_Note]:
        with self._saying(store):
            return [_Note(name) for name in store.names(self._folder)]

    def _may_repeat(self, note: _Note) -> bool:
        """Return whether the attempt of another note may have sent rows of this attempt."""
        if note.epoch != self._ctx.epoch:
            return note.epoch > self._ctx.epoch
        return (
            note.run != self._run
            or note.partition == str(self._ctx.partition)
            or note.stage != str(self._ctx.stage_id)
        )

    def _prune(self, store: NoteStore, epochs: Iterable[int]) -> None:
        for epoch in epochs:
            if 0 <= epoch <= self._ctx.epoch - _KEPT:
                # Another task may prune at the same time; the next task removes the rest.
                with contextlib.suppress(OSError):
                    store.remove_folder(f"{self._folder}/{epoch}")


def begin_epoch(place: LedgerPath, query_id: str, epoch: int, delivery: str) -> bool:
    """Note that the driver begins an epoch; return whether this or a later epoch had begun before.
    Raise LedgerError if the folder cannot be read or written: without an answer, rows that were
    sent before would not count as possible duplicates."""
    last = last_begun(place, query_id)
    if last < epoch:
        _write_epoch_note(place, query_id, {"epoch": epoch, "delivery": delivery})
    return last >= epoch


def last_begun(place: LedgerPath, query_id: str) -> int:
    """Return the last epoch that `begin_epoch` has noted; -1 if there is none, or if the note tells
    nothing. Raise LedgerError if the folder cannot be read."""
    return int(_epoch_note(place, query_id).get("epoch", -1))


def note_refused_frame(place: LedgerPath, query_id: str, epoch: int) -> None:
    """Note that a second frame of the epoch was refused. The ledger may have the epoch's first
    frame, so the ledger's transaction does not prove that it has all rows of the epoch. Raise
    LedgerError if the folder cannot be read or written."""
    note = _epoch_note(place, query_id)
    _write_epoch_note(place, query_id, {**note, "epoch": epoch, "is_frame_refused": True})


def check_whole(
    place: LedgerPath, query_id: str, epoch: int, delivery: str, *, is_held: bool
) -> None:
    """Raise a CheckpointError if the epoch was begun and cannot go on as it is now (`is_held`: the
    ledger holds its rows).

    - It was begun with another `delivery`, so its rows had other ids, or were half messages.
    - The ledger holds the epoch, but a frame of it was refused. Delta would skip the epoch,
      although the query may now write the rows of all frames in one frame. Forget the refusal if
      the ledger does not hold the epoch, because all of it is sent again.

    Raise LedgerError if the folder cannot be read. A ledger that has no files beside its table has
    no notes, either."""
    note = {} if place.problem else _epoch_note(place, query_id)
    if note.get("epoch") != epoch:
        return
    is_sent = is_held and note.get("delivery") != "transactional"
    if not is_sent:
        _check_delivery(note, f"the epoch {epoch} of the query {query_id}", delivery)
    if not note.get("is_frame_refused"):
        return
    if is_held:
        raise CheckpointError(
            f"the ledger {place} has one frame of the epoch {epoch} of the query {query_id}. A "
            "second frame was refused, and its rows were not sent. Let each sink of the query have "
            "an appId of its own, or write one frame with the rows of all, and give a new appId, "
            "which sends the epoch again",
            query_id=query_id, ledger_epoch=epoch, checkpoint_epoch=epoch,
        )  # fmt: skip
    _write_epoch_note(place, query_id, {**note, "is_frame_refused": False})


def _check_delivery(note: Mapping[str, Any], what: str, delivery: str) -> None:
    """Raise a CheckpointError if a note of a send that was begun names another `delivery`."""
    first = note.get("delivery", delivery)
    if first != delivery:
        raise CheckpointError(
            f"{what} was begun with delivery={first}, and is not done. With delivery={delivery} "
            "the rows that are stored already would be stored again, or half messages would stay "
            f"uncommitted. Nothing is sent. Start with delivery={first} until this is done, and "
            "change the delivery then; or give a new appId, which sends all rows again"
        )


def _epoch_note(place: LedgerPath, query_id: str) -> dict[str, Any]:
    """Return the note of the epoch that has begun last; empty if there is none, or if it is
    damaged."""
    store, name, note = NoteStore(place, _EPOCHS), folder_part(query_id), None
    before = f"cannot tell from {store.where(name)} whether an epoch was begun before"
    with failing(before, store.where(name)), contextlib.suppress(ValueError):
        note = store.read(name)
    if not (isinstance(note, dict) and "name" in note and isinstance(note.get("epoch"), int)):
        return {}
    _check_name(place, query_id, note["name"])
    return note


def _write_epoch_note(place: LedgerPath, query_id: str, note: Mapping[str, Any]) -> None:
    store, name = NoteStore(place, _EPOCHS), folder_part(query_id)
    with failing(f"cannot write {store.where(name)}", store.where(name)):
        store.write(name, {"name": query_id, **note})


def _check_name(place: LedgerPath, name: str, named: str) -> None:
    """Raise a CheckpointError if a note that was read for `name` is that of another name."""
    if named != name:
        raise CheckpointError(
            f"in the ledger {place} the notes of {named!r} are in the files of {name!r}: its file "
            "system does not tell the two names apart. Nothing is sent. Give this query or write "
            "another appId",
            named=named,
        )


def begin_write(place: LedgerPath, app_id: str, write: str, delivery: str) -> tuple[str, bool]:
    """Note that the batch write named `write` of the `appId` begins.

    Raises:
        CheckpointError: an earlier write, of another `delivery`, did not succeed.
        LedgerError: the folder cannot be read or written, so nobody knows whether there is one.

    Return (name of the write to send, whether an earlier write did not succeed):

    - (name in the note, True): a note shows that a write did not succeed. The ledger lacks its
      rows, so the caller repeats this write.
    - (`write`, True): there is such a note, but no name can be read from it.
    - (`write`, False): there is no such note."""
    own = {"at_ms": now_ms(), "name": app_id, "write": write, "run": write, "delivery": delivery}
    store, name = NoteStore(place, _WRITES), folder_part(app_id)
    where = store.where(name)
    with failing(f"cannot tell from {where} whether a write did not succeed", where):
        try:
            note, is_new = store.agree(name, own)
            _check_name(place, app_id, note["name"])
            _check_delivery(note, f"a write of the appId {app_id!r}", delivery)
            first = str(note["write"])
        except (ValueError, KeyError, TypeError):
            first, is_new = write, False  # The existing note names no write.
        if not is_new:
            # The write of the note may still run. Its end must not remove the note of this one.
            store.write(name, {**own, "write": first})
    return first, not is_new


def end_write(place: LedgerPath, app_id: str, run: str) -> bool:
    """Remove the note of the write, because the ledger has the write's rows. Return False if
    another write of the `appId` has begun after this one, whose note it is now."""
    name = folder_part(app_id)
    try:
        store = NoteStore(place, _WRITES)
        if (note := store.read(name)) is not None and note["run"] != run:
            return False
        store.remove(name)
    except (OSError, LedgerError, ValueError, KeyError, TypeError) as error:
        _LOG.warning(
            "the write of the appId %s is complete, but its note _notes/%s/%s.json in %s cannot be "
            "removed: %s. Remove it before the next write, which would take itself for a "
            "repetition, and with effectively once leave out rows that are equal to sent ones",
            app_id, _WRITES, name, place, error,
        )  # fmt: skip
    return True


def begin_named_write(
    options: SinkOptions, run: str, *, takes_over: bool = True
) -> tuple[str, bool]:
    """Note the begin of a batch write, if an `appId` names it. Return the write's query id, and
    whether an earlier write of the `appId` did not succeed.

    Each write has an id of its own: in the ledger, rows of a later write with the same id would
    replace its rows. But with effectively once, a write that `takes_over` continues the unfinished
    write under that write's id, so its tasks look up the messages that are sent already."""
    app_id = options.app_id
    own = f"{app_id}/{run}" if app_id else run
    if not (app_id and options.ledger):
        return own, False
    try:
        write, again = begin_write(resolve_path(options.ledger), app_id, run, options.delivery)
    except LedgerError:
        if takes_over:
            raise
        return own, False  # A client of Spark Connect may not see the folder of a local ledger.
    if again and takes_over and options.delivery == "effectively_once":
        return f"{app_id}/{write}", True
    return own, again


def end_named_write(
    place: LedgerPath, options: SinkOptions, query_id: str, run: str, *, is_done: bool
) -> None:
    """Remove the notes of a batch write and its tasks. If a write with an `appId` or `batchId` has
    failed, or is over its budget, keep them for the next one."""
    if is_done and options.app_id and not options.batch_id:
        is_done = end_write(place, options.app_id, run)
    is_named = options.app_id or options.batch_id
    if options.delivery == "effectively_once" and (is_done or not is_named):
        with contextlib.suppress(OSError, LedgerError):
            NoteStore(place, _STARTS).remove_folder(folder_part(query_id))


@dataclass(frozen=True)
class NamedBatch:
    """A batch write with a `batchId`, as its note shows it.

    Attributes:
        file: name of the note.
        note: query id of all writes with the `batchId`, facts of their frame, and the summary
            (empty until a write is complete).
        is_new: whether this is the first write with the `batchId`.
    """

    place: LedgerPath
    file: str
    note: Mapping[str, Any]
    is_new: bool

    @property
    def query_id(self) -> str:
        return str(self.note["query_id"])

    @property
    def summary(self) -> Mapping[str, Any]:
        return dict(self.note["summary"])

    def check(self, facts: Mapping[str, object]) -> None:
        """Raise a CheckpointError if a fact of this frame ({name: value}) differs from the noted
        one. An empty value is unknown."""
        first = self.note["facts"]
        differences = "; ".join(
            f"{name} was {first[name]}, and is {value}"
            for name, value in facts.items()
            if value and first.get(name) and first[name] != value
        )
        if differences:
            raise CheckpointError(
                f"the ledger {self.place} has this batchId for another frame ({self.query_id}): "
                f"{differences}. Nothing is sent: write the same frame in the same way, or give "
                "another batchId",
                query_id=self.query_id,
            )

    def end(self, summary: Mapping[str, Any]) -> None:
        """Note that the write is complete. If that fails, a repetition counts as half-way."""
        facts = {**self.note["facts"], ROWS_FACT: summary["rows_in"]}
        note = {**self.note, "facts": facts, "summary": summary}
        with contextlib.suppress(OSError, LedgerError):
            NoteStore(self.place, _BATCHES).write(self.file, note)


def begin_batch(options: SinkOptions, run: str, facts: Mapping[str, str]) -> NamedBatch:
    """Note durably that a write of the options' `batchId` begins, with facts of its frame.

    Raises:
        CheckpointError: the `batchId` belongs to another frame, or to other name servers.
        LedgerError: the ledger's folder cannot be read or written.
    """
    place, name = resolve_path(options.ledger), f"{options.app_id}~{options.batch_id}"
    store, file = NoteStore(place, _BATCHES), folder_part(name)
    query_id = "/".join(filter(None, (options.app_id, options.batch_id, run)))
    body = f"bodyFormat={options.body_format}, {options.columns}"
    facts = {"topic": options.full_topic, "body": body, "delivery": options.delivery, **facts}
    servers = sorted({*options.name_servers, *resolved(options.name_servers)})
    own = {"name": name, "query_id": query_id, "facts": facts, "summary": {}, "servers": servers}
    where = store.where(file)
    with failing(f"cannot tell from {where} whether the batchId is new", where):
        note, is_new = store.agree(file, own)
    _check_name(place, name, note["name"])
    if set(servers).isdisjoint(note["servers"]):
        raise CheckpointError(
            f"the ledger {place} has this batchId for the name servers "
            f"{', '.join(note['servers'])}, and this write is for {', '.join(servers)}, perhaps of "
            "another cluster. Nothing is sent: give the earlier name servers, or another batchId",
            query_id=note["query_id"],
        )
    batch = NamedBatch(place, file, note, is_new)
    if batch.summary and note["facts"]["delivery"] != "transactional":
        # The write is complete, and its messages are visible, so the delivery does not matter.
        facts["delivery"] = ""
    batch.check(facts)
    return batch


@functools.lru_cache(maxsize=_CACHED_CLAIMS)
def claim_app_id(
    place: LedgerPath, app_id: str, query_id: str, token: LedgerToken | None = None
) -> None:
    """Note that this streaming query uses the `appId`. A process does this once per query and
    `token`: a new ledger at the path of a deleted one has another token.

    Raises:
        CheckpointError: another query uses the `appId`.
        LedgerError: the ledger's folder cannot be read or written.
    """
    store, name = NoteStore(place, _QUERIES), folder_part(app_id)
    where = store.where(name)
    with failing(
        f"cannot tell from {where} which query the appId {app_id!r} names", where,
        kinds=(OSError, ValueError, KeyError, TypeError),
    ):  # fmt: skip
        note, _ = store.agree(name, {"query_id": query_id, "name": app_id})
        named, claimed = str(note["query_id"]), str(note["name"])
    _check_name(place, app_id, claimed)
    if named != query_id:
        raise CheckpointError(
            f"in the ledger {place} the appId {app_id!r} names the streaming query {named}, "
            f"and this query is {query_id}: its checkpoint was deleted, or does not belong to the "
            "appId. Nothing is sent. Start this query with the other query's checkpoint, or with "
            "another appId, which sends again whatever the source gives",
            query_id=query_id, app_id=app_id, named=named,
        )  # fmt: skip


def unrecorded_epoch(
    place: LedgerPath, query_id: str, run_id: str, way: str, pending_epoch: str
) -> str:
    """Note that a run of a streaming query starts with this ledger, and in which `way` it leaves
    records. Return the epoch that was pending in the checkpoint when the query first started in
    this way, or first since it had left it. Empty: no epoch was pending.

    An earlier run that has begun this epoch had another ledger, another way of leaving records, or
    another query id, as after a copy of the checkpoint without its file `metadata` (Spark 4.0,
    4.1). So there is no record of what that run has sent. Return `pending_epoch` if the note cannot
    be read or written. A run has several ways if it has several sinks."""
    try:
        store, name = NoteStore(place, _QUERIES), folder_part(f"{query_id}~ways")
        with _ways_lock:
            note = store.read(name) or {"run": "", "ways": {}, "before": {}}
            if note["run"] != run_id:
                note = {"run": run_id, "ways": {}, "before": note["ways"]}
            epoch = note["ways"].setdefault(way, note["before"].get(way, pending_epoch))
            store.write(name, note)
        return str(epoch)
    except (OSError, LedgerError, ValueError, KeyError, TypeError):
        return pending_epoch


_ways_lock: Final = ForkLock()
"""A run's sinks may start in several threads of its driver."""


def begin_commit(place: LedgerPath, query_id: str, epoch: int) -> bool:
    """Note durably that the half messages of an epoch are being committed; return False if there
    was a note before. Raise LedgerError if the ledger's folder cannot be written.

    The holder of `ENDS_LOCK` calls this before the first request, and `end_commit` after the ledger
    has recorded the epoch's end. If the note exists already, an earlier process may have committed
    some messages. Then ask the brokers which messages are committed: a broker that gets a second
    commit request for a message stores the message twice."""
    store, name = NoteStore(place, _ENDS), _end_name(query_id, epoch)
    path = store.where(name)
    with failing(
        f"cannot note at {path} that half messages are about to be committed", path,
        ". delivery=transactional needs a ledger folder that the driver can write to",
    ):  # fmt: skip
        if store.read(name) is not None:
            return False
        store.write(name, {"at_ms": now_ms()})
        return True


def end_commit(place: LedgerPath, query_id: str, epoch: int) -> None:
    """Remove the note. If this fails, the next process only asks the brokers once more."""
    with contextlib.suppress(OSError):
        NoteStore(place, _ENDS).remove(_end_name(query_id, epoch))


def _end_name(query_id: str, epoch: int) -> str:
    return f"{folder_part(query_id)}~{epoch}"


def _earlier(store: NoteStore, ctx: RunContext, notes: Iterable[_Note]) -> PriorAttempts:
    since_ms, brokers, facts = now_ms(), dict[str, frozenset[str]](), list[IdFacts]()
    clusters = []
    for earlier in notes:
        try:
            note = store.read(earlier.path)
            if note is None:
                continue
            since_ms = min(since_ms, int(note["at_ms"]))
            for topic, names in note.get("topics", {}).items():
                brokers[topic] = brokers.get(topic, frozenset()).union(names)
            noted = IdFacts(**note["facts"])
            clusters.append(noted.cluster)
            if earlier.epoch == ctx.epoch:
                is_own = earlier.partition == str(ctx.partition)
                facts.append(noted if is_own else replace(noted, first_ids=()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            path = store.where(earlier.path)
            raise LedgerError(
                f"{path} cannot be read ({error}): delete it if its epoch has sent nothing",
                path=path,
            ) from error
    return PriorAttempts(since_ms, brokers, facts, clusters)
