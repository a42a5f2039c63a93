"""The place of a soak: brokers and Spark on hosts of their own."""

import os
import subprocess

from tests.hosts import nodes
from tests.hosts.bed import Bed
from tests.hosts.standalone.place import SPARK_HOME, spark_environ


class Place(nodes.TwoBrokers):
    """A running cluster of two brokers, and a host for commands. A context manager."""

    def __init__(self, folder):
        self._folder = folder
        self._bed = Bed()
        super().__init__(self._bed)
        self._spark = self._bed.host("spark")

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._bed.close()

    @property
    def spark_address(self):
        return self._spark.address

    def start(self, command, log):
        """Run a command where Spark runs; its process ids are valid here too."""
        prefix = self._spark.prefix(own_pids=False)
        environ = {
            **spark_environ(self._spark), "PYTHONPATH": os.getcwd(),
            "SPARK_HOME": str(_spark_home(self._folder)),
            "SPARK_LOCAL_DIRS": str(self._folder / "spark"),
            "XDG_STATE_HOME": str(self._folder / "state"),
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
        for path in SPARK_HOME.iterdir():
            if path.name != "work":
                (home / path.name).symlink_to(path)
    return home
