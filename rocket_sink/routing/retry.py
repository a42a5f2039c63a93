"""What to do after a failed attempt: one pure table for sync and async, ordered and not.

The table is the error classes' retry facts; what is here is how they combine with the deadline,
the number of attempts and the ordering. tenacity's wait classes say how long the busy are left
alone. Its own jittered waits draw from the process-wide generator, which a pure function cannot
do and a test cannot fix; so a tenacity wait gives the window and `rng` the place in it.
"""

from __future__ import annotations

import enum
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Final, cast

from tenacity import RetryCallState
from tenacity.wait import wait_base, wait_exponential

from rocket_sink.errors import (
    BrokerTooOldError,
    ConnectError,
    ConnectionLostError,
    GoAwayError,
    InvalidQueueError,
    Isolate,
    LocalResourcesError,
    MessageError,
    NameServerUnavailableError,
    NoRouteError,
    Outcome,
    RequestTimeoutError,
    SendError,
    TopicNotFoundError,
    UnwrittenError,
)
from rocket_sink.options import SinkOptions
from rocket_sink.routing.selectors import Rng

ATTEMPT_FLOOR_S: Final = 0.5
"""An attempt's least share of the deadline: below it a pause of the broker's collector would
look like a failure, and each such attempt may double the message."""


_SLAVE_NOT_AVAILABLE: Final = 11
_SILENT: Final = (ConnectError, UnwrittenError, RequestTimeoutError, ConnectionLostError)
"""Nothing at the address answered: for the detector to find out."""
_ONCE: Final = (TopicNotFoundError, InvalidQueueError)
"""Tried again after one look at the route; the second time the answer is final."""
_NO_CHOICE: Final = (
    NameServerUnavailableError,
    NoRouteError,
    LocalResourcesError,
)  # time is what helps


class Ordering(enum.Enum):
    """What a sharding key may count on (option `ordering`)."""

    NONE = "none"
    BEST_EFFORT = "best_effort"
    STRICT = "strict"


class Action(enum.Enum):
    """What happens to the request."""

    RETRY_NOW = "retry_now"
    """Choose a queue anew and send."""
    RETRY_AFTER = "retry_after"
    """Wait `delay_s`, then choose a queue anew and send."""
    RETRY_SAME_QUEUE = "retry_same_queue"
    """Wait `delay_s` (may be 0), then send to the same queue of the same broker."""
    GIVE_UP = "give_up"
    """No further attempt: the request's last error stands (a degraded result: take it)."""
    FATAL = "fatal"
    """Stop everything: no other message will fare better."""


@dataclass(frozen=True)
class RetryPolicies:
    """The options that the decisions depend on."""

    retry_response_codes: frozenset[int] = frozenset((17, 14, 1, 2, 16, 204, 205, 215, 29, 1500))
    window: wait_base = field(default_factory=lambda: wait_exponential(multiplier=0.05, max=1.0))
    """Longest wait before attempt n + 1, seconds; the wait is drawn from its upper half."""
    on_degraded: str = "accept"
    retry_not_store_ok: bool = False

    @classmethod
    def of(cls, options: SinkOptions) -> RetryPolicies:
        """From the options."""
        return cls(
            frozenset(options.retry_response_codes),
            wait_exponential(
                multiplier=options.retry_backoff_ms / 1000, max=options.retry_backoff_max_ms / 1000
            ),
            options.on_degraded,
            options.retry_another_broker_when_not_store_ok,
        )


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do; the fields beside `action` hold whatever the action is."""

    action: Action
    delay_s: float = 0.0
    avoid_broker: bool = False
    """Not this broker while another will do."""
    refresh_route: bool = False
    isolate: Isolate = Isolate.NOTHING
    """BROKER: LatencyFaultTolerance.update(isolation=True); TOPIC: isolate_topic."""
    reachable: bool = True
    """For the fault table: False when nothing at that address answered."""
    reconnect: bool = False
    """On a new connection."""
    counts: bool = True
    """False: the attempt does not use up one of the request's."""
    maybe_duplicate: bool = False
    """This attempt may have stored the message."""

    @property
    def retries(self) -> bool:
        """True when another attempt follows."""
        return self.action not in (Action.GIVE_UP, Action.FATAL)


def attempt_deadline(
    now_s: float,
    deadline_s: float,
    attempts_left: int,
    cap_s: float | None = None,
    *,
    ordering: Ordering = Ordering.NONE,
    floor_s: float = ATTEMPT_FLOOR_S,
) -> float:
    """When the attempt that starts now ends at the latest.

    An equal share of what is left (at least `floor_s`), or `cap_s` where it is given (Java:
    sendMsgMaxTimeoutPerRequest); the last attempt has all that is left. Strict order has but one
    share: while a written request is unanswered nothing may overtake it.

    Args:
        attempts_left: this attempt and those that may follow; 1 or more.
    """
    if attempts_left <= 1 or ordering is Ordering.STRICT:
        return deadline_s
    share_s = max((deadline_s - now_s) / attempts_left, floor_s) if cap_s is None else cap_s
    return min(now_s + share_s, deadline_s)


def backoff_s(policies: RetryPolicies, attempt: int, rng: Rng) -> float:
    """The wait after busy attempt `attempt` (1 is the first): jitter over the window's upper half.

    Half is kept for certain, as a wait of nearly nothing is no help to a busy broker.
    """
    state = cast(RetryCallState, SimpleNamespace(attempt_number=attempt))
    return policies.window(state) * (0.5 + 0.5 * rng.random())


def decide(
    error: SendError | MessageError,
    *,
    attempt: int,
    max_attempts: int,
    now_s: float,
    deadline_s: float,
    ordering: Ordering = Ordering.NONE,
    fixed_queue: bool = False,
    patient: bool = False,
    alternatives: bool = True,
    earlier: Collection[type[Exception]] = (),
    policies: RetryPolicies,
    rng: Rng,
) -> Decision:
    """The table.

    Strict order never sends again what may still be on its way to the store (an unanswered
    request on a connection that lives): what is sent after it could overtake it. A request that
    the broker has answered, or whose connection is gone, is sent to the same queue again.

    Args:
        attempt: the number of the attempt that failed, from 1; those that did not count left out.
        max_attempts: 1 + retryTimesWhenSendFailed. Strict order waits for its queue as long as
            the deadline allows when the message is certainly not stored.
        ordering, fixed_queue: whether the request may go to another queue.
        patient: a busy answer, or no broker to ask, does not count as an attempt while there is
            time.
        alternatives: another broker will do now; without one the wait is jittered, as the same
            broker would be asked again within a millisecond.
        earlier: the classes of this request's earlier errors (GO_AWAY is answered once by a new
            connection; a missing topic or queue by one look at the route).
    """
    facts, left, waits = _facts(error), max_attempts - attempt, attempt
    if patient and max_attempts > 1 and _costs_only_time(error):
        facts, left = replace(facts, counts=False), max(left, 1)
        waits += sum(one is type(error) for one in earlier)
    again = _may_retry(error, earlier, ordering, fixed_queue, policies, attempts_left=left)
    remaining_s = deadline_s - now_s
    if error_is(error, "fatal"):
        return replace(facts, action=Action.FATAL)
    if not again or remaining_s <= 0:
        return facts
    if isinstance(error, GoAwayError) and GoAwayError not in earlier:
        return replace(
            facts, action=Action.RETRY_SAME_QUEUE, avoid_broker=False, reconnect=True, counts=False
        )
    if isinstance(error, GoAwayError):
        facts = replace(facts, isolate=Isolate.BROKER, avoid_broker=True, reconnect=True)
    stays = fixed_queue or ordering is Ordering.STRICT
    delay_s = 0.0
    if stays or not alternatives or error_is(error, "backs_off") or isinstance(error, _NO_CHOICE):
        # Half of what is left is kept for the attempt itself.
        delay_s = min(backoff_s(policies, waits, rng), remaining_s / 2)
    if stays:
        return replace(facts, action=Action.RETRY_SAME_QUEUE, delay_s=delay_s, avoid_broker=False)
    action = Action.RETRY_AFTER if delay_s else Action.RETRY_NOW
    return replace(facts, action=action, delay_s=delay_s)


def decide_degraded(
    response_code: int,
    *,
    attempt: int,
    max_attempts: int,
    now_s: float,
    deadline_s: float,
    ordering: Ordering = Ordering.NONE,
    fixed_queue: bool = False,
    policies: RetryPolicies,
) -> Decision:
    """After FLUSH_DISK_TIMEOUT (10), SLAVE_NOT_AVAILABLE (11), FLUSH_SLAVE_TIMEOUT (12).

    GIVE_UP means: take the result as it is. A re-send doubles the message, so it needs
    `onDegraded=retry` or `retryAnotherBrokerWhenNotStoreOK`.
    """
    facts = Decision(Action.GIVE_UP)
    wanted = policies.retry_not_store_ok or (
        # Another attempt finds the same missing replica; the documentation advises against it.
        policies.on_degraded == "retry" and response_code != _SLAVE_NOT_AVAILABLE
    )
    if not wanted or attempt >= max_attempts or now_s >= deadline_s:
        return facts
    if fixed_queue or ordering is Ordering.STRICT:
        return replace(facts, action=Action.RETRY_SAME_QUEUE, maybe_duplicate=True)
    return replace(facts, action=Action.RETRY_NOW, avoid_broker=True, maybe_duplicate=True)


def _costs_only_time(error: SendError | MessageError) -> bool:
    return isinstance(error, (ConnectError, *_NO_CHOICE)) or error_is(error, "backs_off")


def error_is(error: SendError | MessageError, fact: str) -> bool:
    """A retry fact of the error's class; a MessageError has not all of them."""
    return bool(getattr(error, fact, False))


def _facts(error: SendError | MessageError) -> Decision:
    """What holds whether or not another attempt follows."""
    isolate = error.isolates
    return Decision(
        Action.GIVE_UP,
        # A queue that is gone says nothing against its broker.
        avoid_broker=isolate is not Isolate.NOTHING or error_is(error, "avoids_broker"),
        refresh_route=error_is(error, "refreshes_route"),
        isolate=isolate,
        reachable=not isinstance(error, _SILENT),
        reconnect=isinstance(error, (ConnectionLostError, UnwrittenError)),
        maybe_duplicate=error.outcome is Outcome.UNKNOWN,
    )


def _may_retry(
    error: SendError | MessageError,
    earlier: Collection[type[Exception]],
    ordering: Ordering,
    fixed_queue: bool,
    policies: RetryPolicies,
    *,
    attempts_left: int,
) -> bool:
    code = getattr(error, "response_code", None)
    if not error.retriable or (code and code not in policies.retry_response_codes):
        return False
    if isinstance(error, GoAwayError) and GoAwayError not in earlier:
        return True
    strict = ordering is Ordering.STRICT
    if isinstance(error, BrokerTooOldError) and (strict or fixed_queue):
        return False
    # Without a code it is our route that lacks the queue, perhaps as its master is down just now.
    if isinstance(error, _ONCE) and code and type(error) in earlier:
        return False
    if isinstance(error, InvalidQueueError) and code and (strict or fixed_queue):
        return False
    if strict and error.outcome is not Outcome.UNKNOWN:
        return True
    if strict and isinstance(error, RequestTimeoutError):
        return False
    return attempts_left > 0
