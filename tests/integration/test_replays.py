"""Effectively once: batch writes that died or failed, and their next runs."""

from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rocket_sink import Ledger
from rocket_sink.spark import foreach_batch
from tests.clusters import scripted_cluster
from tests.ledger.views import view_rows

from .lanes import LANES

pytestmark = [pytest.mark.spark, pytest.mark.timeout(3600)]

ROWS = 600


cluster = scripted_cluster(t=4)


class World:
    """Writes of a source of rows, with their ledger and topic."""

    def __init__(self, spark, cluster, folder, lane):
        self.spark, self.cluster, self.folder, self.lane = spark, cluster, folder, lane
        self.ledger = Ledger(str(folder / "ledger"))
        (folder / "source").mkdir()
        # The source has each body twice, because equal rows are separate messages.
        bodies = [f"{i // 2:06d}" for i in range(ROWS)]
        table = pa.table({"body": bodies, "sharding_key": [f"k{i % 50}" for i in range(ROWS)]})
        pq.write_table(table, folder / "source" / "part.parquet")
        self.expected = Counter(body.encode() for body in bodies)

    def run(self, **options):
        settings = {
            "nameServer": self.cluster.name_server, "topic": "t",
            "ledger": str(self.folder / "ledger"), "delivery": "effectively_once", **options,
        }  # fmt: skip
        self.lane.run(self.spark, self.folder / "source", self.folder / "checkpoint", settings)

    def check_copies(self, copies):
        """Check that each row is stored so many times, each time under another id."""
        stored = self.cluster.messages("t")
        expected = Counter({body: copies * count for body, count in self.expected.items()})
        assert Counter(message.body for message in stored) == expected
        assert len({message.message_id for message in stored}) == copies * ROWS

    def found_stored(self):
        self.ledger.sync(self.spark)
        select = "SELECT sum(found_stored) AS found FROM ledger_rows WHERE kind = 'epoch'"
        return int(view_rows(self.ledger.path, select)[0].found or 0)


def test_a_batch_write_that_died_is_asked_for_by_its_app_id(spark, cluster, tmp_path, monkeypatch):
    """The next write of the same name asks brokers; the following one is new with equal rows."""
    world = World(spark, cluster, tmp_path, LANES[2])

    def sent_and_died(results, *_):
        results.collect()
        raise KeyError("the driver died")

    def died_at_the_end(*where, is_done):
        raise KeyError("the driver died")

    # The write dies once more, after the ledger's commit.
    for step, death in (("_append", sent_and_died), ("end_named_write", died_at_the_end)):
        with monkeypatch.context() as patch:
            patch.setattr(foreach_batch, step, death)
            with pytest.raises(KeyError, match="the driver died"):
                world.run(appId="load")
        world.check_copies(1)
    world.run(appId="load")
    world.check_copies(1)
    assert world.found_stored() == 2 * ROWS
    world.run(appId="load")
    world.check_copies(2)


@pytest.mark.parametrize(
    "lane", [lane for lane in LANES if not lane.streams], ids=lambda one: one.name
)
def test_a_batch_that_failed_is_asked_for_by_its_app_id(spark, cluster, tmp_path, lane):
    world = World(spark, cluster, tmp_path, lane)
    bad = pa.table({"body": [""], "sharding_key": ["k"]})
    pq.write_table(bad, tmp_path / "source" / "bad.parquet")
    with pytest.raises(Exception, match="maxEpochFailures"):
        world.run(appId="load", maxEpochFailures=0)
    world.check_copies(1)
    world.run(appId="load")
    world.check_copies(1)
    assert world.found_stored() == ROWS
    for options in ({"appId": "load"}, {}):
        world.run(**options)
    world.ledger.sync_fully(spark)
    world.check_copies(3)
    for folder in ("_notes/starts", "_spool"):
        assert [*(tmp_path / "ledger" / folder).rglob("[qw]-*")] == []
