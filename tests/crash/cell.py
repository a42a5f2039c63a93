"""One schedule being played: its rows, topic, folder, ledger, and what came of it."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rocket_sink.cluster import LocalCluster
from rocket_sink.producer.admin.admin import Admin
from rocket_sink.producer.admin.stored_messages import read_topic
from rocket_sink.wire.ids import offset_message_id
from rocket_sink.wire.stored import StoredMessage
from tests.damaged import damaged

from . import ledger_log
from .files import write_whole
from .judge import Accounts, Copy, Epoch, Row, Verdict, judge
from .schedule import (
    BACKFILL,
    BATCHES,
    EPOCHS,
    FILES,
    KEYS,
    REQUEST_ROWS,
    ROWS,
    TRANSACTIONAL,
    Schedule,
)

STAGED = ("topic_deleted", "checkpoint_deleted")
_WAITING = (*STAGED, "queues_changed")


@dataclass
class Cell:
    """A schedule in its own folder.

    Attributes:
        kept: copies that were read before their topic was deleted.
        result: what its driver reported at the end.
    """

    schedule: Schedule
    folder: Path
    cluster: LocalCluster
    number: int
    kept: list[Copy] = field(default_factory=list)
    _kept_at: set[tuple[str, bytes]] = field(default_factory=set)
    result: dict[str, Any] = field(default_factory=dict)

    @property
    def topic(self) -> str:
        return f"crash-{self.folder.parent.name}-{self.number}"

    @property
    def ledger(self) -> Path:
        return self.folder / "ledger"

    @property
    def batch(self) -> bool:
        return self.schedule.lane in BATCHES

    @property
    def reached(self) -> bool:
        """Whether a process has come to the schedule's moment."""
        return (self.folder / "reached.json").exists()

    @property
    def has_queues(self) -> bool:
        """A strict query that starts while a broker is away would do without it for good."""
        strict = self.schedule.ordering == "strict"
        return not strict or any((self.ledger / "_pins").glob("*/*.json"))

    def prepare(self) -> None:
        """Topic, source files and the armed point."""
        self.folder.mkdir(parents=True)
        self.create_topic()
        (self.folder / "source").mkdir()
        (self.folder / "later").mkdir()
        streams = not self.batch and self.schedule.lane != BACKFILL
        epochs = EPOCHS if streams else 1
        for epoch in range(epochs):
            late = self.schedule.event == "topic_deleted" and epoch == epochs - 1
            self._write(epoch, "later" if late else "source")
        if self.schedule.moment:
            armed = {"point": self.schedule.moment, "count": self.schedule.count}
            write_whole(self.folder / "armed.json", json.dumps(armed))

    def create_topic(self, queues: int = 4) -> None:
        with Admin(nameServer=self.cluster.name_server) as admin:
            admin.create_topic(self.topic, queues=queues)

    def _write(self, epoch: int, folder: str) -> None:
        for file in range(FILES):
            rows = [(f"k{i % KEYS}-{file}", epoch * ROWS + i) for i in range(ROWS)]
            bodies = [f"{key}:{number}" for key, number in rows]
            columns = {"body": bodies, "sharding_key": [key for key, _ in rows]}
            if self.schedule.ids == "own":
                columns["message_id"] = [f"{self.number:04X}{body}" for body in bodies]
            if self.schedule.lane == BACKFILL:
                columns["number"] = [number for _, number in rows]
            path = self.folder / folder / f"{epoch}-{file}.parquet"
            pq.write_table(pa.table(columns), path)
            # Spark takes files in the order of their times.
            os.utime(path, (1_700_000_000 + epoch, 1_700_000_000 + epoch))

    def plan(self) -> dict[str, Any]:
        """What a driver needs to know."""
        return {
            "lane": self.schedule.lane, "folder": str(self.folder), "options": self._options(),
            "staged": self.schedule.event in STAGED,
            # Of a stream the next start does it; a write is not run again where it was decided.
            "settles": self.batch and self.schedule.delivery == TRANSACTIONAL,
            "tries": 2 if self.schedule.event == "checkpoint_deleted" else 6,
            "waits_after_failure": self.schedule.event in _WAITING,
        }  # fmt: skip

    def _options(self) -> dict[str, Any]:
        one = self.schedule
        options: dict[str, Any] = {
            "nameServer": self.cluster.name_server, "topic": self.topic,
            "ledger": str(self.ledger), "delivery": one.delivery, "ordering": one.ordering,
            "requestMaxMessages": REQUEST_ROWS, "gatherRows": 50, "foldIntervalMs": 1000,
            "sendMsgTimeout": 90_000, "sendMsgMaxTimeoutPerRequest": 3000,
            "orderWaitMs": 200_000, "storedCheckTimeout": 300_000, "connectTimeoutMs": 3000,
            "pollNameServerInterval": 1000, "allowSpeculation": True,
        }  # fmt: skip
        if one.lane == BACKFILL:
            # A chunk is a second's rows: several chunks, so that a kill finds one in the middle.
            options |= {"maxMessagesPerSecond": ROWS, "delivery": "at_least_once"}
        is_once = one.delivery == "effectively_once"
        if one.event == "checkpoint_deleted" or one.lane == "write" or (self.batch and is_once):
            # Of a write: what tells that the next one is the one that died.
            options["appId"] = f"app-{self.number}"
        if is_once and one.is_made_again:
            options["replayCheck"] = "always"
        return options

    def take_late_files(self) -> None:
        for path in sorted((self.folder / "later").iterdir()):
            path.rename(self.folder / "source" / path.name)

    def expected(self) -> set[Row]:
        found: set[Row] = set()
        for path in (self.folder / "source").iterdir():
            bodies = pq.read_table(path, columns=["body"])["body"].to_pylist()
            found |= {ledger_log.row_of(body.encode()) for body in bodies}
        return found

    def copies(self) -> list[Copy]:
        """Of the topic now, without those that were kept: a broker that is killed after it has
        deleted a topic fills the topic's queues again from its commit log."""
        stored = read_topic(self.cluster.name_server, self.topic)
        return [self._copy(one) for one in stored if _place(one) not in self._kept_at]

    def keep_copies(self) -> None:
        stored = list(read_topic(self.cluster.name_server, self.topic))
        self.kept = [self._copy(one) for one in stored]
        self._kept_at = {_place(one) for one in stored}

    def _copy(self, one: StoredMessage) -> Copy:
        return Copy(
            ledger_log.row_of(one.body), one.message_id or "",
            (f"{one.store_host[0]}:{one.store_host[1]}", one.queue_id), one.queue_offset,
            offset_message_id(*one.store_host, one.prepared_transaction_offset),
            life=int(bool(self.kept)), torn=damaged(one),
        )  # fmt: skip

    def verdict(self) -> Verdict:
        """Reads topic and ledger; every process of the round has ended."""
        epochs = [
            Epoch(
                e["query"], e["adds_up"], e["rows_in"],
                e["acked"] + e["degraded"] + e["dead"] + e["unknown"] + e["filtered"],
                e["duplicates_possible"],
            )
            for e in self.result["epochs"]
        ]  # fmt: skip
        expected = self.expected()
        if self.schedule.lane == BACKFILL:
            # Its accounts are resolutions, one per row.
            rows = len(ledger_log.rows_of(self.ledger, "resolution", ("letter_id",)))
            epochs = [Epoch("backfill", rows == len(expected), rows, rows)]
        accounts = Accounts(
            ledger_log.sent(self.ledger), ledger_log.letters(self.ledger), epochs,
            ledger_log.halves(self.ledger),
        )  # fmt: skip
        return judge(expected, [*self.kept, *self.copies()], accounts)


def _place(one: StoredMessage) -> tuple[str, bytes]:
    """With the body: a killed broker may have lost the end of its log, and go on from there."""
    return one.offset_message_id, one.body
