"""Real clusters for tests: one per worker process, repaired before each test."""

from __future__ import annotations

from collections.abc import Iterator

from rocket_sink.cluster import LocalCluster
from rocket_sink.producer.admin.admin import Admin

TRANSACTIONS = {
    "transactionCheckInterval": "2000",
    "transactionTimeOut": "500",
    # Ends are noted in batches, every 3 s by default: a check in between finds none and asks again
    # about what was committed, which doubles it.
    "transactionOpBatchInterval": "100",
}
"""Checks of half messages within seconds."""


def two_brokers(**broker_config: str) -> Iterator[LocalCluster]:
    """Two real brokers, which the tests may freeze and kill."""
    running = LocalCluster(brokers=2, broker_config=broker_config).start(timeout_s=600)
    try:
        yield running
    finally:
        running.stop()


def repair(cluster: LocalCluster) -> LocalCluster:
    """Thaw frozen brokers and start dead ones; waits until all are ready."""
    for broker in cluster.brokers:
        if broker.alive:
            broker.thaw()
        else:
            broker.spawn()
    for broker in cluster.brokers:
        broker.wait_ready(300)
    return cluster


def make_topic(cluster: LocalCluster, name: str, queues: int = 4) -> None:
    """Make a topic on all brokers, as `LocalCluster.create_topic` does, without a JVM for it."""
    with Admin(timeout_s=30.0, nameServer=cluster.name_server) as admin:
        admin.create_topic(name, queues=queues)
    cluster.await_route(name)
