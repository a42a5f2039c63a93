"""Checks whether a broker stored an attempt with an unknown outcome, before it is sent again.

Only requests with `verify_ids` (client ids of the first and last message) are checked. The engine
waits for their answers while the connection lives, up to `storedCheckTimeout`, because even a slow
or frozen broker answers every request that it has read. Then it asks the broker for the ids.

Some answers never come. A broker whose disk was busy for a second clears its send queue. It answers
the queued requests, but also drops the tasks that would answer finished batches (BrokerFastFailure
.cleanExpiredRequest polls the tasks of SendMessageProcessor.sendBatchMessage; seen with 5.5.0 after
a freeze). So the wait also ends after `ANSWER_LOST_S` if the broker has stored a later request.

- Stored: the broker has all ids. This counts at once.
- Not stored: the broker has no id. This counts after `storedCheckDelay`, because the request may
  wait in the send queue (200 ms, BrokerFastFailure), or its index entry may come some milliseconds
  later (more on a busy machine).
- Partly stored: a broker appends a batch as a whole (CommitLog.asyncPutMessages), but it may be
  killed in the middle (this was observed). Then it has one of the two ids, or a message without all
  of its properties (`StoredMessage.torn`). The outcome stays unknown, and the error's fact
  `partly_stored` names the broker.
- No answer within `storedCheckTimeout`: the outcome stays unknown.

The check can be wrong if the network or a starved broker delays a request for longer than
`storedCheckDelay`, if a new master lacks the message, if the index is switched off
(`messageIndexEnable`), or if a killed broker kept the first message's body and not its id.

The broker looks ids up in its index (QueryMessageProcessor.queryMessage, IndexService.buildIndex),
which it keeps as long as the log. docs/guarantees/effectively-once.md says what a crash takes from
the index. Until a delayed message is delivered, it is indexed under an internal topic.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from rocket_sink.errors import (
    AuthenticationError,
    InvalidAnswerError,
    PermissionDeniedError,
    RocketSinkError,
    SendError,
)
from rocket_sink.net import log
from rocket_sink.net.client import Call, NetworkClient
from rocket_sink.producer.engine.attempt import CheckResult, SendAttempt
from rocket_sink.producer.engine.routes import Routes
from rocket_sink.routing.retry import error_for_answer
from rocket_sink.wire.codes import ResponseCode
from rocket_sink.wire.headers import Frame
from rocket_sink.wire.properties import UNIQ_KEY
from rocket_sink.wire.requests import query_message
from rocket_sink.wire.stored import IsCopy, StoredMessage, decode_stored

_LOG: Final = log.logger(__name__)
Done = Callable[["StoredMessage | None", "SendError | None", float], None]

CLOCKS_APART_MS: Final = 86_400_000
"""Largest difference between the clocks of sender and broker; look-ups skip older index files."""
LOOK_UP_S: Final = 3.0
"""Longest wait for the answer to one look-up."""
ANSWER_LOST_S: Final = 15.0
"""Time after which an answer counts as lost. By default a broker waits up to 10 s for its disk and
its slave before it answers (DefaultMessageStore.waitForPutResult)."""
_MOST: Final = 32
"""Limit of messages per look-up (defaultQueryMaxNum), counting other ids with the same hash."""
HIDDEN_TOPICS: Final = ("SCHEDULE_TOPIC_XXXX", "rmq_sys_wheel_timer")
"""Topics in which brokers keep delayed messages: by level, by time."""
_ANSWERS: Final = (ResponseCode.SUCCESS, ResponseCode.QUERY_NOT_FOUND)
LACKS_SUB: Final = (
    "Give the user the rights Sub and Get of the topic beside Pub: docs/deploy/acl.md lists the "
    "rights that each lane and delivery needs."
)
"""The advice for a user without the right to look messages up."""
_FIRST_WAIT_S: Final = 0.005
"""Wait after a first empty look-up: an index entry usually comes 2 ms after the send's answer."""
_GROWTH: Final = 4.0
_LONGEST_WAIT_S: Final = 0.5


def topics_of(topic: str, *, timed: bool) -> tuple[str, ...]:
    """Return the topics under which a message may be indexed."""
    return (topic, *HIDDEN_TOPICS) if timed else (topic,)


def warn_of_replaced(message: StoredMessage, broker: str) -> None:
    """Log the place of a message whose properties are not UTF-8: the broker, queue and offset."""
    if message.replaced:
        _LOG.warning(
            "the message at offset %d of queue %d of topic %s on %s has properties that are not "
            "UTF-8: U+FFFD replaces their bytes here. The client that sent it (id %s) has to "
            "encode properties as UTF-8",
            message.queue_offset, message.queue_id, message.topic, broker, message.message_id,
        )  # fmt: skip


def look_up(
    client: NetworkClient,
    address: str,
    topic: str,
    message_id: str,
    done: Done,
    *,
    since_ms: int,
    deadline_s: float,
    now_s: float,
    is_copy: IsCopy | None = None,
) -> None:
    """Ask one broker for the message with this id, and call `done(message, error, now_s)` once. The
    message is None if the broker does not have the message, and `StoredMessage.torn` if the broker
    has no whole copy. Messages from before `since_ms` (ms since 1970) are not searched, because the
    caller knows that the message is younger. With `is_copy` only messages for which it is true
    count; without it, no body is read."""

    def on_answer(answer: Frame | None, error: SendError | None, at_s: float) -> None:
        message = None
        if answer is not None:
            try:
                message = _message_in(answer, message_id, is_copy)
                if message is not None:
                    warn_of_replaced(message, address)
            except SendError as refused:
                error = refused
            except RocketSinkError as broken:
                error = InvalidAnswerError(f"the answer to a look-up: {broken}")
        done(message, error, at_s)

    frame = query_message(
        topic=topic,
        key=message_id,
        max_num=_MOST,
        begin_ms=max(0, since_ms - CLOCKS_APART_MS),
        unique_key=True,
    )
    client.call(address, frame, Call(on_answer), deadline_s=deadline_s, now_s=now_s)


def _message_in(answer: Frame, message_id: str, is_copy: IsCopy | None) -> StoredMessage | None:
    if answer.code not in _ANSWERS:
        error = error_for_answer(answer.code, answer.remark)
        raise error or InvalidAnswerError(f"a look-up was answered by code {answer.code}")
    if answer.code != ResponseCode.SUCCESS:
        return None
    matches = decode_stored(
        answer.body, wanted=lambda own: own.get(UNIQ_KEY) == message_id, bodies=is_copy is not None
    )
    same = filter(is_copy, matches) if is_copy else matches
    # The newest copy: an older one may be of a topic that was deleted and made anew since.
    return min(same, key=lambda copy: (copy.torn, -copy.commit_log_offset), default=None)


@dataclass(eq=False)
class StoredCheck:
    """A check whether the broker has stored one attempt's request; `error` ended the attempt."""

    attempt: SendAttempt
    error: SendError
    next_s: float
    wait_s: float = _FIRST_WAIT_S
    since_s: float | None = None
    """Time since which every look-up has missed the same number of ids (`missing`)."""
    missing: int = 0
    outstanding: int = 0
    asked_s: float = 0.0
    failed: bool = False
    messages: dict[str, StoredMessage] = field(default_factory=dict)


@dataclass(eq=False, repr=False)
class StoredChecks:
    """The open checks of an engine, whose tick calls `step`."""

    _delay_s: float
    _timeout_s: float
    _client: NetworkClient
    _routes: Routes
    _reread: Callable[[float], bool]
    """Reads the credentials again after a refusal; gets the time of the refused request."""
    open: dict[StoredCheck, None] = field(default_factory=dict)

    def begin(self, attempt: SendAttempt) -> None:
        error = attempt.ensure_history().last_error
        assert error is not None
        check = StoredCheck(attempt, error, attempt.ended_s)
        self.open[check] = None
        self._step(check, attempt.ended_s)

    def step(self, now_s: float) -> None:
        for check in list(self.open):
            self._step(check, now_s)
        self._end_unanswered(now_s)

    def abandon(self, now_s: float) -> None:
        """End all checks when the engine stops; the outcomes stay unknown."""
        for check in list(self.open):
            self._end(check, CheckResult(check.error, decided=False), now_s)

    def _step(self, check: StoredCheck, now_s: float) -> None:
        """Ask the broker when a question is due; end the check undecided at its deadline."""
        if now_s >= check.attempt.ended_s + self._timeout_s:
            self._end(check, CheckResult(check.error, decided=False), now_s)
        elif not check.outstanding and now_s >= check.next_s:
            self._ask(check, now_s)

    def _ask(self, check: StoredCheck, now_s: float) -> None:
        attempt, request = check.attempt, check.attempt.request
        address = self._routes.addresses().get(attempt.home, attempt.address)
        questions = [
            (topic, message_id)
            for topic in topics_of(request.topic, timed=request.timed)
            for message_id in request.verify_ids
        ]
        check.outstanding, check.failed, check.asked_s = len(questions), False, now_s
        check.messages.clear()
        for topic, message_id in questions:
            look_up(
                self._client, address, topic, message_id, partial(self._take_answer, check),
                since_ms=attempt.wall_ms, deadline_s=now_s + LOOK_UP_S, now_s=now_s,
            )  # fmt: skip

    def _end_unanswered(self, now_s: float) -> None:
        """End the oldest request of each connection if its answer is lost (`ANSWER_LOST_S`)."""
        for channel in self._client.channels:
            oldest = channel.connection.oldest
            if oldest is None or oldest.sent_s is None:
                continue
            attempt, sent_s = oldest.token, oldest.sent_s
            if (
                isinstance(attempt, SendAttempt)
                and attempt.request.verify_ids
                and attempt.broker is not None
                and now_s - sent_s >= ANSWER_LOST_S
                and attempt.broker.stored_sent_s >= sent_s
            ):
                channel.connection.hasten(attempt)

    def _take_answer(
        self,
        check: StoredCheck,
        message: StoredMessage | None,
        error: SendError | None,
        now_s: float,
    ) -> None:
        check.outstanding -= 1
        if error is not None:
            check.failed = True
            if isinstance(error, PermissionDeniedError) and check in self.open:
                text = f"{check.error}; this user may not look up whether it is stored ({error})"
                refused = type(check.error)(f"{text}. {LACKS_SUB}", **check.error.facts)
                self._end(check, CheckResult(refused, decided=False), now_s)
            if isinstance(error, AuthenticationError):
                self._reread(check.asked_s)
            # The broker may have come back at another address.
            self._routes.refresh(check.attempt.request.topic, now_s)
        if message is not None and message.message_id is not None:
            check.messages[message.message_id] = message
        if not check.outstanding and check in self.open:
            self._decide(check, now_s)

    def _decide(self, check: StoredCheck, now_s: float) -> None:
        ids, messages = check.attempt.request.verify_ids, check.messages
        if all(message_id in messages and not messages[message_id].torn for message_id in ids):
            self._end(check, CheckResult(check.error, messages[ids[0]]), now_s)
            return
        missing = len(ids) - len(messages)
        if check.failed:
            check.since_s = None
        elif check.since_s is None or missing != check.missing:
            check.since_s, check.missing = now_s, missing
        since_s = check.since_s
        if since_s is not None and now_s >= since_s + self._delay_s:
            if messages:
                check.error.facts["partly_stored"] = check.attempt.home
            self._end(check, CheckResult(check.error, decided=not messages), now_s)
            return
        check.next_s = now_s + check.wait_s
        check.wait_s = min(check.wait_s * _GROWTH, _LONGEST_WAIT_S)
        if since_s is not None:
            check.next_s = min(check.next_s, since_s + self._delay_s)

    def _end(self, check: StoredCheck, result: CheckResult, now_s: float) -> None:
        del self.open[check]
        # The time of the check does not count against the request's time-out.
        check.attempt.deadline_s += now_s - check.attempt.ended_s
        check.attempt.on_end(result, None, now_s)
