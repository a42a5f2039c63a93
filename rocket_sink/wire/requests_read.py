"""Requests that read: queues, offsets, messages by key; and the topics' administration.

For the reader, the backfill and duplicate checks; the rules of requests.py hold.
"""

from __future__ import annotations

from typing import Literal

from rocket_sink.wire.codes import PermName, PullSysFlag, RequestCode
from rocket_sink.wire.command import Frame
from rocket_sink.wire.fields import AUTO_CREATE_TOPIC, request


def pull_message(
    *,
    consumer_group: str,
    topic: str,
    queue_id: int,
    queue_offset: int,
    max_msg_nums: int,
    max_msg_bytes: int | None = None,
    suspend_timeout_ms: int = 0,
    subscription: str = "*",
    sub_version: int = 0,
    broker_name: str | None = None,
) -> Frame:
    """Messages of one queue from an offset on; with `suspend_timeout_ms` the broker waits for one.

    Nothing is committed: the reader keeps its own offsets.
    """
    sys_flag = PullSysFlag.SUBSCRIPTION | (PullSysFlag.SUSPEND if suspend_timeout_ms else 0)
    return request(
        RequestCode.PULL_MESSAGE,
        {
            "consumerGroup": consumer_group,
            "topic": topic,
            "queueId": queue_id,
            "queueOffset": queue_offset,
            "maxMsgNums": max_msg_nums,
            "sysFlag": sys_flag,
            "commitOffset": 0,
            "suspendTimeoutMillis": suspend_timeout_ms,
            "subscription": subscription,
            "subVersion": sub_version,
            "expressionType": "TAG",
            "maxMsgBytes": max_msg_bytes,
            "bname": broker_name,
        },
    )


def get_topic_config(topic: str) -> Frame:
    """How a topic is configured on the broker that is asked (from 5.0 on)."""
    return request(RequestCode.GET_TOPIC_CONFIG, {"topic": topic})


def query_max_offset(*, topic: str, queue_id: int, broker_name: str | None = None) -> Frame:
    """The offset that the next message of a queue gets; also the reachability probe."""
    return request(
        RequestCode.GET_MAX_OFFSET,
        {"topic": topic, "queueId": queue_id, "committed": True, "bname": broker_name},
    )


def query_min_offset(*, topic: str, queue_id: int, broker_name: str | None = None) -> Frame:
    """The offset of a queue's oldest message."""
    return request(
        RequestCode.GET_MIN_OFFSET, {"topic": topic, "queueId": queue_id, "bname": broker_name}
    )


def query_offset_by_timestamp(
    *,
    topic: str,
    queue_id: int,
    timestamp_ms: int,
    boundary: Literal["lower", "upper"] = "lower",
    broker_name: str | None = None,
) -> Frame:
    """The offset of the first (lower) or last (upper) message of a queue at a store time."""
    return request(
        RequestCode.SEARCH_OFFSET_BY_TIMESTAMP,
        {
            "topic": topic,
            "queueId": queue_id,
            "timestamp": timestamp_ms,
            "boundaryType": boundary.upper(),
            "bname": broker_name,
        },
    )


def query_message(
    *,
    topic: str,
    key: str,
    max_num: int,
    begin_ms: int = 0,
    end_ms: int = 2**63 - 1,
    unique_key: bool = False,
) -> Frame:
    """Messages by an index key, or by client message id (UNIQ_KEY) when `unique_key`.

    An index entry may belong to another key with the same hash: compare what comes back.
    """
    return request(
        RequestCode.QUERY_MESSAGE,
        {
            "topic": topic,
            "key": key,
            "maxNum": max_num,
            "beginTimestamp": begin_ms,
            "endTimestamp": end_ms,
            "_UNIQUE_KEY_QUERY": unique_key,
        },
    )


def create_topic(
    *,
    topic: str,
    read_queue_nums: int,
    write_queue_nums: int,
    perm: int = PermName.READ | PermName.WRITE,
    order: bool = False,
    attributes: str | None = None,
    default_topic: str = AUTO_CREATE_TOPIC,
) -> Frame:
    """Create or update a topic on one broker; `attributes` as `+message.type=DELAY`."""
    return request(
        RequestCode.UPDATE_AND_CREATE_TOPIC,
        {
            "topic": topic,
            "defaultTopic": default_topic,
            "readQueueNums": read_queue_nums,
            "writeQueueNums": write_queue_nums,
            "perm": perm,
            "topicFilterType": "SINGLE_TAG",
            "topicSysFlag": 0,
            "order": order,
            "attributes": attributes,
            "force": False,
        },
    )


def get_broker_runtime_info() -> Frame:
    """A broker's figures; 5.x and 4.9 have `dispatchBehindBytes` among them."""
    return request(RequestCode.GET_BROKER_RUNTIME_INFO, {})
