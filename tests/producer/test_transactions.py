"""Transactions: half message, local transaction, commit and rollback, check-backs."""

import pytest

from rocket_sink import errors
from rocket_sink.message import Message
from rocket_sink.producer.transactions import COMMIT, ROLLBACK, UNKNOWN
from rocket_sink.testing import Answer
from rocket_sink.wire.codes import RequestCode, SysFlag
from rocket_sink.wire.headers import ONEWAY_FLAG, Frame
from rocket_sink.wire.stored import StoredMessage, encode_stored
from tests.producer.waiting import until


def halves(cluster):
    return [half for broker in cluster.brokers for half in broker.half_messages()]


def test_a_committed_message_is_delivered_after_execute(cluster, make_producer):
    calls = []

    def execute(message, arg):
        calls.append((message.message_id, arg, len(halves(cluster)), cluster.messages("orders")))
        return COMMIT

    result = make_producer(producerGroup="g").send_in_transaction(
        Message("orders", b"x", keys=["k"]), execute, "arg"
    )
    (stored,) = cluster.messages("orders")
    assert calls == [(result.transaction_id, "arg", 1, [])]
    assert result.state is COMMIT and result.ended and halves(cluster) == []
    assert stored.message_id == result.transaction_id and stored.properties["PGROUP"] == "g"
    assert stored.sys_flag & SysFlag.TRANSACTION_PREPARED


def test_a_half_message_that_is_refused_is_not_executed(cluster, make_producer):
    cluster.on_send(Answer(13, "illegal"), times=None)
    called = []
    with pytest.raises(errors.RejectedError):
        make_producer().send_in_transaction(Message("orders", b"x"), lambda *a: called.append(a))
    with pytest.raises(errors.MessageError):
        make_producer().send_in_transaction(Message("orders", b"x", delay_level=3), called.append)
    assert not called and not cluster.requests(RequestCode.END_TRANSACTION)


@pytest.mark.parametrize("state, delivered", [(COMMIT, 1), (ROLLBACK, 0)])
def test_the_listener_answers_a_check(cluster, make_producer, state, delivered):
    messages = []

    def listener(message):
        messages.append(message)
        return state

    producer = make_producer(transaction_listener=listener)
    result = producer.send_in_transaction(Message("orders", b"x"), lambda m, a: UNKNOWN)
    cluster.check_transactions()
    until(lambda: not halves(cluster))
    assert [m.message_id for m in messages] == [result.transaction_id]
    assert (messages[0].topic, messages[0].body) == ("orders", b"x")
    assert len(cluster.messages("orders")) == delivered
    assert cluster.requests(RequestCode.END_TRANSACTION)[-1].ext["fromTransactionCheck"] == "true"


def test_a_check_without_a_topic_is_answered_too(cluster, make_producer):
    listening = make_producer(producerGroup="g", transaction_listener=lambda m: COMMIT)
    listening.listen_for_checks("orders")
    until(lambda: all(_greeted(broker, listening) for broker in cluster.brokers))
    half = encode_stored(StoredMessage("", b"x", properties={"PGROUP": "g", "UNIQ_KEY": "A"}))
    offsets = {"tranStateTableOffset": "999", "commitLogOffset": "999"}
    check = Frame(RequestCode.CHECK_TRANSACTION_STATE, offsets, half, flag=ONEWAY_FLAG)
    for number in range(2):
        cluster.brokers[0].send_request(check)
        until(lambda number=number: len(cluster.requests(RequestCode.END_TRANSACTION)) > number)


def test_who_only_listens_follows_a_broker_that_moves(cluster, make_producer):
    make_producer().send_in_transaction(Message("orders", b"x"), lambda m, a: UNKNOWN)
    other = make_producer(transaction_listener=lambda m: COMMIT, pollNameServerInterval=200)
    other.listen_for_checks("orders")
    until(lambda: all(_greeted(broker, other) for broker in cluster.brokers))
    for broker in cluster.brokers:
        broker.requests.clear()
        broker.fail_over()
    until(lambda: all(_greeted(broker, other) for broker in cluster.brokers), 20.0)
    cluster.check_transactions()
    until(lambda: cluster.messages("orders"))


def _greeted(broker, producer):
    client = producer._session.engine.identity.client_id.encode()
    return any(
        frame.code == RequestCode.HEART_BEAT and client in bytes(frame.body)
        for frame in broker.requests
    )
