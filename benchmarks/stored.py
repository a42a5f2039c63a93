"""The number of stored messages of a topic, by its brokers."""

from __future__ import annotations

import time
from typing import Final

from rocket_sink.errors import RocketSinkError
from rocket_sink.producer.admin.admin import Admin

_POLL_S: Final = 0.1
_PATIENCE_S: Final = 30.0
"""Longest time without a change of the count."""


class StoredCount:
    """Counts messages stored between `start` and `check`."""

    def __init__(self, name_server: str, topic: str) -> None:
        self._name_server = name_server
        self._topic = topic
        self._before = 0

    def start(self) -> None:
        """Start counting, after the count is stable."""
        self._before = -1
        while (now := self._now()) != self._before:
            self._before = now
            time.sleep(_POLL_S)

    def check(self, sent: int, who: str) -> int:
        """Messages stored beyond those sent (doubles).

        Raises:
            RocketSinkError: fewer are stored.
        """
        # Brokers dispatch to queues after the answer: on a busy machine they
        # were seen to be 18 million messages behind. So wait while the count grows.
        best, since_s = -1, time.monotonic()
        while (stored := self._now() - self._before) < sent:
            if stored > best:
                best, since_s = stored, time.monotonic()
            elif time.monotonic() - since_s > _PATIENCE_S:
                break
            time.sleep(_POLL_S)
        if stored < sent:
            raise RocketSinkError(
                f"{who}: {sent:,} messages are acknowledged and the brokers hold {stored:,}"
            )
        return stored - sent

    def _now(self) -> int:
        with Admin(nameServer=self._name_server, timeout_s=30.0) as admin:
            return sum(admin.max_offset(queue) for queue in admin.queues(self._topic))
