"""From a response code and remark to an outcome and an error."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocket_sink import errors
from rocket_sink.errors import Isolate, Outcome
from rocket_sink.routing.retry import ERROR_OF_CODE, REMARK_MAX_CHARACTERS, error_for_answer
from rocket_sink.wire.responses import SEND_STATUS
from tests.routing.test_retry import all_errors

# PutMessageStatus of the store -> (response code, remark) as SendMessageProcessor answers it,
C67 = [
    ("PUT_OK", 0, None, Outcome.ACKED, None),
    ("FLUSH_DISK_TIMEOUT", 10, None, Outcome.ACKED_DEGRADED, None),
    ("SLAVE_NOT_AVAILABLE", 11, None, Outcome.ACKED_DEGRADED, None),
    ("FLUSH_SLAVE_TIMEOUT", 12, None, Outcome.ACKED_DEGRADED, None),
    ("IN_SYNC_REPLICAS", 1, "in-sync replicas not enough", Outcome.UNKNOWN, "BROKER_ERROR"),
    (
        "CREATE_MAPPED_FILE_FAILED", 1, "create mapped file failed, server is busy or broken.",
        Outcome.REJECTED, "NOT_STORED",
    ),
    (
        "MESSAGE_ILLEGAL", 13,
        "the message is illegal, maybe msg body or properties length not matched.",
        Outcome.REJECTED, "MESSAGE_ILLEGAL",
    ),
    ("PROPERTIES_SIZE_EXCEEDED", 13, "the message is illegal", Outcome.REJECTED, "MESSAGE_ILLEGAL"),
    ("WHEEL_TIMER_MSG_ILLEGAL", 13, "timer message illegal", Outcome.REJECTED, "MESSAGE_ILLEGAL"),
    (
        "WHEEL_TIMER_FLOW_CONTROL", 1, "timer message is under flow control, max num limit is 1",
        Outcome.REJECTED, "NOT_STORED",
    ),
    (
        "WHEEL_TIMER_NOT_ENABLE", 1,
        "accurate timer message is not enabled, timerWheelEnable is false",
        Outcome.REJECTED, "NOT_STORED",
    ),
    (
        "SERVICE_NOT_AVAILABLE", 14, "service not available now. It may be caused by one of ...",
        Outcome.REJECTED, "SERVICE_NOT_AVAILABLE",
    ),
    (
        "OS_PAGE_CACHE_BUSY", 2, "[PC_SYNCHRONIZED]broker busy, start flow control for a while",
        Outcome.REJECTED, "BROKER_BUSY",
    ),
    (
        "LMQ_CONSUME_QUEUE_NUM_EXCEEDED", 1, "[LMQ_CONSUME_QUEUE_NUM_EXCEEDED]broker config ...",
        Outcome.REJECTED, "NOT_STORED",
    ),
    ("UNKNOWN_ERROR", 1, "UNKNOWN_ERROR", Outcome.UNKNOWN, "BROKER_ERROR"),
    ("default", 1, "UNKNOWN_ERROR DEFAULT", Outcome.UNKNOWN, "BROKER_ERROR"),
    ("null", 1, "store putMessage return null", Outcome.UNKNOWN, "BROKER_ERROR"),
    ("AbortProcessException", 215, "flow control by a hook", Outcome.REJECTED, "BROKER_BUSY"),
]  # fmt: skip

ANSWERS = [
    # AbstractSendMessageProcessor.msgCheck, TopicValidator, preSend; 4.x says 1 where 5.x says 29
    (16, "the broker[10.0.0.1] sending message is forbidden", "NO_PERMISSION"),
    (16, "Sending message to topic[x] is forbidden.", "NO_PERMISSION"),
    (16, "the broker[10.0.0.1] sending transaction message is forbidden", "NO_PERMISSION"),
    (16, "Sending message to topic[user] is forbidden.", "NO_PERMISSION"),
    (16, "the topic[acl] sending message is forbidden", "NO_PERMISSION"),
    (16, None, "NO_PERMISSION"),
    (29, "request queueId[9] is illegal, TopicConfig [...] Producer: /1.2.3.4:5", "INVALID_QUEUE"),
    (1, "request queueId[9] is illegal, TopicConfig [...] Producer: /1.2.3.4:5", "INVALID_QUEUE"),
    (29, "The specified topic is blank.", "MESSAGE_ILLEGAL"),
    (1, "The specified topic contains illegal characters, allowing ...", "MESSAGE_ILLEGAL"),
    (17, "topic[x] not exist, apply first please!", "TOPIC_NOT_FOUND"),
    (1, "topic[x] not exist", "TOPIC_NOT_FOUND"),
    (1, "broker unable to service, until 2026-01-01 00:00:00,000", "SERVICE_NOT_AVAILABLE"),
    (1, "no master available along with 10.0.0.1", "SERVICE_NOT_AVAILABLE"),
    # RemotingHelper.exceptionSimpleDesc of what the encoder throws before the append
    (1, "java.lang.RuntimeException: message body size exceeded, org.apache...", "BATCH_TOO_LARGE"),
    (1, "java.lang.RuntimeException: message size exceeded, DLedgerCommitLog", "BATCH_TOO_LARGE"),
    (1, "RuntimeException: Properties size of messageExtBatch exceeded!", "MESSAGE_ILLEGAL"),
    # AclAuthorizationHandler and PlainPermissionManager: a missing right is no wrong password
    (16, "User:u has no permission to access Topic:t from 10.0.0.1, no matched policies.",
     "NO_PERMISSION"),
    (16, "User:u has no permission to access Topic:t from 10.0.0.1, the decision is deny.",
     "NO_PERMISSION"),
    (1, "org.apache.rocketmq.acl.common.AclException: No default permission for topic:t, org...",
     "NO_PERMISSION"),
    (1, "org.apache.rocketmq.acl.common.AclException: No permission for topic:t, org...",
     "NO_PERMISSION"),
    (1, "java.lang.NullPointerException, org.apache.rocketmq.store.CommitLog", "BROKER_ERROR"),
    (1, None, "BROKER_ERROR"),
    (3, " request type 310 not supported", "REQUEST_CODE_NOT_SUPPORTED"),
    (501, "t-3 does not exit in request process of current broker a", "QUEUE_MOVED"),
    (1500, "please go away", "GO_AWAY"),
    (2, "[TIMEOUT_CLEAN_QUEUE]broker busy, start flow control", "BROKER_BUSY"),
    (99999, "what is this", "BROKER_ERROR"),
    (-1, None, "BROKER_ERROR"),
    (206, "consume msg latter", "BROKER_ERROR"),
    # 4.x: PlainPermissionManager and AclUtils, as the remoting layer describes the exception
    (1, "org.apache.rocketmq.acl.common.AclException: No accessKey is configured, org.apache...",
     "AUTH_FAILED"),
    (1, "AclException: Check signature failed for accessKey=x, org.apache.rocketmq.acl.plain...",
     "AUTH_FAILED"),
    # 5.x: org.apache.rocketmq.auth
    *((16, remark, "AUTH_FAILED") for remark in (
        "Authentication failed. Please verify the credentials and try again.",
        "Authorization failed. Please verify your access rights and try again.",
        "User:admin is not found.", "User:admin is disabled.", "username cannot be null.",
        "check signature failed.", "authentication header is incorrect.",
        "create authentication context error.",
        "The request of DefaultAuthenticationContext is not support.",
    )),
]  # fmt: skip


@pytest.mark.parametrize(("status", "code", "remark", "outcome", "error_code"), C67)
def test_c67_put_message_status(status, code, remark, outcome, error_code):
    error = error_for_answer(code, remark, broker_name="b")
    assert (error and error.code) == error_code
    assert error is None or error.outcome is outcome
    assert (error is None) == outcome.delivered
    if outcome.delivered:
        assert SEND_STATUS[code] == ("SEND_OK" if status == "PUT_OK" else status)


@pytest.mark.parametrize(("code", "remark", "error_code"), ANSWERS)
def test_answers(code, remark, error_code):
    assert error_for_answer(code, remark).code == error_code


@pytest.mark.parametrize("code", [13, 17, 29, 501, 1500, 3])
def test_data_errors_never_isolate_a_healthy_broker(code):
    """Java isolates the broker for 10 s after one message that is too large."""
    assert error_for_answer(code, "").isolates is Isolate.NOTHING


def test_the_table_is_made_from_the_classes_and_no_code_is_claimed_twice():
    claimed = []
    for error in all_errors():
        claimed += [(code, error) for code in vars(error).get("response_codes", ())]
    assert len(claimed) == len({code for code, _ in claimed})
    assert dict(claimed) == ERROR_OF_CODE
    assert not ERROR_OF_CODE.keys() & SEND_STATUS.keys()


def test_errors_say_where_and_what_and_pickle():
    error = error_for_answer(2, "[OVERLOAD]\tbusy\x1b[31m", broker_name="b1", topic="t")
    assert str(error) == "b1 answered 2: [OVERLOAD] busy\\x1b[31m"
    assert (error.response_code, error.topic, error.broker_name) == (2, "t", "b1")
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), copy.remark) == (type(error), str(error), error.remark)


@given(st.integers(-(2**31), 2**31 - 1), st.none() | st.text())
def test_any_answer_has_one_outcome(code, remark):
    error = error_for_answer(code, remark)
    assert (error is None) == (code in SEND_STATUS)
    assert error is None or not error.outcome.delivered


@given(st.text(max_size=2 * REMARK_MAX_CHARACTERS))
def test_remarks_are_printable_and_short(remark):
    error = error_for_answer(2, remark)
    assert error.remark.isprintable() and str(error).isprintable()
    assert len(error.remark) <= REMARK_MAX_CHARACTERS
    if remark.isprintable() and len(remark) <= REMARK_MAX_CHARACTERS:
        assert error.remark == remark.strip()


def test_long_remarks_are_cut_visibly():
    def kept(remark):
        return error_for_answer(2, remark).remark

    assert kept("x" * 5000) == "x" * (REMARK_MAX_CHARACTERS - 3) + "..."
    assert kept(None) == ""


def test_a_proxys_refusal_says_what_to_read():
    remark = "TopicMessageType validate failed, the expected type is NORMAL, but actual type is X"
    refusal = error_for_answer(13, remark, broker_name="broker-a")
    assert isinstance(refusal, errors.MessageIllegalError)
    assert refusal.remark == remark
    assert "message.type: docs/deploy/proxy.md" in str(refusal)
    assert "proxy" not in str(error_for_answer(13, "the message is illegal"))
