"""The retry table, for every error class, ordering and position in the budget."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocket_sink import errors
from rocket_sink.errors import Isolate, SendError
from rocket_sink.options import SinkOptions
from rocket_sink.routing.retry import (
    ATTEMPT_FLOOR_S,
    Action,
    attempt_deadline,
    backoff_s,
    decide,
    decide_degraded,
    error_for_answer,
)


def all_errors():
    classes, stack = [], [SendError]
    while stack:
        error = stack.pop()
        stack += error.__subclasses__()
        classes.append(error)
    return sorted(classes, key=lambda error: error.__name__)


def make(error):
    facts = {"response_code": error.response_codes[0]} if error.response_codes else {}
    return error("why", **facts)


def call(error, attempt=1, **options):
    given_options = {
        "max_attempts": 3, "remaining_s": 3.0, "options": SinkOptions(), "rng": random.Random(1),
    } | options  # fmt: skip
    error = make(error) if isinstance(error, type) else error
    return decide(error, attempt=attempt, **given_options)


TABLE = [
    # error, unordered action, strict action, isolate, reachable, refresh
    (errors.ConnectError, "retry_now", "retry_same_queue", "broker", False, True),
    (errors.TlsError, "retry_now", "retry_same_queue", "broker", False, True),
    (errors.TlsRefusedError, "fatal", "fatal", "nothing", False, True),
    (errors.LocalResourcesError, "retry_after", "retry_same_queue", "nothing", False, False),
    (errors.UnknownHostError, "retry_now", "retry_same_queue", "broker", False, True),
    (errors.UnwrittenError, "retry_now", "retry_same_queue", "broker", False, False),
    (errors.NameServerUnavailableError, "retry_after", "retry_same_queue", "nothing", True, False),
    (errors.NoRouteError, "retry_after", "retry_same_queue", "nothing", True, True),
    (errors.WindowFullError, "give_up", "give_up", "nothing", True, False),
    (errors.BrokerTooOldError, "retry_now", "give_up", "nothing", True, False),
    (errors.ProducerClosedError, "fatal", "fatal", "nothing", True, False),
    (errors.BrokerBusyError, "retry_after", "retry_same_queue", "broker", True, False),
    (errors.ServiceNotAvailableError, "retry_now", "retry_same_queue", "broker", True, True),
    (errors.GoAwayError, "retry_same_queue", "retry_same_queue", "nothing", True, False),
    (errors.TopicNotFoundError, "retry_now", "retry_same_queue", "nothing", True, True),
    (errors.InvalidQueueError, "retry_now", "give_up", "nothing", True, True),
    (errors.QueueMovedError, "retry_after", "retry_same_queue", "nothing", True, True),
    (errors.RequesterGoneError, "retry_now", "retry_same_queue", "nothing", True, False),
    (errors.ReplyNotTakenError, "give_up", "give_up", "nothing", True, False),
    (errors.MessageIllegalError, "give_up", "give_up", "nothing", True, False),
    (errors.BatchTooLargeError, "give_up", "give_up", "nothing", True, False),
    (errors.PermissionDeniedError, "retry_now", "retry_same_queue", "topic", True, True),
    (errors.AuthenticationError, "fatal", "fatal", "nothing", True, False),
    (errors.UnsupportedRequestError, "fatal", "fatal", "nothing", True, False),
    (errors.NotStoredError, "retry_now", "retry_same_queue", "broker", True, False),
    (errors.DegradedError, "give_up", "give_up", "nothing", True, False),
    (errors.RequestTimeoutError, "retry_now", "give_up", "broker", False, True),
    (errors.ConnectionLostError, "retry_now", "retry_same_queue", "broker", False, True),
    (errors.BrokerError, "retry_now", "retry_same_queue", "broker", True, False),
    (errors.InvalidAnswerError, "retry_now", "retry_same_queue", "broker", True, False),
]


@pytest.mark.parametrize(("error", "free", "strict", "isolate", "reachable", "refresh"), TABLE)
def test_the_table(error, free, strict, isolate, reachable, refresh):
    for is_strict, action in ((False, free), (True, strict)):
        decision = call(error, strict=is_strict)
        assert decision.action.value == action, is_strict
        assert decision.isolate.value == isolate
        assert decision.reachable == reachable
        assert decision.refresh_route == refresh


def test_the_table_has_every_leaf_of_the_tree():
    leaves = {error for error in all_errors() if not error.__subclasses__()}
    with_children = {errors.ConnectError, errors.TlsError, errors.MessageIllegalError}
    assert {line[0] for line in TABLE} == leaves | with_children


@pytest.mark.parametrize("error", all_errors(), ids=lambda error: error.__name__)
def test_nothing_is_tried_after_the_last_attempt_or_the_deadline(error):
    first_go_away = error is errors.GoAwayError
    assert not call(error, attempt=3).retries or first_go_away
    for strict in (False, True):
        assert not call(error, remaining_s=0.0, strict=strict).retries
        assert not call(error, remaining_s=-0.5, strict=strict).retries


def test_poison_rows_are_given_up_and_isolate_nothing():
    decision = call(errors.MessageIllegalError)
    assert decision.action is Action.GIVE_UP
    assert decision.isolate is Isolate.NOTHING


def test_f21_go_away_is_answered_once_by_a_new_connection_and_is_no_attempt():
    decision = call(errors.GoAwayError, attempt=3)
    assert decision.action is Action.RETRY_SAME_QUEUE
    assert (decision.reconnect, decision.counts, decision.delay_s) == (True, False, 0.0)
    again = call(errors.GoAwayError, earlier=[errors.GoAwayError])
    assert again.action is Action.RETRY_NOW
    assert again.avoid_broker
    assert again.counts
    assert again.isolate is Isolate.BROKER
    assert not call(errors.GoAwayError, attempt=3, earlier=[errors.GoAwayError]).retries


@pytest.mark.parametrize("error", [errors.TopicNotFoundError, errors.InvalidQueueError])
def test_f26_f28_one_look_at_the_route_then_final(error):
    assert call(error).retries
    assert call(error).refresh_route
    assert call(error, earlier=[error]).action is Action.GIVE_UP
    assert call(error, earlier=[errors.ConnectError]).retries


def test_f25_a_topic_closed_on_one_broker_is_tried_on_the_others():
    decision = call(errors.PermissionDeniedError)
    assert decision.avoid_broker
    assert decision.isolate is Isolate.TOPIC


@pytest.mark.parametrize("code", [2, 215])
def test_f22_f23_busy_brokers_get_a_jittered_wait(code):
    """Sync and async sends do the same; Java asks again at once, or never."""
    delays = {
        call(error_for_answer(code, "busy"), rng=random.Random(seed)).delay_s for seed in range(50)
    }
    assert len(delays) == 50
    assert all(0.025 <= delay <= 0.05 for delay in delays)


def test_retry_while_busy_does_not_count_attempts():
    busy = errors.BrokerBusyError
    earlier = [busy] * 6
    decision = call(busy, 3, retry_while_busy=True, earlier=earlier)
    assert decision.retries and not decision.counts
    assert decision.delay_s > call(busy, 1, retry_while_busy=True).delay_s, "waits grow"
    assert not call(busy, 3, earlier=earlier).retries
    assert not call(busy, 3, retry_while_busy=True, remaining_s=0.0).retries, "time is over"
    assert not call(busy, 1, retry_while_busy=True, max_attempts=1).retries, "retries are off"
    assert not call(errors.UnwrittenError, 3, retry_while_busy=True).retries


@pytest.mark.parametrize(
    "error",
    [
        errors.ConnectError, errors.TlsError, errors.LocalResourcesError,
        errors.NameServerUnavailableError,
    ],
)  # fmt: skip
def test_retry_while_busy_covers_missing_brokers(error):
    assert call(error, 3, retry_while_busy=True).retries and not call(error, 3).retries
    refused = call(errors.TlsRefusedError, 1, retry_while_busy=True)
    assert not refused.retries, "a refused certificate stays refused"


def test_backoff_doubles_up_to_its_limit():
    options = SinkOptions.parse(retryBackoffMs=50, retryBackoffMaxMs=1000)

    class Top:
        def random(self):
            return 1.0

    waits = [backoff_s(options, attempt, Top()) for attempt in range(1, 8)]
    assert waits == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0])
    assert backoff_s(options, 10_000, Top()) == 1.0


def test_half_of_what_is_left_is_kept_for_the_attempt():
    for left_s in (0.04, 0.01):
        decision = call(errors.BrokerBusyError, remaining_s=left_s)
        assert decision.action is Action.RETRY_AFTER
        assert 0 < decision.delay_s <= left_s / 2 + 1e-9


def test_without_another_broker_the_same_one_is_not_asked_at_once():
    assert call(errors.ConnectError).delay_s == 0
    decision = call(errors.ConnectError, alternatives=False)
    assert decision.action is Action.RETRY_AFTER
    assert decision.delay_s > 0


def test_a_fixed_queue_stays():
    decision = call(errors.ConnectError, fixed_queue=True)
    assert decision.action is Action.RETRY_SAME_QUEUE
    assert not decision.avoid_broker
    assert call(errors.RequestTimeoutError, fixed_queue=True).retries
    assert not call(errors.InvalidQueueError, fixed_queue=True).retries


def test_strict_order_waits_for_its_queue_while_nothing_is_stored():
    late = {"attempt": 50, "strict": True}
    for error in (errors.ConnectError, errors.BrokerBusyError, errors.NoRouteError):
        decision = call(error, **late)
        assert decision.action is Action.RETRY_SAME_QUEUE
        assert decision.delay_s > 0
    for error in (errors.ConnectionLostError, errors.BrokerError):
        assert not call(error, **late).retries


def test_strict_order_waits_for_a_queue_that_only_the_route_lacks():
    """A killed broker leaves the route at once; its queues come back when it restarts."""
    gone = errors.InvalidQueueError("not in the route")
    for earlier in ([], [errors.InvalidQueueError] * 5):
        decision = call(gone, strict=True, attempt=9, earlier=earlier)
        assert decision.action is Action.RETRY_SAME_QUEUE
        assert decision.delay_s > 0
        assert decision.refresh_route
    assert call(gone, fixed_queue=True).retries


def test_strict_order_never_sends_again_what_may_still_arrive():
    for remaining_s in (3.0, 1.5, 0.001, 0.0):
        decision = call(errors.RequestTimeoutError, strict=True, remaining_s=remaining_s)
        assert decision.action is Action.GIVE_UP
    assert call(errors.ConnectionLostError, strict=True).action is Action.RETRY_SAME_QUEUE


def test_response_codes_are_the_users_to_choose():
    assert call(error_for_answer(99, "")).action is Action.GIVE_UP
    own = SinkOptions.parse(retryResponseCodes="99")
    assert call(error_for_answer(99, ""), options=own).retries
    assert not call(error_for_answer(2, ""), options=own).retries
    assert call(errors.ConnectError, options=own).retries
    wide = SinkOptions.parse(retryResponseCodes="13,16")
    assert not call(error_for_answer(13, ""), options=wide).retries
    refused = error_for_answer(16, "check signature failed.")
    assert call(refused, options=wide).action is Action.FATAL


@pytest.mark.parametrize("code", [10, 11, 12])
def test_f30_degraded_answers_by_policy(code):
    def degraded(stays=False, attempt=1, remaining_s=3.0, **options):
        return decide_degraded(
            code, attempt=attempt, max_attempts=3, remaining_s=remaining_s, stays=stays,
            options=SinkOptions.parse(options),
        )  # fmt: skip

    assert degraded().action is Action.GIVE_UP
    assert degraded(onDegraded="fail").action is Action.GIVE_UP
    decision = degraded(onDegraded="retry")
    assert decision.retries == (code != 11)
    if decision.retries:
        assert decision.action is Action.RETRY_NOW
        assert decision.avoid_broker
        assert decision.isolate is Isolate.NOTHING
        strict = degraded(stays=True, onDegraded="retry")
        assert strict.action is Action.RETRY_SAME_QUEUE
    assert not degraded(attempt=3, onDegraded="retry").retries
    assert not degraded(remaining_s=0.0, onDegraded="retry").retries


def test_attempts_share_what_is_left():
    """Java's first attempt may use up the whole three seconds (apache/rocketmq#8997)."""
    assert attempt_deadline(0, 3, 3) == 1
    assert attempt_deadline(1, 3, 2) == 2
    assert attempt_deadline(2, 3, 1) == 3
    assert attempt_deadline(0.1, 3, 3) == pytest.approx(0.1 + 2.9 / 3)
    assert attempt_deadline(0, 0.9, 3) == ATTEMPT_FLOOR_S
    assert attempt_deadline(0.5, 0.9, 2) == 0.9


def test_a_cap_holds_for_all_attempts_but_the_last():
    assert attempt_deadline(0, 3, 3, 0.2) == 0.2
    assert attempt_deadline(0, 3, 3, 2.5) == 2.5
    assert attempt_deadline(2, 3, 2, 2.5) == 3
    assert attempt_deadline(0.4, 3, 1, 0.2) == 3


def test_strict_order_has_one_share():
    assert attempt_deadline(0, 60, 3, strict=True) == 60
    assert attempt_deadline(0, 60, 3, 1.0, strict=True) == 60


@given(st.floats(0, 100), st.floats(0, 100), st.integers(1, 10), st.none() | st.floats(0.001, 5))
def test_an_attempt_never_outlives_the_deadline(now_s, budget_s, attempts_left, cap_s):
    deadline_s = now_s + budget_s
    assert now_s <= attempt_deadline(now_s, deadline_s, attempts_left, cap_s) <= deadline_s


@given(
    st.sampled_from(all_errors()),
    st.booleans(),
    st.integers(1, 6),
    st.floats(-7, 13),
    st.booleans(),
    st.booleans(),
    st.lists(st.sampled_from(all_errors()), max_size=3),
)
def test_any_decision_is_sound(error, strict, attempt, remaining_s, fixed, alternatives, earlier):
    decision = call(
        error, attempt=attempt, strict=strict, remaining_s=remaining_s, fixed_queue=fixed,
        alternatives=alternatives, earlier=earlier,
    )  # fmt: skip
    assert (decision.action is Action.FATAL) == error.fatal
    assert 0 <= decision.delay_s <= max(remaining_s / 2, 0)
    assert not decision.delay_s or decision.retries
    assert decision.retries <= error.retriable
    if strict or fixed:
        assert decision.action not in (Action.RETRY_NOW, Action.RETRY_AFTER)
        assert not decision.retries or not decision.avoid_broker
    if error.isolates is Isolate.NOTHING and error is not errors.GoAwayError:
        assert decision.isolate is Isolate.NOTHING
    if not decision.counts:
        assert errors.GoAwayError not in earlier


def test_the_same_rng_gives_the_same_decision():
    decision = call(errors.BrokerBusyError, rng=random.Random(7))
    assert decision == call(errors.BrokerBusyError, rng=random.Random(7))
