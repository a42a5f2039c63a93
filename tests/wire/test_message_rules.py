"""Rules for messages and topics, from Java's tests (Validators, TopicValidator)."""

import pytest

from rocket_sink.errors import MessageError
from rocket_sink.message import Message
from rocket_sink.message_rules import (
    FORBIDDEN_TOPICS,
    SYSTEM_TOPICS,
    check_no_system_topic,
    check_property,
    check_topic,
    host_and_port,
    is_loopback,
    is_system_resource,
)
from tests.java_client import FOLDER, run_java


@pytest.mark.parametrize(
    ("address", "parts", "is_local"),
    [("localhost:1", ("localhost", 1), True), ("127.8.0.1:65535", ("127.8.0.1", 65_535), True),
     ("[::1]:9876", ("::1", 9876), True), (" 10.0.0.1:1 ", ("10.0.0.1", 1), False),
     ("127.0.0.1:65536", None, False), ("127.0.0.1:0", None, False), ("127.0.0.1", None, False),
     (":1", None, False), ("a b:1", None, False), ("a:\xb2", None, False)],
)  # fmt: skip
def test_an_address_is_a_host_and_a_port(address, parts, is_local):
    assert (host_and_port(address), is_loopback(address)) == (parts, is_local)


@pytest.mark.parametrize(
    ("name", "value"), [("KEYS", "v"), ("", "v"), ("   ", "v"), ("prop1", ""), ("prop1", "   ")]
)
def test_c29_properties_that_are_refused(name, value):
    with pytest.raises(MessageError):
        Message("t", b"b", properties={name: value})


def test_c29_a_property_that_is_not():
    assert Message("t", b"b", properties={"prop1": "val1"}).properties == {"prop1": "val1"}


@pytest.mark.parametrize("topic", ["", " ", "../TopicTest", "t" * 128, "TOPIC&*^"])
def test_c30_c32_topics_that_are_refused(topic):
    with pytest.raises(MessageError) as caught:
        check_topic(topic)
    assert caught.value.code == "INVALID_TOPIC"


@pytest.mark.parametrize("topic", ["t" * 127, "Hello", "%RETRY%Hello", "_%RETRY%Hello"])
def test_c30_c32_topics_that_are_not(topic):
    check_topic(topic)


def test_c31_system_topics():
    assert is_system_resource("rmq_sys_anything")
    assert not is_system_resource("topic")
    assert len(FORBIDDEN_TOPICS) == 8
    for topic in FORBIDDEN_TOPICS:
        assert is_system_resource(topic)
        with pytest.raises(MessageError, match="forbidden"):
            check_topic(topic)


@pytest.mark.cluster
def test_names_that_rocketmq_keeps_for_itself_are_refused():
    names: dict[str, set[str]] = {}
    for kind, name in run_java(FOLDER / "Reserved.java", version="5.5.0"):
        names.setdefault(kind, set()).add(name)
    assert len(names["refused_property"]) == 54
    for name in names["property"] | names["refused_property"]:
        with pytest.raises(MessageError) as caught:
            check_property(name, "value")
        assert caught.value.code == "RESERVED_PROPERTY", name
    assert names["refused_topic"] == set(FORBIDDEN_TOPICS)
    assert names["system_topic"] == set(SYSTEM_TOPICS)


@pytest.mark.parametrize(
    "topic",
    ["TBW102", "CHECKPOINT_TOPIC", "RMQ_SYS_TRACE_TOPIC", "rmq_sys_wheel_timer", "Rmq_Sys_x",
     "%RETRY%group", "%RETRY%ns%group", "%DLQ%group", "%LMQ%parent%child"],
)  # fmt: skip
def test_topics_that_brokers_use_themselves(topic):
    with pytest.raises(MessageError, match="allowSystemTopics") as caught:
        check_no_system_topic(topic)
    assert caught.value.code == "INVALID_TOPIC"


@pytest.mark.parametrize("topic", ["orders", "rmq_system", "x%RETRY%group", "broker-a", "RETRY"])
def test_topics_that_users_have(topic):
    check_no_system_topic(topic)
