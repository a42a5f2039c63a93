"""Hooks before and after each send and at the end of a transaction (Java's SendMessageHook).

Exceptions of a hook are logged and ignored.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rocket_sink.message import Message, SendResult
from rocket_sink.net.hooks import call_each


@dataclass(slots=True)
class SendContext:
    """A send, as hooks see it; both calls of a hook get the same object.

    Attributes:
        mode: sync, async, oneway, batch, transaction, request or reply.
        topic: the topic's name with its namespace.
        messages: the messages of the request; several in a batch.
        message_ids: the client ids of the messages, in the same order.
        started_ms: the start of the send, milliseconds since 1970.
        result, error: set after the send; both None for a oneway message.
        cost_ms: the duration of the send with all attempts, set after it.
        notes: the hook's own values.
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
    """The end of a transaction, after END_TRANSACTION was answered or has failed.

    `state` is the name in Java's LocalTransactionState; `message` is a Message, or the
    StoredMessage of a check.
    """

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
    """Base class of hooks. Any sending or driving thread may call the methods."""

    def before_send(self, context: SendContext) -> None:
        """Called before the request is submitted."""

    def after_send(self, context: SendContext) -> None:
        """Called after the result or error."""

    def end_transaction(self, context: EndTransactionContext) -> None:
        """Called after the end of a transaction."""


class Hooks:
    """The hooks of one producer, in the order of `add`."""

    def __init__(self, producer_group: str) -> None:
        self._group = producer_group
        self.hooks: tuple[SendHook, ...] = ()
        """The hooks. Senders read this attribute, so a send without hooks costs little."""

    def add(self, hook: SendHook) -> None:
        self.hooks = (*self.hooks, hook)

    def replace(self, old: SendHook | None, new: SendHook) -> None:
        self.hooks = (*(hook for hook in self.hooks if hook is not old), new)

    def before(
        self, mode: str, topic: str, messages: Sequence[Message], message_ids: tuple[str, ...]
    ) -> SendContext | None:
        """Call `before_send`, and return the context; None without hooks."""
        if not self.hooks:
            return None
        now_ms = time.time_ns() // 1_000_000
        context = SendContext(mode, self._group, topic, messages, message_ids, now_ms)
        call_each("send", self.hooks, lambda hook: hook.before_send(context))
        return context

    def ended(
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
