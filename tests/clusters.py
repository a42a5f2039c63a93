"""Real clusters as fixtures of the scope that a folder needs."""

from __future__ import annotations

from collections.abc import Iterator

from rocket_sink.cluster import LocalCluster


def two_brokers() -> Iterator[LocalCluster]:
    """Two real brokers, which the tests may freeze and kill."""
    running = LocalCluster(brokers=2).start(timeout_s=600)
    try:
        yield running
    finally:
        running.stop()
