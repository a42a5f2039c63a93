"""Waits for the work of another thread without a fixed sleep."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(condition: Callable[[], object], timeout_s: float = 30.0) -> None:
    """Check the condition every millisecond; fail when the time is over."""
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, "it did not happen in time"
        time.sleep(0.001)
