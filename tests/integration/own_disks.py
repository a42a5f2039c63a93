"""Executors whose disk is not the driver's; `test_own_disks.py` runs them in a process of its own.

Arguments: name server, folder, disk:lane ... Each executor's Java runs in a mount namespace, in
which `<folder>/<disk>` is, by the name of the disk,

    own        empty
    readonly   the driver's, read-only
    spool      the driver's, and only the first executor shares the ledger's spool

Each disk has a ledger. The topic is disk-lane. The process prints a JSON line for each lane:
{"disk", "lane", "error", "log"}; `error` is empty if the lane succeeded.
"""

import contextlib
import json
import logging
import os
import sys
from pathlib import Path
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq

from rocket_sink import Ledger
from rocket_sink.java import find_java
from rocket_sink.ledger.driver import fold as fold_module
from rocket_sink.options import SinkOptions
from rocket_sink.spark.backfill.backfill import Backfill
from rocket_sink.spark.backfill.sources import Table
from rocket_sink.spark.session import build_session
from tests.integration.lanes import LANES, Lane, read
from tests.jvms import SPARK, java_options
from tests.ledger.values import accounts, context, letter, write_spool
from tests.producer.waiting import until

ROWS = 400
PARTS = 4
HALF_BAD = [None if number % 2 else f"{number:06d}" for number in range(ROWS)]
"""Bodies of rows; brokers refuse every other one."""

DISKS = ("own", "readonly", "spool")
_MOUNT = """set -e
mount -t tmpfs none "$BASE/own"
mount --bind "$BASE/readonly" "$BASE/readonly"
mount -o remount,bind,ro "$BASE/readonly"
if ! mkdir "$BASE/first" 2>/dev/null; then mount -t tmpfs none "$BASE/spool/ledger/_spool"; fi
"""


def java_home(folder):
    """Make a Java whose processes have disks of their own, and return its home."""
    java = find_java()
    real = Path(str(getattr(java, "home", java)), "bin", "java")
    script = folder / "java" / "bin" / "java"
    script.parent.mkdir(parents=True)
    script.write_text(
        "#!/bin/sh\n"
        f"export BASE='{folder}'\n"
        f'exec unshare -m --propagation private sh -c \'{_MOUNT}exec "{real}" "$@"\' java "$@"\n'
    )
    script.chmod(0o755)
    return folder / "java"


def main(name_server, folder, *cases):
    for disk in DISKS:
        (folder / disk).mkdir()
    (folder / "spool" / "ledger" / "_spool").mkdir(parents=True)
    spark = build_session(
        "rocket-sink-own-disks",
        master="local-cluster[2,1,1024]",
        conf={
            "spark.executor.memory": "512m",
            "spark.locality.wait": "0",
            "spark.task.maxFailures": "1",
            "spark.executor.extraJavaOptions": " ".join(java_options(SPARK)),
            "spark.sql.shuffle.partitions": "1",
            "spark.databricks.delta.snapshotPartitions": "1",
            "spark.scheduler.minRegisteredResourcesRatio": "1.0",
            "spark.sql.files.maxPartitionBytes": "16k",
            "spark.sql.files.openCostInBytes": "4k",
            "spark.executorEnv.JAVA_HOME": str(java_home(folder)),
            "spark.executorEnv.PYTHONPATH": os.environ.get("PYTHONPATH", ""),
        },
    )
    heard = _Heard()
    logging.getLogger("rocket_sink").addHandler(heard)
    source = folder / "source"
    source.mkdir()
    for part in range(PARTS):
        bodies = pa.array(HALF_BAD[part::PARTS], pa.string())
        table = pa.table({"body": bodies, "filler": [os.urandom(64) for _ in bodies]})
        pq.write_table(table, source / f"{part}.parquet", compression="none")
    own = {"backfill": _backfill, "fold": _fold, "large_fold": _fold_as_large, "handed": _handed}
    lanes = {lane.name: lane for lane in (*LANES, *map(Lane, own, own.values()))}
    for case in cases:
        disk, _, name = case.partition(":")
        options = {"nameServer": name_server, "topic": f"{disk}-{name}",
                   "ledger": str(folder / disk / "ledger"), "foldIntervalMs": 0,
                   "sendMsgTimeout": 60_000, "connectTimeoutMs": 20_000}  # fmt: skip
        error = ""
        heard.lines.clear()
        try:
            lanes[name].run(spark, source, folder / f"checkpoint-{disk}-{name}", options)
        except Exception as failure:
            error = str(failure)
        if disk == "spool" and lanes[name].streams:
            with contextlib.suppress(AssertionError):  # The test says what is missing.
                until(lambda: any("lacks" in line for line in heard.lines), 120, 0.1)
        result = {"disk": disk, "lane": name, "error": error, "log": heard.lines}
        print(json.dumps(result), flush=True)
    Ledger(folder / "spool" / "ledger").sync(spark)
    spark.stop()


def _backfill(spark, source, checkpoint, options):
    """Backfill a table on a shared disk; the ledger's own letters would be on the own disks."""
    parsed = SinkOptions.parse(options)
    work = Backfill(spark, parsed, source=Table(read(spark, source), "source", parsed))
    work.run(work.plan().selected)


def _fold(spark, source, checkpoint, options):
    """Fold rows that the driver itself has spooled; a task writes them."""
    write_spool(options["ledger"], context(), letter(context()), accounts(context(), dead=1))
    Ledger(options["ledger"]).sync(spark)


def _fold_as_large(spark, source, checkpoint, options):
    """Fold rows that tasks would read, if tasks saw them."""
    with mock.patch.object(fold_module, "DRIVER_BYTES", 0):
        _fold(spark, source, checkpoint, options)


def _handed(spark, source, checkpoint, options):
    """Run foreach and a write of the data source, whose rows Spark brings to the driver."""
    for lane in LANES:
        if lane.name in ("foreach", "source_batch"):
            options["ledger"] = f"{Path(options['ledger']).parent}/{lane.name}"
            lane.run(spark, source, checkpoint, {**options, "ledgerVia": "spark"})
            Ledger(options["ledger"]).sync(spark)


class _Heard(logging.Handler):
    """A log handler that keeps the driver's lines."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record):
        self.lines.append(f"{record.levelname} {record.getMessage()}")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
