"""Rate limits: `TokenBucket` for the options, `AimdWindow` for busy brokers and for proxies.

A broker's window limits its requests in flight. After SYSTEM_BUSY or FLOW_CONTROL the window is
halved. It grows by one when a whole window of messages was stored, as TCP does (RFC 5681)."""

from __future__ import annotations

import math
from typing import Final

BURST_S: Final = 1.0
"""The capacity of a `TokenBucket`, in seconds of its rate."""
CUT: Final = 0.5
PROXY_PLACES: Final = 120
"""Limit of single messages in flight on a connection to a RocketMQ proxy. A proxy drops an answer
if more than 64 KiB of earlier answers wait in the connection's write buffer
(`AbstractRemotingActivity.writeResponse`, and Netty's default high-water mark). The answer to a
message has 260 to 420 bytes. So the limit allows 512 bytes for each answer."""
PROXY_BATCH: Final = 500
"""Limit of messages in a batch to a proxy, so that two batches fit into the window."""


def batch_places(messages: int) -> int:
    """Return how many single messages a batch counts as in a proxy's window. Per message of a batch
    the answer has 33 bytes, or 57 if the broker has an IPv6 address. So nine messages take about as
    many bytes as the window allows for one."""
    return 1 + messages // 9


class TokenBucket:
    """A token bucket of the capacity `per_second` * BURST_S. The bucket starts empty, so that many
    short-lived senders together keep the limit. A request for more than the capacity waits for a
    full bucket, and makes the balance negative."""

    __slots__ = ("_at_s", "_capacity", "_saved", "per_second")

    def __init__(self, per_second: float, now_s: float) -> None:
        if not per_second > 0:
            raise ValueError(f"a rate of {per_second} per second lets nothing pass")
        self.per_second = per_second
        self._capacity = per_second * BURST_S
        self._saved = 0.0
        self._at_s = now_s

    def wait_s(self, amount: float, now_s: float) -> float:
        """Return the seconds until `amount` may be spent."""
        missing = min(amount, self._capacity) - self._tokens_at(now_s)
        # Ignore rounding errors.
        return missing / self.per_second if missing > 1e-9 * self._capacity else 0.0

    def spend(self, amount: float, now_s: float) -> None:
        """Take tokens; the caller has waited until `wait_s` returns 0."""
        self._saved = self._tokens_at(now_s) - amount
        self._at_s = max(now_s, self._at_s)

    def _tokens_at(self, now_s: float) -> float:
        elapsed_s = max(0.0, now_s - self._at_s)
        return min(self._capacity, self._saved + elapsed_s * self.per_second)


class AimdWindow:
    """The limit of requests in flight to a broker that has given a busy answer.

    Args:
        in_flight: number of requests in flight, including the one with the busy answer.
        now_s: the time of the busy answer.
        most: the largest limit.
    """

    __slots__ = ("_cut_s", "_most", "limit")

    def __init__(self, in_flight: int, now_s: float, most: float = math.inf) -> None:
        self.limit = max(1.0, in_flight * CUT)
        self._cut_s = now_s
        self._most = most

    def busy(self, sent_s: float, in_flight: int, now_s: float) -> None:
        """Cut the window after a busy answer, but not for a request from before the last cut."""
        if sent_s >= self._cut_s:
            self.limit = max(1.0, min(self.limit, in_flight) * CUT)
            self._cut_s = now_s

    def grow(self) -> None:
        self.limit = min(self._most, self.limit + 1.0 / self.limit)

    def room_for(self, requests: int, in_flight: int) -> int:
        """Return how many requests of a group may be sent now. If the whole group does not fit,
        return 0 until half of the window is free: with a quarter, a message took twice the CPU."""
        limit = int(self.limit)
        room = limit - in_flight
        if room >= requests:
            return requests
        return room if 2 * room >= limit else 0
