"""Every byte string gives a value or RemoteProtocolError, never another exception (F77)."""

import json
import struct

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rocket_sink.errors import LocalProtocolError, RemoteProtocolError
from rocket_sink.wire.frame import FrameReader, encode_frame, encode_head
from rocket_sink.wire.headers import Frame, Limits, decode_binary_header, decode_json_header
from rocket_sink.wire.responses import decode_pushed_reply, decode_runtime_info
from rocket_sink.wire.route import decode_route
from tests.fuzz.targets import TARGETS, Target, feed
from tests.memory import memory_below

from .feeding import FEEDS, binary_frame, binary_header, request, whole


def check_value_or_refusal(decode, data):
    feed(Target(decode, ()), data)


mutations = st.lists(
    st.tuples(st.integers(0, 400), st.integers(0, 255), st.sampled_from(["set", "cut", "insert"])),
    min_size=1,
    max_size=4,
)


def mutate(data, changes):
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
def test_mutated_samples(name, which, changes):
    target = TARGETS[name]
    feed(target, mutate(target.samples[which % len(target.samples)], changes))


NAMES = st.sampled_from([
    "0", "code", "opaque", "flag", "version", "language", "remark", "extFields", "queueDatas",
    "brokerName", "perm", "readQueueNums", "writeQueueNums", "brokerDatas", "brokerAddrs",
    "cluster", "orderTopicConf", "topicQueueMappingByBroker", "currIdMap", "bname", "totalQueues",
    "epoch",
])  # fmt: skip
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner),
    max_leaves=12,
)


@pytest.mark.parametrize("decode", [decode_json_header, decode_route])
@given(st.dictionaries(NAMES, json_values))
def test_values_of_wrong_types(decode, fields):
    check_value_or_refusal(decode, json.dumps(fields).encode())


@given(st.dictionaries(st.text(max_size=20), st.text(max_size=20)))
@example({})
def test_pushed_replies(ext):
    for base in ({}, {"properties": "CORRELATION_ID\x011\x02", "sysFlag": "1", "topic": "t"}):
        check_value_or_refusal(
            lambda _, base=base: decode_pushed_reply(Frame(326, {**base, **ext}, b"x")), b""
        )


def test_lengths_that_lie_in_binary_headers():
    header = bytearray(binary_header(Frame(1, {"key": "value"}, remark="r")))
    for at in range(13, len(header) - 3):
        for lie in (-1, 0, 2**31 - 1, -(2**31)):
            lying = bytes(header[:at]) + struct.pack(">i", lie) + bytes(header[at + 4 :])
            check_value_or_refusal(decode_binary_header, lying)


@pytest.mark.parametrize("name", ["runtime", "attributes"])
def test_names_that_a_broker_makes_up_are_printable_in_errors(name):
    """Fuzzing found that JSON does not escape DEL."""
    error = feed(TARGETS[name], b'{"table":{"\x7f\x7f":9},"attributes":{"\x7f":9}}')
    assert "is no text: 9" in str(error)


# JSON that `json` alone would accept, or refuse with another exception (reliability F77).


JSON_BOMBS = [
    pytest.param(b'{"code":1,"opaque":1,"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}", id="depth"),
    pytest.param(b'{"code":1,"opaque":1,"x":' + b'{"a":' * 65 + b"1" + b"}" * 66, id="depth 66"),
    pytest.param(b'{"code":' + b"9" * 5000 + b',"opaque":1}', id="integer of 5000 digits"),
    pytest.param(b'{"code":1,"opaque":1,"x":' + b"9" * 5000 + b"}", id="the same, unknown field"),
    pytest.param(b'{"code":1,"opaque":1,"x":9223372036854775808}', id="integer of 65 bits"),
    pytest.param(b'{"code":4294967297,"opaque":1}', id="code of 33 bits"),
    pytest.param(b'{"code":1.0,"opaque":1}', id="code with a fraction"),
    pytest.param(b'{"code":true,"opaque":1}', id="code true"),
    pytest.param(b'{"code":"%s","opaque":1}' % (b"1" * 999), id="code as text"),
    pytest.param(b'{"code":NaN,"opaque":1}', id="NaN"),
    pytest.param(b'{"code":1,"opaque":1,"x":Infinity}', id="Infinity"),
    pytest.param(b'{"code":1,"opaque":1,"x":1e999}', id="1e999"),
    pytest.param(b'{"code":1,"code":0,"opaque":1}', id="doubled key"),
    pytest.param(b'{"code":1,"opaque":1,"extFields":{"a":"1","a":"2"}}', id="doubled field"),
    pytest.param(b'{"code":1,"opaque":1,"remark":"\\ud800"}', id="lone surrogate"),
    pytest.param(b'{"code":1,"opaque":1,"extFields":{"\\udc00":"v"}}', id="lone surrogate name"),
    pytest.param(b'{"code":1,"opaque":1,"remark":"\xff"}', id="not UTF-8"),
    pytest.param(b'{"code":1,"opaque":1} {}', id="two values"),
    pytest.param(b'{"code":1,"opaque":1,"extFields":{"a":{}}}', id="nested field"),
    pytest.param(b'{"code":1,"opaque":1,"extFields":{"a":0.5}}', id="field with a fraction"),
    pytest.param(b'{"code":1,"opaque":1,"extFields":[]}', id="fields as a list"),
    pytest.param(b"[]", id="a list"),
    pytest.param(b"", id="nothing"),
]


@pytest.mark.parametrize("header", JSON_BOMBS)
def test_json_bombs_are_refused(header):
    with pytest.raises(RemoteProtocolError, match=r"^.{1,300}$"):  # Texts of the peer are cut.
        decode_json_header(header)


def test_values_without_number_are_refused():
    """Otherwise 16 MiB of empty lists or of short names would take half a gigabyte."""
    names = ",".join(f'"{number:x}":{{}}' for number in range(600_000))
    for table in (b"[" + b"[]," * 5_000_000 + b"[]]", b"{" + names.encode() + b"}"):
        frame = Frame(0, {}, b'{"table":' + table + b"}")
        with memory_below(10 * len(frame.body)), pytest.raises(RemoteProtocolError, match="values"):
            decode_runtime_info(frame)


def test_depth_within_the_limit_and_braces_in_text_pass():
    for extra in (b'{"a":' * 62 + b"1" + b"}" * 62, json.dumps("[{" * 200 + '\\"').encode()):
        header = b'{"code":1,"opaque":1,"x":' + extra + b"}"
        assert decode_json_header(header).code == 1


def test_other_implementations_may_write_numbers_and_booleans_as_such():
    fields = {"a": 5, "b": True, "c": None, "d": "x", "e": 2**63 - 1, "f": -(2**63)}
    header = f' {{"opaque":1,"code":0,"extFields":{json.dumps(fields)}}}\n'.encode()
    frame = decode_json_header(header)
    assert frame.ext == {"a": "5", "b": "true", "d": "x", "e": str(2**63 - 1), "f": str(-(2**63))}


# Bytes that are no frame, and frames that are too large, from the peer and from us.


@pytest.mark.parametrize("feed", FEEDS[:2])
@pytest.mark.parametrize(
    ("data", "said"),
    [
        pytest.param("01000000 00000004", "16777220 bytes", id="frame too long"),
        pytest.param("ffffffff 00000004", "bytes; the limit", id="negative length"),
        pytest.param("00000003 00000000", "header of 0", id="no room for a header length"),
        pytest.param("00000008 00000005 7b7d2020", "header of 5", id="header beyond the frame"),
        pytest.param("00200000 00100001", "header of 1048577", id="header too long"),
        pytest.param("00000006 02000002 7b7d", "serialisation 2", id="unknown serialisation"),
        pytest.param("00000006 00000002 7b7d", "code", id="no code"),
        *(pytest.param(
            f"{frame} 0067 00 091d 00000000 00000000 00000000 {fields}", said, id="fields that lie",
        ) for frame, fields, said in (
            ("00000019 01000015", "00000001", "1 bytes of fields and has 0"),
            ("0000001a 01000016", "00000000 ff", "0 bytes of fields and has 1"),
        )),
        pytest.param("48545450 2f312e31", "RocketMQ port", id="HTTP"),
        pytest.param("15030300 02022800", "TLS", id="TLS alert"),
    ],
)  # fmt: skip
def test_what_is_no_frame_is_refused(data, said, feed):
    with pytest.raises(RemoteProtocolError, match=said):
        feed(bytes.fromhex(data))


def test_a_reader_is_dead_after_an_error():
    reader = FrameReader()
    reader.receive_data(b"\xff" * 8)
    with pytest.raises(RemoteProtocolError) as first:
        reader.next_frame()
    for call in (reader.next_frame, lambda: reader.receive_data(encode_frame(request()))):
        with pytest.raises(RemoteProtocolError) as again:
            call()
        assert again.value is first.value


def test_the_frame_limit_counts_the_whole_frame(monkeypatch):
    longest, longer = (encode_frame(request(body=b"x" * size)) for size in (0, 1))
    monkeypatch.setattr(Limits, "FRAME_BYTES", len(longest))
    assert len(whole(longest)) == 1
    with pytest.raises(RemoteProtocolError):
        whole(longer)


def test_we_send_no_frame_that_a_server_would_drop():
    head = encode_head(request(), 1000)
    room = 16 * 1024 * 1024 - (len(head))
    assert len(encode_head(request(), room)) + room == 16 * 1024 * 1024
    text = "a frame of 16777217 bytes .* the limits are 16777216 and 1048576; send fewer or smaller"
    with pytest.raises(LocalProtocolError, match=text):
        encode_head(request(), room + 1)


def test_too_many_header_fields_are_refused(monkeypatch):
    monkeypatch.setattr(Limits, "EXT_ENTRIES", 3)
    for encode in (encode_frame, binary_frame):
        assert len(whole(encode(request(ext={str(n): "v" for n in range(3)})))) == 1
        with pytest.raises(RemoteProtocolError, match="ields"):
            whole(encode(request(ext={str(n): "v" for n in range(4)})))


@pytest.mark.parametrize("encode", [encode_frame, binary_frame])
def test_remarks_are_cut_and_made_printable(encode):
    """F79: a remark gets into logs, ledgers and error texts."""
    hostile = "\x1b[31mred\r\nforged line" + "x" * 10_000
    (frame,) = whole(encode(request(remark=hostile)))
    assert frame.remark.isprintable()
    assert len(frame.remark) < 2048 + 60
    assert frame.remark.startswith("\\x1b[31mred  forged line")


def test_what_cannot_be_said_is_our_error():
    with pytest.raises(LocalProtocolError):
        encode_frame(request(ext={"k": "\ud800"}))
