"""A consumer under OpenTelemetry's Java agent: its spans have the producer's span as their parent.

Ivy fetches the agent's jar into the cache of the cluster's jars, once.
"""

import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, HTTPServer

import pyarrow as pa
import pytest

pytest.importorskip("opentelemetry.proto.collector.trace.v1")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider

from benchmarks.peers.jars import resolve_modules
from rocket_sink import Message, Producer, TableProducer
from tests.clusters import make_topic, repair
from tests.java_client import FOLDER, GENERATIONS, java_command, run_java

AGENT = "opentelemetry-javaagent"
VERSION = "2.11.0"

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


class Collector(HTTPServer):
    """Keeps the spans that are exported to it by OTLP."""

    def __init__(self):
        self.spans = []
        super().__init__(("127.0.0.1", 0), _Handler)


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self):
        data = self.rfile.read(int(self.headers["content-length"]))
        for resource in ExportTraceServiceRequest.FromString(data).resource_spans:
            for scope in resource.scope_spans:
                self.server.spans += scope.spans
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


def test_a_java_consumers_spans_have_the_senders_span_as_parent(local_cluster, monkeypatch):
    module = f"io.opentelemetry.javaagent:{AGENT}:{VERSION}"
    [agent] = resolve_modules(f"{AGENT}-{VERSION}", [module], tell=print)
    repair(local_cluster)
    topic = "java-spans"
    make_topic(local_cluster, topic)
    column = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with (
        Producer(nameServer=local_cluster.name_server) as producer,
        TableProducer(nameServer=local_cluster.name_server, topic=topic) as tables,
    ):
        with TracerProvider().get_tracer("test").start_as_current_span("work") as span:
            producer.send(Message(topic, b"alone"))
            producer.send_batch([Message(topic, b"%d" % n) for n in range(3)])
        tables.send(pa.table({"body": [b"row"] * 4, "traceparent": [column] * 4}))
    java_command(FOLDER / "PushTopic.java", GENERATIONS[0])  # compiled without the agent
    with Collector() as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        settings = {
            "otel.traces.exporter": "otlp", "otel.metrics.exporter": "none",
            "otel.logs.exporter": "none", "otel.exporter.otlp.protocol": "http/protobuf",
            "otel.exporter.otlp.endpoint": f"http://127.0.0.1:{collector.server_port}",
            "otel.bsp.schedule.delay": "200",
        }  # fmt: skip
        options = [f"-javaagent:{agent}", *(f"-D{k}={v}" for k, v in settings.items())]
        monkeypatch.setenv("JAVA_TOOL_OPTIONS", " ".join(options))
        arguments = (local_cluster.name_server, topic, "8")
        run_java(FOLDER / "PushTopic.java", *arguments, version=GENERATIONS[0])
        collector.shutdown()
    context = span.get_span_context()
    parents = [(s.trace_id.hex(), s.parent_span_id.hex()) for s in collector.spans if s.kind == 5]
    current = f"{context.trace_id:032x}", f"{context.span_id:016x}"
    assert Counter(parents) == {current: 4, tuple(column.split("-")[1:3]): 4}
