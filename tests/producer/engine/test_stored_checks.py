"""Requests with ids to verify: after an unknown outcome the engine asks the broker first."""

import pytest

from rocket_sink.errors import Outcome
from rocket_sink.message import MessageQueue
from rocket_sink.producer.engine import stored_check
from rocket_sink.testing import Answer, CloseConnection, Drop
from tests.producer.conftest import request, send

QUICK = {
    "sendMsgTimeout": 600, "retryTimesWhenSendFailed": 2, "storedCheckDelay": 50,
    "storedCheckTimeout": 600,
}  # fmt: skip
LOST = (Drop(), CloseConnection(), Answer(1, "java.lang.Exception", stores=True))


def bodies(cluster):
    return sorted(message.body for message in cluster.messages("orders"))


@pytest.mark.parametrize("behaviour", LOST, ids=lambda b: type(b).__name__)
@pytest.mark.parametrize("ordered", [False, True])
def test_a_lost_answer_is_found_and_nothing_is_sent_again(cluster, make_engine, behaviour, ordered):
    cluster.on_send(behaviour, times=None)
    queue = MessageQueue("orders", cluster.brokers[0].name, 1) if ordered else None
    engine = make_engine(**QUICK, orderWaitMs=600)
    completion = send(engine, 1, verify_ids=("ID1",), queue=queue, ordered=ordered)
    assert (completion.outcome, completion.found_stored) == (Outcome.ACKED, True)
    assert not completion.maybe_duplicate
    assert bodies(cluster) == [b"body-1"]
    (stored,) = cluster.messages("orders")
    assert completion.result.offset_message_id == stored.offset_message_id
    (attempt,) = completion.attempts
    assert (attempt.outcome, attempt.remark) == (
        Outcome.ACKED, "no answer came; found stored by its id"
    )  # fmt: skip


@pytest.mark.parametrize("ordered", [False, True])
def test_what_was_not_stored_is_sent_again(cluster, make_engine, ordered):
    cluster.on_send(Drop(stores=False), times=1)
    queue = MessageQueue("orders", cluster.brokers[0].name, 1) if ordered else None
    engine = make_engine(**QUICK, orderWaitMs=600)
    completion = send(engine, 1, verify_ids=("ID1",), queue=queue, ordered=ordered)
    assert (completion.outcome, completion.found_stored) == (Outcome.ACKED, False)
    assert bodies(cluster) == [b"body-1"] and not completion.maybe_duplicate
    first, *_, last = completion.attempts
    assert (first.outcome, last.outcome) == (Outcome.REJECTED, Outcome.ACKED)
    assert "its id is not stored" in (first.remark or "")
    # The report sums records by broker: one without an address would belong to none.
    assert all(attempt.broker_address and attempt.wire_bytes for attempt in completion.attempts)
    numbers = [attempt.attempt for attempt in completion.attempts]
    assert numbers == sorted(set(numbers)), "each attempt has one record"


@pytest.mark.parametrize("stores", [True, False])
def test_a_broker_that_answers_others_is_asked(cluster, make_engine, monkeypatch, stores):
    """A batch whose answer a busy broker drops does not wait for `storedCheckTimeout`."""
    monkeypatch.setattr(stored_check, "ANSWER_LOST_S", 0.1)
    broker = cluster.brokers[0]
    broker.on_send(Drop(stores=stores), times=1)
    queue = MessageQueue("orders", broker.name, 1)
    engine = make_engine(**{**QUICK, "storedCheckTimeout": 3_600_000})
    for token in (1, 2):
        engine.submit(request(token, verify_ids=(f"ID{token}",), queue=queue))
    completions = engine.drain(engine.clock() + 20)
    assert len(completions) == 2
    assert {(e.outcome, e.maybe_duplicate) for e in completions} == {(Outcome.ACKED, False)}
    assert {each.token: each.found_stored for each in completions} == {1: stores, 2: False}
    assert bodies(cluster) == [b"body-1", b"body-2"]
