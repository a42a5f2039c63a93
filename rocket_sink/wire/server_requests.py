"""Requests from brokers: transaction checks and pushed replies.

The client answers other requests, which concern consumers, with REQUEST_CODE_NOT_SUPPORTED.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from rocket_sink.errors import MessageError, RemoteProtocolError
from rocket_sink.wire.codes import SysFlag
from rocket_sink.wire.compress import CompressionType, inflate
from rocket_sink.wire.headers import Frame
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
from rocket_sink.wire.responses import int_field, long_field, text_field
from rocket_sink.wire.stored import StoredMessage, decode_stored

REPLY_TOPIC_SUFFIX: Final = "_REPLY_TOPIC"


class TransactionCheck(NamedTuple):
    """A broker's question about a half message's state; the answer is an END_TRANSACTION
    request."""

    message: StoredMessage
    producer_group: str
    transaction_id: str
    """The client id of the half message; if it has none, the transaction id in the header."""
    tran_state_table_offset: int
    commit_log_offset: int
    topic: str
    broker_name: str | None


def decode_transaction_check(frame: Frame) -> TransactionCheck:
    """Decode a CHECK_TRANSACTION_STATE request (CheckTransactionStateRequestHeader).

    Raises:
        RemoteProtocolError: there is no message, or no producer group or transaction id.
    """
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
    """Decode a PUSH_REPLY_MESSAGE_TO_CLIENT request (ReplyMessageRequestHeader).

    Raises:
        RemoteProtocolError: fields are missing, or the body cannot be inflated.
    """
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
    `request` has the properties of the received request message.

    Raises:
        MessageError: NOT_A_REQUEST: a property of requests is missing.
    """
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
    return request[CLUSTER] + REPLY_TOPIC_SUFFIX, {MSG_TYPE: "reply", **kept}
