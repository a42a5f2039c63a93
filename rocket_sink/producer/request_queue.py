"""Requests that wait for room in the engine's window, in the order of their arrival.

Any thread appends, without a lock; the thread that drives the engine drains the queue. The first
request waits until it fits, and all others wait behind it. So a large message is not overtaken for
ever by small ones."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Hashable
from typing import Final

from rocket_sink.errors import Outcome, ProducerClosedError, SendError, UnwrittenError
from rocket_sink.producer.engine.attempt import Completion, SendRequest, buffers_of
from rocket_sink.producer.engine.engine import SendEngine
from rocket_sink.producer.engine.limits import is_limited
from rocket_sink.producer.send_group import (
    GROUP_LEAST,
    GROUP_MOST,
    SendGroup,
    group_key,
    group_request,
)
from rocket_sink.producer.worker import Waiter


class RequestQueue:
    """The requests that the engine has not taken yet."""

    def __init__(self, engine: SendEngine) -> None:
        self._engine = engine
        self._is_limited: Final = is_limited(engine.options)
        self.requests: deque[SendRequest] = deque()
        self._bytes = 0
        """About the bytes in `requests`: threads add without a lock, and an empty queue resets."""
        self._blocked: dict[SendRequest, Waiter] = {}
        """Requests whose sender waits until the engine takes them."""
        self.refused: list[Completion] = []
        """Completions of requests that the engine did not take."""

    def put(self, request: SendRequest) -> None:
        self._bytes += buffers_of(request.body)[1]
        self.requests.append(request)

    def has_room(self) -> bool:
        """Return whether further requests will find room in the window soon."""
        window = self._engine.flow.window
        return not self.requests or (
            window.is_roomy and window.has_room(self._bytes, len(self.requests))
        )

    def put_if_room(self, request: SendRequest) -> Waiter | None:
        """Append a request. If the window has no room for it, or a rate is limited, return a waiter
        that ends when the engine takes the request."""
        size = buffers_of(request.body)[1]
        engine, waiter = self._engine, None
        if self._is_limited or not engine.flow.window.has_room(
            self._bytes + size, len(self.requests)
        ):
            waiter = self._blocked[request] = Waiter()
        else:
            self._bytes += size
            request.since_s = request.since_s or engine.clock()
        self.requests.append(request)
        return waiter

    def withdraw(self, request: SendRequest) -> bool:
        """Remove a request; return False if the engine has taken it."""
        self._blocked.pop(request, None)
        with contextlib.suppress(ValueError):
            self.requests.remove(request)
            return True
        return False

    def drain(self) -> None:
        """Pass requests to the engine until its window is full, in groups where possible."""
        requests, window = self.requests, self._engine.flow.window
        if self._blocked and not window.is_roomy:
            return  # A wake-up per message would cost more than the message.
        # RPC hooks have to see each request, so there are no groups with hooks.
        grouping = len(requests) >= GROUP_LEAST and not self._engine.client.rpc_hooks
        groups: dict[Hashable, list[SendRequest]] = {}
        count = size = 0
        with contextlib.suppress(IndexError):  # A sender may withdraw the last request.
            while requests:
                request = requests.popleft()
                key = group_key(request) if grouping else None
                body_bytes = len(request.body) if key is not None else 0
                if (count or key is not None) and not window.has_room(
                    size + (body_bytes or buffers_of(request.body)[1]), count
                ):
                    requests.appendleft(request)
                    break
                if key is not None:
                    groups.setdefault(key, []).append(request)
                    count, size = count + 1, size + body_bytes
                elif not self._submit(request):
                    requests.appendleft(request)
                    break
        for together in groups.values():
            for start in range(0, len(together), GROUP_MOST):
                self._submit_together(together[start : start + GROUP_MOST])
        if not requests:
            self._bytes = 0

    def _submit_together(self, together: list[SendRequest]) -> None:
        """Submit requests as a group, or singly if they are few. Put those back that do not fit."""
        if len(together) >= GROUP_LEAST:
            group = group_request(together)
            if self._submit(group):
                for request in together:
                    self._unblock(request)
                return
        for number, request in enumerate(together):
            if not self._submit(request):
                self.requests.extendleft(reversed(together[number:]))
                return

    def _submit(self, request: SendRequest) -> bool:
        """Submit a request; return False if the engine has no room."""
        try:
            is_taken = self._engine.try_submit(request)
        except Exception as error:
            # The sender may have returned, so only its future can report the error.
            failed = error if isinstance(error, SendError) else UnwrittenError(repr(error))
            self._refuse(request, failed)
            return True
        if is_taken and self._blocked:
            self._unblock(request)
        return is_taken

    def _unblock(self, request: SendRequest) -> None:
        waiter = self._blocked.pop(request, None)
        if waiter is not None:
            waiter.finish()

    def close(self) -> None:
        """Refuse all requests."""
        with contextlib.suppress(IndexError):
            while self.requests:
                error = ProducerClosedError("the producer was closed before it was sent")
                self._refuse(self.requests.popleft(), error)

    def _refuse(self, request: SendRequest, error: SendError) -> None:
        self._engine.flow.measure_failure(request, error)
        token = request.token
        tokens = token.tokens if type(token) is SendGroup else [token]
        self.refused += [
            Completion(owner, Outcome.NOT_SENT, None, error.copy()) for owner in tokens
        ]
        self._unblock(request)
