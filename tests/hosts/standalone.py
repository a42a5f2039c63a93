"""A standalone Spark cluster on hosts: what remains of promises when executors and hosts die.

    .venv/bin/python -m tests.hosts.standalone                    # all cases, some ten minutes
    .venv/bin/python -m tests.hosts.standalone --only worker_host
    .venv/bin/python -m tests.hosts.standalone --short            # the form for CI
    .venv/bin/python -m tests.hosts.standalone --page             # its part of docs/clusters.md

A master, two workers, two drivers' hosts, a name server and two brokers, each on a host of its own.
Sources, checkpoints and ledgers are on a folder that all hosts share, everything else on own disks.
All lanes run side by side. Results are stored in conf/standalone.json and docs/clusters.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pyspark

from rocket_sink.cluster import DEFAULT_VERSION, resolve_jars
from rocket_sink.java import find_java
from rocket_sink.producer.admin.admin import Admin
from tests.crash import ledger_log
from tests.crash.judge import Accounts, Copy, Epoch, Row, Verdict, judge
from tests.hosts import nodes, tables, world
from tests.hosts.bed import DISK, Bed, Host, await_port
from tests.hosts.spark_driver import FILES_PER_EPOCH
from tests.java_client import read_with_java

RESULTS = Path("conf/standalone.json")
PAGE = Path("docs/clusters.md")
LANES = ("foreach", "foreach_batch", "write", "source_stream", "source_batch")
_BATCHES = ("write", "source_batch")
_SHARED = Path("/run/shared")
_FILES, _ROWS, _KEYS = 12, 60, 5
_MASTER_PORT = 7077
_DEADLINE_S = 420.0
_CONF = {
    "spark.executor.memory": "600m",
    "spark.executor.cores": "3",
    "spark.executor.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.locality.wait": "0",
    "spark.task.maxFailures": "8",
    "spark.deploy.maxExecutorRetries": "-1",
    "spark.network.timeout": "20s",
    "spark.network.timeoutInterval": "5s",
    "spark.executor.heartbeatInterval": "3s",
    "spark.sql.shuffle.partitions": "1",
    "spark.databricks.delta.snapshotPartitions": "1",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.files.maxPartitionBytes": "4k",
    "spark.sql.files.openCostInBytes": "4k",
}
_OPTIONS = {
    "sendMsgTimeout": 60_000, "foldIntervalMs": 2000, "gatherRows": 10,
    # Tasks that take some seconds, so that a fault finds them in the middle.
    "requestMaxMessages": 10, "maxMessagesPerSecond": 150, "rateTasks": 6,
}  # fmt: skip


class Standalone:
    """The hosts; `apply` of a case gets it."""

    def __init__(self, bed: Bed, say: Callable[[str], None]) -> None:
        self.master = bed.host("master")
        self.workers = [bed.host("worker-0"), bed.host("worker-1")]
        self.drivers = [bed.host("driver-0"), bed.host("driver-1")]
        self.names = bed.host("names")
        self.brokers = [bed.host("broker-a"), bed.host("broker-b")]
        _SHARED.mkdir()
        say("starting brokers, master and workers")
        server = nodes.name_server(self.names)
        server.wait_ready(120)
        self.name_server = server.address
        started = [nodes.broker(host, host.name, [server.address]) for host in self.brokers]
        self.addresses = {broker.name: broker.address for broker in started}
        self._spark(self.master, "master.Master", "--port", str(_MASTER_PORT), "--webui-port", "0")
        await_port(self.master.address, _MASTER_PORT, 120)
        self.url = f"spark://{self.master.address}:{_MASTER_PORT}"
        for worker in self.workers:
            self.start_worker(worker)
        for broker in started:
            broker.wait_ready(180)
        self.driver: subprocess.Popen[bytes] | None = None

    def _spark(self, host: Host, role: str, *arguments: str) -> None:
        """As sbin/start-master.sh and start-worker.sh do, which PyPI's package lacks."""
        home = Path(pyspark.__file__).parent
        environ = {
            **os.environ, "SPARK_HOME": str(home), "SPARK_LOCAL_IP": host.address,
            "SPARK_LOCAL_DIRS": str(DISK / "spark"), "SPARK_WORKER_DIR": str(DISK / "work"),
            "SPARK_DAEMON_MEMORY": "256m", "PYTHONPATH": os.getcwd(),
            "PYSPARK_PYTHON": sys.executable, "JAVA_HOME": str(find_java().executable.parents[1]),
        }  # fmt: skip
        log = (host.disk / f"{role}.log").open("wb")
        with log:
            host.start(
                [str(home / "bin" / "spark-class"), f"org.apache.spark.deploy.{role}",
                 "--host", host.address, *arguments],
                env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    def start_worker(self, host: Host) -> None:
        self._spark(
            host, "worker.Worker", "--webui-port", "0", "--cores", "3", "--memory", "700m", self.url
        )

    def start_driver(self, number: int, plan: Mapping[str, Any]) -> None:
        host = self.drivers[number]
        mine = {**plan, "master": self.url, "host": host.address}
        environ = {
            **os.environ, "SPARK_LOCAL_IP": host.address, "PYTHONPATH": os.getcwd(),
            "SPARK_LOCAL_DIRS": str(DISK / "spark"),
            "JDK_JAVA_OPTIONS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        }  # fmt: skip
        with (host.disk / "driver.log").open("ab") as log:
            self.driver = host.start(
                [sys.executable, "-m", "tests.hosts.spark_driver", json.dumps(mine)],
                env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    def executors(self, host: Host) -> list[psutil.Process]:
        """Executors of a host: descendants of it, by what they run."""
        return _running(host, "CoarseGrainedExecutorBackend")

    def python_workers(self, host: Host) -> list[psutil.Process]:
        """Python workers, not the daemons that fork them."""
        found = _running(host, "pyspark.daemon")
        return [one for one in found if (one.parent() or one) in found]

    # --- faults -----------------------------------------------------------------------------

    def kill_python_worker(self, plan: Mapping[str, Any]) -> None:
        for worker in self.workers:
            for process in self.python_workers(worker)[:2]:
                process.kill()

    def kill_executor(self, plan: Mapping[str, Any]) -> None:
        for process in self.executors(self.workers[0]):
            process.kill()

    def kill_worker(self, plan: Mapping[str, Any]) -> None:
        """Spark's worker process, whose executor ends with it; later a new one."""
        for process in _running(self.workers[0], "worker.Worker"):
            process.kill()
        time.sleep(5)
        self.start_worker(self.workers[0])

    def slow_worker(self, plan: Mapping[str, Any]) -> None:
        """Its tasks take longer than those of the other host."""
        self.workers[0].impair(delay_ms=400)
        time.sleep(20)
        self.workers[0].heal()

    def executors_begun(self) -> int:
        """How many executors the workers have started since their disks were new."""
        found = 0
        for worker in self.workers:
            found += sum(path.is_dir() for path in worker.disk.glob("work/app-*/*"))
        return found

    def kill_worker_host(self, plan: Mapping[str, Any]) -> None:
        """Its tasks are repeated on the other host; later it comes back, with an empty memory."""
        self.workers[0].kill()
        time.sleep(10)
        self.workers[0].boot()
        self.start_worker(self.workers[0])

    def kill_driver(self, plan: Mapping[str, Any]) -> None:
        """Pull the driver's plug, and begin again on another host."""
        self.drivers[0].kill()
        self.start_driver(1, plan)

    def revive(self) -> None:
        for host in self.drivers:
            if not host.running:
                host.boot()


def _running(host: Host, word: str) -> list[psutil.Process]:
    return [one for one in host.processes() if word in " ".join(one.cmdline())]


@dataclass(frozen=True)
class Case:
    """A fault; `delivery` and `ordering` of all lanes, `conf` of Spark."""

    name: str
    title: str
    apply: Callable[[Standalone, Mapping[str, Any]], None]
    delivery: str = "at_least_once"
    ordering: str = "none"
    conf: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


def _nothing(at: Standalone, plan: Mapping[str, Any]) -> None:
    """No fault."""


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

CASES: Sequence[Case] = (
    Case("none", "no fault", _nothing),
    Case("python_worker", "Python workers are killed", Standalone.kill_python_worker),
    Case("executor", "an executor is killed", Standalone.kill_executor, ordering="strict"),
    Case("worker", "a worker process is killed, a new one begins", Standalone.kill_worker,
         ordering="strict"),
    Case("worker_host", "a worker's host dies and comes back", Standalone.kill_worker_host),
    Case("worker_host_once", "the same, effectively once", Standalone.kill_worker_host,
         delivery="effectively_once", ordering="strict"),
    Case("driver", "the driver's host dies, another one goes on", Standalone.kill_driver,
         ordering="strict"),
    Case("speculation", "speculation, allowed; a slow host", Standalone.slow_worker, conf=_SPECULATION,
         options={"allowSpeculation": True}),
    Case("dynamic", "dynamic allocation, an executor is killed", Standalone.kill_executor,
         conf=_DYNAMIC),
)  # fmt: skip
SHORT = ("worker_host_once",)
_SHORT_LANES = ("foreach", "source_stream")


def play(at: Standalone, case: Case, names: Sequence[str] = LANES) -> dict[str, Any]:
    """Run lanes through a case."""
    at.revive()
    executors = at.executors_begun()
    folder = _SHARED / case.name
    lanes = [
        {"name": lane, "folder": str(folder / lane), "topic": f"{case.name}-{lane}"}
        for lane in names
    ]
    with Admin(nameServer=at.name_server, timeout_s=60.0) as tool:
        for lane in lanes:
            tool.create_topic(lane["topic"], queues=4)
            _write(Path(lane["folder"], "source"), _rows(lane["name"]))
    time.sleep(1)
    report = folder / "report.json"
    options = {
        **_OPTIONS, **case.options, "nameServer": at.name_server, "delivery": case.delivery,
        "ordering": case.ordering,
    }  # fmt: skip
    plan = {"conf": {**_CONF, **case.conf}, "options": options, "lanes": lanes,
            "report": str(report)}  # fmt: skip
    at.start_driver(0, plan)
    _await(at, lambda: all(_stored(at, lane["topic"]) > _ROWS for lane in lanes))
    case.apply(at, plan)
    _await(at, report.exists)
    assert at.driver is not None
    at.driver.wait()
    told = json.loads(report.read_text())
    rows = {}
    for lane in lanes:
        verdict = _judged(at, lane, told[lane["name"]])
        batch = lane["name"] in _BATCHES
        faults = verdict.faults(ordering=case.ordering, delivery=case.delivery, batch=batch)
        broken = [f"{name} {count}" for name, count in faults.items()]
        if not told[lane["name"]]["ended"]:
            broken.append(f"it did not end well: {told[lane['name']]['errors'][-1:]}")
        rows[lane["name"]] = {
            **asdict(verdict), "rows": _FILES * _ROWS, "broken": broken,
            "errors": told[lane["name"]]["errors"],
            "announced": sum(one["duplicates_possible"] for one in told[lane["name"]]["epochs"]),
            **_repeats(Path(lane["folder"], "ledger")),
        }  # fmt: skip
    return {"name": case.name, "title": case.title, "delivery": case.delivery,
            "ordering": case.ordering, "executors": at.executors_begun() - executors,
            "rows": rows}  # fmt: skip


def _repeats(ledger: Path) -> dict[str, int]:
    """Tasks of which more than one attempt has sent, and those of which two hosts have."""
    columns = ("query_id", "epoch", "partition", "run_id", "task_attempt_id", "worker")
    attempts: dict[tuple[Any, ...], set[tuple[Any, ...]]] = {}
    hosts: dict[tuple[Any, ...], set[str]] = {}
    for row in ledger_log.rows_of(ledger, "send", columns):
        task = tuple(row[name] for name in columns[:3])
        attempts.setdefault(task, set()).add((row["run_id"], row["task_attempt_id"]))
        hosts.setdefault(task, set()).add(row["worker"].rpartition(":")[0])
    return {
        "repeated": sum(len(found) > 1 for found in attempts.values()),
        "repeated_elsewhere": sum(len(found) > 1 for found in hosts.values()),
    }


def _rows(lane: str) -> list[list[Row]]:
    """Rows by file. A key is in one file of an epoch: tasks do not wait for each other."""
    together = _FILES if lane in _BATCHES else FILES_PER_EPOCH
    return [
        [
            (f"k{number % _KEYS}-{file % together}", file * _ROWS + number)
            for number in range(_ROWS)
        ]
        for file in range(_FILES)
    ]  # fmt: skip


def _write(source: Path, files: Sequence[Sequence[Row]]) -> None:
    source.mkdir(parents=True)
    for file, rows in enumerate(files):
        columns = {
            "body": [f"{key}:{number}" for key, number in rows],
            "sharding_key": [key for key, _ in rows],
            "filler": [os.urandom(64) for _ in rows],
        }
        path = source / f"{file:03d}.parquet"
        pq.write_table(pa.table(columns), path, compression="none")
        # Spark takes files in the order of their times.
        os.utime(path, (1_700_000_000 + file, 1_700_000_000 + file))


def _stored(at: Standalone, topic: str) -> int:
    with Admin(nameServer=at.name_server, timeout_s=30.0) as tool:
        return tool.count(topic)


def _judged(at: Standalone, lane: Mapping[str, str], told: Mapping[str, Any]) -> Verdict:
    ledger = Path(lane["folder"], "ledger")
    copies = [
        Copy(
            ledger_log.row_of(one.body or b""), one.message_id,
            (at.addresses[one.broker_name], one.queue_id), one.queue_offset,
        )
        for one in read_with_java(at.name_server, lane["topic"])
    ]  # fmt: skip
    epochs = [
        Epoch(
            one["query"], one["adds_up"], one["rows_in"],
            one["acked"] + one["degraded"] + one["dead"] + one["unknown"] + one["filtered"],
            one["duplicates_possible"],
        )
        for one in told["epochs"]
    ]  # fmt: skip
    accounts = Accounts(ledger_log.sent(ledger), ledger_log.letters(ledger), epochs)
    expected = {row for rows in _rows(lane["name"]) for row in rows}
    return judge(expected, copies, accounts)


def _await(at: Standalone, check: Callable[[], bool]) -> None:
    until_s = time.monotonic() + _DEADLINE_S
    while not check():
        ended = at.driver is not None and at.driver.poll() is not None
        if time.monotonic() > until_s or ended:
            logs = [(host.disk / "driver.log") for host in at.drivers]
            text = "".join(log.read_text()[-4000:] for log in logs if log.exists())
            raise AssertionError(f"the driver {'ended' if ended else 'hangs'}: {text}")
        time.sleep(0.3)


_COLUMNS = {
    "rows": "rows", "repeated": "tasks sent again", "repeated_elsewhere": "on the other host",
    "lost": "lost", "announced": "announced", "duplicates": "doubled",
    "unaccounted": "in silence", "disordered": "out of order", "wrong_epochs": "accounts wrong",
}  # fmt: skip


def section(results: Mapping[str, Any]) -> str:
    """The part of docs/clusters.md."""
    rows = []
    order = [case.name for case in CASES]
    for case in sorted(results["cases"], key=lambda played: order.index(played["name"])):
        found = case["rows"]
        broken = [f"{lane}: {text}" for lane, row in found.items() for text in row["broken"]]
        totals = [str(sum(row[name] for row in found.values())) for name in _COLUMNS]
        rows.append([
            case["title"], f"{case['delivery']}, order {case['ordering']}",
            "; ".join(broken) or "held", str(case["executors"]), *totals,
        ])  # fmt: skip
    head = ["case", "promise", "held", "executors", *_COLUMNS.values()]
    return _SECTION + tables.lines(head, rows)


def write_page(page: Path = PAGE, results: Path = RESULTS) -> None:
    """Put the results into their part of the page; what is before it stays."""
    before = page.read_text().partition(_HEADING)[0].rstrip("\n")
    page.write_text(f"{before}\n{section(json.loads(results.read_text()))}")


_HEADING = "\n## Spark on several hosts\n"
_SECTION = f"""{_HEADING}
A standalone master, two workers, drivers and two brokers, each on a host with a disk of its own;
sources, checkpoints and ledgers on a folder that all share. The lanes foreach, foreachBatch,
`sink.write` and `format("rocketmq")` as stream and as batch run side by side, in client deploy mode:
Spark refuses cluster deploy mode for Python on standalone clusters. Figures are of all five; what is
stored is what the official Java client reads. Order is counted whether or not it was promised. Made
by `python -m tests.hosts.standalone`.

- **executors**: how many the workers have started. **tasks sent again**: tasks of which more than
  one attempt has sent; **on the other host**: of which both hosts have.
- **announced**, **doubled**, **in silence**: as in [bad networks](networks.md).

"""


def main() -> int:
    """The exit code: 1 when a promise was broken."""
    parser = argparse.ArgumentParser("tests.hosts.standalone")
    parser.add_argument("--only", action="append", choices=[case.name for case in CASES])
    parser.add_argument("--out", type=Path, default=RESULTS, help="file of the results (JSON)")
    parser.add_argument("--short", action="store_true", help="the form for CI: prints its results")
    parser.add_argument("--page", action="store_true", help="only write the page from the results")
    given = parser.parse_args()
    if given.page:
        write_page()
        return 0
    if not world.inside():
        resolve_jars(DEFAULT_VERSION)
    world.enter("tests.hosts.standalone")
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:6.1f} s  {text}", file=sys.stderr, flush=True)

    results: dict[str, Any] = {"version": DEFAULT_VERSION, "cases": []}
    wanted = given.only or (SHORT if given.short else [case.name for case in CASES])
    with Bed() as bed:
        at = Standalone(bed, say)
        for case in CASES:
            if case.name not in wanted:
                continue
            say(case.title)
            played = play(at, case, _SHORT_LANES if given.short else LANES)
            results["cases"].append(played)
            if not given.short:
                tables.store(given.out, results, whole=not given.only)
            for lane, row in played["rows"].items():
                counts = {name: row[name] for name in ("stored", *_COLUMNS)}
                say(f"  {lane:14} {counts} {'; '.join(row['broken']) or 'held'}")
                for error in row["errors"]:
                    say(f"      {error[:200]}")
    if given.short:
        print(json.dumps(results))
    elif given.out == RESULTS:
        write_page()
    return int(any(row["broken"] for one in results["cases"] for row in one["rows"].values()))


if __name__ == "__main__":
    raise SystemExit(main())
