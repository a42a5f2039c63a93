"""Groups of single messages, which the engine encodes, writes and completes together.

A group is one request of the engine: its messages go to one queue in one write, have consecutive
opaque ids, and their answers are read in bulk. A message with another answer than plain success
leaves the group and becomes a single attempt, with retries and isolation as usual. A group of which
no byte was sent is retried, or given up, as a whole. Ordered requests never use groups, because a
broker handles the frames of one connection in several threads.

Tasks make groups from columns, and need one Completion per group for their ledger. The producer
makes groups from asynchronous sends. Such a group completes in parts, because the futures of its
messages must not wait for each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from rocket_sink.producer.engine.attempt import SendAttempt, StoredFrames, content_of
from rocket_sink.wire.answers import SendAnswers
from rocket_sink.wire.responses import SendAnswer

Texts: TypeAlias = npt.NDArray[np.bytes_]


class GroupAttempt(SendAttempt):
    """An attempt to send all messages of a group."""

    __slots__ = ("_answers", "_ended", "_open", "_single_answers", "first_opaque", "group", "size")

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        assert self.request.group is not None
        self.group = self.request.group
        self.size = self.requests = len(self.group)
        """Messages in the group; `requests`: messages in the group without an answer."""
        self._open = np.ones(self.size, np.bool_)
        self._answers: list[tuple[SendAnswers, float]] = []
        self._single_answers: list[tuple[int, SendAnswer, float]] = []
        self._ended = 0
        """The number of messages that have completed, or left the group."""
        self.first_opaque = 0

    @property
    def window_requests(self) -> int:  # type: ignore[override]
        return self.size - self._ended

    def note_answers(self, answers: SendAnswers) -> None:
        """Note answers that say that messages are stored."""
        self._open[answers.opaques - self.first_opaque] = False
        self.requests -= len(answers)
        self._answers.append((answers, self.rtt_s))

    def note_single_answer(self, opaque: int, answer: SendAnswer) -> None:
        """Note an answer that was not read in bulk. It says that its message is stored."""
        index = opaque - self.first_opaque
        self._open[index] = False
        self.requests -= 1
        self._single_answers.append((index, answer, self.rtt_s))

    def leave(self, index: int, last: int | None = None) -> SendAttempt:
        """Move the messages `index` to `last` (exclusive) to a new attempt with the group's target
        and send time. The new attempt takes over the messages' in-flight counts."""
        last = index + 1 if last is None else last
        assert self._open[index:last].all()
        self._open[index:last] = False
        self.requests -= last - index
        self._ended += last - index
        request = self.group.leave(index, last)
        kind = SendAttempt if request.group is None else GroupAttempt
        body, size = content_of(request)
        attempt = kind(
            self.ends, request, body, size, self.strict, self.ready_s, self.deadline_s,
            self.number, self.counted, target=self.target, broker=self.broker,
            channel=self.channel, handed_s=self.handed_s, sent_s=self.sent_s,
            ended_s=self.ended_s, wall_ms=self.wall_ms, wire_bytes=self.wire_bytes // self.size,
        )  # fmt: skip
        self.body_bytes -= size
        if (history := self.history) is not None:
            earlier = list(history.earlier)
            attempt.history = replace(history, records=[], waited=None, earlier=earlier)
        return attempt

    def leave_all(self) -> list[SendAttempt]:
        """Move each message without an answer to a new attempt, and return the attempts."""
        return [self.leave(index) for index in np.flatnonzero(self._open).tolist()]

    def first_answer(self) -> SendAnswer | None:
        """Return one of the answers that `take_stored` will take; None if there are none."""
        if self._single_answers:
            return self._single_answers[0][1]
        return self._answers[0][0].frame(0).answer if self._answers else None

    def take_stored(self) -> StoredFrames:
        """Return the messages whose answers came since the last call (at least one)."""
        parts = [self._columns_of(*many) for many in self._answers]
        if self._single_answers:
            parts.append(_columns_of_singles(self._single_answers))
        self._answers, self._single_answers = [], []
        if len(parts) == 1:
            return parts[0]
        columns = zip(*(vars(part).values() for part in parts), strict=True)
        return StoredFrames(*map(_joined_columns, columns))

    def _columns_of(self, answers: SendAnswers, rtt_s: float) -> StoredFrames:
        texts = answers.texts
        return StoredFrames(
            answers.opaques - self.first_opaque,
            answers.queue_offsets,
            texts["msgId"],
            texts.get("transactionId"),
            texts.get("recallHandle"),
            np.full(len(answers), rtt_s * 1000),
        )

    def give_back(self, stored: StoredFrames) -> tuple[int, int]:
        """Remove completed messages; return their body bytes and number for `Window.give_back`."""
        size, count = self.group.bytes_of(stored.indices), len(stored)
        self.body_bytes -= size
        self._ended += count
        return size, count


def _columns_of_singles(answers: Sequence[tuple[int, SendAnswer, float]]) -> StoredFrames:
    indices, send_answers, rtts_s = zip(*answers, strict=True)
    return StoredFrames(
        np.array(indices, np.int64),
        np.array([answer.queue_offset for answer in send_answers], np.int64),
        np.array([answer.offset_message_id for answer in send_answers], "S"),
        _column([answer.transaction_id for answer in send_answers]),
        _column([answer.recall_handle for answer in send_answers]),
        np.array(rtts_s) * 1000,
    )


def _column(texts: Sequence[str | None]) -> Texts | None:
    """Return the texts as an array; None if a text is missing."""
    return None if None in texts else np.array(texts, "S")


def _joined_columns(columns: Sequence[npt.NDArray[Any] | None]) -> Any:
    """Join the columns of several `StoredFrames`; return None if a column is missing."""
    present_columns = [column for column in columns if column is not None]
    return np.concatenate(present_columns) if len(present_columns) == len(columns) else None
