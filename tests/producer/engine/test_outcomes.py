"""The five outcomes, and the next attempt after each error."""

import pickle
import time
from dataclasses import replace

import pytest

from rocket_sink import errors
from rocket_sink.errors import Outcome
from rocket_sink.message import Message, MessageQueue
from rocket_sink.producer.transactions import COMMIT
from rocket_sink.testing import Answer, CloseConnection, Delay, Drop, IncompleteAnswer
from rocket_sink.wire.codes import RequestCode
from rocket_sink.wire.route import QueueMapping
from tests.producer.conftest import is_well, request, send, submit


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


def test_retry_goes_elsewhere_with_that_brokers_header(cluster, engine):
    cluster.create_topic("orders", 8, brokers=["broker-a"])
    cluster.create_topic("orders", 1, brokers=["broker-b"])
    cluster.broker("broker-a").on_send(Answer(14, "not available"), times=None)
    began_ms = time.time_ns() // 1_000_000
    for number in range(10):
        completion = send(engine, number)
        assert completion.outcome is Outcome.ACKED
        assert completion.result.queue == MessageQueue("orders", "broker-b", 0)
    messages = cluster.broker("broker-b").store.messages("orders")
    assert len(messages) == 10 and messages[-1].born_ms == completion.attempts[-1].started_ms
    assert began_ms <= messages[0].born_ms <= messages[-1].born_ms <= time.time() * 1000


def test_bulk_senders_outlast_a_busy_second(cluster, make_engine):
    cluster.on_send(Answer(2, "[TIMEOUT_CLEAN_QUEUE]broker busy"), times=4)
    completion = send(make_engine(retryBackoffMs=1), retry_while_busy=True, timeout_s=60.0)
    assert completion.outcome is Outcome.ACKED and len(completion.attempts) > 3


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


# --- less durability than asked for -----------------------------------------------------------


CALLS = {
    "send": lambda producer, message: producer.send(message),
    "send_async": lambda producer, message: producer.send_async(message).result(30),
    "gathered": lambda producer, message: producer.send_async(message).result(30),
    "send_batch": lambda producer, message: producer.send_batch([message, message])[0],
    "transaction": lambda producer, message: producer.send_in_transaction(
        message, lambda *_: COMMIT
    ),
}


@pytest.mark.parametrize("mode", CALLS)
@pytest.mark.parametrize("code", [10, 11, 12])
def test_on_degraded_fail_reaches_every_caller(cluster, make_producer, mode, code):
    cluster.on_send(Answer(code), times=None)
    producer = make_producer(onDegraded="fail", autoBatch=mode == "gathered")
    with pytest.raises(errors.DegradedError, match="onDegraded=fail") as caught:
        CALLS[mode](producer, Message("orders", b"body"))
    again = pickle.loads(pickle.dumps(caught.value))
    assert again.result.outcome is Outcome.ACKED_DEGRADED
    assert again.result.broker_address in {broker.address for broker in cluster.brokers}
    if mode == "transaction":
        assert not cluster.messages("orders")
        assert not any(broker.half_messages() for broker in cluster.brokers)
    else:
        assert len(cluster.messages("orders")) == 1 + (mode == "send_batch")


@pytest.mark.parametrize("mode", ["send", "send_async", "send_batch"])
def test_a_request_that_a_living_broker_holds_is_not_doubled(cluster, make_producer, mode):
    """With a dead slave, each send is answered late, and any other request at once."""
    # An attempt's share of the time is shorter.
    cluster.on_send(Delay(1800), times=None)
    producer = make_producer(sendMsgTimeout="20s", retryTimesWhenSendFailed=19)
    result = CALLS[mode](producer, Message("orders", b"body"))
    assert not result.maybe_duplicate and result.attempts == 1
    assert len(cluster.messages("orders")) == 1 + (mode == "send_batch")
