"""Order inside a task: one request in flight per home queue, and rows held back after a loss.

A sharding key has one home queue, so order per home queue is order per key. A request waits for the
answer to its queue's previous request; waiting requests are joined. If a topic has many queues, an
input batch has few rows for each of them, and requests of few rows cost more CPU per row. So while
the input flows, a queue that has few rows waits for the rows of the next input batches. The task
sends all of them when it would have to wait for input, and at limits of bytes and time. When a
request is given up,

- its sharding keys are *held*: their later rows in this task become dead letters, in order;
- with strict order its queue is *closed* for this task, except after an error that a single message
  may have caused. Later requests for the queue are held back at once, so a dead broker costs a task
  one wait (`orderWaitMs`), not one per request.

If too many requests wait for queues that answer, the task reads no input for a while. Requests for
a queue that does not answer must not stop other queues, so they are kept, in bounded memory. A
waiting request is first a slice of its input batch, so it keeps the whole batch in memory. Requests
of the oldest batches are moved to a temporary file if such batches exceed the limit of memory.
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
"""Number of input batches, of any size, that waiting requests may keep in memory."""


@dataclass(eq=False)
class _InputBatch:
    """The requests that are slices of one input batch while they wait."""

    byte_count: int = 0
    """The bytes of all requests, which are in memory while one of the requests waits."""
    requests: list[PendingRequest] = field(default_factory=list)


class SpillBuffer:
    """The bytes of waiting requests: whole input batches up to `memory_bytes`, more in a file."""

    def __init__(self, memory_bytes: int) -> None:
        self._limit = memory_bytes
        self._batches = [_InputBatch()]
        self._file: IO[bytes] | None = None

    @property
    def in_memory(self) -> int:
        """The bytes of the batches that waiting requests keep in memory."""
        return sum(batch.byte_count for batch in self._batches)

    def park(self, request: PendingRequest) -> None:
        """Take a request that begins to wait."""
        request.parked = SpillState.SLICE
        self._batches[-1].requests.append(request)

    def add_bytes(self, count: int) -> None:
        """Count bytes of the current input batch."""
        self._batches[-1].byte_count += count

    def next_batch(self) -> None:
        """Begin a new input batch; move requests that keep old batches in memory to the file."""
        for batch in self._batches:
            batch.requests = [r for r in batch.requests if r.parked is SpillState.SLICE]
        self._batches = [batch for batch in self._batches if batch.requests]
        self._batches.append(_InputBatch())
        while len(self._batches) > _BATCHES_KEPT and self.in_memory > self._limit:
            for request in self._batches.pop(0).requests:
                request.pieces = [self._write_body(piece) for piece in request.pieces]
                request.parked = SpillState.FILE

    def bring_back(self, request: PendingRequest) -> None:
        """End a request's wait, and read its bytes if they are in the file."""
        if request.parked is SpillState.FILE:
            request.pieces = [self._read(piece) for piece in request.pieces]
        request.parked = SpillState.NOT

    def close(self) -> None:
        """Close the file, which deletes it."""
        self._batches.clear()
        if self._file is not None:
            self._file.close()
            self._file = None

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


_STUCK_S: Final = 1.0
"""Time without an answer after which a queue no longer makes the input wait."""
_PAUSE_S: Final = 0.1
"""Time without an input batch after which the input no longer flows."""
_GATHER_S: Final = 1.0
"""Longest time for which rows wait for further rows of a flowing input."""


@dataclass(eq=False)
class _Lane:
    waiting: deque[PendingRequest] = field(default_factory=deque)
    in_flight: PendingRequest | None = None
    since_s: float = 0.0
    """Time at which the request in flight was submitted."""

    def is_stuck(self, now_s: float) -> bool:
        return self.in_flight is not None and now_s - self.since_s >= _STUCK_S


class OrderedQueues:
    """The waiting requests of all home queues of a task.

    Args:
        max_messages, max_bytes: limits of a request into which waiting requests are joined. The
            caller lowers these attributes for a proxy, and for brokers that refuse large batches.
        memory_bytes: limit of the bytes that wait for further input or for queues that answer. The
            input batches that waiting requests keep in memory may have twice as many bytes.
    """

    def __init__(
        self, *, max_messages: int, max_bytes: int, memory_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.max_messages = max_messages
        self.max_bytes = max_bytes
        self.closed: dict[MessageQueue, SendError] = {}
        """The error for which each closed queue is closed; `add` takes no request for these."""
        self._lanes: dict[MessageQueue, _Lane] = {}
        # Twice the limit, because batches that keep so many waiting bytes have sent bytes, too.
        self._overflow = SpillBuffer(2 * memory_bytes)
        self._memory_bytes = memory_bytes
        self._clock = clock
        self._gathers = False
        """Whether small requests for free queues wait for further input."""
        self._holds = False
        """Whether such a request may be waiting."""
        self._fed_s = self._released_s = float("-inf")
        """The times of the last end of an input batch, and of the last `release`."""

    @property
    def waiting(self) -> int:
        return sum(len(lane.waiting) for lane in self._lanes.values())

    @property
    def is_full(self) -> bool:
        """Whether the caller should read no input for now, because too many bytes wait for further
        input or for queues that answer. Requests for a stuck queue do not count, so they stop no
        other queue."""
        now_s = self._clock()
        lanes = (lane for lane in self._lanes.values() if not lane.is_stuck(now_s))
        return sum(r.byte_count for lane in lanes for r in lane.waiting) > self._memory_bytes

    def begin_batch(self) -> None:
        """Begin an input batch. The input flows if the batch came soon after the last one."""
        self._gathers = self._clock() - self._fed_s < _PAUSE_S
        self._overflow.next_batch()

    @property
    def is_due(self) -> bool:
        """Whether the caller should `release` requests after an input batch: the input does not
        flow, or some requests wait for it for a long time, or too many bytes wait."""
        is_late = self._clock() - self._released_s >= _GATHER_S
        return not self._gathers or is_late or self.is_full

    def end_batch(self) -> None:
        """End an input batch. The caller may wait for input from now on."""
        self._fed_s = self._clock()

    def release(self) -> list[PendingRequest]:
        """Gather no more until the next input batch. Return the requests that waited for it."""
        self._gathers, self._released_s = False, self._clock()
        if not self._holds:
            return []
        self._holds = False
        free = [lane for lane in self._lanes.values() if lane.in_flight is None]
        return [request for lane in free if (request := self._following(lane)) is not None]

    def add(self, request: PendingRequest) -> PendingRequest | None:
        """Take a request. Return the request that may be submitted now, or None."""
        assert request.queue is not None
        lane = self._lanes.get(request.queue)
        if lane is None:
            lane = self._lanes[request.queue] = _Lane()
        self._overflow.add_bytes(request.byte_count)
        limits = {"max_messages": self.max_messages, "max_bytes": self.max_bytes}
        if not (lane.waiting and lane.waiting[-1].absorbs(request, **limits)):
            self._overflow.park(request)
            lane.waiting.append(request)
        following = self._following(lane) if lane.in_flight is None else None
        if following is not request:
            request.waits_since_s = self._clock()
        return following

    def end_request(
        self, queue: MessageQueue, again: Iterable[PendingRequest] = ()
    ) -> PendingRequest | None:
        """End the queue's request in flight; return the next request to submit, or None. `again`
        has parts of the answered request to send before all waiting requests."""
        lane = self._lanes[queue]
        lane.in_flight = None
        lane.waiting.extendleft(reversed(list(again)))
        return self._following(lane)

    def _following(self, lane: _Lane) -> PendingRequest | None:
        """Return the next request of a free queue, now in flight; None if none may go now. While
        the input flows, a small request waits for it if no other request waits behind."""
        waiting = lane.waiting
        if not waiting:
            return None
        if self._gathers and len(waiting) == 1 and self._is_small(waiting[0]):
            self._holds = True
            return None
        following = waiting.popleft()
        self._overflow.bring_back(following)
        lane.in_flight, lane.since_s = following, self._clock()
        # `waits_since_s` is 0 for a request that goes at once, or is a part of an answered one.
        if following.waits_since_s:
            following.waited_ms = (lane.since_s - following.waits_since_s) * 1000
        return following

    def _is_small(self, request: PendingRequest) -> bool:
        """Return whether more messages than the request has may join it while it waits."""
        return (
            request.may_grow
            and 2 * request.message_count <= self.max_messages
            and 2 * request.byte_count <= self.max_bytes
        )

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
