"""Order inside a task: one request in flight per home queue, and rows held back after a loss.

A sharding key has one home queue, so order per home queue is order per key. A request waits for the
answer to its queue's previous request; waiting requests are joined. When a request is given up,

- its sharding keys are *held*: their later rows in this task become dead letters, in order;
- with strict order its queue is *closed* for this task, except after an error that a single message
  may have caused. Later requests for the queue are held back at once, so a dead broker costs a task
  one wait (`orderWaitMs`), not one per request.

If too many requests wait for queues that answer, the task reads no input for a while. Requests for
a queue that does not answer must not stop other queues, so they are kept, in bounded memory. A
waiting request is first a slice of its input batch, so it keeps the whole batch in memory. If it
still waits two batches later, it is copied: into memory up to a limit, then into a temporary file.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import IO, Final

import pyarrow as pa

from rocket_sink.errors import SendError
from rocket_sink.message import MessageQueue
from rocket_sink.options import SinkOptions
from rocket_sink.producer.engine.shared_state import SharedBrokerState
from rocket_sink.routing.topic_publish_info import LOGICAL_PREFIX
from rocket_sink.rows.sort import scratch_folder
from rocket_sink.task.pending import PendingRequest, Piece, SpillState

_BATCHES_KEPT: Final = 2
"""Number of input batches that waiting requests may keep in memory."""


class SpillBuffer:
    """The bytes of waiting requests: copies up to `memory_bytes` in memory, more in a file."""

    def __init__(self, memory_bytes: int) -> None:
        self._limit = memory_bytes
        self._in_memory = 0
        self._batches: deque[list[PendingRequest]] = deque([[]])
        self._file: IO[bytes] | None = None

    def park(self, request: PendingRequest) -> None:
        """Take a request that begins to wait."""
        request.parked = SpillState.SLICE
        self._batches[-1].append(request)

    def next_batch(self) -> None:
        """Begin a new input batch; copy requests that keep an old batch in memory."""
        self._batches.append([])
        if len(self._batches) > _BATCHES_KEPT:
            for request in self._batches.popleft():
                if request.parked is SpillState.SLICE:
                    self._copy_out(request)

    def bring_back(self, request: PendingRequest) -> None:
        """End a request's wait, and read its bytes if they are in the file."""
        if request.parked is SpillState.FILE:
            request.pieces = [self._read(piece) for piece in request.pieces]
        elif request.parked is SpillState.COPY:
            self._in_memory -= request.byte_count
        request.parked = SpillState.NOT

    def close(self) -> None:
        """Close the file, which deletes it."""
        self._batches.clear()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _copy_out(self, request: PendingRequest) -> None:
        if self._in_memory + request.byte_count <= self._limit:
            request.pieces = [piece.detached() for piece in request.pieces]
            request.parked = SpillState.COPY
            self._in_memory += request.byte_count
        else:
            request.pieces = [self._write_body(piece) for piece in request.pieces]
            request.parked = SpillState.FILE

    def _write_body(self, piece: Piece) -> Piece:
        if self._file is None:
            # Use a file without a name, so that it vanishes with a killed worker.
            self._file = tempfile.TemporaryFile(  # noqa: SIM115 (closed by close())
                prefix="rocket-sink-", dir=scratch_folder()
            )
        position = self._file.seek(0, os.SEEK_END)
        self._file.write(piece.body)
        return Piece(pa.py_buffer(b""), piece.offsets - piece.offsets[0] + position)

    def _read(self, piece: Piece) -> Piece:
        assert self._file is not None
        self._file.seek(int(piece.offsets[0]))
        return Piece(
            pa.py_buffer(self._file.read(piece.byte_count)), piece.offsets - piece.offsets[0]
        )


_FLOW_BYTES: Final = 8 << 20
"""Limit of bytes that wait for queues that answer: several full requests (of 1 MB)."""
_STUCK_S: Final = 1.0
"""Time without an answer after which a queue no longer makes the input wait."""


@dataclass(eq=False)
class _Lane:
    waiting: deque[PendingRequest] = field(default_factory=deque)
    in_flight: PendingRequest | None = None
    since_s: float = 0.0
    """Time at which the request in flight was submitted."""
    closed_by: SendError | None = None

    def give_out(self, request: PendingRequest, now_s: float) -> PendingRequest:
        self.in_flight, self.since_s = request, now_s
        return request

    def flows(self, now_s: float) -> bool:
        return self.in_flight is not None and now_s - self.since_s < _STUCK_S


class OrderedQueues:
    """The waiting requests of all home queues of a task.

    Args:
        max_messages, max_bytes: limits of a request into which waiting requests are joined. The
            caller lowers these attributes for a proxy, and for brokers that refuse large batches.
        memory_bytes: limit of the bytes that wait in memory; more bytes go to a temporary file.
    """

    def __init__(
        self, *, max_messages: int, max_bytes: int, memory_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.max_messages = max_messages
        self.max_bytes = max_bytes
        self._lanes: dict[MessageQueue, _Lane] = {}
        self._overflow = SpillBuffer(memory_bytes)
        self._flow_bytes = min(_FLOW_BYTES, memory_bytes)
        self._clock = clock

    @property
    def waiting(self) -> int:
        return sum(len(lane.waiting) for lane in self._lanes.values())

    @property
    def is_full(self) -> bool:
        """Whether the caller should read no input for now, because too many bytes wait for queues
        that answer. Requests for a stuck queue do not count, so they stop no other queue."""
        now_s = self._clock()
        flowing = (lane for lane in self._lanes.values() if lane.waiting and lane.flows(now_s))
        return sum(r.byte_count for lane in flowing for r in lane.waiting) > self._flow_bytes

    def next_batch(self) -> None:
        self._overflow.next_batch()

    def closing_error(self, queue: MessageQueue) -> SendError | None:
        """Return the error for which the queue is closed, or None if it is not closed."""
        lane = self._lanes.get(queue)
        return lane.closed_by if lane else None

    def add(self, request: PendingRequest) -> PendingRequest | None:
        """Take a request. Return it if it may be submitted now, None if it has to wait."""
        assert request.queue is not None
        lane = self._lanes.setdefault(request.queue, _Lane())
        if lane.in_flight is None and not lane.waiting:
            return lane.give_out(request, self._clock())
        limits = {"max_messages": self.max_messages, "max_bytes": self.max_bytes}
        if not (lane.waiting and lane.waiting[-1].absorbs(request, **limits)):
            self._overflow.park(request)
            request.waits_since_s = self._clock()
            lane.waiting.append(request)
        return None

    def end_request(
        self, queue: MessageQueue, again: Iterable[PendingRequest] = ()
    ) -> PendingRequest | None:
        """End the queue's request in flight; return the next request to submit, or None. `again`
        has parts of the answered request to send before all waiting requests."""
        lane = self._lanes[queue]
        lane.in_flight = None
        lane.waiting.extendleft(reversed(list(again)))
        if not lane.waiting:
            return None
        following = lane.waiting.popleft()
        self._overflow.bring_back(following)
        now_s = self._clock()
        # A part from `again` has not waited, so its `waits_since_s` is 0.
        if following.waits_since_s:
            following.waited_ms = (now_s - following.waits_since_s) * 1000
        return lane.give_out(following, now_s)

    def close_queue(self, queue: MessageQueue, error: SendError) -> None:
        """Close the queue for this task; the caller must `add` no more requests for it."""
        self._lanes[queue].closed_by = error

    def take_waiting(self, queue: MessageQueue) -> list[PendingRequest]:
        """Remove and return the requests that wait for the queue, in order."""
        lane = self._lanes[queue]
        requests = list(lane.waiting)
        lane.waiting.clear()
        for request in requests:
            self._overflow.bring_back(request)
        return requests

    def put_back(self, queue: MessageQueue, requests: Iterable[PendingRequest]) -> None:
        """Let requests from `take_waiting` wait again, in order."""
        lane = self._lanes[queue]
        for request in requests:
            self._overflow.park(request)
            lane.waiting.append(request)

    def close(self) -> None:
        """Drop all requests and delete the file."""
        self._lanes.clear()
        self._overflow.close()


class AbsentBrokers:
    """Brokers for which rows in strict order have waited in vain, as one task sees them.

    `orderWaitMs` is the time for which a topic's rows wait while their broker is absent, over all
    tasks and epochs of an executor. Once rows have waited so long, later rows wait for what remains
    of that time, at least for `sendMsgTimeout`, so that one request finds out whether the broker is
    back. A stored message ends the absence. So does a time of `orderWaitMs` without a request,
    because the broker may have been back. A static topic's queues name a logical broker, which
    several brokers serve, so its absences are not shared. `clock` counts from the boot."""

    def __init__(
        self, options: SinkOptions, shared: SharedBrokerState, clock: Callable[[], float]
    ) -> None:
        self._wait_s = options.order_wait_ms / 1000
        self._least_s = min(self._wait_s, options.send_msg_timeout_ms / 1000)
        self._shared = shared
        self._clock = clock
        self._absent: set[str] = set()

    def wait_s(self, queue: MessageQueue) -> float:
        """Return how long a request waits for its queue from now on."""
        absence = self._absence(queue)
        if absence is None:
            return self._wait_s
        self._absent.add(_name(queue))
        return max(absence + self._wait_s - self._clock(), self._least_s)

    def note_failure(self, queue: MessageQueue) -> None:
        """Note that a request for the queue has used up its wait."""
        if queue.broker_name.startswith(LOGICAL_PREFIX):
            return
        now_s, since_s = self._clock(), self._absence(queue)
        since_s = now_s - self._wait_s if since_s is None else since_s
        self._shared.put_absence(_name(queue), since_s, now_s)

    def note_stored(self, queue: MessageQueue) -> None:
        """Note that the queue's broker has stored a message."""
        if _name(queue) in self._absent:
            self._absent.discard(_name(queue))
            self._shared.end_absence(_name(queue))

    def _absence(self, queue: MessageQueue) -> float | None:
        """Return the begin of the broker's absence; None if it is not known to be absent."""
        absence, now_s = self._shared.absence(_name(queue)), self._clock()
        if absence is None or not now_s - self._wait_s <= absence[1] <= now_s:
            return None
        return absence[0]


def _name(queue: MessageQueue) -> str:
    return f"{queue.broker_name}\n{queue.topic}"
