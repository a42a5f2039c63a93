"""Ledgers on an S3 API: runs the cases, writes conf/object-stores.json and the table of the page.

python -m tests.stores                  all cases, about an hour: 10,000 epochs are most of it
python -m tests.stores --only lanes     only the named cases; repeatable
python -m tests.stores --short          the form for CI: prints its results
python -m tests.stores --page           only the table, from the stored results
"""

import argparse
import json
import logging
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from tests.hosts import tables
from tests.stores import cases, contend, elsewhere, epochs
from tests.stores.cases import World
from tests.stores.server import S3Server
from tests.stores.session import hadoop_version, s3_session, sdk_version

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "conf" / "object-stores.json"
PAGE = ROOT / "docs" / "deploy" / "object-stores.md"


@dataclass(frozen=True)
class Case:
    """A play and its row on the page."""

    play: Callable
    title: str
    promise: str
    short: bool = False

    @property
    def name(self):
        return self.play.__name__


CASES = (
    Case(cases.lanes, "all lanes write to one ledger",
         "each row arrives once, accounts add up", short=True),
    Case(cases.readers, "Spark, delta-rs with DuckDB, report, commands read it",
         "all say the same", short=True),
    Case(cases.letters, "park, unpark, backfill", "each dead letter is sent once", short=True),
    Case(cases.maintenance, "optimize, vacuum", "no row is lost", short=True),
    Case(cases.removals, "expire, erase",
         "the rows go, the contents are in no object, accounts stay", short=True),
    Case(cases.kills, "a fold dies at each of its steps", "each row is in once", short=True),
    Case(cases.command_line, "`rocket-sink` by itself, `--spark-conf` names the store",
         "the same as by the library"),
    Case(epochs.many_epochs, "many epochs", "nothing piles up", short=True),
    Case(epochs.many_writes, "many batch writes", "nothing piles up"),
    Case(contend.conditions, "the store keeps to If-None-Match, or ignores it",
         "delta-rs commits, or Spark's Delta", short=True),
    Case(contend.two_drivers, "two drivers append at once", "no commit is lost"),
    Case(contend.one_query_twice, "two drivers run one query of each stream's lane",
         "each row arrives once, accounts add up"),
    Case(contend.answers_lost, "answers to commits get lost", "each row is in once"),
    Case(contend.store_without_conditions,
         "two drivers append at once, on a store that ignores If-None-Match",
         "none: each driver warns"),
    Case(contend.two_of_delta_rs, "two writers with delta-rs append at once",
         "no commit is lost"),
    *(
        Case(play, f"commits, notes and locks on {store}",
             "each row is in once, writers agree")
        for play, store in (
            (elsewhere.azure, "Azure (Azurite)"),
            (elsewhere.google, "Google Cloud Storage (fake-gcs-server)"),
            (elsewhere.hdfs, "HDFS (Hadoop's minicluster)"),
        )
    ),
)  # fmt: skip
_BASE = ("readers", "letters", "maintenance")
"""The cases that need the ledger of `lanes`."""


def main():
    parser = argparse.ArgumentParser("python -m tests.stores", description=__doc__)
    parser.add_argument("--only", action="append", choices=[case.name for case in CASES])
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--page", action="store_true")
    parser.add_argument("--epochs", type=int, default=epochs.LONG_EPOCHS)
    args = parser.parse_args()
    if args.page:
        write_page()
        return 0
    logging.basicConfig(level=logging.ERROR)
    wanted = set(args.only or [case.name for case in CASES if case.short or not args.short])
    if wanted & set(_BASE):
        wanted.add("lanes")
    results = play(
        [case for case in CASES if case.name in wanted], short=args.short, many=args.epochs
    )
    if args.short:
        print(json.dumps(results))
    else:
        tables.store(RESULTS, results, whole=not args.only)
        write_page()
    return int(any(case["broken"] for case in results["cases"]))


def play(chosen, *, short, many):
    """Run the cases and return their results."""
    server = S3Server()
    spark = s3_session(server.endpoint)
    results = []
    with tempfile.TemporaryDirectory() as folder:
        world = World(server, spark, Path(folder), short=short, epochs=many)
        for case in chosen:
            result = cases.timed(case.play, world)
            print(json.dumps(result), file=sys.stderr, flush=True)
            results.append(result)
        world.close()
    spark.stop()
    server.close()
    return {"versions": versions(), "cases": results}


def versions():
    names = ("pyspark", "delta-spark", "deltalake", "pyarrow", "moto")
    sdk = {"hadoop-aws": hadoop_version(), "AWS SDK": sdk_version()}
    return {name: version(name) for name in names} | sdk


def table(results):
    """Return the generated part of the page."""
    played = {result["name"]: result for result in results["cases"]}
    tried = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    rows = [
        (case.title, case.promise, "; ".join(result["broken"]) or "held",
         ", ".join(f"{name} {_number(n)}" for name, n in result["figures"].items()))
        for case in CASES if (result := played.get(case.name))
    ]  # fmt: skip
    head = ("case", "promise", "held", "figures")
    return f"Tried with {tried}.\n\n{tables.lines(head, rows)}"


def _number(value):
    return f"{value:,}" if isinstance(value, int) else str(value)


def write_page():
    tables.write_parts(PAGE, {"tried": table(json.loads(RESULTS.read_text()))})


if __name__ == "__main__":
    raise SystemExit(main())
