"""Two writes in one function of a stream: each is sent, and each has its own accounts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rocket_sink import Ledger, RocketSink, register
from rocket_sink.commands.common.stream_run import Source, finish, run_batch
from rocket_sink.errors import ConfigurationError
from rocket_sink.ledger.path import resolve_path
from rocket_sink.spark.foreach_batch import _once_a_run
from rocket_sink.testing import FakeCluster
from tests.ledger.views import view_rows

pytestmark = pytest.mark.spark


@pytest.fixture(scope="module")
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster(brokers=1) as fake:
        for topic in ("one", "two"):
            fake.create_topic(topic, 1)
        yield fake


def stream(spark: Any, folder: Path, function: Callable[[Any, int], None]) -> None:
    """Run one epoch with the rows a and b."""
    (folder / "in").mkdir()
    (folder / "in" / "1.json").write_text('{"body": "a"}\n{"body": "b"}\n')
    rows = spark.readStream.schema("body STRING").json(str(folder / "in"))
    writer = rows.writeStream.foreachBatch(function).trigger(availableNow=True)
    query = writer.option("checkpointLocation", str(folder / "checkpoint")).start()
    query.awaitTermination()


def test_two_sinks_of_one_ledger(spark: Any, cluster: FakeCluster, tmp_path: Path) -> None:
    settings = {"nameServer": cluster.name_server, "ledger": str(tmp_path / "ledger")}

    def writing(**app_ids: str) -> Callable[[Any, int], None]:
        sinks = [
            RocketSink(topic=topic, appId=app_ids.get(topic, ""), **settings)
            for topic in ("one", "two")
        ]

        def epoch(frame: Any, number: int) -> None:
            for sink in sinks:
                sink.write_batch(frame, number)

        return epoch

    # In one query, the second write would look like a repetition of the epoch.
    (tmp_path / "a").mkdir()
    with pytest.raises(Exception, match="Give each sink an appId of its own"):
        stream(spark, tmp_path / "a", writing())
    (tmp_path / "b").mkdir()
    cluster.brokers[0].store.forget("one")
    stream(spark, tmp_path / "b", writing(one="first", two="second"))
    for topic in ("one", "two"):
        assert sorted(message.body for message in cluster.messages(topic)) == [b"a", b"b"]
    rows = view_rows(
        settings["ledger"], "SELECT query_id, acked FROM epochs WHERE lane IS NOT NULL"
    )
    assert {(row.query_id, row.acked) for row in rows} >= {("first", 2), ("second", 2)}


def test_what_counts_as_the_second_write_of_an_epoch(tmp_path: Path) -> None:
    place, other = resolve_path(tmp_path / "l"), resolve_path(tmp_path / "m")

    def write(run: str = "r", epoch: int = 0, place: Any = place, query: str = "q") -> None:
        with _once_a_run(place, query, run, epoch):
            pass

    with pytest.raises(KeyError), _once_a_run(place, "q", "r", 0):
        with pytest.raises(ConfigurationError, match="epoch 0"):
            write()  # The write runs beside the first, as from another thread.
        raise KeyError
    write()  # A write that failed is tried again.
    with pytest.raises(ConfigurationError, match="skipped"):
        write()
    for another in ({"epoch": 1}, {"run": "s"}, {"place": other}, {"query": "p"}):
        write(**another)  # type: ignore[arg-type]
    # Without a run's id: an epoch that is run again, by hand or by a client of Connect.
    write(run="q")
    write(run="q")


def test_writes_by_the_data_source_are_no_epochs_of_the_stream(
    spark: Any, cluster: FakeCluster, tmp_path: Path
) -> None:
    path = str(tmp_path / "ledger")
    register(spark, ledger=path)

    def epoch(frame: Any, number: int) -> None:
        for body, topic in (("''", "one"), ("body", "two")):
            writer = frame.selectExpr(f"{body} AS body").write.format("rocketmq").mode("append")
            writer.options(nameServer=cluster.name_server, topic=topic, ledger=path).save()

    stream(spark, tmp_path, epoch)
    ledger = Ledger(path)
    ledger.sync(spark)
    select = "SELECT epoch, acked, dead, confirmed, adds_up, superseded_attempts FROM epochs"
    assert sorted(tuple(vars(row).values()) for row in view_rows(path, select)) == [
        (0, 0, 2, True, True, 0), (0, 2, 0, True, True, 0),
    ]  # fmt: skip
    # The second write's account does not replace that of the first, whose letters wait.
    assert ledger.dead_letters(spark).count() == 2


def test_a_batch_of_the_command_has_the_ledgers_counts(
    spark: Any, cluster: FakeCluster, tmp_path: Path
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "1.json").write_text('{"body": "a"}\n{"body": ""}\n')
    source = Source("json", str(tmp_path / "in"), None, {}, None, ())
    options = {
        "nameServer": cluster.name_server, "topic": "two", "ledger": str(tmp_path / "ledger"),
    }  # fmt: skip
    for _ in range(2):
        report = finish(spark, run_batch(spark, source, options, "datasource"), options)
        counts = {name: report.counts.get(name) for name in ("rows_in", "acked", "dead")}
        assert (report.rows_read, counts) == (2, {"rows_in": 2, "acked": 1, "dead": 1})
    assert sum(report.pending.values()) == 2
