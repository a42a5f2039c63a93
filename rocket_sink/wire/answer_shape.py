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
from rocket_sink.wire.answers import SendAnswer, SendAnswerFrame, decode_send_answer
from rocket_sink.wire.command import RESPONSE_FLAG, Frame
from rocket_sink.wire.header_json import language_name

_CHANGING: Final = {
    "msgId": "([0-9A-Za-z]{1,64})",
    "queueId": "([0-9]{1,9})",
    "queueOffset": "([0-9]{1,18})",
    "transactionId": r"([0-9A-Za-z_-]{0,256})",
}
"""Fields that differ from answer to answer; all others must be as in the first one."""
_NEEDED: Final = ("msgId", "queueId", "queueOffset")


class AnswerShape:
    """How one broker answers a send that it stored.

    Args:
        frame: such an answer, read the general way.
    """

    __slots__ = ("_answer", "_ext", "_language", "_match", "_order", "_version")

    def __init__(self, frame: Frame, answer: SendAnswer) -> None:
        assert frame.ext is not None
        self._answer, self._ext = answer, dict(frame.ext)
        self._version, self._language = frame.version, frame.language
        changing = [name for name in self._ext if name in _CHANGING]
        self._order = [changing.index(name) + 1 for name in _CHANGING if name in changing]
        pairs = ",".join(
            f'"{re.escape(name)}":"{_CHANGING.get(name, re.escape(value))}"'
            for name, value in self._ext.items()
        )
        pattern = (
            f'\\{{"code":0,"extFields":\\{{{pairs}\\}},"flag":{RESPONSE_FLAG},'
            f'"language":"{language_name(frame.language)}","opaque":(0|[1-9][0-9]{{0,8}}),'
            f'"serializeTypeCurrentRPC":"JSON","version":{frame.version}\\}}'
        )
        self._match = re.compile(pattern.encode()).fullmatch

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
        offset_id, queue_id, queue_offset, *more = match.group(*self._order)
        ext = self._ext.copy()
        message_id = ext["msgId"] = offset_id.decode()
        ext["queueId"], ext["queueOffset"] = queue_id.decode(), queue_offset.decode()
        transaction_id = None
        if more:
            transaction_id = ext["transactionId"] = more[0].decode()
        _, status, _, _, _, _, batch_id, region, recall_handle, trace_on = self._answer
        answer = SendAnswer(
            0, status, message_id, int(queue_id), int(queue_offset), transaction_id, batch_id,
            region, recall_handle, trace_on,
        )  # fmt: skip
        return SendAnswerFrame(
            0, ext, None, int(match.group(match.re.groups)), RESPONSE_FLAG, None, self._version,
            self._language, "json", answer,
        )  # fmt: skip
