"""The steps after an attempt ends: its record, the next attempt, the broker's rank."""

from collections import deque
from random import Random
from types import SimpleNamespace

import pytest

from rocket_sink import errors
from rocket_sink.errors import Outcome
from rocket_sink.message import MessageQueue, SendResult
from rocket_sink.options import SinkOptions
from rocket_sink.producer.engine.attempt import (
    AttemptRecord,
    CheckResult,
    Completion,
    SendAttempt,
    SendRequest,
    Wait,
    buffers_of,
)
from rocket_sink.producer.engine.brokers import Broker, Brokers, Proxy, SendTarget
from rocket_sink.producer.engine.dispatcher import Dispatcher
from rocket_sink.producer.engine.engine import SendEngine
from rocket_sink.producer.engine.headers import HeaderTemplates
from rocket_sink.producer.engine.limits import RequestLimits, Window, rate_limited_options
from rocket_sink.producer.engine.request_flow import RequestFlow
from rocket_sink.producer.engine.response_handler import NextStep, ResponseHandler
from rocket_sink.producer.engine.shared_state import SharedBrokerState
from rocket_sink.routing.fault import BUSY, FAILING, UNREACHABLE, entry_name
from rocket_sink.wire.headers import Frame
from rocket_sink.wire.stored import StoredMessage
from tests.routing.infos import info_of

NOW_S = 1000.0
QUEUE = MessageQueue("t", "a", 2)
STORED = {
    "msgId": "M1,M2", "queueId": "2", "queueOffset": "7", "transactionId": "T", "recallHandle": "R",
}  # fmt: skip


class World:
    """A handler of an engine with the brokers a and b, and what it tells others."""

    def __init__(self, *, records=True, **options):
        self.options = SinkOptions.parse({"nameServer": "h:1", "retryBackoffMs": 100, **options})
        self.brokers = Brokers(self.options, SharedBrokerState.in_process(), Random(1))
        self.refreshed = []
        self.drained = []
        self.reread = []
        self.is_fetching = self.is_unresolvable = self.has_new_credentials = False
        routes = SimpleNamespace(
            refresh=lambda *args: self.refreshed.append(args),
            addresses=lambda: {"a": "a:1", "b": "b:1"}, fetching=lambda topic: self.is_fetching,
            is_unresolvable=lambda topic: self.is_unresolvable,
        )  # fmt: skip
        client = SimpleNamespace(drain=lambda *args: self.drained.append(args))
        headers = SimpleNamespace(
            reread=lambda *args: self.reread.append(args) or self.has_new_credentials
        )
        self.limits = RequestLimits(self.options)
        self.handler = ResponseHandler(
            self.options, client, routes, self.brokers, headers, self.limits, Random(1), records
        )
        self.channel = SimpleNamespace(
            opened_s=NOW_S - 5.0, ready_s=NOW_S - 4.75, heard_s=NOW_S - 1.0, draining=False
        )

    def attempt(self, *, is_in_flight=True, strict=False, **more):
        """Return an attempt of three seconds, which was handed over after 0.25 s, written after
        0.5 s and ended after 1 s."""
        request = SendRequest("t", b"body", token="token", message_id="ID", **more)
        attempt = SendAttempt(deque(), request, (b"body",), 4, strict, NOW_S, NOW_S + 3.0)
        broker = self.brokers.of("a")
        attempt.target = SendTarget(QUEUE, "a", "a:1", broker)
        if is_in_flight:
            broker.in_flight, attempt.broker = 1, broker
            attempt.channel = self.channel
            attempt.wire_bytes, attempt.wall_ms, attempt.handed_s = 40, 5000, NOW_S + 0.25
            attempt.sent_s = NOW_S + 0.5
        attempt.ended_s = NOW_S + 1.0
        return attempt

    def fail(self, error, **more):
        """Return an attempt that ended by this error, and the step that follows."""
        attempt = self.attempt(**more)
        return attempt, self.handler.handle_failure(attempt, error)

    def rank(self):
        self.brokers.view(NOW_S + 1.0)
        return self.brokers.rank("a", "t")


RECORD = AttemptRecord(
    1, "t", "a", "a:1", 2, 7, 5000, 250.0, 0.0, 500.0, 1, 4, 40, Outcome.ACKED, 0, None, None, "ID",
    "M1",
)  # fmt: skip


@pytest.mark.parametrize("records", [True, False])
def test_an_answer_becomes_a_result_and_a_record(records):
    world = World(records=records)
    attempt = world.attempt()
    attempt.hooked = None
    completion = world.handler.handle_answer(attempt, Frame(0, STORED, flag=1))
    assert isinstance(completion, Completion) and completion.token == "token"
    assert completion.result == SendResult(
        Outcome.ACKED, "SEND_OK", "ID", "M1,M2", QUEUE, 7, "a:1", 1, 500.0, False, "T",
        "DefaultRegion", "R", True,
    )  # fmt: skip
    assert completion.attempts == ([RECORD] if records else [])
    broker = world.brokers.of("a")
    assert (broker.in_flight, broker.latency_s, broker.stored_sent_s) == (0, 0.5, NOW_S + 0.5)
    assert world.rank() == 0 and broker.largest_batch == 0


def test_the_queue_of_a_result_is_the_brokers():
    world = World(maxInFlight=1)
    broker = world.brokers.of("a")
    for before, largest in ((0, 4), (9, 9)):
        attempt = world.attempt(batch=True)
        broker.largest_batch = before
        broker.busy(0.0, 0.0)
        completion = world.handler.handle_answer(attempt, Frame(0, {**STORED, "queueId": "3"}))
        assert completion.result.queue == MessageQueue("t", "a", 3)
        assert broker.largest_batch == largest
        assert broker.window is None, "the window has grown to the engine's limit"
    step = world.handler.handle_answer(world.attempt(), Frame(2, remark="full"))
    facts = {"topic": "t", "broker_name": "a", "broker_address": "a:1"}
    assert step.attempt.history.last_error.facts.items() >= facts.items()


@pytest.mark.parametrize(
    ("opened_s", "ready_s", "connect_ms"),
    [(0.25, 0.375, 125.0), (0.5, None, 500.0), (0.125, 0.25, 0.0)],
)
def test_a_record_has_the_time_of_the_attempts_own_connection(opened_s, ready_s, connect_ms):
    world = World()
    world.channel.opened_s = NOW_S + opened_s
    world.channel.ready_s = None if ready_s is None else NOW_S + ready_s
    _, step = world.fail(errors.ConnectionLostError("cut"))
    [record] = step.attempt.history.records
    assert (record.connect_ms, record.outcome) == (connect_ms, Outcome.UNKNOWN)
    assert (record.queue_offset, record.response_code) == (-1, None)
    assert (record.error_code, record.remark) == ("CONNECTION_LOST", "cut")


BUSY_ERROR = errors.BrokerBusyError("busy", response_code=2, remark="full")


@pytest.mark.parametrize(
    ("error", "more", "delay_s", "rank", "refreshes", "drains", "avoids"),
    [
        (errors.ConnectError("refused"), {}, 0.0, UNREACHABLE, True, False, True),
        (errors.ConnectionLostError("cut"), {}, 0.0, UNREACHABLE, True, True, True),
        (errors.UnwrittenError("full"), {}, 0.0, UNREACHABLE, False, True, True),
        (errors.RequestTimeoutError("late"), {}, 0.0, UNREACHABLE, True, False, True),
        (errors.BrokerError("?", response_code=1), {}, 0.0, FAILING, False, False, True),
        (BUSY_ERROR, {}, 0.0567182, BUSY, False, False, False),
        (errors.PermissionDeniedError("no", response_code=16), {}, 0.0, FAILING, True, False, True),
        (errors.TopicNotFoundError("no", response_code=17), {}, 0.0, 0, True, False, False),
        (errors.GoAwayError("bye", response_code=1500), {}, 0.0, 0, False, True, False),
        (errors.ConnectError("no"), {"queue": QUEUE}, 0.0567182, UNREACHABLE, True, False, False),
        (errors.ConnectError("no"), {"strict": True}, 0.0567182, UNREACHABLE, True, False, False),
    ],
)  # fmt: skip
def test_a_failure(error, more, delay_s, rank, refreshes, drains, avoids):
    world = World()
    attempt, step = world.fail(error, **more)
    assert isinstance(step, NextStep) and step.wait is Wait.DELAY
    assert step.due_s == pytest.approx(NOW_S + 1.0 + delay_s, abs=1e-6)
    following = step.attempt
    counts = not isinstance(error, errors.GoAwayError)
    assert (following.number, following.counted) == (2, 1 + counts)
    assert (following.ready_s, following.deadline_s) == (NOW_S + 1.0, NOW_S + 3.0)
    assert following.pinned == (QUEUE if more or not counts else None)
    assert following.history.last_broker == ("a" if avoids else None)
    assert following.history.unknown is (error if error.outcome is Outcome.UNKNOWN else None)
    assert world.rank() == rank and world.brokers.of("a").in_flight == 0 and attempt.done
    assert world.refreshed == [("t", NOW_S + 1.0)] * refreshes
    assert world.drained == [(world.channel, NOW_S + 1.0)] * drains
    assert (world.brokers.of("a").window is not None) is (error is BUSY_ERROR)
    assert bool(world.brokers.ranks.get(entry_name("t", "a"))) is isinstance(
        error, errors.PermissionDeniedError
    )
    [record] = following.history.records
    assert (record.outcome, record.error_code) == (error.outcome, error.code)
    assert record.remark == (getattr(error, "remark", None) or error.text)
    events = [(event.broker_name, event.cause) for event in world.brokers.faults.events]
    assert events == [("a", error.code)] * bool(rank)
    item = world.brokers.faults.store.get("a")
    assert item is None or item.latency_ms == 500.0


def test_a_lost_answer_shrinks_the_window_of_a_proxy_only():
    for error, proxy, limit in (
        (errors.RequestTimeoutError("late"), Proxy("a:1"), 60),
        (errors.ConnectError("refused"), Proxy("a:1"), 120),
        (errors.RequestTimeoutError("late"), None, None),
    ):
        world = World()
        world.brokers._brokers["a"] = broker = Broker("a", proxy)
        attempt = world.attempt()
        broker.in_flight = 120
        world.handler.handle_failure(attempt, error)
        assert (broker.window and broker.window.limit) == limit


def test_a_busy_broker_is_avoided_if_no_fault_table_isolates_it():
    _, step = World(faultTable="off").fail(BUSY_ERROR)
    assert step.attempt.history.last_broker == "a"
    world = World()
    attempt = world.attempt(batch=True)
    attempt.body_bytes = 8000
    world.handler.handle_failure(attempt, errors.BatchTooLargeError("large", response_code=13))
    assert world.brokers.of("a").batch_limit == 4000


def test_brokers_behind_one_address_are_no_alternatives():
    world = World()
    world.handler._routes.addresses = lambda: {"a": "proxy:1", "b": "proxy:1"}
    _, step = world.fail(errors.ConnectError("refused"))
    assert step.due_s > NOW_S + 1.0
    attempt = World().attempt()
    attempt.ensure_history().earlier.append(errors.ConnectError)
    step = World().handler.handle_failure(attempt, errors.ConnectError("refused"))
    assert step.due_s > NOW_S + 1.0, "the other one has refused before"
    attempt = World().attempt()
    attempt.deadline_s = attempt.ended_s + 0.0625
    step = World().handler.handle_failure(attempt, BUSY_ERROR.copy())
    assert step.due_s == NOW_S + 1.03125, "half of the remaining time"


def test_a_broker_that_was_heard_meanwhile_is_reachable_and_a_draining_connection_is_left():
    world = World()
    world.channel.heard_s, world.channel.draining = NOW_S + 0.3, True
    world.fail(errors.ConnectionLostError("cut"))
    assert world.rank() == FAILING and not world.drained


@pytest.mark.parametrize(
    ("fetching", "error", "more", "wait", "due_s"),
    [
        (True, errors.TopicNotFoundError("no", response_code=17), {}, Wait.ROUTE, 3.0),
        (True, errors.ConnectError("refused"), {"queue": QUEUE}, Wait.ROUTE, 2.0),
        (True, errors.RequestTimeoutError("late"), {}, Wait.DELAY, 1.0),
        (False, errors.TopicNotFoundError("no", response_code=17), {}, Wait.DELAY, 1.0),
    ],
)
def test_an_attempt_waits_for_the_route_that_is_being_looked_up(fetching, error, more, wait, due_s):
    world = World()
    world.is_fetching = fetching
    _, step = world.fail(error, **more)
    assert (step.wait, step.due_s) == (wait, NOW_S + due_s)


AUTHENTICATION = errors.AuthenticationError("who?", response_code=16)


@pytest.mark.parametrize(
    ("error", "more", "attributes", "fatal"),
    [
        (errors.MessageIllegalError("no", response_code=13), {}, {}, False),
        (AUTHENTICATION, {}, {}, True), (errors.UnwrittenError("full"), {"attempts": 1}, {}, False),
        (errors.NoRouteError("no"), {}, {"is_unresolvable": True}, False),
    ],
)  # fmt: skip
def test_a_request_that_ends_has_the_facts_of_its_end(error, more, attributes, fatal):
    world = World()
    for name, value in attributes.items():
        setattr(world, name, value)
    error = error.copy()
    _, completion = world.fail(error, **more)
    assert isinstance(completion, Completion) and completion.token == "token"
    assert (completion.outcome, completion.error) == (error.outcome, error)
    assert (
        (error.topic, error.attempts) == ("t", 1) == (error.facts["topic"], error.facts["attempts"])
    )
    assert len(completion.attempts) == 1 and not completion.maybe_duplicate
    assert completion.error.__cause__ is None
    assert world.handler.fatal is fatal
    assert world.reread == [(NOW_S + 0.25, NOW_S + 1.0)] * (error.code == AUTHENTICATION.code)


def test_new_credentials_are_tried_once():
    world = World()
    world.has_new_credentials = True
    attempt, step = world.fail(AUTHENTICATION.copy())
    assert (step.attempt.counted, step.due_s) == (1, NOW_S + 1.0)
    attempt = world.attempt()
    attempt.history = step.attempt.history
    assert isinstance(world.handler.handle_failure(attempt, AUTHENTICATION.copy()), Completion)
    world.fail(errors.MessageIllegalError("no", response_code=13))
    assert world.handler.fatal, "an error of a single request ends no fatal state"


def test_the_first_unknown_outcome_is_that_of_the_request():
    world = World()
    lost, cut = errors.ConnectionLostError("first"), errors.ConnectionLostError("second")
    attempt, step = world.fail(lost)
    history = step.attempt.history
    for error, number in ((cut, 2), (errors.MessageIllegalError("no", response_code=13), 3)):
        attempt = world.attempt()
        attempt.history, attempt.number = history, number
        end = world.handler.handle_failure(attempt, error)
    assert (end.outcome, end.error, end.maybe_duplicate) == (Outcome.UNKNOWN, lost, True)
    assert history.unknown is lost and lost.__cause__ is error and lost.attempts == 3
    assert [record.remark for record in end.attempts] == ["first", "second", "no"]


@pytest.mark.parametrize(
    ("error", "more", "is_checked", "deadline_s"),
    [
        (errors.RequestTimeoutError("late"), {}, True, 4.0),
        (errors.RequestTimeoutError("late"), {"attempts": 1}, True, 3.0),
        (BUSY_ERROR, {}, False, 3.0), (errors.ConnectError("refused"), {}, False, 3.0),
    ],
)  # fmt: skip
def test_the_wait_for_an_answer_of_a_request_with_ids_adds_time(
    error, more, is_checked, deadline_s
):
    world = World(sendMsgTimeout=3000)
    attempt, step = world.fail(error.copy(), verify_ids=("ID",), **more)
    assert isinstance(step, NextStep)
    assert (step.wait is Wait.VERIFY, step.attempt is attempt) == (is_checked, is_checked)
    assert step.attempt.deadline_s == NOW_S + deadline_s
    assert attempt.history.unknown is None


def test_a_late_refusal_adds_time_for_a_request_with_ids_only():
    for verify_ids in ((), ("ID",)):
        world = World(sendMsgTimeout=3000)
        attempt = world.attempt(verify_ids=verify_ids)
        attempt.deadline_s = attempt.ended_s
        step = world.handler.handle_failure(attempt, BUSY_ERROR.copy())
        assert isinstance(step, NextStep) is bool(verify_ids)
        assert attempt.deadline_s == NOW_S + (4.0 if verify_ids else 1.0)


@pytest.mark.parametrize("kind", ["stored", "missing", "undecided"])
@pytest.mark.parametrize("records", [True, False])
def test_the_end_of_a_check(kind, records):
    world = World(records=records)
    error = errors.RequestTimeoutError("late")
    attempt, _ = world.fail(error, verify_ids=("ID",))
    attempt.history.records[:0] = [RECORD] * records
    message = StoredMessage("t", b"x", queue_id=2, queue_offset=9)
    result = CheckResult(error, message if kind == "stored" else None, kind != "undecided")
    end = world.handler.handle_check(attempt, result)
    kept = attempt.history.records[records:]
    assert attempt.history.records[:records] == [RECORD] * records
    if kind == "stored":
        assert (end.found_stored, end.maybe_duplicate, end.error) == (True, False, None)
        place = message.offset_message_id, QUEUE, 9, "a:1", 1, 0.0
        assert end.result[:9] == (Outcome.ACKED, "SEND_OK", "ID", *place)
        assert end.result.region_id == "DefaultRegion" and end.result.trace_on
        remarks = ["no answer came; found stored by its id"]
        assert [record.queue_offset for record in kept] == [9] * records
    elif kind == "missing":
        assert isinstance(end, NextStep) and end.attempt.number == 2
        assert error.outcome is Outcome.REJECTED is error.facts["outcome"]
        remarks = ["late; its id is not stored"]
    else:
        assert (end.outcome, end.error, end.maybe_duplicate) == (Outcome.UNKNOWN, error, True)
        remarks = ["late"]
    assert [record.remark for record in kept] == (remarks if records else [])
    outcomes = {"stored": Outcome.ACKED, "missing": Outcome.REJECTED}
    assert {r.outcome for r in kept} <= {outcomes.get(kind, Outcome.UNKNOWN)}


@pytest.mark.parametrize(
    ("on_degraded", "code", "more", "again", "error"),
    [("accept", 10, {}, False, None), ("retry", 10, {}, True, None),
     ("retry", 10, {"queue": QUEUE}, True, None), ("retry", 10, {"strict": True}, True, None),
     ("retry", 10, {"attempts": 1}, False, None), ("retry", 11, {}, False, None),
     ("fail", 12, {}, False, "DEGRADED")],
)  # fmt: skip
def test_a_degraded_answer(on_degraded, code, more, again, error):
    world = World(onDegraded=on_degraded)
    attempt = world.attempt(**more)
    end = world.handler.handle_answer(attempt, Frame(code, STORED))
    if again:
        assert (end.due_s, end.attempt.counted) == (NOW_S + 1.0, 2)
        chosen = end.attempt.history.last_broker, end.attempt.pinned
        assert chosen == ((None, QUEUE) if more else ("a", None))
        assert end.attempt.history.degraded.status == "FLUSH_DISK_TIMEOUT"
        again = world.attempt(attempts=1)
        again.history, again.number = end.attempt.history, 2
        twice, first = world.attempt(attempts=1), again.history.degraded
        twice.history = again.history
        end = world.handler.handle_answer(twice, Frame(10, STORED))
        assert end.maybe_duplicate and again.history.degraded is first
        again.history.records.pop()
        end = world.handler.handle_failure(again, errors.ConnectError("refused"))
        assert end.maybe_duplicate is False and len(end.attempts) == 2
    else:
        ends = [(record.outcome, record.response_code) for record in end.attempts]
        assert ends == [(Outcome.ACKED_DEGRADED, code)]
    assert end.outcome is Outcome.ACKED_DEGRADED
    assert (end.error and end.error.code) == error
    if error:
        assert end.result is None and (end.error.topic, end.error.broker_name) == ("t", "a")
        assert end.error.facts["result"].status == "FLUSH_SLAVE_TIMEOUT"
    else:
        assert end.result.latency_ms == 500.0


def test_nothing_is_tried_again_while_the_engine_stops():
    for error in (errors.UnwrittenError("full"), errors.RequestTimeoutError("late")):
        world = World()
        world.handler.stopping = True
        _, end = world.fail(error, verify_ids=("ID",))
        assert isinstance(end, Completion) and end.error is error
        assert not world.refreshed and world.rank() == 0 and not world.handler.fatal
    world = World(onDegraded="retry")
    world.handler.stopping = True
    assert isinstance(world.handler.handle_answer(world.attempt(), Frame(10, STORED)), Completion)


@pytest.mark.parametrize("is_chosen", [True, False])
def test_waits_without_a_broker_are_one_record(is_chosen, monkeypatch):
    world, clock = World(), SimpleNamespace(time=lambda: 2000.0)
    monkeypatch.setattr("rocket_sink.producer.engine.response_handler.time", clock)
    attempt = world.attempt(is_in_flight=False)
    attempt.target = attempt.target if is_chosen else None
    first, second = errors.ConnectError("first"), errors.NoRouteError("second")
    step = world.handler.handle_failure(attempt, first)
    following = step.attempt
    following.target, following.ended_s = attempt.target, NOW_S + 1.5
    world.handler.handle_failure(following, second)
    [record] = following.history.records
    assert (record.attempt, record.queue_wait_ms, record.rtt_ms) == (2, 1500.0, 0.0)
    place = record.broker_name, record.queue_id, record.queue_offset
    assert place == (("a", 2, -1) if is_chosen else ("", -1, -1))
    assert (record.broker_address, record.wire_bytes) == ("", 0)
    assert (record.error_code, record.remark) == (second.code, "second")
    assert record.outcome is Outcome.NOT_SENT and record.started_ms == 1_999_000
    for is_in_flight, records in ((True, 2), (False, 3), (False, 3)):
        attempt = world.attempt(is_in_flight=is_in_flight)
        attempt.history = following.history
        world.handler.handle_failure(attempt, first)
        assert len(attempt.history.records) == records, "a broker's failure ends the sum"
    attempt = World(records=False).fail(first, is_in_flight=False)[0]
    assert attempt.history.records == []


# --- before an attempt -------------------------------------------------------------------------


def dispatcher(world, **parts):
    names = ("client", "routes", "brokers", "headers", "ordered", "heartbeats", "questions")
    given = {"brokers": world.brokers, **parts}
    return Dispatcher(*(given.get(name) for name in names), world.limits)


@pytest.mark.parametrize(
    ("wait", "target", "text"),
    [
        (Wait.TURN, True, "its turn in the queue did not come"),
        (Wait.BROKER, True, "broker a is busy: no place came free there in time"),
        (Wait.BROKER, False, "the brokers of its topic are busy: no place came free there in time"),
        (Wait.VERSION, True, "a:1 did not tell its version in time"),
        (Wait.POLICY, True, "a:1 did not tell whether the topic wants keys in time"),
        (Wait.ROUTE, False, "no route"), (Wait.DELAY, False, "no time was left"),
    ],
)  # fmt: skip
def test_an_attempt_that_is_out_of_time_says_what_it_waited_for(wait, target, text):
    world = World()
    attempt = world.attempt(is_in_flight=False)
    attempt.waits, attempt.target = wait, attempt.target if target else None
    known = errors.NoRouteError("no route") if wait is Wait.ROUTE else None
    routes = SimpleNamespace(error=lambda topic: known)
    send = dispatcher(world, routes=routes).send
    with pytest.raises(errors.NotSentError) as caught:
        send(attempt, attempt.deadline_s)
    assert caught.value.text == text and caught.value is not known
    attempt.ensure_history().last_error = last = errors.ConnectError("refused")
    with pytest.raises(errors.ConnectError) as caught:
        send(attempt, attempt.deadline_s)
    assert caught.value is not last


def test_the_share_of_an_attempt():
    world = World(retryTimesWhenSendFailed=3)
    sender = dispatcher(world)
    first, last = world.attempt(), world.attempt(attempts=2)
    last.counted = 2
    assert sender.unsent_deadline_s(first, NOW_S) == NOW_S + 0.75
    assert sender.room_deadline_s(first, NOW_S + 0.7) == NOW_S + 0.75
    assert sender.room_deadline_s(first, NOW_S + 0.75) == float("inf")
    assert sender.room_deadline_s(last, NOW_S + 2.9) == NOW_S + 3.0
    assert sender._deadlines(first, NOW_S) == (NOW_S + 0.75, NOW_S + 3.0)
    checked = world.attempt(verify_ids=("ID",))
    assert sender._deadlines(checked, NOW_S)[0] == NOW_S + world.limits.stored_check_s
    assert World(sendMsgMaxTimeoutPerRequest=0).limits.attempt_cap_s is None
    capped = World(sendMsgMaxTimeoutPerRequest=600)
    assert dispatcher(capped)._deadlines(first, NOW_S) == (NOW_S + 0.6, NOW_S + 0.6)


@pytest.mark.parametrize(
    ("queue", "error", "text"),
    [
        (MessageQueue("t", "a", 4), errors.InvalidQueueError, "not in the route of the topic any"),
        (MessageQueue("t", "c", 0), errors.NoRouteError, "broker c is not in the route"),
    ],
)
def test_a_queue_that_is_not_in_the_route(queue, error, text):
    world = World()
    info = info_of({"a": 4}, "t")
    routes = SimpleNamespace(get=lambda topic, now_s: info)
    with pytest.raises(error, match=text) as caught:
        dispatcher(world, routes=routes).send(world.attempt(queue=queue), NOW_S)
    assert caught.value.topic == "t"
    if error is errors.InvalidQueueError:
        assert (caught.value.response_code, caught.value.remark) == (0, "")


@pytest.mark.parametrize(
    ("least", "version", "advice"),
    [
        (422, 400, "use a delay_level"),
        (475, 460, "send without priority"),
        (485, 479, "sharding_key"),
    ],
)
def test_a_broker_that_is_too_old_is_named(least, version, advice, monkeypatch):
    world = World()
    info = info_of({"a": 4}, "t")
    parts = {
        "routes": SimpleNamespace(get=lambda topic, now_s: info),
        "client": SimpleNamespace(channel=lambda *_: SimpleNamespace(peer_version=version)),
    }
    monkeypatch.setattr(
        "rocket_sink.producer.engine.dispatcher._IGNORED", {least: f"ignore it: {advice}"}
    )
    attempt = world.attempt(is_in_flight=False, least_version=least)
    with pytest.raises(errors.BrokerTooOldError, match=advice) as caught:
        dispatcher(world, **parts).send(attempt, NOW_S)
    facts = caught.value.facts
    assert (facts["topic"], facts["broker_name"], facts["broker_address"]) == ("t", "a", "a:1")


@pytest.mark.parametrize(
    ("body", "more", "parts"),
    [
        (b"x" * 1700, {}, 1), (b"x" * 2000, {}, 2), (memoryview(b"x"), {}, 2),
        ([b"x", b"y"], {"batch": True}, 3), (b"x", {"oneway": True}, 1),
    ],
)  # fmt: skip
def test_what_an_attempt_writes(body, more, parts):
    world, calls = World(), []
    info = info_of({"a": 4}, "t")
    connection = SimpleNamespace(open_request=lambda **request: calls.append(request) or 7)
    channel = SimpleNamespace(connection=connection)
    client = SimpleNamespace(
        channel=lambda *_: channel, send=lambda *args: calls.append(args), rpc_hooks=None
    )
    sender = dispatcher(
        world, client=client, routes=SimpleNamespace(get=lambda topic, now_s: info),
        headers=HeaderTemplates(world.options, "group"),
    )  # fmt: skip
    attempt = world.attempt(is_in_flight=False, queue=QUEUE, **more)
    attempt.body, attempt.body_bytes = buffers_of(body)
    assert sender.send(attempt, NOW_S) is None
    request, (*place, buffers, size, now_s) = calls
    assert (request["deadline_s"], request["latest_s"]) == sender._deadlines(attempt, NOW_S)
    assert request["token"] is attempt and request["oneway"] is ("oneway" in more)
    assert (place, len(buffers), now_s) == ([channel, attempt], parts, NOW_S)
    assert sum(map(len, buffers)) == size == attempt.wire_bytes
    assert int.from_bytes(bytes(buffers[0][:4]), "big") == size - 4
    assert (attempt.channel, attempt.handed_s) == (channel, NOW_S)
    assert attempt.broker is world.brokers.of("a") and attempt.broker.in_flight == 1


@pytest.mark.parametrize(
    ("more", "times_s", "is_strict"),
    [
        ({}, (0.0, 4.0), False), ({"ordered": True}, (0.0, 7.0), True),
        ({"timeout_s": 9.0}, (0.0, 9.0), False), ({"since_s": NOW_S - 1}, (-1.0, 3.0), False),
        ({"ordered": True, "timeout_s": 2.0}, (0.0, 2.0), True),
        ({"ordered": True, "choose": lambda *_: None}, (0.0, 7.0), False),
    ],
)  # fmt: skip
def test_the_times_of_a_new_request(more, times_s, is_strict):
    options = SinkOptions.parse(nameServer="h:1", sendMsgTimeout="4s", orderWaitMs="7s")
    engine, sent = SendEngine(options, clock=lambda: NOW_S), []
    engine.flow.send = lambda attempt, now_s: sent.append((attempt, now_s))
    assert engine.try_submit(SendRequest("t", b"body", **more))
    [(attempt, now_s)] = sent
    assert (attempt.ready_s - NOW_S, attempt.deadline_s - NOW_S, now_s) == (*times_s, NOW_S)
    assert (attempt.strict, attempt.body_bytes) == (is_strict, 4)
    assert engine.longest_s == max(4.0, times_s[1] if "since_s" not in more else 0.0)
    engine.abandon()


def test_how_long_an_engine_waits():
    options = SinkOptions.parse(nameServer="h:1", maxMessagesPerSecond=10)
    engine, attempt = SendEngine(options, clock=lambda: NOW_S), World().attempt()
    engine.client.prepare = lambda longest_s: min(longest_s, 0.5)
    engine.routes._planned["t"], engine._rates.due_s = NOW_S + 0.125, NOW_S - 1.0
    assert (engine.prepare(5.0), engine.prepare(0.25)) == (0.5, 0.25), "nothing waits for a route"
    engine.flow.waiting.add(attempt, Wait.ROUTE, NOW_S + 9.0)
    assert engine.prepare(5.0) == 0.125
    engine.flow.waiting.add(World().attempt(), Wait.DELAY, NOW_S + 0.0625)
    assert engine.prepare(5.0) == 0.0625
    engine._rates.due_s = NOW_S + 0.03125
    assert engine.prepare(5.0) == 0.03125
    engine.flow.ends.append((attempt, None, None, NOW_S))
    assert engine.prepare(5.0) == 0.0
    engine.abandon()


GONE = errors.NoRouteError("gone")


@pytest.mark.parametrize(
    ("error", "is_unresolvable", "is_fetching", "remaining_s", "kind"),
    [
        (None, False, True, 1.0, None), (None, False, True, 0.0, errors.NoRouteError),
        (GONE, False, True, 1.0, None), (GONE, False, True, 0.0, errors.NoRouteError),
        (GONE, False, False, 1.0, None), (GONE, True, True, 1.0, None),
        (GONE, True, False, 1.0, errors.NoRouteError),
        (errors.TlsRefusedError("no"), False, False, 1.0, errors.TlsRefusedError),
        (errors.TlsRefusedError("no"), False, True, 1.0, None),
    ],
)  # fmt: skip
def test_a_route_that_is_not_known(error, is_unresolvable, is_fetching, remaining_s, kind):
    engine = object.__new__(SendEngine)
    engine.clock = lambda: NOW_S
    engine.routes = SimpleNamespace(
        get=lambda *_: None, error=lambda topic: error, fetching=lambda topic: is_fetching,
        is_unresolvable=lambda topic: is_unresolvable,
    )  # fmt: skip
    if kind is None:
        assert engine.known_route("t", NOW_S + remaining_s) is None
        return
    with pytest.raises(kind) as caught:
        engine.known_route("t", NOW_S + remaining_s)
    assert caught.value is not error


def test_measurements_of_failures():
    """A request that failed as a whole is one measurement, a group one for each message."""
    records = []
    metrics = SimpleNamespace(record=lambda *args, **more: records.append((args, more)))
    none = None
    flow = RequestFlow(
        lambda: NOW_S + 3.0, none, none, none, none, none, none, none, _metrics=metrics
    )
    error = errors.ConnectError("refused")
    batch = SendRequest("t", b"", message_count=3, since_s=NOW_S)
    flow.measure_failure(batch, error, "a:1")
    flow.measure_failure(SendRequest("t", b"", message_count=2, group=none or object()), error)
    ends = {"result": None, "error": error}
    assert records == [
        (("t", 3, 3.0), {"address": "a:1", **ends}),
        *[(("t", 1, 0.0), {"address": None, **ends})] * 2,
    ]
    records.clear()
    attempt = World().attempt(message_count=2)
    end = flow._defect_completion(attempt, ValueError("defect"))
    assert (end.outcome, end.maybe_duplicate, end.token) == (Outcome.UNKNOWN, True, "token")
    assert "an answer of a:1 could not be handled: ValueError" in str(end.error)
    flow._measure(metrics, attempt, Completion(None, Outcome.NOT_SENT, None, error))
    attempt.request.since_s = NOW_S - 1.0
    flow._measure(metrics, attempt, Completion(None, Outcome.NOT_SENT, None, error))
    assert records == [(("t", 2, took_s), {"address": "a:1", **ends}) for took_s in (1.0, 2.0)]


# --- limits ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "messages", "size"),
    [
        ({}, 4000, 3 << 20), ({"maxMessagesPerSecond": 100, "rateTasks": 8}, 12, 3 << 20),
        ({"maxMessagesPerSecond": 3, "rateTasks": 8}, 1, 3 << 20),
        ({"maxMessagesPerSecond": 1_000_000}, 4000, 3 << 20),
        ({"maxBytesPerSecond": "100k", "rateTasks": 2}, 4000, 50 << 10),
        ({"maxBytesPerSecond": "2k", "rateTasks": 8}, 4000, 1024),
        ({"maxBytesPerSecond": "1g"}, 4000, 3 << 20),
    ],
)  # fmt: skip
def test_a_batch_is_no_larger_than_what_a_task_sends_in_a_second(options, messages, size):
    parsed = SinkOptions.parse({"requestMaxMessages": 4000, "requestMaxBytes": "3m", **options})
    limited = rate_limited_options(parsed)
    assert (limited.request_max_messages, limited.request_max_bytes) == (messages, size)


def test_the_window_has_room_up_to_both_limits():
    window = Window(SinkOptions.parse(maxInFlight=4, backPressureForAsyncSendSize=2000))
    assert window.take(5000) and not window.has_room(1)
    window.give_back(5000)
    assert window.take(400, 2) and window.has_room(1600) and not window.has_room(1601)
    assert window.has_room(1600, others=1) and not window.has_room(1600, others=2)
    assert window.is_roomy and window.take(1) and window.is_roomy
    assert window.take(1) and not window.is_roomy and not window.take(1)
    assert (window.requests, window.bytes) == (4, 402)
    window.give_back(402, 4)
    for requests, size in ((1, 0), (0, 1)):
        with pytest.raises(AssertionError, match="twice"):
            window.give_back(size, requests)
        window.requests = window.bytes = 0
