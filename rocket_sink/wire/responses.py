"""Decoders of answers, and of brokers' requests: transaction checks and pushed replies.

Each decoder raises RemoteProtocolError if something is missing or malformed; `decode_send_answer`
raises InvalidAnswerError instead, because the message may be stored. Callers check the response
code first. The client answers requests for consumers with REQUEST_CODE_NOT_SUPPORTED."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from rocket_sink.errors import (
    InvalidAnswerError,
    LocalProtocolError,
    MessageError,
    RemoteProtocolError,
)
from rocket_sink.text import clean
from rocket_sink.wire.codes import ResponseCode, SysFlag
from rocket_sink.wire.compress import CompressionType, inflate
from rocket_sink.wire.headers import (
    INT32_MAX,
    INT32_MIN,
    RESPONSE_FLAG,
    Frame,
    Limits,
    load_json,
    parse_int64,
    quote_numeric_keys,
)
from rocket_sink.wire.properties import (
    CLUSTER,
    CORRELATION_ID,
    MSG_TYPE,
    PGROUP,
    REPLY_TO_CLIENT,
    TTL,
    UNIQ_KEY,
    decode_properties,
)
from rocket_sink.wire.route import checked_name, checked_text
from rocket_sink.wire.stored import StoredMessage, decode_stored, iter_stored, memory_bytes

SEND_STATUS: Final[Mapping[int, str]] = {
    ResponseCode.SUCCESS: "SEND_OK",
    ResponseCode.FLUSH_DISK_TIMEOUT: "FLUSH_DISK_TIMEOUT",
    ResponseCode.SLAVE_NOT_AVAILABLE: "SLAVE_NOT_AVAILABLE",
    ResponseCode.FLUSH_SLAVE_TIMEOUT: "FLUSH_SLAVE_TIMEOUT",
}
"""{response code of a stored message: SendStatus} (MQClientAPIImpl.processSendResponse)"""

DEFAULT_REGION: Final = "DefaultRegion"
"""The region of brokers that name none (MixAll.DEFAULT_TRACE_REGION_ID)."""


class SendAnswer(NamedTuple):
    """A broker's answer that it has stored a message or a batch."""

    code: int
    status: str
    offset_message_id: str
    """The broker's id of the message; for a batch, the ids of its messages, separated by commas."""
    queue_id: int
    queue_offset: int
    """The offset of the message; for a batch, that of its first message."""
    transaction_id: str | None
    region_id: str
    recall_handle: str | None
    trace_on: bool


class SendAnswerFrame(Frame):
    """A send answer that `AnswerShape` has decoded; `model` has the other values. To save time per
    message, constant fields are class attributes, and `ext` is made only when a hook reads it."""

    __slots__ = ("_model", "answer")
    code = 0
    flag = RESPONSE_FLAG
    remark = None
    serialize = "json"

    def __init__(self, opaque: int, answer: SendAnswer, model: Frame) -> None:
        self.opaque, self.answer, self._model = opaque, answer, model
        self.body = None

    @property
    def ext(self) -> Mapping[str, str]:  # type: ignore[override]
        answer = self.answer
        ext = {
            **(self._model.ext or {}),
            "msgId": answer.offset_message_id,
            "queueId": str(answer.queue_id),
            "queueOffset": str(answer.queue_offset),
        }
        if answer.transaction_id is not None:
            ext["transactionId"] = answer.transaction_id
        if answer.recall_handle is not None:
            ext["recallHandle"] = answer.recall_handle
        return ext

    @property
    def version(self) -> int:  # type: ignore[override]
        return self._model.version

    @property
    def language(self) -> int:  # type: ignore[override]
        return self._model.language


def decode_send_answer(frame: Frame) -> SendAnswer:
    """Decode the answer to SEND_MESSAGE_V2, SEND_BATCH_MESSAGE and similar requests.

    Raises:
        InvalidAnswerError: the message is stored, but the answer lacks valid ids or offsets.
        LocalProtocolError: the code is not in SEND_STATUS.
    """
    if type(frame) is SendAnswerFrame:
        return frame.answer
    status = SEND_STATUS.get(frame.code)
    if status is None:
        raise LocalProtocolError(f"the answer {frame.code} does not say that a message is stored")
    get = (frame.ext or {}).get
    message_id = get("msgId")
    try:
        queue_id, queue_offset = int_field(frame, "queueId"), long_field(frame, "queueOffset")
    except RemoteProtocolError:
        queue_id = queue_offset = -1
    if not message_id or queue_id < 0 or queue_offset < 0:
        raise InvalidAnswerError(
            f"the broker answered {status} without a valid msgId, queueId or queueOffset",
            response_code=frame.code,
            remark=frame.remark,
        )
    return SendAnswer(
        frame.code,
        status,
        message_id,
        queue_id,
        queue_offset,
        get("transactionId"),
        get("MSG_REGION") or DEFAULT_REGION,
        get("recallHandle"),
        get("TRACE_ON") != "false",
    )


PULL_CODES: Final = frozenset(
    {
        ResponseCode.SUCCESS,
        ResponseCode.PULL_NOT_FOUND,
        ResponseCode.PULL_RETRY_IMMEDIATELY,
        ResponseCode.PULL_OFFSET_MOVED,
    }
)
"""Response codes of a pull whose answer has offsets (Java: PullStatus); others are errors."""


def pulled_bytes(frame: Frame) -> tuple[bytes, int]:
    """Return the encoded messages in the answer to PULL_MESSAGE, and the offset of the next pull.
    Raise LocalProtocolError if the code is not in PULL_CODES."""
    if frame.code not in PULL_CODES:
        raise LocalProtocolError(f"the answer {frame.code} has no messages or offsets")
    for name in ("minOffset", "maxOffset"):  # Each answer to a pull has both fields.
        long_field(frame, name)
    data = bytes(frame.body or b"") if frame.code == ResponseCode.SUCCESS else b""
    return data, long_field(frame, "nextBeginOffset")


def decode_pull_answer(frame: Frame, *, begin: int = 0) -> tuple[list[StoredMessage], int]:
    """Return the messages in the answer to PULL_MESSAGE, up to `Limits.POLL_BYTES` but at least
    one, and the offset of the next pull. Leave out messages before the requested offset `begin`: a
    pull from the middle of an inner batch returns the batch's earlier messages, too. Raise
    LocalProtocolError if the code is not in PULL_CODES."""
    data, following = pulled_bytes(frame)
    messages: list[StoredMessage] = []
    remaining_bytes = Limits.POLL_BYTES
    for message in iter_stored(data):
        if message.queue_offset < begin:
            continue
        remaining_bytes -= memory_bytes(message)
        if remaining_bytes < 0 and messages:
            return messages, message.queue_offset
        messages.append(message)
    return messages, following


def decode_cluster_info(frame: Frame, cluster: str | None = None) -> dict[str, dict[int, str]]:
    """Decode GET_BROKER_CLUSTER_INFO's answer: {broker name: {broker id (0: master): address}}, of
    all brokers or of those of one cluster."""
    brokers, table = {}, _object(_json_body(frame), "brokerAddrTable")
    for name, broker in table.items():
        if cluster is not None and cluster != _object(table, name).get("cluster"):
            continue
        addresses = _object(broker, "brokerAddrs")
        brokers[checked_name("brokerName", name)] = {
            parse_int64(number, "a broker id"): checked_text(
                "broker address", _text(address, "a broker's address")
            )
            for number, address in addresses.items()
        }
    return brokers


def decode_runtime_info(frame: Frame) -> dict[str, str]:
    """Decode the answer to GET_BROKER_RUNTIME_INFO, numbers as text (KVTable)."""
    table = _object(_json_body(frame), "table")
    return {name: _text(value, f"the broker's {name}") for name, value in table.items()}


def decode_topic_attributes(frame: Frame) -> dict[str, str]:
    """Decode the attributes in the answer to GET_TOPIC_CONFIG (TopicConfig.attributes)."""
    fields = _json_body(frame)
    if fields.get("attributes") is None:
        return {}
    attributes = _object(fields, "attributes")
    return {name: _text(value, f"the attribute {name!r}") for name, value in attributes.items()}


def decode_topics(frame: Frame) -> tuple[str, ...]:
    """Decode the answer to GET_ALL_TOPIC_LIST_FROM_NAMESERVER, sorted."""
    topics = _json_body(frame).get("topicList")
    if not isinstance(topics, list):
        raise RemoteProtocolError("the topic list is no list")
    return tuple(sorted(_text(topic, "a topic's name") for topic in topics))


class TransactionCheck(NamedTuple):
    """A broker's question about a half message's state; END_TRANSACTION answers the question."""

    message: StoredMessage
    producer_group: str
    transaction_id: str
    """The client id of the half message; if it has none, the transaction id in the header."""
    tran_state_table_offset: int
    commit_log_offset: int
    topic: str
    broker_name: str | None


def decode_transaction_check(frame: Frame) -> TransactionCheck:
    """Decode a CHECK_TRANSACTION_STATE request (CheckTransactionStateRequestHeader)."""
    messages = decode_stored(frame.body)
    if len(messages) != 1:
        raise RemoteProtocolError(f"a transaction check with {len(messages)} messages")
    message = messages[0]
    group = message.properties.get(PGROUP)
    ext = frame.ext or {}
    transaction_id = message.properties.get(UNIQ_KEY) or ext.get("transactionId")
    if not group or not transaction_id:
        raise RemoteProtocolError("a transaction check without a producer group or transaction id")
    return TransactionCheck(
        message,
        group,
        transaction_id,
        long_field(frame, "tranStateTableOffset"),
        long_field(frame, "commitLogOffset"),
        ext.get("topic") or message.topic,
        ext.get("bname"),
    )


class PushedReply(NamedTuple):
    """The reply to a request (request-reply), matched by its correlation id."""

    topic: str
    body: bytes
    properties: dict[str, str]
    correlation_id: str
    born_ms: int
    store_ms: int
    flag: int


def decode_pushed_reply(frame: Frame) -> PushedReply:
    """Decode a PUSH_REPLY_MESSAGE_TO_CLIENT request (ReplyMessageRequestHeader)."""
    properties = decode_properties(text_field(frame, "properties"))
    correlation_id = properties.get(CORRELATION_ID)
    if correlation_id is None:
        raise RemoteProtocolError("a pushed reply without a correlation id")
    body = bytes(frame.body or b"")
    sys_flag = int_field(frame, "sysFlag")
    if body and sys_flag & SysFlag.COMPRESSED:
        body = inflate(body, CompressionType.of_sys_flag(sys_flag))
    return PushedReply(
        text_field(frame, "topic"),
        body,
        properties,
        correlation_id,
        long_field(frame, "bornTimestamp"),
        long_field(frame, "storeTimestamp"),
        int_field(frame, "flag"),
    )


def reply_address(request: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """Return the topic and the routing properties of a reply (MessageUtil.createReplyMessage).
    `request` has the properties of the received request message. Raise MessageError (NOT_A_REQUEST)
    if a property that requests need is missing."""
    for name in (CLUSTER, CORRELATION_ID, REPLY_TO_CLIENT):
        if not request.get(name):
            raise MessageError(
                f"a message without the property {name} is no received request: give the message "
                "as a consumer got it, or all its properties",
                code="NOT_A_REQUEST",
            )
    kept = {
        name: request[name] for name in (CORRELATION_ID, REPLY_TO_CLIENT, TTL) if name in request
    }
    return request[CLUSTER] + "_REPLY_TOPIC", {MSG_TYPE: "reply", **kept}


def text_field(frame: Frame, name: str) -> str:
    """Return a required header field."""
    value = (frame.ext or {}).get(name)
    if value is None:
        raise RemoteProtocolError(f"the header field {name} is missing")
    return value


def long_field(frame: Frame, name: str) -> int:
    """Return a required header field, a 64-bit integer."""
    return parse_int64(text_field(frame, name), name)


def int_field(frame: Frame, name: str) -> int:
    """Return a required header field, a 32-bit integer."""
    value = long_field(frame, name)
    if INT32_MIN <= value <= INT32_MAX:
        return value
    raise RemoteProtocolError(f"{name} is not a 32-bit integer: {value}")


def _json_body(frame: Frame) -> dict[str, object]:
    body = quote_numeric_keys(bytes(frame.body or b""))
    fields = load_json(body, "the answer's body")
    if not isinstance(fields, dict):
        raise RemoteProtocolError("the answer's body is no JSON object")
    return fields


def _object(fields: object, name: str) -> dict[str, object]:
    value = fields.get(name) if isinstance(fields, dict) else None
    if not isinstance(value, dict):
        raise RemoteProtocolError(f"{name} is missing in the answer or no object")
    return value


def _text(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise RemoteProtocolError(f"{clean(what, 80)} is no text: {clean(repr(value), 40)}")
    return value
