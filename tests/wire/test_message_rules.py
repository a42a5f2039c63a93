"""Rules for messages and topics, from Java's tests (Validators, TopicValidator)."""

import pytest

from rocket_sink.errors import MessageError
from rocket_sink.message_rules import (
    FORBIDDEN_TOPICS,
    SYSTEM_TOPICS,
    check_no_system_topic,
    check_property,
    check_topic,
    is_system_resource,
)
from tests.java_client import FOLDER, run_java


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


@pytest.mark.parametrize(
    ("check", "topics"),
    [(check_topic, ["t" * 127, "Hello", "%RETRY%Hello", "_%RETRY%Hello"]),
     (check_no_system_topic, ["orders", "rmq_system", "x%RETRY%group", "broker-a", "RETRY"])],
)  # fmt: skip
def test_c30_c32_topics_that_are_legal(check, topics):
    for topic in topics:
        check(topic)
