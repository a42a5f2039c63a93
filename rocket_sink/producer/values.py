"""What goes into the send engine and what comes out of it: values only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rocket_sink.errors import Outcome, SendError
from rocket_sink.message import MessageQueue, SendResult

if TYPE_CHECKING:
    from rocket_sink.routing.publish import PublishInfo

    Body = Any
    """bytes, or any object with the buffer protocol (pyarrow.Buffer, memoryview), or a list or
    tuple of them."""
    Chooser = Callable[[PublishInfo, Callable[[str], bool]], MessageQueue | None]


@dataclass(slots=True, eq=False)
class SendRequest:
    """One request to send: a message, or a batch of messages of one topic.

    Args:
        topic: the topic, with its namespace if there is one.
        body: the request's body, already compressed or batch-encoded; a sequence of buffers is
            written as it is, without being copied together. It must not change until the
            request is completed.
        message_count: messages in the body (1 unless `batch`).
        batch: the body is in the batch form (SEND_BATCH_MESSAGE).
        properties: the wire property string (of a batch: that of the request, often empty).
        queue: send to this queue only; every attempt goes there.
        choose: picks the queue anew for each attempt; it gets the route and a predicate that
            says whether a broker is available now. None returned: no queue will do at present.
            With neither `queue` nor `choose` the engine spreads requests by its own selector.
        ordered: one request in flight per queue, in the order of `submit`. With `queue` it waits
            for that queue up to `orderWaitMs` (strict); with `choose` it may move between
            attempts (best effort).
        timed: delayed, timed or transactional; refused in a batch.
        least_version: the oldest broker that honours it (MQVersion ordinal); 0: any. An older one
            is not sent the message, for it would ignore what the message asks for.
        reply: the reply to a request (SEND_REPLY_MESSAGE_V2), which the broker pushes.
        sys_flag: MessageSysFlag bits (compression, transaction).
        flag: the user's 32-bit flag.
        token: yours; comes back in the Completion.
        message_id: the client id of the first message (UNIQ_KEY); for the SendResult.
        born_ms: birth time, milliseconds since 1970; 0: now.
        since_s: when its time began (the engine's clock); 0: when the engine takes it.
        timeout_s: total time for all attempts; None: the options' `sendMsgTimeout`, or
            `orderWaitMs` for strict order. It starts when the request first may be written:
            the wait behind others of an ordered queue counts, the wait in `submit` does not.
        attempts: most attempts; None: 1 + `retryTimesWhenSendFailed`.
        patient: answers of busy brokers, and having none to ask, do not use up attempts, only
            time: for bulk senders, who would lose thousands of messages to a bad second.
        proof: client ids of the first and the last message. With them an attempt is not given up
            while its connection lives, and when its outcome is unknown it is not repeated before
            its broker was asked for them (`producer.inquiry`).
    """

    topic: str
    body: Body
    message_count: int = 1
    batch: bool = False
    properties: str = ""
    queue: MessageQueue | None = None
    choose: Chooser | None = None
    ordered: bool = False
    timed: bool = False
    sys_flag: int = 0
    flag: int = 0
    token: Any = None
    message_id: str = ""
    born_ms: int = 0
    since_s: float = 0.0
    timeout_s: float | None = None
    attempts: int | None = None
    patient: bool = False
    least_version: int = 0
    reply: bool = False
    proof: tuple[str, ...] = ()


@dataclass(slots=True)
class Attempt:
    """One attempt of a request, as the ledger records it.

    Durations are milliseconds; `started_ms` is wall clock, milliseconds since 1970.
    `queue_wait_ms` is from submit (or from the end of the attempt before) to the hand-over to
    the connection, `connect_ms` the part of it spent on connecting, `rtt_ms` from the last byte
    handed to the kernel to the answer (or to the end of the wait). `queue_offset` is -1 when the
    broker named none.
    """

    attempt: int
    topic: str
    broker_name: str
    broker_address: str
    queue_id: int
    queue_offset: int
    started_ms: int
    queue_wait_ms: float
    connect_ms: float
    rtt_ms: float
    message_count: int
    body_bytes: int
    wire_bytes: int
    outcome: Outcome
    response_code: int | None = None
    error_code: str | None = None
    remark: str | None = None
    message_id: str = ""
    offset_message_id: str = ""
    """The broker's id of the (first) message."""


@dataclass(slots=True)
class Completion:
    """The end of one request: exactly one per `submit`.

    `result` is set when the outcome is delivered (`outcome.delivered`), else `error`; with
    `onDegraded=fail` a degraded one has a DegradedError, and the result is a fact of that.
    `maybe_duplicate`: some attempt's outcome is unknown, so that the messages may be stored more
    than once (or, when the outcome is not delivered, may be stored although nobody said so).
    `outcome` is the request's as a whole: UNKNOWN as soon as one attempt's is unknown and none
    was acknowledged. `found_stored`: no answer said so, but the broker found the messages by their
    ids (`SendRequest.proof`); the result is made from what it found.
    """

    token: Any
    outcome: Outcome
    result: SendResult | None
    error: SendError | None
    attempts: list[Attempt] = field(default_factory=list)
    maybe_duplicate: bool = False
    found_stored: bool = False


@dataclass(frozen=True, slots=True)
class BrokerHealth:
    """What a producer knows of one broker at one moment.

    Attributes:
        available: it is not isolated; `available_in_ms` tells for how long it still is.
        reachable: something answered there last, or a probe has since.
        suspect: a request waits there for longer than is usual; no new ones go there while
            another broker will do.
        latency_ms: smoothed write-to-answer; 0 when nothing was answered yet.
        in_flight: requests sent there and not answered.
    """

    broker_name: str
    available: bool
    available_in_ms: float
    reachable: bool
    suspect: bool
    latency_ms: float
    in_flight: int
