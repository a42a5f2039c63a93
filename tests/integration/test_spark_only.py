"""A ledger in a store that only Spark knows (oss:, obs:, dbfs:): what works, and what says no.

A view of Hadoop's gives local files the scheme `oss`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from rocket_sink import Ledger
from rocket_sink.options import SinkOptions
from rocket_sink.spark.backfill.backfill import Backfill
from rocket_sink.testing import FakeCluster

from .lanes import LANES

pytestmark = [pytest.mark.spark, pytest.mark.timeout(1800)]

LEDGER = "oss://bucket/data/ledger"
WORK = ("foreach_batch", "write")
OPTIONS: list[tuple[str, str, dict[str, str]]] = [
    ("foreach_batch", "ordering=strict", {"ordering": "strict"}),
    ("write", "ordering=strict", {"ordering": "strict"}),
    ("write", "onPendingKey=hold", {"ordering": "best_effort", "onPendingKey": "hold"}),
    ("foreach_batch", "delivery=effectively_once", {"delivery": "effectively_once"}),
    ("foreach_batch", "appId", {"appId": "a"}),
]


@pytest.fixture(scope="module")
def store(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that `oss://bucket/data` shows, with a source of 100 rows."""
    folder = tmp_path_factory.mktemp("oss")
    link = "fs.viewfs.mounttable.bucket.link./data"
    spark.sparkContext._jsc.hadoopConfiguration().set(link, f"file://{folder}")
    (folder / "source").mkdir()
    bodies = [None if number % 4 == 0 else str(number) for number in range(100)]
    keys = [f"k{number}" for number in range(100)]
    table = pa.table({"body": bodies, "sharding_key": keys})
    pq.write_table(table, folder / "source" / "rows.parquet")
    return folder


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster(brokers=1) as fake:
        fake.create_topic("t")
        yield fake


def play(
    spark: Any, cluster: FakeCluster, store: Path, checkpoint: Path, lane: str, **more: str
) -> None:
    options = {"nameServer": cluster.name_server, "topic": "t", "ledger": LEDGER,
               "sendMsgTimeout": 60_000, **more}  # fmt: skip
    if lane == "backfill":
        with Backfill(spark, SinkOptions.parse(options)) as work:
            work.plan()
    else:
        run = next(one.run for one in LANES if one.name == lane)
        run(spark, store / "source", checkpoint, options)


def test_lanes_that_need_no_files_work(
    spark: Any, cluster: FakeCluster, store: Path, tmp_path: Path
) -> None:
    for lane in WORK:
        play(spark, cluster, store, tmp_path, lane)
    assert len(cluster.messages("t")) == 150
    Ledger(LEDGER).sync(spark)
    assert Ledger(LEDGER).dead_letters(spark).count() == 50
    # Hadoop's view wrote local files: delta-rs reads them as what they are.
    rows = DeltaTable(store / "ledger").to_pyarrow_dataset().to_table()
    epochs = rows.filter(pc.equal(rows["kind"], "epoch"))
    # `sink.write` has a row that confirms its only epoch, beside those of its tasks.
    confirmed = epochs.filter(pc.is_valid(epochs["num_input_rows"]))
    assert confirmed["rows_in"].to_pylist() == [100]
    assert pc.sum(epochs["rows_in"]).as_py() == 200 + 100
    assert sorted(path.name for path in (store / "ledger").glob("_*")) == ["_delta_log"]


@pytest.mark.parametrize(
    ("lane", "what", "more"),
    [
        *((lane.name, "", {}) for lane in LANES if lane.name not in WORK),
        ("backfill", "", {}),
        *OPTIONS,
    ],
)
def test_the_others_say_why(
    spark: Any, cluster: FakeCluster, store: Path, tmp_path: Path,
    lane: str, what: str, more: dict[str, str],
) -> None:  # fmt: skip
    with pytest.raises(Exception, match="pyarrow, by which tasks write them, has no file") as said:
        play(spark, cluster, store, tmp_path, lane, **more)
    assert "foreachBatch and sink.write can use this ledger" in str(said.value)
    if what:
        assert f"{what}: small files beside the table" in str(said.value)
    assert not cluster.messages("t")
    assert not list((store / "ledger").glob("_spool*"))
