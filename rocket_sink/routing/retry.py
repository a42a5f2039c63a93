"""The error of a response, and the decision after a failed attempt, for all send modes.

A response code has an error class, whose attributes say how such a failure is retried.
`retry_after` combines them with the deadline, the number of attempts and the ordering. tenacity
gives the longest backoff, and `rng` draws a time: tenacity's own jitter would use the global random
generator."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final

from tenacity.wait import wait_exponential

from rocket_sink.errors import (
    AuthenticationError,
    BatchTooLargeError,
    BrokerError,
    BrokerTooOldError,
    ConnectError,
    GoAwayError,
    InvalidQueueError,
    Isolate,
    LocalResourcesError,
    MessageIllegalError,
    NameServerUnavailableError,
    NoRouteError,
    NotStoredError,
    Outcome,
    PermissionDeniedError,
    QueueMovedError,
    ReplyNotTakenError,
    RequesterGoneError,
    RequestTimeoutError,
    SendError,
    ServiceNotAvailableError,
    TopicNotFoundError,
)
from rocket_sink.options import SinkOptions
from rocket_sink.routing.selectors import Rng
from rocket_sink.text import clean
from rocket_sink.wire.responses import SEND_STATUS

ATTEMPT_FLOOR_S: Final = 0.5
"""The shortest timeout of an attempt. A shorter one would mistake a broker's garbage collection for
a failure, and the retry may store the message twice."""

_SLAVE_NOT_AVAILABLE: Final = 11
_ONCE: Final = (TopicNotFoundError, InvalidQueueError, RequesterGoneError)
"""Errors that are retried only once: with a fresh route, or at another broker."""
_NO_CHOICE: Final = (NameServerUnavailableError, NoRouteError, LocalResourcesError)
"""Errors after which the retry has to wait, because there is no broker to choose."""
_STALE_ROUTE: Final = (InvalidQueueError, NoRouteError, QueueMovedError, TopicNotFoundError)
"""Errors that say that the route lacks the queue or its broker's master, or is wrong."""


@dataclass(frozen=True, slots=True)
class Retry:
    """The next attempt of a request.

    Attributes:
        delay_s: the wait before the attempt.
        same_queue: the attempt has to use the queue of the failed one.
        avoids_broker: the attempt should go to another broker if there is one.
        awaits_route: the attempt waits for a look-up that is under way or planned, because the
            known route leads to a broker that does not take the message.
        counts: the failed attempt counts for `retryTimesWhenSendFailed`.
        isolates: what the failure says about the broker.
    """

    delay_s: float = 0.0
    same_queue: bool = False
    avoids_broker: bool = False
    awaits_route: bool = False
    counts: bool = True
    isolates: Isolate = Isolate.NOTHING


def attempt_deadline(
    now_s: float,
    deadline_s: float,
    attempts_left: int,
    cap_s: float | None = None,
    *,
    strict: bool = False,
) -> float:
    """Return the deadline of the attempt that starts now. The attempt gets `cap_s` (Java:
    sendMsgMaxTimeoutPerRequest), or else an equal share of the remaining time, at least
    ATTEMPT_FLOOR_S. The last of `attempts_left` attempts gets all remaining time. With `strict`
    order every attempt gets all: no message may overtake an unanswered one."""
    if attempts_left <= 1 or strict:
        return deadline_s
    if cap_s is None:
        cap_s = max((deadline_s - now_s) / attempts_left, ATTEMPT_FLOOR_S)
    return min(now_s + cap_s, deadline_s)


def backoff_s(options: SinkOptions, attempt: int, rng: Rng) -> float:
    """Return the wait after attempt n (n >= 1): a random time in the upper half of the window."""
    window = wait_exponential(
        multiplier=options.retry_backoff_ms / 1000, max=options.retry_backoff_max_ms / 1000
    )
    state: Any = SimpleNamespace(attempt_number=attempt)
    return window(state) * (0.5 + 0.5 * rng.random())


def retry_after(
    error: SendError,
    *,
    attempt: int,
    max_attempts: int,
    remaining_s: float,
    strict: bool = False,
    fixed_queue: bool = False,
    retry_while_busy: bool = False,
    alternatives: bool = True,
    earlier: Collection[type[Exception]] = (),
    options: SinkOptions,
    rng: Rng,
) -> Retry | None:
    """Return the next attempt after a failed one; None: the request ends with its last error.

    With `strict` order, a request that timed out on a live connection is never sent again: the
    broker may still store it, then behind later messages. After other retriable errors it is sent
    to the same queue again.

    Args:
        attempt: the number of the failed attempt, from 1, among those that count.
        max_attempts: 1 + retryTimesWhenSendFailed. With strict order, messages that are certainly
            not stored are retried until the deadline.
        remaining_s: the time until the request's deadline.
        fixed_queue: the request must go to its queue, as with strict order.
        retry_while_busy: attempts with a busy answer, or without a broker, do not count.
        alternatives: another broker is available; otherwise the retry waits.
        earlier: classes of the request's earlier errors. Only the first GO_AWAY leads to a new
            connection, and only the first missing topic or queue to a fresh route.
    """
    code, is_repeated = getattr(error, "response_code", None), type(error) in earlier
    is_allowed = not code or code in options.retry_response_codes
    if error.fatal or not error.retriable or not is_allowed or remaining_s <= 0:
        return None
    if isinstance(error, GoAwayError) and not is_repeated:
        return Retry(same_queue=True, counts=False)
    stays = fixed_queue or strict
    # An error without a code is not from a broker: the route lacks the queue, perhaps because its
    # master is down. Such an error may be retried more than once.
    is_final = code and (
        (stays and isinstance(error, InvalidQueueError))
        or (is_repeated and isinstance(error, _ONCE))
    )
    if is_final or (stays and isinstance(error, BrokerTooOldError)):
        return None
    may_be_stored = error.outcome is Outcome.UNKNOWN
    if strict and may_be_stored and isinstance(error, RequestTimeoutError):
        return None
    waits, counts = attempt, True
    if retry_while_busy and max_attempts > 1:
        costs_only_time = error.backs_off or isinstance(error, (ConnectError, *_NO_CHOICE))
        counts = not costs_only_time
        waits += 0 if counts else sum(error_class is type(error) for error_class in earlier)
    is_never_last = not counts or (strict and not may_be_stored)
    if attempt >= max_attempts and not is_never_last:
        return None
    delay_s = 0.0
    if stays or not alternatives or error.backs_off or isinstance(error, _NO_CHOICE):
        # Leave half of the remaining time for the attempt itself.
        delay_s = min(backoff_s(options, waits, rng), remaining_s / 2)
    isolates = Isolate.BROKER if isinstance(error, GoAwayError) else error.isolates
    return Retry(
        delay_s,
        same_queue=stays,
        avoids_broker=not stays and (isolates is not Isolate.NOTHING or error.avoids_broker),
        awaits_route=isinstance(error, _STALE_ROUTE)
        or (delay_s > 0 and isinstance(error, ConnectError)),
        counts=counts,
        isolates=isolates,
    )


def retry_degraded(
    response_code: int,
    *,
    attempt: int,
    max_attempts: int,
    remaining_s: float,
    stays: bool = False,
    options: SinkOptions,
) -> Retry | None:
    """Return the next attempt after FLUSH_DISK_TIMEOUT (10), SLAVE_NOT_AVAILABLE (11) or
    FLUSH_SLAVE_TIMEOUT (12); None accepts the result. A retry stores the message twice, so it
    happens only with `onDegraded=retry`. `stays` keeps the retry on the same queue."""
    # A retry would meet the same missing replica; RocketMQ's documentation advises against it.
    wanted = options.on_degraded == "retry" and response_code != _SLAVE_NOT_AVAILABLE
    if not wanted or attempt >= max_attempts or remaining_s <= 0:
        return None
    return Retry(same_queue=stays, avoids_broker=not stays)


REMARK_MAX_CHARACTERS: Final = 1024


def _leaves(root: type[SendError]) -> Iterator[type[SendError]]:
    yield root
    for child in root.__subclasses__():
        yield from _leaves(child)


ERROR_OF_CODE: Final[dict[int, type[SendError]]] = {
    code: error for error in _leaves(SendError) for code in error.response_codes
}
"""{response code: error class}, unless REMARKS has a more specific class."""

_AUTHENTICATION_16: Final = (
    r"authenticat|authoriz|signature|credential|\buser(name)?\b|datetime is null"
    r"|is not support\b|\bacl\b"
)
_WRONG_TYPE: Final = "TopicMessageType validate failed"
"""DefaultTopicMessageTypeValidator of RocketMQ's proxy; brokers do not compare types."""

_TOPIC_TEXT: Final = r"the specified topic (is blank|contains illegal|is longer)"

REMARKS: Final[tuple[tuple[int, re.Pattern[str], type[SendError]], ...]] = tuple(
    (code, re.compile(pattern, re.IGNORECASE), error)
    for code, pattern, error in (
        # ACL 1.0 sends code 1 and the exception's text, ACL 2.0 sends code 16 (NO_PERMISSION). An
        # AuthenticationError is fatal; a missing right is not, so its pattern comes first.
        (1, r"AclException: (No (default )?permission for|Need admin permission)",
         PermissionDeniedError),
        (1, r"AclException|check signature failed|no acl config|no accessKey", AuthenticationError),
        # The order matters: a forbidden topic may be named "user" or "acl".
        (16, r"\bis forbidden|has no permission to access", PermissionDeniedError),
        (16, _AUTHENTICATION_16, AuthenticationError),
        (1, r"create mapped file failed", NotStoredError),
        (1, r"timer message is under flow control", NotStoredError),
        (1, r"accurate timer message is not enabled", NotStoredError),
        (1, r"LMQ_CONSUME_QUEUE_NUM_EXCEEDED", NotStoredError),
        # A broker sends the first text before startAcceptSendRequestTimeStamp; a slave without a
        # master sends the second.
        (1, r"broker unable to service, until|no master available along with",
         ServiceNotAvailableError),
        # The broker's encoder throws this before the batch is appended; DLedger's says "message
        # size". A single message that is too large gets MESSAGE_ILLEGAL instead.
        (1, r"message (body )?size exceeded", BatchTooLargeError),
        (1, r"size of messageExtBatch exceeded", MessageIllegalError),
        # 4.x answers with SYSTEM_ERROR where 5.x has INVALID_PARAMETER.
        (1, r"request queueId\[-?\d+\] is illegal", InvalidQueueError),
        (1, _TOPIC_TEXT, MessageIllegalError),
        (29, _TOPIC_TEXT, MessageIllegalError),
        (1, r"^topic\[[^\]]*\] not exist", TopicNotFoundError),
        # ReplyMessageProcessor.pushReplyMessage: the requester is gone, or at another broker.
        (1, r"^push reply message fail, channel of .* not found", RequesterGoneError),
        (1, r"^push reply message to .*fail\.", ReplyNotTakenError),
    )
)  # fmt: skip
"""(response code, pattern of the remark, error class). The first match counts."""


def error_for_answer(
    response_code: int, remark: str | None = None, **facts: Any
) -> SendError | None:
    """Return the error of an answer, a BrokerError by default; None if the message is stored.
    `facts` (topic, broker_name, broker_address, ...) become attributes of the error."""
    if response_code in SEND_STATUS:
        return None
    cleaned = clean(remark or "", REMARK_MAX_CHARACTERS).strip()
    where = facts.get("broker_name") or facts.get("broker_address") or "the broker"
    error = ERROR_OF_CODE.get(response_code, BrokerError)
    for code, pattern, more_specific in REMARKS:
        if code == response_code and pattern.search(remark or ""):
            error = more_specific
            break
    text = f"{where} answered {response_code}"
    if cleaned:
        text += f": {cleaned}"
    if error is AuthenticationError:
        text += ". Look at the options accessKey and secretKey"
    if cleaned.startswith(_WRONG_TYPE):
        text += ". A proxy takes only messages of the topic's message.type: docs/deploy/proxy.md"
    return error(text, response_code=response_code, remark=cleaned, **facts)
