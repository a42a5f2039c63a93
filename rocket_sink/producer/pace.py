"""The options' rate limits as one engine keeps them: its share of `maxMessagesPerSecond` and
`maxBytesPerSecond`.

Messages and body bytes (as sent: compressed) count when a request is taken; its further attempts
do not count again.
"""

from __future__ import annotations

from rocket_sink.options import SinkOptions
from rocket_sink.routing.pacing import TokenBucket


def share(limit: int, options: SinkOptions) -> float:
    """One task's part of a limit per second."""
    return limit / max(1, options.rate_tasks)


class Pace:
    """Both limits; `due_s` is when the request that was last told to wait may go."""

    __slots__ = ("_bytes", "_messages", "due_s")

    def __init__(self, options: SinkOptions, now_s: float) -> None:
        self._messages = _bucket(options.max_messages_per_second, options, now_s)
        self._bytes = _bucket(options.max_bytes_per_second, options, now_s)
        self.due_s = now_s

    @classmethod
    def of(cls, options: SinkOptions, now_s: float) -> Pace | None:
        """None where no limit is set."""
        limited = options.max_messages_per_second or options.max_bytes_per_second
        return cls(options, now_s) if limited else None

    def allows(self, messages: int, size: int, now_s: float) -> bool:
        """Both limits let the request pass now."""
        wait_s = 0.0
        if self._messages is not None:
            wait_s = self._messages.wait_s(messages, now_s)
        if self._bytes is not None:
            wait_s = max(wait_s, self._bytes.wait_s(size, now_s))
        self.due_s = now_s + wait_s
        return wait_s <= 0

    def spend(self, messages: int, size: int, now_s: float) -> None:
        """It passes."""
        if self._messages is not None:
            self._messages.spend(messages, now_s)
        if self._bytes is not None:
            self._bytes.spend(size, now_s)

    def wait_s(self, longest_s: float, now_s: float) -> float:
        """How long the engine may sleep without making a waiting request late."""
        left_s = self.due_s - now_s
        return min(longest_s, left_s) if left_s > 0 else longest_s


def _bucket(limit: int, options: SinkOptions, now_s: float) -> TokenBucket | None:
    return TokenBucket(share(limit, options), now_s) if limit else None
