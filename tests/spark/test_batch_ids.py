"""Batch writes with a `batchId`: they may be repeated, and a complete one is sent once."""

from typing import Any

import pytest

from rocket_sink import RocketSink, register
from rocket_sink.errors import CheckpointError
from rocket_sink.ledger.epoch_starts import NamedBatch
from rocket_sink.spark import foreach_batch
from rocket_sink.testing import FakeCluster
from tests.clusters import scripted_cluster
from tests.integration.lanes import write
from tests.ledger.views import view_rows

pytestmark = pytest.mark.spark

ROWS = 40
ID = "2026-11-28"


class World:
    """A topic, a ledger, and writes of one batch id."""

    def __init__(self, spark, cluster, folder):
        self.spark, self.cluster, self.ledger = spark, cluster, folder / "ledger"
        self.options: dict[str, Any] = {
            "nameServer": cluster.name_server, "topic": "t", "ledger": str(self.ledger),
            "storedCheckDelay": 200,
        }  # fmt: skip

    def frame(self, rows=ROWS):
        return self.spark.range(rows).selectExpr("concat('row ', id) AS body")

    def write(self, frame=None, batch_id=ID, **options):
        sink = RocketSink(**{**self.options, **options})
        return sink.write(self.frame() if frame is None else frame, batch_id=batch_id)

    def save(self, frame, **options):
        register(self.spark, ledger=str(self.ledger))
        write("source_batch", frame, {**self.options, "batchId": ID, **options})

    def die(self, owner, name, death, **options):
        """Write, and let the driver die in the function `name`."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, death)
            with pytest.raises(KeyError, match="the driver died"):
                self.write(**options)

    def sent(self):
        return len(self.cluster.messages("t"))


cluster = scripted_cluster(t=2)


@pytest.fixture
def world(spark, cluster, tmp_path):
    return World(spark, cluster, tmp_path)


def crash(*_, **__):
    raise KeyError("the driver died")


def sent_and_died(results, *_):
    results.write.format("noop").mode("overwrite").save()
    crash()


def test_a_write_that_died_goes_on(world):
    """At last the ledger has the rows, and the note lacks the summary."""
    for death in ((foreach_batch, "_append", sent_and_died), (NamedBatch, "end", crash)):
        world.die(*death, delivery="effectively_once")
    repeated = world.write(delivery="effectively_once")
    assert repeated.all_delivered and repeated.is_repeated
    assert (world.sent(), repeated.rows_in, repeated.duplicates_possible) == (ROWS, ROWS, 0)
    rows = view_rows(str(world.ledger), "SELECT sum(acked) AS acked FROM epochs")
    assert rows[0].acked == ROWS


@pytest.mark.parametrize("delivery", ["at_least_once", "effectively_once"])
def test_the_data_source_repeats_a_failed_write_and_no_complete_one(world, delivery):
    frame = world.frame().selectExpr("if(body = 'row 7', '', body) AS body")
    with pytest.raises(Exception, match="maxEpochFailures"):
        world.save(frame, delivery=delivery, maxEpochFailures=0)
    world.save(frame, delivery=delivery)
    sent = ROWS - 1 if delivery == "effectively_once" else 2 * (ROWS - 1)
    assert world.sent() == sent
    world.save(frame, delivery=delivery)
    assert world.sent() == sent
    with pytest.raises(CheckpointError, match=r'call was format\("rocketmq"\), and is sink.write'):
        world.write(frame, delivery=delivery)
    assert world.sent() == sent


def test_another_frame_is_refused(world):
    world.die(foreach_batch, "_append", sent_and_died)
    for frame, options, words in (
        (world.frame().where("body <> 'row 3'"), {}, r"for another frame \(.+\): plan was"),
        (world.frame().selectExpr("body", "body AS tags"), {}, "columns was struct<body:str"),
        (world.frame(), {"topic": "other"}, "topic was t, and is other"),
        (world.frame(), {"namespace": "n"}, "topic was t, and is n%t"),
        (world.frame(), {"namespaceV2": "n"}, "topic was t, and is n%t"),
        (world.frame(), {"columns": "keys=body"}, r"body was .*, \(\), and is .*'keys'"),
        (world.frame(), {"delivery": "effectively_once"}, "delivery was at_least_once, and is eff"),
    ):
        with pytest.raises(CheckpointError, match=words):
            world.write(frame, **options)
    assert world.sent() == ROWS


def test_a_complete_write_is_none_for_another_cluster(world):
    world.write()
    with FakeCluster(brokers=1) as other:
        other.create_topic("t", 2)
        with pytest.raises(CheckpointError, match="batchId for the name servers"):
            world.write(nameServer=other.name_server)
        _, port = other.name_server.split(":")
        named = world.cluster.name_server.replace("127.0.0.1", "localhost")
        assert world.write(nameServer=f"localhost:{port};{named}").is_repeated


def test_equal_plans_of_other_rows_are_refused(world, tmp_path):
    """The plan of a file source does not name its files, so folders and rows are compared."""
    first, second = (str(tmp_path / name) for name in "ab")
    for folder in (first, second):
        world.frame().write.parquet(folder)
    read = world.spark.read.parquet
    assert not world.write(read(first)).is_repeated
    with pytest.raises(CheckpointError, match=r": input was file:.*/a, and is file:.*/b"):
        world.write(read(second))
    world.frame(2).write.mode("append").parquet(first)
    with pytest.raises(CheckpointError, match="number of rows was 40, and is 42"):
        world.write(read(first))
    assert world.sent() == ROWS
