"""Senders as separate processes.

A sender prints READY after its warm-up, continues when it reads a line, and prints one JSON line.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import psutil

from benchmarks.figures import Case, Figures
from benchmarks.measure import MemoryWatch
from benchmarks.stored import StoredCount
from rocket_sink.errors import RocketSinkError

TIMEOUT_S: Final = 900.0
_COMPILED_AFTER: Final = 20_000
"""Messages after which a JVM's compiler has done most of its work."""
_SENDER: Final = "benchmarks.sender"


@dataclass(frozen=True)
class Ended:
    """A sender's output, the brokers' CPU, and the sender's memory."""

    printed: Mapping[str, Any]
    brokers_s: float
    start_mb: float
    peak_mb: float


@dataclass(frozen=True)
class Launcher:
    """How to start a kind of sender: its command without arguments, and its environment."""

    command: tuple[str, ...]
    env: Mapping[str, str]

    def run(
        self,
        arguments: Mapping[str, Any],
        brokers_s: Callable[[], float],
        *,
        when_ready: Callable[[], None] | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> Ended:
        """Run the sender; `when_ready` is called in this thread after its warm-up.

        Raises:
            RocketSinkError: it failed, timed out, or printed something else.
        """
        words = [f"{name}={value}" for name, value in arguments.items()]
        with subprocess.Popen(
            [*self.command, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, errors="replace", env=dict(self.env),
        ) as process:  # fmt: skip
            complaints: deque[str] = deque(maxlen=20)
            reader = threading.Thread(
                target=lambda: complaints.extend(process.stderr or ()), daemon=True
            )
            reader.start()
            watchdog = threading.Timer(timeout_s, process.kill)
            watchdog.start()
            try:
                outcome = _followed(process, brokers_s, when_ready)
            except BaseException:
                process.kill()
                raise
            finally:
                watchdog.cancel()
            reader.join(5)
        if outcome is None:
            complaint = "".join(complaints) or "it printed nothing"
            raise RocketSinkError(f"the sender {' '.join(words)} failed: {complaint}")
        return outcome


class Starter(Protocol):
    """The interface of `Launcher`."""

    def run(
        self,
        arguments: Mapping[str, Any],
        brokers_s: Callable[[], float],
        *,
        when_ready: Callable[[], None] | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> Ended:
        """See `Launcher.run`."""


def _followed(
    process: subprocess.Popen[str],
    brokers_s: Callable[[], float],
    when_ready: Callable[[], None] | None,
) -> Ended | None:
    assert process.stdout is not None and process.stdin is not None
    before_s = 0.0
    with MemoryWatch(lambda: [psutil.Process(process.pid)]) as memory:
        for line in process.stdout:
            if line.strip() == "READY":
                if when_ready:
                    when_ready()
                before_s = brokers_s()
                process.stdin.write("\n")
                process.stdin.flush()
            elif line.startswith("{"):
                used_s = brokers_s() - before_s
                printed = json.loads(line)
                # Samples miss short peaks, but a sender's own `ru_maxrss` includes this process's.
                return Ended(printed, used_s, memory.least_mb, memory.peak_mb)
    return None


def our_launcher() -> Launcher:
    """Our producer (`sender`)."""
    return Launcher((sys.executable, "-m", _SENDER), {**os.environ, "PYTHONPATH": python_path()})


def python_path() -> str:
    """PYTHONPATH for processes that import `benchmarks`."""
    parts = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join(dict.fromkeys([str(Path(__file__).parents[1]), *filter(None, parts)]))


class ProcessRun:
    """A `Subject`: a sender with its arguments.

    Args:
        messages: of a measured run; each sender has its own warm-up before.
        count: compares the stored messages with the sender's figures; None: not possible.
        delivered_after_s: so long after they are stored, brokers show messages with a delay.
    """

    def __init__(
        self,
        case: Case,
        launcher: Starter,
        arguments: Mapping[str, Any],
        *,
        messages: int,
        brokers_s: Callable[[], float],
        count: StoredCount | None,
        delivered_after_s: float = 0.0,
    ) -> None:
        self._case = case
        self._launcher = launcher
        self._arguments = {
            **arguments, "messages": messages,
            "warmup": max(messages // 10, min(messages, _COMPILED_AFTER)),
            "size": case.body_bytes,
        }  # fmt: skip
        self._brokers_s = brokers_s
        self._count = count
        self._delivered_after_s = delivered_after_s

    @property
    def case(self) -> Case:
        return self._case

    def warm_up(self) -> None:
        """A third of a run, for the brokers: each process has its own warm-up before READY, but the
        brokers' JVMs compile for longer, at the cost of whoever is first to send in a mode."""
        messages = max(1, self._arguments["messages"] // 3)
        self._launcher.run({**self._arguments, "messages": messages}, self._brokers_s)

    def run(self) -> Figures:
        """Raises RocketSinkError: it failed, or reports more than requested, or than is stored."""
        count, arguments = self._count, self._arguments
        outcome = self._launcher.run(
            arguments, self._brokers_s, when_ready=self._start_count if count else None
        )
        reported = outcome.printed["ok"] + outcome.printed["failed"]
        # replayed frames hold many messages each
        if reported > arguments["messages"] and arguments.get("mode") != "replay":
            raise RocketSinkError(
                f"{self._case.name}: the sender miscounts: it was asked for "
                f"{arguments['messages']:,} messages and tells of {reported:,}"
            )
        doubled = count.check(outcome.printed["ok"], self._case.name) if count else 0
        return process_figures(self._case.name, outcome, doubled)

    def _start_count(self) -> None:
        """Begin to count, when the messages of the warm-up are there."""
        assert self._count is not None
        time.sleep(self._delivered_after_s)
        self._count.start()


def process_figures(case: str, ended: Ended, doubled: int = 0) -> Figures:
    """Costs divided by the messages."""
    printed = ended.printed
    if not printed["ok"]:
        raise RocketSinkError(f"{case}: nothing was sent ({printed.get('causes')})")
    millions = printed["ok"] / 1e6
    return Figures(
        case, printed["ok"], printed["seconds"], printed["ok"] / printed["seconds"], 0.0,
        printed["cpu_s"] / millions, 0.0, ended.brokers_s / millions, ended.start_mb,
        ended.peak_mb, printed["failed"], doubled,
    )  # fmt: skip
