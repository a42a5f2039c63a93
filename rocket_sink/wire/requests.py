"""Requests to brokers and name servers, one builder for each that has fields (MQClientAPIImpl).

`Message` and the options have checked the texts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from rocket_sink.message import MessageQueue
from rocket_sink.wire.acl import UNIQUE_KEY_QUERY
from rocket_sink.wire.codes import PermName, RequestCode, mq_version
from rocket_sink.wire.headers import INT64_MAX, Body, Frame, dump_json

AUTO_CREATE_TOPIC: Final = "TBW102"
"""TopicValidator.AUTO_CREATE_TOPIC_KEY_TOPIC: the template of topics that brokers create."""

Value = str | int | bool | None


def fields(values: Mapping[str, Value]) -> dict[str, str]:
    """Return header fields as text; None and empty text are left out (see `wire.headers`)."""
    return {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in values.items()
        if value is not None and value != ""
    }


def request(code: int, values: Mapping[str, Value], body: Body | None = None) -> Frame:
    """Make a request with these header fields."""
    return Frame(code, fields(values) or None, body)


def namespace_fields(namespace: str) -> dict[str, str]:
    """Return the header fields that name the namespace of a request (NamespaceRpcHook)."""
    return {"ns": namespace, "nsd": "true"} if namespace else {}


def send_message_v2(
    *,
    producer_group: str,
    topic: str,
    queue_id: int,
    born_ms: int,
    properties: str,
    broker_name: str | None,
    batch: bool = False,
    body: Body | None = None,
    sys_flag: int = 0,
    flag: int = 0,
    default_topic: str = AUTO_CREATE_TOPIC,
    default_topic_queue_nums: int = 4,
) -> Frame:
    """Make the request that sends a message or a batch (SendMessageRequestHeaderV2). `properties`
    is wire text, for a batch only WAIT. If `body` is None, the caller writes the body."""
    return request(
        RequestCode.SEND_BATCH_MESSAGE if batch else RequestCode.SEND_MESSAGE_V2,
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
            "j": 0,
            "k": False,
            "m": batch,
            "n": broker_name,
        },
        body,
    )


def recall_message(
    *, producer_group: str, topic: str, recall_handle: str, broker_name: str | None = None
) -> Frame:
    """Make the request that recalls a timed message before its delivery."""
    return request(
        RequestCode.RECALL_MESSAGE,
        {
            "producerGroup": producer_group,
            "topic": topic,
            "recallHandle": recall_handle,
            "bname": broker_name,
        },
    )


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
    """Make the request that commits or rolls back a half message. `commit_or_rollback` is
    SysFlag.TRANSACTION_COMMIT, _ROLLBACK or _NOT (unknown). The offsets are the queue offset and
    the commit-log offset in the answer to the half message. Java sends this oneway and ignores
    failures; brokers answer a two-way request."""
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


def heartbeat(
    *, client_id: str, producer_groups: Iterable[str] = (), consumer_groups: Iterable[str] = ()
) -> Frame:
    """Make a heartbeat, which registers a client's groups at a broker. A broker that may create
    consumer groups creates these, with their retry topics, without which consoles show no group."""
    body = {
        "clientID": client_id,
        "consumerDataSet": [
            {
                "consumeFromWhere": "CONSUME_FROM_LAST_OFFSET",
                "consumeType": "CONSUME_ACTIVELY",
                "groupName": group,
                "messageModel": "CLUSTERING",
                "subscriptionDataSet": [],
                "unitMode": False,
            }
            for group in consumer_groups
        ],
        "heartbeatFingerprint": 0,
        "producerDataSet": [{"groupName": group} for group in producer_groups],
        "withoutSub": False,
    }
    return Frame(RequestCode.HEART_BEAT, None, dump_json(body).encode())


def unregister_client(*, client_id: str, producer_group: str) -> Frame:
    """Unregister a client's group at a broker."""
    return request(
        RequestCode.UNREGISTER_CLIENT, {"clientID": client_id, "producerGroup": producer_group}
    )


def get_route(topic: str) -> Frame:
    """Ask for a topic's route. Name servers from 4.9.4 on answer in strict JSON."""
    return request(
        RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": topic, "acceptStandardJsonOnly": True}
    )


def pull_message(
    queue: MessageQueue,
    offset: int,
    *,
    consumer_group: str,
    max_msg_nums: int,
    max_msg_bytes: int | None = None,
    expression: str = "*",
) -> Frame:
    """Ask for messages of a queue from an offset on. The broker commits no offset, and answers at
    once if there is no message. `expression` filters by tags (FilterAPI), by their hash codes."""
    return request(
        RequestCode.PULL_MESSAGE,
        {
            **_of(queue),
            "consumerGroup": consumer_group,
            "queueOffset": offset,
            "maxMsgNums": max_msg_nums,
            "sysFlag": 0x4,  # PullSysFlag.FLAG_SUBSCRIPTION
            "commitOffset": 0,
            "suspendTimeoutMillis": 0,
            "subscription": expression,
            "subVersion": 0,
            "expressionType": "TAG",
            "maxMsgBytes": max_msg_bytes,
        },
    )


def get_topic_config(topic: str) -> Frame:
    """Ask for a topic's configuration on one broker (5.0 and later)."""
    return request(RequestCode.GET_TOPIC_CONFIG, {"topic": topic})


def query_max_offset(queue: MessageQueue) -> Frame:
    """Ask for the offset of a queue's next message. Probes use this request, too."""
    return request(RequestCode.GET_MAX_OFFSET, {**_of(queue), "committed": True})


def query_min_offset(queue: MessageQueue) -> Frame:
    """Ask for the offset of a queue's oldest message."""
    return request(RequestCode.GET_MIN_OFFSET, _of(queue))


def query_offset_by_timestamp(queue: MessageQueue, timestamp_ms: int) -> Frame:
    """Ask for the offset of the first message of a queue at or after a store time."""
    return request(
        RequestCode.SEARCH_OFFSET_BY_TIMESTAMP,
        {**_of(queue), "timestamp": timestamp_ms, "boundaryType": "LOWER"},
    )


def query_consumer_offset(queue: MessageQueue, group: str) -> Frame:
    """Ask for the offset from which a consumer group goes on (QueryConsumerOffsetRequestHeader).
    Brokers of 5.x then answer QUERY_NOT_FOUND for a group without a position, instead of 0."""
    return request(
        RequestCode.QUERY_CONSUMER_OFFSET,
        {**_of(queue), "consumerGroup": group, "setZeroIfNotFound": False},
    )


def update_consumer_offset(queue: MessageQueue, group: str, offset: int) -> Frame:
    """Set the offset from which a consumer group goes on (UpdateConsumerOffsetRequestHeader)."""
    return request(
        RequestCode.UPDATE_CONSUMER_OFFSET,
        {**_of(queue), "consumerGroup": group, "commitOffset": offset},
    )


def _of(queue: MessageQueue) -> dict[str, Value]:
    """Return the header fields of a queue. `bname` is empty for the queue of a probe."""
    return {"topic": queue.topic, "queueId": queue.queue_id, "bname": queue.broker_name}


def view_message(offset: int) -> Frame:
    """Ask for the message at an offset of the commit log (ViewMessageRequestHeader)."""
    return request(RequestCode.VIEW_MESSAGE_BY_ID, {"offset": offset})


def query_message(
    *, topic: str, key: str, max_num: int, begin_ms: int = 0, unique_key: bool = False
) -> Frame:
    """Ask for messages with an index key, or with a client message id (UNIQ_KEY) if `unique_key`.
    The index contains hashes, so the answer may contain messages of other keys. `wire.acl` says why
    the frame names the version 4.9.3."""
    frame = request(
        RequestCode.QUERY_MESSAGE,
        {
            "topic": topic,
            "key": key,
            "maxNum": max_num,
            "beginTimestamp": begin_ms,
            "endTimestamp": INT64_MAX,
            UNIQUE_KEY_QUERY: unique_key,
        },
    )
    frame.version = mq_version(4, 9, 3)
    return frame


def create_topic(
    *,
    topic: str,
    read_queue_nums: int,
    write_queue_nums: int,
    perm: int = PermName.READ | PermName.WRITE,
    order: bool = False,
    attributes: str | None = None,
) -> Frame:
    """Create or update a topic on one broker; `attributes` has the form `+message.type=DELAY`."""
    return request(
        RequestCode.UPDATE_AND_CREATE_TOPIC,
        {
            "topic": topic,
            "defaultTopic": AUTO_CREATE_TOPIC,
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
