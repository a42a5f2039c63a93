"""Requests that asynchronous senders have handed over and the engine has not taken yet.

Senders append without a lock, so that they and the thread that drives do not wait for each other;
he, or the sender whose request makes it many, takes in under the driver's lock all that has come
since, and writes it together.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from rocket_sink.errors import Outcome, ProducerClosedError, SendError, UnwrittenError
from rocket_sink.producer.engine import SendEngine
from rocket_sink.producer.values import Completion, SendRequest

POSTED_BYTES: Final = 16 * 1024
"""Larger bodies are handed over under the lock: what waits here is bounded by number only."""

POSTED_TOGETHER: Final = 32
"""So many that wait here are written by the sender who brought the last of them."""


class Inbox:
    """First in, first out; `append` from any thread, all else under the driver's lock."""

    def __init__(self, engine: SendEngine) -> None:
        self._engine = engine
        self._requests: deque[SendRequest] = deque()
        self.append = self._requests.append
        self.refused: list[Completion] = []
        """Requests that ended here."""

    def __len__(self) -> int:
        return len(self._requests)

    def takes(self, request: SendRequest) -> bool:
        """There is room for it, and it needs no look at a rate limit or at the bytes in flight."""
        engine = self._engine
        return (
            len(request.body) < POSTED_BYTES
            and not engine.is_paced
            and engine.window.has_room(len(request.body), len(self._requests))
        )

    def take_in(self) -> None:
        """Hand over to the engine what its window has room for."""
        requests, engine = self._requests, self._engine
        while requests:
            try:
                if not engine.try_submit(requests[0]):
                    return
            except Exception as error:
                # Its sender has gone on: only his future can tell him.
                failed = error if isinstance(error, SendError) else UnwrittenError(repr(error))
                self._refuse(requests[0], failed)
            requests.popleft()

    def close(self) -> None:
        """Refuse what is left."""
        while self._requests:
            text = "the producer was closed before it was sent"
            self._refuse(self._requests.popleft(), ProducerClosedError(text))

    def take_back(self, request: SendRequest) -> bool:
        """True when the request was still here; it is not any more."""
        for position, waiting in enumerate(self._requests):
            if waiting is request:
                del self._requests[position]
                return True
        return False

    def _refuse(self, request: SendRequest, error: SendError) -> None:
        self.refused.append(Completion(request.token, Outcome.NOT_SENT, None, error))
