"""`register`: its demands on a session, and Spark's answers."""

from typing import Any

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql.types import StructType

from rocket_sink.errors import ConfigurationError
from rocket_sink.spark import datasource


class Refused(AnalysisException):
    def __init__(self, condition: str) -> None:
        super().__init__(condition)
        self._condition = condition

    def getCondition(self) -> str:
        return self._condition


class Manager:
    """The data sources of a session whose Spark keeps those that it has found by itself."""

    def __init__(self, condition: str = "") -> None:
        self.condition = condition
        self.sources: list[Any] = []

    def register(self, source: type) -> None:
        if self.condition:
            raise Refused(self.condition)
        self.sources.append(source)


class Session:
    def __init__(self, condition: str = "") -> None:
        self.dataSource = Manager(condition)


@pytest.fixture(autouse=True)
def no_java(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasource, "warn_of_settings", lambda _: None)
    monkeypatch.setattr(datasource, "speculates", lambda _: True)
    monkeypatch.setattr(datasource, "is_classic", lambda _: False)
    monkeypatch.setattr(datasource, "task_slots", lambda _: 8)
    monkeypatch.setattr(datasource, "pushes_filters", lambda _: False)


def test_writers_know_the_facts_of_the_session() -> None:
    """Divide a limit over the session's task slots, and refuse its speculation."""
    session = Session()
    datasource.register(session)  # type: ignore[arg-type]
    (source,) = session.dataSource.sources
    schema = StructType().add("body", "string")
    options = {"nameServer": "h:1", "topic": "t", "maxMessagesPerSecond": "1000"}
    with pytest.raises(ConfigurationError, match="speculation"):
        source(options).streamWriter(schema, False)
    writer = source({**options, "allowSpeculation": "true"}).streamWriter(schema, False)
    assert writer.options.rate_tasks == 8


def test_a_source_that_spark_keeps_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    """Spark 4.0 does so if rocket-sink is a wheel; `python -m tests.versions` has the real one."""
    datasource.register(Session("DATA_SOURCE_ALREADY_EXISTS"))  # type: ignore[arg-type]
    assert "set rateTasks" in caplog.text
    with pytest.raises(AnalysisException):
        datasource.register(Session("DATA_SOURCE_NOT_FOUND"))  # type: ignore[arg-type]
