from __future__ import annotations

from collections.abc import Iterator

import pytest

from rocket_sink.testing import FakeCluster


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster(brokers=2) as fake:
        fake.create_topic("t", 4)
        yield fake
