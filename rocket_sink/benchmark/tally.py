"""What a sender counts while it sends, as the Java yardstick counts it. Times are given to it."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any


class Tally:
    """Counts ends of sends; thread-safe. Times are seconds of one monotonic clock.

    A pause is the longest time in which no send ended well.

    Args:
        keep: remember the numbers of the messages, for a read-back.
    """

    def __init__(self, now_s: float, *, keep: bool = False) -> None:
        self._lock = threading.Lock()
        self._keep = keep
        self.acked: list[int] = []
        self.announced: list[int] = []
        self._causes: Counter[str] = Counter()
        self.restart(now_s)

    def restart(self, now_s: float) -> None:
        """Forget everything; the clock of pauses starts now."""
        with self._lock:
            self.ok = self.failed = self.doubtful = 0
            self.longest_s = self.pause_s = 0.0
            self._last_ok_s = now_s
            self.acked.clear()
            self.announced.clear()
            self._causes.clear()

    def succeeded(
        self, began_s: float, now_s: float, numbers: range, *, maybe_duplicate: bool = False
    ) -> None:
        """The messages of these numbers are stored; `maybe_duplicate`: the sender says so."""
        with self._lock:
            self.ok += len(numbers)
            self.longest_s = max(self.longest_s, now_s - began_s)
            self.pause_s = max(self.pause_s, now_s - self._last_ok_s)
            self._last_ok_s = now_s
            if maybe_duplicate:
                self.doubtful += len(numbers)
            if self._keep:
                self.acked += numbers
                if maybe_duplicate:
                    self.announced += numbers

    def failed_with(
        self, began_s: float, now_s: float, error: BaseException, numbers: range, *, unknown: bool
    ) -> None:
        """A send ended with an error; `unknown`: its messages may be stored all the same."""
        with self._lock:
            self.failed += 1
            self.longest_s = max(self.longest_s, now_s - began_s)
            self._causes[type(error).__name__] += 1
            if unknown:
                self.doubtful += len(numbers)
                if self._keep:
                    self.announced += numbers

    def as_dict(self) -> dict[str, Any]:
        """For JSON, under the names that the Java yardstick prints."""
        return {
            "ok": self.ok, "failed": self.failed, "doubtful": self.doubtful,
            "longest_ms": round(self.longest_s * 1000, 1),
            "pause_ms": round(self.pause_s * 1000, 1), "causes": dict(self._causes),
        }  # fmt: skip
