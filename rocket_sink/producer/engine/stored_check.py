"""After an attempt without a known outcome: the broker is asked before anything is sent again.

Only for requests that bring `verify_ids`, those of their first and last message. Their answer is
waited for as long as the connection lives (up to `storedCheckTimeout`): a broker answers all that
it has read, and a slow or frozen one says later what became of it. When the connection is gone, or
the time is over, the broker is asked for the ids.

Some answers never come. A broker whose disk has been busy for a second clears its send queue of
requests, which it answers, and of batches that wait there for their answer to be written, stored
or refused, which it drops (BrokerFastFailure.cleanExpiredRequest polls what
SendMessageProcessor.sendBatchMessage hands to the same executor; seen with 5.5.0 after a freeze).
So the wait ends after `ANSWER_LOST_S`, too, if the broker has stored what was written no earlier.

A batch is appended to the log as one (CommitLog.asyncPutMessages), so both are there or neither,
unless a broker was killed in the middle (seen): the error's fact `partly_stored` then names it. So
too when one of them is there without all of its properties (`StoredMessage.torn`).
"There" is believed at once; "not there" only when the broker has answered so for
`storedCheckDelay`, because the request may still wait in the broker's send queue (200 ms,
BrokerFastFailure) or its index entry be on its way (some milliseconds; more on a machine without a
free processor). No word within `storedCheckTimeout`: the outcome stays unknown.

Not excluded: a request that the network or a starved broker holds back for longer than that; a
master that changed and lost the message; an index that is switched off (`messageIndexEnable`); a
first message of which a killed broker kept the body and not the id.

A look-up goes by the client id that the message was sent with.
Source: QueryMessageProcessor.queryMessage with `_UNIQUE_KEY_QUERY`, IndexService.buildIndex. The
index follows the log by some milliseconds and is kept as long as the log. A broker that crashed
drops the newest file of it (IndexService.load) and fills it again from the log files that it
recovers, or from all with `messageIndexSafe=true`. A message that is delivered later is indexed
under the topic in which it waits, until it is delivered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple

from rocket_sink.errors import (
    AuthenticationError,
    InvalidAnswerError,
    RocketSinkError,
    SendError,
)
from rocket_sink.net.client import Call, NetworkClient
from rocket_sink.options import SinkOptions
from rocket_sink.producer.engine.attempt import SendAttempt
from rocket_sink.producer.engine.routes import Routes
from rocket_sink.routing.retry import error_for_answer
from rocket_sink.wire.codes import ResponseCode
from rocket_sink.wire.frame import Frame
from rocket_sink.wire.properties import UNIQ_KEY
from rocket_sink.wire.requests import query_message
from rocket_sink.wire.responses import decode_query_answer
from rocket_sink.wire.stored import StoredMessage

Done = Callable[["StoredMessage | None", "SendError | None", float], None]

CLOCKS_APART_MS: Final = 86_400_000
"""Clocks of sender and broker may differ by so much; older index files are not looked into."""
LOOK_UP_S: Final = 3.0
"""Longest wait for the answer to one question."""
ANSWER_LOST_S: Final = 15.0
"""A broker holds the answer of a stored message back for up to 10 s, by default, for the sake of
its disk and its slave (DefaultMessageStore.waitForPutResult)."""
_MOST: Final = 32
"""The broker's defaultQueryMaxNum: index entries of other messages may have the same hash."""
_HIDDEN: Final = ("SCHEDULE_TOPIC_XXXX", "rmq_sys_wheel_timer")
_ANSWERS: Final = (ResponseCode.SUCCESS, ResponseCode.QUERY_NOT_FOUND)
_FIRST_WAIT_S: Final = 0.005
"""An index entry is there some 2 ms after the answer would have been."""
_GROWTH: Final = 4.0
_LONGEST_WAIT_S: Final = 0.5


def topics_of(topic: str, *, timed: bool) -> tuple[str, ...]:
    """Return the topics under which a message may be indexed."""
    return (topic, *_HIDDEN) if timed else (topic,)


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
) -> None:
    """Ask one broker for one id; `done(message, error, now_s)` is called once.

    The message comes without its body, which is not inflated. It is a torn one
    (`StoredMessage.torn`) only if the broker has no whole one.

    Args:
        since_ms: the message was not stored before this time (ms since 1970).
    """

    def ended(answer: Frame | None, error: SendError | None, at_s: float) -> None:
        message = None
        if answer is not None:
            try:
                message = _found(answer, message_id)
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
    client.call(address, frame, Call(ended), deadline_s=deadline_s, now_s=now_s)


def _found(answer: Frame, message_id: str) -> StoredMessage | None:
    if answer.code not in _ANSWERS:
        error = error_for_answer(answer.code, answer.remark)
        raise error or InvalidAnswerError(f"a look-up was answered by code {answer.code}")
    if answer.code != ResponseCode.SUCCESS:
        return None
    matches = decode_query_answer(
        answer, wanted=lambda properties: properties.get(UNIQ_KEY) == message_id, bodies=False
    )
    return min(matches, key=lambda message: message.torn, default=None)


class CheckResult(NamedTuple):
    """The end of a check.

    Attributes:
        error: how the attempt ended.
        found: the stored message, the request's first one.
        decided: False: no broker could say whether it is stored.
    """

    error: SendError
    found: StoredMessage | None = None
    decided: bool = True


@dataclass(eq=False)
class StoredCheck:
    """The question whether one attempt's request is stored."""

    attempt: SendAttempt
    error: SendError
    opened_s: float
    next_s: float
    wait_s: float = _FIRST_WAIT_S
    since_s: float | None = None
    missing: int = 0
    """Ids that are missing in all answers since `since_s`."""
    outstanding: int = 0
    asked_s: float = 0.0
    failed: bool = False
    found: dict[str, StoredMessage] = field(default_factory=dict)


class StoredChecks:
    """The open checks of an engine, stepped by its tick.

    Args:
        on_result: called with each check's end.
        reread: reads credentials again that were refused since the given time.
    """

    def __init__(
        self,
        options: SinkOptions,
        client: NetworkClient,
        routes: Routes,
        on_result: Callable[[SendAttempt, CheckResult, float], None],
        reread: Callable[[float], bool],
    ) -> None:
        self._reread = reread
        self._client = client
        self._routes = routes
        self._on_result = on_result
        self._timeout_s = options.stored_check_timeout_ms / 1000
        self._delay_s = options.stored_check_delay_ms / 1000
        self.open: dict[StoredCheck, None] = {}

    def begin(self, attempt: SendAttempt, error: SendError, now_s: float) -> None:
        """Find out what became of an attempt that ended with this error."""
        check = StoredCheck(attempt, error, now_s, now_s)
        self.open[check] = None
        self._step(check, now_s)

    def step(self, now_s: float) -> None:
        for check in list(self.open):
            self._step(check, now_s)
        self._end_unanswered(now_s)

    def abandon(self, now_s: float) -> None:
        """End all checks when the engine stops: open outcomes stay unknown."""
        for check in list(self.open):
            self._end(check, CheckResult(check.error, decided=False), now_s)

    def _step(self, check: StoredCheck, now_s: float) -> None:
        """Ask (again) when it is time, and end without a decision when it is over."""
        if now_s >= check.opened_s + self._timeout_s:
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
        check.found.clear()
        for topic, message_id in questions:
            look_up(
                self._client, address, topic, message_id, partial(self._answered, check),
                since_ms=attempt.wall_ms, deadline_s=now_s + LOOK_UP_S, now_s=now_s,
            )  # fmt: skip

    def _end_unanswered(self, now_s: float) -> None:
        """Give up the oldest request of a connection as `ANSWER_LOST_S` says."""
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

    def _answered(
        self,
        check: StoredCheck,
        message: StoredMessage | None,
        error: SendError | None,
        now_s: float,
    ) -> None:
        check.outstanding -= 1
        if error is not None:
            # The broker may be back at another address.
            check.failed = True
            if isinstance(error, AuthenticationError):
                self._reread(check.asked_s)
            self._routes.refresh(check.attempt.request.topic, now_s)
        if message is not None and message.message_id is not None:
            check.found[message.message_id] = message
        if not check.outstanding and check in self.open:
            self._decide(check, now_s)

    def _decide(self, check: StoredCheck, now_s: float) -> None:
        ids, messages = check.attempt.request.verify_ids, check.found
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
        # The time of the check is not the request's.
        check.attempt.deadline_s += now_s - check.opened_s
        self._on_result(check.attempt, result, now_s)
