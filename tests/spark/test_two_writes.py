"""Two writes in one function of a stream: each is sent, and each has its own accounts."""

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rocket_sink import Ledger, RocketSink, register
from rocket_sink.commands.common.stream_run import Source, finish, run_batch
from rocket_sink.errors import CheckpointError, ConfigurationError
from rocket_sink.ledger.epoch_starts import begin_epoch, check_whole, note_refused_frame, query_of
from rocket_sink.ledger.path import resolve_path
from rocket_sink.options import SinkOptions
from rocket_sink.spark import foreach_batch
from rocket_sink.spark.context import StreamRun, run_of
from rocket_sink.spark.foreach_batch import BatchWriter, _once_a_run, _Start
from rocket_sink.testing import FakeCluster
from tests.clusters import scripted_cluster
from tests.ledger.views import view_rows

pytestmark = pytest.mark.spark


cluster = scripted_cluster(1, one=1, two=1, scope="module")


def stream(spark: Any, folder: Path, function: Callable[[Any, int], None]) -> None:
    """Run the epochs that the folder has input for; the first call makes one with the rows a, b."""
    if not (folder / "in").exists():
        (folder / "in").mkdir(parents=True)
        (folder / "in" / "1.json").write_text('{"body": "a"}\n{"body": "b"}\n')
    rows = spark.readStream.schema("body STRING").json(str(folder / "in"))
    writer = rows.writeStream.foreachBatch(function).trigger(availableNow=True)
    query = writer.option("checkpointLocation", str(folder / "checkpoint")).start()
    query.awaitTermination()


def in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call the function in a thread that lacks Spark's local properties."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *arguments).result()


def sent(cluster: FakeCluster, topic: str) -> list[bytes]:
    return sorted(message.body for message in cluster.messages(topic))


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
    with pytest.raises(Exception, match="Give each sink an appId of its own"):
        stream(spark, tmp_path / "a", writing())
    cluster.brokers[0].store.forget("one")
    stream(spark, tmp_path / "b", writing(one="first", two="second"))
    for topic in ("one", "two"):
        assert sorted(message.body for message in cluster.messages(topic)) == [b"a", b"b"]
    rows = view_rows(
        settings["ledger"], "SELECT query_id, acked FROM epochs WHERE lane IS NOT NULL"
    )
    assert {(row.query_id, row.acked) for row in rows} >= {("first", 2), ("second", 2)}


def test_the_second_frame_of_an_epoch_is_refused_in_any_thread(
    spark: Any, cluster: FakeCluster, tmp_path: Path
) -> None:
    for topic in ("one", "two"):
        cluster.brokers[0].store.forget(topic)
    sinks = [
        RocketSink(nameServer=cluster.name_server, ledger=str(tmp_path / "ledger"), appId=app_id)
        for app_id in ("job", "job-2")
    ]

    def of_topics(frame: Any, *topics: str) -> Any:
        return frame.selectExpr("*", f"explode(array{topics!r}) AS topic".replace(",)", ")"))

    def two_frames(frame: Any, number: int) -> None:
        for topic in ("one", "two"):
            in_thread(sinks[0].write_batch, of_topics(frame, topic), number)

    with pytest.raises(Exception, match="nothing of this frame is sent"):
        stream(spark, tmp_path, two_frames)
    assert (sent(cluster, "one"), sent(cluster, "two")) == ([b"a", b"b"], [])

    def one_frame(sink: RocketSink) -> Callable[[Any, int], None]:
        return lambda frame, number: sink.write_batch(of_topics(frame, "one", "two"), number)

    # The ledger has the epoch, but not all of its rows.
    with pytest.raises(Exception, match="has one frame of the epoch 0"):
        stream(spark, tmp_path, one_frame(sinks[0]))
    stream(spark, tmp_path, one_frame(sinks[1]))
    assert sent(cluster, "two") == [b"a", b"b"]


def test_a_frame_that_is_refused_beside_the_first_is_not_forgotten(
    spark: Any, cluster: FakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for topic in ("one", "two"):
        cluster.brokers[0].store.forget(topic)
    settings = {"nameServer": cluster.name_server, "ledger": str(tmp_path / "ledger")}
    one, two = (RocketSink(topic=topic, **settings) for topic in ("one", "two"))

    def two_frames(frame: Any, number: int) -> None:
        @contextlib.contextmanager
        def beside(*write: Any) -> Iterator[None]:
            with _once_a_run(*write):
                monkeypatch.setattr(foreach_batch, "_once_a_run", _once_a_run)
                with pytest.raises(ConfigurationError, match="nothing of this frame is sent"):
                    in_thread(two.write_batch, frame, number)
                yield

        monkeypatch.setattr(foreach_batch, "_once_a_run", beside)
        one.write_batch(frame, number)
        raise KeyError("the refused thread")

    with pytest.raises(Exception, match="the refused thread"):
        stream(spark, tmp_path, two_frames)
    assert (sent(cluster, "one"), sent(cluster, "two")) == ([b"a", b"b"], [])
    with pytest.raises(Exception, match="has one frame of the epoch 0"):
        stream(spark, tmp_path, two.write_batch)


def test_a_frame_after_one_that_failed_is_refused(
    spark: Any, cluster: FakeCluster, tmp_path: Path
) -> None:
    """If the ledger had the second frame, the next run would skip the first in silence."""
    cluster.brokers[0].store.forget("one")
    sink = RocketSink(nameServer=cluster.name_server, topic="one", ledger=str(tmp_path / "ledger"))

    def epoch(frame: Any, number: int) -> None:
        for _ in range(2):
            broken = frame.selectExpr("cast(raise_error(body) AS string) AS body")
            with pytest.raises(Exception, match="USER_RAISED_EXCEPTION"):
                sink.write_batch(broken, number)
        sink.write_batch(frame, number)

    with pytest.raises(Exception, match="failed with another frame"):
        stream(spark, tmp_path, epoch)
    assert sent(cluster, "one") == []
    stream(spark, tmp_path, sink.write_batch)
    assert sent(cluster, "one") == [b"a", b"b"]


def test_a_thread_without_sparks_properties_knows_the_query_by_its_frame(
    spark: Any, cluster: FakeCluster, tmp_path: Path
) -> None:
    cluster.brokers[0].store.forget("one")
    place = resolve_path(tmp_path / "ledger")
    sink = RocketSink(nameServer=cluster.name_server, topic="one", ledger=str(place))
    named = RocketSink(sink.options.with_(appId="job"))
    runs = []

    def epoch(frame: Any, number: int) -> None:
        runs.append(in_thread(run_of, frame.selectExpr("upper(body) AS body")))
        for each in (sink, named):
            in_thread(each.write_batch, frame, number)

    def foreign(frame: Any, number: int) -> None:
        in_thread(named.write_batch, spark.createDataFrame([("c",)], "body STRING"), number)

    stream(spark, tmp_path, epoch)
    assert sent(cluster, "one") == [b"a", b"a", b"b", b"b"]
    (run,) = runs
    select = "SELECT query_id, run_id FROM epochs WHERE lane IS NOT NULL"
    assert {tuple(vars(row).values()) for row in view_rows(str(place), select)} == {
        (run.query_id, run.run_id), ("job", run.run_id),
    }  # fmt: skip
    assert query_of(place, "job") == run.query_id
    (tmp_path / "in" / "2.json").write_text('{"body": "d"}\n')
    with pytest.raises(Exception, match="nothing tells which streaming query"):
        stream(spark, tmp_path, foreign)
    assert run_of(spark.range(1)) == StreamRun()


def test_a_sink_that_lives_on_begins_each_run_anew(
    spark: Any, cluster: FakeCluster, tmp_path: Path
) -> None:
    ledger = tmp_path / "ledger"
    sink = RocketSink(nameServer=cluster.name_server, topic="one", ledger=str(ledger), appId="job")

    def run(number: int) -> list[bytes]:
        """Run the epochs after adding a row; return the rows that were sent."""
        cluster.brokers[0].store.forget("one")
        (tmp_path / "in").mkdir(exist_ok=True)
        (tmp_path / "in" / f"{number}.json").write_text(json.dumps({"body": str(number)}))
        stream(spark, tmp_path, sink.write_batch)
        return sent(cluster, "one")

    assert [run(number) for number in range(3)] == [[b"0"], [b"1"], [b"2"]]
    # Cut the checkpoint back to its first epoch.
    for kind in ("commits", "offsets"):
        for file in (tmp_path / "checkpoint" / kind).iterdir():
            if file.name != "0":
                file.unlink()
    with pytest.raises(Exception, match="holds epochs up to 2"):
        run(3)
    shutil.rmtree(ledger)
    # The start makes a new ledger, in which the query claims its appId.
    assert run(4) == [b"1", b"2", b"3", b"4"]
    assert query_of(resolve_path(ledger), "job")


def test_what_counts_as_the_second_write_of_an_epoch(tmp_path: Path) -> None:
    place = resolve_path(tmp_path / "l")

    frame: Any = object()

    def write(
        run: str = "r", epoch: int = 0, ledger: str = "l", query: str = "q", frame: Any = frame
    ) -> None:
        with _once_a_run(_Start(run, place, ledger), query, epoch, frame):
            pass

    for run, query in (("r", "q"), ("", "by hand")):
        with pytest.raises(KeyError), _once_a_run(_Start(run, place, "l"), query, 0, frame):
            with pytest.raises(ConfigurationError, match="epoch 0"):
                write(run, query=query)  # The write runs beside the first, as from another thread.
            raise KeyError
    with pytest.raises(ConfigurationError, match="failed with another frame"):
        write(frame=object())
    write()  # A write that failed is tried again.
    # A write whose run is not known may be of the same run.
    for run in ("r", ""):
        with pytest.raises(ConfigurationError, match="nothing of this frame is sent"):
            write(run=run)
    for another in ({"run": "s"}, {"ledger": "m"}, {"query": "p"}, {"run": "s", "epoch": 1}):
        write(**another)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="or a later one"):
        write(run="s")  # The write is late: Delta has a later epoch.
    write(query="by hand", run="", frame=object())
    for run in ("r", ""):
        with pytest.raises(ConfigurationError):
            write(query="by hand", run=run)
    write(query="by hand", run="", epoch=1)


def test_a_ledger_is_refused_over_connect(tmp_path: Path) -> None:
    writer = BatchWriter(SinkOptions.parse({"nameServer": "n", "ledger": str(tmp_path)}))
    with pytest.raises(ConfigurationError, match="over Spark Connect cannot use a ledger"):
        writer._query_of(SimpleNamespace(), StreamRun())  # type: ignore[arg-type]


def test_an_epoch_with_a_refused_frame_is_whole_if_all_of_it_is_sent_again(tmp_path: Path) -> None:
    place = resolve_path(tmp_path)
    begin_epoch(place, "q", 5)
    check_whole(place, "q", 5, is_held=True)
    note_refused_frame(place, "q", 5)
    assert begin_epoch(place, "q", 5)
    for epoch, query in ((4, "q"), (5, "p")):
        check_whole(place, query, epoch, is_held=True)
    with pytest.raises(CheckpointError, match="has one frame of the epoch 5"):
        check_whole(place, "q", 5, is_held=True)
    check_whole(place, "q", 5, is_held=False)
    check_whole(place, "q", 5, is_held=True)


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
