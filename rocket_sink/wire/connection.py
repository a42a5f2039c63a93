"""A client connection as a state machine: opaque ids, the request table, deadlines.

The caller owns the socket and the clock. It writes the heads that the `send_*` methods return, each
followed by its body, reports written requests (`mark_written`), passes received bytes
(`receive_data`), and calls `expire` when deadlines pass. Each request leaves the table exactly
once: it is answered, expired, lost, withdrawn, or oneway and written. Each connection has its own
table. With Java's common table, an answer on one connection can complete a request of another."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from rocket_sink.errors import LocalProtocolError, RemoteProtocolError
from rocket_sink.wire.frame import FrameReader, encode_frame, encode_head
from rocket_sink.wire.headers import ONEWAY_FLAG, Body, Frame, response_to

if TYPE_CHECKING:
    from rocket_sink.wire.answers import Answers, AnswerShapes


class Answered(NamedTuple):
    """The response to the request of `token`, or several successful responses to requests of its
    group (`open_group`). `sent_s` is the time of `mark_written`."""

    token: Any
    answer: Frame | Answers
    sent_s: float | None


class PeerRequest(NamedTuple):
    """A request from the broker; `Connection.respond` answers it."""

    frame: Frame


class UnexpectedAnswer(NamedTuple):
    """A response to a request that is not, or no longer, in the table: ignore it."""

    frame: Frame


class Violation(NamedTuple):
    """A breach of the protocol by the peer. The events before it are valid."""

    error: RemoteProtocolError


Event = Answered | PeerRequest | UnexpectedAnswer | Violation


@dataclass(slots=True, eq=False)
class Pending:
    """An entry of the request table: a request or a group (`grouped`). `written`: all its bytes
    were written. `settled`: it has left the table."""

    opaque: int
    token: Any
    deadline_s: float
    latest_s: float
    count: int = 1
    """Number of unanswered requests."""
    grouped: bool = False
    oneway: bool = False
    sent_s: float | None = None
    written: bool = False
    settled: bool = False


OPAQUES: Final = 10**9
"""Number of opaque ids. Java uses all non-negative ints; `wire.answers` reads ids of at most nine
digits only, so an answer to a longer id would take its slow path."""


def free_opaque(first: int, in_flight: Mapping[int, object], count: int = 1) -> int:
    """Return the first of `count` consecutive ids, from `first` on, that are not in flight."""
    while first + count > OPAQUES or not in_flight.keys().isdisjoint(range(first, first + count)):
        first = 0 if first + count > OPAQUES else first + 1
    return first


class Connection:
    """The protocol of one connection, without input or output (see the module). Not thread-safe.
    Tokens are compared by identity.

    Args:
        sign: returns the header fields to add to each request of `send_request` and `send_oneway`
            (ACL, namespace); a SendTemplate adds its own.
        hide: removes secrets from a remark.
        shapes: the known forms of the peer's answers.

    Attributes:
        error: the reason why nothing can be sent or received any more: a breach of the protocol by
            the peer, or `close`; None: the connection is open.
        last_heard_s: the time of the last received bytes.
        written_oneway: the written oneway requests, until `take_written_oneway`.
    """

    def __init__(
        self,
        *,
        first_opaque: int = 0,
        sign: Callable[[Mapping[str, str], Body | None], Mapping[str, str]] | None = None,
        hide: Callable[[str], str] | None = None,
        shapes: AnswerShapes | None = None,
    ) -> None:
        self._reader = FrameReader(shapes)
        self._next_opaque = first_opaque
        self._sign = sign
        self._hide = hide
        self._pending: dict[int, Pending] = {}
        self._unwritten: deque[Pending] = deque()
        self.written_oneway: list[Pending] = []
        self._has_groups = False
        """Whether a group was ever opened. If not, answers are read one by one, which is faster."""
        self._earliest_s = math.inf
        self.error: RemoteProtocolError | LocalProtocolError | None = None
        self.last_heard_s: float | None = None

    def __repr__(self) -> str:
        return f"<Connection {self.error or 'open'}, {len(self._pending)} in flight>"

    def open_request(
        self, *, deadline_s: float, token: object, latest_s: float = -math.inf, oneway: bool = False
    ) -> int:
        """Add a request to the table and return its opaque id; raise `error` if the connection is
        not open. For callers that make the head (SendTemplate) and write heads in this order.

        Args:
            latest_s: the latest deadline to which `expire` may extend the request's deadline.
            oneway: once it is written, the request is in `written_oneway`.
        """
        if self.error is not None:
            raise self.error
        opaque = self._next_opaque
        if opaque in self._pending:
            opaque = free_opaque(opaque, self._pending)
        self._next_opaque = (opaque + 1) % OPAQUES
        pending = Pending(opaque, token, deadline_s, latest_s, oneway=oneway)
        self._pending[opaque] = pending
        self._unwritten.append(pending)
        self._earliest_s = min(self._earliest_s, deadline_s)
        return opaque

    def open_group(
        self, count: int, *, deadline_s: float, token: object, latest_s: float = -math.inf
    ) -> int:
        """Open `count` requests with consecutive opaque ids; return the first id. They share a
        token and a deadline. Requests that get no answer end together, as one `Pending`."""
        self._check_open()
        first = free_opaque(self._next_opaque, self._pending, count)
        self._next_opaque = (first + count) % OPAQUES
        pending = Pending(first, token, deadline_s, latest_s, count, grouped=True)
        self._has_groups = True
        self._pending.update(dict.fromkeys(range(first, first + count), pending))
        self._unwritten.append(pending)
        self._earliest_s = min(self._earliest_s, deadline_s)
        return first

    def send_request(self, frame: Frame, *, deadline_s: float, token: object) -> bytes:
        """Add a request to the table and return its head; the caller writes it and `frame.body`. If
        the frame cannot be encoded, raise LocalProtocolError and leave the table unchanged."""
        self._check_open()
        opaque = free_opaque(self._next_opaque, self._pending)
        head = self._head(replace(frame, opaque=opaque))
        self.open_request(deadline_s=deadline_s, token=token)
        return head

    def send_oneway(self, frame: Frame) -> bytes:
        """Return the head of a request that gets no response."""
        self._check_open()
        opaque = free_opaque(self._next_opaque, self._pending)
        head = self._head(replace(frame, opaque=opaque, flag=frame.flag | ONEWAY_FLAG))
        self._next_opaque = (opaque + 1) % OPAQUES
        return head

    def respond(self, request: Frame, code: int, *, remark: str | None = None) -> bytes:
        """Return the bytes of the response to a peer's request; empty for a oneway request."""
        self._check_open()
        if request.is_oneway:
            return b""
        return encode_frame(response_to(request, code, remark=remark))

    def mark_written(self, token: object, now_s: float) -> None:
        """Mark this request, and all requests before it, as written in full. If no unwritten
        request has this token, mark all, so that none is sent twice; raise LocalProtocolError."""
        unwritten = self._unwritten
        while unwritten:
            pending = unwritten.popleft()
            pending.written = True
            pending.sent_s = now_s
            if pending.oneway:
                self.written_oneway.append(pending)
            if pending.token is token:
                return
        raise LocalProtocolError(f"mark_written of a request that is not waiting: {token!r}")

    def take_written_oneway(self) -> list[Any]:
        """Remove the written oneway requests from the table, and return their tokens."""
        written, self.written_oneway = self.written_oneway, []
        return [pending.token for pending in written if self._settle(pending)]

    def cancel(self, token: object) -> None:
        """Remove the latest request, whose frame will not be written."""
        pending = self._unwritten.pop()
        assert pending.token is token
        self._settle(pending)

    def withdraw_unwritten(self, *, keep: object = None) -> list[object]:
        """Remove all unwritten requests except `keep` from the table, and return their tokens. The
        requests can then move to another connection. `keep` is the token of a partly written
        request: the caller must write the remainder, or close the connection."""
        tokens: list[object] = []
        kept: deque[Pending] = deque()
        for pending in self._unwritten:
            if pending.token is keep:
                kept.append(pending)
            elif self._settle(pending):
                tokens.append(pending.token)
        self._unwritten = kept
        return tokens

    def receive_data(self, data: bytes | bytearray | memoryview, now_s: float) -> list[Event]:
        """Return the events of received bytes, in order; answers to a group may be in any order. A
        `Violation` is the last event. Raise `error` if the connection is not open."""
        self._check_open()
        self.last_heard_s = now_s
        reader = self._reader
        reader.receive_data(data)
        events: list[Event] = []
        try:
            while True:
                if self._has_groups:
                    while many := reader.next_answers():
                        for answers in many:
                            self._take_answers(answers, events)
                frame = reader.next_frame()
                if frame is None:
                    break
                if frame.flag & 1:
                    if frame.remark is not None and self._hide is not None:
                        frame.remark = self._hide(frame.remark)
                    events.append(self._take_answer(frame))
                else:
                    events.append(PeerRequest(frame))
        except RemoteProtocolError as error:
            self.error = error
            events.append(Violation(error))
        return events

    def _take_answer(self, frame: Frame) -> Event:
        pending = self._pending.pop(frame.opaque, None)
        if pending is None:
            return UnexpectedAnswer(frame)
        pending.count -= 1
        pending.settled = not pending.count
        return Answered(pending.token, frame, pending.sent_s)

    def _take_answers(self, answers: Answers, events: list[Event]) -> None:
        """Append an event for each run of answers to one group, and for each other answer."""
        take = self._pending.pop
        owners = [take(opaque, None) for opaque in answers.opaques.tolist()]
        start = 0
        for pending, run in itertools.groupby(owners):
            end = start + len(list(run))
            if pending is not None and pending.grouped:
                pending.count -= end - start
                pending.settled = not pending.count
                part = answers if end - start == len(owners) else answers.take(slice(start, end))
                events.append(Answered(pending.token, part, pending.sent_s))
            else:
                for index in range(start, end):
                    frame = answers.frame(index)
                    if pending is not None:
                        self._pending[frame.opaque] = pending
                    events.append(self._take_answer(frame))
            start = end

    def expire(self, now_s: float, *, extended_s: float = -math.inf) -> list[Pending]:
        """Remove and return requests whose deadline has passed. Scan the table only if the earliest
        deadline has. `extended_s` is a later deadline, up to `latest_s`, for requests that were
        written before the last bytes came: the peer is alive and may still process them."""
        if now_s < self._earliest_s:
            return []
        late = (pending for pending in self._pending.values() if pending.deadline_s <= now_s)
        due = list(dict.fromkeys(late))  # A group has one entry per request.
        heard_s = self.last_heard_s
        for pending in due:
            if pending.sent_s is not None and heard_s is not None and heard_s > pending.sent_s:
                pending.deadline_s = max(pending.deadline_s, min(extended_s, pending.latest_s))
        due = [pending for pending in due if pending.deadline_s <= now_s]
        for pending in due:
            self._settle(pending)
        if not all(pending.written for pending in due):
            # Drop expired requests: `mark_written` would stop at one whose token is used again.
            expired = set(due)
            self._unwritten = deque(p for p in self._unwritten if p not in expired)
        deadlines = [pending.deadline_s for pending in self._pending.values()]
        self._earliest_s = min(deadlines, default=math.inf)
        return due

    def close(self) -> list[Pending]:
        """End the connection; return the requests in flight. A second call returns none."""
        lost = list(dict.fromkeys(self._pending.values()))
        self._pending.clear()
        self._unwritten.clear()
        self._earliest_s = math.inf
        self.error = LocalProtocolError("the connection is closed")
        return lost

    @property
    def in_flight(self) -> int:
        return len(self._pending)

    @property
    def next_deadline_s(self) -> float | None:
        """The time to call `expire`, at or before the earliest deadline."""
        return self._earliest_s if self._pending else None

    @property
    def oldest(self) -> Pending | None:
        """The oldest unanswered request; None if there is none."""
        # Requests are written in the order of the table, so its first entry is the oldest.
        return next(iter(self._pending.values()), None)

    def hasten(self, token: object) -> None:
        """Let the next `expire` remove the request with this token."""
        for pending in self._pending.values():
            if pending.token is token:
                pending.deadline_s = pending.latest_s = self._earliest_s = -math.inf
                return

    def _check_open(self) -> None:
        if self.error is not None:
            raise self.error

    def _settle(self, pending: Pending) -> bool:
        if pending.settled:
            return False
        pending.settled = True
        if not pending.grouped:
            del self._pending[pending.opaque]
            return True
        for opaque in [id_ for id_, entry in self._pending.items() if entry is pending]:
            del self._pending[opaque]
        return True

    def _head(self, frame: Frame) -> bytes:
        if self._sign is not None:
            ext = dict(frame.ext or {})
            frame.ext = {**ext, **self._sign(ext, frame.body)}
        body_length = 0 if frame.body is None else len(memoryview(frame.body))
        return encode_head(frame, body_length)
