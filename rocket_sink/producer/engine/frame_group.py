"""Groups of single messages: encoded, written, matched and completed by the hundred.

A group is one request of the engine for as long as all goes well: one queue, consecutive opaque
ids, one write, answers read in bulk. What is not plain success leaves the group: the message is
then an attempt of its own, with all that single requests have (retry, isolation, unknown outcome).
A group of which no byte was sent is tried again, or given up, as a whole. Never used for ordered
requests: a broker handles the frames of one connection in several threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rocket_sink.producer.engine.attempt import (
    AttemptHistory,
    SendAttempt,
    SendRequest,
    StoredFrames,
    buffers_of,
)
from rocket_sink.wire.responses import SendAnswer, SendAnswers


class GroupAttempt(SendAttempt):
    """Owner of the frames of one group while they are on a connection."""

    __slots__ = (
        "_answers",
        "_left",
        "_open",
        "_single_answers",
        "first_opaque",
        "open_count",
        "size",
    )

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        group = self.request.group
        assert group is not None
        self.size = self.open_count = len(group.messages)
        """Of `size` messages those without an answer, which have not left."""
        self._open = np.ones(self.size, np.bool_)
        self._answers: list[tuple[SendAnswers, float]] = []
        self._single_answers: list[tuple[int, SendAnswer, float]] = []
        self._left = 0
        self.first_opaque = 0

    @property
    def requests(self) -> int:  # type: ignore[override]
        return self.open_count

    @property
    def places(self) -> int:  # type: ignore[override]
        return self.size - self._left

    @property
    def is_whole(self) -> bool:
        """No message was answered, or has left."""
        return self.open_count == self.size

    def on_answers(self, answers: SendAnswers, sent_s: float | None, now_s: float) -> None:
        self.ends.append((self, answers, sent_s, now_s))

    def answered(self, answers: SendAnswers, rtt_s: float) -> None:
        """They are stored."""
        self._open[answers.opaques - self.first_opaque] = False
        self.open_count -= len(answers)
        self._answers.append((answers, rtt_s))

    def answered_one(self, opaque: int, answer: SendAnswer, rtt_s: float) -> None:
        """As `answered`, of one answer that was read by itself."""
        index = opaque - self.first_opaque
        self._open[index] = False
        self.open_count -= 1
        self._single_answers.append((index, answer, rtt_s))

    def leave(self, index: int, last: int | None = None) -> SendAttempt:
        """The attempt of one message, or of those to `last` (exclusive), as if it had been sent by
        itself: at the same time, to the same queue.

        It counts as in flight in the group's place.
        """
        last = index + 1 if last is None else last
        group = self.request.group
        assert group is not None and self._open[index:last].all()
        self._open[index:last] = False
        self.open_count -= last - index
        self._left += last - index
        request = group.leave(index, last)
        kind, body, size = attempt_kind(request)
        made = kind(self.ends, request, body, size, self.ordering, self.ready_s, self.deadline_s)
        self.body_bytes -= size
        made.number, made.counted = self.number, self.counted
        made.target, made.broker, made.channel = self.target, self.broker, self.channel
        made.handed_s, made.wall_ms = self.handed_s, self.wall_ms
        made.wire_bytes = self.wire_bytes // self.size
        if self.history is not None:
            made.history = history = AttemptHistory()
            history.earlier = list(self.history.earlier)
            history.last_error, history.unknown = self.history.last_error, self.history.unknown
            history.last_broker = self.history.last_broker
        return made

    def leave_all(self) -> list[SendAttempt]:
        """Attempts of all messages that are open."""
        return [self.leave(index) for index in np.flatnonzero(self._open).tolist()]

    def split(self, most: int) -> list[SendAttempt]:
        """Attempts of at most so many messages each, which nothing was sent of."""
        assert self.is_whole
        starts = range(0, self.size, most)
        return [self.leave(start, min(start + most, self.size)) for start in starts]

    def stored(self) -> StoredFrames:
        """What was answered so far."""
        many, single = self._answers, self._single_answers
        indices = [one.opaques - self.first_opaque for one, _ in many]
        offsets = [one.queue_offsets for one, _ in many]
        ids = [one.texts["msgId"] for one, _ in many]
        rtts = [np.full(len(one), rtt_s) for one, rtt_s in many]
        if single:
            indices.append(np.array([index for index, _, _ in single], np.int64))
            offsets.append(np.array([answer.queue_offset for _, answer, _ in single], np.int64))
            ids.append(np.array([answer.offset_message_id for _, answer, _ in single], "S"))
            rtts.append(np.array([rtt_s for _, _, rtt_s in single]))
        return StoredFrames(
            np.concatenate(indices), np.concatenate(offsets), np.concatenate(ids),
            np.concatenate(rtts) * 1000,
        )  # fmt: skip

    def first_answer(self) -> SendAnswer | None:
        """The answer to the first message that was stored ; None: none was."""
        if self._single_answers:
            return self._single_answers[0][1]
        return self._answers[0][0].frame(0).answer if self._answers else None


def attempt_kind(request: SendRequest) -> tuple[type[SendAttempt], Sequence[Any], int]:
    """The class of the request's attempts, its body as buffers, and their bytes."""
    if request.group is None:
        return SendAttempt, *buffers_of(request.body)
    return GroupAttempt, (), request.group.messages.body_bytes
