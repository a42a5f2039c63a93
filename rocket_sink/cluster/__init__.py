"""A real local Apache RocketMQ, name server and brokers on loopback, for demo, tests and users.

`LocalCluster` lives as long as the object or the process; `up`, `status` and `down` manage one that
outlives the command that started it. RocketMQ comes from Maven Central through the Ivy that
PySpark ships, once, into a cache; it runs on the Java that Spark needs anyway. POSIX only.
"""

from rocket_sink.cluster.admin_tool import admin
from rocket_sink.cluster.detached import (
    ClusterState,
    NodeState,
    default_home,
    down,
    status,
    up,
)
from rocket_sink.cluster.jars import DEFAULT_VERSION, resolve_jars
from rocket_sink.cluster.local import LocalCluster
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
