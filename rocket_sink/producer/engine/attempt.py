"""The values of the send engine: requests, attempts and completions."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from rocket_sink.errors import Outcome, SendError
from rocket_sink.message import MessageQueue, SendResult

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from rocket_sink.net.channel import Channel, Result
    from rocket_sink.producer.engine.brokers import Broker, SendTarget
    from rocket_sink.routing.topic_publish_info import TopicPublishInfo
    from rocket_sink.wire.headers import Frame
    from rocket_sink.wire.send_header import SendTemplate
    from rocket_sink.wire.stored import StoredMessage

    Body = Any
    """bytes, another buffer (pyarrow.Buffer, memoryview), or a list or tuple of buffers."""
    Chooser = Callable[[TopicPublishInfo, Callable[[str], bool]], MessageQueue | None]


class FrameGroup(Protocol):
    """Messages of one topic, each in its own frame; immutable until the group is complete."""

    @property
    def in_parts(self) -> bool:
        """If True, answered messages complete while others still wait, so the group has several
        Completions. If False, the group has one Completion."""

    def __len__(self) -> int: ...

    @property
    def body_bytes(self) -> int:
        """Total bytes of all bodies."""

    def bytes_of(self, indices: npt.NDArray[np.int64]) -> int:
        """Return the total bytes of the bodies with these indices."""

    def frames(
        self, template: SendTemplate, *, first_opaque: int, queue_id: int, born_ms: int,
        broker_name: str,
    ) -> Any:  # fmt: skip
        """Return all frames in one buffer, in order; their opaque ids are consecutive."""

    def leave(self, first: int, last: int) -> SendRequest:
        """Return the messages `first` to `last` (exclusive) as a request of their own; several
        messages become a new group. The engine calls this at most once for each message."""


@dataclass(frozen=True, eq=False)
class StoredFrames:
    """Messages of a group that brokers have acknowledged, as columns.

    Attributes:
        indices: positions in the group, int64, in the order of the answers.
        queue_offsets: int64.
        offset_message_ids: the brokers' ids, ASCII bytes.
        transaction_ids, recall_handles: ASCII bytes; None if an answer lacks one.
        rtt_ms: time from write to answer, float64.
    """

    indices: npt.NDArray[np.int64]
    queue_offsets: npt.NDArray[np.int64]
    offset_message_ids: npt.NDArray[np.bytes_]
    transaction_ids: npt.NDArray[np.bytes_] | None
    recall_handles: npt.NDArray[np.bytes_] | None
    rtt_ms: npt.NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.indices)


@dataclass(slots=True, eq=False)
class SendRequest:
    """A request to send: a message, or a batch or group of messages of one topic.

    Args:
        topic: the topic, with its namespace if there is one.
        body: the compressed or batch-encoded body, which must not change until the request is
            complete. Buffers of a sequence are written without being copied together.
        message_count: messages in the request; 1 without `batch` and `group`.
        batch: the body is in the batch form (SEND_BATCH_MESSAGE).
        properties: the request's wire property string; messages of a batch have theirs in the body.
        queue: the only queue for all attempts.
        choose: gets the route, and a function that says whether a broker is available. Returns a
            queue for an attempt, or None if no queue is available. Without `queue` and `choose` the
            engine's selector chooses.
        ordered: one request in flight per queue, in the order of `submit`. With `queue` the request
            waits for that queue up to `orderWaitMs` (strict). With `choose` each attempt may take
            another queue (best effort).
        timed: the message is delayed, timed or transactional (never a batch).
        least_version: MQVersion ordinal of the oldest broker that may get the request, because
            older brokers would ignore its special properties; 0: any broker.
        lacks_keys: the batch has a message without keys, so no compaction topic may get it.
        oneway: the request is complete, without a result, as soon as it is written.
        reply: a reply (SEND_REPLY_MESSAGE_V2), which the broker pushes to the requester.
        sys_flag: MessageSysFlag bits (compression, transaction).
        flag: the user's 32-bit flag.
        token: any value of the caller; the Completion has it.
        message_id: the client id of the first message (UNIQ_KEY); for the SendResult.
        born_ms: birth time, milliseconds since 1970; 0: now.
        since_s: start of `timeout_s` (engine's clock); 0: the moment when the engine takes the
            request. Then a wait in `submit` does not count, a wait in an ordered queue does.
        timeout_s: total time for all attempts; None: `orderWaitMs` if `ordered`, else
            `sendMsgTimeout`.
        attempts: limit of attempts; None: 1 + `retryTimesWhenSendFailed`.
        retry_while_busy: an attempt does not count for the limit if the broker was busy, or no
            broker could be reached. Else one bad second could cost a bulk sender thousands of
            messages.
        group: many single messages, each in its own frame, instead of `body`
            (`engine.frame_group`); never with `ordered`, `batch` or `reply`.
        verify_ids: client ids of the first and the last message. With them the engine waits for an
            answer while the connection lives. If the outcome is unknown, the engine asks the broker
            for the ids before it sends again (`engine.stored_check`).
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
    retry_while_busy: bool = False
    least_version: int = 0
    lacks_keys: bool = False
    oneway: bool = False
    reply: bool = False
    verify_ids: tuple[str, ...] = ()
    group: FrameGroup | None = None


@dataclass(slots=True)
class AttemptRecord:
    """An attempt of a request, as the ledger records it.

    A record with `wire_bytes` 0 and no address sums up consecutive attempts that reached no broker,
    for example while the broker of a strict queue is down. Its `attempt` is the number of the last
    attempt, and its `queue_wait_ms` is the whole wait.

    Attributes:
        queue_offset: -1 if the broker named none.
        started_ms: wall clock, milliseconds since 1970.
        queue_wait_ms: from submit, or the end of the previous attempt, to the connection's queue.
        connect_ms: time spent on connecting; 0 if the connection existed.
        rtt_ms: from the last written byte to the answer, or to the end of the wait for the answer.
        offset_message_id: the broker's id of the (first) message.
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


@dataclass(slots=True)
class Completion:
    """The final result of a request, or of some messages of a group with `in_parts`.

    Attributes:
        outcome: UNKNOWN if no attempt was acknowledged, and at least one may have been stored.
        result: set if `outcome.delivered`, else `error` is set. With `onDegraded=fail` a degraded
            send has a DegradedError instead, whose facts contain the result.
        maybe_duplicate: an attempt's outcome is unknown, so the messages may be stored more than
            once, or be stored although `outcome` is not delivered.
        found_stored: no answer came, but the broker found the messages by `SendRequest.verify_ids`.
        stored: the acknowledged messages of a group. `result` is the result of one of them.
    """

    token: Any
    outcome: Outcome
    result: SendResult | None
    error: SendError | None
    attempts: list[AttemptRecord] = field(default_factory=list)
    maybe_duplicate: bool = False
    found_stored: bool = False
    stored: StoredFrames | None = None


class Wait(enum.Enum):
    """The event that an attempt waits for before it is sent."""

    DELAY = "the end of its delay"
    ROUTE = "the end of a look-up of its topic"
    TURN = "the end of the requests before it in its ordered queue"
    BROKER = "room at a busy broker"
    VERSION = "its version"
    POLICY = "whether the topic wants keys"
    VERIFY = "the end of the check whether the broker stored it"


@dataclass(slots=True, eq=False)
class AttemptHistory:
    """The state that all attempts of a request share; the first failure creates it."""

    records: list[AttemptRecord] = field(default_factory=list)
    waited: AttemptRecord | None = None
    """The last record, if it sums up attempts that reached no broker (`AttemptRecord`)."""
    earlier: list[type[Exception]] = field(default_factory=list)
    last_broker: str | None = None
    last_error: SendError | None = None
    unknown: SendError | None = None
    """The first error that leaves open whether the message is stored."""
    degraded: SendResult | None = None
    """The first result of an attempt that was stored less durably than asked for."""


class CheckResult(NamedTuple):
    """The result of `engine.stored_check`, which finds out whether an attempt was stored.

    Attributes:
        error: the error with which the attempt ended before the check.
        message: the request's first message as the broker has it; None if it was not found.
        decided: False if it is still unknown whether the request is stored.
    """

    error: SendError
    message: StoredMessage | None = None
    decided: bool = True


End: TypeAlias = "tuple[SendAttempt, Result | CheckResult, float | None, float]"
"""The end of an attempt or of a group's messages: the attempt, the result, the time at which the
last byte was written, and the time of the end."""


@dataclass(slots=True, eq=False, repr=False)
class SendAttempt:
    """An attempt to send a request. Its connection passes answers and errors to `on_end`, and the
    engine handles these later. Each retry is a new attempt, so no attempt uses two connections."""

    ends: deque[End]
    request: SendRequest
    body: Sequence[Any]
    body_bytes: int
    strict: bool
    """Whether the request is in strict order (option `ordering`)."""
    ready_s: float
    deadline_s: float
    number: int = 1
    counted: int = 1
    """Attempts that count for the limit. For example, one ended by GO_AWAY does not count."""
    pinned: MessageQueue | None = None
    """The previous attempt's queue, if this attempt has to use the same queue."""
    target: SendTarget | None = None
    broker: Broker | None = None
    """The broker whose in-flight count includes this attempt."""
    channel: Channel | None = None
    hooked: Frame | None = None
    """The request as the RPC hooks changed it; None without hooks."""
    handed_s: float = 0.0
    sent_s: float | None = None
    """The time at which the last byte was written; None if it was not, or not for this end."""
    ended_s: float = 0.0
    """The time of the attempt's end, or of the latest answer to a group."""
    wall_ms: int = 0
    wire_bytes: int = 0
    done: bool = False
    turn: MessageQueue | None = None
    """The ordered queue in whose line (`OrderedQueues`) this attempt is."""
    waits: Wait | None = None
    history: AttemptHistory | None = None
    requests: int = 1
    """Requests that count as in flight at the broker; a batch at a proxy: `Broker.batch_places`."""

    window_requests = 1
    """The number of requests that the engine's `Window` counts for this attempt."""

    def next_attempt(self, now_s: float, *, counts: bool) -> SendAttempt:
        """Mark this attempt as done, and return the request's next attempt."""
        self.done = True
        return type(self)(
            self.ends, self.request, self.body, self.body_bytes, self.strict, now_s,
            self.deadline_s, self.number + 1, self.counted + counts,
            turn=self.turn, history=self.history,
        )  # fmt: skip

    @property
    def home(self) -> str:
        """The name of the chosen broker; empty before the choice."""
        return "" if self.target is None else self.target.home

    @property
    def address(self) -> str:
        return "" if self.target is None else self.target.address

    @property
    def rtt_s(self) -> float:
        """The time from the last written byte (else from `handed_s`) to the end."""
        return self.ended_s - (self.sent_s or self.handed_s or self.ended_s)

    def release(self) -> None:
        """Stop counting this attempt as in flight at its broker."""
        broker, self.broker = self.broker, None
        if broker is not None:
            broker.in_flight -= self.requests

    def room_at(self, broker: Broker, reserved: int = 0) -> int:
        """Return how many of `self.requests` the broker has room for after `reserved` others. A
        batch needs room for the whole."""
        if self.request.batch:
            self.requests = broker.batch_places(self.request.message_count)
        room = broker.room_for(self.requests, reserved)
        return 0 if self.request.batch and room < self.requests else room

    def ensure_history(self) -> AttemptHistory:
        """Return the history; create it on the first call."""
        if self.history is None:
            self.history = AttemptHistory()
        return self.history

    def on_end(self, result: Result | CheckResult, sent_s: float | None, now_s: float) -> None:
        self.ends.append((self, result, sent_s, now_s))


def content_of(request: SendRequest) -> tuple[Sequence[Any], int]:
    """Return the request's body as buffers (none of a group), and the bytes of all bodies."""
    if request.group is not None:
        return (), request.group.body_bytes
    return buffers_of(request.body)


def buffers_of(body: Any) -> tuple[Sequence[Any], int]:
    """Return the body as a sequence of buffers (`len` gives bytes), and their total bytes."""
    if type(body) is bytes:
        return (body,), len(body)
    parts = body if isinstance(body, (list, tuple)) else (body,)
    buffers = [part if type(part) is bytes else memoryview(part).cast("B") for part in parts]
    return buffers, sum(map(len, buffers))
