"""Two writes in one function of a stream: the second one of a query and epoch is refused."""

import contextlib
import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest

from rocket_sink import RocketSink
from rocket_sink.errors import CheckpointError, ConfigurationError, LedgerError
from rocket_sink.ledger.epoch_starts import begin_epoch, check_whole, note_refused_frame
from rocket_sink.ledger.path import resolve_path
from rocket_sink.options import SinkOptions
from rocket_sink.spark import foreach_batch
from rocket_sink.spark.checks.context import StreamRun, run_of
from rocket_sink.spark.foreach_batch import BatchWriter, _once_a_run, _Start
from rocket_sink.testing import FakeCluster
from tests.clusters import scripted_cluster
from tests.ledger.values import claimant
from tests.ledger.views import view_rows
from tests.spark.streams import run

cluster = scripted_cluster(1, t=1)


class World(NamedTuple):
    """A topic, and a folder with a ledger and with the input and checkpoints of queries."""

    spark: Any
    cluster: FakeCluster
    folder: Path

    def sink(self, app_id=""):
        ledger = str(self.folder / "ledger")
        servers = self.cluster.name_server
        return RocketSink(nameServer=servers, topic="t", ledger=ledger, appId=app_id)

    def put(self, file, *bodies):
        """Add a file with these rows to the input."""
        (self.folder / "in").mkdir(exist_ok=True)
        lines = [json.dumps({"body": body}) for body in bodies]
        (self.folder / "in" / file).write_text("\n".join(lines))

    def stream(self, function):
        """Run the epochs that there is input for; without any input the rows are a, b."""
        if not (self.folder / "in").exists():
            self.put("1.json", "a", "b")
        rows = self.spark.readStream.schema("body STRING").json(str(self.folder / "in"))
        run(rows.writeStream.foreachBatch(function), self.folder / "checkpoint")

    def sent(self):
        return sorted(message.body for message in self.cluster.messages("t"))

    def view(self, select):
        rows = view_rows(str(self.folder / "ledger"), select)
        return sorted(tuple(vars(row).values()) for row in rows)


@pytest.fixture
def world(spark, cluster, tmp_path):
    return World(spark, cluster, tmp_path)


def in_thread(function, *arguments):
    """Call the function in a thread that lacks Spark's local properties."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *arguments).result()


@pytest.mark.spark
def test_a_frame_after_one_that_failed_is_refused(world):
    """If the ledger had the second frame, the next run would skip the first in silence."""
    sink = world.sink()

    def epoch(frame, number):
        for _ in range(2):
            broken = frame.selectExpr("cast(raise_error(body) AS string) AS body")
            with pytest.raises(Exception, match="USER_RAISED_EXCEPTION"):
                sink.write_batch(broken, number)
        sink.write_batch(frame, number)

    with pytest.raises(Exception, match="failed with another frame"):
        world.stream(epoch)
    assert world.sent() == []
    world.stream(sink.write_batch)
    assert world.sent() == [b"a", b"b"]


@pytest.mark.spark
def test_a_thread_without_sparks_properties_knows_the_query_by_its_frame(world):
    sink, named = world.sink(), world.sink("job")
    runs = []

    def epoch(frame, number):
        runs.append(in_thread(run_of, frame.selectExpr("upper(body) AS body")))
        for each in (sink, named):
            in_thread(each.write_batch, frame, number)
        with pytest.raises(ConfigurationError, match="nothing of this frame is sent"):
            in_thread(sink.write_batch, frame.limit(1), number)

    def foreign(frame, number):
        in_thread(named.write_batch, world.spark.createDataFrame([("c",)], "body STRING"), number)

    world.stream(epoch)
    assert world.sent() == [b"a", b"a", b"b", b"b"]
    (of_query,) = runs
    rows = world.view("SELECT query_id, run_id FROM epochs WHERE lane IS NOT NULL")
    assert {*rows} == {(of_query.query_id, of_query.run_id), ("job", of_query.run_id)}
    assert claimant(sink.options.ledger, "job") == of_query.query_id
    world.put("2.json", "d")
    with pytest.raises(Exception, match="nothing tells which streaming query"):
        world.stream(foreign)
    assert run_of(world.spark.range(1)) == StreamRun()


def test_what_counts_as_the_second_write_of_an_epoch(tmp_path):
    place = resolve_path(tmp_path / "l")
    first: Any = object()

    def write(run="r", epoch=0, ledger="l", query="q", frame=first):
        with _once_a_run(_Start(run, place, ledger), query, epoch, frame):
            pass

    for run_id, query in (("r", "q"), ("", "by hand")):
        with pytest.raises(KeyError), _once_a_run(_Start(run_id, place, "l"), query, 0, first):
            with pytest.raises(ConfigurationError, match="epoch 0"):
                # The write runs beside the first, as from another thread.
                write(run_id, query=query)
            raise KeyError
        with pytest.raises(CheckpointError, match="has one frame of the epoch 0"):
            check_whole(place, query, 0, "at_least_once", is_held=True)
    failing = patch.object(foreach_batch, "note_refused_frame", side_effect=LedgerError("full"))
    with failing, pytest.raises(LedgerError, match=r"a new appId.* No later run knows this: full"):
        write(frame=object())
    with pytest.raises(ConfigurationError, match="failed with another frame"):
        write(frame=object())
    write()  # A write that failed is tried again.
    # A write whose run is not known may be of the same run.
    for run_id in ("r", ""):
        with pytest.raises(ConfigurationError, match="nothing of this frame is sent"):
            write(run=run_id)
    for another in ({"run": "s"}, {"ledger": "m"}, {"query": "p"}, {"run": "s", "epoch": 1}):
        write(**another)
    with pytest.raises(ConfigurationError, match="or a later one"):
        write(run="s")  # The write is late: Delta has a later epoch.
    write(query="by hand", run="", frame=object())
    for run_id in ("r", ""):
        with pytest.raises(ConfigurationError):
            write(query="by hand", run=run_id)
    write(query="by hand", run="", epoch=1)


@pytest.mark.parametrize(
    ("is_classic", "app_id", "ledger", "stream", "query"),
    [
        (True, "", "/l", StreamRun("q"), "q"), (True, "a", "", StreamRun("q", "r"), "a"),
        (True, "a", "", StreamRun(), "a"), (False, "a", "", StreamRun(), "a"),
        (True, "", "", StreamRun(), "nothing tells which streaming query"),
        (True, "a", "", StreamRun(is_unclear=True), "nothing tells which streaming query"),
        (True, "a", "", StreamRun("q", "refused"), "inside the input"),
        (False, "a", "/l", StreamRun(), "over Spark Connect cannot use a ledger"),
        (False, "", "", StreamRun(), "tells it no query id"),
    ],
)  # fmt: skip
def test_the_name_of_the_query_that_writes(monkeypatch, is_classic, app_id, ledger, stream, query):
    monkeypatch.setattr(foreach_batch, "refused_runs", {"refused": "a ledger inside the input"})
    options = {"nameServer": "n", "ledger": ledger, "appId": app_id}
    spark: Any = SimpleNamespace(_jsparkSession=object() if is_classic else None)
    name = partial(BatchWriter(SinkOptions.parse(options))._query_of, spark, stream)
    if len(query) == 1:
        assert name() == query
    else:
        with pytest.raises(ConfigurationError, match=query):
            name()


@pytest.mark.parametrize(
    ("begun", "delivery", "is_held", "is_refused"),
    [("at_least_once", "effectively_once", False, True),
     ("at_least_once", "effectively_once", True, False),
     ("transactional", "at_least_once", True, True),
     ("transactional", "transactional", True, False)],
)  # fmt: skip
def test_an_epoch_goes_on_with_the_delivery_of_its_begin(
    begun, delivery, is_held, is_refused, tmp_path
):
    """Another delivery gives the rows other ids, and commits no half messages."""
    place = resolve_path(tmp_path)
    begin_epoch(place, "q", 5, begun)
    if is_refused:
        note_refused_frame(place, "q", 5)
    wanted = pytest.raises(CheckpointError, match=f"q was begun with delivery={begun}, and is not")
    with wanted if is_refused else contextlib.nullcontext():
        check_whole(place, "q", 5, delivery, is_held=is_held)
