"""`register`: its demands on a session, Spark's answers, and what writers and readers then know."""

from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import Mock, call

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql.types import StructType

from rocket_sink.errors import ConfigurationError, NameServerUnavailableError, OptionError
from rocket_sink.options import SinkOptions
from rocket_sink.rows.stored_rows import STORED_SCHEMA
from rocket_sink.spark import datasource, listener
from rocket_sink.spark.checks import reach
from rocket_sink.spark.reading.batch import FilteringReader, MessageReader

BODY = StructType().add("body", "string")


class Refused(AnalysisException):
    def getCondition(self):
        return self._message


@pytest.fixture(autouse=True)
def session(monkeypatch):
    for name, answer in (
        ("warn_of_settings", None), ("speculates", True), ("is_classic", True),
        ("task_slots", 8), ("pushes_filters", True), ("freeze_once", None),
        ("has_executors", False), ("all_properties", {"key": "value"}), ("remember", None),
        ("know_locations", None),
    ):  # fmt: skip
        monkeypatch.setattr(datasource, name, Mock(return_value=answer))
    monkeypatch.setattr(reach, "_PAUSES_S", ())
    monkeypatch.setattr(listener, "install_fold", Mock(return_value=None))
    return SimpleNamespace(dataSource=Mock())


@pytest.mark.parametrize("is_known", [True, False])
def test_a_source_knows_the_session_that_registered_it(session, monkeypatch, tmp_path, is_known):
    """Spark finds the source of a wheel by itself, which knows no session without `register`."""
    source, folder = datasource.RocketMQDataSource, str(tmp_path / "t")
    if is_known:
        locate = Mock(return_value=folder)
        monkeypatch.setattr(datasource, "located", locate)
        install = Mock(return_value=SimpleNamespace(ledgers=frozenset({f"file:{folder}"})))
        monkeypatch.setattr(listener, "install_fold", install)
        datasource.register(session, ledger="a.b.t")
        (source,) = session.dataSource.register.call_args.args
        assert datasource.warn_of_settings.mock_calls == [call(session)]
        assert locate.mock_calls == [call("a.b.t", session, makes=True)]
        assert install.mock_calls == [call(SinkOptions.parse(ledger=folder), session)]

    def made(name_server="h:1", **options):
        return source({"nameServer": name_server, "topic": "t", **options})

    reader, stream = made(path="p").reader(STORED_SCHEMA), made().streamReader(STORED_SCHEMA)
    assert type(reader) is (FilteringReader if is_known else MessageReader)
    assert [each.asked.starting_offsets for each in (reader, stream)] == ["earliest", "latest"]
    for read in (made().reader, made().streamReader):
        with pytest.raises(ConfigurationError, match=r"leave .schema\(...\) out"):
            read(BODY)
    with pytest.raises(ConfigurationError, match="speculation") if is_known else nullcontext():
        made().streamWriter(BODY, False)
    assert datasource.remember.mock_calls == [call({"key": "value"})] * is_known
    locations = {"a.b.t": folder} if is_known else {}
    assert datasource.know_locations.mock_calls == [call(locations)]
    # The driver of an application on one host asks the name servers itself.
    alone = made("127.0.0.1:1", allowSpeculation="true")
    with pytest.raises(NameServerUnavailableError) if is_known else nullcontext():
        alone.writer(BODY, False)
    limited = made(maxMessagesPerSecond="9", allowSpeculation="true")
    with nullcontext() if is_known else pytest.raises(OptionError):
        assert limited.streamWriter(BODY, True).options.rate_tasks == 8
    for ledger, is_folded in ((folder, is_known), (f"{folder}2", False), ("", True)):
        writer = made(ledger=ledger, allowSpeculation="true").streamWriter(BODY, False)
        facts = (writer.folded, writer.token is not None, writer.again)
        assert facts == (is_folded, bool(ledger), False)
        # Spark 4.0 has no stream writers of Arrow batches.
        assert type(writer) is getattr(datasource, "ArrowStreamWriter", datasource.RowStreamWriter)
    assert datasource.freeze_once.called


@pytest.mark.parametrize("ledger", ["", "/l"])
def test_a_source_that_spark_keeps_is_told_of(session, caplog, ledger):
    """Spark 4.0 does so if rocket-sink is a wheel; `python -m tests.versions` has the real one."""
    session.dataSource.register.side_effect = Refused("DATA_SOURCE_ALREADY_EXISTS")
    datasource.register(session, ledger=ledger)
    assert "set rateTasks" in caplog.text
    assert ("The ledger is folded, even if" in caplog.text) is bool(ledger)
    session.dataSource.register.side_effect = Refused("DATA_SOURCE_NOT_FOUND")
    with pytest.raises(AnalysisException):
        datasource.register(session)
