"""Groups of asynchronous sends, which the engine sends together (`producer.engine.frame_group`).
The engine writes a group at once, to one queue. It reads the answers, and completes the futures, in
bulk. A message whose answer is not plain success becomes a single request again."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from rocket_sink.forks import lazy
from rocket_sink.message import SendResult
from rocket_sink.producer.engine.attempt import Completion, SendRequest, StoredFrames
from rocket_sink.producer.future import SendFuture, end_all
from rocket_sink.wire.send_header import SendTemplate

GROUP_LEAST: Final = 8
"""Smallest size of a group; for fewer messages single requests are cheaper."""
GROUP_MOST: Final = 256
_SINCE_S: Final = 0.1
"""Longest time between the submissions of a group's first and last message."""


def group_key(request: SendRequest) -> Hashable:
    """Return a key: requests with equal keys form a group. None: the request is sent alone."""
    if (
        request.ordered
        or request.choose is not None
        or request.timeout_s is not None
        or type(request.token) is not SendFuture
    ):
        return None
    # A group has its first message's deadline, so all its messages must be about as old as that.
    since = int(request.since_s / _SINCE_S)
    return request.topic, request.queue, request.timed, request.least_version, since


def group_request(requests: Sequence[SendRequest]) -> SendRequest:
    group, first = SendGroup(requests), requests[0]
    return SendRequest(
        first.topic, b"", message_count=len(requests), queue=first.queue, token=group,
        timed=first.timed, least_version=first.least_version, message_id=first.message_id,
        since_s=first.since_s, group=group,
    )  # fmt: skip


class SendGroup:
    """Requests with the same `group_key`. Serves the engine as FrameGroup and as token."""

    in_parts = True

    def __init__(self, requests: Sequence[SendRequest]) -> None:
        self._requests = requests

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def tokens(self) -> list[SendFuture]:
        return [request.token for request in self._requests]

    @lazy
    def body_bytes(self) -> int:
        return sum(len(request.body) for request in self._requests)

    def bytes_of(self, indices: npt.NDArray[np.int64]) -> int:
        requests = self._requests
        return sum(len(requests[index].body) for index in indices.tolist())

    def frames(self, template: SendTemplate, **fields: Any) -> bytes:
        """Return the frames of all messages (see `SendTemplate.frames`)."""
        return template.frames(
            (
                (request.body, request.properties, request.sys_flag, request.flag)
                for request in self._requests
            ),
            **fields,
        )

    def leave(self, first: int, last: int) -> SendRequest:
        if last - first == 1:
            return self._requests[first]
        return group_request(self._requests[first:last])

    def on_done(self, completion: Completion) -> None:
        """Complete the futures of stored messages, or fail all if the group was never sent."""
        if completion.stored is not None and completion.result is not None:
            end_all(self._stored_results(completion.result, completion.stored))
        elif (error := completion.error) is not None:
            end_all((future, None, error.copy()) for future in self.tokens)

    def _stored_results(
        self, first: SendResult, stored: StoredFrames
    ) -> Iterator[tuple[SendFuture, SendResult, None]]:
        for index, offset, offset_id, transaction_id, recall_handle, rtt_ms in zip(
            stored.indices.tolist(),
            stored.queue_offsets.tolist(),
            stored.offset_message_ids.astype(str).tolist(),
            _texts(stored.transaction_ids),
            _texts(stored.recall_handles),
            stored.rtt_ms.tolist(),
            strict=False,
        ):
            request = self._requests[index]
            result = SendResult(
                first.outcome, first.status, request.message_id, offset_id, first.queue, offset,
                first.broker_address, first.attempts, rtt_ms, first.maybe_duplicate,
                transaction_id, first.region_id, recall_handle, first.trace_on,
            )  # fmt: skip
            yield request.token, result, None


def _texts(column: npt.NDArray[np.bytes_] | None) -> Iterable[str | None]:
    return itertools.repeat(None) if column is None else column.astype(str).tolist()
