"""The Java client's own producer tests, by their numbers in the conformance list.

If a message is wrong before any byte is sent, Java calls the callback, and we raise: C47 counts
both, and neither of them twice.
"""

import contextlib

import pytest

from rocket_sink import errors
from rocket_sink.message import Message, MessageQueue
from rocket_sink.producer.producer import Producer

NOWHERE = "127.0.0.1:1"


def test_c45_no_name_server_answers(closing):
    with Producer(nameServer=NOWHERE) as producer:
        with pytest.raises(errors.NameServerUnavailableError) as caught:
            producer.send(Message("orders", b"x"))
        assert "no name server answered" in caught.value.text
        assert set(caught.value.reasons) == {NOWHERE}
        assert "`rocket-sink cluster up`" in caught.value.text
    remote = f"{NOWHERE};no-such-host.invalid:9876"
    producer = closing(Producer(nameServer=remote))
    with pytest.raises(errors.NameServerUnavailableError) as caught:
        producer.send(Message("orders", b"x"))
    assert caught.value.text.endswith("check the option nameServer")


def test_c45_no_route(cluster, make_producer):
    producer = make_producer(createTopic="", sendMsgTimeout=500)
    for mode in (producer.send, producer.send_oneway, lambda m: producer.send_async(m).result(9)):
        with pytest.raises(errors.NoRouteError, match="unknown") as caught:
            mode(Message("unknown", b"x"))
        assert caught.value.topic == "unknown"


@pytest.mark.parametrize("auto_batch", [False, True])
def test_c47_six_async_sends_of_which_five_are_bad(cluster, make_producer, auto_batch):
    producer, good, ends = make_producer(autoBatch=auto_batch), Message("orders", b"hello"), []
    nowhere = MessageQueue("orders", "no-such-broker", 0)
    calls = (
        (lambda: Message("orders", b""), {}), (lambda: good, {"queue": nowhere}),
        (lambda: Message("", b"x"), {"queue": nowhere}),
        (lambda: Message("orders", None), {"selector": _none}),
        (lambda: good, {"selector": _none}), (lambda: good, {}),
    )  # fmt: skip
    for make, where in calls:
        try:
            producer.send_async(make(), lambda *end: ends.append(end), **where)
        except errors.RocketSinkError as error:
            ends.append((None, error))
    producer.close()
    assert len(ends) == 6 and all((result is None) is not (e is None) for result, e in ends)
    assert sum(error is None for _, error in ends) == 1
    assert len(cluster.messages("orders")) == 1


def _none(queues, message, arg):
    return None


def test_c47_a_selector_that_returns_nothing_is_named(make_producer):
    with pytest.raises(errors.ConfigurationError, match="_none"):
        make_producer().send(Message("orders", b"x"), selector=_none)


def test_c51_oneway_raises_the_transports_own_error(cluster, make_producer):
    producer = make_producer(sendMsgTimeout=1000)
    producer.send_oneway(Message("orders", b"one"))
    cluster.kill()
    # The kernel may take a frame for the dead connection, or refuse it; it does neither twice.
    with pytest.raises(errors.ConnectError, match=r"127\.0\.0\.1:"):
        for _ in range(4):
            with contextlib.suppress(errors.UnwrittenError):
                producer.send_oneway(Message("orders", b"two"))
