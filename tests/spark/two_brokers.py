"""The messages of a topic on two scripted brokers."""

from rocket_sink.testing import FakeCluster
from rocket_sink.wire.stored import StoredMessage

TOPIC = "t"


def fill(cluster: FakeCluster, count: int, broker: int = 0, queue: int = 0) -> None:
    """Store messages with the bodies "<broker><queue><number>", ten milliseconds apart."""
    for number in range(count):
        body = f"{broker}{queue}{number}".encode()
        cluster.brokers[broker].store.append(
            StoredMessage(TOPIC, body, queue_id=queue, store_ms=1000 + 10 * number)
        )
