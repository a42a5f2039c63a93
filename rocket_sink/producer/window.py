"""The bound on what is pending: requests and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rocket_sink.options import SinkOptions


class Window:
    """Counts what was taken and given back; each place is given back exactly once."""

    __slots__ = ("_max_bytes", "_max_requests", "bytes", "requests")

    def __init__(self, options: SinkOptions) -> None:
        self._max_requests = options.max_in_flight
        self._max_bytes = options.max_in_flight_bytes
        self.requests = 0
        self.bytes = 0

    def has_room(self, size: int, others: int = 0) -> bool:
        """A request larger than the whole window passes when it is alone.

        Args:
            others: requests that come before it.
        """
        requests = self.requests + others
        return requests == 0 or (
            requests < self._max_requests and self.bytes + size <= self._max_bytes
        )

    @property
    def is_roomy(self) -> bool:
        """A quarter of it is free: time to wake who waits for a place, once for many."""
        return 4 * self.requests <= 3 * self._max_requests

    def take(self, size: int) -> bool:
        if not self.has_room(size):
            return False
        self.requests += 1
        self.bytes += size
        return True

    def give_back(self, size: int) -> None:
        self.requests -= 1
        self.bytes -= size
        assert self.requests >= 0 and self.bytes >= 0, "a place was given back twice"


def measured(body: Any) -> tuple[Sequence[Any], int]:
    """The body as buffers whose `len` is their size in bytes, and their total size."""
    if type(body) is bytes:
        return (body,), len(body)
    parts = body if isinstance(body, (list, tuple)) else (body,)
    buffers = [part if type(part) is bytes else memoryview(part).cast("B") for part in parts]
    return buffers, sum(map(len, buffers))
