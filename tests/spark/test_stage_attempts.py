"""A stage that Spark runs again: its tasks do not know it, so the driver counts their rows."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rocket_sink import RocketSink
from rocket_sink.testing import FakeCluster
from tests.ledger.views import view_rows

pytestmark = pytest.mark.spark
ROWS = 40
SELECT = "SELECT rows_in, acked, duplicates_possible, partitions, confirmed, adds_up FROM epochs"


def shuffled(spark: Any, frame: Any, folder: Path, *, is_lost: bool) -> Any:
    """Return the rows after a shuffle. If `is_lost`, the first task deletes the shuffle's files,
    as if their executor was lost, so later tasks fail and their stage runs again."""
    manager = spark.sparkContext._jvm.org.apache.spark.SparkEnv.get().blockManager()
    folders = [str(each) for each in manager.diskBlockManager().localDirsString()]
    flag, began_s = folder / "lost", time.time() - 1

    def lose(batches: Iterator[Any]) -> Iterator[Any]:
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
def test_rows_of_a_stage_that_ran_again_are_counted(
    spark: Any, tmp_path: Path, is_lost: bool
) -> None:
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

        def epoch(frame: Any, number: int) -> None:
            sink.write_batch(shuffled(spark, frame, tmp_path, is_lost=is_lost), number)

        stream = spark.readStream.schema("body STRING").parquet(str(folder))
        writer = stream.writeStream.foreachBatch(epoch).trigger(availableNow=True)
        writer.option("checkpointLocation", str(tmp_path / "ck")).start().awaitTermination()
    assert [tuple(vars(row).values()) for row in view_rows(path, SELECT)] == 2 * expected
