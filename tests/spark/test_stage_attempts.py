"""A stage that Spark runs again: its tasks do not know it, so the driver counts their rows."""

import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from rocket_sink import Ledger, RocketSink, register
from rocket_sink.spark import foreach_batch
from rocket_sink.testing import FakeCluster
from tests.integration.lanes import stream_writer, write
from tests.ledger.views import view_rows
from tests.spark.streams import run

pytestmark = pytest.mark.spark
ROWS = 40
SELECT = "SELECT rows_in, acked, duplicates_possible, partitions, confirmed, adds_up FROM epochs"


def shuffled(spark, frame, folder, *, is_lost):
    """Return the rows after a shuffle. If `is_lost`, the first task deletes the shuffle's files,
    as if their executor was lost, so later tasks fail and their stage runs again."""
    manager = spark.sparkContext._jvm.org.apache.spark.SparkEnv.get().blockManager()
    folders = [str(each) for each in manager.diskBlockManager().localDirsString()]
    flag, began_s = folder / "lost", time.time() - 1

    def lose(batches):
        for batch in batches:
            if not flag.exists():
                flag.touch()
                for file in (f for each in folders for f in Path(each).rglob("shuffle_*")):
                    if file.stat().st_mtime >= began_s:
                        file.unlink()
            yield batch

    rows = frame.repartition(4)
    return rows.mapInArrow(lose, "body STRING") if is_lost else rows


@pytest.mark.parametrize("is_lost", [True, False])
def test_rows_of_a_stage_that_ran_again_are_counted(spark, tmp_path, monkeypatch, is_lost):
    path, folder = str(tmp_path / "ledger"), tmp_path / "in"
    rows = spark.range(0, ROWS, 1, 2).selectExpr("cast(id AS string) AS body")
    rows.write.parquet(str(folder))
    expected = [(ROWS, ROWS, ROWS if is_lost else 0, 4, True, True)]
    with FakeCluster(brokers=1) as cluster:
        cluster.create_topic("t", 1)
        sink = RocketSink(nameServer=cluster.name_server, topic="t", ledger=path)
        summary = sink.write(shuffled(spark, rows, tmp_path, is_lost=is_lost))
        assert summary.duplicates_possible == expected[0][2]
        assert [tuple(vars(row).values()) for row in view_rows(path, SELECT)] == expected
        (tmp_path / "lost").unlink(missing_ok=True)

        def epoch(frame, number):
            sink.write_batch(shuffled(spark, frame, tmp_path, is_lost=is_lost), number)

        # The count is in the commit of the sends.
        die = Mock(side_effect=KeyError("the driver died after the append"))
        monkeypatch.setattr(foreach_batch, "keep_small", die)
        stream = spark.readStream.schema("body STRING").parquet(str(folder))
        with pytest.raises(Exception, match="died after the append"):
            run(stream.writeStream.foreachBatch(epoch), tmp_path / "ck")
    assert [tuple(vars(row).values()) for row in view_rows(path, SELECT)] == 2 * expected


@pytest.mark.parametrize("is_lost", [True, False])
@pytest.mark.parametrize("lane", ["foreach", "source_stream", "source_batch"])
def test_rows_that_tasks_hand_over_are_counted_too(spark, tmp_path, lane, is_lost):
    """A failed task takes its ledger rows with it, so only the stage tells of its sends."""
    folder, rows = tmp_path / "in", spark.range(0, ROWS, 1, 2).selectExpr("cast(id AS string) body")
    rows.write.parquet(str(folder))
    ledger = Ledger(str(tmp_path / "ledger"))
    with FakeCluster(brokers=1) as cluster:
        cluster.create_topic("t", 1)
        options = {"nameServer": cluster.name_server, "topic": "t", "ledger": ledger.path}
        options["ledgerVia"] = "spark"
        register(spark, ledger=ledger.path)
        if lane == "source_batch":
            write(lane, shuffled(spark, rows, tmp_path, is_lost=is_lost), options)
        else:
            stream = spark.readStream.schema("body STRING").parquet(str(folder))
            frame = shuffled(spark, stream, tmp_path, is_lost=is_lost)
            run(stream_writer(lane, frame, options), tmp_path / "ck")
    ledger.sync(spark)
    # A batch by the data source runs in a process that cannot ask Spark, so its rows may be any.
    doubled = ROWS if is_lost or lane == "source_batch" else 0
    expected = [(ROWS, ROWS, doubled, 4, True, True)]
    assert [tuple(vars(row).values()) for row in view_rows(ledger.path, SELECT)] == expected
