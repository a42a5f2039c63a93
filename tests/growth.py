"""A ledger of very many epochs: what folds cost, how many files there are, and what a report takes.

    python -m tests.growth 3000 20000
    python -m tests.growth --together 5 100000   # five epochs in each commit: a quarter of the time

prints the table of docs/operate/ledger.md, a row per number of epochs. Each epoch is a commit of
the rows of eight tasks, as a fold makes it every ten seconds; the last ten are folded from a spool.
The simulated hours pass in minutes, so the time for which the ledger keeps what was replaced is
shorter by the same factor.
"""

import argparse
import datetime as dt
import json
import os
import tempfile
import time
from pathlib import Path
from statistics import fmean, median
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
from deltalake import DeltaTable

from rocket_sink.ledger.append.delta_rs import commit, create_table, open_table
from rocket_sink.ledger.append.table import PROPERTIES
from rocket_sink.ledger.driver.fold import fold
from rocket_sink.ledger.path import resolve_path
from rocket_sink.ledger.records import placed
from rocket_sink.ledger.schema import LEDGER_SCHEMA, SCHEMA_VERSION, VERSION_PROPERTY
from rocket_sink.ledger.transport.data_files import write_data_files
from rocket_sink.ledger.transport.spool import SpoolWriter
from rocket_sink.ledger.upkeep.growth import keep_small
from tests.ledger.values import accounts, confirmed, context, sends
from tests.memory import PEAK_MB
from tests.python import run_python

QUERY = "0a1b2c3d-4e5f-4a6b-8c7d-9e0f1a2b3c4d"
START = dt.datetime(2026, 3, 1, tzinfo=dt.timezone.utc)
TASKS = 8
REQUESTS = 12
"""Of a task; a ledger of 3,000 epochs has the 290,000 send rows of a trial of eight hours."""
EPOCH_S = 10
KEPT_EPOCHS = 2 * 8640
"""Epochs of two days, for which a ledger keeps commits and replaced files."""
REAL_FOLDS = 10
SPARK = SimpleNamespace(
    _jsparkSession=1, sparkContext=SimpleNamespace(master="local[2]", applicationId="growth")
)
"""A local session; a fold of few rows asks Spark for nothing."""
REPORT = f"""{PEAK_MB}
import resource, sys
from rocket_sink.cli import main
code = main(sys.argv[1:])
used = resource.getrusage(resource.RUSAGE_SELF)
print(used.ru_utime + used.ru_stime, peak_mb(), file=sys.stderr)
sys.exit(code)
"""


def rows_of_task(epoch, task):
    ctx = context(
        query_id=QUERY, epoch=epoch, partition=task, task_attempt_id=epoch * TASKS + task,
        worker=f"worker-{task % 2}:4711",
    )  # fmt: skip
    return [sends(ctx, REQUESTS), accounts(ctx, acked=7 * REQUESTS)]


def _milliseconds(seconds):
    return f"interval {int(seconds * 1000)} milliseconds"


class Growth:
    """A ledger that grows by an epoch at a time."""

    def __init__(self, folder, kept_s, together=1, named_s=None):
        """Make the ledger; `named_s`: time for which checkpoints name replaced files."""
        named_s = kept_s / 8 if named_s is None else named_s
        self.place = resolve_path(folder)
        properties = {
            **PROPERTIES,
            "delta.logRetentionDuration": _milliseconds(kept_s),
            "delta.deletedFileRetentionDuration": _milliseconds(named_s),
        }
        properties[VERSION_PROPERTY] = str(SCHEMA_VERSION)
        assert create_table(self.place, LEDGER_SCHEMA, properties)
        batches = [batch for task in range(TASKS) for batch in rows_of_task(0, task)]
        batches.append(confirmed(context(query_id=QUERY), TASKS * 7 * REQUESTS))
        # Batches of a kind are joined, as a fold of few files writes a file per kind.
        self.template = pa.Table.from_batches(batches, LEDGER_SCHEMA)
        self.epochs, self.together = 0, together

    def grow(self):
        """Commit the rows of the next epochs; return the CPU seconds of the commit."""
        first, parts = self.epochs, []
        for _ in range(self.together):
            parts.append(self._epoch())
            self.epochs += 1
        table = pa.concat_tables(parts)
        begin_s = time.process_time()
        current = open_table(self.place)
        sequence = (current.version() + 1) << 32
        files = write_data_files(
            self.place, [placed(batch, sequence) for batch in table.combine_chunks().to_batches()]
        )
        commit(self.place, current, files, "growth", first)
        append = SimpleNamespace(place=self.place, merges=True, rows=1, sequence=sequence)
        keep_small(append)
        return time.process_time() - begin_s

    def grow_by(self, epochs):
        for _ in range(epochs):
            self.grow()

    def _epoch(self):
        moment = START + dt.timedelta(seconds=EPOCH_S * self.epochs)
        table = self.template
        ids = pa.array(
            [n and n + self.epochs * TASKS for n in table["task_attempt_id"].to_pylist()],
            pa.int64(),
        )
        count, random = len(table), np.random.default_rng(self.epochs)
        texts = [random.bytes(16).hex() for _ in range(count)]
        for name, values in (
            ("rtt_ms", pa.array(random.lognormal(1, 1, count))),
            ("queue_wait_ms", pa.array(random.lognormal(0, 1, count))),
            ("queue_offset", pa.array(random.integers(0, 1 << 40, count))),
            ("message_id", pa.array(texts)), ("offset_message_id", pa.array(texts)),
            ("at", pa.array([moment] * len(table), pa.timestamp("us", tz="UTC"))),
            ("epoch", pa.array([self.epochs] * len(table), pa.int64())),
            ("task_attempt_id", ids),
        ):  # fmt: skip
            table = table.set_column(table.schema.get_field_index(name), table.field(name), values)
        return table

    def fold(self):
        """Fold the next epoch from a spool; return the CPU seconds of the fold."""
        for task in range(TASKS):
            spool = SpoolWriter(self.place, context(
                query_id=QUERY, epoch=self.epochs, partition=task,
                task_attempt_id=self.epochs * TASKS + task,
            ))  # fmt: skip
            spool.append(*rows_of_task(self.epochs, task))
            spool.seal()
        begin_s = time.process_time()
        fold(SPARK, self.place)
        self.epochs += 1
        return time.process_time() - begin_s

    def size(self, fold_s, commit_s):
        """Return the ledger's size by figure. Replaced files are on disk for a while."""
        root = Path(self.place.root)
        log = list((root / "_delta_log").iterdir())
        stored = list(root.glob("kind=*/*.parquet"))
        done = run_python("-c", REPORT, "report", "--ledger", str(root), "--json", timeout_s=3600)
        assert json.loads(done.stdout)["verdict"], "the report is empty"
        cpu_s, memory_mb = done.stderr.split()[-2:]
        actions = pa.table(DeltaTable(root).get_add_actions(flatten=True))
        rows = len(self.template) * self.epochs - self.folded
        assert sum(actions["num_records"].to_pylist()) == rows
        return {
            "epochs": self.epochs, "files": len(actions), "files on disk": len(stored),
            "data MB": sum(path.stat().st_size for path in stored) / 1e6, "log files": len(log),
            "log MB": sum(path.stat().st_size for path in log) / 1e6,
            "fold CPU ms": fold_s * 1e3, "commit CPU ms": commit_s * 1e3,
            "report CPU s": float(cpu_s), "report MB": int(memory_mb),
        }  # fmt: skip

    folded = 0
    """Epochs that were folded: these have no row of the driver."""


def measure(folder, marks, kept_s, together):
    """Grow a ledger; print its size at each of these numbers of epochs."""
    growth, commits = Growth(folder, kept_s, together), []
    for mark in marks:
        while growth.epochs < mark - REAL_FOLDS:
            commits.append(growth.grow())
        folds = [growth.fold() for _ in range(REAL_FOLDS)]
        growth.folded += REAL_FOLDS
        size = growth.size(median(folds), fmean(commits[-1000:]))
        texts = (f"{name} {n:,.1f}" if isinstance(n, float) else f"{name} {n:,}"
                 for name, n in size.items())  # fmt: skip
        print("|", " | ".join(texts), "|", flush=True)


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.growth", description=__doc__)
    parser.add_argument("epochs", nargs="+", type=int)
    parser.add_argument("--together", type=int, default=1, help="epochs in each commit")
    arguments = parser.parse_args()
    marks, together = [100, *arguments.epochs], arguments.together
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder:
        trial, begin_s = Growth(f"{folder}/trial", 60.0, together), time.monotonic()
        trial.grow_by(100)
        epoch_s = (time.monotonic() - begin_s) / trial.epochs
        measure(f"{folder}/ledger", marks, KEPT_EPOCHS * epoch_s, together)


if __name__ == "__main__":
    main()
