"""Answers: whether a message was stored, and the proof; and requests of brokers to clients."""

import zlib

import pytest

from rocket_sink.errors import InvalidAnswerError, LocalProtocolError, Outcome, RemoteProtocolError
from rocket_sink.wire.codes import SysFlag
from rocket_sink.wire.headers import Frame
from rocket_sink.wire.responses import (
    PULL_CODES,
    SEND_STATUS,
    decode_cluster_info,
    decode_pull_answer,
    decode_pushed_reply,
    decode_send_answer,
    decode_topics,
    decode_transaction_check,
    long_field,
    text_field,
)
from rocket_sink.wire.stored import StoredMessage, encode_stored

FIELDS = {"msgId": "7F00000100002A9F0000000000001234", "queueId": "3", "queueOffset": "456"}


@pytest.mark.parametrize(
    ("code", "status"),
    [(0, "SEND_OK"), (10, "FLUSH_DISK_TIMEOUT"), (11, "SLAVE_NOT_AVAILABLE"),
     (12, "FLUSH_SLAVE_TIMEOUT")],
)  # fmt: skip
def test_c67_codes_that_mean_stored(code, status):
    answer = decode_send_answer(Frame(code, FIELDS, flag=1))
    assert (answer.code, answer.status) == (code, status)
    assert (answer.offset_message_id, answer.queue_id, answer.queue_offset) == (
        FIELDS["msgId"], 3, 456,
    )  # fmt: skip


@pytest.mark.parametrize("code", [1, 2, 13, 14, 215, 16, 17, 29, 1500, 99_999])
def test_c67_all_other_codes_are_not_stored(code):
    assert code not in SEND_STATUS
    with pytest.raises(LocalProtocolError):
        decode_send_answer(Frame(code, FIELDS, flag=1))


def test_optional_fields_have_javas_defaults():
    answer = decode_send_answer(Frame(0, FIELDS))
    assert (answer.region_id, answer.trace_on) == ("DefaultRegion", True)
    assert (answer.transaction_id, answer.recall_handle) == (None,) * 2
    more = {
        "MSG_REGION": "eu", "TRACE_ON": "false", "transactionId": "T", "recallHandle": "H",
        "batchUniqId": "B",
    }  # fmt: skip
    answer = decode_send_answer(Frame(0, FIELDS | more))
    assert answer[5:] == ("T", "eu", "H", False)


@pytest.mark.parametrize("missing", FIELDS)
@pytest.mark.parametrize("value", [None, "", "-1", "x", "1_0", " 1", "٣", "9" * 19, "1" * 5000])
def test_a_stored_answer_without_its_proof_is_unknown(missing, value):
    if missing == "msgId" and value:
        return
    ext = {name: text for name, text in FIELDS.items() if name != missing}
    if value is not None:
        ext[missing] = value
    with pytest.raises(InvalidAnswerError) as caught:
        decode_send_answer(Frame(0, ext))
    assert caught.value.outcome is Outcome.UNKNOWN
    with pytest.raises(InvalidAnswerError):
        decode_send_answer(Frame(0, None))


OFFSETS = {"nextBeginOffset": "5", "minOffset": "1", "maxOffset": "9"}


def test_a_pull_answer_holds_messages():
    message = StoredMessage("t", b"body", queue_offset=4, body_crc=0)
    messages, following = decode_pull_answer(Frame(0, OFFSETS, encode_stored(message)))
    assert [message.body for message in messages] == [b"body"]
    assert following == 5


@pytest.mark.parametrize("code", [19, 20, 21])
def test_a_pull_may_find_nothing(code):
    assert code in PULL_CODES
    assert decode_pull_answer(Frame(code, OFFSETS)) == ([], 5)


def test_other_pull_answers_are_refusals():
    with pytest.raises(LocalProtocolError):
        decode_pull_answer(Frame(1, OFFSETS))
    for missing in OFFSETS:
        ext = {name: text for name, text in OFFSETS.items() if name != missing}
        with pytest.raises(RemoteProtocolError, match=f"{missing} is missing"):
            decode_pull_answer(Frame(19, ext))


def test_small_answers():
    for number in (-1, 2**63 - 1, -(2**63)):
        assert long_field(Frame(0, {"offset": str(number)}), "offset") == number
    assert text_field(Frame(0, {"msgId": "M"}), "msgId") == "M"
    assert decode_topics(Frame(0, None, b'{"topicList":["b","a"]}')) == ("a", "b")
    with pytest.raises(RemoteProtocolError):
        long_field(Frame(0, {"offset": "9223372036854775808"}), "offset")


def test_cluster_info_with_bare_keys():
    body = (
        b'{"brokerAddrTable":{"broker-a":{"brokerAddrs":{0:"h:1",1:"h:2"},"brokerName":"broker-a"'
        b',"cluster":"c"}},"clusterAddrTable":{"c":["broker-a"]}}'
    )
    assert decode_cluster_info(Frame(0, None, body)) == {"broker-a": {0: "h:1", 1: "h:2"}}
    with pytest.raises(RemoteProtocolError, match="brokerAddrTable"):
        decode_cluster_info(Frame(0, None, b'{"clusterAddrTable":{}}'))


HALF = StoredMessage("t", b"half", properties={"PGROUP": "g", "UNIQ_KEY": "U", "TRAN_MSG": "true"})
CHECK_EXT = {"tranStateTableOffset": "5", "commitLogOffset": "77", "msgId": "M", "bname": "b"}


def check(message, ext):
    return Frame(39, ext, encode_stored(message))


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
        check(HALF, {"commitLogOffset": "1"}), Frame(39, CHECK_EXT, None),
        Frame(39, CHECK_EXT, encode_stored(HALF) * 2),
    ],
)  # fmt: skip
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
