"""Frames on their way to the kernel, and exactly how far each one got.

The account decides between NOT_SENT and UNKNOWN, so it is exact: a frame is written when the
kernel took its last byte, untouched when it took none. No I/O here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, TypeAlias

from rocket_sink.net.transport import GATHER_BUFFERS, GATHER_BYTES

Entry: TypeAlias = "tuple[Any, Sequence[Any], int]"
"""One queued frame: its owner, its buffers (head first), its size in bytes."""


class Outbox:
    """A queue of frames, first in, first out."""

    __slots__ = ("_entries", "_first_done", "size")

    def __init__(self) -> None:
        self._entries: deque[Entry] = deque()
        self._first_done = 0
        self.size = 0

    def __bool__(self) -> bool:
        return bool(self._entries)

    @property
    def first_owner(self) -> Any:
        """Whose frame comes next; None when there is none (or nobody waits for it)."""
        return self._entries[0][0] if self._entries else None

    def disown(self, owner: Any) -> None:
        """The frame goes on to the kernel, but nobody waits for it any more."""
        for position, (whose, buffers, size) in enumerate(self._entries):
            if whose is owner:
                self._entries[position] = (None, buffers, size)

    def put(self, owner: Any, buffers: Sequence[Any], size: int) -> None:
        self._entries.append((owner, buffers, size))
        self.size += size

    def gather(self) -> list[Any]:
        """Buffers for one gathered write."""
        buffers: list[Any] = []
        total = -self._first_done
        for _, parts, size in self._entries:
            buffers += parts
            total += size
            if total >= GATHER_BYTES or len(buffers) >= GATHER_BUFFERS - 16:
                break
        if self._first_done:
            _drop_front(buffers, self._first_done)
        del buffers[GATHER_BUFFERS:]
        return buffers

    def wrote(self, count: int) -> list[Any]:
        """Account for `count` bytes; the owners of the frames that are complete now."""
        self.size -= count
        entries, complete = self._entries, []
        done = self._first_done + count
        while entries and done >= entries[0][2]:
            owner, _, size = entries.popleft()
            done -= size
            if owner is not None:
                complete.append(owner)
        self._first_done = done
        return complete

    def withdraw(self, owner: Any = None) -> list[Any]:
        """Take untouched frames back (all, or only `owner`'s); their owners, in order."""
        kept: deque[Entry] = deque()
        taken = []
        for position, entry in enumerate(self._entries):
            touched = position == 0 and self._first_done > 0
            if touched or (owner is not None and entry[0] is not owner):
                kept.append(entry)
                continue
            self.size -= entry[2]
            if entry[0] is not None:
                taken.append(entry[0])
        self._entries = kept
        return taken


def _drop_front(buffers: list[Any], count: int) -> None:
    index = 0
    while count >= len(buffers[index]):
        count -= len(buffers[index])
        index += 1
    del buffers[:index]
    if count:
        buffers[0] = memoryview(buffers[0])[count:]
