"""Groups of frames: their sizes, and answers after which a message leaves its group."""

import pytest

from rocket_sink.producer.engine.frame_group import GroupAttempt
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


@pytest.fixture
def groups(monkeypatch):
    """Return the sizes of the groups that are begun."""
    sizes = []
    begin = GroupAttempt.__init__

    def counted(self, *given, **more):
        begin(self, *given, **more)
        sizes.append(self.size)

    monkeypatch.setattr(GroupAttempt, "__init__", counted)
    return sizes
