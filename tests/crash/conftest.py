from __future__ import annotations

from collections.abc import Iterator

import pytest

from rocket_sink.cluster import LocalCluster


@pytest.fixture(scope="package")
def cluster() -> Iterator[LocalCluster]:
    """Two real brokers for all rounds, which freeze and kill them."""
    running = LocalCluster(brokers=2).start(timeout_s=600)
    try:
        yield running
    finally:
        running.stop()
