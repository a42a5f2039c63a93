"""Metrics and trace context, judged by OpenTelemetry's own reader and propagator."""

from collections import Counter
from types import SimpleNamespace

import pyarrow as pa
import pytest

pytest.importorskip("opentelemetry.sdk.metrics")

from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.semconv._incubating.metrics import messaging_metrics
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, TraceState
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from rocket_sink import Message, Producer, TableProducer
from rocket_sink.errors import (
    ConnectError,
    NoRouteError,
    NotSentError,
    Outcome,
    RejectedError,
    WindowFullError,
)
from rocket_sink.message import MessageQueue
from rocket_sink.net import telemetry
from rocket_sink.options import SinkOptions
from rocket_sink.producer.engine.attempt import SendRequest
from rocket_sink.producer.engine.engine import SendEngine
from rocket_sink.producer.request_queue import RequestQueue
from rocket_sink.testing import Answer, Delay
from rocket_sink.wire.codes import ResponseCode
from tests.clusters import scripted_cluster
from tests.producer.waiting import held
from tests.python import run_python


@pytest.fixture
def reader(monkeypatch):
    """A reader of a provider of this test's own: a process can set one provider only."""
    reader = InMemoryMetricReader()
    monkeypatch.setattr(metrics, "get_meter", MeterProvider([reader]).get_meter)
    return reader


cluster = scripted_cluster(orders=2)


def points(reader):
    data = reader.get_metrics_data()
    if data is None:
        return {}
    return {
        metric.name: list(metric.data.data_points)
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }


def by_error(reader, metric, field):
    """Return {error.type: the sum of a field of its data points}."""
    sums = Counter()
    for point in points(reader).get(metric, ()):
        sums[point.attributes.get("error.type")] += getattr(point, field)
    return dict(sums)


def counts(reader):
    """Return {error.type: messages}."""
    return by_error(reader, telemetry.SENT, "value")


def test_names_and_units_are_those_of_the_conventions(reader):
    ours = telemetry.ClientMetrics(metrics)
    other = InMemoryMetricReader()
    meter = MeterProvider([other]).get_meter("theirs")
    ours.record("t", 1, 0.1, address="h:1", result=None, error=None)
    messaging_metrics.create_messaging_client_operation_duration(meter).record(0.1)
    messaging_metrics.create_messaging_client_sent_messages(meter).add(1)

    def described(source):
        (scope,) = source.get_metrics_data().resource_metrics[0].scope_metrics
        return {(m.name, m.unit, m.description.rstrip(".")) for m in scope.metrics}

    assert described(reader) == described(other)


def test_each_way_to_send_is_measured(reader, cluster):
    message = Message("orders", b"x")
    with Producer(nameServer=cluster.name_server) as producer:
        producer.send(message)
        producer.send_batch([message, message])
        producer.send_oneway(message)
        for future in [producer.send_async(message) for _ in range(20)]:
            future.result(10)
    with TableProducer(nameServer=cluster.name_server, topic="orders") as tables:
        tables.send(pa.table({"body": [b"a", b"b", b"c"]}))
    assert counts(reader) == {None: 1 + 2 + 1 + 20 + 3}
    point = points(reader)[telemetry.DURATION][0]
    bounds = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
    assert tuple(point.explicit_bounds) == bounds and point.sum > 0
    attributes = dict(point.attributes)
    address = f"{attributes.pop('server.address')}:{attributes.pop('server.port')}"
    assert address in {broker.address for broker in cluster.brokers}
    assert attributes == {
        "messaging.system": "rocketmq", "messaging.operation.name": "send",
        "messaging.operation.type": "send", "messaging.destination.name": "orders",
    }  # fmt: skip


def test_failures_have_their_error_and_what_was_not_sent_is_no_sent_message(reader, cluster):
    cluster.on_send(Answer(ResponseCode.MESSAGE_ILLEGAL, "no"), times=1)
    with Producer(nameServer=cluster.name_server, createTopic="") as producer:
        with pytest.raises(RejectedError):
            producer.send(Message("orders", b"x"))
        with pytest.raises(NotSentError):
            producer.send(Message("nowhere", b"x"), timeout_ms=500)
    assert counts(reader) == {"MESSAGE_ILLEGAL": 1}
    ends = [point.attributes for point in points(reader)[telemetry.DURATION]]
    ports = {end["error.type"]: end.get("server.port") for end in ends}
    assert ports.pop("NO_ROUTE") is None and len(ports) == 1
    assert f"127.0.0.1:{ports['MESSAGE_ILLEGAL']}" in {b.address for b in cluster.brokers}


def failures(reader):
    """Return {error.type: measured requests}."""
    requests = by_error(reader, telemetry.DURATION, "count")
    requests.pop(None, None)
    return requests


def test_each_message_of_a_group_that_fails_is_measured(reader, cluster, make_producer):
    cluster.create_topic("single", 1, brokers=["broker-a"])
    producer = make_producer(sendMsgTimeout=1000)
    producer.send_async(Message("single", b"x")).result(30)
    cluster.kill()
    with held(producer):  # The producer's thread takes all messages at once.
        futures = [producer.send_async(Message("single", b"x")) for _ in range(60)]
    assert all(future.exception(30) for future in futures)
    assert sum(failures(reader).values()) == 60, failures(reader)
    assert counts(reader) == {None: 1}


def test_an_address_without_a_port_costs_no_other_request_its_result(reader, cluster):
    """A broker may register any text as its address (brokerIP1 and listenPort)."""
    bad, good = cluster.brokers
    bad.registered = f"[{bad.address}]:listenPort"
    good.on_send(Delay(200), times=None)
    with Producer(nameServer=cluster.name_server, retryTimesWhenSendFailed=0) as producer:
        futures = [
            producer.send_async(Message("orders", b"x"), queue=MessageQueue("orders", name, 0))
            for name in [good.name] * 9 + [bad.name] + [good.name] * 9
        ]
        errors = [future.exception(30) for future in futures]
    assert [type(error) for error in errors if error is not None] == [ConnectError]
    assert len(cluster.messages("orders")) == 18
    assert counts(reader) == {None: 18}, "what was not sent is no sent message"


class _BrokenInstrument:
    def record(self, *values):
        raise RuntimeError("a view of this SDK is wrong")

    add = record


def test_an_sdk_that_raises_costs_no_request_its_result(cluster, monkeypatch, caplog):
    meter = SimpleNamespace(
        create_histogram=lambda *args, **more: _BrokenInstrument(),
        create_counter=lambda *args, **more: _BrokenInstrument(),
    )
    monkeypatch.setattr(metrics, "get_meter", lambda name: meter)
    with Producer(nameServer=cluster.name_server) as producer:
        assert producer.send(Message("orders", b"x")).outcome is Outcome.ACKED
        futures = [producer.send_async(Message("orders", b"x")) for _ in range(40)]
        assert {future.result(30).outcome for future in futures} == {Outcome.ACKED}
    assert "OpenTelemetry did not take the measurement" in caplog.text


def test_failures_without_an_attempt_are_measured(reader, cluster):
    message = Message("orders", b"x")
    options = SinkOptions.parse(
        nameServer=cluster.name_server, createTopic="", backPressureForAsyncSendNum=1,
        sendMsgTimeout=500,
    )  # fmt: skip
    with Producer(options) as producer:
        producer.send(message)
        cluster.freeze()
        producer.send_async(message, timeout_ms=30_000)
        with pytest.raises(WindowFullError):
            producer.send_async(message)
        with pytest.raises(NoRouteError):
            producer.send(Message("nowhere", b"x"), selector=lambda queues, *_: queues[0])
        for broker in cluster.brokers:
            broker.thaw()
    engine = SendEngine(options)
    submissions = RequestQueue(engine)
    submissions.put(SendRequest("orders", b"x"))
    submissions.close()
    engine.close()
    errors = failures(reader)
    assert {errors[code] for code in ("WINDOW_FULL", "NO_ROUTE", "PRODUCER_CLOSED")} == {1}
    assert by_error(reader, telemetry.DURATION, "sum")["WINDOW_FULL"] >= 0.5
    assert counts(reader) == {None: 2}


def test_without_opentelemetry_there_are_no_metrics_and_nothing_imports_it():
    script = """
import sys
from rocket_sink import Message, Producer
from rocket_sink.testing import FakeCluster
with FakeCluster() as cluster, Producer(nameServer=cluster.name_server) as producer:
    producer.send(Message("t", b"x"))
    assert producer._session.engine.flow._metrics is None
assert not [name for name in sys.modules if name.startswith("opentelemetry")]
"""
    run_python("-c", script)


def test_each_message_has_the_context_of_the_span_that_sends(cluster):
    tracer = TracerProvider().get_tracer("test")
    message = Message("orders", b"x", properties={"own": "1"})
    with (
        Producer(nameServer=cluster.name_server, autoBatch=True) as producer,
        TableProducer(nameServer=cluster.name_server, topic="orders") as tables,
    ):
        with tracer.start_as_current_span("work") as span:
            producer.send(message)
            producer.send_batch([message, message])
            producer.send_async(message).result(10)
            tables.send(pa.table({"body": [b"y"]}))
        producer.send(Message("orders", b"outside"))
    expected = span.get_span_context()
    stored = cluster.messages("orders")
    assert len(stored) == 6
    for one in stored:
        context = TraceContextTextMapPropagator().extract(dict(one.properties))
        parent = trace.get_current_span(context).get_span_context()
        assert parent.is_valid == (one.body != b"outside")
        if parent.is_valid:
            assert (parent.trace_id, parent.span_id) == (expected.trace_id, expected.span_id)
        assert one.body != b"x" or one.properties["own"] == "1"


OWN = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def span_of_a_vendor():
    """Make a span with a `tracestate` the current one."""
    span = SpanContext(
        0xABC, 0xDEF, is_remote=True, trace_flags=TraceFlags(1),
        trace_state=TraceState([("vendor", "theirs")]),
    )  # fmt: skip
    with trace.use_span(NonRecordingSpan(span)):
        yield span


@pytest.mark.parametrize("name", ["properties", "headers", "Properties", "attributes"])
@pytest.mark.parametrize("own", [{"a": "1"}, None])
def test_rows_get_the_spans_context_whatever_their_columns_are_called(
    cluster, span_of_a_vendor, name, own
):
    rows = [own, {"traceparent": OWN}, {"a": "1", "tracestate": "own=1"}]
    table = pa.table({
        "body": [b"span", b"own", b"state", b"column"], "Traceparent": [None, None, None, OWN],
        name: pa.array([*rows, own], pa.map_(pa.string(), pa.string())),
    })  # fmt: skip
    mapped = {"columns": "properties=attributes"} if name == "attributes" else {}
    with TableProducer(nameServer=cluster.name_server, topic="orders", **mapped) as tables:
        assert tables.send(table).summary.acked == len(table)
    stored = {message.body: message.properties for message in cluster.messages("orders")}
    context = {body: (p["traceparent"], p.get("tracestate")) for body, p in stored.items()}
    current = f"00-{span_of_a_vendor.trace_id:032x}-{span_of_a_vendor.span_id:016x}-01"
    assert context == {
        b"span": (current, "vendor=theirs"), b"own": (OWN, None), b"state": (current, "own=1"),
        b"column": (OWN, None),
    }  # fmt: skip
    assert stored[b"span"].get("a") == (own or {}).get("a") and stored[b"state"]["a"] == "1"
