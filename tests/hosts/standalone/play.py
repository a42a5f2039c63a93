"""The cases: a fault while all lanes run, judged by the official Java client and the ledger."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.crash import ledger_log
from tests.crash.files import write_rows
from tests.crash.judge import Copy, judge
from tests.hosts.bed import DISK
from tests.hosts.standalone.place import FILES_PER_EPOCH, SHARED, Standalone, has_ended
from tests.java_client import read_with_java

LANES = ("foreach", "foreach_batch", "write", "source_stream", "source_batch")
_BATCHES = ("write", "source_batch")
_FILES, _ROWS, _KEYS = 12, 60, 5
OPTIONS = {
    "sendMsgTimeout": 60_000, "foldIntervalMs": 2000,
    # Tasks of this size take some seconds, so that a fault interrupts them.
    "requestMaxMessages": 10, "maxMessagesPerSecond": 75, "rateTasks": 6,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A fault, with `delivery` and `ordering` of all lanes and `conf` of Spark.

    Attributes:
        apply: makes the fault. It is called again for lanes that begin later, unless `once`.
        lanes: the lanes of the case; the others are not run.
        is_ledger_own: the ledgers are on the driver's own disk, which no other host sees.
    """

    name: str
    title: str
    apply: Callable[[Standalone, Mapping[str, Any]], None]
    delivery: str = "at_least_once"
    ordering: str = "none"
    conf: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    once: bool = False
    lanes: Sequence[str] = LANES
    is_ledger_own: bool = False


def _nothing(at, plan):
    """Make no fault."""


_SPECULATION = {
    "spark.speculation": "true", "spark.speculation.multiplier": "1.1",
    "spark.speculation.quantile": "0.1", "spark.speculation.interval": "100ms",
}  # fmt: skip
_DYNAMIC = {
    "spark.dynamicAllocation.enabled": "true", "spark.dynamicAllocation.minExecutors": "0",
    "spark.dynamicAllocation.maxExecutors": "2",
    "spark.dynamicAllocation.shuffleTracking.enabled": "true",
    "spark.dynamicAllocation.executorIdleTimeout": "1s",
}  # fmt: skip

CASES = (
    Case("none", "no fault", _nothing),
    Case("python_worker", "Python workers are killed", Standalone.kill_python_worker),
    Case("executor", "an executor is killed", Standalone.kill_executor, ordering="strict"),
    Case("worker", "a worker process is killed, a new one begins", Standalone.kill_worker,
         ordering="strict"),
    Case("worker_host", "a worker's host dies and comes back", Standalone.kill_worker_host),
    Case("worker_host_once", "the same, effectively once", Standalone.kill_worker_host,
         delivery="effectively_once", ordering="strict"),
    Case("driver", "the driver's host dies, another one goes on", Standalone.kill_driver,
         ordering="strict", once=True),
    Case("speculation", "speculation, allowed; a slow host", Standalone.slow_worker,
         conf=_SPECULATION, options={"allowSpeculation": True}),
    Case("dynamic", "dynamic allocation, an executor is killed", Standalone.kill_executor,
         conf=_DYNAMIC),
    Case("handed", "an executor is killed; ledgers on the driver's own disk, `ledgerVia=spark`",
         Standalone.kill_executor, options={"ledgerVia": "spark"}, is_ledger_own=True,
         lanes=("foreach", "source_stream", "source_batch")),
)  # fmt: skip
SHORT = ("worker_host_once",)
SHORT_LANES = ("foreach", "source_stream")


def play(at, case, names=LANES):
    """Run lanes through a case."""
    at.revive()
    executors = at.executors_begun()
    options = {**case.options, "delivery": case.delivery, "ordering": case.ordering}
    plan = {
        "name": case.name, "conf": case.conf,
        "cells": make_cells(
            at, case.name, [name for name in names if name in case.lanes], options,
            own_ledgers=case.is_ledger_own,
        ),
    }  # fmt: skip
    time.sleep(1)
    at.start_driver(0, plan)
    faults = _break(at, case, plan)
    reports = at.told(plan)
    rows = {}
    for cell in plan["cells"]:
        lane, ledger = cell["lane"], Path(cell["options"]["ledger"])
        if case.is_ledger_own:
            ledger = at.drivers[0].disk / ledger.relative_to(DISK)
        report = reports[lane]
        verdict = _judged(at, cell, ledger, report)
        batch = lane in _BATCHES
        faults_by_name = verdict.faults(ordering=case.ordering, delivery=case.delivery, batch=batch)
        if batch and case.once:
            # The next driver's write is not the write of the driver that died.
            faults_by_name.pop("unlike_ids", None)
        broken = [f"{name} {count}" for name, count in faults_by_name.items()]
        if not report["ended"]:
            broken.append(f"it did not end well: {report['errors'][-1:]}")
        rows[lane] = {
            **asdict(verdict), "rows": _FILES * _ROWS, "broken": broken,
            "errors": report["errors"],
            "announced": sum(epoch["duplicates_possible"] for epoch in report["epochs"]),
            **_repeats(ledger),
        }  # fmt: skip
    return {"name": case.name, "title": case.title, "delivery": case.delivery,
            "ordering": case.ordering, "faults": faults,
            "executors": at.executors_begun() - executors, "rows": rows}  # fmt: skip


def make_cells(at, name, lanes, options, *, own_ledgers=False):
    """Make a topic and a source for each lane, and return the cells of a driver's plan. Ledgers
    are on the driver's own disk, or beside the source in the folder that all hosts share."""
    cells = []
    with at.admin() as tool:
        for lane in lanes:
            folder, topic = SHARED / name / lane, f"{name}-{lane}"
            ledger = DISK / "ledgers" / lane if own_ledgers else folder / "ledger"
            all_options = {
                **OPTIONS, "nameServer": at.name_server, "topic": topic, "ledger": str(ledger),
                **options,
            }  # fmt: skip
            if not own_ledgers:  # Tasks keep notes of an `appId` in the ledger.
                all_options["appId"] = topic
            cells.append({"lane": lane, "folder": str(folder), "options": all_options})
            tool.create_topic(topic, queues=4)
            _write(folder / "source", _rows(lane))
    return cells


def _break(at, case, plan):
    """Apply the fault until it has interrupted each lane. Return the number of faults."""
    waiting = {cell["options"]["topic"] for cell in plan["cells"]}
    faults = 0

    def begun():
        return {topic for topic in waiting if at.stored(topic) > _ROWS}

    def ready():
        return has_ended(plan) or (begun() == waiting if case.once else bool(begun()))

    while waiting:
        at.await_driver(ready)
        if has_ended(plan):
            break
        waiting -= begun()
        case.apply(at, plan)
        faults += 1
    return faults


def _repeats(ledger):
    """Count the tasks that ran more than once, and those whose rows two hosts have sent.

    A killed attempt may have left no row; then the number of the next attempt shows it.
    """
    columns = ("query_id", "epoch", "partition", "run_id", "task_attempt_id", "worker",
               "attempt_number")  # fmt: skip
    attempts = {}
    hosts = {}
    for row in ledger_log.rows_of(ledger, "send", columns):
        task = tuple(row[name] for name in columns[:3])
        runs = attempts.setdefault(task, set())
        runs.add((row["run_id"], row["task_attempt_id"]))
        if row["attempt_number"]:
            runs.add(())
        hosts.setdefault(task, set()).add(row["worker"].rpartition(":")[0])
    return {
        "repeated": sum(len(runs) > 1 for runs in attempts.values()),
        "repeated_elsewhere": sum(len(senders) > 1 for senders in hosts.values()),
    }


def _rows(lane):
    """Return rows by file. A key is in one file of an epoch, so tasks do not wait for others."""
    together = _FILES if lane in _BATCHES else FILES_PER_EPOCH
    return [
        [
            (f"k{number % _KEYS}-{file % together}", file * _ROWS + number)
            for number in range(_ROWS)
        ]
        for file in range(_FILES)
    ]  # fmt: skip


def _write(source, files):
    source.mkdir(parents=True)
    for file, rows in enumerate(files):
        keys, numbers = zip(*rows, strict=True)
        filler = [os.urandom(64) for _ in rows]
        write_rows(source / f"{file:03d}.parquet", keys, numbers, file, filler=filler)


def _judged(at, cell, ledger, report):
    copies = [
        Copy(
            ledger_log.row_of(message.body or b""), message.message_id,
            (at.addresses[message.broker_name], message.queue_id), message.queue_offset,
        )
        for message in read_with_java(at.name_server, cell["options"]["topic"])
    ]  # fmt: skip
    expected = {row for rows in _rows(cell["lane"]) for row in rows}
    return judge(expected, copies, ledger_log.accounts(ledger, report["epochs"]))
