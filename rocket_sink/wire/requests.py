"""Requests to brokers and name servers, one builder for each (MQClientAPIImpl).

All arguments are keywords; numbers become decimal text, booleans `true` or `false`, None is left
out. What a text may hold is checked where it enters the package (`Message`, options).
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from rocket_sink.wire.codes import RequestCode
from rocket_sink.wire.command import Body, Frame
from rocket_sink.wire.fields import AUTO_CREATE_TOPIC, fields, request
from rocket_sink.wire.requests_read import (
    create_topic,
    pull_message,
    query_max_offset,
    query_message,
    query_min_offset,
    query_offset_by_timestamp,
)

__all__ = [
    "AUTO_CREATE_TOPIC",
    "create_topic",
    "end_transaction",
    "get_all_topics",
    "get_broker_cluster_info",
    "get_route",
    "heartbeat",
    "pull_message",
    "query_max_offset",
    "query_message",
    "query_min_offset",
    "query_offset_by_timestamp",
    "recall_message",
    "send_batch_v2",
    "send_header_v2",
    "send_message_v2",
    "unregister_client",
]


# --- messages ---------------------------------------------------------------------------------


def send_header_v2(
    *,
    producer_group: str,
    topic: str,
    queue_id: int,
    born_ms: int,
    properties: str,
    broker_name: str | None,
    batch: bool = False,
    sys_flag: int = 0,
    flag: int = 0,
    default_topic: str = AUTO_CREATE_TOPIC,
    default_topic_queue_nums: int = 4,
    reconsume_times: int = 0,
    max_reconsume_times: int | None = None,
    unit_mode: bool = False,
) -> dict[str, str]:
    """The one-letter header of SEND_MESSAGE_V2 and its kin (SendMessageRequestHeaderV2)."""
    return fields(
        {
            "a": producer_group,
            "b": topic,
            "c": default_topic,
            "d": default_topic_queue_nums,
            "e": queue_id,
            "f": sys_flag,
            "g": born_ms,
            "h": flag,
            "i": properties,
            "j": reconsume_times,
            "k": unit_mode,
            "l": max_reconsume_times,
            "m": batch,
            "n": broker_name,
        }
    )


def send_message_v2(
    *,
    producer_group: str,
    topic: str,
    queue_id: int,
    born_ms: int,
    properties: str,
    broker_name: str | None,
    body: Body | None = None,
    sys_flag: int = 0,
    flag: int = 0,
    default_topic: str = AUTO_CREATE_TOPIC,
    default_topic_queue_nums: int = 4,
    unit_mode: bool = False,
) -> Frame:
    """One message; `properties` is wire text, `body` may follow apart."""
    ext = send_header_v2(
        producer_group=producer_group,
        topic=topic,
        queue_id=queue_id,
        born_ms=born_ms,
        properties=properties,
        broker_name=broker_name,
        sys_flag=sys_flag,
        flag=flag,
        default_topic=default_topic,
        default_topic_queue_nums=default_topic_queue_nums,
        unit_mode=unit_mode,
    )
    return Frame(RequestCode.SEND_MESSAGE_V2, ext, body)


def send_batch_v2(
    *,
    producer_group: str,
    topic: str,
    queue_id: int,
    born_ms: int,
    properties: str,
    broker_name: str | None,
    body: Body | None = None,
    default_topic: str = AUTO_CREATE_TOPIC,
    default_topic_queue_nums: int = 4,
    unit_mode: bool = False,
) -> Frame:
    """A batch (batch.py); `properties` are the batch's own: WAIT, and no UNIQ_KEY."""
    ext = send_header_v2(
        producer_group=producer_group,
        topic=topic,
        queue_id=queue_id,
        born_ms=born_ms,
        properties=properties,
        broker_name=broker_name,
        batch=True,
        default_topic=default_topic,
        default_topic_queue_nums=default_topic_queue_nums,
        unit_mode=unit_mode,
    )
    return Frame(RequestCode.SEND_BATCH_MESSAGE, ext, body)


def recall_message(
    *, producer_group: str, topic: str, recall_handle: str, broker_name: str | None = None
) -> Frame:
    """Take a timed message back before its time (5.3.3 brokers)."""
    return request(
        RequestCode.RECALL_MESSAGE,
        {
            "producerGroup": producer_group,
            "topic": topic,
            "recallHandle": recall_handle,
            "bname": broker_name,
        },
    )


# --- transactions -----------------------------------------------------------------------------


def end_transaction(
    *,
    producer_group: str,
    topic: str | None,
    tran_state_table_offset: int,
    commit_log_offset: int,
    commit_or_rollback: int,
    msg_id: str,
    transaction_id: str | None,
    from_transaction_check: bool = False,
    broker_name: str | None = None,
    remark: str | None = None,
) -> Frame:
    """Commit or roll back a half message.

    `commit_or_rollback` is SysFlag.TRANSACTION_COMMIT, _ROLLBACK or _NOT (unknown, only in the
    answer to a check). The offsets are the queue offset and the commit-log offset of the send
    answer. Java sends it oneway and never learns of a failure; the broker answers when asked.
    """
    frame = request(
        RequestCode.END_TRANSACTION,
        {
            "topic": topic,
            "producerGroup": producer_group,
            "tranStateTableOffset": tran_state_table_offset,
            "commitLogOffset": commit_log_offset,
            "commitOrRollback": commit_or_rollback,
            "fromTransactionCheck": from_transaction_check,
            "msgId": msg_id,
            "transactionId": transaction_id,
            "bname": broker_name,
        },
    )
    frame.remark = remark
    return frame


# --- the client itself ------------------------------------------------------------------------


def heartbeat(*, client_id: str, producer_groups: Iterable[str]) -> Frame:
    """Make the broker know a client's producer groups; needed for transaction checks."""
    body = {
        "clientID": client_id,
        "consumerDataSet": [],
        "heartbeatFingerprint": 0,
        "producerDataSet": [{"groupName": group} for group in producer_groups],
        "withoutSub": False,
    }
    return Frame(RequestCode.HEART_BEAT, None, _json(body))


def unregister_client(
    *, client_id: str, producer_group: str | None = None, consumer_group: str | None = None
) -> Frame:
    """Take a client's group out of a broker's tables."""
    return request(
        RequestCode.UNREGISTER_CLIENT,
        {"clientID": client_id, "producerGroup": producer_group, "consumerGroup": consumer_group},
    )


# --- name server ------------------------------------------------------------------------------


def get_route(topic: str) -> Frame:
    """A topic's route, in strict JSON from the servers that can."""
    return request(
        RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": topic, "acceptStandardJsonOnly": True}
    )


def get_broker_cluster_info() -> Frame:
    """All brokers with their clusters and addresses."""
    return Frame(RequestCode.GET_BROKER_CLUSTER_INFO)


def get_all_topics() -> Frame:
    """The names of all topics that the name server knows."""
    return Frame(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER)


def _json(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
