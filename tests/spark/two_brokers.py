"""The messages of a topic on two scripted brokers."""

from rocket_sink.wire.stored import StoredMessage

TOPIC = "t"


def fill(cluster, count, broker=0, queue=0):
    """Store messages with the bodies "<broker><queue><number>", ten milliseconds apart."""
    for number in range(count):
        body = f"{broker}{queue}{number}".encode()
        cluster.brokers[broker].store.append(
            StoredMessage(TOPIC, body, queue_id=queue, store_ms=1000 + 10 * number)
        )
