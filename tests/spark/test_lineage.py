"""Lineage of runs, judged by OpenLineage's published JSON schemas, in openlineage/."""

import importlib.metadata
import importlib.util
import json
import os
import pickle
import threading
import uuid
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jsonschema
import pytest
import referencing
from pyspark.sql.types import StringType, StructField, StructType

pytest.importorskip("openlineage.client")

from rocket_sink.errors import DeliveryError
from rocket_sink.options import SinkOptions
from rocket_sink.spark import lineage
from rocket_sink.spark.datasource import RocketMQDataSource, TaskMessage, register
from rocket_sink.spark.sink import RocketSink
from rocket_sink.task.totals import TaskSummary
from tests.clusters import scripted_cluster
from tests.spark.streams import run, stream_of
from tests.spark.test_listener import wait_for

SCHEMAS = [json.loads(p.read_text()) for p in (Path(__file__).parent / "openlineage").iterdir()]


def _of_another_patch(uri):
    """Return the stored schema of this name: older clients name an earlier patch of a facet."""
    schema = next(schema for schema in SCHEMAS if Path(schema["$id"]).name == Path(uri).name)
    assert Path(schema["$id"]).parent.name.rpartition("-")[0] in uri
    return referencing.Resource.from_contents(schema)


REGISTRY: referencing.Registry[Any] = referencing.Registry(
    retrieve=_of_another_patch
).with_contents((schema["$id"], schema) for schema in SCHEMAS)
RUNS = {"$ref": "https://openlineage.io/spec/2-0-2/OpenLineage.json#/$defs/RunEvent"}
DEADLINE_S = 120.0
BODY = StructType([StructField("body", StringType())])

cluster = scripted_cluster(1, flights=1)


class Collector(HTTPServer):
    """A collector that keeps what it gets, and answers while `answers` is set."""

    def __init__(self):
        self.events: list[dict[str, Any]] = []
        self.answers = threading.Event()
        self.answers.set()
        super().__init__(("127.0.0.1", 0), _Handler)


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self):
        self.server.answers.wait(DEADLINE_S)
        self.server.events.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self.send_response(201)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def collector(monkeypatch):
    for name in [name for name in os.environ if name.startswith("OPENLINEAGE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(lineage, "emitters", [])
    with Collector() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("OPENLINEAGE_URL", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("OPENLINEAGE_NAMESPACE", "shop")
        yield server
        # The client logs each of its retries, and a later test may read what is logged.
        finish()
        server.shutdown()
    # The client puts its settings into the environment, where later tests would meet them.
    for name in [name for name in os.environ if name.startswith("OPENLINEAGE_")]:
        del os.environ[name]


def finish():
    """Wait until no event is on its way."""
    for emitter in lineage.emitters:
        emitter.finish(DEADLINE_S)


def judge(event):
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
    spark, cluster, tmp_path, collector, monkeypatch
):
    # Spark's own processes plan and commit the writes of a data source.
    for name in ("OPENLINEAGE_URL", "OPENLINEAGE_NAMESPACE"):
        monkeypatch.setitem(spark.sparkContext.environment, name, os.environ[name])
    rows = stream_of(spark, tmp_path, '{"body": "one"}\n{"body": null}\n{"body": "two"}\n')
    ledger = str(tmp_path / "ledger")
    sink = RocketSink(nameServer=cluster.name_server, topic="flights", ledger=ledger)
    register(spark, ledger=sink.options.ledger)
    options = {name: str(value) for name, value in sink.options.given().items()}
    batches = rows.writeStream.foreachBatch(sink.write_batch)
    lanes = sink.stream(rows), batches, rows.writeStream.format("rocketmq").options(**options)
    runs = [run(lane, tmp_path / f"{number}").runId for number, lane in enumerate(lanes)]
    (tmp_path / "in" / "2.json").write_text('{"body": "three"}\n{"body": "four"}\n')
    runs.append(run(batches, tmp_path / "1").runId)
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
        place = f"rocketmq://{cluster.name_server}", "flights"
        assert (output["namespace"], output["name"]) == place
        fields = output["facets"]["schema"]["fields"]
        assert [(field["name"], field["type"]) for field in fields] == [("body", "string")]
        assert event["job"]["namespace"] == "shop"
    by_run: dict[str, list[dict[str, Any]]] = {}
    for event in collector.events:
        by_run.setdefault(event["run"]["runId"], []).append(event)
    of_queries = [by_run.pop(str(run_id)) for run_id in runs]
    refused, good, failed = by_run.values()
    for begin, end in (*of_queries, good):
        assert (begin["eventType"], end["eventType"]) == ("START", "COMPLETE")
        assert end["outputs"][0]["outputFacets"]["outputStatistics"]["rowCount"] == 2
    for begin, end in (refused, failed):
        assert (begin["eventType"], end["eventType"]) == ("START", "FAIL")
    assert refused[1]["run"]["facets"]["errorMessage"]["message"].startswith("DeliveryError: ")


def started():
    """Start a run, and return its id."""
    options, run_id = SinkOptions.parse(nameServer="h:9876", topic="t"), str(uuid.uuid4())
    lineage.start(options, run_id, "write", StructType(), is_stream=False)
    return run_id


def test_events_need_no_installed_metadata(collector, monkeypatch):
    """A source tree on the path has no metadata."""
    missing = Mock(side_effect=importlib.metadata.PackageNotFoundError)
    monkeypatch.setattr(importlib.metadata, "metadata", missing)
    started()
    wait_for(lambda: bool(collector.events))
    judge(collector.events[0])


@pytest.mark.parametrize("is_well", [True, False])
def test_a_batch_by_format_is_told_of_by_two_processes(collector, caplog, is_well):
    caplog.set_level("INFO", "rocket_sink.spark.console")
    source = RocketMQDataSource({"nameServer": "h:9876", "topic": "flights", "appId": "a"})
    planned = source.writer(BODY, False)
    assert [event["eventType"] for event in collector.events] == ["START"]
    writer = pickle.loads(pickle.dumps(planned))
    lineage._runs.clear()  # as in the process that commits
    if is_well:
        writer.commit([TaskMessage("q", "r", TaskSummary(rows_in=3, acked=2, dead=1))])
    else:
        writer.abort([None])
    begin, end = collector.events
    judge(end)
    assert begin["run"]["runId"] == end["run"]["runId"]
    assert end["eventType"] == ("COMPLETE" if is_well else "FAIL")
    if is_well:
        text = f"the write a/{writer.run_id} ended: 3 rows in, 2 acknowledged, 1 dead letter;"
        assert text in caplog.text
        assert end["outputs"][0]["outputFacets"]["outputStatistics"]["rowCount"] == 2


def test_a_collector_that_is_down_costs_a_warning(collector, monkeypatch, caplog):
    monkeypatch.delenv("OPENLINEAGE_URL")
    transport = {"TYPE": "http", "URL": "http://127.0.0.1:9", "RETRY": '{"connect": 0}'}
    for name, value in transport.items():
        monkeypatch.setenv(f"OPENLINEAGE__TRANSPORT__{name}", value)
    run_id = started()
    finish()
    assert f"no START of the run {run_id}" in caplog.text
    lineage.end(run_id, {})
    lineage.end(run_id, {})
    assert collector.events == []


@pytest.mark.parametrize("variable", [None, "OPENLINEAGE_DISABLED"])
def test_nothing_is_sent_without_a_wish(collector, monkeypatch, variable):
    if variable:
        monkeypatch.setenv(variable, "true")
    else:
        monkeypatch.delenv("OPENLINEAGE_URL")
        monkeypatch.delenv("OPENLINEAGE_NAMESPACE")
    run_id = started()
    assert (run_id in lineage._runs) is lineage.is_on() is (variable is not None)
    lineage.end(run_id, {"acked": 1})
    finish()
    assert collector.events == []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not lineage.is_on()
