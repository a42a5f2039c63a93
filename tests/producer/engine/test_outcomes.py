"""The five outcomes, and the next attempt after each error."""

from dataclasses import replace
from itertools import pairwise

import pytest

from rocket_sink import errors
from rocket_sink.errors import Outcome
from rocket_sink.message import MessageQueue
from rocket_sink.producer.engine.attempt import SendRequest
from rocket_sink.testing import Answer, CloseConnection, Delay, Drop, IncompleteAnswer
from rocket_sink.wire.batch import encode_inner
from rocket_sink.wire.codes import RequestCode
from rocket_sink.wire.route import QueueMapping
from tests.producer.conftest import drive_until, is_well, request, send, submit


def test_acked(cluster, make_engine):
    engine = make_engine()
    completion = send(engine, 1)
    assert engine.poll(3600.0) == [], "nothing is pending"
    assert completion.outcome is Outcome.ACKED
    assert completion.result.status == "SEND_OK"
    (stored,) = cluster.messages("orders")
    assert stored.body == b"body-1"
    assert completion.result.queue.queue_id == stored.queue_id
    assert completion.result.queue_offset == stored.queue_offset
    assert not completion.maybe_duplicate
    (attempt,) = completion.attempts
    assert attempt.outcome is Outcome.ACKED and attempt.wire_bytes > attempt.body_bytes > 0
    assert (attempt.attempt, attempt.message_count) == (1, 1)


@pytest.mark.parametrize(
    ("behaviour", "outcome", "error", "attempts"),
    [
        (Answer(10, "flush disk timeout"), Outcome.ACKED_DEGRADED, "NoneType", 1),
        (Answer(13, "the message is illegal"), Outcome.REJECTED, "MessageIllegalError", 1),
        (Answer(16, "User:nobody is not found."), Outcome.REJECTED, "AuthenticationError", 1),
        (Answer(17, "topic[orders] not exist"), Outcome.REJECTED, "TopicNotFoundError", 2),
        (CloseConnection(), Outcome.UNKNOWN, "ConnectionLostError", 3),
        (IncompleteAnswer(), Outcome.UNKNOWN, "InvalidAnswerError", 3),
    ],
)
def test_the_same_answer_of_all_brokers(cluster, engine, behaviour, outcome, error, attempts):
    cluster.on_send(behaviour, times=None)
    completion = send(engine)
    assert (completion.outcome, len(completion.attempts)) == (outcome, attempts)
    assert type(completion.error).__name__ == error
    assert completion.maybe_duplicate is (outcome is Outcome.UNKNOWN)
    assert engine.is_broken is (error == "AuthenticationError")
    if outcome is Outcome.REJECTED:
        assert completion.error.response_code == behaviour.code and engine.isolations() == []
    elif outcome is Outcome.ACKED_DEGRADED:
        assert completion.result.status == "FLUSH_DISK_TIMEOUT"
        assert len(cluster.messages("orders")) == 1


def test_not_sent_when_refused(cluster, make_engine):
    engine = make_engine(sendMsgTimeout=600)
    send(engine)
    cluster.kill()
    completion = send(engine)
    assert completion.outcome is Outcome.NOT_SENT
    assert not completion.maybe_duplicate
    assert isinstance(completion.error, errors.ConnectError)
    assert len(completion.attempts) == 3
    waits_ms = [attempt.queue_wait_ms for attempt in send(engine).attempts]
    assert waits_ms[1] < waits_ms[2] >= 5, "both brokers have refused, so the third one waits"


def test_a_batch_that_a_broker_refuses_for_its_size_limits_later_ones(cluster, engine):
    assert engine.batch_limit("orders") is None
    cluster.on_send(Answer(1, "java.lang.RuntimeException: message body size exceeded"), times=None)
    body = encode_inner(bytes(100_000), "") * 2
    engine.submit(SendRequest("orders", body, message_count=2, batch=True))
    (completion,) = engine.drain()
    assert isinstance(completion.error, errors.BatchTooLargeError)
    assert engine.batch_limit("orders") == len(body) // 2


def test_times_of_options_are_seconds_in_the_engine(make_engine):
    engine = make_engine(
        sendMsgTimeout=1001, orderWaitMs=1002, sendMsgMaxTimeoutPerRequest=1003,
        storedCheckTimeout=1004, storedCheckDelay=1005, heartbeatBrokerInterval=1006,
        pollNameServerInterval=1007, suspectAfterMs=1008, connectTimeoutMs=1009,
        retryTimesWhenSendFailed=3,
    )  # fmt: skip
    assert vars(engine._limits) == {
        "timeout_s": 1.001, "order_wait_s": 1.002, "attempt_cap_s": 1.003, "stored_check_s": 1.004,
        "max_attempts": 4,
    }  # fmt: skip
    assert (engine.stored_checks._timeout_s, engine.stored_checks._delay_s) == (1.004, 1.005)
    assert (engine.heartbeats._interval_s, engine.routes._interval_s) == (1.006, 1.007)
    assert engine.brokers._floor_s == 1.008
    assert engine.routes._name_servers._timeout_s == 1.009


def test_an_answer_that_is_not_awaited_is_no_lost_connection(cluster, make_engine):
    """Otherwise the report would call the broker away."""
    cluster.brokers[0].freeze()
    engine = make_engine(sendMsgTimeout=60_000)
    engine.publish_info("orders")
    engine.submit(request(1, queue=MessageQueue("orders", cluster.brokers[0].name, 0)))
    [completion] = engine.drain(engine.clock() + 1)
    assert (completion.outcome, completion.error.code) == (Outcome.UNKNOWN, "UNKNOWN")
    assert "given up before" in completion.error.text
    assert [attempt.error_code for attempt in completion.attempts] == ["UNKNOWN"]


def test_unknown_then_acked_is_marked(cluster, engine):
    engine.publish_info("orders")
    cluster.on_send(CloseConnection(stores=True), times=None)
    cluster.brokers[1].behave()
    completions = [send(engine, n) for n in range(8)]
    assert all(c.outcome is Outcome.ACKED for c in completions)
    doubled = [c for c in completions if c.maybe_duplicate]
    assert doubled
    for completion in doubled:
        ids = [m.properties["UNIQ_KEY"] for m in cluster.messages("orders")]
        assert ids.count(completion.result.message_id) == 2


def test_attempts_share_one_deadline(cluster, make_engine):
    cluster.freeze()
    engine = make_engine(sendMsgTimeout=3000)
    started = engine.clock()
    completion = send(engine)
    took = engine.clock() - started
    assert isinstance(completion.error, errors.RequestTimeoutError)
    assert all(engine.brokers.of(broker.name).window is None for broker in cluster.brokers)
    assert len(completion.attempts) == 3
    assert len({a.broker_name for a in completion.attempts}) == 2
    assert 2.8 < took < 8.5, "three deadlines make it 9 s"
    shares = [a.rtt_ms for a in completion.attempts]
    assert max(shares) < 2800, shares


def test_retry_goes_elsewhere_with_that_brokers_header(cluster, engine):
    cluster.create_topic("orders", 8, brokers=["broker-a"])
    cluster.create_topic("orders", 1, brokers=["broker-b"])
    cluster.broker("broker-a").on_send(Answer(14, "not available"), times=None)
    for number in range(10):
        completion = send(engine, number)
        assert completion.outcome is Outcome.ACKED
        assert completion.result.queue == MessageQueue("orders", "broker-b", 0)
    assert len(cluster.broker("broker-b").store.messages("orders")) == 10


@pytest.mark.parametrize("selector", ["round_robin", "random", "weighted"])
def test_a_retry_goes_to_another_broker_without_the_fault_table(cluster, make_engine, selector):
    engine = make_engine(faultTable="off", queueSelector=selector)
    send(engine, "warm")
    for number in range(24):
        cluster.behave()
        cluster.on_send(CloseConnection(stores=False), times=1)
        attempts = send(engine, number, attempts=3).attempts
        assert len(attempts) >= 2
        for before, after in pairwise(attempts):
            assert before.broker_name != after.broker_name


def test_bulk_senders_outlast_a_busy_second(cluster, make_engine):
    cluster.on_send(Answer(2, "[TIMEOUT_CLEAN_QUEUE]broker busy"), times=4)
    completion = send(make_engine(retryBackoffMs=1), retry_while_busy=True, timeout_s=60.0)
    assert completion.outcome is Outcome.ACKED and len(completion.attempts) > 3


def test_a_failing_broker_is_isolated_and_reported(cluster, engine):
    cluster.broker("broker-a").on_send(CloseConnection(), times=None)
    for number in range(6):
        assert send(engine, number).outcome.delivered
    assert not is_well(engine, "broker-a") and is_well(engine, "broker-b")
    events = engine.isolations()
    assert {event.broker_name for event in events} == {"broker-a"}
    assert engine.isolations() == []


def test_unknown_topic_is_an_error_at_once(cluster, make_engine):
    cluster.delete_topic("orders")
    engine = make_engine(createTopic="")
    started = engine.clock()
    completion = send(engine)
    assert isinstance(completion.error, errors.NoRouteError)
    assert completion.outcome is Outcome.NOT_SENT
    (waited,) = completion.attempts
    assert (waited.broker_name, waited.queue_id, waited.queue_offset) == ("", -1, -1)
    assert engine.clock() - started < 1.0
    with pytest.raises(errors.NoRouteError, match="orders"):
        engine.publish_info("orders")


@pytest.mark.parametrize("ordering", ["none", "strict"])
def test_a_static_queue_that_moved_is_sent_to_its_new_broker(
    cluster, make_engine, monkeypatch, ordering
):
    old, new = cluster.brokers
    static = cluster.route("orders")

    def moved_to(broker, epoch):
        mapping = QueueMapping(broker.name, 1, epoch, queue_ids={0: 0})
        route = replace(static, mappings={broker.name: mapping})
        monkeypatch.setattr(cluster, "route", lambda topic: route)

    moved_to(old, 1)
    engine = make_engine(ordering=ordering, sendMsgTimeout=30_000)
    (queue,) = engine.publish_info("orders").queues
    moved_to(new, 2)
    old.on_send(Answer(501, "orders-0 does not exit in request process of broker"), times=None)
    completion = send(engine, queue=queue, ordered=ordering == "strict")
    assert completion.outcome is Outcome.ACKED and not completion.maybe_duplicate
    assert [attempt.broker_address for attempt in completion.attempts] == [old.address, new.address]
    assert completion.attempts[0].error_code == errors.QueueMovedError.code
    assert is_well(engine, old.name)


def test_dead_name_servers_do_not_stop_a_known_route(cluster, make_engine):
    engine = make_engine(pollNameServerInterval=50)
    send(engine, 1)
    cluster.stop_name_server()
    for number in range(5):
        assert send(engine, number).outcome is Outcome.ACKED


def test_a_late_answer_is_counted_and_changes_nothing(cluster, make_engine):
    engine = make_engine(sendMsgTimeout=600, retryTimesWhenSendFailed=0)
    engine.publish_info("orders")
    cluster.on_send(Delay(900), times=1)
    completion = send(engine)
    assert completion.outcome is Outcome.UNKNOWN
    queue = MessageQueue("orders", completion.attempts[0].broker_name, 0)

    def late_answers():
        return sum(channel.connection.unexpected_answers for channel in engine.client.channels)

    drive_until(engine, late_answers)
    assert late_answers() == 1
    assert send(engine, queue=queue).outcome is Outcome.ACKED


def test_a_topic_that_was_shrunk_costs_one_look_at_the_route(cluster, engine):
    cluster.create_topic("orders", 8)
    engine.publish_info("orders")
    cluster.create_topic("orders", 1)
    completions = [send(engine, number) for number in range(12)]
    assert all(c.outcome is Outcome.ACKED for c in completions)


@pytest.mark.parametrize("closes", [True, False])
def test_closing_completes_what_is_pending_and_drain_has_a_deadline(cluster, engine, closes):
    cluster.on_send(Drop(), times=None)
    engine.publish_info("orders")
    submit(engine, 5)
    if closes:
        engine.poll(0.1)
        engine.close(timeout_s=0.2)
    completions = engine.take() if closes else engine.drain(engine.clock() + 0.2)
    assert [c.outcome for c in completions] == [Outcome.UNKNOWN] * 5 and engine.pending == 0
    assert engine.is_broken is closes
    engine.close()
    with pytest.raises(errors.ProducerClosedError):
        engine.submit(request(6))


def test_an_engine_that_is_abandoned_is_closed_and_says_nothing(cluster, make_engine):
    engine = make_engine()
    send(engine)
    engine.abandon()
    engine.close()
    assert engine.is_broken and not cluster.requests(RequestCode.UNREGISTER_CLIENT)
