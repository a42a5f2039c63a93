"""Cases of Java's tests about what a message and a topic may be (Validators, TopicValidator)."""

from __future__ import annotations

import pytest

from rocket_sink.errors import MessageError
from rocket_sink.message import Message
from rocket_sink.message_rules import FORBIDDEN_TOPICS, check_topic, is_system_resource


@pytest.mark.parametrize(
    ("name", "value"), [("KEYS", "v"), ("", "v"), ("   ", "v"), ("prop1", ""), ("prop1", "   ")]
)
def test_c29_properties_that_are_refused(name: str, value: str):
    with pytest.raises(MessageError):
        Message("t", b"b", properties={name: value})


def test_c29_a_property_that_is_not():
    assert Message("t", b"b", properties={"prop1": "val1"}).properties == {"prop1": "val1"}


@pytest.mark.parametrize("topic", ["", " ", "../TopicTest", "t" * 128, "TOPIC&*^"])
def test_c30_c32_topics_that_are_refused(topic: str):
    with pytest.raises(MessageError) as caught:
        check_topic(topic)
    assert caught.value.code == "INVALID_TOPIC"


@pytest.mark.parametrize("topic", ["t" * 127, "Hello", "%RETRY%Hello", "_%RETRY%Hello"])
def test_c30_c32_topics_that_are_not(topic: str):
    check_topic(topic)


def test_c31_system_topics():
    assert is_system_resource("rmq_sys_anything")
    assert not is_system_resource("topic")
    assert len(FORBIDDEN_TOPICS) == 6
    for topic in FORBIDDEN_TOPICS:
        assert is_system_resource(topic)
        with pytest.raises(MessageError, match="forbidden"):
            check_topic(topic)
