"""Java's integration tests on real brokers, by their numbers in the conformance list."""

from collections import defaultdict

import pytest

from rocket_sink.errors import MessageError, Outcome
from rocket_sink.message import Message
from rocket_sink.net.client import NetworkClient, invoke
from rocket_sink.options import SinkOptions
from rocket_sink.producer.admin.admin import Admin
from rocket_sink.producer.producer import Producer
from rocket_sink.wire.requests import send_message_v2
from rocket_sink.wire.responses import decode_send_answer
from tests.producer.conftest import stored
from tests.producer.waiting import until

pytestmark = pytest.mark.cluster


@pytest.fixture
def producer(real):
    with Producer(**real.client_options()) as one:
        yield one


def await_stored(real, topic, count):
    """Return the topic's messages once there are `count`: the queues lag behind the commit log."""
    until(lambda: len(stored(real, topic)) >= count)
    return stored(real, topic)


def test_c68_the_largest_body_and_one_byte_more(real, topic, producer):
    largest = bytes(range(256)) * (4_194_304 // 256)
    assert producer.send(Message(topic, largest), timeout_ms=20_000).outcome is Outcome.ACKED
    with pytest.raises(MessageError) as caught:
        producer.send(Message(topic, largest + b"x"))
    assert (caught.value.code, caught.value.size) == ("BODY_TOO_LARGE", 4_194_305)
    assert producer.send(Message(topic, bytes(131_072))).status == "SEND_OK"
    assert {len(m.body) for m in await_stored(real, topic, 2)} == {4_194_304, 131_072}


def test_c68_a_batch_with_a_body_near_the_limit(real, topic, producer):
    near = bytes(range(256)) * (4_194_304 // 256 - 1) + bytes(200)
    messages = [Message(topic, b"a"), Message(topic, near), Message(topic, b"b")]
    assert len(producer.send_batch(messages, timeout_ms=20_000)) == 3
    sizes = sorted(len(m.body) for m in await_stored(real, topic, 3))
    assert sizes == [1, 1, len(near)]


def test_c69_chinese_properties(real, topic, producer):
    """The limit counts bytes: Java counts characters and leaves the rest to the broker."""
    fits = "中" * 10_240
    producer.send(Message(topic, b"x", properties={"p": fits}))
    (one,) = await_stored(real, topic, 1)
    assert one.properties["p"] == fits
    with pytest.raises(MessageError) as caught:
        producer.send(Message(topic, b"x", properties={"p": "中" * 32_769}))
    assert caught.value.code == "PROPERTIES_TOO_LARGE"
    assert caught.value.size > 3 * 32_769


def test_c69_the_longest_properties_that_we_let_pass_are_stored(real, topic, producer):
    """The properties that brokers add fit into the room that the limit leaves."""
    room = 32_767 - 256 - len("WAIT\x01true\x02UNIQ_KEY\x01\x02p\x01\x02") - 32
    producer.send(Message(topic, b"x", properties={"p": "v" * room}))
    producer.send(Message(topic, b"y", properties={"p": "v" * (room - 40)}, delay_level=1))
    with pytest.raises(MessageError):
        producer.send(Message(topic, b"x", properties={"p": "v" * (room + 1)}))


@pytest.mark.parametrize(("queue_id", "code"), [(100, 29), (-100, 0)])
def test_c70_the_brokers_answer_to_a_missing_queue(real, topic, queue_id, code):
    """A negative number means any queue, and the answer names the queue that was chosen."""
    broker = real.brokers[0]
    frame = send_message_v2(
        producer_group="g", topic=topic, queue_id=queue_id, born_ms=1, properties="",
        broker_name=broker.name, body=b"x",
    )  # fmt: skip
    client = NetworkClient(SinkOptions.parse(real.client_options()))
    answer = invoke(client, broker.address, frame, 10.0)
    client.close()
    assert answer.code == code
    if code == 0:
        (found,) = await_stored(real, topic, 1)
        assert decode_send_answer(answer).queue_id == found.queue_id in range(4)


def test_c71_a_hundred_messages_in_one_batch(real, topic, producer):
    fields = {"tags": "tags123", "keys": ["keys123"], "flag": 123, "wait_store": False}
    messages = [Message(topic, b"%d" % n, properties={"n": str(n)}, **fields) for n in range(100)]
    (result,) = producer.send_batch(messages)
    ids, offset_ids = result.message_id.split(","), result.offset_message_id.split(",")
    assert len(set(ids)) == len(set(offset_ids)) == 100
    stored_messages = sorted(await_stored(real, topic, 100), key=lambda m: m.queue_offset)
    assert [m.offset_message_id for m in stored_messages] == offset_ids
    assert [m.message_id for m in stored_messages] == ids
    texts = {"TAGS": "tags123", "KEYS": "keys123", "WAIT": "false"}
    for number, message in enumerate(stored_messages):
        assert message.flag == 123
        assert {**texts, "n": str(number)}.items() <= message.properties.items()


@pytest.mark.parametrize("kind", ["SimpleCQ", "BatchCQ"])
def test_c71_queue_types(real, producer, kind):
    """Messages of a batch stay messages on both types of queue: only a batch with an id of its own
    becomes an inner batch, whose id would replace those of its messages (MessageExtEncoder)."""
    name = f"c71-{kind}"
    with Admin(**real.client_options()) as admin:
        admin.create_topic(name, queues=1, brokers=["broker-a"], attributes={"queue.type": kind})
        until(lambda: name in admin.topics(), 60)
    for turn in range(3):
        (result,) = producer.send_batch([Message(name, b"%d-%d" % (turn, n)) for n in range(10)])
        assert result.queue_offset == turn * 10
        assert len(set(result.offset_message_id.split(","))) == 10
    bodies = [m.body for m in await_stored(real, name, 30)]
    assert bodies == [b"%d-%d" % (turn, n) for turn in range(3) for n in range(10)]


def test_c73_order_per_queue(real, topic):
    with Producer(**real.client_options(), ordering="strict") as producer:
        for number in range(60):
            producer.send(Message(topic, b"%d" % number, sharding_key=f"key-{number % 6}"))
    places = defaultdict(list)
    for message in await_stored(real, topic, 60):
        places[message.store_host[1], message.queue_id].append(int(message.body))
    assert all(numbers == sorted(numbers) for numbers in places.values())
    assert sum(map(len, places.values())) == 60
    homes = {number % 6: place for place, numbers in places.items() for number in numbers}
    for place, numbers in places.items():
        assert all(homes[number % 6] == place for number in numbers)
