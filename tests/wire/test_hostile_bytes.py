"""Every byte string gives a value or RemoteProtocolError, never another exception (F77)."""

import json
import struct
from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rocket_sink.errors import RemoteProtocolError
from rocket_sink.wire.headers import Frame, decode_binary_header, decode_json_header
from rocket_sink.wire.ids import decode_offset_message_id
from rocket_sink.wire.properties import decode_properties
from rocket_sink.wire.responses import decode_pushed_reply
from rocket_sink.wire.route import decode_route
from tests.fuzz.targets import TARGETS, Target, feed

from .feeding import binary_header, whole


def check_value_or_refusal(decode: Callable[[bytes], object], data: bytes) -> None:
    feed(Target(decode, ()), data)


@pytest.mark.parametrize("name", TARGETS)
@given(data=st.binary(max_size=300))
@settings(max_examples=150)
def test_any_bytes(name: str, data: bytes):
    feed(TARGETS[name], data)


mutations = st.lists(
    st.tuples(st.integers(0, 400), st.integers(0, 255), st.sampled_from(["set", "cut", "insert"])),
    min_size=1,
    max_size=4,
)


def mutate(data: bytes, changes: list[tuple[int, int, str]]) -> bytes:
    mutated = bytearray(data)
    for position, value, kind in changes:
        at = position % (len(mutated) + 1)
        if kind == "insert":
            mutated.insert(at, value)
        elif kind == "cut":
            del mutated[at : at + value % 9]
        elif at < len(mutated):
            mutated[at] = value
    return bytes(mutated)


@pytest.mark.parametrize("name", TARGETS)
@given(which=st.integers(0, 9), changes=mutations)
@settings(max_examples=250)
def test_mutated_samples(name: str, which: int, changes: list[tuple[int, int, str]]):
    target = TARGETS[name]
    feed(target, mutate(target.samples[which % len(target.samples)], changes))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["code", "opaque", "brokerAddrs", "0", "x"]), inner)
    ),
    max_leaves=12,
)


@given(
    st.fixed_dictionaries(
        {},
        optional=dict.fromkeys(
            ["code", "opaque", "flag", "version", "language", "remark", "extFields"], json_values
        ),
    )
)
def test_headers_of_wrong_types(fields: dict[str, object]):
    check_value_or_refusal(decode_json_header, json.dumps(fields).encode())


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "queueDatas": json_values | st.lists(
                st.fixed_dictionaries({}, optional={"brokerName": json_values, "perm": json_values,
                    "readQueueNums": json_values, "writeQueueNums": json_values})),
            "brokerDatas": json_values | st.lists(
                st.fixed_dictionaries({}, optional={"brokerName": json_values,
                    "brokerAddrs": json_values, "cluster": json_values})),
            "orderTopicConf": json_values,
            "topicQueueMappingByBroker": json_values | st.dictionaries(st.text(max_size=3),
                st.fixed_dictionaries({}, optional={"currIdMap": json_values, "bname": json_values,
                    "totalQueues": json_values, "epoch": json_values}), max_size=2),
        },
    )
)  # fmt: skip
def test_routes_of_wrong_types(fields: dict[str, object]):
    check_value_or_refusal(decode_route, json.dumps(fields).encode())


@given(st.dictionaries(st.text(max_size=20), st.text(max_size=20)))
@example({})
def test_pushed_replies(ext: dict[str, str]):
    for base in ({}, {"properties": "CORRELATION_ID\x011\x02", "sysFlag": "1", "topic": "t"}):
        check_value_or_refusal(
            lambda _, base=base: decode_pushed_reply(Frame(326, {**base, **ext}, b"x")), b""
        )


@given(st.text(max_size=70))
def test_texts(text: str):
    for decode in (decode_offset_message_id, decode_properties):
        check_value_or_refusal(lambda _, decode=decode: decode(text), b"")


def test_frames_from_a_socket_that_speaks_something_else():
    for greeting in (b"HTTP/1.1 400 Bad Request\r\n", b"SSH-2.0-OpenSSH_9\r\n", b"\x00" * 64):
        with pytest.raises(RemoteProtocolError):
            whole(greeting)


def test_lengths_that_lie_in_binary_headers():
    header = bytearray(binary_header(Frame(1, {"key": "value"}, remark="r")))
    for at in range(13, len(header) - 3):
        for lie in (-1, 0, 2**31 - 1, -(2**31)):
            lying = bytes(header[:at]) + struct.pack(">i", lie) + bytes(header[at + 4 :])
            check_value_or_refusal(decode_binary_header, lying)


@pytest.mark.parametrize("name", ["runtime", "attributes"])
def test_names_that_a_broker_makes_up_are_printable_in_errors(name: str):
    """Fuzzing found that JSON does not escape DEL."""
    error = feed(TARGETS[name], b'{"table":{"\x7f\x7f":9},"attributes":{"\x7f":9}}')
    assert "is no text: 9" in str(error)
