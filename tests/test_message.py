"""A Message checks itself; errors pickle."""

import dataclasses
import inspect
import pickle
import time

import pytest

import rocket_sink
from rocket_sink import errors
from rocket_sink import message_rules as rules
from rocket_sink.errors import MessageError, RocketSinkError
from rocket_sink.message import Message
from rocket_sink.message_rules import RESERVED_PROPERTIES


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"topic": ""}, "INVALID_TOPIC"), ({"topic": " "}, "INVALID_TOPIC"),
        ({"topic": "../TopicTest"}, "INVALID_TOPIC"), ({"topic": "t" * 128}, "INVALID_TOPIC"),
        ({"topic": "SCHEDULE_TOPIC_XXXX"}, "INVALID_TOPIC"), ({"body": None}, "NULL_BODY"),
        ({"body": b""}, "EMPTY_BODY"), ({"body": "text"}, "INVALID_BODY"),
        ({"tags": "a||b"}, "INVALID_TAGS"), ({"tags": "  "}, "INVALID_TAGS"),
        ({"tags": "a\x01"}, "INVALID_TAGS"), ({"keys": ["a\x01"]}, "INVALID_KEYS"),
        ({"keys": ["a b"]}, "INVALID_KEYS"),
        ({"keys": [""]}, "INVALID_KEYS"), ({"keys": ("a", "b c")}, "INVALID_KEYS"),
        ({"sharding_key": "a\x02TAGS\x01x"}, "INVALID_TEXT"),
        ({"sharding_key": ""}, "INVALID_TEXT"), ({"message_id": "\ud800"}, "INVALID_TEXT"),
        ({"properties": {"UNIQ_KEY": "x"}}, "RESERVED_PROPERTY"),
        ({"properties": {"a": "x\x02TAGS\x01admin"}}, "INVALID_PROPERTY"),
        ({"properties": {"a": " "}}, "INVALID_PROPERTY"),
        ({"properties": {"": "x"}}, "INVALID_PROPERTY"),
        ({"properties": {"a": "\udfff"}}, "INVALID_TEXT"), ({"delay_level": 19}, "INVALID_DELAY"),
        ({"delay_level": -1}, "INVALID_DELAY"),
        ({"delay_level": 1, "delay_ms": 5}, "INVALID_DELAY"),
        ({"delay_s": 1, "delay_ms": 5}, "INVALID_DELAY"), ({"delay_s": -1}, "INVALID_DELAY"),
        ({"delivery_timestamp_ms": -1}, "INVALID_DELAY"),
        # The delivery time overflows Java's long: brokers would deliver such a message at once.
        ({"delay_ms": 2**63 - time.time_ns() // 1_000_000}, "INVALID_DELAY"),
        ({"delay_ms": 2**63 - 1}, "INVALID_DELAY"), ({"delay_s": 2**31}, "INVALID_DELAY"),
        ({"delivery_timestamp_ms": 2**63}, "INVALID_DELAY"), ({"flag": 2**31}, "INVALID_FLAG"),
        ({"flag": 1.5}, "INVALID_FLAG"), ({"flag": True}, "INVALID_FLAG"),
        ({"delay_level": 1.5}, "INVALID_DELAY"), ({"delay_ms": 1.5}, "INVALID_DELAY"),
        ({"delay_ms": "5"}, "INVALID_DELAY"), ({"wait_store": "no"}, "INVALID_FIELD"),
        ({"wait_store": None}, "INVALID_FIELD"), ({"flag": -(2**31) - 1}, "INVALID_FLAG"),
        ({"priority": -1}, "INVALID_PRIORITY"), ({"priority": 2**31}, "INVALID_PRIORITY"),
        ({"priority": True}, "INVALID_PRIORITY"), ({"priority": "1"}, "INVALID_PRIORITY"),
        ({"priority": 1, "delay_ms": 1}, "INVALID_PRIORITY"),
        ({"priority": 1, "sharding_key": "k"}, "INVALID_PRIORITY"),
        ({"lite_topic": "l", "sharding_key": "k"}, "INVALID_LITE_TOPIC"),
        ({"lite_topic": "l" * 65}, "INVALID_LITE_TOPIC"), ({"lite_topic": 5}, "INVALID_LITE_TOPIC"),
        ({"lite_topic": "a,b"}, "INVALID_LITE_TOPIC"), ({"lite_topic": ""}, "INVALID_LITE_TOPIC"),
        ({"topic": 5}, "INVALID_TOPIC"), ({"keys": [7]}, "INVALID_FIELD"),
        ({"keys": 7}, "INVALID_FIELD"), ({"tags": 5}, "INVALID_FIELD"),
        ({"properties": None}, "INVALID_FIELD"), ({"properties": {"a": 1}}, "INVALID_PROPERTY"),
        ({"delay_level": "3"}, "INVALID_DELAY"),
    ],
)  # fmt: skip
def test_an_illegal_message_cannot_be_made(changes, code):
    with pytest.raises(MessageError) as caught:
        Message(**{"topic": "t", "body": b"x", **changes})
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("changes", "is_single"),
    [
        ({"topic": "t" * 127}, False), ({"flag": -(2**31)}, False), ({"flag": 2**31 - 1}, False),
        ({"delay_level": 18}, True), ({"delay_ms": 0}, True), ({"delay_s": 2**31 - 1}, True),
        ({"delivery_timestamp_ms": 0}, True), ({"priority": 0}, True),
        ({"priority": 2**31 - 1}, True), ({"lite_topic": "l" * 64}, True),
    ],
)  # fmt: skip
def test_a_message_with_a_field_at_its_limit(changes, is_single):
    message = Message(**{"topic": "t", "body": b"x", **changes})
    assert {name: getattr(message, name) for name in changes} == changes
    assert message.is_single is is_single and pickle.loads(pickle.dumps(message)) == message
    assert not message.delay_level or message.delay_ms is None


@pytest.mark.parametrize(
    ("name", "whole"),
    [
        ("t", "ns%t"), ("ns%t", "ns%t"), ("%DLQ%g", "%DLQ%ns%g"), ("%RETRY%ns%g", "%RETRY%ns%g"),
        ("TBW102", "TBW102"), ("rmq_sys_x", "rmq_sys_x"), ("CID_RMQ_SYS_x", "CID_RMQ_SYS_x"),
        ("", ""),
    ],
)  # fmt: skip
def test_a_name_in_a_namespace(name, whole):
    assert rules.with_namespace("ns", name) == whole and rules.with_namespace("", name) == name
    assert rules.without_namespace("ns", whole) == name.replace("ns%", "")
    assert rules.without_namespace("", whole) == whole


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("a:1", ("a", 1)), (" a:65535 ", ("a", 65_535)), ("[::1]:80", ("::1", 80)), ("a:0", None),
        ("a:65536", None), ("a:²", None), ("a b:1", None), ("a", None), (":1", None),
        ("a/b:1", None), ("a,b:1", None), ("a:000001", None),
    ],
)  # fmt: skip
def test_an_address_has_a_host_and_a_port(address, parts):
    assert rules.host_and_port(address) == parts
    for host in ("127.1.2.3", "localhost", "[::1]"):
        assert rules.is_loopback(f"{host}:1") and not rules.is_loopback(host)
    assert not rules.is_loopback("a:1")


@pytest.mark.parametrize(
    ("changes", "limit"),
    [
        ({"tags": "a||b"}, None), ({"properties": {"UNIQ_KEY": "x"}}, None),
        ({"sharding_key": ""}, None), ({"delay_level": 19}, "0..18"), ({"flag": 2**31}, "32-bit"),
        ({"priority": 1, "delay_level": 1}, "only one of priority, delay may be set"),
        ({"delay_level": 1, "delay_ms": 1}, "only one of delay_level, delay_ms may be set"),
    ],
)  # fmt: skip
def test_the_error_names_the_message_and_the_limit(changes, limit):
    with pytest.raises(MessageError, match=limit) as caught:
        Message(**{"topic": "orders", "body": b"12345", "keys": ["k1"], **changes})
    error = pickle.loads(pickle.dumps(caught.value))
    assert (error.topic, tuple(error.keys), error.size) == ("orders", ("k1",), 5)
    for word in ("'orders'", "'k1'", "5 bytes"):
        assert word in str(error)


def test_fields_have_one_form():
    message = Message("t", b"x", tags=" a ", keys="one", properties={"p": "värde"}, wait_store=1)
    assert (message.tags, message.keys, message.wait_store) == ("a", ("one",), True)
    assert not Message("t", b"x", wait_store=False).wait_store
    assert pickle.loads(pickle.dumps(message)) == message


def test_a_field_that_is_not_given_reads_as_its_default_and_as_one_that_is():
    plain = Message("t", b"b")
    explicit = Message(
        "t", b"b", tags="", keys=(), sharding_key=None, properties={}, delay_level=0,
        delay_ms=None, delivery_timestamp_ms=None, flag=0, wait_store=True, message_id=None,
        delay_s=None,
    )  # fmt: skip
    assert plain == explicit and not plain.is_single and repr(plain) == repr(explicit)
    assert dataclasses.replace(plain, tags="a") == Message("t", b"b", tags="a")
    for name in ("tags", "properties", "is_single"):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(plain, name, "x")


def test_properties_cannot_be_changed_from_outside():
    properties = {"a": "b"}
    message = Message("t", b"x", properties=properties)
    properties["TAGS"] = "x"
    assert dict(message.properties) == {"a": "b"}
    with pytest.raises(TypeError):
        message.properties["a"] = "c"


def test_the_package_has_no_other_names():
    with pytest.raises(AttributeError, match="no attribute 'Massage'"):
        _ = rocket_sink.Massage


def test_all_of_javas_reserved_names_are_reserved():
    for name in ("KEYS", "TAGS", "DELAY", "WAIT", "__CRC32#", "TIMER_DELIVER_MS", "__SHARDINGKEY"):
        assert name in RESERVED_PROPERTIES
    assert len(RESERVED_PROPERTIES) >= 54


ERRORS = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, RocketSinkError)
]


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_every_error_survives_pickling_with_its_facts(kind):
    error = kind("what happened", code="SPECIAL", broker_name="broker-a", response_code=17)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert (str(copy), copy.code, copy.facts) == (str(error), "SPECIAL", error.facts)


@pytest.mark.parametrize(
    ("fact", "names"),
    [
        ("refreshes_route", ("Connect UnknownHost Tls TlsRefused NoRoute ServiceNotAvailable "
          "TopicNotFound InvalidQueue QueueMoved PermissionDenied RequestTimeout ConnectionLost")),
        ("backs_off", "BrokerBusy QueueMoved"),
        ("avoids_broker", "BrokerTooOld RequesterGone"),
    ],
)  # fmt: skip
def test_what_an_error_asks_of_the_next_attempt(fact, names):
    """docs/reference/errors.md does not list these facts."""
    kinds = {kind.__name__.removesuffix("Error") for kind in ERRORS if getattr(kind, fact, False)}
    assert kinds == {*names.split()}


def test_response_codes_belong_to_one_error_each():
    codes = [code for kind in ERRORS for code in kind.__dict__.get("response_codes", ())]
    assert len(codes) == len(set(codes))
