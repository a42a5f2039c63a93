"""A ledger in a store that only Spark knows (oss:, obs:, dbfs:): some uses work, others refuse.

A file system of Hadoop's gives local files the scheme `oss`.
"""

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from rocket_sink import Ledger
from rocket_sink.ledger.driver.fold import fold
from rocket_sink.ledger.path import resolve_path
from rocket_sink.ledger.transport.handed import RowsInMemory, spool_handed
from rocket_sink.options import SinkOptions
from rocket_sink.spark.backfill.backfill import Backfill
from tests.clusters import scripted_cluster
from tests.ledger.values import accounts, context

from .lanes import LANES

pytestmark = [pytest.mark.spark, pytest.mark.timeout(1800)]

LEDGER = "oss://bucket/data/ledger"


@pytest.fixture(scope="module")
def store(spark, tmp_path_factory):
    """Return the folder that `oss://bucket/data` shows, with a source of 100 rows."""
    folder = tmp_path_factory.mktemp("oss")
    link = "fs.viewfs.mounttable.bucket.link./data"
    spark.sparkContext._jsc.hadoopConfiguration().set(link, f"file://{folder}")
    (folder / "source").mkdir()
    bodies = [None if number % 4 == 0 else str(number) for number in range(100)]
    table = pa.table({"body": bodies, "sharding_key": [f"k{number}" for number in range(100)]})
    pq.write_table(table, folder / "source" / "rows.parquet")
    return folder


cluster = scripted_cluster(1, t=4)


def play(spark, cluster, store, checkpoint, lane, **more):
    options = {"nameServer": cluster.name_server, "topic": "t", "ledger": LEDGER,
               "sendMsgTimeout": 60_000, **more}  # fmt: skip
    if lane == "backfill":
        with Backfill(spark, SinkOptions.parse(options)) as work:
            work.plan()
    else:
        run = next(known_lane.run for known_lane in LANES if known_lane.name == lane)
        run(spark, store / "source", checkpoint, options)


def test_all_lanes_work(spark, cluster, store, tmp_path):
    for lane in LANES:
        play(spark, cluster, store, tmp_path / lane.name, lane.name)
    assert len(cluster.messages("t")) == 75 * len(LANES)
    ledger = Ledger(LEDGER)
    ledger.sync(spark)
    assert ledger.unfolded_epochs() == 0
    assert ledger.dead_letters(spark).count() == 25 * len(LANES)
    epochs = ledger.epochs(spark).collect()
    sums = [(e.rows_in, e.acked, e.dead, e.adds_up, e.missing_rows) for e in epochs]
    assert sums == [(100, 75, 25, True, 0)] * len(LANES), epochs
    # Hadoop wrote local files, which delta-rs reads by their own paths.
    rows = DeltaTable(store / "ledger").to_pyarrow_dataset().to_table()
    tasks = rows.filter(pc.is_valid(rows["partition"]))
    assert pc.sum(tasks["rows_in"]).as_py() == 100 * len(LANES)
    assert sorted(path.name for path in (store / "ledger").glob("_*")) == ["_delta_log"]


def spooled(epoch):
    ctx = context(query_id="folds", epoch=epoch)
    rows = RowsInMemory(ctx)
    rows.append(accounts(ctx, acked=1))
    handed = rows.finish()
    spool_handed(resolve_path(LEDGER), [handed])


def folded(spark):
    rows = Ledger(LEDGER).rows(spark).where("query_id = 'folds'")
    return sorted(row.epoch for row in rows.collect())


@pytest.mark.parametrize("step", ["manifest", "append", "appended", "delete", "deleted"])
def test_a_killed_fold_of_the_drivers_folder_is_completed(
    spark, store, tmp_path, monkeypatch, step
):
    before = folded(spark) if Ledger(LEDGER).exists(spark) else []
    hosts = [str(tmp_path / "one"), str(tmp_path / "two")]

    def die(at):
        if at == step:
            raise KeyboardInterrupt

    for epoch, host in enumerate(hosts):
        monkeypatch.setenv("XDG_STATE_HOME", host)
        spooled(epoch)
        with pytest.raises(KeyboardInterrupt):
            fold(spark, LEDGER, on_step=die)
    for host in hosts:
        monkeypatch.setenv("XDG_STATE_HOME", host)
        fold(spark, LEDGER)
    assert folded(spark) == sorted([*before, 0, 1])


@pytest.mark.parametrize(
    ("lane", "what", "more"),
    [
        *((lane, "", {"ledgerVia": "spool"}) for lane in ("foreach", "source_batch")),
        *((lane, "", {"ordering": "strict"}) for lane in ("foreach", "source_stream")),
        ("backfill", "", {}), ("foreach_batch", "ordering=strict", {"ordering": "strict"}),
        ("write", "ordering=strict", {"ordering": "strict"}),
        ("write", "onPendingKey=hold", {"ordering": "best_effort", "onPendingKey": "hold"}),
        ("foreach_batch", "delivery=effectively_once", {"delivery": "effectively_once"}),
        ("foreach_batch", "appId", {"appId": "a"}),
    ],
)  # fmt: skip
def test_the_others_say_why(spark, cluster, store, tmp_path, lane, what, more):
    with pytest.raises(Exception, match="pyarrow, by which tasks write them, has no file") as said:
        play(spark, cluster, store, tmp_path, lane, **more)
    assert "All lanes can use this ledger" in str(said.value)
    if what:
        assert f"{what}: small files beside the table" in str(said.value)
    assert not cluster.messages("t")
    assert not list((store / "ledger").glob("_spool*"))
