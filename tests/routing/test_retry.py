"""The retry table, for every error class, ordering and position in the budget."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocket_sink import errors
from rocket_sink.options import SinkOptions
from rocket_sink.routing.retry import (
    ATTEMPT_FLOOR_S,
    Retry,
    attempt_deadline,
    backoff_s,
    error_for_answer,
    retry_after,
    retry_degraded,
)


def all_errors():
    classes = [errors.SendError]
    for error in classes:
        classes += error.__subclasses__()
    return sorted(classes, key=lambda error: error.__name__)


def make(error):
    facts = {"response_code": error.response_codes[0]} if error.response_codes else {}
    return error("why", **facts)


def call(error, attempt=1, **options):
    given_options = {
        "max_attempts": 3, "remaining_s": 3.0, "options": SinkOptions(), "rng": random.Random(1),
    } | options  # fmt: skip
    error = make(error) if isinstance(error, type) else error
    return retry_after(error, attempt=attempt, **given_options)


def kind_of(retry):
    """Return how a request is sent again: "now", "after" a wait, to the "same" queue, or not."""
    if retry is None:
        return None
    return "same" if retry.same_queue else "after" if retry.delay_s else "now"


TABLE = [
    # error, retry without order, retry in strict order, isolates
    (errors.ConnectError, "now", "same", "broker"),
    (errors.TlsError, "now", "same", "broker"),
    (errors.TlsRefusedError, None, None, None),
    (errors.LocalResourcesError, "after", "same", "nothing"),
    (errors.UnknownHostError, "now", "same", "broker"),
    (errors.UnwrittenError, "now", "same", "broker"),
    (errors.NameServerUnavailableError, "after", "same", "nothing"),
    (errors.NoRouteError, "after", "same", "nothing"),
    (errors.WindowFullError, None, None, None),
    (errors.BrokerTooOldError, "now", None, "nothing"),
    (errors.ProducerClosedError, None, None, None),
    (errors.BrokerBusyError, "after", "same", "broker"),
    (errors.ServiceNotAvailableError, "now", "same", "broker"),
    (errors.GoAwayError, "same", "same", "nothing"),
    (errors.TopicNotFoundError, "now", "same", "nothing"),
    (errors.InvalidQueueError, "now", None, "nothing"),
    (errors.QueueMovedError, "after", "same", "nothing"),
    (errors.RequesterGoneError, "now", "same", "nothing"),
    (errors.ReplyNotTakenError, None, None, None),
    (errors.MessageIllegalError, None, None, None),
    (errors.BatchTooLargeError, None, None, None),
    (errors.PermissionDeniedError, "now", "same", "topic"),
    (errors.AuthenticationError, None, None, None),
    (errors.UnsupportedRequestError, None, None, None),
    (errors.NotStoredError, "now", "same", "broker"),
    (errors.DegradedError, None, None, None),
    (errors.RequestTimeoutError, "now", None, "broker"),
    (errors.ConnectionLostError, "now", "same", "broker"),
    (errors.BrokerError, "now", "same", "broker"),
    (errors.InvalidAnswerError, "now", "same", "broker"),
]


@pytest.mark.parametrize(("error", "free", "strict", "isolates"), TABLE)
def test_the_table(error, free, strict, isolates):
    for is_strict, kind in ((False, free), (True, strict)):
        retry = call(error, strict=is_strict)
        assert kind_of(retry) == kind, is_strict
        assert retry is None or retry.isolates.value == isolates


def test_the_table_has_every_leaf_of_the_tree():
    leaves = {error for error in all_errors() if not error.__subclasses__()}
    with_children = {errors.ConnectError, errors.TlsError, errors.MessageIllegalError}
    assert {line[0] for line in TABLE} == leaves | with_children


@pytest.mark.parametrize("error", all_errors(), ids=lambda error: error.__name__)
def test_nothing_is_tried_after_the_last_attempt_or_the_deadline(error):
    assert call(error, attempt=3) is None or error is errors.GoAwayError
    for strict in (False, True):
        assert call(error, remaining_s=0.0, strict=strict) is None
        assert call(error, remaining_s=-0.5, strict=strict) is None


def test_f21_go_away_is_answered_once_by_a_new_connection_and_is_no_attempt():
    assert call(errors.GoAwayError, attempt=3) == Retry(same_queue=True, counts=False)
    again = call(errors.GoAwayError, earlier=[errors.GoAwayError])
    assert again == Retry(avoids_broker=True, isolates=errors.Isolate.BROKER)
    assert call(errors.GoAwayError, attempt=3, earlier=[errors.GoAwayError]) is None


REJECTED_TIMEOUT = errors.RequestTimeoutError("no answer", outcome=errors.Outcome.REJECTED)
CASES = [
    # error, options of the call, how it is sent again
    # f26: one look at the route
    (errors.TopicNotFoundError, {"earlier": [errors.TopicNotFoundError]}, None),
    (errors.TopicNotFoundError, {"earlier": [errors.ConnectError]}, "now"),
    (errors.InvalidQueueError, {"earlier": [errors.InvalidQueueError]}, None),  # f28
    (errors.InvalidQueueError, {"earlier": [errors.ConnectError]}, "now"),
    (errors.InvalidQueueError, {"fixed_queue": True}, None),
    # A killed broker leaves the route at once; its queues come back when it restarts.
    (errors.InvalidQueueError("not in the route"), {"strict": True, "attempt": 9}, "same"),
    (
        errors.InvalidQueueError("not in the route"),
        {"strict": True, "attempt": 9, "earlier": [errors.InvalidQueueError] * 5},
        "same",
    ),
    (errors.InvalidQueueError("not in the route"), {"fixed_queue": True}, "same"),
    # Strict order waits for its queue while nothing is stored.
    (errors.ConnectError, {"attempt": 50, "strict": True}, "same"),
    (errors.BrokerBusyError, {"attempt": 50, "strict": True}, "same"),
    (errors.NoRouteError, {"attempt": 50, "strict": True}, "same"),
    (errors.ConnectionLostError, {"attempt": 50, "strict": True}, None),
    (errors.BrokerError, {"attempt": 50, "strict": True}, None),
    # With `retry_while_busy` a busy answer, or a missing broker, costs no attempt.
    (errors.BrokerBusyError, {"attempt": 3, "earlier": [errors.BrokerBusyError] * 6}, None),
    (errors.BrokerBusyError, {"attempt": 3, "retry_while_busy": True}, "after"),
    (errors.BrokerBusyError, {"attempt": 3, "retry_while_busy": True, "remaining_s": 0.0}, None),
    (errors.BrokerBusyError, {"retry_while_busy": True, "max_attempts": 1}, None),
    (errors.UnwrittenError, {"attempt": 3, "retry_while_busy": True}, None),
    (errors.TlsRefusedError, {"retry_while_busy": True}, None),
    *(
        (error, {"attempt": 3, "retry_while_busy": True}, kind)
        for error, kind in (
            (errors.ConnectError, "now"), (errors.TlsError, "now"),
            (errors.LocalResourcesError, "after"), (errors.NameServerUnavailableError, "after"),
        )
    ),
    # Without another broker, the same one is not asked at once.
    (errors.ConnectError, {"alternatives": False}, "after"),
    (errors.ConnectError, {"fixed_queue": True}, "same"),
    (errors.RequestTimeoutError, {"fixed_queue": True}, "same"),
    (REJECTED_TIMEOUT, {"strict": True}, "same"),  # The broker was asked, and has not stored it.
]  # fmt: skip


@pytest.mark.parametrize(("error", "options", "kind"), CASES)
def test_cases(error, options, kind):
    retry = call(error, **options)
    assert kind_of(retry) == kind
    if options.get("retry_while_busy") and retry is not None:
        assert not retry.counts
    if kind == "same":
        assert retry.delay_s > 0 and not retry.avoids_broker


def test_waits_grow_while_busy_answers_cost_no_attempt():
    busy = {"retry_while_busy": True, "earlier": [errors.BrokerBusyError] * 6}
    assert call(errors.BrokerBusyError, 3, **busy).delay_s > call(errors.BrokerBusyError).delay_s


@pytest.mark.parametrize(
    ("error", "options", "awaits"),
    [
        (errors.TopicNotFoundError, {}, True), (errors.InvalidQueueError, {}, True),
        (errors.NoRouteError, {}, True), (errors.QueueMovedError, {}, True),
        (errors.ConnectError, {"alternatives": False}, True),
        (errors.ConnectError, {"strict": True}, True), (errors.ConnectError, {}, False),
        (errors.RequestTimeoutError, {"alternatives": False}, False),
    ],
)  # fmt: skip
def test_errors_of_a_stale_route_await_a_look_up(error, options, awaits):
    assert call(error, **options).awaits_route is awaits


@pytest.mark.parametrize("code", [2, 215])
def test_f22_f23_busy_brokers_get_a_jittered_wait(code):
    """Sync and async sends do the same; Java asks again at once, or never."""
    busy = error_for_answer(code, "busy")
    delays = {call(busy, rng=random.Random(seed)).delay_s for seed in range(50)}
    assert len(delays) == 50
    assert all(0.025 <= delay <= 0.05 for delay in delays)


def test_backoff_doubles_up_to_its_limit():
    options = SinkOptions.parse(retryBackoffMs=50, retryBackoffMaxMs=1000)

    class Top:
        def random(self):
            return 1.0

    waits = [backoff_s(options, attempt, Top()) for attempt in range(1, 8)]
    assert waits == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0])
    assert backoff_s(options, 10_000, Top()) == 1.0


def test_strict_order_never_sends_again_what_may_still_arrive():
    for remaining_s in (3.0, 1.5, 0.001, 0.0):
        assert call(errors.RequestTimeoutError, strict=True, remaining_s=remaining_s) is None


@pytest.mark.parametrize(
    ("codes", "error", "is_retried"),
    [
        (None, (99, ""), False), ("99", (99, ""), True), ("99", (2, ""), False),
        ("13,16", (13, ""), False), ("13,16", (16, "check signature failed."), False),
    ],
)  # fmt: skip
def test_response_codes_are_the_users_to_choose(codes, error, is_retried):
    options = SinkOptions() if codes is None else SinkOptions.parse(retryResponseCodes=codes)
    assert (call(error_for_answer(*error), options=options) is not None) == is_retried
    assert call(errors.ConnectError, options=options) is not None


AGAIN = {"onDegraded": "retry"}


@pytest.mark.parametrize("code", [10, 11, 12])
@pytest.mark.parametrize(
    ("options", "more", "expected"),
    [
        ({}, {}, None), ({"onDegraded": "fail"}, {}, None),
        (AGAIN, {}, Retry(avoids_broker=True)), (AGAIN, {"stays": True}, Retry(same_queue=True)),
        (AGAIN, {"attempt": 3}, None), (AGAIN, {"remaining_s": 0.0}, None),
    ],
)  # fmt: skip
def test_f30_degraded_answers_by_policy(code, options, more, expected):
    call = {"attempt": 1, "max_attempts": 3, "remaining_s": 3.0} | more
    # A broker without a replica would fail again, so no retry follows the code 11.
    expected = None if code == 11 else expected
    assert retry_degraded(code, options=SinkOptions.parse(options), **call) == expected


@pytest.mark.parametrize(
    ("arguments", "deadline_s"),
    [
        ((0, 3, 3), 1), ((1, 3, 2), 2), ((2, 3, 1), 3), ((0.1, 3, 3), 0.1 + 2.9 / 3),
        ((0, 0.9, 3), ATTEMPT_FLOOR_S), ((0.5, 0.9, 2), 0.9),
        # A cap holds for all attempts but the last.
        ((0, 3, 3, 0.2), 0.2), ((0, 3, 3, 2.5), 2.5), ((2, 3, 2, 2.5), 3), ((0.4, 3, 1, 0.2), 3),
    ],
)  # fmt: skip
def test_attempts_share_what_is_left(arguments, deadline_s):
    """Java's first attempt may use up the whole three seconds (apache/rocketmq#8997)."""
    assert attempt_deadline(*arguments) == pytest.approx(deadline_s)
    assert attempt_deadline(*arguments, strict=True) == arguments[1], "strict order has one share"


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
    retry = call(
        error, attempt=attempt, strict=strict, remaining_s=remaining_s, fixed_queue=fixed,
        alternatives=alternatives, earlier=earlier,
    )  # fmt: skip
    if retry is None:
        return
    assert error.retriable and not error.fatal
    assert 0 <= retry.delay_s <= max(remaining_s / 2, 0)
    if strict or fixed:
        assert retry.same_queue and not retry.avoids_broker
    if error.isolates is errors.Isolate.NOTHING and error is not errors.GoAwayError:
        assert retry.isolates is errors.Isolate.NOTHING
    if not retry.counts:
        assert errors.GoAwayError not in earlier
