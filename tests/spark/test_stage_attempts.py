"""A stage that Spark runs again: its tasks do not know it, so the driver counts their rows."""

import contextlib
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from rocket_sink import Ledger, register
from rocket_sink.spark import foreach_batch
from tests.clusters import scripted_cluster
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


cluster = scripted_cluster(1, t=1)


@pytest.mark.parametrize("is_lost", [True, False])
@pytest.mark.parametrize(
    "lane", ["write", "foreach_batch", "foreach", "source_stream", "source_batch"]
)
def test_rows_of_a_stage_that_ran_again_are_counted(
    spark, cluster, tmp_path, monkeypatch, lane, is_lost
):
    """Tasks of the last three lanes hand their ledger rows over. A failed task takes its rows with
    it, so only the stage tells of its sends."""
    folder, ledger = str(tmp_path / "in"), Ledger(tmp_path / "ledger")
    spark.range(0, ROWS, 1, 2).selectExpr("cast(id AS string) AS body").write.parquet(folder)
    options = {"nameServer": cluster.name_server, "topic": "t", "ledger": ledger.path}
    if lane not in ("write", "foreach_batch"):
        options["ledgerVia"] = "spark"
        register(spark, ledger=ledger.path)
    if lane in ("write", "source_batch"):
        frame = shuffled(spark, spark.read.parquet(folder), tmp_path, is_lost=is_lost)
        write(lane, frame, options)
    else:
        stream = spark.readStream.schema("body STRING").parquet(folder)
        frame = shuffled(spark, stream, tmp_path, is_lost=is_lost)
        # The count of foreachBatch is in the commit of the sends.
        die = Mock(side_effect=KeyError("died after the append"))
        monkeypatch.setattr(foreach_batch, "keep_small", die)
        refusal = pytest.raises(Exception, match="died after the append")
        with refusal if lane == "foreach_batch" else contextlib.nullcontext():
            run(stream_writer(lane, frame, options), tmp_path / "ck")
    ledger.sync(spark)
    # A batch by the data source runs in a process that cannot ask Spark, so its rows may be any.
    doubled = ROWS if is_lost or lane == "source_batch" else 0
    expected = [(ROWS, ROWS, doubled, 4, True, True)]
    assert [tuple(vars(row).values()) for row in view_rows(ledger.path, SELECT)] == expected
