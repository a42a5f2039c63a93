"""The run of a lane behind a proxy, and the judgement of what Java's client reads."""

import time
from collections import Counter
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from rocket_sink import Ledger
from rocket_sink.producer.admin.admin import Admin
from tests.clusters import make_topic
from tests.java_client import read_with_java
from tests.ledger.views import view_rows

TYPES = ("NORMAL", "FIFO", "DELAY")
_FILES = 4
_DELAY_MS = 1000
_DELIVERED_S = 300


@dataclass(frozen=True)
class Result:
    """The result of one lane on one topic.

    Attributes:
        missing, doubled: rows by what Java's client has read.
        letters: dead letters by outcome.
        refused: attempts that the proxy answered with MESSAGE_ILLEGAL (13).
        epochs: whether the accounts of all epochs add up.
    """

    lane: str
    type: str
    rows: int
    missing: int
    doubled: int
    letters: dict[str, int]
    refused: int
    adds_up: bool
    seconds: float

    @property
    def holds(self):
        """Whether each row is stored once, and no row is a dead letter or without an account."""
        return not (self.missing or self.doubled or self.letters) and self.adds_up


def write_rows(folder, kind, rows):
    """Write a source of rows with the columns that topics of this type need."""
    folder.mkdir(parents=True)
    for part in range(_FILES):
        numbers = range(part, rows, _FILES)
        columns = {"body": [str(number) for number in numbers]}
        if kind == "FIFO":
            columns["sharding_key"] = [f"k{number % 997}" for number in numbers]
        elif kind == "DELAY":
            columns["delay_ms"] = [_DELAY_MS] * len(numbers)
        pq.write_table(pa.table(columns), folder / f"{part}.parquet")


def run_lane(spark, cluster, proxies, lane, kind, rows, folder, **options):
    """Send the rows by a lane through `proxies` (nameServer), and read them from the brokers."""
    topic = f"{lane.name}-{kind}-{time.monotonic_ns()}"
    make_topic(cluster, topic, attributes={"message.type": kind})
    source, ledger = folder / kind, folder / topic / "ledger"
    if not source.exists():
        write_rows(source, kind, rows)
    began_s = time.monotonic()
    lane.run(
        spark, source, folder / topic / "checkpoint",
        {"nameServer": proxies, "topic": topic, "ledger": str(ledger), **options},
    )  # fmt: skip
    seconds = time.monotonic() - began_s
    Ledger(str(ledger)).sync_fully(spark)
    letters = view_rows(str(ledger), "SELECT outcome, count(*) n FROM pending_letters GROUP BY ALL")
    refused = view_rows(str(ledger), "SELECT count(*) n FROM sends WHERE response_code = 13")
    epochs = view_rows(str(ledger), "SELECT adds_up FROM epochs")
    copies = _copies(cluster, topic, rows)
    return Result(
        lane.name, kind, rows,
        missing=sum(1 for number in range(rows) if not copies[str(number)]),
        doubled=sum(copies.values()) - len(copies),
        letters={row.outcome: row.n for row in letters},
        refused=refused[0].n,
        adds_up=bool(epochs) and all(row.adds_up for row in epochs),
        seconds=seconds,
    )  # fmt: skip


def _copies(cluster, topic, rows):
    """Return how many messages have each body, once as many are delivered as there are rows."""
    deadline_s = time.monotonic() + _DELIVERED_S
    with Admin(timeout_s=30.0, nameServer=cluster.name_server) as admin:
        while admin.count(topic) < rows and time.monotonic() < deadline_s:
            time.sleep(0.5)
    time.sleep(2 * _DELAY_MS / 1000)  # for second copies of delayed rows
    messages = read_with_java(cluster, topic, cluster.version)
    return Counter((message.body or b"").decode() for message in messages)
