"""Lineage of runs, judged by OpenLineage's published JSON schemas, in openlineage/."""

import importlib.metadata
import json
import os
import pickle
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import jsonschema
import pytest
import referencing
from pyspark.sql.types import StringType, StructField, StructType

pytest.importorskip("openlineage.client")

from rocket_sink.errors import DeliveryError
from rocket_sink.options import SinkOptions
from rocket_sink.spark import foreach_batch, lineage
from rocket_sink.spark.context import StreamRun
from rocket_sink.spark.datasource import RocketMQDataSource, TaskMessage, register
from rocket_sink.spark.foreach_batch import BatchWriter, _Sent
from rocket_sink.spark.sink import RocketSink
from rocket_sink.task.totals import TaskSummary
from rocket_sink.testing import FakeCluster
from tests.spark.test_listener import wait_for

SCHEMAS = [json.loads(p.read_text()) for p in (Path(__file__).parent / "openlineage").iterdir()]


def _of_another_patch(uri: str) -> referencing.Resource[Any]:
    """Return the stored schema of this name: older clients name an earlier patch of a facet."""
    schema = next(schema for schema in SCHEMAS if Path(schema["$id"]).name == Path(uri).name)
    assert Path(schema["$id"]).parent.name.rpartition("-")[0] in uri
    return referencing.Resource.from_contents(schema)


REGISTRY: referencing.Registry[Any] = referencing.Registry(
    retrieve=_of_another_patch
).with_contents((schema["$id"], schema) for schema in SCHEMAS)
RUNS = {"$ref": "https://openlineage.io/spec/2-0-2/OpenLineage.json#/$defs/RunEvent"}
DEADLINE_S = 120.0


class Collector(HTTPServer):
    """A collector that keeps what it gets, and answers while `answers` is set."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.answers = threading.Event()
        self.answers.set()
        super().__init__(("127.0.0.1", 0), _Handler)

    def of_runs(self) -> dict[str, list[dict[str, Any]]]:
        runs: dict[str, list[dict[str, Any]]] = {}
        for event in list(self.events):
            runs.setdefault(event["run"]["runId"], []).append(event)
        return runs


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        self.server.answers.wait(DEADLINE_S)
        self.server.events.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self.send_response(201)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    for name in [name for name in os.environ if name.startswith("OPENLINEAGE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(lineage, "emitters", [])
    with Collector() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("OPENLINEAGE_URL", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("OPENLINEAGE_NAMESPACE", "shop")
        yield server
        server.shutdown()


def judge(event: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator(RUNS, registry=REGISTRY).validate(event)
    (output,) = event["outputs"]
    for facet in [
        *output["facets"].values(), *output.get("outputFacets", {}).values(),
        *event["job"]["facets"].values(), event["run"]["facets"].get("errorMessage"),
    ]:  # fmt: skip
        if facet is not None:
            schema = {"$ref": facet["_schemaURL"]}
            jsonschema.Draft202012Validator(schema, registry=REGISTRY).validate(facet)


@pytest.mark.spark
def test_writes_and_queries_of_all_lanes_have_a_start_and_an_end(
    spark: Any, tmp_path: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Spark's own processes plan and commit the writes of a data source.
    for name in ("OPENLINEAGE_URL", "OPENLINEAGE_NAMESPACE"):
        monkeypatch.setitem(spark.sparkContext.environment, name, os.environ[name])
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "1.json").write_text('{"body": "one"}\n{"body": null}\n{"body": "two"}\n')
    rows = spark.readStream.schema("body STRING").json(str(tmp_path / "in"))
    with FakeCluster(brokers=1) as cluster:
        cluster.create_topic("flights", queues=1)
        sink = RocketSink(
            nameServer=cluster.name_server, topic="flights", ledger=str(tmp_path / "ledger")
        )
        register(spark, ledger=sink.options.ledger)
        options = {name: str(value) for name, value in sink.options.given().items()}
        runs = []
        for lane in (
            sink.stream(rows),
            rows.writeStream.foreachBatch(sink.write_batch),
            rows.writeStream.format("rocketmq").options(**options),
        ):
            place = str(tmp_path / f"checkpoint-{len(runs)}")
            query = lane.option("checkpointLocation", place).trigger(availableNow=True).start()
            assert query.awaitTermination(DEADLINE_S)
            runs.append(str(query.runId))
        (tmp_path / "in" / "2.json").write_text('{"body": "three"}\n{"body": "four"}\n')
        batches = rows.writeStream.foreachBatch(sink.write_batch).trigger(availableNow=True)
        query = batches.option("checkpointLocation", str(tmp_path / "checkpoint-1")).start()
        assert query.awaitTermination(DEADLINE_S)
        runs.append(str(query.runId))
        (tmp_path / "in" / "2.json").unlink()
        bad = RocketSink(sink.options.with_(max_epoch_failures=0))
        with pytest.raises(DeliveryError):
            bad.write(spark.createDataFrame([(None,)], "body STRING"))
        batch = spark.read.schema("body STRING").json(str(tmp_path / "in"))
        write = batch.write.format("rocketmq").mode("append").options(**options)
        write.save()
        with pytest.raises(Exception, match="maxEpochFailures=0"):
            write.option("maxEpochFailures", 0).save()
        wait_for(lambda: len(collector.events) >= 14)
    for event in collector.events:
        judge(event)
        (output,) = event["outputs"]
        assert (output["namespace"], output["name"]) == (
            f"rocketmq://{cluster.name_server}", "flights",
        )  # fmt: skip
        fields = output["facets"]["schema"]["fields"]
        assert [(field["name"], field["type"]) for field in fields] == [("body", "string")]
        assert event["job"]["namespace"] == "shop"
    by_run = collector.of_runs()
    for run in runs:
        start, end = by_run.pop(run)
        assert (start["eventType"], end["eventType"]) == ("START", "COMPLETE")
        assert end["outputs"][0]["outputFacets"]["outputStatistics"]["rowCount"] == 2
    assert [events[0]["eventType"] for events in by_run.values()] == ["START"] * 3
    bad_end, end, failed_end = (events[1] for events in by_run.values())
    assert bad_end["run"]["facets"]["errorMessage"]["message"].startswith("DeliveryError: ")
    assert end["outputs"][0]["outputFacets"]["outputStatistics"]["rowCount"] == 2
    assert [event["eventType"] for event in (bad_end, end, failed_end)] == [
        "FAIL", "COMPLETE", "FAIL",
    ]  # fmt: skip


@dataclass
class Frame:
    """The part of a frame that a writer needs before it sends."""

    schema: StructType
    sparkSession: Any


def test_each_run_of_a_query_by_foreach_batch_has_a_start(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [str(uuid.uuid4()) for _ in range(2)]
    writer = BatchWriter(SinkOptions.parse(nameServer="h:9876", topic="flights"))
    for name in ("check_reachable", "check_budget"):
        monkeypatch.setattr(foreach_batch, name, lambda *_: None)
    monkeypatch.setattr(writer, "_send", lambda *_: _Sent(list, bool))
    frame: Any = Frame(StructType([StructField("body", StringType())]), MagicMock())
    for run in runs:
        monkeypatch.setattr(foreach_batch, "run_of", lambda frame, run=run: StreamRun("query", run))
        for epoch in range(2):
            writer.write_epoch(frame, epoch)
        lineage.end(run, {"acked": 2})
    wait_for(lambda: len(collector.events) >= 4)
    events = [(event["run"]["runId"], event["eventType"]) for event in collector.events]
    assert events == [(run, kind) for run in runs for kind in ("START", "COMPLETE")]


def test_events_need_no_installed_metadata(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A source tree on the path has no metadata."""

    def metadata(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "metadata", metadata)
    options = SinkOptions.parse(nameServer="h:9876", topic="t")
    lineage.start(options, str(uuid.uuid4()), "write", StructType(), is_stream=False)
    wait_for(lambda: bool(collector.events))
    judge(collector.events[0])


@pytest.mark.parametrize("is_well", [True, False])
def test_a_batch_by_format_is_told_of_by_two_processes(
    collector: Collector, caplog: pytest.LogCaptureFixture, is_well: bool
) -> None:
    caplog.set_level("INFO", "rocket_sink.spark.console")
    source = RocketMQDataSource({"nameServer": "h:9876", "topic": "flights", "appId": "a"})
    planned = source.writer(StructType([StructField("body", StringType())]), False)
    assert [event["eventType"] for event in collector.events] == ["START"]
    writer = pickle.loads(pickle.dumps(planned))
    if is_well:
        writer.commit([TaskMessage("q", "r", TaskSummary(rows_in=3, acked=2, dead=1))])
    else:
        writer.abort([None])
    start, end = collector.events
    judge(end)
    assert start["run"]["runId"] == end["run"]["runId"]
    assert end["eventType"] == ("COMPLETE" if is_well else "FAIL")
    if is_well:
        text = f"the write a/{writer.run_id} ended: 3 rows in, 2 acknowledged, 1 dead letter;"
        assert text in caplog.text
        assert end["outputs"][0]["outputFacets"]["outputStatistics"]["rowCount"] == 2


def test_a_silent_collector_is_waited_for_by_the_first_process_only(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The collector takes connections, and answers no process of a batch by format."""
    collector.answers.clear()
    try:
        source = RocketMQDataSource({"nameServer": "h:9876", "topic": "flights"})
        began_s = time.monotonic()
        planned = source.writer(StructType([StructField("body", StringType())]), False)
        planned_s = time.monotonic()
        monkeypatch.setattr(lineage, "emitters", [])  # the other process has its own
        writer = pickle.loads(pickle.dumps(planned))
        writer.commit([TaskMessage("q", "r", TaskSummary(rows_in=1, acked=1))])
        ended_s = time.monotonic()
    finally:
        collector.answers.set()
    assert ended_s - planned_s < (planned_s - began_s) / 2
    wait_for(lambda: len(collector.events) >= 2)


class Schema:
    """The part of Spark's schema that events need."""

    fields = ()


def test_a_collector_that_is_down_costs_a_warning(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OPENLINEAGE_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(lineage, "_LAST_S", DEADLINE_S)
    run = "01890a5d-ac96-774b-bcce-b302099a8057"
    options = SinkOptions.parse(nameServer="h:9876", topic="t")
    lineage.start(options, run, "write", Schema(), is_stream=False)  # type: ignore[arg-type]
    for emitter in lineage.emitters:
        emitter.finish()
    assert f"no START of the run {run}" in caplog.text
    lineage.end(run, {})
    lineage.end(run, {})
    assert collector.events == []


@pytest.mark.parametrize("variable", [None, "OPENLINEAGE_DISABLED"])
def test_nothing_is_sent_without_a_wish(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, variable: str | None
) -> None:
    if variable:
        monkeypatch.setenv(variable, "true")
    else:
        monkeypatch.delenv("OPENLINEAGE_URL")
        monkeypatch.delenv("OPENLINEAGE_NAMESPACE")
    run = "01890a5d-ac96-774b-bcce-b302099a8057"
    options = SinkOptions.parse(nameServer="h:9876", topic="t")
    lineage.start(options, run, "write", Schema(), is_stream=False)  # type: ignore[arg-type]
    lineage.end(run, {"acked": 1})
    for emitter in lineage.emitters:
        emitter.finish()
    assert collector.events == []
