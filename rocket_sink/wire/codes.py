"""The numbers of the protocol, with RocketMQ's names.

Sources: RequestCode, ResponseCode, RemotingSysResponseCode, LanguageCode, MQVersion, MessageSysFlag
and PermName.java (5.3.3). Received fields are plain `int`: peers may send other numbers."""

from __future__ import annotations

import enum
from typing import Final


class RequestCode(enum.IntEnum):
    """Requests that this package sends or answers, or that its fake cluster serves. Commands that
    change a server's configuration are left out on purpose: they allow remote code execution on
    unpatched servers (CVE-2023-33246, CVE-2023-37582)."""

    PULL_MESSAGE = 11
    QUERY_MESSAGE = 12
    QUERY_CONSUMER_OFFSET = 14
    UPDATE_CONSUMER_OFFSET = 15
    UPDATE_AND_CREATE_TOPIC = 17
    GET_BROKER_RUNTIME_INFO = 28
    SEARCH_OFFSET_BY_TIMESTAMP = 29
    GET_MAX_OFFSET = 30
    GET_MIN_OFFSET = 31
    VIEW_MESSAGE_BY_ID = 33
    HEART_BEAT = 34
    UNREGISTER_CLIENT = 35
    CONSUMER_SEND_MSG_BACK = 36
    END_TRANSACTION = 37
    CHECK_TRANSACTION_STATE = 39
    REGISTER_BROKER = 103
    GET_ROUTEINFO_BY_TOPIC = 105
    GET_BROKER_CLUSTER_INFO = 106
    GET_ALL_TOPIC_LIST_FROM_NAMESERVER = 206
    RESET_CONSUMER_CLIENT_OFFSET = 220
    SEND_MESSAGE_V2 = 310
    SEND_BATCH_MESSAGE = 320
    SEND_REPLY_MESSAGE_V2 = 325
    PUSH_REPLY_MESSAGE_TO_CLIENT = 326
    GET_TOPIC_CONFIG = 351
    RECALL_MESSAGE = 370


class ResponseCode(enum.IntEnum):
    """Response codes of brokers and name servers."""

    SUCCESS = 0
    SYSTEM_ERROR = 1
    SYSTEM_BUSY = 2
    REQUEST_CODE_NOT_SUPPORTED = 3
    FLUSH_DISK_TIMEOUT = 10
    SLAVE_NOT_AVAILABLE = 11
    FLUSH_SLAVE_TIMEOUT = 12
    MESSAGE_ILLEGAL = 13
    SERVICE_NOT_AVAILABLE = 14
    NO_PERMISSION = 16
    TOPIC_NOT_EXIST = 17
    PULL_NOT_FOUND = 19
    PULL_RETRY_IMMEDIATELY = 20
    PULL_OFFSET_MOVED = 21
    QUERY_NOT_FOUND = 22
    SUBSCRIPTION_GROUP_NOT_EXIST = 26
    INVALID_PARAMETER = 29
    FLOW_CONTROL = 215
    ILLEGAL_OPERATION = 604
    GO_AWAY = 1500


class LanguageCode(enum.IntEnum):
    """The implementation language of a peer, in the headers of its frames."""

    JAVA = 0
    CPP = 1
    DOTNET = 2
    PYTHON = 3
    DELPHI = 4
    ERLANG = 5
    RUBY = 6
    OTHER = 7
    HTTP = 8
    GO = 9
    PHP = 10
    OMS = 11
    RUST = 12
    NODE_JS = 13


class SysFlag:
    """Bits of a message's system flag (MessageSysFlag.java)."""

    COMPRESSED: Final = 0x1
    TRANSACTION_NOT: Final = 0
    TRANSACTION_PREPARED: Final = 0x4
    TRANSACTION_COMMIT: Final = 0x8
    TRANSACTION_ROLLBACK: Final = 0xC
    BORNHOST_V6: Final = 0x10
    STOREHOST_V6: Final = 0x20
    NEED_UNWRAP: Final = 0x40
    INNER_BATCH: Final = 0x80
    COMPRESSION_MASK: Final = 0x700


class PermName:
    """Bits of a topic's permission (PermName.java)."""

    WRITE: Final = 0x2
    READ: Final = 0x4


_V4_3_0: Final = 273


def mq_version(major: int, minor: int, patch: int) -> int:
    """Return the ordinal of a release in MQVersion.java, from 4.0.0 on. The enum has two entries
    per release (snapshot, then release); minor and patch go from 0 to 9."""
    return _V4_3_0 + 2 * (major * 100 + minor * 10 + patch - 430)


def version_name(ordinal: int) -> str:
    """Return the release with this ordinal, such as `5.3.3`; `unknown` outside 4.0 to 5.9."""
    number, released = divmod(ordinal - _V4_3_0 + 1, 2)
    number += 430
    if not 400 <= number <= 599:
        return f"unknown ({ordinal})"
    name = f"{number // 100}.{number // 10 % 10}.{number % 10}"
    return name if released else f"{name}-SNAPSHOT"


V5_0_0: Final = mq_version(5, 0, 0)
V5_4_0: Final = mq_version(5, 4, 0)
V5_5_0: Final = mq_version(5, 5, 0)
CURRENT_VERSION: Final = mq_version(5, 3, 3)
"""The version in our requests. Brokers send GO_AWAY only to clients newer than 5.3.1."""
