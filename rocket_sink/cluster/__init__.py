"""A real Apache RocketMQ on loopback (name server and brokers), for demo, tests and users.

A `LocalCluster` ends by `stop`, or when the process that started it ends; `up`, `status` and `down`
manage a detached cluster. PySpark's Ivy fetches RocketMQ once from Maven Central. RocketMQ runs on
Spark's Java. POSIX only."""

from rocket_sink.cluster.detached import ClusterState, NodeState, default_home, down, status, up
from rocket_sink.cluster.jars import DEFAULT_VERSION, resolve_jars
from rocket_sink.cluster.local import LocalCluster, admin
from rocket_sink.cluster.node import Broker, NameServer
from rocket_sink.java import Java, find_java

__all__ = [
    "DEFAULT_VERSION",
    "Broker",
    "ClusterState",
    "Java",
    "LocalCluster",
    "NameServer",
    "NodeState",
    "admin",
    "default_home",
    "down",
    "find_java",
    "resolve_jars",
    "status",
    "up",
]
