"""Messages in the form in which brokers store and return them."""

import zlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocket_sink.errors import RemoteProtocolError
from rocket_sink.wire.batch import encode_inner
from rocket_sink.wire.codes import SysFlag
from rocket_sink.wire.compress import CompressionType, compress
from rocket_sink.wire.headers import Limits
from rocket_sink.wire.stored import StoredMessage, decode_stored, encode_stored

words = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=9)
int32 = st.integers(-(2**31), 2**31 - 1)
int64 = st.integers(-(2**63), 2**63 - 1)
hosts = st.tuples(st.ip_addresses().map(str), st.integers(0, 65535))
messages = st.builds(
    StoredMessage, topic=words, body=st.binary(max_size=40), queue_id=int32, queue_offset=int64,
    commit_log_offset=st.integers(0, 2**63 - 1), flag=int32,
    sys_flag=st.sampled_from([0, SysFlag.TRANSACTION_COMMIT]), born_ms=int64, born_host=hosts,
    store_ms=int64, store_host=hosts, reconsume_times=int32, prepared_transaction_offset=int64,
    properties=st.dictionaries(words, words, max_size=3),
)  # fmt: skip


@given(st.lists(messages, max_size=3))
def test_what_is_written_is_read(stored):
    decoded = decode_stored(b"".join(map(encode_stored, stored)))
    assert len(decoded) == len(stored)
    for one, expected in zip(decoded, stored, strict=True):
        for name in StoredMessage.__dataclass_fields__:
            if name not in ("sys_flag", "body_crc"):
                assert getattr(one, name) == getattr(expected, name), name
        assert one.sys_flag & ~0x30 == expected.sys_flag
        assert one.body_crc == zlib.crc32(expected.body) & 0x7FFFFFFF
        assert one.offset_message_id == expected.offset_message_id


@given(messages, st.integers(1, 60))
def test_zeros_behind_what_a_killed_broker_wrote_cost_properties_only(message, cut):
    """The zeros may begin anywhere: in a name, a value or a character."""
    data = encode_stored(message)
    room = len(encode_stored(replace(message, properties={})))
    cut = min(cut, len(data) - room)
    (torn,) = decode_stored(data[: len(data) - cut] + bytes(cut))
    assert torn.torn == bool(cut) and torn.body == message.body and torn.topic == message.topic
    assert torn.properties.items() <= message.properties.items()
    complete = data[room : len(data) - cut].count(b"\x02")
    assert len(torn.properties) == complete


def test_a_topic_beyond_127_bytes_has_the_second_form():
    message = StoredMessage("t" * 200, b"b")
    assert decode_stored(encode_stored(message))[0].topic == "t" * 200


def test_ids():
    message = StoredMessage(
        "t", b"b", commit_log_offset=123456, store_host=("127.0.0.1", 9103),
        properties={"UNIQ_KEY": "U"},
    )  # fmt: skip
    assert message.message_id == "U"
    assert message.offset_message_id == "7F0000010000238F000000000001E240"
    assert StoredMessage("t", b"b").message_id is None


@pytest.mark.parametrize("kind", list(CompressionType))
def test_bodies_are_inflated(kind):
    message = StoredMessage("t", b"a" * 5000, sys_flag=kind.sys_flag)
    data = encode_stored(message, stored_body=compress(message.body, kind))
    (decoded,) = decode_stored(data)
    assert decoded.body == message.body
    with pytest.raises(RemoteProtocolError, match=f"more than {Limits.BODY_BYTES}"):
        decode_stored(
            encode_stored(message, stored_body=compress(bytes(Limits.BODY_BYTES + 1), kind))
        )


def test_an_inner_batch_is_unwrapped():
    inner = encode_inner(b"one", "k\x011\x02", 5) + encode_inner(b"two", "k\x012\x02", 6)
    wrapped = StoredMessage(
        "t", inner, queue_offset=10, sys_flag=SysFlag.INNER_BATCH | SysFlag.NEED_UNWRAP
    )
    decoded = decode_stored(encode_stored(wrapped))
    assert [
        (message.body, message.flag, message.queue_offset, message.properties)
        for message in decoded
    ] == [(b"one", 5, 10, {"k": "1"}), (b"two", 6, 11, {"k": "2"})]
    with pytest.raises(RemoteProtocolError, match="pass 64 bits"):
        decode_stored(encode_stored(replace(wrapped, queue_offset=2**63 - 1)))


def test_properties_in_another_encoding_are_replaced_as_in_java():
    """A C++ client may write GBK; separators and other properties are read nevertheless."""
    gbk = "订单".encode("gbk").decode("utf-8", "surrogateescape")
    foreign = StoredMessage("t", b"x", properties={"KEYS": gbk, "UNIQ_KEY": "ID"})
    inner = encode_inner(b"in", "TAGS\x01b\x02")
    marker = encode_inner(b"in", "TAGS\x01marker\x02").replace(
        b"marker", gbk.encode("utf-8", "surrogateescape") + b".."
    )
    flags = SysFlag.INNER_BATCH | SysFlag.NEED_UNWRAP
    batch = StoredMessage("t", inner + marker, sys_flag=flags)
    plain = StoredMessage("t", b"y", properties={"KEYS": "订单"})
    messages = decode_stored(b"".join(map(encode_stored, (foreign, batch, plain))))
    assert [message.replaced for message in messages] == [True, False, True, False]
    assert messages[0].properties == {"KEYS": "����", "UNIQ_KEY": "ID"}
    assert messages[2].properties == {"TAGS": "����.."}
    assert messages[3].properties == {"KEYS": "订单"}


def test_cut_and_lying_messages_are_refused():
    data = encode_stored(StoredMessage("topic", b"body", properties={"k": "v"}))
    for cut in range(1, len(data)):
        with pytest.raises(RemoteProtocolError):
            decode_stored(data[:-cut])
    with pytest.raises(RemoteProtocolError, match="magic"):
        decode_stored(data[:4] + b"\0\0\0\0" + data[8:])
    assert decode_stored(b"") == []


@pytest.mark.parametrize("length", [5, 300, 65_535])
def test_a_field_that_passes_the_messages_end_is_refused(length):
    """A slice beyond the end would be short, and would be read as a shorter text."""
    data = encode_stored(StoredMessage("topic", b"body", properties={"k": "v"}))
    assert data[-6:-4] == (4).to_bytes(2, "big")
    lying = data[:-6] + length.to_bytes(2, "big") + data[-4:]
    with pytest.raises(RemoteProtocolError, match="passes"):
        decode_stored(lying)
    with pytest.raises(RemoteProtocolError):
        decode_stored(lying + data)
