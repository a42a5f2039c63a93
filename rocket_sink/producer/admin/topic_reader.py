"""All of a topic, with what was acknowledged a moment ago.

A broker acknowledges a message when its commit log has it, and shows it to readers when a thread of
its own has dispatched it to the queue (ReputMessageService): a busy machine takes seconds for that.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, Final

from rocket_sink.errors import BrokerError, RejectedError
from rocket_sink.producer.admin.admin import Admin
from rocket_sink.wire.stored import StoredMessage

_STEP_S: Final = 0.05


def await_dispatched(admin: Admin, topic: str, timeout_s: float = 30.0) -> bool:
    """Wait until readers see all that the topic's brokers have stored.

    False when they lag behind for all that time, as brokers under steady traffic may, and where a
    broker does not tell: a scripted one has no lag.
    """
    until_s = time.monotonic() + timeout_s
    while time.monotonic() < until_s:
        try:
            if admin.dispatch_behind_bytes(topic) == 0:
                return True
        except RejectedError:
            return False
        except BrokerError:
            # StoreStatsService has no first sample in a broker's first second: the broker answers
            # SYSTEM_ERROR with a NoSuchElementException (4.9.7, 5.3.3).
            pass
        time.sleep(_STEP_S)
    return False


def read_topic(name_server: str, topic: str, **options: Any) -> Iterator[StoredMessage]:
    """All messages stored in the topic when the call starts, queue by queue, in queue order."""
    with Admin(nameServer=name_server, **options) as admin:
        await_dispatched(admin, topic)
        yield from admin.read_topic(topic)
