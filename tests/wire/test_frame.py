"""Frames in both serialisations, against the cases and constants of Java's tests."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocket_sink.errors import RemoteProtocolError
from rocket_sink.wire import headers
from rocket_sink.wire.codes import ResponseCode
from rocket_sink.wire.frame import FrameReader, encode_frame
from rocket_sink.wire.headers import Frame, decode_json_header, response_to

from .feeding import FEEDS, binary_frame, drain, request, whole


@pytest.mark.parametrize("ext", [None, {"a": "1"}], ids=["C04", "C05"])
@pytest.mark.parametrize("code", [ResponseCode.SUCCESS, ResponseCode.SYSTEM_ERROR])
def test_a_response_keeps_opaque_code_and_remark(ext, code):
    answer = response_to(request(opaque=77), code, remark="done", ext=ext)
    assert answer.is_response
    assert (answer.opaque, answer.code, answer.remark, answer.ext) == (77, code, "done", ext)


ROUND_TRIPS = [
    pytest.param(request(), id="C06 no body"),
    pytest.param(
        request(
            code=310,
            ext={
                "a": "group", "b": "topic", "c": "TBW102", "d": "4", "e": "123", "f": "0",
                "g": "1234", "h": "0", "i": "p\x01q\x02", "j": "0", "k": "true", "m": "false",
                "n": "broker", "bname": "inherited",
            },
        ),
        id="C09 short names with inherited fields",
    ),
    pytest.param(
        request(remark="r", opaque=1001, version=99, flag=3, ext={"a": "s"}, body=b"\0\1\2"),
        id="C13 everything",
    ),
    pytest.param(request(opaque=-5, ext={"订单": '"\\\x7f\u2028😀'}), id="Unicode and escapes"),
]  # fmt: skip


@pytest.mark.parametrize("feed", FEEDS)
@pytest.mark.parametrize("encode", [encode_frame, binary_frame])
@pytest.mark.parametrize("frame", ROUND_TRIPS)
def test_a_frame_survives_the_wire(frame, encode, feed):
    assert feed(encode(frame)) == [frame]


GOLDEN = [
    ({}, "00000019 01000015", "00000000 00000000"),
    ({"remark": "Sample Remark"}, "00000026 01000022",
     "0000000d 53616d706c652052656d61726b 00000000"),
    ({"ext": {"key": "value"}}, "00000027 01000023",
     "00000000 0000000e 0003 6b6579 00000005 76616c7565"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "lengths", "texts"), GOLDEN)
def test_c10_c11_c12_binary_headers_are_javas_bytes(fields, lengths, texts):
    golden = f"{lengths} 0067 00 091d 00000000 00000000 {texts}"
    assert binary_frame(request(**fields)) == bytes.fromhex(golden)


def test_c14_an_empty_value_is_no_value_in_the_binary_form():
    """Java reads an empty value as null."""
    (decoded,) = whole(binary_frame(request(ext={"key": ""})))
    assert decoded.ext == {}


@pytest.mark.parametrize(("name", "number"), [("PYTHON", 3), ("RUST", 12), ("ELVISH", 7)])
def test_c19_an_unknown_language_is_other(name, number):
    header = f'{{"code":1,"opaque":2,"language":"{name}"}}'.encode()
    assert decode_json_header(header).language == number
    (kept,) = whole(binary_frame(request(language=200)))
    assert kept.language == 200 and b'"OTHER"' in encode_frame(kept)


@given(st.lists(st.integers(0, 70), max_size=8), st.lists(st.integers(1, 40), max_size=60))
def test_cutting_the_stream_anywhere_changes_nothing(bodies, cuts):
    frames = [
        Frame(1, {"k": "v"}, b"b" * size or None, opaque) for opaque, size in enumerate(bodies)
    ]
    data = b"".join(map(encode_frame, frames))
    reader = FrameReader()
    decoded: list[Frame] = []
    at = 0
    for cut in [*cuts, len(data)]:
        piece = data[at : at + cut]
        at += len(piece)
        reader.receive_data(bytearray(piece))
        decoded += drain(reader)
    assert decoded == frames


def test_the_callers_buffer_may_be_used_again():
    buffer = bytearray(encode_frame(Frame(1, {"k": "v"}, b"body", 5)))
    reader = FrameReader()
    reader.receive_data(memoryview(buffer))
    buffer[:] = bytes(len(buffer))
    (frame,) = drain(reader)
    assert (frame.ext, frame.body) == ({"k": "v"}, b"body")


def test_a_long_frame_in_small_pieces_is_copied_once():
    """Appending must not copy earlier pieces: 4 MiB in pieces of 1 KiB would copy 8 GiB."""
    body = bytes(4 * 1024 * 1024)
    data = encode_frame(Frame(1, None, body, 1))
    reader = FrameReader()
    copied = 0
    for at in range(0, len(data), 1024):
        before = reader._data
        reader.receive_data(data[at : at + 1024])
        if reader._data is not before:
            copied += len(reader._data)
    (frame,) = drain(reader)
    assert frame.body == body
    assert copied < 8192


_IDS = ",".join(f"{n:032X}" for n in range(200))


@pytest.mark.parametrize(
    "fields",
    [
        f'"MSG_REGION":"r","msgId":"{_IDS}","queueId":"1"', f'"msgId":"{_IDS}"',
        f'"msgId":"{_IDS}","msgId":"A"', f'"msgId":"{_IDS} "', f'"msgId":"{_IDS}\\u0041"',
        f'"msgId":"{_IDS}\x01"', f'"msgId":"{_IDS}é"', f'"a":"\\"msgId\\":\\"{_IDS}"',
        f'"a":{{"msgId":"{_IDS}"}}', f'"a":"{_IDS}"', f'"msgId":"{_IDS}',
    ],
)  # fmt: skip
def test_the_ids_of_a_batch_are_read_as_in_any_header(fields, monkeypatch):
    header = (
        f'{{"code":0,"extFields":{{{fields}}},"flag":1,"language":"JAVA","opaque":7,'
        '"serializeTypeCurrentRPC":"JSON","version":493}'
    ).encode()
    results = []
    for long in (headers._LONG, len(header)):
        monkeypatch.setattr(headers, "_LONG", long)
        try:
            results.append(decode_json_header(header))
        except RemoteProtocolError as error:
            results.append(str(error))
    assert results[0] == results[1]
    if fields.startswith(('"MSG', f'"msgId":"{_IDS}"')) and fields.count("msgId") == 1:
        assert results[0].ext["msgId"] == _IDS
