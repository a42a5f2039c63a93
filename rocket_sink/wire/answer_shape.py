"""The answer to a send, read by the shape of the one before it.

A broker writes all these headers alike: same fields, same order, most of their values the same. So
the first one that is read the general way gives a pattern with places for what changes, and the
next ones cost one match. What does not match is read the general way; the two agree (a test
compares them).
"""

from __future__ import annotations

import re
from typing import Final

from rocket_sink.errors import InvalidAnswerError
from rocket_sink.wire.answers import (
    SendAnswer,
    SendAnswerFrame,
    SharedHeader,
    decode_send_answer,
)
from rocket_sink.wire.command import RESPONSE_FLAG, Frame
from rocket_sink.wire.header_json import language_name

_CHANGING: Final = {
    "msgId": "([0-9A-Za-z]{1,64})",
    "queueId": "(0|[1-9][0-9]{0,8})",
    "queueOffset": "(0|[1-9][0-9]{0,17})",
    "transactionId": r"([0-9A-Za-z_-]{0,256})",
}
"""Fields that differ from answer to answer; all others must be as in the first one."""
_NEEDED: Final = ("msgId", "queueId", "queueOffset")


class AnswerShape:
    """How one broker answers a send that it stored.

    Args:
        frame: such an answer, read the general way.
    """

    __slots__ = ("_answer", "_match", "_order", "_shared")

    def __init__(self, frame: Frame, answer: SendAnswer) -> None:
        assert frame.ext is not None
        self._answer = answer
        self._shared = SharedHeader(dict(frame.ext), frame.version, frame.language)
        changing = [name for name in frame.ext if name in _CHANGING]
        order = [changing.index(name) + 1 for name in _CHANGING if name in changing]
        pairs = ",".join(
            f'"{re.escape(name)}":"{_CHANGING.get(name, re.escape(value))}"'
            for name, value in frame.ext.items()
        )
        pattern = (
            f'\\{{"code":0,"extFields":\\{{{pairs}\\}},"flag":{RESPONSE_FLAG},'
            f'"language":"{language_name(frame.language)}","opaque":(0|[1-9][0-9]{{0,8}}),'
            f'"serializeTypeCurrentRPC":"JSON","version":{frame.version}\\}}'
        )
        compiled = re.compile(pattern.encode())
        self._match, self._order = compiled.fullmatch, (*order, compiled.groups)

    @classmethod
    def of(cls, frame: Frame, header: bytes) -> AnswerShape | None:
        """The shape of this header; None when it is no answer to a send, or not a usual one."""
        if frame.code or frame.flag != RESPONSE_FLAG or frame.remark is not None:
            return None
        if frame.ext is None or not frame.ext.keys() >= set(_NEEDED):
            return None
        try:
            shape = cls(frame, decode_send_answer(frame))
        except InvalidAnswerError:
            return None
        return shape if shape.read(header) is not None else None

    def read(self, header: bytes) -> SendAnswerFrame | None:
        """The frame without its body; None when the header has another shape."""
        match = self._match(header)
        if match is None:
            return None
        offset_id, queue_id, queue_offset, *more, opaque = match.group(*self._order)
        _, status, _, _, _, _, batch_id, region, recall_handle, trace_on = self._answer
        answer = SendAnswer(
            0, status, offset_id.decode(), int(queue_id), int(queue_offset),
            more[0].decode() if more else None, batch_id, region, recall_handle, trace_on,
        )  # fmt: skip
        return SendAnswerFrame(int(opaque), answer, self._shared)
