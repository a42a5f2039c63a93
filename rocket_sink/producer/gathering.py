"""Automatic batching: asynchronous sends wait a little for company (Java's ProduceAccumulator).

Messages of one topic and one `wait_store` go into one batch, which is sent when it reaches
`batchMaxBytes` or its first message has waited `batchMaxDelayMs`, and when the producer closes.
Gathered bodies are not compressed. Messages with a queue, a selector, a sharding key, a delay or a
time-out of their own, and those that fill a batch alone, are sent as without this.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeAlias

from rocket_sink.errors import MessageIllegalError, NotSentError, ProducerClosedError
from rocket_sink.message import Message, SendResult
from rocket_sink.options import SinkOptions
from rocket_sink.producer.compose import Composer, named
from rocket_sink.producer.send_future import SendFuture
from rocket_sink.producer.values import Completion, SendRequest

Submit = Callable[[SendRequest, Callable[[Completion], None]], None]
Entry: TypeAlias = "tuple[Message, str, bytes, SendFuture]"
"""A message, its id, its bytes inside a batch, and who waits for it."""


class _Pile:
    __slots__ = ("due_s", "entries", "size")

    def __init__(self, due_s: float) -> None:
        self.due_s = due_s
        self.entries: list[Entry] = []
        self.size = 0


class Gatherer:
    """A chore of the driver; `add` from any thread.

    Args:
        submit: hands a request over with a callback; raises NotSentError.
        attend: told when there is a new due time.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        options: SinkOptions,
        composer: Composer,
        submit: Submit,
        attend: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self._composer, self._submit, self._attend, self._clock = composer, submit, attend, clock
        self._max_bytes = min(options.batch_max_bytes, options.max_message_size_bytes)
        self._delay_s = options.batch_max_delay_ms / 1000
        self._lock = threading.Lock()
        self._piles: dict[tuple[str, bool], _Pile] = {}
        self._due_s: float | None = None
        self._closed = False

    def takes(self, message: Message) -> bool:
        """The message may share a request with others."""
        return (
            message.sharding_key is None
            and not message.is_timed
            and len(message.body) < self._max_bytes
        )

    def add(self, message: Message, message_id: str, encoded: bytes, future: SendFuture) -> None:
        """Put it with the others; the future gets its own result or error.

        Raises:
            ProducerClosedError
        """
        key, size = (message.topic, message.wait_store), len(encoded)
        full: list[_Pile] = []
        is_first = news = False
        with self._lock:
            if self._closed:
                raise ProducerClosedError("the producer is closed")
            pile = self._piles.get(key)
            if pile is not None and pile.size + size > self._max_bytes:
                full.append(self._piles.pop(key))
                pile = None
            if pile is None:
                pile = self._piles[key] = _Pile(self._clock() + self._delay_s)
                is_first = True
            pile.entries.append((message, message_id, encoded, future))
            pile.size += size
            if pile.size >= self._max_bytes:
                full.append(self._piles.pop(key))
            if full or is_first:
                before_s, self._due_s = self._due_s, self._next_due_s()
                news = self._due_s is not None and (before_s is None or self._due_s < before_s)
        for one in full:
            self._send(one)
        if news:
            self._attend()

    def _next_due_s(self) -> float | None:
        return min((pile.due_s for pile in self._piles.values()), default=None)

    # --- the chore ---------------------------------------------------------------------------

    def due_s(self) -> float | None:
        return self._due_s

    def run(self, now_s: float) -> None:
        with self._lock:
            due = [key for key, pile in self._piles.items() if pile.due_s <= now_s]
            piles = [self._piles.pop(key) for key in due]
            self._due_s = self._next_due_s()
        for pile in piles:
            self._send(pile)

    def flush(self) -> None:
        """The producer closes: send what waits, take no more."""
        with self._lock:
            self._closed = True
        self.run(float("inf"))

    # --- a batch and its end -----------------------------------------------------------------

    def _send(self, pile: _Pile) -> None:
        entries = pile.entries
        messages, ids, encoded, _ = zip(*entries, strict=True)
        request = self._composer.batch_of(messages, encoded, ids)
        try:
            self._submit(request, lambda completion: self._ended(entries, completion))
        except NotSentError as error:
            for *_, future in entries:
                future.ended(None, error)

    def _ended(self, entries: list[Entry], completion: Completion) -> None:
        result = completion.result
        if result is not None:
            results = results_of(result, [message_id for _, message_id, _, _ in entries])
            for (*_, future), own in zip(entries, results, strict=True):
                future.ended(own, None)
        elif isinstance(completion.error, MessageIllegalError) and len(entries) > 1:
            self._send_singly(entries)
        else:
            for *_, future in entries:
                future.ended(None, completion.error)

    def _send_singly(self, entries: list[Entry]) -> None:
        """The broker refused the batch: only the guilty message shall fail."""
        for message, message_id, _, future in entries:
            try:
                self._submit(self._composer.single(named(message, message_id)), future.on_done)
            except NotSentError as error:
                future.ended(None, error)


def results_of(result: SendResult, message_ids: list[str]) -> list[SendResult]:
    """A batch's result as its messages' own: their ids, and the offsets from the first on."""
    offset_ids = result.offset_message_id.split(",")
    if len(offset_ids) != len(message_ids):
        offset_ids = [result.offset_message_id] * len(message_ids)
    first = result.queue_offset
    return [
        # `_replace` goes by names, at three times the cost.
        SendResult(
            result.outcome, result.status, message_id, offset_id, result.queue, first + number,
            result.broker_address, result.attempts, result.latency_ms, result.maybe_duplicate,
            result.transaction_id, result.region_id, result.recall_handle, result.trace_on,
        )
        for number, (message_id, offset_id) in enumerate(zip(message_ids, offset_ids, strict=True))
    ]  # fmt: skip
