"""A cell: a schedule that is played, with its rows, topic, folder, ledger and result."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from rocket_sink.cluster import LocalCluster
from rocket_sink.errors import NoRouteError
from rocket_sink.producer.admin.admin import Admin
from rocket_sink.wire.ids import offset_message_id
from tests.clusters import read_topic
from tests.damaged import damaged

from . import ledger_log
from . import schedule as schedules
from .files import write_rows, write_whole
from .judge import Copy, Epoch, judge

STAGED = ("topic_deleted", "checkpoint_deleted")
_WAITING = (*STAGED, "queues_changed")


@dataclass
class Cell:
    """A schedule in its own folder.

    Attributes:
        kept: copies that were read before their topic was deleted.
        result: the driver's report at the end.
    """

    schedule: schedules.Schedule
    folder: Path
    cluster: LocalCluster
    number: int
    kept: list[Copy] = field(default_factory=list)
    _kept_at: set[tuple[str, bytes]] = field(default_factory=set)
    result: dict[str, Any] = field(default_factory=dict)

    @property
    def topic(self):
        return f"crash-{self.folder.parent.name}-{self.number}"

    @property
    def ledger(self):
        return self.folder / "ledger"

    @property
    def batch(self):
        return self.schedule.lane in schedules.BATCHES

    @property
    def reached(self):
        """Whether a process has reached the schedule's moment."""
        return (self.folder / "reached.json").exists()

    @property
    def has_queues(self):
        """Whether all brokers have queues of the topic.

        A strict query that starts while a broker is away would ignore that broker for good.
        """
        strict = self.schedule.ordering == "strict"
        return not strict or any((self.ledger / "_notes" / "queues").glob("*/*.json"))

    def prepare(self):
        """Create the topic and the source files, and arm the point."""
        self.folder.mkdir(parents=True)
        self.create_topic()
        (self.folder / "source").mkdir()
        (self.folder / "later").mkdir()
        epochs = schedules.EPOCHS if self.schedule.lane in schedules.STREAMS else 1
        for epoch in range(epochs):
            late = self.schedule.event == "topic_deleted" and epoch == epochs - 1
            self._write(epoch, "later" if late else "source")
        if self.schedule.moment:
            armed = {"point": self.schedule.moment, "count": self.schedule.count}
            write_whole(self.folder / "armed.json", json.dumps(armed))

    def create_topic(self, queues=4):
        with Admin(nameServer=self.cluster.name_server) as admin:
            admin.create_topic(self.topic, queues=queues)

    def _write(self, epoch, folder):
        for file in range(schedules.FILES):
            numbers = range(epoch * schedules.ROWS, (epoch + 1) * schedules.ROWS)
            keys = [f"k{number % schedules.KEYS}-{file}" for number in numbers]
            columns = {}
            if self.schedule.ids == "own":
                rows = zip(keys, numbers, strict=True)
                columns["message_id"] = [f"{self.number:04X}{key}:{number}" for key, number in rows]
            if self.schedule.lane == schedules.BACKFILL:
                columns["number"] = numbers
            path = self.folder / folder / f"{epoch}-{file}.parquet"
            write_rows(path, keys, numbers, epoch, **columns)

    def plan(self):
        """Return the cell's part of a driver's plan."""
        return {
            "lane": self.schedule.lane, "folder": str(self.folder), "options": self._options(),
            "committer": self.schedule.committer,
            "staged": self.schedule.event in STAGED,
            # A stream settles its epoch at its next start. A decided write is not run again.
            "settles": self.batch and self.schedule.delivery == schedules.TRANSACTIONAL,
            **({"tries": 2} if self.schedule.event == "checkpoint_deleted" else {}),
            "waits_after_failure": self.schedule.event in _WAITING,
        }  # fmt: skip

    def _options(self):
        schedule = self.schedule
        options = {
            "nameServer": self.cluster.name_server, "topic": self.topic,
            "ledger": str(self.ledger),
            "delivery": schedule.delivery, "ordering": schedule.ordering,
            "requestMaxMessages": schedules.REQUEST_ROWS, "foldIntervalMs": 1000,
            "sendMsgTimeout": 90_000, "sendMsgMaxTimeoutPerRequest": 3000,
            "orderWaitMs": 200_000, "storedCheckTimeout": 300_000, "connectTimeoutMs": 3000,
            "pollNameServerInterval": 1000, "allowSpeculation": True,
        }  # fmt: skip
        if schedule.delivery == schedules.TRANSACTIONAL:
            # Half messages are sent in groups of a quarter of this: of as many as other requests.
            options["maxInFlight"] = 4 * schedules.REQUEST_ROWS
        if schedule.lane == schedules.BACKFILL:
            # A chunk holds a second's rows. This rate makes several, so that a kill interrupts one.
            options |= {"maxMessagesPerSecond": schedules.ROWS, "delivery": "at_least_once"}
        is_once = schedule.delivery == "effectively_once"
        is_named = schedule.lane == "write" or (self.batch and is_once)
        if is_named or schedule.event == "checkpoint_deleted":
            # A write is recognised by its appId as the one that died.
            options["appId"] = f"app-{self.number}"
        if is_once and schedule.is_made_again:
            options["replayCheck"] = "always"
        return options

    def take_late_files(self):
        for path in sorted((self.folder / "later").iterdir()):
            path.rename(self.folder / "source" / path.name)

    def expected(self):
        rows = set()
        for path in (self.folder / "source").iterdir():
            bodies = pq.read_table(path, columns=["body"])["body"].to_pylist()
            rows |= {ledger_log.row_of(body.encode()) for body in bodies}
        return rows

    def copies(self):
        """Return the copies that the topic holds now, without the kept ones.

        A broker that is killed after it has deleted a topic fills the topic's queues again from its
        commit log. A deleted topic stays away if no task has failed for want of it: then the later
        rows are dead letters, or of unknown outcome.
        """
        try:
            stored = list(read_topic(self.cluster.name_server, self.topic))
        except NoRouteError:
            if self.schedule.event != "topic_deleted":
                raise
            stored = []
        return [self._copy(message) for message in stored if _place(message) not in self._kept_at]

    def keep_copies(self):
        stored = list(read_topic(self.cluster.name_server, self.topic))
        self.kept = [self._copy(message) for message in stored]
        self._kept_at = {_place(message) for message in stored}

    def _copy(self, message):
        return Copy(
            ledger_log.row_of(message.body), message.message_id or "",
            (f"{message.store_host[0]}:{message.store_host[1]}", message.queue_id),
            message.queue_offset,
            offset_message_id(*message.store_host, message.prepared_transaction_offset),
            life=int(bool(self.kept)), torn=damaged(message),
        )  # fmt: skip

    def verdict(self):
        """Read topic and ledger, and judge them. Every process of the round has ended."""
        accounts, expected = (
            ledger_log.accounts(self.ledger, self.result["epochs"]),
            self.expected(),
        )
        if self.schedule.lane == schedules.BACKFILL:
            # A backfill's accounts are resolutions, one per row.
            rows = len(ledger_log.rows_of(self.ledger, "resolution", ("letter_id",)))
            backfill = Epoch("backfill", rows == len(expected), rows, rows)
            accounts = replace(accounts, epochs=[backfill])
        return judge(expected, [*self.kept, *self.copies()], accounts)


def _place(message):
    """Return the message's id and body.

    A killed broker may lose the end of its log and store other messages at the same offsets.
    """
    return message.offset_message_id, message.body
