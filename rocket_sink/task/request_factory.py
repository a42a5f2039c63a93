"""Conversion of a task's pending requests to requests of the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa

from rocket_sink.errors import DeliveryError, Outcome, ProtocolError
from rocket_sink.message import MessageQueue
from rocket_sink.options import SinkOptions
from rocket_sink.producer.engine.attempt import Completion, SendRequest
from rocket_sink.routing.sharding import fallback_queue
from rocket_sink.routing.topic_publish_info import TopicPublishInfo
from rocket_sink.task.pending import DecodedMessage, PendingRequest, SingleColumns
from rocket_sink.task.totals import TaskSummary
from rocket_sink.wire.codes import SysFlag
from rocket_sink.wire.columns.buffers import lengths_of
from rocket_sink.wire.columns.single_frames import SingleMessages
from rocket_sink.wire.compress import CompressionType, compress_body
from rocket_sink.wire.ids import check_offset_message_ids
from rocket_sink.wire.properties import UNIQ_KEY, WAIT, encode_properties, least_version

_NO_WAIT: Final = encode_properties({WAIT: "false"})


class RequestFactory:
    """Makes the `SendRequest`s of one task; half messages with `half_properties` (wire text)."""

    def __init__(self, options: SinkOptions, half_properties: str = "") -> None:
        self._options = options
        self.max_bytes = options.request_max_bytes
        """Size above which a message is sent alone; the caller lowers it with its batches'."""
        self._half_properties = half_properties
        self._once = options.delivery == "effectively_once"
        self._moved: set[tuple[str, str | None]] = set()

    def send_request(self, request: PendingRequest) -> SendRequest:
        """Return the engine's request: a batch, a single message, or a group of single messages."""
        too_big = request.byte_count > self.max_bytes
        if request.columns is not None and request.message_count > 1:
            send = self._group(request, request.columns)
        elif request.message_count == 1 and (request.timed or request.alone or too_big):
            send = self._single(request)
        else:
            bodies: Any = [piece.body for piece in request.pieces]
            send = SendRequest(
                request.topic, bodies[0] if len(bodies) == 1 else bodies,
                message_count=request.message_count, batch=True,
                properties="" if request.waits_for_store else _NO_WAIT, token=request,
                message_id=request.first_message_id, sys_flag=request.sys_flag,
                lacks_keys=request.lacks_keys,
            )  # fmt: skip
        send.retry_while_busy = True
        self._place(send, request)
        if self._once:
            ids = request.first_message_id, request.last_message_id
            send.verify_ids = ids if request.message_count > 1 else ids[:1]
        return send

    def _group(self, request: PendingRequest, columns: SingleColumns) -> SendRequest:
        half = self._half_properties
        if (sys_flag := columns.sys_flag) is None:
            body, sys_flag = compressed_column(columns.body, self._options)
            columns = request.columns = columns._replace(body=body, sys_flag=sys_flag)
        bits = int(SysFlag.TRANSACTION_PREPARED) if half else 0
        group = _Group(
            columns.body, columns.properties, sys_flag | bits, columns.flag, half.encode(),
            request=request, factory=self,
        )  # fmt: skip
        return SendRequest(
            request.topic, b"", message_count=request.message_count,
            timed=request.timed or bool(half), least_version=columns.least_version, token=request,
            message_id=columns.message_ids[0].as_py(), group=group,
        )  # fmt: skip

    def note_move(
        self, request: PendingRequest, stored: MessageQueue, summary: TaskSummary
    ) -> None:
        """Count the request's keys as moved if it was not stored in its home queue."""
        if request.sharded and stored != request.queue:
            for message in request.messages():
                self._moved.add((request.topic, message.order_key()))
            summary.moved_keys = len(self._moved)

    def note_answer(self, completion: Completion) -> None:
        """Check and correct the outcome of half messages. A half message without an answer is not
        in the ledger, so it is never committed. Therefore UNKNOWN becomes NOT_SENT. Raise a
        DeliveryError if a stored half message has no readable offset id, which the commit needs."""
        if not self._half_properties:
            return
        completion.maybe_duplicate = False
        if completion.outcome is Outcome.UNKNOWN:
            completion.outcome = Outcome.NOT_SENT
        if completion.result is None:
            return
        ids = [completion.result.offset_message_id.encode()]
        if completion.stored is not None:
            ids = completion.stored.offset_message_ids.tolist()
        try:
            check_offset_message_ids(ids)
        except ProtocolError as unreadable:
            raise DeliveryError(
                f"a broker stored a half message and does not say where: {unreadable}"
            ) from unreadable

    def _place(self, send: SendRequest, request: PendingRequest) -> None:
        ordering = self._options.ordering
        send.ordered = ordering != "none" and request.queue is not None and not request.delayed
        if not send.ordered:
            send.timeout_s = self._options.delivery_timeout_ms / 1000
        if request.queue is None:
            return
        if request.fixed or ordering == "strict":
            send.queue = request.queue
        else:
            send.choose = HomeQueueSelector(request.queue)

    def _body(self, request: PendingRequest, message: DecodedMessage) -> tuple[bytes, int]:
        """Return the body and its flag bits. A message that left a group is compressed already."""
        columns = request.columns
        if columns is None or columns.sys_flag is None:
            return compressed_body(message.body, self._options)
        sys_flag = columns.sys_flag
        bits = sys_flag if isinstance(sys_flag, int) else int(sys_flag[0])
        return columns.body[0].as_py(), bits

    def _single(self, request: PendingRequest) -> SendRequest:
        message = next(request.messages())
        body, sys_flag = self._body(request, message)
        properties, half = message.properties, self._half_properties
        if half:
            sys_flag |= SysFlag.TRANSACTION_PREPARED
            separator = "" if not properties or properties.endswith("\x02") else "\x02"
            properties = f"{properties}{separator}{half}"
        return SendRequest(
            request.topic, body, properties=properties, timed=request.timed or bool(half),
            least_version=least_version(message.properties), sys_flag=sys_flag, flag=message.flag,
            token=request, message_id=message.property(UNIQ_KEY) or "",
        )  # fmt: skip


@dataclass(frozen=True, eq=False, kw_only=True)
class _Group(SingleMessages):
    """A `SendRequest.group`, from which the engine may take messages."""

    request: PendingRequest
    factory: RequestFactory
    in_parts = False

    def leave(self, first: int, last: int) -> SendRequest:
        return self.factory.send_request(self.request.take_part(first, last))


@dataclass(slots=True, eq=False)
class HomeQueueSelector:
    """Chooses a queue for a request that has a home queue (`routing.sharding.fallback_queue`).
    While no broker is available, an attempt also avoids the broker of the previous attempt.
    Otherwise, if a slow machine makes all brokers look bad, a dead broker gets all attempts."""

    home: MessageQueue
    last: str | None = None

    def __call__(
        self, info: TopicPublishInfo, available: Callable[[str], bool]
    ) -> MessageQueue | None:
        chosen = fallback_queue(info, self.home, available)
        if chosen is None:
            return None
        broker = info.broker_of(chosen)
        if broker == self.last and not available(broker):
            chosen = fallback_queue(info, self.home, lambda name: name != broker) or chosen
        self.last = info.broker_of(chosen)
        return chosen


def compressed_body(body: bytes, options: SinkOptions) -> tuple[bytes, int]:
    """Return the body as a single message carries it, and its MessageSysFlag bits."""
    kind = CompressionType.of_option(options.compress_type)
    return compress_body(body, kind, options.compress_level, options.compress_over_bytes)


def compressed_column(bodies: pa.Array, options: SinkOptions) -> tuple[pa.Array, Any]:
    """Compress many bodies. Return them, and their flag bits: 0 for all, or one number per body."""
    longest = int(lengths_of(bodies).max(initial=0))
    if options.compress_type == "none" or longest < options.compress_over_bytes:
        return bodies, 0
    compressed_bodies = [compressed_body(body, options) for body in bodies.to_pylist()]
    flags = np.array([int(sys_flag) for _, sys_flag in compressed_bodies], np.int64)
    return pa.array([body for body, _ in compressed_bodies], pa.large_binary()), flags
