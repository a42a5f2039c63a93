"""Clusters for tests: scripted ones, and a real one per worker, repaired before each test."""

import os
import shutil

import pytest

from rocket_sink.cluster import DEFAULT_VERSION, LocalCluster
from rocket_sink.producer.admin.admin import Admin
from rocket_sink.testing import FakeCluster

TRANSACTIONS = {"transactionCheckInterval": "2000", "transactionTimeOut": "500"}
"""Settings by which brokers check half messages within seconds."""

LAST_LINES = 50
"""The number of last lines that a failure shows of each log."""


def scripted_cluster(brokers=2, *, scope="function", **queues):
    """Return a fixture, a scripted cluster; `queues` has the number of queues by topic."""

    @pytest.fixture(scope=scope)
    def cluster():
        with FakeCluster(brokers=brokers) as fake:
            for topic, count in queues.items():
                fake.create_topic(topic, count)
            yield fake

    return cluster


def two_brokers(**broker_config):
    """Yield a cluster of two real brokers, which the tests may freeze and kill.

    `ROCKET_SINK_TEST_ROCKETMQ` names another RocketMQ version (`python -m tests.versions`).
    """
    version = os.environ.get("ROCKET_SINK_TEST_ROCKETMQ", DEFAULT_VERSION)
    quiet = {"timerFlushIntervalMs": "600000", **broker_config}
    cluster = LocalCluster(brokers=2, version=version, broker_config=quiet)
    with cluster.start(timeout_s=600):
        yield cluster


def read_topic(name_server, topic, **options):
    """Yield the messages that the topic has at the start of the call, queue by queue."""
    with Admin(nameServer=name_server, **options) as admin:
        admin.await_dispatched(topic)
        yield from admin.read_topic(topic)


def are_in_order(messages):
    """Return whether the first copies of each sharding key's bodies are in order."""
    bodies: dict[str | None, dict[bytes, None]] = {}
    for message in sorted(messages, key=lambda each: each.queue_offset):
        bodies.setdefault(message.properties.get("__SHARDINGKEY"), {})[message.body] = None
    return all([*of_key] == sorted(of_key) for of_key in bodies.values())


def repair(cluster):
    """Thaw frozen brokers and start dead ones, and wait until all are ready."""
    for broker in cluster.brokers:
        if broker.alive:
            broker.thaw()
        else:
            broker.spawn()
    for broker in cluster.brokers:
        broker.wait_ready(300)
    return cluster


_resting = set()


def rest(cluster):
    """Freeze the brokers until `wake`. The name server forgets them after two minutes."""
    if id(cluster) not in _resting:
        _resting.add(id(cluster))
        for broker in cluster.brokers:
            if broker.alive:
                broker.freeze()


def wake(cluster):
    """Let the brokers work again, after `rest`."""
    if id(cluster) in _resting:
        _resting.remove(id(cluster))
        repair(cluster)


def make_topic(cluster, name, queues=4, **more):
    """Make a topic on all brokers without a JVM, which `LocalCluster.create_topic` would start."""
    with Admin(timeout_s=30.0, **cluster.client_options()) as admin:
        admin.create_topic(name, queues=queues, **more)
    cluster.await_route(name)


def kept_logs(cluster, folder):
    """Copy the logs of all processes to `folder`. Return a text with the place and last lines."""
    texts = [f"copied to {folder}"]
    for log in sorted(cluster.home.glob("*/*.log")):
        name = f"{log.parent.name}/{log.name}"
        copy = folder / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(log, copy)
        lines = copy.read_text(errors="replace").splitlines()
        texts.append("\n".join([f"--- {name}", *lines[-LAST_LINES:]]))
    return "\n".join(texts)
