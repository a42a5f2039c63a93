"""Batch bodies: Java's bytes, Java's rules and our own."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocket_sink.errors import MessageError, RemoteProtocolError
from rocket_sink.message import Message
from rocket_sink.wire.batch import INNER_OVERHEAD_BYTES, check_batch, encode_inner, iter_batch
from rocket_sink.wire.properties import encode_properties
from tests.decoding import encode_message

WAIT = "WAIT\x01true\x02"


def test_c21_one_message():
    golden = (
        "0000002e00000000000000000000000c00000004626f6479"
        "0014574149540174727565026b65790176616c756502"
    )
    message = Message("topic", b"body", flag=12, properties={"key": "value"})
    data = encode_message(message, WAIT + "key\x01value\x02")
    assert data.hex() == golden
    (decoded,) = iter_batch(data)
    assert (decoded.flag, decoded.body) == (12, b"body")
    assert decoded.properties == {"WAIT": "true", "key": "value"}


@pytest.mark.parametrize(
    ("second", "said"),
    [
        pytest.param(Message("other", b"b"), "topic", id="C20 topic"),
        pytest.param(Message("t", b"b", wait_store=False), "wait_store", id="C20 wait flag"),
        pytest.param(Message("t", b"b", delay_level=1), "delay", id="C20 delay"),
        pytest.param(Message("%RETRY%t", b"b"), "RETRY", id="C20 a retry topic after another"),
        pytest.param(Message("t", b"b", delay_ms=5), "delay", id="timed"),
        pytest.param(Message("t", b"b", delivery_timestamp_ms=5), "delay", id="timed to a moment"),
        pytest.param(Message("t", b"b", priority=0), "priority", id="a priority"),
        pytest.param(Message("t", b"b", lite_topic="s"), "lite topic", id="a lite topic"),
    ],
)
def test_messages_that_cannot_travel_together(second, said):
    with pytest.raises(MessageError, match=said) as caught:
        check_batch([Message("t", b"b"), second])
    assert caught.value.code == "INVALID_BATCH"
    assert "message 1" in str(caught.value)


def test_c20_messages_that_can():
    check_batch([Message("t", b"b"), Message("t", b"c", tags="x", flag=3)])
    with pytest.raises(MessageError, match="no messages"):
        check_batch([])


def test_c20_a_batch_for_a_retry_topic():
    with pytest.raises(MessageError, match="message 0 of the batch is for a retry topic"):
        check_batch([Message("%RETRY%t", b"b")] * 2)


def test_f65_properties_that_javas_short_cannot_count():
    """Java's short turns 40,000 bytes into -25,536, and the batch is unreadable."""
    with pytest.raises(MessageError, match="40000 bytes; the limit is 32767"):
        encode_inner(b"b", "x" * 40_000)
    assert len(encode_inner(b"b", "x" * 32_767)) == INNER_OVERHEAD_BYTES + 1 + 32_767


texts = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=9)
properties = st.dictionaries(texts, texts, max_size=3)
inner = st.tuples(st.integers(-(2**31), 2**31 - 1), st.binary(max_size=30), properties)


@given(st.lists(inner, max_size=5))
def test_what_is_written_is_read(messages):
    data = b"".join(
        encode_inner(body, encode_properties(properties), flag)
        for flag, body, properties in messages
    )
    decoded = list(iter_batch(memoryview(data)))
    assert [(message.flag, message.body, message.properties) for message in decoded] == messages


@pytest.mark.parametrize("cut", range(1, 46))
def test_a_cut_batch_is_refused(cut):
    data = encode_inner(b"body", WAIT + "key\x01value\x02", 12)
    with pytest.raises(RemoteProtocolError):
        list(iter_batch(data[:-cut]))
    with pytest.raises(RemoteProtocolError):
        list(iter_batch(data + data[:-cut]))


@pytest.mark.parametrize("length", [-1, 5])
def test_a_body_leaves_room_for_its_properties(length):
    data = bytearray(encode_inner(b"body", ""))
    data[16:20] = length.to_bytes(4, "big", signed=True)
    with pytest.raises(RemoteProtocolError, match=f"a body of {length} bytes in a message of 26"):
        list(iter_batch(data))


@pytest.mark.parametrize("length", [-1, 0, 19, 21, 32_767])
def test_properties_fill_a_message_exactly(length):
    data = bytearray(encode_inner(b"body", WAIT + "key\x01value\x02", 12))
    assert data[24:26] == (20).to_bytes(2, "big")
    data[24:26] = length.to_bytes(2, "big", signed=True)
    with pytest.raises(RemoteProtocolError, match="properties of"):
        list(iter_batch(data))
