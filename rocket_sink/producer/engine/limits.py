"""Limits of requests: time and attempts, the window of pending requests, rates.

The limits per second hold for a whole Spark write. The tasks that run at once share them evenly:

    a task's limit = maxMessagesPerSecond / rateTasks (the same for bytes)

`rateTasks` defaults to the task slots at the start of the write. So a write never exceeds its
limits, and a write with fewer tasks than slots stays below them. With dynamic allocation
`rateTasks` has to be the largest number of slots; Spark Connect hides the slots."""

from __future__ import annotations

from rocket_sink.options import SinkOptions
from rocket_sink.routing.rate_limit import TokenBucket


class RequestLimits:
    """The limits of time and attempts per request, from the options."""

    def __init__(self, options: SinkOptions) -> None:
        cap_ms = options.attempt_timeout_ms
        self.timeout_s = options.send_msg_timeout_ms / 1000
        self.order_wait_s = options.order_wait_ms / 1000
        self.attempt_cap_s = cap_ms / 1000 if cap_ms > 0 else None
        self.max_attempts = 1 + options.retry_times
        self.stored_check_s = options.stored_check_timeout_ms / 1000


class Window:
    """The number and bytes of pending requests, with their limits."""

    def __init__(self, options: SinkOptions) -> None:
        self._max_requests = options.max_in_flight
        self._max_bytes = options.max_in_flight_bytes
        self.requests = 0
        self.bytes = 0

    def has_room(self, size: int, others: int = 0) -> bool:
        """Return whether a request of `size` bytes fits after `others` further requests. A request
        that is larger than the window fits if it is alone."""
        requests = self.requests + others
        return requests == 0 or (
            requests < self._max_requests and self.bytes + size <= self._max_bytes
        )

    @property
    def is_roomy(self) -> bool:
        """Whether a quarter of the window is free. Only then waiting threads wake, many at once."""
        return 4 * self.requests <= 3 * self._max_requests

    def take(self, size: int, requests: int = 1) -> bool:
        """Add `requests` if the window has room for one request, and return whether they were
        added. So a group may exceed the limit."""
        if not self.has_room(size):
            return False
        self.requests += requests
        self.bytes += size
        return True

    def give_back(self, size: int, requests: int = 1) -> None:
        self.requests -= requests
        self.bytes -= size
        assert self.requests >= 0 and self.bytes >= 0, "a place was given back twice"


def per_task_rate(limit: int, options: SinkOptions) -> float:
    """Return a task's share of a limit per second."""
    return limit / max(1, options.rate_tasks)


class RateLimiter:
    """The share of one engine in `maxMessagesPerSecond` and `maxBytesPerSecond`. Messages and body
    bytes (compressed, as sent) count when the engine takes a request; retries do not count again.
    `due_s` is the time at which the request of the last `allows` may go."""

    def __init__(self, options: SinkOptions, now_s: float) -> None:
        limits = options.max_messages_per_second, options.max_bytes_per_second
        self._buckets = [
            TokenBucket(per_task_rate(limit, options), now_s) if limit else None for limit in limits
        ]
        self.due_s = now_s

    @classmethod
    def of(cls, options: SinkOptions, now_s: float) -> RateLimiter | None:
        """Return the limiter for the options; None if they set no limit."""
        return cls(options, now_s) if is_limited(options) else None

    def allows(self, messages: int, size: int, now_s: float) -> bool:
        """Return whether both limits allow a request now."""
        wait_s = max(
            bucket.wait_s(amount, now_s)
            for bucket, amount in zip(self._buckets, (messages, size), strict=True)
            if bucket is not None
        )
        self.due_s = now_s + wait_s
        return wait_s <= 0

    def spend(self, messages: int, size: int, now_s: float) -> None:
        """Count a request that the engine takes."""
        for bucket, amount in zip(self._buckets, (messages, size), strict=True):
            if bucket is not None:
                bucket.spend(amount, now_s)

    def wait_s(self, longest_s: float, now_s: float) -> float:
        """Return the time until a delayed request may go, at most `longest_s`."""
        left_s = self.due_s - now_s
        return min(longest_s, left_s) if left_s > 0 else longest_s


def rate_limited_options(options: SinkOptions) -> SinkOptions:
    """Return options with batches no larger than what a task may send in a second."""
    if not is_limited(options):
        return options
    changes = {}
    if options.max_messages_per_second:
        most = max(1, int(per_task_rate(options.max_messages_per_second, options)))
        changes["requestMaxMessages"] = min(options.request_max_messages, most)
    if options.max_bytes_per_second:
        largest = max(1024, int(per_task_rate(options.max_bytes_per_second, options)))
        changes["requestMaxBytes"] = min(options.request_max_bytes, largest)
    return options.with_(**changes)


def is_limited(options: SinkOptions) -> bool:
    """Return whether a limit per second is set."""
    return bool(options.max_messages_per_second or options.max_bytes_per_second)
