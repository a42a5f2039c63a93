"""Commits of half messages: many requests in flight, with answers, optionally in order per queue.

A broker stores the message each time it gets END_TRANSACTION: EndTransactionProcessor does not
detect repetitions. So after an unknown outcome the committer first queries the broker by message
id, and repeats the request only if the message is not stored. Brokers handle requests of one
connection in several threads (endTransactionThreadPoolNums), so order requires one request in
flight per queue. The request names the half message by its commit-log offset. So a commit is
possible until the log expires (fileReservedTime, 72 h), even after the last transaction check.

Two processes that commit the same half messages would store each twice. So the caller holds a lock,
and a process that has lost the lock must send nothing more. The committer checks the lock before
each batch of requests, and before each step that could write queued requests. Each batch ends
before the lock can expire."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from rocket_sink.errors import AuthenticationError, DeliveryError, NotSentError, SendError
from rocket_sink.producer.admin.stored_messages import StoredMessages
from rocket_sink.routing.retry import error_for_answer
from rocket_sink.wire import requests
from rocket_sink.wire.codes import ResponseCode, SysFlag
from rocket_sink.wire.headers import Frame

if TYPE_CHECKING:
    from rocket_sink.producer.engine.engine import SendEngine

    Positions = np.ndarray[tuple[int], np.dtype[np.int64]]

HALVES: Final = pa.schema([
    pa.field("topic", pa.string()), pa.field("broker_name", pa.string()),
    pa.field("queue_id", pa.int32()), pa.field("half_offset", pa.int64()),
    pa.field("commit_log_offset", pa.int64()), pa.field("message_id", pa.string()),
])  # fmt: skip
"""The schema of a table of half messages; its columns are the fields of `Half`."""
_WINDOW: Final = 2048
"""Limit of requests in flight at one broker and topic. A broker's queue has room for 100,000
(endTransactionPoolQueueCapacity). A limit of 1,024 took 1.1 times the CPU."""
_LONGEST_REQUEST_S: Final = 10.0
"""Longest time for one request: a third of the lease of the caller's lock (`ledger.lock`)."""
_FIRST_WAIT_S: Final = 0.05
_LONGEST_WAIT_S: Final = 1.0
_GONE: Final = (
    "Find prepared transaction message failed",
    "The transaction state table offset wrong",
    "The commit log offset wrong",
)
"""Remarks of a broker that no longer has the half message (EndTransactionProcessor)."""


@dataclass(frozen=True)
class Half:
    """A stored half message, with its offsets in the half topic and in the log."""

    topic: str
    broker_name: str
    queue_id: int
    half_offset: int
    commit_log_offset: int
    message_id: str


@dataclass
class CommitReport:
    """The result of a commit; consumers could see `found_stored` of `committed` messages before."""

    committed: int = 0
    found_stored: int = 0
    refused: list[tuple[Half, str]] = field(default_factory=list)
    """Half messages that their brokers no longer have, with the brokers' remarks."""


@dataclass(eq=False)
class _Lane:
    """Half messages of one broker and topic, or of one queue if order matters. They share a limit
    of requests in flight (`width`). Positions are row numbers in the table of half messages."""

    width: int
    waiting: Positions
    in_flight: int = 0
    asked_s: float = 0.0
    stopped: bool = False

    def next(self) -> Positions:
        """Return positions to send; none until half of `width` is free, to make groups large."""
        free = self.width - self.in_flight
        if self.stopped or 2 * free < self.width:
            free = 0
        following, self.waiting = self.waiting[:free], self.waiting[free:]
        return following


class _Commits:
    """The owner of commits of one lane that are sent as a group, or of a single commit."""

    def __init__(self, committer: HalfMessageCommitter, lane: _Lane, positions: Positions) -> None:
        self.first_opaque: int | None = None
        """The opaque id of a group's first request; None for a single commit."""
        self._committer = committer
        self._lane = lane
        self._positions = positions
        self._is_open = np.ones(len(positions), bool)

    def on_end(self, result: Any, sent_s: float | None, now_s: float) -> None:
        if isinstance(result, Frame):
            index = 0 if self.first_opaque is None else result.opaque - self.first_opaque
            self._is_open[index] = False
            self._committer.ended(self._lane, int(self._positions[index]), result)
        elif isinstance(result, SendError):
            open_positions = self._positions[self._is_open]
            self._is_open[:] = False
            for position in open_positions.tolist():
                self._committer.ended(self._lane, position, result)
        else:
            self._is_open[result.opaques - self.first_opaque] = False
            self._committer.committed(self._lane, len(result))


@dataclass(eq=False)
class HalfMessageCommitter:
    """Commits the half messages of one epoch (of one commit decision in the ledger).

    Args:
        engine: an engine that only the caller's thread drives.
        group: the producer group of the half messages.
        ordered: keep the order per queue.
        since_ms: a lower bound of the half messages' store times (ms since 1970).
        progress: called with the number of committed half messages so far.
        check: gets seconds; raises an error if the caller may lose its lock within this time.
    """

    engine: SendEngine
    group: str
    ordered: bool
    since_ms: int
    progress: Callable[[int], None] = lambda done: None
    check: Callable[[float], None] = lambda ahead_s: None
    _report: CommitReport = field(default_factory=CommitReport)
    _refused: dict[int, str] = field(default_factory=dict)
    _again: list[int] = field(default_factory=list)
    _doubtful: set[int] = field(default_factory=set)
    _error: SendError | None = None

    def __post_init__(self) -> None:
        options = self.engine.options
        self._request_s = min(_LONGEST_REQUEST_S, options.send_msg_timeout_ms / 1000)
        self._timeout_s = options.stored_check_timeout_ms / 1000
        self._heard_s = self.engine.clock()

    def commit(self, halves: pa.Table, *, doubtful: bool) -> CommitReport:
        """Make each half message visible to consumers once.

        Args:
            halves: `HALVES`.
            doubtful: some messages may be committed already, so query the brokers first.

        Raises:
            DeliveryError: a broker committed nothing for `storedCheckTimeout`.
            SendError: a fatal error (wrong credentials).
            LedgerError: another process may have the lock (`check`).
        """
        engine = self.engine
        self._halves = halves = halves.sort_by(
            [("broker_name", "ascending"), ("half_offset", "ascending")]
        ).combine_chunks()
        self._headers = _headers(halves)
        self._lane_of = _lanes(halves, by_queue=self.ordered)
        self._topics = halves.column("topic").unique().to_pylist()
        pending = np.arange(len(halves))
        for topic in self._topics:
            engine.publish_info(topic)
        if doubtful:
            pending = self._not_visible(pending)
        wait_s = _FIRST_WAIT_S
        while len(pending):
            before = self._report.committed
            self._round(pending)
            pending = self._to_retry(pending)
            progressed = self._report.committed > before
            wait_s = _FIRST_WAIT_S if progressed else min(2 * wait_s, _LONGEST_WAIT_S)
            if len(pending):
                for topic in self._topics:
                    engine.routes.refresh(topic, engine.clock())
                engine.drive_for(wait_s)
        # Query the refused half messages, because earlier requests may have committed them.
        refused = self._not_visible(np.array(sorted(self._refused), np.int64)).tolist()
        self._report.refused = [(self._half(at), self._refused[at]) for at in refused]
        return self._report

    def _to_retry(self, tried: Positions) -> Positions:
        """Return the positions to retry, in order, without messages that consumers can see."""
        again, self._again = np.array(self._again, np.int64), []
        pending = tried[np.isin(tried, again)]
        if self._doubtful:
            doubtful, self._doubtful = np.array(sorted(self._doubtful)), set()
            is_doubtful = np.isin(pending, doubtful)
            absent = self._not_visible(pending[is_doubtful])
            pending = pending[~is_doubtful | np.isin(pending, absent)]
        if len(pending) and self.engine.clock() >= self._heard_s + self._timeout_s:
            raise DeliveryError(self._silence(pending), first_error=str(self._error or ""))
        return pending

    def _half(self, position: int) -> Half:
        return Half(*(column[position].as_py() for column in self._halves.columns))

    def _silence(self, pending: Positions) -> str:
        brokers = self._halves.column("broker_name").take(pa.array(pending)).unique()
        names = ", ".join(sorted(brokers.to_pylist()))
        return (
            f"{len(pending)} half messages at {names} are decided and could not be committed "
            f"({self._error or 'no address'}). Nothing is lost: they are committed when the query "
            "starts again, or by `rocket-sink transactions settle`, as long as the broker keeps "
            "them (fileReservedTime, 72 hours by default)"
        )

    def _round(self, positions: Positions) -> None:
        """Send each commit once, and wait for the answers. A lane stops at its first failure."""
        width, engine = 1 if self.ordered else _WINDOW, self.engine
        lane_of = self._lane_of[positions]
        lanes = [_Lane(width, positions[lane_of == lane]) for lane in np.unique(lane_of)]
        while True:
            for lane in lanes:
                following = lane.next()
                if len(following):
                    self._send(lane, following)
            if not any(lane.in_flight for lane in lanes):
                break
            for topic in self._topics:
                engine.routes.get(topic, engine.clock())
            self._check_lock()
            engine.drive()
            if self._error is not None and self._error.fatal:
                raise self._error
        for lane in lanes:
            self._again += lane.waiting.tolist()

    def _send(self, lane: _Lane, positions: Positions) -> None:
        engine, client, first = self.engine, self.engine.client, self._half(int(positions[0]))
        now_s, address = engine.clock(), engine.routes.addresses().get(first.broker_name)
        if address is None:
            lane.stopped = True
            self._again += positions.tolist()
            return
        self._check_lock(self._request_s)
        lane.in_flight += len(positions)
        lane.asked_s = now_s
        deadline_s = now_s + self._request_s
        if len(positions) > 1 and client.takes_groups:
            commits, columns = _Commits(self, lane, positions), self._columns(positions)
            commits.first_opaque = client.call_group(
                address, self._frame(first), columns, commits, deadline_s=deadline_s, now_s=now_s
            )
            return
        for single in positions.reshape(-1, 1):
            commits, frame = _Commits(self, lane, single), self._frame(self._half(int(single[0])))
            client.call(address, frame, commits, deadline_s=deadline_s, now_s=now_s)

    def _check_lock(self, ahead_s: float = 0.0) -> None:
        try:
            self.check(ahead_s)
        except BaseException:
            # Abandon the engine: its `close` would write requests that are still queued.
            self.engine.abandon()
            raise

    def _columns(self, positions: Positions) -> dict[str, pa.Array]:
        headers = self._headers.take(positions)
        return dict(zip(headers.schema.names, headers.columns, strict=True))

    def _frame(self, half: Half) -> Frame:
        return requests.end_transaction(
            producer_group=self.group,
            topic=half.topic,
            tran_state_table_offset=half.half_offset,
            commit_log_offset=half.commit_log_offset,
            commit_or_rollback=SysFlag.TRANSACTION_COMMIT,
            msg_id=half.message_id,
            transaction_id=half.message_id,
            broker_name=half.broker_name,
        )

    def ended(self, lane: _Lane, position: int, result: Frame | SendError) -> None:
        if isinstance(result, Frame) and result.code == ResponseCode.SUCCESS:
            self.committed(lane, 1)
            return
        lane.in_flight -= 1
        if isinstance(result, Frame):
            if result.code == ResponseCode.MESSAGE_ILLEGAL or result.remark in _GONE:
                self._done(0)
                self._refused[position] = result.remark or ""
                return
            error = error_for_answer(result.code, result.remark) or SendError(
                f"the broker answered {result.code}"
            )
        else:
            error = result
        lane.stopped = True
        self._again.append(position)
        if isinstance(error, AuthenticationError) and self.engine.reread_credentials(lane.asked_s):
            return  # Repeat the request with the new credentials.
        self._error = error
        is_busy = isinstance(result, Frame) and result.code == ResponseCode.SYSTEM_BUSY
        if not (is_busy or isinstance(error, NotSentError)):
            self._doubtful.add(position)

    def committed(self, lane: _Lane, count: int) -> None:
        lane.in_flight -= count
        self._done(count)

    def _not_visible(self, positions: Positions) -> Positions:
        """Ask the brokers which messages consumers cannot see. Count all others as committed."""
        if not len(positions):
            return positions
        visible: list[int] = []
        rows = self._halves.select(["topic", "broker_name", "message_id"]).take(positions)
        # An id may have several positions: if an answer was lost, a half message was sent twice.
        queries: dict[str, dict[str, dict[str, list[int]]]] = {}
        columns = (column.to_pylist() for column in rows.columns)
        for position, topic, broker, half_id in zip(positions.tolist(), *columns, strict=True):
            by_id = queries.setdefault(topic, {}).setdefault(broker, {})
            by_id.setdefault(half_id, []).append(position)
        for topic, by_broker in sorted(queries.items()):
            try:
                self._stored_at(topic, by_broker).settle(topic)
                for broker, by_id in sorted(by_broker.items()):
                    stored = self._stored_at(topic, (broker,)).find(topic, list(by_id), timed=False)
                    visible += [at for message_id in stored for at in by_id[message_id]]
            except DeliveryError as error:
                self._error = self._error or SendError(
                    error.facts.get("first_error") or "no answer"
                )
                raise DeliveryError(
                    self._silence(positions), first_error=str(self._error)
                ) from error
        self._report.found_stored += len(visible)
        if visible:
            self._done(len(visible))
        return positions[~np.isin(positions, visible)]

    def _stored_at(self, topic: str, brokers: Iterable[str]) -> StoredMessages:
        return StoredMessages(
            self.engine, since_ms=self.since_ms, brokers={topic: brokers}, by_route=False
        )

    def _done(self, count: int) -> None:
        self._heard_s = self.engine.clock()
        self._report.committed += count
        self.progress(self._report.committed)


def _headers(halves: pa.Table) -> pa.RecordBatch:
    """Return the header fields of END_TRANSACTION that differ per half message, as text."""
    fields = {
        "tranStateTableOffset": "half_offset", "commitLogOffset": "commit_log_offset",
        "msgId": "message_id", "transactionId": "message_id",
    }  # fmt: skip
    texts = [halves.column(name).cast(pa.string()).combine_chunks() for name in fields.values()]
    return pa.RecordBatch.from_arrays(texts, list(fields))


def _lanes(halves: pa.Table, *, by_queue: bool) -> Positions:
    """Return the lane number of each half message."""
    lanes = np.zeros(len(halves), np.int64)
    for name in ("topic", "broker_name", "queue_id")[: 3 if by_queue else 2]:
        values = halves.column(name).combine_chunks().dictionary_encode()
        lanes = lanes * len(values.dictionary) + values.indices.to_numpy()
    return lanes
