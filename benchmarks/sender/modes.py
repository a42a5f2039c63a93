"""The modes of `Producer`, as in the Java sender."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, Final, TypeAlias

from benchmarks.rows import body_of
from benchmarks.sender.tally import Tally
from rocket_sink.errors import Outcome, RocketSinkError, SendError
from rocket_sink.message import Message, MessageQueue, SendResult
from rocket_sink.producer.future import Callback, SendFuture, Workers
from rocket_sink.producer.hooks import Hooks
from rocket_sink.producer.producer import Producer
from rocket_sink.producer.worker import Worker

Send: TypeAlias = "Callable[[range, float | None], None]"
"""Sends the messages with these numbers, optionally until a monotonic time; returns when all have
ended."""
_SHARDING_KEYS: Final = 1000
_NO_HOOKS: Final = Hooks("none")
_NO_QUEUE: Final = MessageQueue("none", "none", 0)
_TAKEN: Final = 50
"""Numbers that a thread of an async mode takes at once."""


@dataclass(frozen=True)
class Job:
    """The messages to send, and how. `inflight` is for async modes; `batch`: messages of a request.

    `rows` (of a record batch; 0: the default) and `ledger` (its spool gets rows and is not folded)
    are for the mode arrow. `delay`: the delay level of all messages; 0: none.
    """

    topic: str
    options: dict[str, Any]
    tally: Tally
    size: int = 256
    threads: int = 1
    inflight: int = 400
    batch: int = 1000
    keys: int = 0
    ordering: str = "none"
    rows: int = 0
    ledger: bool = False
    delay: int = 0

    def message(self, number: int, sharding_key: str | None = None) -> Message:
        """The message of that number."""
        return Message(
            self.topic, body_of(number, self.size), tags="tag", keys=(f"key{number}",),
            sharding_key=sharding_key, delay_level=self.delay,
        )  # fmt: skip


class Numbers:
    """Distributes the numbers of messages to threads, until the time is over."""

    def __init__(self, numbers: range, until_s: float | None) -> None:
        self._next, self._stop = numbers.start, numbers.stop
        self._until_s = until_s
        self._lock = threading.Lock()

    def take(self, count: int) -> range:
        """The next numbers; empty at the end."""
        if self._until_s is not None and time.monotonic() >= self._until_s:
            return range(0)
        with self._lock:
            start = self._next
            self._next = end = min(start + count, self._stop)
        return range(start, end)


@contextmanager
def _one_by_one(job: Job, *, hashed: bool) -> Iterator[Send]:
    def work(producer: Producer, numbers: Numbers) -> None:
        while part := numbers.take(1):
            key = f"key{part.start % _SHARDING_KEYS}" if hashed else None
            message, began_s = job.message(part.start, key), time.monotonic()
            try:
                result = producer.send(message)
            except RocketSinkError as error:
                _failed(job.tally, began_s, error, part)
            else:
                _stored(job.tally, began_s, result, part)

    with Producer(**job.options) as producer:
        yield lambda numbers, until_s: _in_threads(job, producer, Numbers(numbers, until_s), work)


_NO_WORKERS: Final = Workers(Worker("callbacks"), Worker("notices"))


class _SendsNothing(Producer):
    """A producer that ends each send at once, which shows the cost of futures and callbacks."""

    def send_async(
        self, message: Message, callback: Callback | None = None, **_: Any
    ) -> Future[SendResult]:
        future = SendFuture(_NO_WORKERS, _NO_HOOKS, None, callback)
        future.resolve(SendResult(Outcome.ACKED, "SEND_OK", "", "", _NO_QUEUE, 0, ""), None)
        return future


@contextmanager
def _async(job: Job, make: Callable[..., Producer]) -> Iterator[Send]:
    # A semaphore in C: threading's costs as much as a send.
    window: SimpleQueue[None] = SimpleQueue()
    for _ in range(job.inflight):
        window.put(None)

    def ended(began_s: float, part: range) -> Callable[[Any, Any], None]:
        def done(result: SendResult | None, error: BaseException | None) -> None:
            if result is not None:
                _stored(job.tally, began_s, result, part)
            elif error is not None:
                _failed(job.tally, began_s, error, part)
            window.put(None)  # last: when all room is back, the counters are read

        return done

    def work(producer: Producer, numbers: Numbers) -> None:
        while several := numbers.take(_TAKEN):
            for number in several:
                message, part = job.message(number), range(number, number + 1)
                window.get()
                began_s = time.monotonic()
                try:
                    producer.send_async(message, ended(began_s, part))
                except RocketSinkError as error:
                    _failed(job.tally, began_s, error, part)
                    window.put(None)

    def send(numbers: range, until_s: float | None) -> None:
        _in_threads(job, producer, Numbers(numbers, until_s), work)
        for _ in range(job.inflight):
            window.get()
        for _ in range(job.inflight):
            window.put(None)

    with make(**job.options) as producer:
        yield send


@contextmanager
def _batches(job: Job) -> Iterator[Send]:
    def work(producer: Producer, numbers: Numbers) -> None:
        while part := numbers.take(job.batch):
            messages, began_s = [job.message(number) for number in part], time.monotonic()
            try:
                results = producer.send_batch(messages)
            except RocketSinkError as error:
                _failed(job.tally, began_s, error, part)
            else:
                doubtful = any(result.maybe_duplicate for result in results)
                job.tally.succeeded(began_s, time.monotonic(), part, maybe_duplicate=doubtful)

    with Producer(**job.options) as producer:
        yield lambda numbers, until_s: _in_threads(job, producer, Numbers(numbers, until_s), work)


def _in_threads(
    job: Job, producer: Producer, numbers: Numbers, work: Callable[[Producer, Numbers], None]
) -> None:
    if job.threads == 1:
        work(producer, numbers)
        return
    threads = [threading.Thread(target=work, args=(producer, numbers)) for _ in range(job.threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _stored(tally: Tally, began_s: float, result: SendResult, part: range) -> None:
    tally.succeeded(began_s, time.monotonic(), part, maybe_duplicate=result.maybe_duplicate)


def _failed(tally: Tally, began_s: float, error: BaseException, part: range) -> None:
    unknown = isinstance(error, SendError) and error.outcome is Outcome.UNKNOWN
    tally.failed_with(began_s, time.monotonic(), error, part, unknown=unknown)


MODES: Final[dict[str, Callable[[Job], AbstractContextManager[Send]]]] = {
    "sync": lambda job: _one_by_one(job, hashed=False),
    "hash": lambda job: _one_by_one(job, hashed=True),
    "async": lambda job: _async(job, Producer),
    "autobatch": lambda job: _async(job, partial(Producer, autoBatch=True)),
    "nothing": lambda job: _async(job, _SendsNothing),
    "batch": _batches,
}
