"""How fast: a rate that is never passed, and a window that fits what a broker takes.

Pure: the caller brings the time. `TokenBucket` is the options' limit; `AimdWindow` is the answer to
busy brokers (SYSTEM_BUSY, FLOW_CONTROL), as TCP's to a full network (RFC 5681): cut by half, grow
by one per window of stored answers.
"""

from __future__ import annotations

from typing import Final

BURST_S: Final = 1.0
"""Allowance that an idle sender may save up, in seconds of its rate."""
CUT: Final = 0.5


class TokenBucket:
    """An allowance that grows with time and is paid before something is sent.

    It starts empty, so that many short-lived senders together keep their limit too: in any time
    from the start on no more than `per_second` times that time is spent, after idle time at most
    `BURST_S` more. A piece larger than the bucket goes when the bucket is full and leaves a debt.
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
        """Seconds until `amount` may be spent; 0.0: now."""
        missing = min(amount, self._capacity) - self._grown(now_s)
        # What rounding leaves open must not make a caller wait for nothing.
        return missing / self.per_second if missing > 1e-9 * self._capacity else 0.0

    def spend(self, amount: float, now_s: float) -> None:
        """Pay; the caller has asked `wait_s`."""
        self._saved = self._grown(now_s) - amount
        self._at_s = max(now_s, self._at_s)

    def _grown(self, now_s: float) -> float:
        elapsed_s = max(0.0, now_s - self._at_s)
        return min(self._capacity, self._saved + elapsed_s * self.per_second)


class AimdWindow:
    """Most requests in flight to one broker that has said it is busy.

    Args:
        in_flight: requests in flight there when it said so, that one included.
        now_s: when it said so.
    """

    __slots__ = ("_cut_s", "limit")

    def __init__(self, in_flight: int, now_s: float) -> None:
        self.limit = max(1.0, in_flight * CUT)
        self._cut_s = now_s

    def busy(self, sent_s: float, in_flight: int, now_s: float) -> None:
        """Another busy answer; those to requests sent before the last cut tell nothing new."""
        if sent_s >= self._cut_s:
            self.limit = max(1.0, min(self.limit, in_flight) * CUT)
            self._cut_s = now_s

    def stored(self) -> None:
        """An answer that says stored."""
        self.limit += 1.0 / self.limit

    def has_room(self, in_flight: int) -> bool:
        """One more request may go; with nothing in flight always."""
        return in_flight < int(self.limit)
