"""One client connection as a state machine: opaque ids, the request table, deadlines.

The caller owns the socket and the clock. He writes what the `send_*` methods return (heads; bodies
follow them uncopied), says when a request's last byte went to the kernel, passes in what arrives,
and asks for what has expired. Whatever happens, each request leaves the table exactly once: as
`Answered`, `Expired`, `Lost` or withdrawn.

The table belongs to the connection: Java's is global, so that an answer on one connection can
settle another's request.

    OPEN --violation by the peer--> BROKEN --close--> CLOSED
    OPEN --close--> CLOSED
"""

from __future__ import annotations

import dataclasses
import enum
from collections import deque
from collections.abc import Callable, Container, Mapping
from typing import Final, NamedTuple

from rocket_sink.errors import LocalProtocolError, RemoteProtocolError
from rocket_sink.wire.frame import (
    DEFAULT_LIMITS,
    NEED_DATA,
    FrameReader,
    Limits,
    Serialize,
    encode_frame,
    encode_head,
    response_to,
)
from rocket_sink.wire.headers.command import ONEWAY_FLAG, Body, Frame


class Answered(NamedTuple):
    """The response to the request of `token`; `sent_s` is the time given to `mark_written`."""

    token: object
    frame: Frame
    sent_s: float | None


class PeerRequest(NamedTuple):
    """A request from the broker; `Connection.respond` answers it."""

    frame: Frame


class LateAnswer(NamedTuple):
    """A response to a request of ours that has left the table already: ignore it."""

    frame: Frame


class ForeignAnswer(NamedTuple):
    """A response to a request that we never made: ignore it."""

    frame: Frame


class Violation(NamedTuple):
    """The peer broke the protocol after the events before this one: close the connection."""

    error: RemoteProtocolError


Event = Answered | PeerRequest | LateAnswer | ForeignAnswer | Violation


class Expired(NamedTuple):
    """A request whose deadline has passed; `written` tells whether its last byte had left."""

    token: object
    written: bool


class Lost(NamedTuple):
    """A request in flight when the connection ended; `written` as in `Expired`."""

    token: object
    written: bool


class Pending:
    """One request in flight, as the request table keeps it; `settled` once it has left."""

    __slots__ = ("deadline_s", "latest_s", "opaque", "sent_s", "settled", "token", "written")

    def __init__(self, opaque: int, token: object, deadline_s: float, latest_s: float) -> None:
        self.opaque = opaque
        self.token = token
        self.deadline_s = deadline_s
        self.latest_s = latest_s
        self.sent_s: float | None = None
        self.written = False
        self.settled = False


OPAQUES: Final = 2**31
"""They are Java ints on the wire; ours stay non-negative."""


class OpaqueIds:
    """Gives ids out, and knows which it has given."""

    __slots__ = ("_first", "_issued", "_next")

    def __init__(self, first: int) -> None:
        self._first = self._next = first % OPAQUES
        self._issued = 0

    def peek(self, in_flight: Container[int]) -> int:
        """The id that `take` would give."""
        opaque = self._next
        while opaque in in_flight:
            opaque = (opaque + 1) % OPAQUES
        return opaque

    def take(self, in_flight: Container[int]) -> int:
        """The next id that is not in flight."""
        opaque = self._next
        if opaque < OPAQUES - 1 and self._issued < OPAQUES and opaque not in in_flight:
            self._next = opaque + 1
            self._issued += 1
            return opaque
        opaque = self.peek(in_flight)
        steps = (opaque - self._next) % OPAQUES + 1
        self._issued = min(self._issued + steps, OPAQUES)
        self._next = (opaque + 1) % OPAQUES
        return opaque

    def was_given(self, opaque: int) -> bool:
        """True when an answer with this id answers some request of ours, late perhaps."""
        return 0 <= opaque < OPAQUES and (opaque - self._first) % OPAQUES < self._issued


LIVES_S: Final = 0.5
"""A peer that was heard so recently is alive: what it has not answered yet, it holds."""
_RENEWAL_S: Final = 0.1


class ConnectionState(enum.Enum):
    OPEN = "open"
    BROKEN = "broken"
    """The peer sent what is no frame: nothing may be sent or received any more."""
    CLOSED = "closed"


class Connection:
    """See the module. Not thread-safe: one owner drives it. Tokens are told apart by identity.

    Attributes:
        late_answers, foreign_answers: responses that were ignored, counted.
        last_heard_s: `now_s` of the last bytes received.
        sign: when set, gives the header fields to add to each request of `send_request` and
            `send_oneway` (ACL); a head from a SendTemplate is signed by the template.
    """

    def __init__(
        self,
        *,
        limits: Limits = DEFAULT_LIMITS,
        first_opaque: int = 0,
        serialize: Serialize = "json",
        sign: Callable[[Mapping[str, str], Body | None], Mapping[str, str]] | None = None,
    ) -> None:
        self._reader = FrameReader(limits)
        self._opaques = OpaqueIds(first_opaque)
        self._serialize: Serialize = serialize
        self._sign = sign
        self._pending: dict[int, Pending] = {}
        self._unwritten: deque[Pending] = deque()
        self._earliest_s: float | None = None
        self._error: RemoteProtocolError | None = None
        self.state = ConnectionState.OPEN
        self.late_answers = 0
        self.foreign_answers = 0
        self.last_heard_s: float | None = None

    def __repr__(self) -> str:
        return f"<Connection {self.state.value}, {len(self._pending)} in flight>"

    # --- sending -----------------------------------------------------------------------------

    def open_request(
        self, *, deadline_s: float, token: object, latest_s: float = float("-inf")
    ) -> int:
        """Enter a request into the table and return its opaque id.

        For callers that make the head themselves (SendTemplate); they must hand the heads to the
        kernel in the order of these calls.

        Args:
            latest_s: until then the request does not expire while the peer holds it: it was
                written, and the peer has been heard since and within the last `LIVES_S`.

        Raises:
            LocalProtocolError: the connection is not open.
        """
        if self.state is not ConnectionState.OPEN:
            self._check_open()
        opaque = self._opaques.take(self._pending)
        pending = Pending(opaque, token, deadline_s, latest_s)
        self._pending[opaque] = pending
        self._unwritten.append(pending)
        if self._earliest_s is None or deadline_s < self._earliest_s:
            self._earliest_s = deadline_s
        return opaque

    def send_request(self, frame: Frame, *, deadline_s: float, token: object) -> bytes:
        """Enter a request and return its head; the caller writes the head and `frame.body`.

        Raises:
            LocalProtocolError: the connection is not open, or the frame cannot be encoded; the
                table is then as before.
        """
        self._check_open()
        head = self._head(dataclasses.replace(frame, opaque=self._opaques.peek(self._pending)))
        self.open_request(deadline_s=deadline_s, token=token)
        return head

    def send_oneway(self, frame: Frame) -> bytes:
        """The head of a request that gets no response."""
        self._check_open()
        oneway = dataclasses.replace(
            frame, opaque=self._opaques.peek(self._pending), flag=frame.flag | ONEWAY_FLAG
        )
        head = self._head(oneway)
        self._opaques.take(self._pending)
        return head

    def respond(
        self,
        request: Frame,
        code: int,
        *,
        remark: str | None = None,
        ext: Mapping[str, str] | None = None,
        body: Body | None = None,
    ) -> bytes:
        """The whole response frame to a peer's request; nothing when it was oneway."""
        self._check_open()
        if request.is_oneway:
            return b""
        response = response_to(request, code, remark=remark, ext=ext, body=body)
        return encode_frame(response, serialize=request.serialize)

    def mark_written(self, token: object, now_s: float) -> None:
        """The last byte of this request, hence of all before it, has gone to the kernel.

        Raises:
            LocalProtocolError: no unwritten request has this token; all are marked then, since
                taking a written one for unwritten would double a message silently.
        """
        unwritten = self._unwritten
        while unwritten:
            pending = unwritten.popleft()
            pending.written = True
            pending.sent_s = now_s
            if pending.token is token:
                return
        raise LocalProtocolError(f"mark_written of a request that is not waiting: {token!r}")

    def withdraw_unwritten(self, *, keep: object = None) -> list[object]:
        """Take all unwritten requests out of the table, except `keep`; returns their tokens.

        For moving requests off a suspect connection. `keep` is the request of which some bytes
        are out already: the rest of it must follow, or the connection be closed.
        """
        tokens: list[object] = []
        kept: deque[Pending] = deque()
        for pending in self._unwritten:
            if keep is not None and pending.token is keep:
                kept.append(pending)
            elif self._settle(pending):
                tokens.append(pending.token)
        self._unwritten = kept
        return tokens

    # --- receiving ---------------------------------------------------------------------------

    def receive_data(self, data: bytes | bytearray | memoryview, now_s: float) -> list[Event]:
        """What the bytes that arrived mean, in order.

        A protocol error is the last event (`Violation`), so that the answers before it count.

        Raises:
            RemoteProtocolError: the peer broke the protocol in an earlier call.
            LocalProtocolError: the connection is closed.
        """
        self._check_open()
        self.last_heard_s = now_s
        reader = self._reader
        reader.receive_data(data)
        events: list[Event] = []
        try:
            while (frame := reader.next_frame()) is not NEED_DATA:
                if frame.flag & 1:
                    pending = self._pending.pop(frame.opaque, None)
                    if pending is None:
                        events.append(self._unexpected(frame))
                    else:
                        pending.settled = True
                        events.append(Answered(pending.token, frame, pending.sent_s))
                else:
                    events.append(PeerRequest(frame))
        except RemoteProtocolError as error:
            self._error = error
            self.state = ConnectionState.BROKEN
            events.append(Violation(error))
        return events

    def _unexpected(self, frame: Frame) -> Event:
        if self._opaques.was_given(frame.opaque):
            self.late_answers += 1
            return LateAnswer(frame)
        self.foreign_answers += 1
        return ForeignAnswer(frame)

    # --- time and end ------------------------------------------------------------------------

    def expire(self, now_s: float) -> list[Expired]:
        """Take the requests out whose deadline is at or before `now_s`, but for those that the peer
        holds (`open_request`).

        Costs nothing before the earliest deadline, one scan of the table after it.
        """
        if self._earliest_s is None or now_s < self._earliest_s:
            return []
        due = [pending for pending in self._pending.values() if pending.deadline_s <= now_s]
        due = [pending for pending in due if not self._renew(pending, now_s)]
        for pending in due:
            self._settle(pending)
        if not all(pending.written for pending in due):
            # Its token may come again: mark_written must then find the later request.
            self._unwritten = deque(pending for pending in self._unwritten if pending not in due)
        deadlines = [pending.deadline_s for pending in self._pending.values()]
        self._earliest_s = min(deadlines, default=None)
        return [Expired(pending.token, pending.written) for pending in due]

    def _renew(self, pending: Pending, now_s: float) -> bool:
        """Give a request that the peer holds more time; False: its time is over."""
        heard_s = self.last_heard_s
        if pending.sent_s is None or heard_s is None or now_s >= pending.latest_s:
            return False
        if heard_s <= pending.sent_s or now_s - heard_s > LIVES_S:
            return False
        pending.deadline_s = min(now_s + _RENEWAL_S, pending.latest_s)
        return True

    def close(self) -> list[Lost]:
        """End the connection; everything in flight comes back once. Closing twice is nothing."""
        lost = [Lost(pending.token, pending.written) for pending in self._pending.values()]
        self._pending.clear()
        self._unwritten.clear()
        self._earliest_s = None
        self.state = ConnectionState.CLOSED
        return lost

    @property
    def in_flight(self) -> int:
        return len(self._pending)

    @property
    def next_deadline_s(self) -> float | None:
        """When to call `expire` next: never after the earliest deadline, maybe before it."""
        return self._earliest_s if self._pending else None

    @property
    def oldest_sent_s(self) -> float | None:
        """When the oldest unanswered request was written; None when none is out."""
        # Requests are written in the order of the table, so its first entry is the oldest.
        for pending in self._pending.values():
            return pending.sent_s
        return None

    @property
    def oldest_deadline_s(self) -> float | None:
        """The deadline of the request that `oldest_sent_s` is about."""
        for pending in self._pending.values():
            return pending.deadline_s
        return None

    # --- inside ------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self.state is ConnectionState.OPEN:
            return
        if self._error is not None and self.state is ConnectionState.BROKEN:
            raise self._error
        raise LocalProtocolError("the connection is closed")

    def _settle(self, pending: Pending) -> bool:
        if pending.settled:
            return False
        pending.settled = True
        del self._pending[pending.opaque]
        return True

    def _head(self, frame: Frame) -> bytes:
        if self._sign is not None:
            ext = dict(frame.ext or {})
            frame.ext = {**ext, **self._sign(ext, frame.body)}
        body_length = 0 if frame.body is None else len(memoryview(frame.body))
        return encode_head(frame, body_length, serialize=self._serialize)
