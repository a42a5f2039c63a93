"""What an answer means: response code and remark -> outcome and typed error.

The table of codes is made from the error classes (`SendError.response_codes`); the remarks are
those of the brokers' sources (SendMessageProcessor, AbstractSendMessageProcessor, HookUtils,
MessageExtEncoder, BrokerController, PlainPermissionManager, org.apache.rocketmq.auth), because
SYSTEM_ERROR (1) and NO_PERMISSION (16) each carry several meanings. A SYSTEM_ERROR whose remark
is not known here may have happened after the append: its outcome is unknown. So is "in-sync
replicas not enough", which DLedger answers after the append.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

from rocket_sink.errors import (
    AuthenticationError,
    BrokerError,
    InvalidQueueError,
    MessageIllegalError,
    NotStoredError,
    Outcome,
    PermissionDeniedError,
    SendError,
    ServiceNotAvailableError,
    TopicNotFoundError,
)
from rocket_sink.text import clean

REMARK_MAX_CHARACTERS: Final = 1024

SEND_STATUS: Final = {
    0: "SEND_OK",
    10: "FLUSH_DISK_TIMEOUT",
    11: "SLAVE_NOT_AVAILABLE",
    12: "FLUSH_SLAVE_TIMEOUT",
}
"""Response codes of a stored message -> SendStatus (MQClientAPIImpl.processSendResponse)."""


def _leaves(root: type[SendError]) -> Iterator[type[SendError]]:
    yield root
    for child in root.__subclasses__():
        yield from _leaves(child)


ERROR_OF_CODE: Final[dict[int, type[SendError]]] = {
    code: error for error in _leaves(SendError) for code in error.response_codes
}
"""Response code -> error class, where the code alone decides."""

_AUTHENTICATION_16: Final = (
    r"authenticat|authoriz|signature|credential|\buser(name)?\b|has no permission to access"
    r"|datetime is null|is not support\b|\bacl\b"
)
_TOPIC_TEXT: Final = r"the specified topic (is blank|contains illegal|is longer)"

REMARKS: Final[tuple[tuple[int, re.Pattern[str], type[SendError]], ...]] = tuple(
    (code, re.compile(pattern, re.IGNORECASE), error)
    for code, pattern, error in (
        # ACL 1.0: the exception's text; ACL 2.0: NO_PERMISSION with the reason.
        (1, r"AclException|check signature failed|no acl config|no accessKey", AuthenticationError),
        # First what a closed broker or topic says: a topic may be named "user" or "acl".
        (16, r"\bis forbidden", PermissionDeniedError),
        (16, _AUTHENTICATION_16, AuthenticationError),
        (1, r"create mapped file failed", NotStoredError),
        (1, r"timer message is under flow control", NotStoredError),
        (1, r"accurate timer message is not enabled", NotStoredError),
        (1, r"LMQ_CONSUME_QUEUE_NUM_EXCEEDED", NotStoredError),
        # Before startAcceptSendRequestTimeStamp, or a slave that has no master beside it.
        (1, r"broker unable to service, until|no master available along with",
         ServiceNotAvailableError),
        # Thrown by the encoder, before the append; the batch has a message that is too big.
        (1, r"message body size exceeded|size of messageExtBatch exceeded", MessageIllegalError),
        # 4.x answers with SYSTEM_ERROR where 5.x has INVALID_PARAMETER.
        (1, r"request queueId\[-?\d+\] is illegal", InvalidQueueError),
        (1, _TOPIC_TEXT, MessageIllegalError),
        (29, _TOPIC_TEXT, MessageIllegalError),
        (1, r"^topic\[[^\]]*\] not exist", TopicNotFoundError),
    )
)  # fmt: skip
"""(response code, pattern of the remark, error class); the first that fits wins."""


def outcome_of_code(response_code: int, remark: str | None = None) -> Outcome:
    """How a send with this answer ended."""
    if response_code in SEND_STATUS:
        return Outcome.ACKED if response_code == 0 else Outcome.ACKED_DEGRADED
    return error_class(response_code, remark).outcome


def error_class(response_code: int, remark: str | None = None) -> type[SendError]:
    """The error class of an answer that is not one of SEND_STATUS; unknown codes: BrokerError."""
    text = remark or ""
    for code, pattern, error in REMARKS:
        if code == response_code and pattern.search(text):
            return error
    return ERROR_OF_CODE.get(response_code, BrokerError)


def error_for_answer(
    response_code: int, remark: str | None = None, **facts: Any
) -> SendError | None:
    """The typed error of an answer, or None when the message is stored (codes 0, 10, 11, 12).

    `facts` (topic, broker_name, broker_address, ...) become attributes of the error.
    """
    if response_code in SEND_STATUS:
        return None
    said = clean(remark or "", REMARK_MAX_CHARACTERS).strip()
    where = facts.get("broker_name") or facts.get("broker_address") or "the broker"
    error = error_class(response_code, remark)
    text = f"{where} answered {response_code}"
    if said:
        text += f": {said}"
    return error(text, response_code=response_code, remark=said, **facts)
