"""The task side of a backfill: sends dead letters, and writes resolutions to the ledger's spool.

Dead letters come sorted per key. A task sends them in chunks, by the `TaskSender` of all writes:

    write marks "about to send", durably
    -> send, and await all answers
    -> write resolutions of stored letters and marks of failed letters, durably

A killed backfill leaves at most one chunk per task without a noted result. Before the next backfill
sends such letters, or letters with an unknown outcome, it asks brokers for their message ids: the
brokers of the topic's route, and with effectively_once also the broker that had not answered. A
message counts as not stored if none of these brokers has it after `storedCheckDelay`. Several dead
letters may have one id, so a stored message needs the letter's content, and settles one letter:
after it, a letter with the same content is sent. A dead letter whose resend fails stays pending,
and gets no second dead letter. Later dead letters of its key are held back, to keep the key's
order.

Brokers are not asked for messages that a consumer gave up, or that were read from a topic
(`was_stored`): a message with this id exists in any case. Dead letters that were settled since the
plan, for example parked by a user, are left out. Before each chunk the task checks that no other
backfill has claimed the ledger (`ledger.query.backfill_marks`). If the broker of a dead letter's
queue is in no route, the letter stays pending, and the report names the broker (`.home_queues`).
Only with `move_keys` is the letter sent to another queue."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from rocket_sink.errors import DeliveryError, NameServerUnavailableError, NoRouteError, SendError
from rocket_sink.ledger.path import resolve_path
from rocket_sink.ledger.query.backfill_marks import (
    ClaimCheck,
    about_to_send,
    not_stored,
    noted_since,
)
from rocket_sink.ledger.records import RunContext, resolution_rows
from rocket_sink.ledger.schema import DEAD_LETTER, EPOCH, NO_WAY
from rocket_sink.ledger.token import LedgerToken
from rocket_sink.ledger.transport.files import has_earlier_attempt
from rocket_sink.ledger.transport.spool import SpoolWriter
from rocket_sink.options import SinkOptions
from rocket_sink.producer.admin.stored_messages import StoredMessages
from rocket_sink.producer.engine.engine import SendEngine
from rocket_sink.producer.engine.limits import per_task_rate
from rocket_sink.producer.pool import worker_pool
from rocket_sink.rows.checks import validate
from rocket_sink.rows.contract import DELAY_COLUMNS, resolve_columns
from rocket_sink.rows.normalise import normalise
from rocket_sink.rows.stored_rows import SYSTEM_PROPERTIES
from rocket_sink.spark.backfill.home_queues import HomeQueues, Lists, has_own_queue
from rocket_sink.spark.checks.context import run_context
from rocket_sink.task.queue_snapshot import Queues
from rocket_sink.task.recorder import LedgerRecorder
from rocket_sink.task.task import TaskSender
from rocket_sink.task.transaction_marker import TRANSACTION_PROPERTY
from rocket_sink.wire.batch import InnerMessage, iter_batch
from rocket_sink.wire.stored import IsCopy, StoredMessage

_ADVICE: Final = (
    "Start the brokers that they may be on; if these never come back, delivery=at_least_once sends "
    "the dead letters without them."
)

CHUNK: Final = 2000
"""Dead letters per chunk; fewer if a rate limit would make the chunk take more than a second."""
FOUND: Final = "found at a broker: an earlier send had stored it"

FAILURES_MAX: Final = 1000
"""Limit of the failures that a backfill lists."""
RESULT_DDL: Final = "result STRING"
"""The column in which a task returns its `Resent` to the driver, as JSON."""


@dataclass
class Resent:
    """Counts of dead letters, for a task or a whole backfill.

    Attributes:
        resent: letters that were sent and stored: `degraded` of them without the durability asked
            for, and `moved` of them to another queue than their own (`move_keys`).
        found: letters stored already, by a killed backfill or by a send without an answer.
        held_back: letters behind a failed or waiting letter of their key.
        not_tried: letters that were not sent, because brokers were out of reach.
        left_out: letters that others have settled since the plan, for example parked by hand.
        waiting: {broker or queue that is in no route: letters that stay pending because of it}.
        failures: message_id, topic, code and error of the first `FAILURES_MAX` failed letters.
    """

    resent: int = 0
    degraded: int = 0
    found: int = 0
    failed: int = 0
    held_back: int = 0
    not_tried: int = 0
    moved: int = 0
    left_out: int = 0
    waiting: Counter[str] = field(default_factory=Counter)
    codes: Counter[str] = field(default_factory=Counter)
    failures: list[dict[str, str]] = field(default_factory=list)
    first_error: str = ""

    @property
    def settled(self) -> int:
        """Dead letters that are stored and noted."""
        return self.resent + self.found

    @property
    def unsettled(self) -> int:
        """Dead letters that stay pending."""
        return self.failed + self.held_back + self.not_tried + sum(self.waiting.values())

    def add(self, row: Any) -> None:
        """Add a task's report, which is a row of RESULT_DDL."""
        report = Resent(**json.loads(row["result"]))
        for name, value in vars(report).items():
            if isinstance(value, int):
                setattr(self, name, getattr(self, name) + value)
        self.waiting.update(report.waiting)
        self.codes.update(report.codes)
        self.failures += report.failures[: FAILURES_MAX - len(self.failures)]
        self.first_error = self.first_error or report.first_error

    def as_dict(self) -> dict[str, Any]:
        """Return plain values. `dataclasses.asdict` breaks a Counter before Python 3.12."""
        return {**vars(self), "codes": dict(self.codes), "waiting": dict(self.waiting)}

    def as_batch(self) -> pa.RecordBatch:
        return pa.RecordBatch.from_pydict({"result": [json.dumps(vars(self))]})


_Content = tuple[Any, ...]
"""The topic to send to, and what `_content` returns: letters with one id may differ in any part,
and letters of two topics may go to one."""
_ADDED: Final = SYSTEM_PROPERTIES | {TRANSACTION_PROPERTY}
"""Properties that a stored message may have, or have in another form, by the way it was sent."""


class _Failure(NamedTuple):
    code: str
    text: str
    outcome: str


@dataclass(eq=False)
class Resender:
    """Sends the dead letters of one task, chunk by chunk.

    Args:
        options: the result of `backfill_options`.
        spool: takes attempts, isolations, marks and resolutions; the caller seals it.
        ask_all: an earlier attempt of this task may have sent the letters, so ask brokers about all
            letters that are not `was_stored`.
        on_dead_letters: called after each chunk with its number of dead letters, sent or not.
        pin_new, move_keys: see `HomeQueues` and `Backfill`.
        settled: ids of dead letters that are settled already.
        check: called before each chunk; raises when the task must send nothing more.
    """

    options: SinkOptions
    _: KW_ONLY
    engine: SendEngine
    spool: SpoolWriter
    ctx: RunContext
    ask_all: bool = False
    on_dead_letters: Callable[[int], None] = lambda count: None
    pin_new: bool = False
    move_keys: bool = False
    settled: Collection[str] = ()
    check: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self._silent: dict[str, set[str]] = {}
        """{topic: brokers that did not answer a letter's send, and that may be in no route now}"""
        # Ask for messages of any time, because a dead letter does not record when it was sent.
        self._stored = StoredMessages(self.engine, since_ms=0, brokers=self._silent, advice=_ADVICE)
        self._homes = HomeQueues(self.options, self.engine, pin_new=self.pin_new)
        # The recorder numbers the requests, so all chunks share it.
        self._recorder = LedgerRecorder(self.options, self.ctx, self._take)
        self._failed: dict[str, _Failure] = {}
        """Failures of the chunk, by message id."""
        self._stopped_keys: set[tuple[str, str]] = set()
        self._contents: set[int] = set()
        """Hashes of the contents of settled letters. A copy of theirs is no copy of later ones."""
        self._hopeless = False
        self.total = Resent()

    def send(self, batch: pa.RecordBatch) -> None:
        """Send dead letters: rows with the row contract's columns (`message_id` is never null),
        `letter_id`, `query_id`, `open` and `was_stored`."""
        size = _chunk_rows(batch, self.options)
        for run, lists in self._homes.runs(batch):
            for part in _parts(run):
                for start in range(0, part.num_rows, size):
                    chunk = part.slice(start, size)
                    self._send_chunk(chunk, lists)
                    self.on_dead_letters(chunk.num_rows)

    def _send_chunk(self, chunk: pa.RecordBatch, lists: Lists) -> None:
        self.check()
        is_settled = _in(chunk["letter_id"], self.settled)
        self.total.left_out += pc.sum(is_settled).as_py() or 0
        chunk = chunk.filter(pc.invert(is_settled))
        if not self._hopeless:
            chunk = self._without_absent(self._without_stopped_keys(chunk), lists)
            chunk = self._without_stored(chunk)
        if self._hopeless:
            self.total.not_tried += chunk.num_rows
            return
        if not chunk.num_rows:
            return
        self.spool.append(about_to_send(_names(chunk), self.ctx))
        self.spool.sync()
        failed = self._failed = {}
        self._deliver(chunk, lists)
        is_failed = _in(chunk["message_id"], failed)
        stored = chunk.filter(pc.invert(is_failed))
        self.total.moved += pc.sum(stored["moved"]).as_py() or 0
        self._note_failures(chunk.filter(is_failed))
        self._resolve(stored)
        self.total.resent += stored.num_rows
        self.spool.sync()
        # Stop if the brokers are out of reach: the next chunk would wait as long in vain.
        no_way = all(failure.code in NO_WAY for failure in failed.values())
        self._hopeless = bool(failed) and not stored.num_rows and no_way

    def _without_absent(self, chunk: pa.RecordBatch, lists: Lists) -> pa.RecordBatch:
        """Leave out rows that wait for a broker; with `move_keys` only rows that name a queue wait.
        The column `moved` marks rows that go to another queue than their own."""
        absent = self._homes.absent(chunk, lists)
        away = pc.is_valid(absent)
        stays = away
        if self.move_keys:
            stays = pc.and_(away, pa.array(has_own_queue(chunk)))
        waiting = chunk.filter(stays)
        self.total.waiting.update(absent.filter(stays).to_pylist())
        self._stop_keys(waiting)
        kept = chunk.append_column("moved", away).filter(pc.invert(stays))
        return self._without_stopped_keys(kept)

    def _without_stored(self, chunk: pa.RecordBatch) -> pa.RecordBatch:
        """Leave out letters that brokers have stored already, and write their resolutions."""
        doubtful = chunk["open"]
        if self.ask_all:
            doubtful = pc.invert(chunk["was_stored"])
        try:
            stored_ids = self._stored_ids(chunk.filter(doubtful))
        except (DeliveryError, SendError) as error:
            self._hopeless = True
            self.total.codes[error.code] += 1
            self.total.first_error = self.total.first_error or (
                f"cannot ask whether dead letters that may have been sent are stored: {error}"
            )
            return chunk
        is_found = _in(chunk["message_id"], stored_ids)
        stored = chunk.filter(is_found)
        self._resolve(stored, FOUND)
        self.total.found += stored.num_rows
        return chunk.filter(pc.invert(is_found))

    def _stored_ids(self, letters: pa.RecordBatch) -> set[str]:
        """Return the message ids that brokers have stored. A topic without a route has none, and
        nobody asks for a letter whose content a settled letter had, because a stored copy settles
        one letter. Before the first question to a broker, wait `storedCheckDelay` for earlier
        requests to arrive. The broker `unknown_at` is not asked if the resend goes to another
        topic, where the id is new.

        Raises:
            DeliveryError: a broker gave no answer within `storedCheckTimeout`.
            SendError: the error is fatal, or no name server answers.
        """
        ids: dict[tuple[str, bool], dict[str, IsCopy]] = {}
        options, stored_ids = self.options, set[str]()
        names = ("topic", "message_id", "unknown_at", *DELAY_COLUMNS)
        rows = letters.select([n for n in names if n in letters.schema.names]).to_pylist()
        for letter, content in zip(rows, self._contents_of(letters), strict=True):
            if content is None or hash(content) in self._contents:
                continue
            topic = self._homes.topic_of(letter["topic"])
            timed = any(letter.get(time) is not None for time in DELAY_COLUMNS)
            ids.setdefault((topic, timed), {})[letter["message_id"]] = partial(_is_copy, content)
            broker = letter.get("unknown_at")
            if broker and options.delivery == "effectively_once" and not options.topic:
                self._silent.setdefault(topic, set()).add(broker)
        for (topic, timed), topic_ids in ids.items():
            with contextlib.suppress(NoRouteError):
                self._stored.settle(topic)
                stored_ids |= self._stored.find(topic, topic_ids, timed=timed)
        return stored_ids

    def _deliver(self, chunk: pa.RecordBatch, lists: Lists) -> None:
        """Send a chunk. Afterwards, the letters that are not in `_failed` are stored. Rows without
        a sharding key are sent apart and unordered, because strict order refuses them."""
        has_key, moved = pc.is_valid(chunk["sharding_key"]), chunk["moved"]
        hashes = [pinned.sharding_hash for pinned in lists.values()]
        options = self.options
        if chunk["was_stored"][0].as_py():
            # Do not look messages up: after a lost answer the broker would find the earlier
            # message, with which the consumer failed. The resend would wrongly count as stored.
            options = options.with_(delivery="at_least_once")
        keyed = options.with_(
            ordering="strict", shardingHash=hashes[0] if hashes else options.sharding_hash
        )
        unordered = options.with_(ordering="none")
        at_home = chunk.filter(pc.and_(has_key, pc.invert(moved)))
        self._send_rows(at_home, keyed, self._homes.queues(lists))
        elsewhere = chunk.filter(pc.and_(has_key, moved))
        self._send_rows(elsewhere, keyed, self._homes.queues())
        self._send_rows(chunk.filter(pc.invert(has_key)), unordered)

    def _send_rows(
        self, chunk: pa.RecordBatch, options: SinkOptions, queues: Queues | None = None
    ) -> None:
        if not chunk.num_rows:
            return
        body = TaskSender(
            options, resolve_columns(chunk.schema, options), engine=self.engine,
            recorder=self._recorder, queues=queues, keeps_dead_letters=True,
        )  # fmt: skip
        try:
            body.feed(chunk)
            body.finish()
        except BaseException:
            body.abort()
            raise

    def _take(self, rows: pa.RecordBatch) -> None:
        kind = rows["kind"][0].as_py() if rows.num_rows else None
        if kind == DEAD_LETTER:
            names = ("message_id", "last_error_code", "last_error", "outcome")
            for number, *failure in zip(*(rows[name].to_pylist() for name in names), strict=True):
                self._failed[number] = _Failure(*(text or "" for text in failure))
        elif kind == EPOCH:
            self.total.degraded += pc.sum(rows["degraded"]).as_py() or 0
        elif kind is not None:
            self.spool.append(rows)

    def _without_stopped_keys(self, chunk: pa.RecordBatch) -> pa.RecordBatch:
        if not self._stopped_keys:
            return chunk
        keys = zip(chunk["topic"].to_pylist(), chunk["sharding_key"].to_pylist(), strict=True)
        free = [key not in self._stopped_keys for key in keys]
        self.total.held_back += free.count(False)
        return chunk.filter(pa.array(free, pa.bool_()))

    def _stop_keys(self, chunk: pa.RecordBatch) -> None:
        keys = zip(chunk["topic"].to_pylist(), chunk["sharding_key"].to_pylist(), strict=True)
        self._stopped_keys.update(key for key in keys if key[1] is not None)

    def _note_failures(self, chunk: pa.RecordBatch) -> None:
        if not chunk.num_rows:
            return
        failures = [self._failed[number] for number in chunk["message_id"].to_pylist()]
        self._stop_keys(chunk)
        names = chunk.select(["message_id", "topic"]).to_pylist()
        for name, failure in zip(names, failures, strict=True):
            if failure.code == "HELD_BACK":
                self.total.held_back += 1
                continue
            self.total.failed += 1
            self.total.codes[failure.code] += 1
            if len(self.total.failures) < FAILURES_MAX:
                topic = self.options.topic or name["topic"] or ""
                facts = {"topic": topic, "code": failure.code, "error": failure.text}
                self.total.failures.append({"message_id": name["message_id"], **facts})
            self.total.first_error = self.total.first_error or failure.text
        self.spool.append(
            not_stored(
                _names(chunk), self.ctx, error_code=[failure.code for failure in failures],
                outcome=[failure.outcome or "rejected" for failure in failures],
            )
        )  # fmt: skip

    def _resolve(self, stored: pa.RecordBatch, note: str | None = None) -> None:
        if stored.num_rows:
            fresh = stored.filter(pc.invert(stored["was_stored"]))
            self._contents.update(map(hash, self._contents_of(fresh)))
            columns = {**_names(stored), "resolution": "resent", "note": note}
            self.spool.append(resolution_rows(columns, self.ctx))

    def _contents_of(self, letters: pa.RecordBatch) -> list[_Content | None]:
        """Return the content of each letter, as a send encodes it; None for a letter that is
        refused before the send."""
        rows = normalise(letters, resolve_columns(letters.schema, self.options))
        checked = validate(rows, self.options)
        contents: list[_Content | None] = [None] * letters.num_rows
        topics = letters["topic"].to_pylist()
        encoded = checked.rows.with_(topic="").encoded_batch()
        for row, message in zip(checked.accepted.tolist(), iter_batch(encoded.data), strict=True):
            contents[row] = (self._homes.topic_of(topics[row]), *_content(message))
        return contents


def send_partition(
    options: SinkOptions, run_id: str, batches: Iterable[pa.RecordBatch], *, claim: str,
    version: int, token: LedgerToken | None = None, **more: Any,
) -> Iterator[pa.RecordBatch]:  # fmt: skip
    """Send all dead letters of a partition, and yield one row of RESULT_DDL. Raise a LedgerError if
    `token` shows that the ledger is not the driver's, or cannot be written.

    Args:
        claim: name of the driver's claim on the ledger.
        version: the ledger's version before the dead letters were chosen.
        more: further arguments of `Resender`.
    """
    if token is not None:
        token.check()
    place = resolve_path(options.ledger)
    check = ClaimCheck(place, claim)
    check()
    ctx = run_context(options, "backfill", epoch=0, query_id=run_id, run_id=run_id)
    spool = SpoolWriter(place, ctx)
    # In a later attempt of the stage Spark counts a partition's attempts from 0 again. Each attempt
    # notes its letters before it sends them, so its file in the spool shows it, or its marks in the
    # table: a query may fold the ledger meanwhile. A fold adds the marks before it deletes the
    # file, so look into the spool first.
    again = bool(ctx.attempt_number) or has_earlier_attempt(ctx, place)
    settled, tasks = noted_since(place, version)
    again = again or (ctx.query_id, ctx.partition) in tasks
    try:
        with worker_pool().engine(options) as engine:
            resender = Resender(
                options, engine=engine, spool=spool, ctx=ctx, ask_all=again, check=check,
                settled=settled, **more,
            )  # fmt: skip
            for batch in batches:
                resender.send(batch)
        spool.seal()
    except BaseException:
        spool.abort()
        raise
    yield resender.total.as_batch()


WAITING_DDL: Final = "broker STRING, letters BIGINT"


def waiting_of(options: SinkOptions, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Count the dead letters that wait for each broker, as rows of WAITING_DDL; send nothing. If no
    name server answers, yield one row with an empty name."""
    counts: Counter[str] = Counter()
    with worker_pool().engine(options) as engine:
        homes = HomeQueues(options, engine)
        try:
            for batch in batches:
                for run, lists in homes.runs(batch):
                    counts.update(homes.absent(run, lists).drop_null().to_pylist())
        except NameServerUnavailableError:
            counts = Counter({"": 1})
    arrays = [pa.array(list(counts), pa.string()), pa.array(list(counts.values()), pa.int64())]
    yield pa.RecordBatch.from_arrays(arrays, ["broker", "letters"])


def _chunk_rows(batch: pa.RecordBatch, options: SinkOptions) -> int:
    rows = float(CHUNK)
    if options.max_messages_per_second:
        rows = min(rows, per_task_rate(options.max_messages_per_second, options))
    if options.max_bytes_per_second and batch.num_rows:
        mean_bytes = max(1.0, batch.nbytes / batch.num_rows)
        rows = min(rows, per_task_rate(options.max_bytes_per_second, options) / mean_bytes)
    return max(1, int(rows))


def _parts(letters: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Cut where `was_stored` changes, because `_deliver` sends the two kinds differently, and where
    a message id comes again, because the results of a chunk are known by their ids."""
    start, ids = 0, set[str]()
    kinds = letters["was_stored"].to_pylist()
    for row, message_id in enumerate(letters["message_id"].to_pylist()):
        if message_id in ids or kinds[row] != kinds[start]:
            yield letters.slice(start, row - start)
            start, ids = row, set()
        ids.add(message_id)
    yield letters.slice(start)


def _is_copy(content: _Content, message: StoredMessage) -> bool:
    """Return whether a stored message has the content of a letter."""
    return content[1:] == _content(message)


def _content(message: InnerMessage | StoredMessage) -> _Content:
    """Return the body, the flag, and the properties that the sender has chosen."""
    chosen = (item for item in message.properties.items() if item[0] not in _ADDED)
    return message.body, message.flag, frozenset(chosen)


def _names(chunk: pa.RecordBatch) -> dict[str, Any]:
    return {name: chunk[name] for name in ("letter_id", "topic", "message_id")}


def _in(column: Any, values: Iterable[str]) -> Any:
    return pc.is_in(column, value_set=pa.array(list(values), pa.string()))
