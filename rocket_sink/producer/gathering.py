"""Automatic batching: asynchronous sends wait a little for company (Java's ProduceAccumulator).

Messages of one topic and one `wait_store` go into one batch, which is sent when it reaches
`batchMaxBytes` or its first message has waited `batchMaxDelayMs`, and when the producer closes.
Gathered bodies are not compressed. Messages with a queue, a selector, a sharding key, a delay or a
time-out of their own, and those that fill a batch alone, are sent as without this.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from rocket_sink.errors import MessageIllegalError, NotSentError, ProducerClosedError
from rocket_sink.message import Message, SendResult
from rocket_sink.options import SinkOptions
from rocket_sink.producer.compose import Composer, named
from rocket_sink.producer.values import Completion, SendRequest

Done = Callable[[SendResult | None, BaseException | None], None]
Submit = Callable[[SendRequest, Callable[[Completion], None]], None]


@dataclass(slots=True)
class _Pile:
    due_s: float
    messages: list[Message] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    encoded: list[bytes] = field(default_factory=list)
    done: list[Done] = field(default_factory=list)
    size: int = 0


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

    def add(self, message: Message, message_id: str, encoded: bytes, done: Done) -> None:
        """Put it with the others; `done` is called once, with its own result or error.

        Raises:
            ProducerClosedError
        """
        key, full = (message.topic, message.wait_store), []
        with self._lock:
            if self._closed:
                raise ProducerClosedError("the producer is closed")
            pile = self._piles.get(key)
            if pile is not None and pile.size + len(encoded) > self._max_bytes:
                full.append(self._piles.pop(key))
                pile = None
            if pile is None:
                pile = self._piles[key] = _Pile(self._clock() + self._delay_s)
            pile.messages.append(message)
            pile.ids.append(message_id)
            pile.encoded.append(encoded)
            pile.done.append(done)
            pile.size += len(encoded)
            if pile.size >= self._max_bytes:
                full.append(self._piles.pop(key))
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
        request = self._composer.batch_of(pile.messages, pile.encoded, pile.ids)
        try:
            self._submit(request, lambda completion: self._ended(pile, completion))
        except NotSentError as error:
            for done in pile.done:
                done(None, error)

    def _ended(self, pile: _Pile, completion: Completion) -> None:
        result = completion.result
        if result is not None:
            for done, own in zip(pile.done, results_of(result, pile.ids), strict=True):
                done(own, None)
        elif isinstance(completion.error, MessageIllegalError) and len(pile.ids) > 1:
            self._send_singly(pile)
        else:
            for done in pile.done:
                done(None, completion.error)

    def _send_singly(self, pile: _Pile) -> None:
        """The broker refused the batch: only the guilty message shall fail."""
        for message, message_id, done in zip(pile.messages, pile.ids, pile.done, strict=True):

            def ended(completion: Completion, done: Any = done) -> None:
                done(completion.result, completion.error)

            try:
                self._submit(self._composer.single(named(message, message_id)), ended)
            except NotSentError as error:
                done(None, error)


def results_of(result: SendResult, message_ids: list[str]) -> list[SendResult]:
    """A batch's result as its messages' own: their ids, and the offsets from the first on."""
    offset_ids = result.offset_message_id.split(",")
    if len(offset_ids) != len(message_ids):
        offset_ids = [result.offset_message_id] * len(message_ids)
    return [
        replace(
            result,
            message_id=message_id,
            offset_message_id=offset_id,
            queue_offset=result.queue_offset + number,
        )
        for number, (message_id, offset_id) in enumerate(zip(message_ids, offset_ids, strict=True))
    ]
