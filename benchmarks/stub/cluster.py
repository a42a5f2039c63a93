"""The stub server as a context manager."""

from __future__ import annotations

import subprocess
import sys

import psutil

from benchmarks.measure import cpu_s
from benchmarks.processes import our_launcher
from rocket_sink.errors import ClusterError

_SERVER = "benchmarks.stub.server"


class StubCluster:
    """Brokers that accept batches and store nothing; see `benchmarks.stub.server`."""

    def __init__(self, brokers: int, queues: int = 4) -> None:
        self._sizes = (str(brokers), str(queues))
        self._process: subprocess.Popen[str] | None = None
        self.name_server = ""

    def __enter__(self) -> StubCluster:
        process = self._process = subprocess.Popen(
            [sys.executable, "-m", _SERVER, *self._sizes], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True, env=dict(our_launcher().env),
        )  # fmt: skip
        assert process.stdout is not None
        self.name_server = process.stdout.readline().strip()
        if not self.name_server:
            raise ClusterError(f"the stub cluster ended with code {process.wait()}")
        return self

    def __exit__(self, *failure: object) -> None:
        if self._process is not None:
            # it ends at the end of its input
            self._process.communicate(timeout=30)

    def cpu_s(self) -> float:
        """Return the CPU seconds of the stub's process so far."""
        assert self._process is not None
        return cpu_s(psutil.Process(self._process.pid))
