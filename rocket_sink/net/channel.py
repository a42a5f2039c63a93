"""A connection to an address: transport, protocol state and the queue of frames to write.

Each request ends with exactly one call of its owner's `on_end(result, sent_s, now_s)`. The result
is the answer, or an error: NotSentError if the broker cannot have the complete frame, else
UnknownOutcomeError. For a oneway request that is written, the result is None. The owner of a group
gets several answers (`Connection.open_group`). Times are monotonic seconds."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, TypeAlias

from rocket_sink.errors import (
    ConnectionLostError,
    NotSentError,
    RemoteProtocolError,
    RequestTimeoutError,
    SendError,
    TlsError,
    UnknownOutcomeError,
    UnwrittenError,
)
from rocket_sink.net.transport import (
    GATHER_BUFFERS,
    GATHER_BYTES,
    READ_BYTES,
    StreamEnded,
    StreamState,
    Transport,
)
from rocket_sink.wire.answers import Answers
from rocket_sink.wire.connection import Answered, Connection, Event, PeerRequest, Violation
from rocket_sink.wire.headers import Frame

Result: TypeAlias = "Frame | Answers | SendError | None"
Entry: TypeAlias = "tuple[Any, Sequence[Any], int]"
"""A queued frame: owner, buffers (head first), size in bytes."""

HEARD_RECENTLY_S: Final = 0.5
"""A peer counts as alive, and as busy with requests, for this time after its last byte."""
_EXTENSION_S: Final = 0.1
_READS: Final = 16
"""Limit of reads per `receive`, so that other channels are served, too."""
_UNASKED_MAX: Final = 64
"""Limit of frames per `receive` that answer no request. A peer that exceeds the limit floods the
channel: `receive` returns, and later calls read at most `FLOOD_READ_BYTES`."""
FLOOD_READ_BYTES: Final = 4096
"""Limit of bytes per `receive` from a flooded channel: about 150 of the smallest frames."""


class WriteQueue:
    """A queue of frames to write, with an exact count of the bytes that the kernel took. The count
    decides between NOT_SENT and UNKNOWN: a frame is written if the kernel took its last byte, and
    untouched if the kernel took none."""

    __slots__ = ("_entries", "_first_done", "size", "unowned_bytes")

    def __init__(self) -> None:
        self._entries: deque[Entry] = deque()
        self._first_done = 0
        self.size = 0
        self.unowned_bytes = 0
        """Total size of the queued frames without an owner, such as answers to the peer."""

    def __bool__(self) -> bool:
        return bool(self._entries)

    @property
    def first_owner(self) -> Any:
        return self._entries[0][0] if self._entries else None

    @property
    def partly_written_owner(self) -> Any:
        """The owner of the frame that the kernel has taken in part, or None."""
        return self.first_owner if self._first_done else None

    def disown(self, owner: Any) -> None:
        """Keep the owner's frames in the queue, but without an owner."""
        for position, (entry_owner, buffers, size) in enumerate(self._entries):
            if entry_owner is owner:
                self._entries[position] = (None, buffers, size)
                self.unowned_bytes += size

    def put(self, owner: Any, buffers: Sequence[Any], size: int) -> None:
        self._entries.append((owner, buffers, size))
        self.size += size
        if owner is None:
            self.unowned_bytes += size

    def gather(self) -> list[Any]:
        """Return the buffers of the next `sendmsg`."""
        buffers: list[Any] = []
        total = -self._first_done
        for _, parts, size in self._entries:
            buffers += parts
            total += size
            if total >= GATHER_BYTES or len(buffers) >= GATHER_BUFFERS - 16:
                break
        if self._first_done:
            _drop_front(buffers, self._first_done)
        del buffers[GATHER_BUFFERS:]
        return buffers

    def wrote(self, count: int) -> list[Any]:
        """Count written bytes; return the owners of the requests that are now written in full."""
        self.size -= count
        entries, complete = self._entries, []
        done = self._first_done + count
        while entries and done >= entries[0][2]:
            owner, _, size = entries.popleft()
            done -= size
            if owner is None:
                self.unowned_bytes -= size
            else:
                complete.append(owner)
        self._first_done = done
        return complete

    def withdraw(self, owners: Iterable[Any] | None = None) -> list[Any]:
        """Remove the untouched frames of `owners` (None: of all owners), and return their owners in
        order. Frames without an owner stay."""
        chosen = None if owners is None else set(map(id, owners))
        kept: deque[Entry] = deque()
        withdrawn = []
        for position, entry in enumerate(self._entries):
            touched = position == 0 and self._first_done > 0
            owner = entry[0]
            if touched or owner is None or not (chosen is None or id(owner) in chosen):
                kept.append(entry)
            else:
                self.size -= entry[2]
                withdrawn.append(owner)
        self._entries = kept
        return withdrawn


class Channel:
    """A connection to one address and its queue of frames. Requests may be queued at once."""

    def __init__(
        self,
        transport: Transport,
        connection: Connection,
        on_request: Callable[[Channel, Frame], None],
        *,
        now_s: float,
        connect_deadline_s: float,
    ) -> None:
        self.address = transport.address
        self.transport = transport
        self.connection = connection
        self.write_queue = WriteQueue()
        self.opened_s = now_s
        self.ready_s: float | None = None
        self.used_s = now_s
        self.heard_s = now_s
        self.peer_version: int | None = None
        """The broker's version (MQVersion ordinal), from its answer to a heartbeat."""
        self.connect_deadline_s = connect_deadline_s
        self.draining = False
        self.interest = 0
        self._is_writing = False
        """Whether a write is under way. If Ctrl-C interrupts it, the kernel may have taken bytes
        that were not counted."""
        self._on_request = on_request
        self._first_bytes = b""
        self._read_bytes = READ_BYTES

    def __repr__(self) -> str:
        state = "draining" if self.draining else self.transport.state.value
        return f"<Channel {self.address} {state}, {self.connection.in_flight} in flight>"

    @property
    def is_open(self) -> bool:
        return self.transport.state is StreamState.OPEN

    @property
    def closed(self) -> bool:
        return self.transport.state is StreamState.CLOSED

    @property
    def has_unwritten(self) -> bool:
        """Whether frames, or parts of frames, are not written yet."""
        return bool(self.write_queue) or self.transport.unsent

    def flush(self, now_s: float) -> None:
        """Write as much as the kernel takes; raises StreamEnded or TlsError."""
        write_queue = self.write_queue
        while write_queue or self.transport.unsent:
            buffers, self._is_writing = write_queue.gather(), True
            try:
                count = self.transport.write(buffers)
            except (StreamEnded, TlsError):
                self._is_writing = False
                raise
            complete = write_queue.wrote(count) if count else ()
            if complete:
                self.connection.mark_written(complete[-1], now_s)
            self._is_writing = False
            if not count:
                break
            self.used_s = now_s
        if self.connection.written_oneway and not self.transport.unsent:
            for owner in self.connection.take_written_oneway():
                owner.on_end(None, now_s, now_s)

    def receive(self, now_s: float, *, to_the_end: bool = False) -> bool:
        """Read and dispatch received bytes; return whether there may be more. With `to_the_end`,
        read on after a short read (one more system call), to detect the stream's end. Raises
        StreamEnded if the stream ended or is not RocketMQ's protocol, and TlsError if the server
        refuses our certificate."""
        unasked = 0
        for _ in range(_READS):
            data = self.transport.read(self._read_bytes)
            if data is None:
                return False
            if not self._first_bytes:
                self._first_bytes = bytes(data[:16])
            self.heard_s = now_s
            unasked += self._dispatch(self.connection.receive_data(data, now_s), now_s)
            if unasked > _UNASKED_MAX or (unasked and self._read_bytes < READ_BYTES):
                self._read_bytes = FLOOD_READ_BYTES
                return True
            self._read_bytes = READ_BYTES
            if len(data) < self.transport.full_read and not to_the_end:
                return False
        return True

    def _dispatch(self, events: Sequence[Event], now_s: float) -> int:
        """Pass the events to their owners; return the number of frames that answer no request."""
        unasked = 0
        for event in events:
            if type(event) is Answered:
                event.token.on_end(event.answer, event.sent_s, now_s)
            elif type(event) is Violation:
                raise StreamEnded(self._unreadable(event.error)) from event.error
            else:
                unasked += 1
                if type(event) is PeerRequest:
                    self._on_request(self, event.frame)
        return unasked

    def _unreadable(self, error: RemoteProtocolError) -> str:
        if self._first_bytes[:1] in (b"\x15", b"\x16"):
            return f"{self.address} answers with TLS; set tlsMode"
        return f"{self.address} does not speak RocketMQ's protocol: {error}"

    def silent_s(self, now_s: float) -> float:
        """Return for how long the peer is silent while a written request waits; 0 if none waits."""
        oldest = self.connection.oldest
        if oldest is None or oldest.sent_s is None:
            return 0.0
        return now_s - max(oldest.sent_s, self.heard_s)

    def expire(self, now_s: float) -> None:
        """Fail the requests whose deadline has passed. If the oldest request is unwritten, the
        client drains the channel before this call. So new requests get another connection, and do
        not wait behind the unwritten request."""
        connecting, is_alive = not self.is_open, now_s - self.heard_s <= HEARD_RECENTLY_S
        extended_s = now_s + _EXTENSION_S if is_alive else now_s
        expired_requests = self.connection.expire(now_s, extended_s=extended_s)
        # Withdraw all at once, because each withdrawal goes through the whole queue.
        unwritten = [expired.token for expired in expired_requests if not expired.written]
        withdrawn = set(map(id, self.write_queue.withdraw(unwritten) if unwritten else ()))
        for expired in expired_requests:
            owner = expired.token
            error: SendError
            if expired.written:
                text = f"no answer from {self.address} before the attempt's deadline"
                error = RequestTimeoutError(text)
            elif connecting:
                error = self.transport.timeout_error()
            elif id(owner) in withdrawn:
                error = UnwrittenError(f"{self.address} took no more bytes before the deadline")
            else:
                # The request is written in part. The rest must follow, because other frames come
                # after it. So the broker may store the message.
                self.write_queue.disown(owner)
                text = f"{self.address} took a part of the request before the attempt's deadline"
                error = RequestTimeoutError(text)
            owner.on_end(error, None, now_s)

    def withdraw(self) -> list[Any]:
        """Remove untouched requests, and return their owners in order, without calling `on_end`.
        Frames without an owner stay, because nobody would send them again."""
        owners = self.write_queue.withdraw()
        self.connection.withdraw_unwritten(keep=self.write_queue.first_owner)
        return owners

    def fail(self, cause: Exception, now_s: float) -> None:
        """Close the channel, and fail all requests: UNKNOWN if they were written, else NOT_SENT.
        After a TlsError all are NOT_SENT, because the peer has read no request. After an
        interrupted `flush` all are UNKNOWN."""
        self.transport.close()
        partial_owner = self.write_queue.partly_written_owner
        self.write_queue = WriteQueue()
        for lost in self.connection.close():
            owner = lost.token
            # If a group was written in part, its first messages may be stored.
            written = lost.written or (lost.grouped and owner is partial_owner) or self._is_writing
            owner.on_end(self._loss_error(cause, written=written), None, now_s)

    def _loss_error(self, cause: Exception, *, written: bool) -> SendError:
        error: SendError
        may_be_stored = written and not isinstance(cause, TlsError)
        if may_be_stored and isinstance(cause, NotSentError):
            # The sender has stopped waiting for the answer, so the broker is not to blame.
            error = UnknownOutcomeError(f"given up before {self.address} answered")
        elif may_be_stored:
            error = ConnectionLostError(f"the connection to {self.address} ended: {cause}")
        elif isinstance(cause, NotSentError):
            # Copy the error for each owner, because callers add facts about their message.
            error = cause.copy()
        else:
            error = UnwrittenError(f"the connection to {self.address} ended: {cause}")
        error.__cause__ = cause
        return error


def _drop_front(buffers: list[Any], count: int) -> None:
    index = 0
    while count >= len(buffers[index]):
        count -= len(buffers[index])
        index += 1
    del buffers[:index]
    if count:
        buffers[0] = memoryview(buffers[0])[count:]
