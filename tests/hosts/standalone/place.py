"""A standalone Spark cluster, a name server and two brokers, each on its own host, and faults."""

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pyspark
from tenacity import retry, retry_if_exception_type, stop_after_delay, wait_fixed

from rocket_sink.errors import NameServerUnavailableError, UnknownOutcomeError
from rocket_sink.java import find_java
from rocket_sink.producer.admin.admin import Admin
from tests.crash.processes import MORTAL_EXECUTORS
from tests.hosts import nodes
from tests.hosts.bed import DISK, await_port
from tests.jvms import SMALL_PLANS, SPARK, java_options
from tests.producer.waiting import until

SHARED = Path("/run/shared")
"""The folder that all hosts share: sources, checkpoints and ledgers."""
SPARK_HOME = Path(pyspark.__file__).parent

_QUICK = " ".join(java_options(SPARK))
_MASTER_PORT = 7077
FILES_PER_EPOCH = 4
_PATIENCE_S = 300.0
CONF = {
    **SMALL_PLANS,
    **MORTAL_EXECUTORS,
    "spark.executor.memory": "600m",
    "spark.executor.cores": "3",
    "spark.network.timeout": "20s",
    "spark.network.timeoutInterval": "5s",
    "spark.executor.heartbeatInterval": "3s",
    # A driver whose host is gone ends no connection: its executors keep their cores until they
    # give up their heartbeats.
    "spark.executor.heartbeat.maxFailures": "10",
    "spark.sql.files.maxPartitionBytes": "4k",
    "spark.sql.files.openCostInBytes": "4k",
}


class Standalone(nodes.TwoBrokers):
    """The hosts of the cluster.

    Args:
        secrets: credentials that brokers ask for.
        imports: PYTHONPATH of Spark's processes on the workers; the repository by default.
    """

    def __init__(self, bed, say, *, secrets=None, imports=None):
        self.master = bed.host("master")
        self.workers = [bed.host("worker-0"), bed.host("worker-1")]
        self.drivers = [bed.host("driver-0"), bed.host("driver-1")]
        self._imports = os.getcwd() if imports is None else imports
        self._keys = {}
        if secrets is not None:
            self._keys = {"accessKey": secrets.access_key, "secretKey": secrets.secret_key}
        SHARED.mkdir(exist_ok=True)
        say("starting brokers, master and workers")
        super().__init__(bed, secrets)
        # The master notices that a driver's host is gone when its own kernel gives up sending. This
        # setting makes that seconds instead of a quarter of an hour, in which the driver's
        # executors would hold all cores.
        self.master.run(["sh", "-c", "echo 6 > /proc/sys/net/ipv4/tcp_retries2"])
        self._spark(self.master, "master.Master", "--port", str(_MASTER_PORT), "--webui-port", "0")
        await_port(self.master.address, _MASTER_PORT, 120)
        self.url = f"spark://{self.master.address}:{_MASTER_PORT}"
        for worker in self.workers:
            self.start_worker(worker)
        self.driver = None

    def admin(self):
        return Admin(nameServer=self.name_server, timeout_s=60.0, **self._keys)

    @retry(
        stop=stop_after_delay(_PATIENCE_S), wait=wait_fixed(0.3), reraise=True,
        retry=retry_if_exception_type((NameServerUnavailableError, UnknownOutcomeError)),
    )  # fmt: skip
    def stored(self, topic):
        """Count the messages of a topic. Ask again while a busy machine does not answer."""
        with self.admin() as tool:
            return tool.count(topic)

    def _spark(self, host, role, *arguments):
        """Start a daemon like sbin/start-master.sh or -worker.sh, which PyPI's package lacks."""
        environ = {
            **spark_environ(host), "SPARK_WORKER_DIR": str(DISK / "work"),
            "SPARK_DAEMON_MEMORY": "256m", "SPARK_DAEMON_JAVA_OPTS": _QUICK,
            "PYTHONPATH": self._imports,
        }  # fmt: skip
        log = (host.disk / f"{role}.log").open("wb")
        with log:
            host.start(
                [str(SPARK_HOME / "bin" / "spark-class"), f"org.apache.spark.deploy.{role}",
                 "--host", host.address, *arguments],
                env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    def start_worker(self, host):
        self._spark(
            host, "worker.Worker", "--webui-port", "0", "--cores", "3", "--memory", "700m", self.url
        )

    def start_driver(self, number, plan):
        """Start `tests.crash.driver` on a host with the plan's cells that have not ended."""
        host = self.drivers[number]
        at = {"spark.driver.host": host.address, "spark.driver.bindAddress": host.address}
        own_plan = {
            **plan, "role": f"driver-{number}", "master": self.url, "files": FILES_PER_EPOCH,
            "conf": {**CONF, **plan["conf"], **at}, "report": str(DISK / "ids.json"),
            "cells": [cell for cell in plan["cells"] if not _reports(cell)],
        }  # fmt: skip
        environ = {**spark_environ(host), "PYTHONPATH": os.getcwd(), "JDK_JAVA_OPTIONS": _QUICK}
        with (host.disk / "driver.log").open("ab") as log:
            self.driver = host.start(
                [sys.executable, "-m", "tests.crash.driver", "/dev/stdin"],
                env=environ, stdin=subprocess.PIPE, stdout=log, stderr=log,
            )  # fmt: skip
        # A plan has credentials, and `canary` searches all files for them.
        self.driver.stdin.write(json.dumps(own_plan).encode())
        self.driver.stdin.close()

    def await_driver(self, check, timeout_s=420.0):
        """Wait until `check` is true while the driver runs.

        Raises:
            AssertionError: the driver ended before, or the time is over.
        """
        with contextlib.suppress(AssertionError):
            until(lambda: check() or self.driver.poll() is not None, timeout_s, 0.3)
        logs = [host.disk / "driver.log" for host in self.drivers]
        text = "".join(log.read_text()[-4000:] for log in logs if log.exists())
        assert check(), f"the driver hangs, or ended with {self.driver.poll()}: {text}"

    def told(self, plan):
        """Wait for the end of the driver, and return its reports by lane."""
        self.await_driver(lambda: has_ended(plan))
        self.driver.wait()
        return {cell["lane"]: json.loads(_reports(cell)[0].read_text()) for cell in plan["cells"]}

    def python_workers(self, host):
        """Return the Python workers, without the daemons that fork them."""
        workers = _running(host, "pyspark.daemon")
        return [process for process in workers if (process.parent() or process) in workers]

    def executors_begun(self):
        """Count the executors that the workers have started since their disks were new."""
        count = 0
        for worker in self.workers:
            count += sum(path.is_dir() for path in worker.disk.glob("work/app-*/*"))
        return count

    # --- faults -----------------------------------------------------------------------------

    def kill_python_worker(self, plan):
        for worker in self.workers:
            for process in self.python_workers(worker)[:2]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()

    def kill_executor(self, plan):
        for process in _running(self.workers[0], "CoarseGrainedExecutorBackend"):
            process.kill()

    def kill_worker(self, plan):
        """Kill Spark's worker process, with which its executor ends, and start a new one later."""
        for process in _running(self.workers[0], "worker.Worker"):
            process.kill()
        time.sleep(5)
        self.start_worker(self.workers[0])

    def slow_worker(self, plan):
        """Slow a worker, so that its tasks take longer than those of the other host."""
        self.workers[0].impair(delay_ms=400)
        time.sleep(20)
        self.workers[0].heal()

    def kill_worker_host(self, plan):
        """Kill a worker's host; its tasks repeat on the other host. Boot it again later."""
        self.workers[0].kill()
        time.sleep(10)
        self.workers[0].boot()
        self.start_worker(self.workers[0])

    def kill_driver(self, plan):
        """Pull the driver's plug, and begin again on another host."""
        self.drivers[0].kill()
        self.start_driver(1, plan)

    def revive(self):
        for host in self.drivers:
            if not host.running:
                host.boot()


def has_ended(plan):
    """Return whether all cells of a driver's plan have ended."""
    return all(map(_reports, plan["cells"]))


def _reports(cell):
    return list(Path(cell["folder"]).glob("done.*.json"))


def spark_environ(host):
    """Return the environment of a Spark process on a host, without paths of the repository."""
    environ = {
        **os.environ, "SPARK_HOME": str(SPARK_HOME), "SPARK_LOCAL_IP": host.address,
        "SPARK_LOCAL_DIRS": str(DISK / "spark"), "PYSPARK_PYTHON": sys.executable,
        "JAVA_HOME": str(find_java().executable.parents[1]),
    }  # fmt: skip
    environ.pop("PYTHONPATH", None)
    return environ


def _running(host, word):
    matches = []
    for process in host.processes():
        # A process may end while this loop looks at it.
        with contextlib.suppress(psutil.Error):
            if word in " ".join(process.cmdline()):
                matches.append(process)
    return matches
