"""Where chance comes from: an argument, so that a test can fix it (random.Random fits)."""

from __future__ import annotations

from typing import Protocol


class Rng(Protocol):
    """The part of random.Random that the routing layer uses."""

    def random(self) -> float:
        """In [0, 1)."""

    def randrange(self, stop: int, /) -> int:
        """In [0, stop)."""
