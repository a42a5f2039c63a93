"""Messages stored with less durability than asked for, and brokers that hold back their answers."""

import pickle

import pytest

from rocket_sink.errors import DegradedError, Outcome
from rocket_sink.message import Message
from rocket_sink.producer.transactions import COMMIT
from rocket_sink.testing import Answer, Delay

HELD_S = 1.8
"""The time is longer than an attempt's share of three seconds, and well below three seconds."""


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
    with pytest.raises(DegradedError, match="onDegraded=fail") as caught:
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
    cluster.on_send(Delay(HELD_S * 1000), times=None)
    producer = make_producer(sendMsgTimeout="20s", retryTimesWhenSendFailed=19)
    result = CALLS[mode](producer, Message("orders", b"body"))
    assert not result.maybe_duplicate and result.attempts == 1
    assert len(cluster.messages("orders")) == 1 + (mode == "send_batch")
