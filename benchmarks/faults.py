"""Our producer and the Java client's while a broker is frozen, killed or paused.

The fault is in the last of two brokers. Each run has its own topic, which is read back: an
acknowledged message that is missing is lost, one that is stored twice is a duplicate.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.peers.java import java_launcher
from benchmarks.processes import Ended, Launcher, our_launcher
from benchmarks.results import FAULTS, Results
from benchmarks.rows import number_of
from benchmarks.run import scratch_folder
from benchmarks.stored import StoredCount
from rocket_sink.cluster.local import LocalCluster
from rocket_sink.cluster.node import Broker
from rocket_sink.errors import RocketSinkError
from rocket_sink.producer.admin.admin import Admin

FREEZE: Final = "frozen"
KILL: Final = "killed"
PAUSE: Final = "paused"
OURS: Final = "ours"
_AT_SHARE: Final = 6 / 32
_LENGTH_SHARE: Final = 10 / 32
_WARM_UP: Final = 2000
_MESSAGES_PER_PULL: Final = {
    "maxTransferCountOnMessageInMemory": "1024",
    "maxTransferBytesOnMessageInMemory": str(1 << 20),
    "maxTransferCountOnMessageInDisk": "1024",
    "maxTransferBytesOnMessageInDisk": str(1 << 20),
}
"""The default of 32 messages per pull would make reading back slow."""


@dataclass(frozen=True)
class Schedule:
    """A fault that begins at `at_s` of a run of `total_s` and takes `length_s`."""

    kind: str
    total_s: float
    at_s: float
    length_s: float

    @classmethod
    def of(cls, kind: str, total_s: float) -> Schedule:
        """The fault takes 10 s of 32, and begins after 6."""
        return cls(kind, total_s, total_s * _AT_SHARE, total_s * _LENGTH_SHARE)

    @classmethod
    def pause(cls, total_s: float, length_s: float) -> Schedule:
        """A short stop in the middle, as a broker's garbage collection."""
        return cls(PAUSE, total_s, total_s / 2, length_s)

    @property
    def title(self) -> str:
        """The name in tables."""
        return f"{self.kind} {self.length_s:g} s"

    def apply(self, broker: Broker, wait: Callable[[float], bool]) -> None:
        """Apply the fault to the broker; returns when the broker is ready again.

        Args:
            wait: waits for some seconds; True: stop early, the broker is not needed any more.
        """
        if wait(self.at_s):
            return
        if self.kind == KILL:
            broker.kill()
            if not wait(self.length_s):
                broker.restart()
            return
        broker.freeze()
        try:
            wait(self.length_s)
        finally:
            broker.thaw()


@dataclass(frozen=True)
class _Sender:
    who: str
    title: str
    arguments: Mapping[str, Any]


_SYNC: Final = {"mode": "sync", "threads": 2}
_ASYNC: Final = {"mode": "async", "inflight": 400}
_DETECTING: Final = {"fault": "true"}
_SENDERS: Final = (
    _Sender(OURS, "sync, 2 threads", _SYNC),
    _Sender("Java", "sync, 2 threads", _SYNC),
    _Sender("Java", "sync, fault tolerance and detector", {**_SYNC, **_DETECTING}),
    _Sender(OURS, "async, 400 in flight", _ASYNC),
    _Sender("Java", "async, 400 in flight", _ASYNC),
    _Sender("Java", "async, fault tolerance and detector", {**_ASYNC, **_DETECTING}),
)


def run_faults(schedules: Iterable[Schedule], results: Results, say: Callable[[str], None]) -> None:
    """Run every schedule with every sender and add the records to `results.faults`.

    Raises:
        RocketSinkError: a sender or the cluster failed.
    """
    with scratch_folder() as folder, LocalCluster(2, broker_config=_MESSAGES_PER_PULL) as cluster:
        launchers = _launchers(cluster, folder, results, say)
        senders = [candidate for candidate in _SENDERS if candidate.who in launchers]
        runs = [(schedule, sender) for schedule in schedules for sender in senders]
        results.planned[FAULTS] = len(runs)
        for schedule, sender in runs:
            say(f"{sender.who} {sender.title}: {schedule.title} of {schedule.total_s:g} s")
            topic = f"fault-{len(results.faults)}"
            run = _FaultRun(cluster, topic, folder / f"{topic}.txt")
            results.add(FAULTS, run.record(schedule, sender, launchers[sender.who]))


def _launchers(
    cluster: LocalCluster, folder: Path, results: Results, say: Callable[[str], None]
) -> dict[str, Launcher]:
    launchers = {OURS: our_launcher()}
    try:
        launchers["Java"] = java_launcher(cluster.java, cluster.classpath, folder)
    except RocketSinkError as error:
        results.absent["Java"] = str(error).splitlines()[0]
        say(results.absent["Java"])
    return launchers


class _FaultRun:
    def __init__(self, cluster: LocalCluster, topic: str, numbers: Path) -> None:
        self._cluster = cluster
        self._topic = topic
        self._numbers = numbers
        self._trouble: list[BaseException] = []
        self._stop = threading.Event()

    def record(self, schedule: Schedule, sender: _Sender, launcher: Launcher) -> dict[str, Any]:
        self._cluster.create_topic(self._topic, 4)
        outcome = self._send(schedule, sender, launcher)
        acked, announced = read_numbers(self._numbers)
        counts = read_back(acked, announced, self._stored())
        printed = outcome.printed
        return {
            "fault": schedule.title, "kind": schedule.kind, "ours": sender.who == OURS,
            "sender": f"{sender.who} {sender.title}", "ok": printed["ok"],
            "per_s": printed["ok"] / printed["seconds"], "pause_ms": printed["pause_ms"],
            "failed": printed["failed"], "causes": printed["causes"],
            "longest_ms": printed["longest_ms"],
            "announced": len(announced) if sender.who == OURS else None, **counts,
        }  # fmt: skip

    def _send(self, schedule: Schedule, sender: _Sender, launcher: Launcher) -> Ended:
        fault = threading.Thread(target=self._apply, args=(schedule,))
        arguments = {
            "nameServer": self._cluster.name_server, "topic": self._topic, "warmup": _WARM_UP,
            "seconds": _whole(schedule.total_s), "numbers": self._numbers, **sender.arguments,
        }  # fmt: skip
        try:
            outcome = launcher.run(arguments, lambda: 0.0, when_ready=fault.start)
        except BaseException:
            self._stop.set()
            raise
        finally:
            if fault.ident is not None:
                fault.join()
        if self._trouble:
            raise self._trouble[0]
        return outcome

    def _apply(self, schedule: Schedule) -> None:
        try:
            schedule.apply(self._cluster.brokers[-1], self._stop.wait)
        except BaseException as error:
            self._trouble.append(error)

    def _stored(self) -> Counter[int]:
        StoredCount(self._cluster.name_server, self._topic).start()
        with Admin(nameServer=self._cluster.name_server, timeout_s=30.0) as admin:
            admin.await_dispatched(self._topic)
            return Counter(number_of(message.body) for message in admin.read_topic(self._topic))


def _whole(seconds: float) -> int:
    return max(1, round(seconds))


def read_numbers(path: Path) -> tuple[set[int], set[int]]:
    """The numbers in a sender's file: acknowledged, and possible duplicates."""
    kinds: dict[str, set[int]] = {"acked": set(), "announced": set()}
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            kind, number = line.split()
            kinds[kind].add(int(number))
    return kinds["acked"], kinds["announced"]


def read_back(acked: set[int], announced: set[int], stored: Mapping[int, int]) -> dict[str, int]:
    """Messages lost, stored more than once, and of those the unannounced ones."""
    doubled = {number for number, copies in stored.items() if copies > 1}
    return {
        "lost": sum(number not in stored for number in acked),
        "doubled": len(doubled),
        "unannounced": len(doubled - announced),
    }


def broken_promises(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Violations of ours: lost messages, unannounced duplicates, duplicates after a pause."""
    broken = []
    for record in records:
        if not record["ours"]:
            continue
        who = f"{record['sender']}, {record['fault']}"
        if record["lost"]:
            broken.append(f"{who}: {record['lost']} acknowledged messages are lost")
        if record["unannounced"]:
            broken.append(f"{who}: {record['unannounced']} messages are doubled in silence")
        if record["kind"] == PAUSE and record["doubled"]:
            broken.append(f"{who}: {record['doubled']} messages are doubled by a mere pause")
    return broken
