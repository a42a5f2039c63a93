"""Message traces, sent to the trace topic.

`Tracer` collects the traces of a producer, one line per message in the sample of `traceSample`
(AsyncTraceDispatcher). The message's id decides, so the end of a transaction is traced if its half
message is. It sends them when it has 100 lines, or 500 ms after the first line. A trace message has
up to 128 kB of lines, all for one topic. Traces never fail a send: the tracer drops and counts
lines that cannot be sent, and new lines while 2048 lines wait. It does not trace messages to the
trace topic, or messages whose answer has TRACE_ON=false. As in Java, the trace topic has no
namespace, and neither have the topics and groups in traces.

`RequestTraces` traces a sample of the requests of one engine (`traceSample`). It sends each trace
at once and oneway, so no request waits for a trace, and no broker seems slow because of traces."""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final
from zlib import crc32

import numpy as np

from rocket_sink.errors import Outcome, RocketSinkError
from rocket_sink.message import Message
from rocket_sink.message_rules import without_namespace
from rocket_sink.net import log
from rocket_sink.net.identity import local_ip, new_message_ids
from rocket_sink.options import SinkOptions
from rocket_sink.producer.driver import Driver
from rocket_sink.producer.engine.attempt import Completion, SendRequest
from rocket_sink.producer.engine.engine import SendEngine
from rocket_sink.producer.hooks import EndTransactionContext, SendContext, SendHook
from rocket_sink.producer.request_builder import RequestBuilder
from rocket_sink.wire.properties import KEYS, UNIQ_KEY
from rocket_sink.wire.responses import DEFAULT_REGION
from rocket_sink.wire.trace import EndTransactionTrace, MessageType, PubTrace, Trace, encode_traces

_LOG: Final = log.logger(__name__)
_LINES: Final = 100
_HELD: Final = 2048
_DELAY_S: Final = 0.5
_IN_FLIGHT: Final = 64
"""Limit of the trace messages of one engine that are not written yet."""
_TIMEOUT_S: Final = 1.0
_CLOSE_S: Final = 0.2
_DELAYS: Final = frozenset({"DELAY", "TIMER_DELAY_MS", "TIMER_DELIVER_MS"})


class _TraceSender:
    """The trace topic, and the count of lost traces. The trace topic has no namespace."""

    def __init__(self, options: SinkOptions, builder: RequestBuilder) -> None:
        self._topic, self._namespace = options.trace_topic, options.namespace
        self._sample = options.trace_sample
        self._group = self._bare(options.producer_group)
        self._builder = builder
        self.dropped = 0
        """Number of lines or trace messages that were not sent, or not stored."""

    def _bare(self, name: str) -> str:
        return without_namespace(self._namespace, name)

    def _requests(self, lines: Sequence[Trace]) -> Iterator[SendRequest]:
        for body, keys in encode_traces(lines):
            message = Message(self._topic, body.encode())
            request = self._builder.single(message, {KEYS: " ".join(sorted(keys))})
            request.topic = self._topic
            yield request

    def _lose(self, error: RocketSinkError | None) -> None:
        """Count a trace message that was lost by this error; None: it was not lost."""
        if error is not None:
            self.dropped += 1
            _LOG.warning("a message with traces is lost: %s", error)


class Tracer(_TraceSender, SendHook):
    """A hook that collects traces, and a timer task that sends them."""

    def __init__(self, options: SinkOptions, builder: RequestBuilder, driver: Driver) -> None:
        super().__init__(options, builder)
        self._driver = driver
        self._lines: deque[Trace] = deque()
        self._due_s = math.inf

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

    def _add(self, line: Trace) -> None:
        if crc32(line.message_id.encode()) >= self._sample * 2**32:
            return
        if len(self._lines) >= _HELD:
            self.dropped += 1
            return
        self._lines.append(line)
        if self._due_s == math.inf or len(self._lines) >= _LINES:
            self._due_s = (
                0.0 if len(self._lines) >= _LINES else self._driver.engine.clock() + _DELAY_S
            )
            self._driver.thread.wake()

    # --- the timer task ---------------------------------------------------------------------------

    def run(self, now_s: float) -> float:
        if now_s < self._due_s and now_s != math.inf:
            return self._due_s
        self._due_s = math.inf
        by_topic: dict[str, list[Trace]] = {}
        for _ in range(len(self._lines)):
            line = self._lines.popleft()
            by_topic.setdefault(line.topic, []).append(line)
        for lines in by_topic.values():
            self._write(lines)
        return math.inf

    def _write(self, lines: list[Trace]) -> None:
        # Send the trace without hooks, so that it is not traced itself.
        try:
            for request in self._requests(lines):
                self._driver.submit_again(request, self)
        except RocketSinkError as error:
            self.dropped += len(lines)
            _LOG.warning("%d message traces are lost: %s", len(lines), error)

    def on_done(self, completion: Completion) -> None:
        """Count a trace message that was lost."""
        self._lose(completion.error)


class RequestTraces(_TraceSender):
    """Traces a sample of an engine's requests. Sampled requests of one group share trace messages;
    a large batch needs several. Not thread-safe."""

    def __init__(
        self, options: SinkOptions, engine: SendEngine, rng: np.random.Generator | None = None
    ) -> None:
        # The quickest level shrinks lines by two thirds. The user's level 0 (no compression) stays.
        quick = options.with_(compress_level=int(options.compress_level != 0))
        super().__init__(options, RequestBuilder(quick, new_message_ids(local_ip())))
        self._engine = engine
        self._rng = rng or np.random.default_rng()
        self.in_flight = 0
        """Number of trace messages that are not written yet."""

    def note(
        self,
        completion: Completion,
        messages: Callable[[Iterable[int] | None], Iterable[Any]],
        *,
        half: bool,
    ) -> None:
        """Trace the sampled requests of this completion. `messages` gets positions in the group
        (None: all) and returns their messages, which have a `body` and `properties`, the wire
        property string. With `half` they are half messages."""
        result, stored = completion.result, completion.stored
        if result is None or not result.trace_on or result.queue.topic == self._topic:
            return
        drawn = self._sampled_positions(1 if stored is None else len(stored))
        if not drawn:
            return
        indices, offset_ids = None, result.offset_message_id.split(",")
        if stored is not None:
            indices = stored.indices[drawn].tolist()
            offset_ids = [raw.decode() for raw in stored.offset_message_ids[drawn].tolist()]
        first, last = completion.attempts[0], completion.attempts[-1]
        topic = self._bare(result.queue.topic)
        region, host = result.region_id or DEFAULT_REGION, result.broker_address
        cost_ms = int(last.started_ms - first.started_ms + last.rtt_ms)
        is_stored = completion.outcome is Outcome.ACKED
        lines = []
        # For a batch a broker may return only the id of the first message.
        names = itertools.chain(offset_ids, itertools.repeat(offset_ids[0]))
        for message, offset_id in zip(messages(indices), names, strict=False):
            # The task encoded these properties, so each has a name and a value.
            texts = message.properties.replace("\x02", "\x01").split("\x01")
            properties = dict(zip(texts[::2], texts[1::2], strict=False))
            value = properties.get
            lines.append(PubTrace(
                first.started_ms, region, self._group, topic,
                value(UNIQ_KEY, ""), value("TAGS", ""), value("KEYS", ""), host,
                len(message.body), cost_ms, _type_of_wire(properties, half=half), offset_id,
                is_stored,
            ))  # fmt: skip
        self._send(lines)

    def _sampled_positions(self, count: int) -> list[int]:
        """Return the positions of sampled requests among the next `count` requests."""
        return [int(n) for n in np.flatnonzero(self._rng.random(count) < self._sample)]

    def _send(self, lines: Sequence[Trace]) -> None:
        try:
            for request in self._requests(lines):
                request.token, request.oneway = self, True
                request.attempts, request.timeout_s = 1, _TIMEOUT_S
                if self.in_flight < _IN_FLIGHT and self._engine.try_submit(request):
                    self.in_flight += 1
                else:
                    self.dropped += 1
        except RocketSinkError as error:
            self._lose(error)

    def take(self, completion: Completion) -> bool:
        """Count the completion of a trace message; return False for any other completion."""
        if completion.token is not self:
            return False
        self.in_flight -= 1
        self._lose(completion.error)
        return True

    def close(self) -> None:
        """Wait for traces to be written, at most `_CLOSE_S`. No other request may be in flight."""
        if self.in_flight:
            for completion in self._engine.drain(self._engine.clock() + _CLOSE_S):
                self.take(completion)


def _type_of_wire(properties: Mapping[str, str], *, half: bool) -> MessageType:
    if half:
        return MessageType.TRANSACTION_HALF
    return MessageType.NORMAL if _DELAYS.isdisjoint(properties) else MessageType.DELAY


def _type_of(mode: str, message: Message) -> MessageType:
    if mode == "transaction":
        return MessageType.TRANSACTION_HALF
    if message.is_single and message.priority is None and message.lite_topic is None:
        return MessageType.DELAY
    return MessageType.NORMAL
