"""`register`: its demands on a session, and Spark's answers."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql.types import StructType

from rocket_sink.errors import ConfigurationError
from rocket_sink.spark import datasource


class Refused(AnalysisException):
    def getCondition(self):
        return self._message


@pytest.fixture(autouse=True)
def no_java(monkeypatch):
    for name, answer in (
        ("warn_of_settings", None), ("speculates", True), ("is_classic", False),
        ("task_slots", 8), ("pushes_filters", False), ("freeze_once", None),
    ):  # fmt: skip
        monkeypatch.setattr(datasource, name, Mock(return_value=answer))


def test_writers_know_the_facts_of_the_session():
    """Divide a limit over the session's task slots, and refuse its speculation."""
    session = SimpleNamespace(dataSource=Mock())
    datasource.register(session)
    (source,) = session.dataSource.register.call_args.args
    schema = StructType().add("body", "string")
    options = {"nameServer": "h:1", "topic": "t", "maxMessagesPerSecond": "1000"}
    with pytest.raises(ConfigurationError, match="speculation"):
        source(options).streamWriter(schema, False)
    writer = source({**options, "allowSpeculation": "true"}).streamWriter(schema, False)
    assert writer.options.rate_tasks == 8 and datasource.freeze_once.called


def test_a_source_that_spark_keeps_is_told_of(caplog):
    """Spark 4.0 does so if rocket-sink is a wheel; `python -m tests.versions` has the real one."""
    session = SimpleNamespace(dataSource=Mock())
    session.dataSource.register.side_effect = Refused("DATA_SOURCE_ALREADY_EXISTS")
    datasource.register(session)
    assert "set rateTasks" in caplog.text
    session.dataSource.register.side_effect = Refused("DATA_SOURCE_NOT_FOUND")
    with pytest.raises(AnalysisException):
        datasource.register(session)
