"""Order inside a task: one request in flight per home queue, and what is held back after a loss.

A sharding key owns a home queue, so order per key is order per home queue. Requests of a queue
wait here until the one before them is answered; waiting requests of one queue grow together, so
that many queues do not mean many small requests. When a request is given up,

- its sharding keys are *held*: their later rows in this task become dead letters, in order;
- if its queue could not be reached in all the time that strict order waits (`orderWaitMs`), the
  queue is *closed* for the rest of the task: what waits for it is held back without another wait,
  so that one dead broker costs a task one wait and not one per request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from rocket_sink.errors import SendError
from rocket_sink.message import MessageQueue
from rocket_sink.spark.overflow import Overflow
from rocket_sink.spark.pending import PendingRequest


@dataclass(eq=False)
class _Lane:
    waiting: deque[PendingRequest] = field(default_factory=deque)
    in_flight: PendingRequest | None = None
    closed_by: SendError | None = None


class OrderedQueues:
    """The waiting rooms of all home queues of a task.

    Args:
        max_messages, max_bytes: limits up to which waiting requests grow together.
        memory_bytes: bytes that wait in memory; what comes on top waits in a temporary file.
    """

    def __init__(self, *, max_messages: int, max_bytes: int, memory_bytes: int) -> None:
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._lanes: dict[MessageQueue, _Lane] = {}
        self._overflow = Overflow(memory_bytes)

    @property
    def waiting(self) -> int:
        """Requests that are not submitted yet."""
        return sum(len(lane.waiting) for lane in self._lanes.values())

    def next_batch(self) -> None:
        """A new input batch begins: what still waits from old ones must not keep them alive."""
        self._overflow.next_batch()

    def closed_by(self, queue: MessageQueue) -> SendError | None:
        """Why the queue is closed for the rest of the task, or None."""
        lane = self._lanes.get(queue)
        return lane.closed_by if lane else None

    def add(self, request: PendingRequest) -> PendingRequest | None:
        """Take a request; returns the one that may be submitted now, if any."""
        assert request.queue is not None
        lane = self._lanes.setdefault(request.queue, _Lane())
        if lane.in_flight is None and not lane.waiting:
            lane.in_flight = request
            return request
        last = lane.waiting[-1] if lane.waiting else None
        if last and last.can_absorb(
            request, max_messages=self._max_messages, max_bytes=self._max_bytes
        ):
            last.absorb(request)
        else:
            self._overflow.park(request)
            lane.waiting.append(request)
        return None

    def answered(
        self, queue: MessageQueue, again: Iterable[PendingRequest] = ()
    ) -> PendingRequest | None:
        """The request in flight is done; returns the next one to submit, if any.

        `again` go before all that waits: the parts of the one that was answered.
        """
        lane = self._lanes[queue]
        lane.in_flight = None
        lane.waiting.extendleft(reversed(list(again)))
        if not lane.waiting:
            return None
        lane.in_flight = lane.waiting.popleft()
        self._overflow.bring_back(lane.in_flight)
        return lane.in_flight

    def close_queue(self, queue: MessageQueue, error: SendError) -> None:
        """Take no more requests for the queue in this task."""
        self._lanes[queue].closed_by = error

    def take_waiting(self, queue: MessageQueue) -> list[PendingRequest]:
        """Remove and return what waits for the queue, in order."""
        lane = self._lanes[queue]
        taken = list(lane.waiting)
        lane.waiting.clear()
        for request in taken:
            self._overflow.bring_back(request)
        return taken

    def put_back(self, queue: MessageQueue, requests: Iterable[PendingRequest]) -> None:
        """Let requests that `take_waiting` returned wait again, in that order."""
        lane = self._lanes[queue]
        for request in requests:
            self._overflow.park(request)
            lane.waiting.append(request)

    def close(self) -> None:
        """Drop everything; for a task that has ended."""
        self._lanes.clear()
        self._overflow.close()
