"""A topic of two queues on each of two scripted brokers, and its messages."""

from collections.abc import Iterator

import pytest

from rocket_sink.testing import FakeCluster
from rocket_sink.wire.stored import StoredMessage

TOPIC = "t"


@pytest.fixture(name="cluster")
def two_brokers() -> Iterator[FakeCluster]:
    with FakeCluster(brokers=2) as fake:
        fake.create_topic(TOPIC, 2)
        yield fake


def fill(cluster: FakeCluster, count: int, broker: int = 0, queue: int = 0) -> None:
    """Store messages with the bodies "<broker><queue><number>", ten milliseconds apart."""
    for number in range(count):
        body = f"{broker}{queue}{number}".encode()
        cluster.brokers[broker].store.append(
            StoredMessage(TOPIC, body, queue_id=queue, store_ms=1000 + 10 * number)
        )
