"""CPU seconds and memory by kind of process, read from the system while a case runs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Final

import psutil

_SAMPLE_S: Final = 0.1
_SEARCH_EACH: Final = 5
"""Samples from one search for new processes to the next."""
_MIB: Final = 2**20


@dataclass(frozen=True)
class Cost:
    """CPU seconds (user and system) of the JVM, the Python workers, the driver, the brokers.

    `worker_peak_mb` and `worker_start_mb` are the largest and smallest resident set of one worker.
    """

    jvm_s: float
    workers_s: float
    driver_s: float
    brokers_s: float
    worker_peak_mb: float
    worker_start_mb: float


class MemoryWatch:
    """A context manager that samples the resident sets of processes.

    Args:
        processes: returns them, at each sample.
    """

    def __init__(self, processes: Callable[[], Iterable[psutil.Process]]) -> None:
        self._processes = processes
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._peak = 0
        self._least = 0

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def peak_mb(self) -> float:
        """The largest that any process had."""
        return self._peak / _MIB

    @property
    def least_mb(self) -> float:
        """The smallest that any process was seen with."""
        return self._least / _MIB

    def _sample(self) -> None:
        while not self._stop.wait(_SAMPLE_S):
            for process in self._processes():
                with contextlib.suppress(psutil.Error):
                    size = process.memory_info().rss
                    self._peak = max(self._peak, size)
                    self._least = min(self._least or size, size)


class WorkerCpu:
    """CPU seconds of a JVM's Python processes: the daemons with all they forked, and others.

    Some are short-lived (a data source is planned and committed in such), so the last sample of
    each counts: up to one sample is missed.
    """

    def __init__(self, jvm: psutil.Process) -> None:
        self._jvm = jvm
        self._seen_s: dict[int, float] = {}
        self._samples = 0
        self.processes: list[psutil.Process] = []
        self.sample()
        self._before_s = sum(self._seen_s.values())

    def sample(self) -> list[psutil.Process]:
        """Sample all processes and return them. New ones are searched in the process table."""
        if not self._samples % _SEARCH_EACH:
            self.processes = [
                child for child in self._jvm.children(recursive=True) if _is_worker(child)
            ]
        self._samples += 1
        now_s: dict[int, float] = {}
        for process in self.processes:
            with contextlib.suppress(psutil.Error):
                first = self._first_of(process)
                own = first == process.pid
                now_s[first] = now_s.get(first, 0.0) + _with_ended_s(process, children=own)
        for pid, value_s in now_s.items():
            # between the end of a fork and the daemon's wait its time does not count anywhere
            self._seen_s[pid] = max(value_s, self._seen_s.get(pid, 0.0))
        return self.processes

    def used_s(self) -> float:
        """Return the CPU seconds used since this object was made."""
        self._samples = 0
        self.sample()
        return sum(self._seen_s.values()) - self._before_s

    def _first_of(self, process: psutil.Process) -> int:
        """The JVM's child that is this process or its ancestor."""
        parent = int(process.ppid())
        return int(process.pid) if parent == self._jvm.pid else parent


class Meter:
    """A context manager that measures `cost`.

    Args:
        jvm_pid: Spark's JVM, the parent of the workers.
        brokers_s: returns the brokers' CPU seconds.
    """

    cost: Cost

    def __init__(self, jvm_pid: int, brokers_s: Callable[[], float]) -> None:
        self._jvm = psutil.Process(jvm_pid)
        self._driver = psutil.Process()
        self._brokers_s = brokers_s

    def __enter__(self) -> Meter:
        self._workers = WorkerCpu(self._jvm)
        self._memory = MemoryWatch(self._workers.sample)
        self._before = self._read()
        self._memory.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._memory.__exit__()
        jvm, driver, brokers = (
            now - then for now, then in zip(self._read(), self._before, strict=True)
        )
        memory, workers = self._memory, self._workers.used_s()
        self.cost = Cost(jvm, workers, driver, brokers, memory.peak_mb, memory.least_mb)

    def _read(self) -> tuple[float, float, float]:
        return cpu_s(self._jvm), cpu_s(self._driver), self._brokers_s()


def _is_worker(process: psutil.Process) -> bool:
    """A Python process of Spark, not a fork of the JVM before exec."""
    try:
        words = process.cmdline()
    except psutil.Error:
        return False
    return bool(words) and "python" in words[0] and any("pyspark" in word for word in words)


def cpu_s(process: psutil.Process) -> float:
    """User and system seconds of a process so far."""
    times = process.cpu_times()
    return float(times.user + times.system)


def _with_ended_s(process: psutil.Process, *, children: bool) -> float:
    """Own seconds and those of ended children, so that ended workers count in their daemon."""
    times = process.cpu_times()
    ended_s = 0.0
    if children:
        ended_s = getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0)
    return float(times.user + times.system + ended_s)
