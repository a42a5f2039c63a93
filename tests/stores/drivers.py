"""Drivers that append to one table at once, each a process of its own.

    python -m tests.stores.drivers JSON     one driver: `Work` as JSON; prints what it wrote

A driver prints "ready" when it has opened the table, and begins at a line on standard input.
"""

import json
import subprocess
import sys
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import deltalake
import pyarrow as pa

from rocket_sink import Ledger
from rocket_sink.ledger.driver.fold import fold
from rocket_sink.ledger.path import resolve_path
from tests.integration import lanes
from tests.ledger.values import context, sends
from tests.stores.cases import spool
from tests.stores.server import s3_options
from tests.stores.session import s3_session

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Work:
    """The work of one driver, done `times` times.

    Attributes:
        kind: append (Spark's Delta, by `Ledger.append`), fold (spool, then fold), delta-rs
            (`write_deltalake`), or a lane's name.
        first: the number of the driver's first partition, by which each row's writer is known.
        folder, options: a lane needs a folder with `source` and `checkpoint`, and its sink options.
    """

    kind: str
    endpoint: str
    uri: str
    first: int
    times: int
    folder: str = ""
    options: dict[str, Any] = field(default_factory=dict)


def together(works):
    """Run drivers that begin at once; return what each wrote and which errors it had."""
    drivers = []
    try:
        # Start one driver after the other: a JVM's start takes all of a small machine.
        for work in works:
            driver = subprocess.Popen(
                [sys.executable, "-m", "tests.stores.drivers", json.dumps(asdict(work))],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                cwd=ROOT,
            )  # fmt: skip
            drivers.append(driver)
            assert driver.stdout.readline() == "ready\n", driver.communicate()[1][-4000:]
        for driver in drivers:
            driver.stdin.write("go\n")
            driver.stdin.flush()
        return [_result(driver) for driver in drivers]
    finally:
        for driver in drivers:
            if driver.poll() is None:
                driver.kill()
                driver.communicate()


def _result(driver):
    out, err = driver.communicate(timeout=1200)
    assert driver.returncode == 0, f"a driver failed: {err[-4000:]}"
    return {**json.loads(out.splitlines()[-1]), "log": err}


def main(work):
    turn = {"append": _append, "fold": _fold, "delta-rs": _delta_rs}.get(work.kind, _lane)
    write = turn(work)
    print("ready", flush=True)
    sys.stdin.readline()
    written = Counter()
    errors = []
    for number in range(work.first, work.first + work.times):
        try:
            written[number] += write(number)
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}"[:2000])
    print(json.dumps({"written": dict(written), "errors": errors}), flush=True)


def _append(work):
    spark, ledger = s3_session(work.endpoint), Ledger(work.uri)
    ledger.rows(spark).count()

    def write(number):
        ledger.append(spark, sends(context(partition=number), 2))
        return 2

    return write


def _fold(work):
    spark, place = s3_session(work.endpoint), resolve_path(work.uri)

    def write(number):
        spool(place, number)
        fold(spark, place, wait_s=300)
        return 2

    return write


def _delta_rs(work):
    options = s3_options(work.endpoint)

    def write(number):
        rows = pa.Table.from_batches([sends(context(partition=number), 2)])
        deltalake.write_deltalake(work.uri, rows, mode="append", storage_options=options)
        return 2

    return write


def _lane(work):
    spark = s3_session(work.endpoint)
    source, checkpoint = Path(work.folder, "source"), Path(work.folder, "checkpoint")
    [run] = [lane.run for lane in lanes.LANES if lane.name == work.kind]
    lanes.READING["maxFilesPerTrigger"] = 1

    def write(number):
        run(spark, source, checkpoint, work.options)
        return 0

    return write


if __name__ == "__main__":
    main(Work(**json.loads(sys.argv[1])))
