"""Message traces, collected and sent to the trace topic by the producer (AsyncTraceDispatcher).

A trace message has up to 100 lines or 128 kB of one topic, and is sent at most 500 ms after its
first line; the first trace starts the producer's thread. Traces never fail a send: those that
cannot be sent, and those above 2048 waiting lines, are dropped, counted and logged. Not traced:
messages to the trace topic, and those answered with TRACE_ON=false. As in Java, the trace topic has
no namespace, nor have topics and groups in a trace.
"""

from __future__ import annotations

import threading
import time
from typing import Final

from rocket_sink.errors import Outcome, RocketSinkError
from rocket_sink.message import Message
from rocket_sink.message_rules import without_namespace
from rocket_sink.net import log
from rocket_sink.options import SinkOptions
from rocket_sink.producer.driver import Driver, Waiter
from rocket_sink.producer.engine.attempt import Completion
from rocket_sink.producer.hooks import EndTransactionContext, SendContext, SendHook
from rocket_sink.producer.request_builder import RequestBuilder
from rocket_sink.wire.responses import DEFAULT_REGION
from rocket_sink.wire.trace import EndTransactionTrace, MessageType, PubTrace, Trace, encode_trace

_LOG: Final = log.logger(__name__)
_LINES: Final = 100
_HELD: Final = 2048
_DELAY_S: Final = 0.5
_BODY_MAX: Final = 128_000
_KEYS_MAX: Final = 30_000
"""Bytes; all properties of a message have 32,767."""


class Tracer(SendHook):
    """A hook that collects traces, and a timer task that sends them."""

    def __init__(self, options: SinkOptions, builder: RequestBuilder, driver: Driver) -> None:
        self._topic, self._namespace = options.trace_topic, options.namespace
        self._group = self._bare(options.producer_group)
        self._builder, self._driver = builder, driver
        self._clock = driver.engine.clock
        self._lock = threading.Lock()
        self._lines: list[Trace] = []
        self._due_s: float | None = None
        self.dropped = 0
        """Lines that were not sent, and trace messages that were not stored."""

    # --- the hook ----------------------------------------------------------------------------

    def after_send(self, context: SendContext) -> None:
        result = context.result
        if result is None or not result.trace_on or context.topic == self._topic:
            return
        offset_ids = result.offset_message_id.split(",")
        if len(offset_ids) != len(context.messages):
            offset_ids = [result.offset_message_id] * len(context.messages)
        for message, message_id, offset_id in zip(
            context.messages, context.message_ids, offset_ids, strict=True
        ):
            self._add(
                PubTrace(
                    time_ms=context.started_ms,
                    region_id=result.region_id or DEFAULT_REGION,
                    producer_group=self._group,
                    topic=self._bare(context.topic),
                    message_id=message_id,
                    tags=message.tags or "",
                    keys=" ".join(message.keys),
                    store_host=result.broker_address,
                    body_length=len(message.body),
                    cost_ms=int(context.cost_ms),
                    message_type=_type_of(context.mode, message),
                    offset_message_id=offset_id,
                    success=result.outcome is Outcome.ACKED,
                )
            )

    def end_transaction(self, context: EndTransactionContext) -> None:
        message = context.message
        if isinstance(message, Message):
            tags, keys = message.tags or "", " ".join(message.keys)
        else:
            tags, keys = (message.properties.get(name, "") for name in ("TAGS", "KEYS"))
        self._add(
            EndTransactionTrace(
                time_ms=time.time_ns() // 1_000_000,
                region_id=DEFAULT_REGION,
                producer_group=self._group,
                topic=self._bare(context.topic),
                message_id=context.message_id,
                tags=tags,
                keys=keys,
                store_host=context.broker_address,
                message_type=MessageType.TRANSACTION_COMMIT,
                transaction_id=context.transaction_id or "",
                state=context.state,
                from_transaction_check=context.from_transaction_check,
            )
        )

    def _bare(self, name: str) -> str:
        return without_namespace(self._namespace, name)

    def _add(self, line: Trace) -> None:
        with self._lock:
            if len(self._lines) >= _HELD:
                self.dropped += 1
                return
            self._lines.append(line)
            now_s = self._clock()
            if len(self._lines) >= _LINES:
                due_earlier = self._due_s is None or self._due_s > now_s
                self._due_s = now_s
            else:
                due_earlier = self._due_s is None
                self._due_s = self._due_s or now_s + _DELAY_S
        if due_earlier:
            self._driver.reschedule()

    def _ended(self, completion: Completion) -> None:
        if completion.error is not None:
            self.dropped += 1
            _LOG.warning("a message with traces is lost: %s", completion.error)

    # --- the timer task ---------------------------------------------------------------------------

    def due_s(self) -> float | None:
        return self._due_s

    def run(self, now_s: float) -> None:
        self.flush()

    def flush(self) -> None:
        """Send all collected traces."""
        with self._lock:
            lines, self._lines, self._due_s = self._lines, [], None
        by_topic: dict[str, list[Trace]] = {}
        for line in lines:
            by_topic.setdefault(line.topic, []).append(line)
        for some in by_topic.values():
            for start in range(0, len(some), _LINES):
                self._write(some[start : start + _LINES])

    def _write(self, lines: list[Trace]) -> None:
        try:
            body, keys = encode_trace(lines)
            is_long = len(body) > _BODY_MAX or len(" ".join(keys).encode()) > _KEYS_MAX
            if is_long and len(lines) > 1:
                half = len(lines) // 2
                self._write(lines[:half])
                self._write(lines[half:])
                return
            # The trace is sent without hooks, so that it is not traced itself.
            message = Message(self._topic, body.encode(), keys=tuple(sorted(keys)))
            request = self._builder.single(message)
            request.topic = self._topic
            submit = self._driver.submit_nowait
            if self._driver.closing:
                submit = self._driver.submit_again
            submit(request, Waiter(self._ended))
        except RocketSinkError as error:
            self.dropped += len(lines)
            _LOG.warning("%d message traces are lost: %s", len(lines), error)


def _type_of(mode: str, message: Message) -> MessageType:
    if mode == "transaction":
        return MessageType.TRANSACTION_HALF
    if message.is_single and message.priority is None and message.lite_topic is None:
        return MessageType.DELAY
    return MessageType.NORMAL
