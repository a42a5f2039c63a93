"""The Java client's own producer tests, by their numbers in the conformance list.

If a message is wrong before any byte is sent, Java calls the callback, and we raise: C47 counts
both, and neither of them twice.
"""

import threading

import pytest

from rocket_sink import errors
from rocket_sink.message import Message, MessageQueue
from rocket_sink.options import SinkOptions
from rocket_sink.producer.engine.limits import Window
from rocket_sink.producer.producer import Producer
from rocket_sink.testing import Answer, Drop
from rocket_sink.wire.codes import RequestCode, SysFlag

NOWHERE = "127.0.0.1:1"


def test_c44_an_empty_body():
    with pytest.raises(errors.MessageError, match="message body length is zero") as caught:
        Message("orders", b"")
    assert caught.value.code == "EMPTY_BODY"


def test_c45_no_name_server_is_given(monkeypatch):
    monkeypatch.delenv("NAMESRV_ADDR", raising=False)
    with pytest.raises(errors.OptionError, match="nameServer is missing"):
        Producer(producerGroup="g")


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


@pytest.mark.parametrize(("size", "flag"), [(15, 0), (16, SysFlag.COMPRESSED)])
def test_c46_a_sync_send_and_a_body_at_the_compression_limit(cluster, make_producer, size, flag):
    fields = (("msgId", "123"), ("queueId", "1"), ("queueOffset", "456"))
    cluster.on_send(Answer(0, ext=fields), times=None)
    producer = make_producer(compressMsgBodyOverHowmuch=16)
    result = producer.send(Message("orders", bytes(size)))
    assert result.status == "SEND_OK"
    assert (result.offset_message_id, result.queue_offset) == ("123", 456)
    (sent,) = cluster.requests(RequestCode.SEND_MESSAGE_V2)
    assert int(sent.ext["f"]) & SysFlag.COMPRESSED == flag
    assert (sent.body == bytes(size)) is (flag == 0)


class Ends:
    """Counts the results of calls: raised, or passed to the callback."""

    def __init__(self):
        self.good, self.bad, self.calls = 0, 0, 0
        self._all = threading.Event()

    def __call__(self, result, error):
        assert (result is None) is not (error is None)
        self.good, self.bad = self.good + (error is None), self.bad + (error is not None)

    def attempt(self, call):
        self.calls += 1
        try:
            return call()
        except errors.RocketSinkError:
            self.bad += 1
            return None


@pytest.mark.parametrize("auto_batch", [False, True])
def test_c47_six_async_sends_of_which_five_are_bad(cluster, make_producer, auto_batch):
    producer, good, ends = make_producer(autoBatch=auto_batch), Message("orders", b"hello"), Ends()
    nowhere = MessageQueue("orders", "no-such-broker", 0)
    calls = (
        lambda: producer.send_async(Message("orders", b""), ends),
        lambda: producer.send_async(good, ends, queue=nowhere),
        lambda: producer.send_async(Message("", b"x"), ends, queue=nowhere),
        lambda: producer.send_async(Message("orders", None), ends, selector=_none),
        lambda: producer.send_async(good, ends, selector=_none),
        lambda: producer.send_async(good, ends),
    )
    for future in filter(None, [ends.attempt(call) for call in calls]):
        future.exception(10)
    producer.close()
    assert (ends.calls, ends.bad, ends.good) == (6, 5, 1)
    assert len(cluster.messages("orders")) == 1


def _none(queues, message, arg):
    return None


def test_c47_four_batches_of_which_one_is_bad_twice(cluster, make_producer):
    producer, ends = make_producer(), Ends()
    batch = [Message("orders", b"hello world%d" % n) for n in range(5)]
    queue = MessageQueue("orders", cluster.brokers[0].name, 1)
    nowhere = {"queue": MessageQueue("orders", "no-such-broker", 0), "timeout_ms": 500}
    for _ in range(2):
        for options in ({}, {"timeout_ms": 5000}, {"queue": queue}, nowhere):
            ends.attempt(lambda options=options: producer.send_batch(batch, **options))
    assert (ends.calls, ends.bad) == (8, 2)
    assert len(cluster.messages("orders")) == 30


def test_c47_a_selector_that_returns_nothing_is_named(make_producer):
    with pytest.raises(errors.ConfigurationError, match="_none"):
        make_producer().send(Message("orders", b"x"), selector=_none)


def test_c48_the_codes_that_are_retried():
    """The codes are Java's eight and three further ones: flow control (215), a missing queue (29)
    and a moved queue (501). Brokers answer all of them before they store anything."""
    java = {17, 14, 1, 2, 16, 204, 205, 1500}
    assert set(SinkOptions.parse().retry_response_codes) == java | {215, 29, 501}
    assert SinkOptions.parse(retryResponseCodes="2,14").retry_response_codes == (2, 14)


@pytest.mark.parametrize("limit", [10, 15])
def test_c49_free_places_and_those_in_flight_make_the_limit(limit):
    """The limit is an option here, so it does not change while requests are in flight."""
    window = Window(SinkOptions.parse(backPressureForAsyncSendNum=limit))
    for _ in range(5):
        assert window.take(1)
    free = 0
    while window.take(1):
        free += 1
    assert window.requests == 5 + free == limit
    for _ in range(limit):
        window.give_back(1)
    assert window.requests == window.bytes == 0


def test_c50_a_brokers_error_comes_with_its_remark(cluster, make_producer):
    cluster.on_send(Answer(1, "Broker is broken."), times=None)
    with pytest.raises(errors.BrokerError, match=r"Broker is broken\.") as caught:
        make_producer().send(Message("orders", b"x"))
    assert (caught.value.response_code, caught.value.attempts) == (1, 3)


def test_c51_async_passes_the_transports_error(cluster, make_producer):
    cluster.on_send(Drop(stores=False), times=None)
    producer, ends = make_producer(sendMsgTimeout=600, retryTimesWhenSendFailed=0), []
    future = producer.send_async(Message("orders", b"x"), lambda *end: ends.append(end))
    error = future.exception(10)
    assert isinstance(error, errors.RequestTimeoutError)
    assert "no answer from 127.0.0.1:" in str(error)
    producer.close()
    assert ends == [(None, error)]


def test_c51_oneway_raises_the_transports_own_error(cluster, make_producer):
    producer = make_producer(sendMsgTimeout=1000)
    producer.fetch_publish_message_queues("orders")
    cluster.kill()
    with pytest.raises(errors.NotSentError, match=r"127\.0\.0\.1:"):
        producer.send_oneway(Message("orders", b"x"))


def test_c72_one_group_and_instance_name_make_one_producer(cluster, make_producer):
    first = make_producer(producerGroup="g", instanceName="one")
    with pytest.raises(errors.ConfigurationError, match="instanceName"):
        make_producer(producerGroup="g", instanceName="one")
    named = ({"instanceName": "two"}, {"producerGroup": "h", "instanceName": "one"}, {}, {})
    others = [make_producer(**{"producerGroup": "g", **names}) for names in named]
    assert len({producer._session.engine.identity.client_id for producer in others}) == 4
    first.close()
    again = make_producer(producerGroup="g", instanceName="one")
    assert again.send(Message("orders", b"x")).status == "SEND_OK"
