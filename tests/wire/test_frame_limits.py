"""Bytes that are no frame, and frames that are too large, from the peer and from us."""

import pytest

from rocket_sink.errors import LocalProtocolError, RemoteProtocolError
from rocket_sink.wire.codes import RequestCode
from rocket_sink.wire.frame import FrameReader, encode_frame, encode_head
from rocket_sink.wire.headers import Frame, Limits

from .feeding import FEEDS, Feed, binary_frame, whole


def request(**changes: object) -> Frame:
    values: dict[str, object] = {"code": RequestCode.REGISTER_BROKER, "version": 2333}
    return Frame(**(values | changes))  # type: ignore[arg-type]


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
        pytest.param("48545450 2f312e31", "RocketMQ port", id="HTTP"),
        pytest.param("15030300 02022800", "TLS", id="TLS alert"),
    ],
)
def test_what_is_no_frame_is_refused(data: str, said: str, feed: Feed):
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
    assert frame.remark is not None
    assert frame.remark.isprintable()
    assert len(frame.remark) < 2048 + 60
    assert frame.remark.startswith("\\x1b[31mred  forged line")


def test_what_cannot_be_said_is_our_error():
    with pytest.raises(LocalProtocolError):
        encode_frame(request(ext={"k": "\ud800"}))
