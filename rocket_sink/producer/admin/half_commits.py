"""Committing half messages: pipelined, with answers, optionally in order per queue.

A broker stores the message each time it gets END_TRANSACTION: EndTransactionProcessor does not
detect repetitions. So a request with an unknown outcome is repeated only after a query by message
id has shown that the message is not stored. Brokers handle requests of one connection in several
threads (endTransactionThreadPoolNums): order needs one request in flight per queue. Half messages
are addressed by their commit-log offset, so they can be committed until the log expires
(fileReservedTime, 72 h), even after the last transaction check.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from rocket_sink.errors import DeliveryError, NotSentError, SendError
from rocket_sink.net.client import Call
from rocket_sink.producer.admin.stored_messages import StoredMessages
from rocket_sink.routing.retry import error_for_answer
from rocket_sink.wire import requests
from rocket_sink.wire.codes import ResponseCode, SysFlag
from rocket_sink.wire.responses import PlainAnswers, SendAnswers

if TYPE_CHECKING:
    from rocket_sink.producer.engine.engine import SendEngine
    from rocket_sink.wire.frame import Frame

_WINDOW: Final = 256
"""Requests in flight at one broker."""
_FIRST_WAIT_S: Final = 0.05
_LONGEST_WAIT_S: Final = 1.0
_GONE: Final = (
    "Find prepared transaction message failed",
    "The transaction state table offset wrong",
    "The commit log offset wrong",
)
"""Remarks of a broker without the half message (EndTransactionProcessor)."""


@dataclass(frozen=True)
class Half:
    """A stored half message; the offsets are those of the half message."""

    topic: str
    broker_name: str
    queue_id: int
    half_offset: int
    commit_log_offset: int
    message_id: str


@dataclass
class CommitReport:
    """The result of committing; `found_stored` of `committed` were visible before."""

    committed: int = 0
    found_stored: int = 0
    refused: list[tuple[Half, str]] = field(default_factory=list)
    """Half messages that their brokers no longer have, with the remarks."""


class _Lane:
    """Half messages that may be in flight together, in order."""

    def __init__(self, width: int) -> None:
        self.waiting: deque[Half] = deque()
        self.width = width
        self.in_flight = 0
        self.stopped = False

    def next(self) -> list[Half]:
        """Those that may be sent now; many at once, that they can share a group."""
        free = self.width - self.in_flight
        if self.stopped or 2 * free < self.width:
            return []
        return [self.waiting.popleft() for _ in range(min(free, len(self.waiting)))]


class _Commits:
    """Half messages of one broker whose commits are on their way together."""

    def __init__(self, committer: HalfMessageCommitter, lane: _Lane, halves: list[Half]) -> None:
        self.first_opaque = 0
        self._committer = committer
        self._lane = lane
        self._left = dict(enumerate(halves))

    def on_answer(self, frame: Frame, sent_s: float | None, now_s: float) -> None:
        half = self._left.pop(frame.opaque - self.first_opaque)
        self._committer.ended(self._lane, half, frame, None)

    def on_answers(
        self, answers: SendAnswers | PlainAnswers, sent_s: float | None, now_s: float
    ) -> None:
        for opaque in answers.opaques.tolist():
            del self._left[opaque - self.first_opaque]
        self._committer.committed(self._lane, len(answers))

    def on_failed(self, error: SendError, now_s: float) -> None:
        while self._left:
            self._committer.ended(self._lane, self._left.popitem()[1], None, error)


class HalfMessageCommitter:
    """Commits the half messages of one decision.

    Args:
        engine: leased by the caller, whose thread drives it.
        group: the producer group of the half messages.
        ordered: keep the order per queue.
        since_ms: a lower bound for their store times (ms since 1970).
        progress: called with the number of finished ones.
    """

    def __init__(
        self,
        engine: SendEngine,
        *,
        group: str,
        ordered: bool,
        since_ms: int,
        progress: Callable[[int], None] = lambda done: None,
    ) -> None:
        self._engine = engine
        self._group = group
        self._ordered = ordered
        self._since_ms = since_ms
        self._progress = progress
        self._timeout_s = engine.options.stored_check_timeout_ms / 1000
        self._report = CommitReport()
        self._again: list[Half] = []
        self._doubtful: set[Half] = set()
        self._in_flight = 0
        self._heard_s = engine.clock()
        self._error: SendError | None = None

    def commit(self, halves: Iterable[Half], *, doubtful: bool) -> CommitReport:
        """Commit each half message once.

        Args:
            doubtful: some may have been committed by another process; query the brokers first.

        Raises:
            DeliveryError: a broker committed nothing for `storedCheckTimeout`.
            SendError: a fatal one (credentials).
        """
        left = sorted(halves, key=lambda half: (half.broker_name, half.half_offset))
        engine, topics = self._engine, {half.topic for half in left}
        for topic in topics:
            engine.publish_info(topic)
        if doubtful:
            left = self._not_visible(left)
        wait_s = _FIRST_WAIT_S
        while left:
            before = self._report.committed
            self._round(left)
            left = self._left_of(left)
            progressed = self._report.committed > before
            wait_s = _FIRST_WAIT_S if progressed else min(2 * wait_s, _LONGEST_WAIT_S)
            if left:
                for topic in topics:
                    engine.routes.refresh(topic, engine.clock())
                engine.drive_for(wait_s)
        self._look_for_refused()
        return self._report

    def _left_of(self, halves: Sequence[Half]) -> list[Half]:
        """The half messages to retry, in order, without those found visible."""
        again, self._again = set(self._again), []
        left = [half for half in halves if half in again]
        if self._doubtful:
            asked, self._doubtful = self._doubtful, set()
            absent = set(self._not_visible([half for half in left if half in asked]))
            left = [half for half in left if half not in asked or half in absent]
        if left and self._engine.clock() >= self._heard_s + self._timeout_s:
            raise DeliveryError(self._silence(left), first_error=str(self._error or ""))
        return left

    def _silence(self, left: Sequence[Half]) -> str:
        names = ", ".join(sorted({half.broker_name for half in left}))
        return (
            f"{len(left)} half messages at {names} are decided and could not be committed "
            f"({self._error or 'no address'}). Nothing is lost: they are committed when the query "
            "starts again, or by `rocket-sink transactions settle`, as long as the broker keeps "
            "them (fileReservedTime, 72 hours by default)"
        )

    def _round(self, halves: Sequence[Half]) -> None:
        """Send each once; a lane stops at its first failure."""
        lanes: dict[object, _Lane] = {}
        for half in halves:
            queue = (half.topic, half.broker_name, half.queue_id)
            key = queue if self._ordered else half.broker_name
            lane = lanes.setdefault(key, _Lane(1 if self._ordered else _WINDOW))
            lane.waiting.append(half)
        topics, engine = {half.topic for half in halves}, self._engine
        while True:
            for lane in lanes.values():
                if following := lane.next():
                    self._end(lane, following)
            if not self._in_flight:
                break
            for topic in topics:
                engine.routes.get(topic, engine.clock())
            engine.drive()
            if self._error is not None and self._error.fatal:
                raise self._error
        for lane in lanes.values():
            self._again += lane.waiting

    def _end(self, lane: _Lane, halves: list[Half]) -> None:
        """Commits of one broker."""
        engine, client = self._engine, self._engine.client
        now_s, address = engine.clock(), engine.routes.addresses().get(halves[0].broker_name)
        if address is None:
            lane.stopped = True
            self._again += halves
            return
        self._in_flight += len(halves)
        lane.in_flight += len(halves)
        deadline_s = now_s + engine.options.send_msg_timeout_ms / 1000
        for topic in {half.topic for half in halves}:
            ours = [half for half in halves if half.topic == topic]
            if len(ours) > 1 and client.takes_groups:
                commits, frame = _Commits(self, lane, ours), self._frame(ours[0])
                commits.first_opaque = client.call_group(
                    address, frame, _columns(ours), commits, deadline_s=deadline_s, now_s=now_s
                )
                continue
            for half in ours:
                ended = functools.partial(self._ended_alone, lane, half)
                client.call(
                    address, self._frame(half), Call(ended), deadline_s=deadline_s, now_s=now_s
                )

    def _ended_alone(
        self, lane: _Lane, half: Half, answer: Frame | None, error: SendError | None, at_s: float
    ) -> None:
        self.ended(lane, half, answer, error)

    def _frame(self, half: Half) -> Frame:
        return requests.end_transaction(
            producer_group=self._group,
            topic=half.topic,
            tran_state_table_offset=half.half_offset,
            commit_log_offset=half.commit_log_offset,
            commit_or_rollback=SysFlag.TRANSACTION_COMMIT,
            msg_id=half.message_id,
            transaction_id=half.message_id,
            broker_name=half.broker_name,
        )

    def ended(self, lane: _Lane, half: Half, answer: Frame | None, error: SendError | None) -> None:
        """One commit was answered, or failed."""
        if answer is not None and answer.code == ResponseCode.SUCCESS:
            self.committed(lane, 1)
            return
        self._in_flight -= 1
        lane.in_flight -= 1
        if answer is not None:
            if answer.code == ResponseCode.MESSAGE_ILLEGAL or answer.remark in _GONE:
                self._done(0)
                self._report.refused.append((half, answer.remark or ""))
                return
            error = error_for_answer(answer.code, answer.remark) or SendError(
                f"the broker answered {answer.code}"
            )
        lane.stopped = True
        self._error = error
        self._again.append(half)
        clean = isinstance(error, NotSentError) or (
            answer is not None and answer.code == ResponseCode.SYSTEM_BUSY
        )
        if not clean:
            self._doubtful.add(half)

    def committed(self, lane: _Lane, count: int) -> None:
        """So many commits were answered with success."""
        self._in_flight -= count
        lane.in_flight -= count
        self._done(count)

    def _not_visible(self, halves: Sequence[Half]) -> list[Half]:
        """Those that are not visible to consumers; the others are counted."""
        visible: set[Half] = set()
        for topic in sorted({half.topic for half in halves}):
            visible |= self._visible(topic, [half for half in halves if half.topic == topic])
        self._report.found_stored += len(visible)
        if visible:
            self._done(len(visible))
        return [half for half in halves if half not in visible]

    def _visible(self, topic: str, halves: Sequence[Half]) -> set[Half]:
        """The half messages of a topic whose messages are stored on their brokers."""
        brokers = {half.broker_name for half in halves}
        found: set[Half] = set()
        try:
            self._stored_at(topic, brokers).settle(topic)
            for broker in sorted(brokers):
                by_id = {half.message_id: half for half in halves if half.broker_name == broker}
                stored = self._stored_at(topic, (broker,)).find(topic, list(by_id), timed=False)
                found |= {by_id[message_id] for message_id in stored}
        except DeliveryError as error:
            self._error = self._error or SendError(error.facts.get("first_error") or "no answer")
            raise DeliveryError(self._silence(halves), first_error=str(self._error)) from error
        return found

    def _stored_at(self, topic: str, brokers: Iterable[str]) -> StoredMessages:
        return StoredMessages(
            self._engine, since_ms=self._since_ms, brokers={topic: brokers}, by_route=False
        )

    def _look_for_refused(self) -> None:
        """A missing half message may have been committed before."""
        if self._report.refused:
            absent = set(self._not_visible([half for half, _ in self._report.refused]))
            self._report.refused = [one for one in self._report.refused if one[0] in absent]

    def _done(self, count: int) -> None:
        self._heard_s = self._engine.clock()
        self._report.committed += count
        self._progress(self._report.committed)


def _columns(halves: Sequence[Half]) -> dict[str, pa.Array]:
    """What differs in the headers of END_TRANSACTION, as text."""
    ids = pa.array([half.message_id for half in halves])
    return {
        "tranStateTableOffset": pa.array([str(half.half_offset) for half in halves]),
        "commitLogOffset": pa.array([str(half.commit_log_offset) for half in halves]),
        "msgId": ids,
        "transactionId": ids,
    }
