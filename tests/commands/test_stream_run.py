"""The run of `rocket-sink stream`, without Java: its source and query, its view and its report."""

import datetime as dt
import shlex
import signal
from types import SimpleNamespace
from unittest.mock import MagicMock, call

import pytest
from pyspark.sql.types import IntegerType, StringType, StructField, StructType

from rocket_sink import RocketSink
from rocket_sink.commands.common import stream_run
from rocket_sink.commands.common.stream_run import (
    Report,
    RunView,
    Source,
    finish,
    run_batch,
    run_stream,
    stream_writer,
)
from rocket_sink.errors import ConfigurationError, LedgerError
from rocket_sink.ledger.query.live import BrokerSums
from rocket_sink.ledger.records import in_order
from tests.docs.checks import check_command
from tests.ledger.night import at, store
from tests.ledger.values import accounts, confirmed, context, letter, session, write_spool

TYPES = {"queue_id": IntegerType()}
OPTIONS = {"nameServer": "n:1", "topic": "t"}


class Frame:
    """The parts of a DataFrame that the driver looks at, without a JVM."""

    def __init__(self, *columns):
        fields = [StructField(name, TYPES.get(name, StringType())) for name in columns]
        self.schema = StructType(fields)
        self.sparkSession = SimpleNamespace()
        self.parted_by = ()
        self.writeStream = MagicMock()

    def __getitem__(self, name):
        return name

    def repartition(self, *by):
        self.parted_by = by
        return self


@pytest.mark.parametrize(
    ("ordering", "columns", "parted_by"),
    [
        ("strict", ("body", "sharding_key"), ("`sharding_key`",)),
        ("best_effort", ("body", "sharding_key"), ("`sharding_key`",)),
        ("strict", ("body", "queue_id", "broker_name"), ()),
        ("none", ("body", "sharding_key"), ()), ("none", ("body",), ()),
        ("best_effort", ("body",), None),
    ],
)  # fmt: skip
def test_a_batch_in_order_has_a_keys_rows_in_one_partition(
    ordering, columns, parted_by, monkeypatch
):
    write = MagicMock(return_value=SimpleNamespace(query_id="q", rows_in=3))
    monkeypatch.setattr(RocketSink, "write", write)
    monkeypatch.setattr(stream_run, "time", SimpleNamespace(monotonic=iter([7.0, 10.0]).__next__))
    source = SimpleNamespace(read=lambda spark, streaming: Frame(*columns))
    options = {**OPTIONS, "ordering": ordering}
    if parted_by is None:
        with pytest.raises(ConfigurationError, match="sharding_key"):
            run_batch(None, source, options, "foreach")
        return
    report = run_batch(None, source, options, "foreach")
    assert write.call_args.args[0].parted_by == parted_by
    assert (report.query_id, report.rows_read) == ("q", 3)
    assert (report.epochs, report.seconds) == (1, 3.0)


@pytest.mark.parametrize("lane", ["foreach", "foreachBatch", "datasource"])
def test_the_writer_of_a_lane(lane, monkeypatch):
    frame, spark, foreach = Frame("body", "sharding_key"), MagicMock(), MagicMock()
    register, install = MagicMock(), MagicMock()
    monkeypatch.setattr(RocketSink, "stream", foreach)
    monkeypatch.setattr("rocket_sink.spark.datasource.register", register)
    monkeypatch.setattr("rocket_sink.spark.listener.install_fold", install)
    options = {**OPTIONS, "ordering": "strict", "ledger": "/l", "maxMessageSize": 4096}
    writer = stream_writer(spark, frame, options, lane)
    assert frame.parted_by
    if lane == "foreach":
        assert writer is foreach.return_value and foreach.call_args == call(frame)
    elif lane == "foreachBatch":
        assert writer is frame.writeStream.foreachBatch.return_value
    else:
        form = frame.writeStream.format
        assert form.call_args == call("rocketmq") and writer is form.return_value.options()
        texts = {name: str(value) for name, value in options.items()}
        assert form.return_value.options.call_args_list[0] == call(**texts)
        assert register.call_args == call(spark, ledger="file:/l")
        assert install.call_args.args[0].ledger == "file:/l" and install.call_args.args[1] is spark


def test_a_batch_of_the_data_source_counts_its_rows_by_the_way(monkeypatch):
    frame, register, observation = MagicMock(), MagicMock(), MagicMock()
    frame.observe.return_value = frame
    observation.return_value.get = {"rows": 5}
    monkeypatch.setattr("rocket_sink.spark.datasource.register", register)
    monkeypatch.setattr("pyspark.sql.Observation", observation)
    for name in ("lit", "count"):
        monkeypatch.setattr(f"pyspark.sql.functions.{name}", MagicMock())
    monkeypatch.setattr(stream_run, "_in_order", lambda sink, frame: frame)
    source = SimpleNamespace(read=lambda spark, streaming: frame)
    report = run_batch("spark", source, {**OPTIONS, "maxMessageSize": 9}, "datasource")
    options = frame.write.format.return_value.options
    assert options.call_args == call(nameServer="n:1", topic="t", maxMessageSize="9")
    assert options.return_value.mode.call_args == call("append")
    assert options.return_value.mode.return_value.save.called
    assert register.call_args == call("spark") and report.rows_read == 5


@pytest.fixture
def spark(monkeypatch):
    monkeypatch.setattr(stream_run, "check_encoding", lambda spark, path: None)
    monkeypatch.setattr(stream_run, "_POLL_S", 0.0)
    return MagicMock(version="4.1.2")


@pytest.mark.parametrize(
    ("form", "path", "schema", "is_streaming", "takes"),
    [
        ("json", "/in", "a INT", True, "given"), ("json", "/in", None, True, "files"),
        ("json", "/in", None, False, None), ("DELTA", "/in", None, True, None),
        ("rate", None, None, True, None),
    ],
)  # fmt: skip
def test_a_source(spark, form, path, schema, is_streaming, takes):
    """Spark's file sources want a schema of a stream: without one, that of the files there now."""
    opened = (spark.readStream if is_streaming else spark.read).format
    reader = opened.return_value.options.return_value
    files = spark.read.format.return_value.options.return_value.load
    source = Source(form, path, schema, {"a": "b"}, "x > 1", ("y", "z"))
    frame = source.read(spark, streaming=is_streaming)
    assert opened.call_args == call(form)
    assert opened.return_value.options.call_args == call(a="b")
    wanted = {"given": schema, "files": files.return_value.schema}.get(takes or "")
    assert reader.schema.call_args == (call(wanted) if takes else None)
    loaded = reader.schema.return_value if takes else reader
    assert loaded.load.call_args == (call(path) if path else call())
    chosen = loaded.load.return_value.where
    assert chosen.call_args == call("x > 1")
    assert chosen.return_value.selectExpr.call_args == call("y", "z")
    assert frame is chosen.return_value.selectExpr.return_value


@pytest.mark.parametrize(
    ("form", "text", "advice"),
    [("Kafka", "Failed to find data source: KAFKA", True), ("kafka", "no broker", False),
     ("rate", "kafka", False)],
)  # fmt: skip
def test_spark_without_kafka(spark, form, text, advice):
    spark.read.format.return_value.options.return_value.load.side_effect = ValueError(text)
    with pytest.raises(ConfigurationError if advice else ValueError) as caught:
        Source(form, None, None, {}).read(spark, streaming=False)
    package = "--package org.apache.spark:spark-sql-kafka-0-10_2.13:4.1.2"
    assert (package in str(caught.value)) is advice
    check_command(["stream", "--format", "kafka", *package.split()])


class Query:
    """A streaming query. Each look at `isActive` takes the next of `steps`: a function, or the
    micro-batch that has just ended."""

    id, runId = "q", "r"

    def __init__(self, *steps, failure=None):
        self.recentProgress = []
        self.status = {"isTriggerActive": True}
        self.stop = MagicMock()
        self.exception = lambda: failure
        self._steps = list(steps)

    @property
    def lastProgress(self):
        return self.recentProgress[-1] if self.recentProgress else None

    @property
    def isActive(self):
        if not self._steps:
            return False
        step = self._steps.pop(0)
        if callable(step):
            step(self)
        else:
            epoch, rows = step
            took = {"triggerExecution": 1500}
            self.recentProgress.append({"batchId": epoch, "numInputRows": rows, "durationMs": took})
        return True


def run_query(
    query, spark, monkeypatch, trigger = None,
    stop_timeout_s = 600,
):  # fmt: skip
    writer, source = MagicMock(), MagicMock()
    writer.option.return_value = writer.trigger.return_value = writer
    writer.start.return_value = query
    follow = MagicMock(return_value=SimpleNamespace(refresh=lambda: False))
    monkeypatch.setattr(stream_run, "stream_writer", lambda *_: writer)
    monkeypatch.setattr(stream_run, "follow", follow)
    report = run_stream(
        spark, source, {"ledger": "/l"}, "foreach", checkpoint="/ck", trigger=trigger,
        stop_timeout_s=stop_timeout_s,
    )  # fmt: skip
    assert source.read.call_args == call(spark, streaming=True)
    assert writer.option.call_args == call("checkpointLocation", "/ck")
    assert follow.call_args.args[0].root == "/l" and follow.return_value.run_id == "r"
    assert stream_run._figures({"ledger": ""}) is None
    for error in (LedgerError("no"), OSError("no")):
        follow.side_effect = error
        assert stream_run._figures({"ledger": "/l"}) is None
    return report, writer


@pytest.mark.parametrize(
    ("trigger", "wanted"),
    [("available-now", call(availableNow=True)), ("5 seconds", call(processingTime="5 seconds")),
     (None, None)],
)  # fmt: skip
@pytest.mark.parametrize("failure", [None, ValueError("no such column")])
def test_a_query_that_ends(spark, monkeypatch, capsys, trigger, wanted, failure):
    query = Query((0, 3), (1, 0), (2, 1), failure=failure)
    report, writer = run_query(query, spark, monkeypatch, trigger)
    assert writer.trigger.call_args == wanted and not query.stop.called
    assert (report.query_id, report.run_id) == ("q", "r")
    assert (report.epochs, report.rows_read) == (2, 4) and 0 < report.seconds < 600
    assert report.error == (failure and "ValueError: no such column")
    lines = capsys.readouterr().err.splitlines()
    assert lines[1:] == ["epoch 0: 3 rows in 1.5 s", "epoch 2: 1 row in 1.5 s"]


def idle(query):
    query.status["isTriggerActive"] = False


STOPS = (signal.SIGINT, signal.SIGTERM)


@pytest.mark.parametrize("is_submitted", [False, True])
@pytest.mark.parametrize(
    ("later", "timeout_s", "rows"),
    [([(1, 2), (2, 9)], 600, 5), ([idle, (2, 9)], 600, 3), ([id, (1, 2)], 0, 3)],
    ids=["its epoch ends", "no epoch runs", "time-out"],
)
def test_a_signal_ends_a_query_after_its_micro_batch(
    spark, monkeypatch, capsys, is_submitted, later, timeout_s, rows
):
    """Under spark-submit the signal may reach only the JVM, which has the command's handler."""
    misc, before = spark.sparkContext._jvm.sun.misc, [*map(signal.getsignal, STOPS)]
    monkeypatch.delenv("PYSPARK_GATEWAY_PORT", raising=False)

    def end(_):
        if is_submitted:
            assert [each.args[0] for each in misc.Signal.call_args_list] == ["INT", "TERM"]
            misc.Signal.handle.call_args.args[1].handle(None)
        else:
            signal.raise_signal(STOPS[timeout_s > 0])

    if is_submitted:
        monkeypatch.setenv("PYSPARK_GATEWAY_PORT", "1")
    query = Query((0, 3), end, *later)
    report, _ = run_query(query, spark, monkeypatch, stop_timeout_s=timeout_s)
    assert misc.Signal.handle.called is is_submitted
    assert query.stop.call_count == 1 and [*map(signal.getsignal, STOPS)] == before
    assert spark.sparkContext.setLogLevel.call_args == call("OFF")
    assert "stopping after the current micro-batch" in capsys.readouterr().err
    assert report.rows_read == rows


SOON = dt.datetime.now(dt.timezone.utc) + dt.timedelta(hours=1)


def test_events_are_lines(capsys):
    """Events of the ledger are shown once; a broker that is isolated anew is shown anew."""
    isolated = BrokerSums(isolated_until=SOON, cause="X")
    figures = SimpleNamespace(
        standing=SimpleNamespace(pending={}), refresh=lambda: True,
        brokers={"broker-a": BrokerSums(), "broker-b": isolated},
    )  # fmt: skip
    view = RunView(Report(), figures)
    figures.standing.pending = {"data": 1}
    view.refresh()
    figures.standing.pending["transport"] = 100
    view.refresh()
    isolated.isolated_until = SOON + dt.timedelta(minutes=1)
    figures.standing.pending["data"] = 0
    view.refresh()
    figures.standing.pending["data"] = 1
    view.refresh()
    until = f"broker-b is isolated until {SOON:%H:%M:%S} UTC (X)"
    later = f"broker-b is isolated until {isolated.isolated_until:%H:%M:%S} UTC (X)"
    pending = "101 dead letters are pending"
    assert capsys.readouterr().err.splitlines() == [
        until, "1 dead letter is pending", pending, later, pending,
    ]  # fmt: skip
    figures.refresh = lambda: False
    figures.standing.pending["data"] = 9
    view.refresh()
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("report", "first"),
    [
        (Report(), "0 rows in 0 micro-batches, 0.0 s"),
        (Report(epochs=1, rows_read=1, seconds=4.0), "1 row in 1 micro-batch, 4.0 s, 0.2 rows/s"),
        (Report(epochs=2000, rows_read=3000, seconds=2.0),
         "3,000 rows in 2,000 micro-batches, 2.0 s, 1,500.0 rows/s"),
    ],
)  # fmt: skip
def test_a_run_ends_with_its_sums_and_with_what_to_do(report, first):
    report.ledger, report.pending = "/data/my ledger", {"transport": 1000, "data": 2, "hold": 1}
    report.counts = {"rows_in": 3000, "acked": 1997}
    lines = report.as_text().splitlines()
    assert lines[:2] == [first, "rows_in 3,000, acked 1,997"]
    assert "transport 1,000, hold 1; " in lines[3] and "takes: 2; " in lines[4]
    for line in lines[2:]:
        words = shlex.split(line.partition("rocket-sink ")[2].rstrip(")"))
        assert words[words.index("--ledger") + 1] == "/data/my ledger"
        check_command(words)
    done = Report(ledger="/l", pending={"data": 0}).as_text().splitlines()
    assert len(done) == 2 and "None" not in str(done)


@pytest.mark.parametrize(
    ("report", "counts"),
    [
        (Report("other", "run-1"), {"rows_in": 9, "acked": 8, "dead": 1}),
        (Report("query", "run-2"), {"rows_in": 0, "acked": 0, "dead": 0}),
        (Report("query"), {"rows_in": 9, "acked": 8, "dead": 1}),
        (Report(seconds=30.0), {"rows_in": 5, "acked": 5, "dead": 0}),
    ],
)  # fmt: skip
def test_the_counts_of_a_run(tmp_path, report, counts):
    """A stream is known by its run: with `appId` the ledger's query id is the appId."""
    ctx, batch = context(), context(query_id="batch", run_id="b", lane="batch")
    old = accounts(context(query_id="old", run_id="o", lane="batch"), acked=7)
    rows = [letter(ctx), letter(ctx, reason="data"), accounts(ctx, acked=8, dead=1),
            confirmed(ctx, 9), at(old, SOON - dt.timedelta(days=1))]  # fmt: skip
    path = store(tmp_path / "ledger", in_order(rows, 1 << 32))
    write_spool(path, batch, accounts(batch, acked=5))
    assert finish(session(), report, {}) is report and not report.ledger
    finish(session(), report, {"ledger": path})
    assert {name: report.counts[name] for name in counts} == counts
    assert (report.ledger, report.pending) == (path, {"transport": 1, "data": 1})
