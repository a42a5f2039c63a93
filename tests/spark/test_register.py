"""`register`: its demands on a session, and Spark's answers."""

from __future__ import annotations

import pytest
from pyspark.errors import AnalysisException

from rocket_sink.spark import datasource


class Refused(AnalysisException):
    def __init__(self, condition: str) -> None:
        super().__init__(condition)
        self._condition = condition

    def getCondition(self) -> str:
        return self._condition


class Manager:
    """The data sources of a session whose Spark keeps those that it has found by itself."""

    def __init__(self, condition: str) -> None:
        self.condition = condition

    def register(self, source: type) -> None:
        raise Refused(self.condition)


class Session:
    def __init__(self, condition: str) -> None:
        self.dataSource = Manager(condition)


def test_a_source_that_spark_keeps_is_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Spark 4.0 does so if rocket-sink is a wheel; `python -m tests.versions` has the real one."""
    monkeypatch.setattr(datasource, "warn_of_settings", lambda _: None)
    monkeypatch.setattr(datasource, "speculates", lambda _: False)
    monkeypatch.setattr(datasource, "is_classic", lambda _: False)
    monkeypatch.setattr(datasource, "task_slots", lambda _: 0)
    datasource.register(Session("DATA_SOURCE_ALREADY_EXISTS"))  # type: ignore[arg-type]
    assert "set rateTasks" in caplog.text
    with pytest.raises(AnalysisException):
        datasource.register(Session("DATA_SOURCE_NOT_FOUND"))  # type: ignore[arg-type]
