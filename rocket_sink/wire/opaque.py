"""Opaque ids of one connection's requests: counted up, wrapped, never one that is in flight."""

from __future__ import annotations

from collections.abc import Container
from typing import Final

OPAQUES: Final = 2**31
"""They are Java ints on the wire; ours stay non-negative."""


class OpaqueIds:
    """Gives ids out, and knows which it has given."""

    __slots__ = ("_first", "_issued", "_next")

    def __init__(self, first: int) -> None:
        self._first = self._next = first % OPAQUES
        self._issued = 0

    def peek(self, in_flight: Container[int]) -> int:
        """The id that `take` would give."""
        opaque = self._next
        while opaque in in_flight:
            opaque = (opaque + 1) % OPAQUES
        return opaque

    def take(self, in_flight: Container[int]) -> int:
        """The next id that is not in flight."""
        opaque = self._next
        if opaque < OPAQUES - 1 and self._issued < OPAQUES and opaque not in in_flight:
            self._next = opaque + 1
            self._issued += 1
            return opaque
        opaque = self.peek(in_flight)
        steps = (opaque - self._next) % OPAQUES + 1
        self._issued = min(self._issued + steps, OPAQUES)
        self._next = (opaque + 1) % OPAQUES
        return opaque

    def was_given(self, opaque: int) -> bool:
        """True when an answer with this id answers some request of ours, late perhaps."""
        return 0 <= opaque < OPAQUES and (opaque - self._first) % OPAQUES < self._issued
