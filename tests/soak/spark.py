"""Spark in a soak: starts, kills and looks into its driver process."""

import contextlib
import json
import sys

import psutil

from tests.crash.files import write_whole
from tests.crash.processes import MORTAL_EXECUTORS, kill
from tests.jvms import SMALL_PLANS, SPARK, java_options
from tests.producer.waiting import until

_START_S = 600.0
_END_S = 900.0
_GONE_S = 120.0
_TOUCHED = "-XX:+AlwaysPreTouch"
"""The heap has its full size from the start, so that growth is no heap that fills up."""
_CONF = {
    **SMALL_PLANS,
    **MORTAL_EXECUTORS,
    "spark.driver.memory": "1g",
    "spark.driver.extraJavaOptions": " ".join((*java_options(SPARK), "-Xms1g", _TOUCHED)),
    "spark.executor.memory": "600m",
    "spark.executor.extraJavaOptions": " ".join((*java_options(SPARK), "-Xms600m", _TOUCHED)),
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    # A file is a task, so that no two tasks have rows of one key.
    "spark.sql.files.openCostInBytes": str(128 << 20),
    # Spark's history is full after minutes, not after hours.
    "spark.sql.streaming.minBatchesToRetain": "20",
    "spark.sql.streaming.fileSource.log.cleanupDelay": "30s",
    "spark.ui.retainedJobs": "50",
    "spark.ui.retainedStages": "50",
    "spark.ui.retainedTasks": "1000",
    "spark.sql.ui.retainedExecutions": "50",
}
_MASTER = "local-cluster[2,3,800]"
_OPTIONS = {
    "sendMsgTimeout": 90_000, "deliveryTimeoutMs": 90_000, "orderWaitMs": 300_000,
    "storedCheckTimeout": 300_000,
}  # fmt: skip


class Spark:
    """The driver and its executors; all files go to `folder`."""

    def __init__(self, place, folder, lanes, trigger):
        self._place, self._folder = place, folder
        host = place.spark_address
        self._plan = {
            "folder": str(folder), "master": _MASTER, "host": host, "conf": _CONF,
            "trigger": trigger, "lanes": lanes,
            "options": {"nameServer": place.name_server, **_OPTIONS},
        }  # fmt: skip
        self._process = None
        self._jvm = 0
        self.errors = {lane["name"]: [] for lane in lanes}
        """The errors of streams, by lane, of drivers that have ended."""
        self.outlived = []
        """The processes that outlived a killed driver by two minutes."""

    @property
    def _status(self):
        return self._folder / "status.json"

    def start(self):
        """Start the driver; return when its streams have begun."""
        self._status.unlink(missing_ok=True)
        command = [sys.executable, "-m", "tests.soak.driver", json.dumps(self._plan)]
        self._process = self._place.start(command, self._folder / "driver.log")
        with contextlib.suppress(AssertionError):
            until(lambda: self._status.exists() or not self.alive, _START_S, 0.2)
        assert self._status.exists(), f"the driver does not start, or ended: {self.log()}"
        self._jvm = self.status()["jvm"]

    def log(self):
        return (self._folder / "driver.log").read_text()[-4000:]

    @property
    def alive(self):
        return self._process is not None and self._process.poll() is None

    def status(self):
        return dict(json.loads(self._status.read_text()))

    def stream_errors(self):
        """Return the errors of all drivers' streams, by lane."""
        with contextlib.suppress(OSError):
            now = self.status()["errors"]
            return {name: [*errors, *now[name]] for name, errors in self.errors.items()}
        return self.errors

    def kill(self):
        """Kill Python and the JVM with SIGKILL; return when all of their processes are gone."""
        if self._process is None:
            return
        with contextlib.suppress(psutil.NoSuchProcess):
            family = psutil.Process(self._process.pid).children(recursive=True)
            self.errors = self.stream_errors()
            self._process.kill()
            kill(self._jvm)
            _, alive = psutil.wait_procs(family, _GONE_S)
            for process in alive:
                with contextlib.suppress(psutil.Error):
                    self.outlived.append(" ".join(process.cmdline())[:200])
                    process.kill()
        self._process.wait()
        self._process = None

    def end(self):
        """End the streams; return the epochs in the ledgers, by lane."""
        write_whole(self._folder / "end", "")
        self._process.wait(_END_S)
        self.errors = self.stream_errors()
        done = self._folder / "done.json"
        assert done.exists(), f"the driver failed at its end: {self.log()}"
        return dict(json.loads(done.read_text()))

    # --- its processes ----------------------------------------------------------------------

    def processes(self):
        """Return the processes, each with its kind."""
        if not self.alive:
            return []
        pairs = [("driver", psutil.Process(self._process.pid))]
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in pairs[0][1].children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    pairs.append((self._kind(process), process))
        return [pair for pair in pairs if pair[0]]

    def _kind(self, process):
        words = " ".join(process.cmdline())
        if process.pid == self._jvm:
            return "driver's JVM"
        if "CoarseGrainedExecutorBackend" in words:
            return "executor's JVM"
        forked = "pyspark.daemon" in words
        if forked and "pyspark.daemon" in " ".join((process.parent() or process).cmdline()):
            return "Python worker"
        return ""

    def executors(self):
        return [process for kind, process in self.processes() if kind == "executor's JVM"]

    def workers(self):
        return [process for kind, process in self.processes() if kind == "Python worker"]
