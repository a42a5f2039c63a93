"""Replays whose rows have other ids than before, on real Spark: their doubles are counted."""

import json
import shutil
import time
import uuid
from collections import Counter
from threading import Thread

import pytest
from pyspark import TaskContext

from rocket_sink import Ledger, register
from tests.clusters import scripted_cluster
from tests.integration.lanes import stream_writer, write
from tests.ledger.views import view_rows
from tests.spark.streams import run

pytestmark = pytest.mark.spark
ROWS = 200
STREAMS = ["foreach_batch", "foreach", "source_stream"]


class World:
    """A query over some files, with its checkpoint, ledger and topic."""

    def __init__(self, spark, cluster, folder, lane):
        self.spark, self.cluster, self.folder, self.lane = spark, cluster, folder, lane
        self.delivery, self.rows = "effectively_once", 0
        (folder / "in").mkdir()
        self.add()

    def add(self):
        """Add rows for the next epoch."""
        numbers = range(self.rows, self.rows + ROWS)
        rows = [json.dumps({"n": f"{number:04}"}) for number in numbers]
        (self.folder / "in" / f"{self.rows}.json").write_text("\n".join(rows))
        self.rows += ROWS

    def run(self, partitions, body="n AS body", *, fails=False):
        """Send the rows from so many partitions. If `fails`, the last partition fails once another
        has sent messages."""
        options = {
            "nameServer": self.cluster.name_server, "topic": "t", "gatherMaxDelayMs": "0",
            "ledger": str(self.folder / "ledger"), "delivery": self.delivery,
        }  # fmt: skip
        is_stream = self.lane in (*STREAMS, "packs")
        reader = self.spark.readStream if is_stream else self.spark.read
        rows = reader.schema("n STRING").json(str(self.folder / "in")).repartition(partitions)
        rows = rows.selectExpr(body)
        if not is_stream:
            options["appId"] = "load"

        sent = self.folder / "sent"

        def fail(batches):
            yield from batches
            task = TaskContext.get()
            if fails and task is not None and task.partitionId() == partitions - 1:
                while not sent.exists():
                    time.sleep(0.05)
                raise ValueError("broken")

        rows = rows.mapInArrow(fail, "body STRING")
        if self.lane.startswith("source"):
            register(self.spark, ledger=options["ledger"])
        if is_stream:
            run(stream_writer(self.lane, rows, options), self.folder / "checkpoint")
        else:
            write(self.lane, rows, options)

    def fail(self, partitions, body="n AS body"):
        sent = len(self.cluster.messages("t"))
        Thread(target=self._await_rows, args=(sent,), daemon=True).start()
        with pytest.raises(Exception, match="broken"):
            self.run(partitions, body, fails=True)

    def _await_rows(self, sent):
        while len(self.cluster.messages("t")) == sent:
            time.sleep(0.05)
        (self.folder / "sent").touch()

    def doubled(self):
        """Return how many rows are stored twice or more; each is stored once at least."""
        counts = Counter(message.body[:4] for message in self.cluster.messages("t"))
        assert len(counts) == self.rows
        return sum(count > 1 for count in counts.values())

    def counted(self):
        ledger = Ledger(str(self.folder / "ledger"))
        ledger.sync(self.spark)
        select = "SELECT sum(duplicates_possible) AS rows FROM epochs"
        return int(view_rows(ledger.path, select)[0].rows)

    def check_doubles(self):
        """Check that rows are doubled, and that the ledger counts them all."""
        assert 0 < self.doubled() <= self.counted() <= ROWS


cluster = scripted_cluster(1, t=4)


@pytest.fixture
def world(spark, cluster, tmp_path, lane):
    return World(spark, cluster, tmp_path, lane)


@pytest.mark.parametrize(
    ("lane", "before", "after"),
    [
        ("foreach_batch", 8, 2), ("foreach", 2, 6), ("source_stream", 2, 6), ("write", 2, 6),
        *((lane, 4, 4) for lane in (*STREAMS, "write")),
    ],
)  # fmt: skip
def test_a_replay_with_other_partitions_counts_its_doubles(world, before, after):
    world.fail(before)
    world.run(after)
    if before == after:
        assert (world.doubled(), world.counted()) == (0, 0)
    else:
        world.check_doubles()


@pytest.mark.parametrize(
    ("lane", "is_restored"), [("foreach_batch", True), ("foreach_batch", False), ("foreach", True)]
)
def test_a_ledger_from_a_backup_counts_doubles_of_the_pending_epoch(world, is_restored):
    world.run(2)
    assert world.counted() == 0
    ledger, backup = world.folder / "ledger", world.folder / "backup"
    shutil.copytree(ledger, backup)
    world.add()
    world.run(2)
    world.add()
    world.fail(2)
    if is_restored:
        shutil.rmtree(ledger)
        backup.rename(ledger)
        world.run(2)
        world.check_doubles()
    else:
        world.run(2)
        assert (world.doubled(), world.counted()) == (0, 0)


@pytest.mark.parametrize("lane", ["write", "source_batch"])
def test_a_replay_with_the_time_in_a_batch_counts_its_doubles(world):
    world.fail(2, "concat(n, ' ', cast(now() AS string)) AS body")
    world.run(2, "concat(n, ' ', cast(now() AS string)) AS body")
    world.check_doubles()


@pytest.mark.parametrize(
    ("lane", "delivery"),
    [
        ("foreach_batch", "at_least_once"), ("foreach_batch", "effectively_once"),
        ("foreach", "effectively_once"), ("source_stream", "at_least_once"),
        ("packs", "at_least_once"),
    ],
)  # fmt: skip
def test_a_copied_checkpoint_with_another_query_id_counts_its_doubles(world, delivery):
    """Spark 4.0 and 4.1 give a checkpoint without `metadata` a new id."""
    world.delivery = delivery
    world.fail(2)
    checkpoint = world.folder / "checkpoint"
    (checkpoint / "metadata").write_text(json.dumps({"id": str(uuid.uuid4())}))
    (checkpoint / ".metadata.crc").unlink(missing_ok=True)
    world.run(2)
    world.check_doubles()
