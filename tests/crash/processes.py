"""Driver processes of the crash harness: started, looked after, killed."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.jvms import SMALL_PLANS, SPARK, java_options

from .cell import Cell
from .files import write_whole
from .schedule import FILES

HERE = Path(__file__).parent
MORTAL_EXECUTORS = {
    "spark.executor.extraJavaOptions": " ".join(java_options(SPARK)),
    "spark.locality.wait": "0",
    "spark.task.maxFailures": "8",
    "spark.deploy.maxExecutorRetries": "-1",
}
"""Settings of executors that are killed, and replaced, again and again."""
LOCAL_CLUSTER = {
    **MORTAL_EXECUTORS,
    "spark.executor.memory": "512m",
    # The lanes must refuse speculation. No task runs twice: Spark starts no second copy on the
    # host of the first one, and all executors share one host.
    "spark.speculation": "true",
}


_NICE = 5


@dataclass
class Driver:
    """A driver process and its cells. Cells of `later` begin with `begin`."""

    role: str
    master: str
    cells: Sequence[Cell]
    folder: Path
    conf: dict[str, str] = field(default_factory=dict)
    later: Sequence[Cell] = ()
    process: subprocess.Popen[bytes] | None = None

    def start(self):
        report = self.folder / f"driver.{self.role}.json"
        plan = {
            "role": self.role, "master": self.master, "conf": {**SMALL_PLANS, **self.conf},
            "report": str(report), "files": FILES, "refuses": bool(self.conf),
            "cells": [cell.plan() for cell in self.cells],
            "later": [cell.plan() for cell in self.later],
        }  # fmt: skip
        path = self.folder / f"plan.{self.role}.json"
        path.write_text(json.dumps(plan))
        parts = [HERE / "hooks", HERE.parents[1], os.environ.get("PYTHONPATH", "")]
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, filter(None, parts)))}
        environ["ROCKET_SINK_CRASH"] = "1"
        # The default code cache of a single compiler is too small for many queries at once.
        # One collecting thread is enough, because there are at least as many JVMs as cores.
        environ["JDK_JAVA_OPTIONS"] = "-XX:ReservedCodeCacheSize=160m -XX:+UseSerialGC"
        # Drivers run dozens of tasks at once, and must leave other tests their turn. Add up to a
        # niceness of 5: drivers of niceness 19 would get next to no CPU.
        nice = str(max(0, _NICE - os.nice(0)))
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                ["nice", "-n", nice, sys.executable, "-m", "tests.crash.driver", str(path)],
                cwd=self.folder, env=environ, stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip

    @property
    def _log(self):
        return self.folder / f"log.{self.role}.txt"

    @property
    def report(self):
        return dict(json.loads((self.folder / f"driver.{self.role}.json").read_text()))

    def check(self):
        """Raise AssertionError if the process ended without being killed."""
        if self.process is not None and self.process.poll() not in (None, 0):
            raise AssertionError(f"the driver {self.role} ended: {self._log.read_text()[-6000:]}")

    def begin(self, cell):
        """Let a cell of `later` begin."""
        write_whole(cell.folder / f"begin.{self.role}", "")

    def kill(self):
        """Kill both halves, Python and the JVM, by SIGKILL."""
        self.process.kill()
        kill(self.report["jvm"])
        self.process.wait()
        self.process = None

    def end(self):
        """End the process at the end of a round, even after an error."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None

    def is_done(self, cell):
        return (cell.folder / f"done.{self.role}.json").exists()


def kill(pid):
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def await_gone(pids):
    """Wait until processes are gone: workers outlive a killed driver for a moment."""
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(pid).wait(60)
