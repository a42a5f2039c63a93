"""Hooks before and after each send and at the end of a transaction (Java's SendMessageHook).
Exceptions of a hook are logged and ignored."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rocket_sink.message import Message, SendResult
from rocket_sink.net.hooks import call_each


@dataclass(slots=True)
class SendContext:
    """A send, as hooks see it. `before_send` and `after_send` get the same object.

    Attributes:
        mode: sync, async, oneway, batch, transaction, request or reply.
        topic: the topic's name with its namespace.
        messages: the messages of the request; several in a batch.
        message_ids: the client ids of the messages, in the order of `messages`.
        started_ms: the start of the send, milliseconds since 1970.
        result, error: set after the send. A oneway message has no result.
        cost_ms: the duration of the send with all attempts; set after the send.
        notes: values that hooks keep from `before_send` to `after_send`.
    """

    mode: str
    producer_group: str
    topic: str
    messages: Sequence[Message]
    message_ids: tuple[str, ...]
    started_ms: int
    result: SendResult | None = None
    error: BaseException | None = None
    cost_ms: float = 0.0
    notes: dict[str, Any] = field(default_factory=dict)
    _started_s: float = field(default_factory=time.monotonic, repr=False)


@dataclass(frozen=True, slots=True)
class EndTransactionContext:
    """The end of a transaction, as hooks see it after END_TRANSACTION has succeeded or failed.
    `state` is a name of Java's LocalTransactionState. `message` is the sent Message, or the
    StoredMessage that a transaction check contained."""

    producer_group: str
    topic: str
    message: Any
    message_id: str
    transaction_id: str | None
    broker_address: str
    state: str
    from_transaction_check: bool
    error: BaseException | None


class SendHook:
    """Base class of hooks. The methods may wait: they delay the thread that sends, or other
    callbacks."""

    def before_send(self, context: SendContext) -> None:
        """Called before the request is submitted, on the thread that sends."""

    def after_send(self, context: SendContext) -> None:
        """Called after the result or error: on the thread that sends; after `send_async`, on the
        thread for callbacks."""

    def end_transaction(self, context: EndTransactionContext) -> None:
        """Called after the end of a transaction, on the thread that has ended it."""


class Hooks:
    """The hooks of one producer, in the order of `add`."""

    def __init__(self, producer_group: str) -> None:
        self._group = producer_group
        self.hooks: tuple[SendHook, ...] = ()
        """Senders test this tuple first, so a send without hooks costs little."""

    def add(self, hook: SendHook, *, instead_of: SendHook | None = None) -> None:
        self.hooks = (*(other for other in self.hooks if other is not instead_of), hook)

    def before(
        self, mode: str, topic: str, messages: Sequence[Message], message_ids: tuple[str, ...]
    ) -> SendContext:
        now_ms = time.time_ns() // 1_000_000
        context = SendContext(mode, self._group, topic, messages, message_ids, now_ms)
        call_each("send", self.hooks, lambda hook: hook.before_send(context))
        return context

    def after(
        self, context: SendContext | None, result: SendResult | None, error: BaseException | None
    ) -> None:
        if context is None:
            return
        context.result, context.error = result, error
        context.cost_ms = (time.monotonic() - context._started_s) * 1000
        call_each("send", self.hooks, lambda hook: hook.after_send(context))

    def end_transaction(self, **facts: Any) -> None:
        if self.hooks:
            context = EndTransactionContext(producer_group=self._group, **facts)
            call_each("send", self.hooks, lambda hook: hook.end_transaction(context))
