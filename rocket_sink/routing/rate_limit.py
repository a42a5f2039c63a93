"""Rate limits: `TokenBucket` for the options, `AimdWindow` for busy brokers and for proxies.

After SYSTEM_BUSY or FLOW_CONTROL a broker's window of requests in flight is cut by half. It grows
by one for each window of stored messages, as in TCP's congestion control (RFC 5681).
"""

from __future__ import annotations

import math
from typing import Final

BURST_S: Final = 1.0
"""Size of a burst after idle time, in seconds of the rate."""
CUT: Final = 0.5
PROXY_PLACES: Final = 120
"""Limit of single messages in flight on a connection to a RocketMQ proxy.

A proxy drops an answer if more than 64 KiB of earlier answers wait to be written on its connection
(`AbstractRemotingActivity.writeResponse`, and Netty's default high-water mark). The answer to a
message has 260 to 420 bytes; a place stands for 512 bytes of answers."""
PROXY_BATCH: Final = 500
"""Limit of messages in a batch to a proxy. Two such batches fit into the window."""


def batch_places(messages: int) -> int:
    """Return the places that a batch takes in the window of a proxy: the answer has 33 bytes for
    each message, and 57 if the broker has an IPv6 address."""
    return 1 + messages // 9


class TokenBucket:
    """A token bucket that starts empty, so that many short-lived senders keep a common limit.

    In t seconds from the start at most `per_second` * t is spent, and at most `BURST_S` more after
    idle time. An amount above the capacity passes when the bucket is full, and leaves a debt.
    """

    __slots__ = ("_at_s", "_capacity", "_saved", "per_second")

    def __init__(self, per_second: float, now_s: float) -> None:
        if not per_second > 0:
            raise ValueError(f"a rate of {per_second} per second lets nothing pass")
        self.per_second = per_second
        self._capacity = per_second * BURST_S
        self._saved = 0.0
        self._at_s = now_s

    def wait_s(self, amount: float, now_s: float) -> float:
        """Return the seconds until `amount` may be spent; 0: now."""
        missing = min(amount, self._capacity) - self._grown(now_s)
        # Do not wait because of a rounding error.
        return missing / self.per_second if missing > 1e-9 * self._capacity else 0.0

    def spend(self, amount: float, now_s: float) -> None:
        """Take tokens, after `wait_s` has returned 0."""
        self._saved = self._grown(now_s) - amount
        self._at_s = max(now_s, self._at_s)

    def _grown(self, now_s: float) -> float:
        elapsed_s = max(0.0, now_s - self._at_s)
        return min(self._capacity, self._saved + elapsed_s * self.per_second)


class AimdWindow:
    """The limit of requests in flight to a broker that has given a busy answer.

    Args:
        in_flight: requests in flight at the busy answer, including its own request.
        now_s: the time of the busy answer.
        most: the largest limit.
    """

    __slots__ = ("_cut_s", "_most", "limit")

    def __init__(self, in_flight: int, now_s: float, most: float = math.inf) -> None:
        self.limit = max(1.0, in_flight * CUT)
        self._cut_s = now_s
        self._most = most

    def busy(self, sent_s: float, in_flight: int, now_s: float) -> None:
        """Cut the window after a busy answer, unless its request was sent before the last cut."""
        if sent_s >= self._cut_s:
            self.limit = max(1.0, min(self.limit, in_flight) * CUT)
            self._cut_s = now_s

    def stored(self) -> None:
        """Let the window grow after a stored message."""
        self.limit = min(self._most, self.limit + 1.0 / self.limit)

    def room_for(self, requests: int, in_flight: int) -> int:
        """Return how many requests of a group may be sent now; 0 if the group must wait until half
        of the window is free. When a quarter was enough, a message took twice the CPU, and sixteen
        senders on the brokers' machine reached two thirds of the rate."""
        limit = int(self.limit)
        room = limit - in_flight
        if room >= requests:
            return requests
        return room if 2 * room >= limit else 0
