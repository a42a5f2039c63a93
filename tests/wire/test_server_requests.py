"""Requests that brokers send to clients."""

import zlib

import pytest

from rocket_sink.errors import RemoteProtocolError
from rocket_sink.wire.codes import RequestCode, SysFlag
from rocket_sink.wire.headers import Frame
from rocket_sink.wire.responses import decode_pushed_reply, decode_transaction_check
from rocket_sink.wire.stored import StoredMessage, encode_stored

HALF = StoredMessage("t", b"half", properties={"PGROUP": "g", "UNIQ_KEY": "U", "TRAN_MSG": "true"})
CHECK_EXT = {"tranStateTableOffset": "5", "commitLogOffset": "77", "msgId": "M", "bname": "b"}


def check(message, ext):
    return Frame(RequestCode.CHECK_TRANSACTION_STATE, ext, encode_stored(message))


def test_a_transaction_check():
    check_back = decode_transaction_check(check(HALF, CHECK_EXT))
    assert check_back.message.body == b"half"
    assert check_back[1:] == ("g", "U", 5, 77, "t", "b")


def test_a_check_without_an_id_in_the_message_uses_the_headers():
    message = StoredMessage("t", b"half", properties={"PGROUP": "g"})
    ext = {**CHECK_EXT, "transactionId": "H", "topic": "other"}
    check_back = decode_transaction_check(check(message, ext))
    assert (check_back.transaction_id, check_back.topic) == ("H", "other")


@pytest.mark.parametrize(
    "frame",
    [
        check(StoredMessage("t", b"half", properties={"UNIQ_KEY": "U"}), CHECK_EXT),
        check(StoredMessage("t", b"half", properties={"PGROUP": "g"}), CHECK_EXT),
        check(HALF, {"commitLogOffset": "1"}),
        Frame(39, CHECK_EXT, None),
        Frame(39, CHECK_EXT, encode_stored(HALF) * 2),
    ],
    ids=["no group", "no id", "no offset", "no message", "two messages"],
)
def test_checks_that_cannot_be_answered(frame):
    with pytest.raises(RemoteProtocolError):
        decode_transaction_check(frame)


REPLY_EXT = {
    "topic": "c_REPLY_TOPIC", "sysFlag": "0", "flag": "3", "bornTimestamp": "10",
    "storeTimestamp": "20", "properties": "CORRELATION_ID\x01C\x02x\x011\x02",
}  # fmt: skip


def test_a_pushed_reply():
    reply = decode_pushed_reply(Frame(326, REPLY_EXT, b"body"))
    assert reply == (
        "c_REPLY_TOPIC", b"body", {"CORRELATION_ID": "C", "x": "1"}, "C", 10, 20, 3,
    )  # fmt: skip


def test_a_compressed_reply():
    ext = {**REPLY_EXT, "sysFlag": str(SysFlag.COMPRESSED)}
    assert decode_pushed_reply(Frame(326, ext, zlib.compress(b"body"))).body == b"body"


def test_a_reply_without_a_request_is_refused():
    with pytest.raises(RemoteProtocolError, match="correlation"):
        decode_pushed_reply(Frame(326, {**REPLY_EXT, "properties": "x\x011\x02"}, b"body"))
