"""Request builders: their header fields have the names and texts of Java's header classes."""

import json

import pytest

from rocket_sink.message import MessageQueue
from rocket_sink.wire import requests
from rocket_sink.wire.codes import PermName, RequestCode, SysFlag


def test_c17_the_short_names_of_a_send_header():
    frame = requests.send_message_v2(
        producer_group="group", topic="test", queue_id=5, born_ms=1234, properties="k\x01v\x02",
        broker_name="broker-a", body=b"x", sys_flag=1, flag=7,
    )  # fmt: skip
    assert frame.code == 310
    assert frame.ext == {
        "a": "group", "b": "test", "c": "TBW102", "d": "4", "e": "5", "f": "1", "g": "1234",
        "h": "7", "i": "k\x01v\x02", "j": "0", "k": "false", "m": "false", "n": "broker-a",
    }  # fmt: skip


def test_a_batch_has_its_code_and_flag():
    frame = requests.send_message_v2(
        batch=True,
        producer_group="group", topic="test", queue_id=5, born_ms=1234, properties="",
        broker_name=None,
    )  # fmt: skip
    ext = frame.ext or {}
    assert (frame.code, ext["m"]) == (320, "true")
    assert not {"i", "n", "l"} & set(ext), "nothing empty is sent"


QUEUE = MessageQueue("t", "b", 2)
QUEUE_EXT = {"topic": "t", "queueId": "2", "bname": "b"}


@pytest.mark.parametrize(
    ("frame", "code", "ext"),
    [
        (requests.get_route("t"), RequestCode.GET_ROUTEINFO_BY_TOPIC,
         {"topic": "t", "acceptStandardJsonOnly": "true"}),
        (requests.unregister_client(client_id="c", producer_group="g"),
         RequestCode.UNREGISTER_CLIENT, {"clientID": "c", "producerGroup": "g"}),
        (requests.query_max_offset(QUEUE), RequestCode.GET_MAX_OFFSET,
         {**QUEUE_EXT, "committed": "true"}),
        # A probe names no broker.
        (requests.query_max_offset(MessageQueue("t", "", 0)), RequestCode.GET_MAX_OFFSET,
         {"topic": "t", "queueId": "0", "committed": "true"}),
        (requests.query_min_offset(QUEUE), RequestCode.GET_MIN_OFFSET, QUEUE_EXT),
        (requests.query_consumer_offset(QUEUE, "g"), RequestCode.QUERY_CONSUMER_OFFSET,
         {**QUEUE_EXT, "consumerGroup": "g", "setZeroIfNotFound": "false"}),
        (requests.view_message(5), RequestCode.VIEW_MESSAGE_BY_ID, {"offset": "5"}),
        (requests.query_offset_by_timestamp(QUEUE, 5), RequestCode.SEARCH_OFFSET_BY_TIMESTAMP,
         {**QUEUE_EXT, "timestamp": "5", "boundaryType": "LOWER"}),
        (
            requests.pull_message(QUEUE, 5, consumer_group="g", max_msg_nums=32),
            RequestCode.PULL_MESSAGE,
            {
                **QUEUE_EXT, "consumerGroup": "g", "queueOffset": "5", "maxMsgNums": "32",
                "sysFlag": "4", "commitOffset": "0", "suspendTimeoutMillis": "0",
                "subscription": "*", "subVersion": "0", "expressionType": "TAG",
            },
        ),
        (
            requests.query_message(topic="t", key="k", max_num=3, unique_key=True),
            RequestCode.QUERY_MESSAGE,
            {
                "topic": "t", "key": "k", "maxNum": "3", "beginTimestamp": "0",
                "endTimestamp": "9223372036854775807", "_UNIQUE_KEY_QUERY": "true",
            },
        ),
        (requests.recall_message(producer_group="g", topic="t", recall_handle="h"),
         RequestCode.RECALL_MESSAGE, {"producerGroup": "g", "topic": "t", "recallHandle": "h"}),
        (
            requests.end_transaction(
                producer_group="g", topic="t", tran_state_table_offset=1, commit_log_offset=2,
                commit_or_rollback=SysFlag.TRANSACTION_COMMIT, msg_id="m", transaction_id="x",
                broker_name="b",
            ),
            RequestCode.END_TRANSACTION,
            {
                "topic": "t", "producerGroup": "g", "tranStateTableOffset": "1",
                "commitLogOffset": "2", "commitOrRollback": "8", "fromTransactionCheck": "false",
                "msgId": "m", "transactionId": "x", "bname": "b",
            },
        ),
        (
            requests.create_topic(topic="t", read_queue_nums=4, write_queue_nums=8),
            RequestCode.UPDATE_AND_CREATE_TOPIC,
            {
                "topic": "t", "defaultTopic": "TBW102", "readQueueNums": "4",
                "writeQueueNums": "8", "perm": str(PermName.READ | PermName.WRITE),
                "topicFilterType": "SINGLE_TAG", "topicSysFlag": "0", "order": "false",
                "force": "false",
            },
        ),
    ],
    ids=lambda value: value.name if isinstance(value, RequestCode) else "",
)  # fmt: skip
def test_header_fields(frame, code, ext):
    assert frame.code == code
    assert frame.ext == ext


def test_a_heartbeat_names_the_groups():
    body = json.loads(requests.heartbeat(client_id="c", producer_groups=["g"]).body)
    assert body == {
        "clientID": "c", "producerDataSet": [{"groupName": "g"}], "consumerDataSet": [],
        "heartbeatFingerprint": 0, "withoutSub": False,
    }  # fmt: skip


def test_the_remark_of_an_end_of_transaction_travels():
    frame = requests.end_transaction(
        producer_group="g", topic=None, tran_state_table_offset=1, commit_log_offset=2,
        commit_or_rollback=0, msg_id="m", transaction_id=None, remark="why",
    )  # fmt: skip
    assert frame.remark == "why"
    assert "transactionId" not in (frame.ext or {})
