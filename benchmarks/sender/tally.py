"""Counters of a sender, as in the Java sender."""

from __future__ import annotations

import itertools
import struct
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

_END: Final = struct.Struct("ddqq?")
"""A success: began, ended, first number, count, possible duplicate. Packed, because objects would
take most of a sender's memory and garbage collection."""


class Tally:
    """Counts results of sends; thread-safe. Times are seconds of one monotonic clock.

    Sums are computed on access: a lock and five sums cost as much as a message in a batch. A pause
    is the longest time without a success.

    Args:
        keep: keep the numbers of the messages, for reading back.
    """

    def __init__(self, now_s: float, *, keep: bool = False) -> None:
        self._keep = keep
        self._stored = bytearray()
        self._failed: list[tuple[float, float, str, range, bool]] = []
        self.restart(now_s)

    def restart(self, now_s: float) -> None:
        """Reset; pauses are measured from now on."""
        self._began_s = now_s
        self._stored.clear()
        self._failed.clear()

    def succeeded(
        self, began_s: float, now_s: float, numbers: range, *, maybe_duplicate: bool = False
    ) -> None:
        """The messages with these numbers are stored; `maybe_duplicate` as in the result."""
        self._stored += _END.pack(began_s, now_s, numbers.start, len(numbers), maybe_duplicate)

    def failed_with(
        self, began_s: float, now_s: float, error: BaseException, numbers: range, *, unknown: bool
    ) -> None:
        """A send failed; `unknown`: its messages may be stored."""
        self._failed.append((began_s, now_s, type(error).__name__, numbers, unknown))

    @property
    def ok(self) -> int:
        """Messages that are stored."""
        return sum(count for _, _, _, count, _ in self._ends())

    @property
    def doubtful(self) -> int:
        """Messages that may be stored twice, or stored despite an error."""
        return len(self._doubtful())

    @property
    def acked(self) -> list[int]:
        """Numbers of the messages that are stored; none without `keep`."""
        return self._numbers() if self._keep else []

    @property
    def announced(self) -> list[int]:
        """Numbers of the doubtful ones; none without `keep`."""
        return self._doubtful() if self._keep else []

    def as_dict(self) -> dict[str, Any]:
        """For JSON, with the names of the Java sender."""
        times = [(end[0], end[1]) for end in self._ends()]
        times += [(end[0], end[1]) for end in self._failed]
        longest_s = max((now_s - began_s for began_s, now_s in times), default=0.0)
        return {
            "ok": self.ok, "failed": len(self._failed), "doubtful": self.doubtful,
            "longest_ms": round(longest_s * 1000, 1), "pause_ms": round(self._pause_s() * 1000, 1),
            "causes": dict(Counter(name for _, _, name, _, _ in self._failed)),
        }  # fmt: skip

    def _doubtful(self) -> list[int]:
        stored = self._numbers(doubtful=True)
        return stored + [n for *_, numbers, unknown in self._failed if unknown for n in numbers]

    def _numbers(self, *, doubtful: bool = False) -> list[int]:
        ends = (end for end in self._ends() if end[4] or not doubtful)
        return [n for _, _, first, count, _ in ends for n in range(first, first + count)]

    def _ends(self) -> Iterator[tuple[float, float, int, int, bool]]:
        return _END.iter_unpack(self._stored)

    def _pause_s(self) -> float:
        times = [self._began_s, *sorted(now_s for _, now_s, _, _, _ in self._ends())]
        return max((b - a for a, b in itertools.pairwise(times)), default=0.0)
