"""Answers of a broker other than plain success, after which a message leaves its group."""

from rocket_sink.testing import Answer, CloseConnection, CutAnswer, IncompleteAnswer
from rocket_sink.wire.codes import ResponseCode

FAULTS = {
    "busy": Answer(ResponseCode.SYSTEM_BUSY, "[TIMEOUT_CLEAN_QUEUE]broker busy"),
    "error": Answer(ResponseCode.SYSTEM_ERROR, "an error"),
    "degraded": Answer(ResponseCode.FLUSH_DISK_TIMEOUT, stores=True),
    "incomplete": IncompleteAnswer(),
    "cut": CutAnswer(40),
    "closed": CloseConnection(),
}
