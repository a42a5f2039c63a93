"""The place of a soak: brokers and Spark on hosts of their own."""

import os
import subprocess
from pathlib import Path

import pyspark

from rocket_sink.java import find_java
from tests.hosts import nodes
from tests.hosts.bed import Bed

_READY_S = 240


class Place:
    """A running cluster of two brokers, and a host for commands. A context manager."""

    def __init__(self, folder):
        self._folder = folder
        self._bed = Bed()
        server = nodes.name_server(self._bed.host("names"))
        server.wait_ready(_READY_S)
        self.name_server = server.address
        self._hosts = [self._bed.host("broker-a"), self._bed.host("broker-b")]
        self._spark = self._bed.host("spark")
        self.brokers = [nodes.broker(host, host.name, [server.address]) for host in self._hosts]
        for broker in self.brokers:
            broker.wait_ready(_READY_S)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._bed.close()

    @property
    def addresses(self):
        """Brokers' addresses by name."""
        return {broker.name: broker.address for broker in self.brokers}

    @property
    def spark_address(self):
        return self._spark.address

    def impair(self, broker, **what):
        """Break a broker's cable; the fields are those of `tests.hosts.forwarder.Impairment`."""
        self._hosts[broker].impair(**what)

    def heal(self, broker):
        self._hosts[broker].heal()

    def start(self, command, log):
        """Run a command where Spark runs; its process ids are valid here too."""
        home, java = _spark_home(self._folder), find_java()
        prefix = self._spark.prefix(own_pids=False)
        environ = {
            **os.environ, "PYTHONPATH": os.getcwd(), "SPARK_HOME": str(home),
            "SPARK_LOCAL_IP": self.spark_address, "SPARK_LOCAL_DIRS": str(self._folder / "spark"),
            "XDG_STATE_HOME": str(self._folder / "state"),
            "JAVA_HOME": str(java.executable.parents[1]),
            "JDK_JAVA_OPTIONS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        }  # fmt: skip
        with log.open("ab") as output:
            return subprocess.Popen(
                [*prefix, *command], env=environ, stdin=subprocess.DEVNULL, stdout=output,
                stderr=output,
            )  # fmt: skip


def _spark_home(folder):
    """Return a home for Spark outside the installed package, where it can write `work`."""
    home = folder / "spark-home"
    if not home.exists():
        home.mkdir()
        for path in Path(pyspark.__file__).parent.iterdir():
            if path.name != "work":
                (home / path.name).symlink_to(path)
    return home
