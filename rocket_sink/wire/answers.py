"""Fast reading of successful answers, one by one or many as columns.

The answers of one broker have the same fields in the same order, and differ in few values. So the
first answer becomes a regular expression (`AnswerShape`). A later answer takes one match; many in a
row take a few array operations. Other headers are parsed in full, with equal results (tested)."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from rocket_sink.errors import InvalidAnswerError
from rocket_sink.wire.headers import PREFIX, RESPONSE_FLAG, Frame, language_name
from rocket_sink.wire.responses import SendAnswer, SendAnswerFrame, decode_send_answer

Int64s: TypeAlias = npt.NDArray[np.int64]
Bytes: TypeAlias = npt.NDArray[np.uint8]

_SHAPED_BYTES: Final = 1024
"""Headers of this length or more get no pattern: they have the ids of a batch."""
_AT_ONCE: Final = 16
"""Smallest number of answers that are read as columns; fewer are cheaper to read singly."""
_SHAPES: Final = 8
"""Limit of patterns per connection. Headers of further forms are parsed in full."""
_LENGTHS: Final = 4
"""Limit of different frame lengths that are read together."""


@dataclass(slots=True, eq=False)
class SendAnswers:
    """n successful answers to single messages, as columns.

    Attributes:
        answer, model: an answer and its frame, for the values that are equal in all of them.
        texts: {header field: ASCII texts of one length}; `msgId` is always present.
    """

    answer: SendAnswer
    model: Frame
    opaques: Int64s
    queue_ids: Int64s
    queue_offsets: Int64s
    texts: Mapping[str, npt.NDArray[np.bytes_]]

    def __len__(self) -> int:
        return len(self.opaques)

    def take(self, indices: Any) -> SendAnswers:
        """Return the answers that an index array or a slice selects."""
        return SendAnswers(
            self.answer, self.model, self.opaques[indices], self.queue_ids[indices],
            self.queue_offsets[indices],
            {name: column[indices] for name, column in self.texts.items()},
        )  # fmt: skip

    def frame(self, index: int) -> SendAnswerFrame:
        """Return an answer as a frame, equal to that of `AnswerShape.read`."""
        texts: dict[str, Any] = {
            _FIELD_OF[name]: column[index].decode() for name, column in self.texts.items()
        }
        answer = self.answer._replace(
            queue_id=int(self.queue_ids[index]),
            queue_offset=int(self.queue_offsets[index]),
            **texts,
        )
        return SendAnswerFrame(int(self.opaques[index]), answer, self.model)


_CHANGING: Final = {
    "msgId": "([0-9A-Za-z]{1,64})",
    "queueId": "(0|[1-9][0-9]{0,8})",
    "queueOffset": "(0|[1-9][0-9]{0,17})",
    "transactionId": r"([0-9A-Za-z_-]{0,256})",
    "recallHandle": r"([0-9A-Za-z_=-]{1,512})",
}
"""Fields that differ between answers; all others must equal those of the first answer."""
_FIELD_OF: Final = {
    "msgId": "offset_message_id",
    "transactionId": "transaction_id",
    "recallHandle": "recall_handle",
}

_ZERO: Final = ord("0")
_NOT_IN_TEXT: Final = np.ones(256, np.bool_)
"""Mask of the bytes that never occur in the texts of `_CHANGING`."""
_NOT_IN_TEXT[list(b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz_=-")] = False


def _numbers(digits: Bytes) -> Int64s:
    """Return each row of decimal digits as a number."""
    weights = 10 ** np.arange(digits.shape[1] - 1, -1, -1, dtype=np.int64)
    numbers: Int64s = (digits - np.uint8(_ZERO)).astype(np.int64) @ weights
    return numbers


def _texts(characters: Bytes) -> npt.NDArray[np.bytes_]:
    """Return each row of characters as an ASCII text."""
    width = characters.shape[1]
    if not width:
        return np.zeros(len(characters), "S1")
    return np.ascontiguousarray(characters).view(f"S{width}")[:, 0]


def _alike(
    frames: Bytes, texts: Iterable[tuple[int, int]], numbers: Iterable[tuple[int, int]]
) -> Bytes:
    """Return the leading frames that equal the first frame except for these texts and numbers."""
    differs = frames != frames[0]
    for start, end in texts:
        differs[:, start:end] = _NOT_IN_TEXT.take(frames[:, start:end])
    for start, end in numbers:
        digits = frames[:, start:end]
        differs[:, start:end] = (digits < _ZERO) | (digits > _ZERO + 9)
        if end - start > 1:
            differs[:, start] |= digits[:, 0] == _ZERO
    # Usually no row differs, and the search for one takes as long as all steps above.
    return frames[: int(differs.any(axis=1).argmax())] if differs.any() else frames


@dataclass(slots=True, eq=False)
class PlainAnswers:
    """n answers of success without header fields (END_TRANSACTION), equal but for their ids."""

    model: Frame
    opaques: Int64s

    def __len__(self) -> int:
        return len(self.opaques)

    def take(self, indices: Any) -> PlainAnswers:
        return PlainAnswers(self.model, self.opaques[indices])

    def frame(self, index: int) -> Frame:
        return replace(self.model, opaque=int(self.opaques[index]))


Answers: TypeAlias = SendAnswers | PlainAnswers


class AnswerShape:
    """The pattern of one peer's successful answers, made from the first answer. Answers to sends
    have header fields; answers to END_TRANSACTION have none (`is_plain`)."""

    __slots__ = ("_answer", "_match", "_model", "_order", "_texts")

    def __init__(self, frame: Frame, answer: SendAnswer | None) -> None:
        ext = dict(frame.ext or {})
        # Copy the frame: the reader gives it a body later, and hooks may change it.
        self._model = replace(frame, ext=None if frame.ext is None else ext)
        self._answer = answer
        changing = [name for name in ext if name in _CHANGING]
        order = [changing.index(name) + 1 for name in _CHANGING if name in changing]
        self._texts = [name for name in _CHANGING if name in changing and name in _FIELD_OF]
        pairs = ",".join(
            f'"{re.escape(name)}":"{_CHANGING.get(name, re.escape(value))}"'
            for name, value in ext.items()
        )
        fields = "" if frame.ext is None else f'"extFields":\\{{{pairs}\\}},'
        pattern = (
            f'\\{{"code":0,{fields}"flag":{RESPONSE_FLAG},'
            f'"language":"{language_name(frame.language)}","opaque":(0|[1-9][0-9]{{0,8}}),'
            f'"serializeTypeCurrentRPC":"JSON","version":{frame.version}\\}}'
        )
        compiled = re.compile(pattern.encode())
        self._match, self._order = compiled.fullmatch, (*order, compiled.groups)

    @property
    def is_plain(self) -> bool:
        return self._answer is None

    @classmethod
    def of(cls, frame: Frame, header: bytes) -> AnswerShape | None:
        """Return the shape of an answer; None if it reports a failure or has unusual JSON."""
        if frame.code or frame.flag != RESPONSE_FLAG or frame.remark is not None:
            return None
        try:
            shape = cls(frame, decode_send_answer(frame) if frame.ext else None)
        except InvalidAnswerError:
            return None
        return shape if shape.read(header) is not None else None

    def read_many(self, frames: Bytes) -> Answers | None:
        """Return the frames before the first of another shape, as columns; None if there are none.
        `frames` has one complete frame per row."""
        match = self._match(frames[0, PREFIX.size :].tobytes())
        if match is None:
            return None
        spans = [match.span(group) for group in self._order]
        spans = [(start + PREFIX.size, end + PREFIX.size) for start, end in spans]
        if self._answer is None:
            frames = _alike(frames, (), spans)
            return PlainAnswers(self._model, _numbers(frames[:, slice(*spans[0])]))
        text_spans = dict(zip(self._texts, (spans[0], *spans[3:-1]), strict=True))
        numbers = (*spans[1:3], spans[-1])
        frames = _alike(frames, text_spans.values(), numbers)
        queue_ids, queue_offsets, opaques = (_numbers(frames[:, s:e]) for s, e in numbers)
        texts = {name: _texts(frames[:, s:e]) for name, (s, e) in text_spans.items()}
        return SendAnswers(self._answer, self._model, opaques, queue_ids, queue_offsets, texts)

    def read(self, header: bytes) -> Frame | None:
        """Return the frame without its body; None if the header has another shape."""
        match = self._match(header)
        if match is None:
            return None
        if self._answer is None:
            return replace(self._model, opaque=int(match.group(1)))
        offset_id, queue_id, queue_offset, *more, opaque = match.group(*self._order)
        _, status, _, _, _, transaction_id, region, recall_handle, trace_on = self._answer
        if more:
            if transaction_id is not None:
                transaction_id = more[0].decode()
            if recall_handle is not None:
                recall_handle = more[-1].decode()
        answer = SendAnswer(
            0, status, offset_id.decode(), int(queue_id), int(queue_offset),
            transaction_id, region, recall_handle, trace_on,
        )  # fmt: skip
        return SendAnswerFrame(int(opaque), answer, self._model)


def _size_at(data: bytes | bytearray, at: int) -> int:
    """Return the size of the frame at a position; 0 if it is incomplete, or has a body."""
    if at + PREFIX.size > len(data):
        return 0
    length, mark = PREFIX.unpack_from(data, at)
    return 4 + length if length == mark + 4 and at + 4 + length <= len(data) else 0


class AnswerShapes:
    """The shapes of one peer's answers so far."""

    __slots__ = ("_shapes", "_shapes_left")

    def __init__(self) -> None:
        self._shapes: list[AnswerShape] = []
        """The latest shape of answers to sends, and the latest of plain answers."""
        self._shapes_left = _SHAPES

    def read(self, header: bytes) -> Frame | None:
        """Return the frame without its body; None if the header has no known shape."""
        for shape in self._shapes:
            answer = shape.read(header)
            if answer is not None:
                return answer
        return None

    def read_many(self, data: bytes | bytearray, at: int) -> tuple[list[Answers], int]:
        """Return the frames from `at` on, grouped by length, and their total size in bytes. Return
        ([], 0) if only few frames in a row have a known shape."""
        size = _size_at(data, at)
        count = (len(data) - at) // size if size else 0
        if count < _AT_ONCE or not self._shapes:
            return [], 0
        frames = np.frombuffer(data, np.uint8, count * size, at).reshape(count, size)
        other = (frames[:, : PREFIX.size] != frames[0, : PREFIX.size]).any(axis=1)
        count = int(other.argmax()) or count
        if count >= _AT_ONCE:
            answers = self._read_alike(frames[:count])
            return ([], 0) if answers is None else ([answers], len(answers) * size)
        return self._read_mixed(data, at)

    def _read_alike(self, frames: Bytes) -> Answers | None:
        several = (shape.read_many(frames) for shape in self._shapes)
        return next((answers for answers in several if answers is not None), None)

    def _read_mixed(self, data: bytes | bytearray, at: int) -> tuple[list[Answers], int]:
        """Read frames of one shape; their lengths differ by the digits of the queue offsets."""
        if self.read(bytes(data[at + PREFIX.size : at + _size_at(data, at)])) is None:
            return [], 0
        begin, starts = at, defaultdict[int, list[int]](list)
        while (size := _size_at(data, at)) and (size in starts or len(starts) < _LENGTHS):
            starts[size].append(at)
            at += size
        if sum(map(len, starts.values())) < _AT_ONCE:
            return [], 0
        everything, several = np.frombuffer(data, np.uint8), []
        for size, begins in starts.items():
            frames = everything[np.array(begins)[:, np.newaxis] + np.arange(size)]
            answers = self._read_alike(frames)
            alike = 0 if answers is None else len(answers)
            if alike < len(begins):
                at = min(at, begins[alike])  # Stop before the first frame of another shape.
            several.append((begins, answers))
        return [
            answers.take(slice(0, bisect_left(begins, at)))
            for begins, answers in several
            if answers is not None and begins[0] < at
        ], at - begin

    def learn(self, frame: Frame, header: bytes) -> None:
        """Learn the shape of a header that was parsed in full."""
        if not self._shapes_left or len(header) >= _SHAPED_BYTES:
            return
        shape = AnswerShape.of(frame, header)
        if shape is not None:
            others = [other for other in self._shapes if other.is_plain != shape.is_plain]
            self._shapes = [*others, shape] if shape.is_plain else [shape, *others]
            self._shapes_left -= 1
