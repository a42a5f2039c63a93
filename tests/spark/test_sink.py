"""RocketSink without Spark: options, pickling, and the calls of foreach: open, process, close."""

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock, call

import pytest
from pyspark.sql import Row
from pyspark.sql.types import StringType, StructField, StructType

from rocket_sink import RocketSink, SinkOptions
from rocket_sink.errors import ConfigurationError, DeliveryError, LedgerError, OptionError
from rocket_sink.spark import sink as sinks
from rocket_sink.spark.checks import session_settings
from tests.clusters import scripted_cluster
from tests.python import run_python

SECRET = "canary-secret-12345"
BODY = StructType([StructField("body", StringType())])


@pytest.mark.parametrize(
    ("first", "options", "words"),
    [
        ((), {"topic": "t"}, "nameServer"), (("a:1",), {}, "a str is no SinkOptions"),
        ((SinkOptions.parse(nameServer="a:1"),), {"topic": "t"}, "not both"),
        ((), {"nameServer": "a:1,b:2", "topic": "t"}, r"nameServer.*did you mean 'a:1;b:2'"),
        ((), {"nameServer": "a:1", "batchId": "b"}, "batchId: the ledger remembers"),
        ((), {"nameServer": "a:1", "ledger": "/l", "batchId": "a~b"}, "batchId: 'a~b' has char"),
        ((), {"nameServer": "a:1", "topic": "two words"}, r"option topic.*illegal characters"),
    ],
)  # fmt: skip
def test_options_are_checked_at_once(first, options, words):
    with pytest.raises(OptionError, match=words):
        RocketSink(*first, **options)


def test_a_function_of_another_kind_is_named():
    sink = RocketSink(nameServer="a:1", topic="t")
    with pytest.raises(ConfigurationError, match=r"foreachBatch\(sink.write_batch\)"):
        sink.write(None, 7)
    with pytest.raises(ConfigurationError, match=r"foreach\(sink\)"):
        sink.write_batch(Row(body="x"))
    with pytest.raises(ConfigurationError, match="batchId names one batch write"):
        RocketSink(nameServer="a:1", ledger="/l", batchId="b").write_batch(Row(body="x"), 0)


def test_secrets_never_show_and_pickling_keeps_them():
    sink = RocketSink(nameServer="a:1", topic="t", accessKey="ak-canary", secretKey=SECRET)
    assert SECRET not in repr(sink) and "ak-canary" not in repr(sink)
    copy = pickle.loads(pickle.dumps(sink))
    assert copy.options == sink.options and SECRET not in repr(copy)


def test_a_relative_ledger_is_the_drivers_folder():
    sink = RocketSink(nameServer="a:1", ledger="here")
    assert sink.options.ledger == f"file:{Path('here').absolute()}"


@pytest.mark.parametrize("packs", [None, MagicMock()])
@pytest.mark.parametrize("is_stream", [True, False])
def test_what_a_stream_gives_to_spark(monkeypatch, packs, is_stream):
    """The test replaces all parts that need a JVM."""
    parts = {"plan_of": "plan", "select_needed": (MagicMock(), "needed plan"), "packed": packs,
             "spool_token": "token", "without_files": "for tasks"}  # fmt: skip
    names = "check_session", "check_reachable", "check_rights", "needs_append", "install_fold"
    stands = {name: Mock(return_value=parts.get(name)) for name in (*names, *parts)}
    for name, stand_in in stands.items():
        monkeypatch.setattr(sinks, name, stand_in)
    sink = RocketSink(nameServer="a:1", topic="t")
    frame: Any = MagicMock(isStreaming=is_stream)
    if not is_stream:
        with pytest.raises(ConfigurationError, match=r"use sink.write\(df\)"):
            sink.stream(frame)
        return
    writer = sink.stream(frame)
    needed = parts["select_needed"][0]
    foreach = (needed if packs is None else packs).writeStream.foreach
    assert writer is foreach.return_value
    [bound] = foreach.call_args.args
    assert (bound._plan, bound._token, bound.options) == ("needed plan", "token", sink.options)
    assert bound._takes_packs is (packs is not None)
    session = frame.sparkSession
    assert stands["check_session"].call_args_list[1:] == [call(sink.options, session)] * 2
    assert stands["check_reachable"].mock_calls == [call("for tasks", session)]
    assert stands["install_fold"].mock_calls == [call(sink.options), call(sink.options, session)]
    assert stands["check_rights"].mock_calls == [call(sink.options)]
    assert stands["needs_append"].called
    task = Mock()
    monkeypatch.setattr(sinks, "PackTask" if packs is not None else "ForeachTask", task)
    bound.open(3, 4)
    assert task.mock_calls == [call(sink.options, "needed plan", 3, 4, "token", None)]
    with pytest.raises(ConfigurationError, match="maxEpochFailures"):
        RocketSink(nameServer="a:1", ledger="/l", maxEpochFailures=1).stream(frame)
    with pytest.raises(ConfigurationError, match="batchId"):
        RocketSink(nameServer="a:1", ledger="/l", batchId="b").stream(frame)


def test_a_frame_of_a_stopped_session_is_refused():
    stopped = SimpleNamespace(_jsparkSession=object(), sparkContext=SimpleNamespace(_jsc=None))
    sink = RocketSink(nameServer="a:1", topic="flights")
    for method in (sink.write, sink.stream, sink.check):
        with pytest.raises(ConfigurationError, match=r"was stopped: begin a new session"):
            method(SimpleNamespace(sparkSession=stopped))


@pytest.fixture
def settings(monkeypatch):
    """Return the settings of the active session, which tests may change."""
    settings: dict[str, str] = {}
    context = SimpleNamespace(getConf=lambda: settings)
    session = SimpleNamespace(_jsparkSession=object(), sparkContext=context, conf={})
    monkeypatch.setattr(session_settings, "active_session", lambda: session)
    session_settings._warn_once.cache_clear()
    return settings


class TestSpeculation:
    def test_it_is_refused_when_a_sink_is_made_and_when_foreach_pickles_an_older_one(
        self, settings, caplog
    ):
        settings["spark.sql.execution.arrow.maxRecordsPerBatch"] = "-1"
        sink = RocketSink(nameServer="a:1", topic="t")
        assert "maxRecordsPerBatch=-1" in caplog.text
        settings["spark.speculation"] = "true"
        with pytest.raises(ConfigurationError, match="allowSpeculation"):
            RocketSink(nameServer="a:1", topic="t")
        with pytest.raises(ConfigurationError, match="allowSpeculation"):
            pickle.dumps(sink)
        RocketSink(nameServer="a:1", topic="t", allowSpeculation=True)


def test_importing_the_package_imports_neither_spark_nor_arrow_and_starts_no_thread():
    code = (
        "import sys, threading, rocket_sink; rocket_sink.Message, rocket_sink.SinkOptions;"
        "assert rocket_sink.__version__ == '0.1.0';"
        "assert not {'pyspark', 'pyarrow'} & set(sys.modules), 'heavy import';"
        "assert threading.active_count() == 1;"
        "assert set(rocket_sink.__all__) <= set(dir(rocket_sink))"
    )
    run_python("-c", code)


cluster = scripted_cluster(1, t=1)


class TestForeach:
    @pytest.fixture
    def sink(self, cluster, tmp_path):
        sink = RocketSink(
            nameServer=cluster.name_server, topic="t", ledger=str(tmp_path / "ledger"),
            sendMsgTimeout=30_000, requestMaxMessages=2,
        )  # fmt: skip
        return pickle.loads(pickle.dumps(sink))

    @pytest.fixture
    def strict(self, sink):
        return RocketSink(sink.options.with_(onInvalid="fail"))

    def put(self, sink, *bodies):
        for body in bodies:
            sink.process(Row(body=body))

    def test_all_rows_are_stored_when_close_returns(self, cluster, sink, tmp_path):
        assert sink.open(0, 5) is True
        self.put(sink, *map(str, range(10)))
        sink.close(None)
        sink.close(None)
        assert sorted(m.body for m in cluster.messages("t")) == [b"%d" % i for i in range(10)]
        assert len(list(tmp_path.rglob("*.arrow"))) == 1

    def test_an_empty_partition_leaves_nothing(self, sink, tmp_path):
        of_the_driver = set(tmp_path.rglob("*"))
        assert {path.parent.name for path in of_the_driver if path.is_file()} == {"tokens"}
        assert sink.open(0, 5) is True
        sink.close(None)
        assert set(tmp_path.rglob("*")) == of_the_driver

    def test_nothing_is_sent_where_the_ledger_is_another_one(self, cluster, sink, tmp_path):
        (tmp_path / "ledger").rename(tmp_path / "elsewhere")
        sink.open(0, 5)
        words = r"not the one.*ends before it sends.*set ledgerVia=spark"
        with pytest.raises(LedgerError, match=words):
            self.put(sink, *"xxxx")
        assert not cluster.messages("t")

    def test_process_or_close_raises_when_a_row_cannot_be_vouched_for(self, strict):
        strict.open(0, 5)
        self.put(strict, None)
        with pytest.raises(DeliveryError, match="onInvalid"):
            strict.close(None)
        strict.close(None)
        strict.open(0, 5)
        self.put(strict, "a", "b", None)
        with pytest.raises(DeliveryError) as caught:
            self.put(strict, "d")
        strict.close(caught.value)
