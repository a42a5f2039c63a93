"""RocketSink without Spark: options, pickling, and the calls of foreach: open, process, close."""

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql import Row
from pyspark.sql.types import StringType, StructField, StructType

from rocket_sink import RocketSink, SinkOptions
from rocket_sink.errors import ConfigurationError, DeliveryError, LedgerError, OptionError
from rocket_sink.spark import session_checks
from rocket_sink.spark.datasource import RocketMQDataSource
from rocket_sink.testing import FakeCluster
from rocket_sink.testing.script import Answer, Drop
from rocket_sink.wire.codes import RequestCode, ResponseCode
from tests.python import run_python

SECRET = "canary-secret-12345"
BODY = StructType([StructField("body", StringType())])


def test_options_are_checked_at_once() -> None:
    with pytest.raises(OptionError, match="nameServer"):
        RocketSink(topic="t")
    with pytest.raises(OptionError, match="a str is no SinkOptions"):
        RocketSink("a:1")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="not both"):
        RocketSink(SinkOptions.parse({"nameServer": "a:1"}), topic="t")
    with pytest.raises(OptionError, match=r"nameServer.*did you mean 'a:1;b:2'"):
        RocketSink(nameServer="a:1,b:2", topic="t")
    with pytest.raises(OptionError, match=r"option topic.*illegal characters"):
        RocketSink(nameServer="a:1", topic="two words")


def test_a_function_of_another_kind_is_named() -> None:
    sink = RocketSink(nameServer="a:1", topic="t")
    with pytest.raises(ConfigurationError, match=r"foreachBatch\(sink.write_batch\)"):
        sink.write(None, 7)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"foreach\(sink\)"):
        sink.write_batch(Row(body="x"))  # type: ignore[arg-type]


def test_secrets_never_show_and_pickling_keeps_them() -> None:
    sink = RocketSink(nameServer="a:1", topic="t", accessKey="ak-canary", secretKey=SECRET)
    assert SECRET not in repr(sink) and "ak-canary" not in repr(sink)
    copy = pickle.loads(pickle.dumps(sink))
    assert copy.options == sink.options and SECRET not in repr(copy)


def test_a_relative_ledger_is_the_drivers_folder() -> None:
    sink = RocketSink(nameServer="a:1", ledger="here")
    assert sink.options.ledger == f"file:{Path('here').absolute()}"


def session_with(name: str, value: str) -> SimpleNamespace:
    context = SimpleNamespace(getConf=lambda: {name: value})
    return SimpleNamespace(_jsparkSession=object(), sparkContext=context)


def speculating() -> SimpleNamespace:
    return session_with("spark.speculation", "true")


class TestSpeculation:
    def test_it_is_refused_when_the_sink_is_made(self, monkeypatch: Any) -> None:
        monkeypatch.setattr(session_checks, "active_session", speculating)
        with pytest.raises(ConfigurationError, match="allowSpeculation"):
            RocketSink(nameServer="a:1", topic="t")
        RocketSink(nameServer="a:1", topic="t", allowSpeculation=True)

    def test_and_when_foreach_pickles_a_sink_made_before_the_session(
        self, monkeypatch: Any
    ) -> None:
        sink = RocketSink(nameServer="a:1", topic="t")
        monkeypatch.setattr(session_checks, "active_session", speculating)
        with pytest.raises(ConfigurationError, match="allowSpeculation"):
            pickle.dumps(sink)

    @pytest.mark.parametrize("make", ["writer", "streamWriter"])
    def test_the_data_source_judges_each_write_of_a_session_that_speculates(
        self, make: str
    ) -> None:
        known = {"speculates": True}  # `register` finds this out on the driver.
        source = type("Source", (RocketMQDataSource,), known)
        settings = {"nameServer": "a:1", "topic": "t"}
        with pytest.raises(ConfigurationError, match="allowSpeculation"):
            getattr(source(settings), make)(BODY, False)
        getattr(source({**settings, "allowSpeculation": "true"}), make)(BODY, False)


def test_a_wheel_that_no_worker_will_see_is_told_of_once(
    monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    files = "/a/helpers.whl,/a/rocket_sink-0.1.0-py3-none.whl"
    session = session_with("spark.submit.pyFiles", files)
    monkeypatch.setattr(session_checks, "active_session", lambda: session)
    for _ in range(2):
        RocketSink(nameServer="a:1", topic="t")
    [record] = caplog.records
    assert "rocket_sink.zip" in record.getMessage()


@pytest.mark.parametrize(
    ("seconds", "kills", "warnings"), [("5", "true", 1), ("5", "false", 0), ("0", "true", 0)]
)
def test_a_session_that_kills_waiting_workers_is_warned_of_once(
    monkeypatch: Any, caplog: pytest.LogCaptureFixture, seconds: str, kills: str, warnings: int
) -> None:
    session_checks._warn_once.cache_clear()
    settings = {
        "spark.python.worker.idleTimeoutSeconds": seconds,
        "spark.python.worker.killOnIdleTimeout": kills,
    }
    context = SimpleNamespace(getConf=lambda: settings)
    session = SimpleNamespace(_jsparkSession=object(), sparkContext=context, conf={})
    monkeypatch.setattr(session_checks, "active_session", lambda: session)
    for _ in range(2):
        RocketSink(nameServer="a:1", topic="t")
    assert len(caplog.records) == warnings
    if warnings:
        assert "spark.python.worker.killOnIdleTimeout=false" in caplog.text


def test_a_session_without_a_limit_for_batches_is_warned_of_once(
    monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    session_checks._warn_once.cache_clear()
    settings = {"spark.sql.execution.arrow.maxRecordsPerBatch": "-1"}
    context = SimpleNamespace(getConf=lambda: settings)
    session = SimpleNamespace(_jsparkSession=object(), sparkContext=context, conf={})
    for _ in range(2):
        session_checks.warn_of_settings(session)
    (record,) = caplog.records
    assert "maxRecordsPerBatch=-1" in record.getMessage()


def test_importing_the_package_imports_neither_spark_nor_arrow_and_starts_no_thread() -> None:
    code = (
        "import sys, threading, rocket_sink; rocket_sink.Message, rocket_sink.SinkOptions;"
        "assert rocket_sink.__version__ == '0.1.0';"
        "assert not {'pyspark', 'pyarrow'} & set(sys.modules), 'heavy import';"
        "assert threading.active_count() == 1;"
        "assert set(rocket_sink.__all__) <= set(dir(rocket_sink))"
    )
    run_python("-c", code)


class TestForeach:
    def sink(self, cluster: FakeCluster, tmp_path: Path, **options: Any) -> RocketSink:
        settings = {"nameServer": cluster.name_server, "topic": "t", "ledger": str(tmp_path),
                 "sendMsgTimeout": 30_000, "requestMaxMessages": 2, **options}  # fmt: skip
        return pickle.loads(pickle.dumps(RocketSink(**settings)))

    def test_all_rows_are_stored_when_close_returns(self, tmp_path: Path) -> None:
        with FakeCluster() as cluster:
            sink = self.sink(cluster, tmp_path)
            assert sink.open(0, 5) is True
            for i in range(10):
                sink.process(Row(body=str(i)))
            sink.close(None)
            sink.close(None)
            assert sorted(m.body for m in cluster.messages("t")) == [b"%d" % i for i in range(10)]
        assert len(list(tmp_path.rglob("*.arrow"))) == 1

    def test_an_empty_partition_leaves_nothing(self, tmp_path: Path) -> None:
        with FakeCluster() as cluster:
            sink = self.sink(cluster, tmp_path)
            of_the_driver = set(tmp_path.rglob("*"))
            assert {path.parent.name for path in of_the_driver if path.is_file()} == {"tokens"}
            assert sink.open(0, 5) is True
            sink.close(None)
        assert set(tmp_path.rglob("*")) == of_the_driver

    def test_nothing_is_sent_where_the_ledger_is_another_one(self, tmp_path: Path) -> None:
        with FakeCluster() as cluster:
            sink = self.sink(cluster, tmp_path / "ledger")
            (tmp_path / "ledger").rename(tmp_path / "elsewhere")
            sink.open(0, 5)
            with pytest.raises(
                LedgerError, match=r"not the one.*ends before it sends.*set ledgerVia=spark"
            ):
                for _ in range(4):
                    sink.process(Row(body="x"))
            assert not cluster.messages("t")

    def test_close_raises_when_a_row_cannot_be_vouched_for(self, tmp_path: Path) -> None:
        with FakeCluster() as cluster:
            sink = self.sink(cluster, tmp_path, onInvalid="fail")
            sink.open(0, 5)
            sink.process(Row(body=None))
            with pytest.raises(DeliveryError, match="onInvalid"):
                sink.close(None)
            sink.close(None)

    def test_process_raises_early_and_close_keeps_that_error(self, tmp_path: Path) -> None:
        with FakeCluster() as cluster:
            sink = self.sink(cluster, tmp_path, onInvalid="fail")
            sink.open(0, 5)
            for body in ("a", "b", None):
                sink.process(Row(body=body))
            with pytest.raises(DeliveryError) as caught:
                sink.process(Row(body="d"))
            sink.close(caught.value)

    def test_an_error_from_upstream_leaves_the_engine_fit_for_the_next_task(
        self, tmp_path: Path
    ) -> None:
        with FakeCluster() as cluster:
            sink = self.sink(cluster, tmp_path)
            sink.open(0, 5)
            for i in range(4):
                sink.process(Row(body=str(i)))
            sink.close(RuntimeError("upstream"))
            sink.open(0, 5)
            sink.process(Row(body="again"))
            sink.close(None)
            assert b"again" in {m.body for m in cluster.messages("t")}


@pytest.mark.parametrize("delivery", ["effectively_once", "transactional"])
def test_a_delivery_that_a_proxy_cannot_do_is_refused_before_anything_is_sent(
    delivery: str, tmp_path: Path
) -> None:
    with FakeCluster(brokers=1) as cluster:
        cluster.create_topic("t", queues=1)
        options = SinkOptions.parse(
            nameServer=cluster.name_server, topic="t", delivery=delivery, ledger=str(tmp_path)
        )
        session_checks.check_rights(options)
        options = options.with_(ledger=str(tmp_path / "other"))
        unknown = Answer(ResponseCode.REQUEST_CODE_NOT_SUPPORTED, "request type 106 not supported")
        cluster.on_name_server(RequestCode.GET_BROKER_CLUSTER_INFO, unknown, times=None)
        for _ in range(2):
            with pytest.raises(ConfigurationError, match="behind the RocketMQ proxy") as caught:
                session_checks.check_rights(options)
        assert f"delivery={delivery}" in str(caught.value)
        session_checks.check_rights(options.with_(delivery="at_least_once"))
        assert not cluster.brokers[0].requests


def test_a_broker_that_does_not_answer_is_asked_for_rights_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with FakeCluster(brokers=1) as cluster:
        cluster.create_topic("t", queues=1)
        broker = cluster.brokers[0]
        broker.on(RequestCode.QUERY_MESSAGE, Drop(), times=None)
        caplog.set_level("INFO")
        options = SinkOptions.parse(
            nameServer=cluster.name_server, topic="t", delivery="effectively_once",
            accessKey="user", secretKey=SECRET,
        )  # fmt: skip
        for _ in range(3):
            session_checks.check_rights(options)
        lookups = [r for r in broker.requests if r.code == RequestCode.QUERY_MESSAGE]
    assert len(lookups) == 1
    assert "cannot tell whether" in caplog.text
