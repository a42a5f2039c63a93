"""The error budget of an epoch, on the driver."""

from __future__ import annotations

from typing import Any

import pytest

from rocket_sink.errors import ConfigurationError, DeliveryError
from rocket_sink.options import SinkOptions
from rocket_sink.spark.datasource import ArrowStreamWriter, TaskMessage
from rocket_sink.spark.session_checks import check_budget
from rocket_sink.spark.sink import ForeachTask
from rocket_sink.task.totals import TaskSummary


def counts(rows_in: int, dead: int, unknown: int = 0) -> dict[str, Any]:
    return {"rows_in": rows_in, "dead": dead, "unknown": unknown, "first_error": "why"}


@pytest.mark.parametrize(
    ("options", "given", "limit"),
    [
        ({"maxEpochFailures": 3}, counts(100, 2, 2), "maxEpochFailures=3"),
        ({"maxEpochFailures": 0}, counts(100, 1), "maxEpochFailures=0"),
        ({"maxEpochFailureRatio": 0.1}, counts(100, 11), r"maxEpochFailureRatio=0\.1"),
    ],
)
def test_beyond_the_budget(options: dict[str, Any], given: dict[str, Any], limit: str) -> None:
    with pytest.raises(DeliveryError, match=f"epoch 7 .* {limit} .*why"):
        check_budget(SinkOptions.parse(options), given, 7)


@pytest.mark.parametrize(
    ("options", "given"),
    [
        ({}, counts(100, 100)),
        ({"maxEpochFailures": 3}, counts(100, 3)),
        ({"maxEpochFailureRatio": 0.1}, counts(100, 10)),
        ({"maxEpochFailureRatio": 0}, counts(0, 0)),
    ],
)
def test_within_the_budget(options: dict[str, Any], given: dict[str, Any]) -> None:
    check_budget(SinkOptions.parse(options), given, 7)


def test_a_data_source_sums_its_tasks_up() -> None:
    options = SinkOptions.parse(nameServer="n:1", topic="t", maxEpochFailures=3)
    summary = TaskSummary(rows_in=5, acked=3, dead=1, unknown=1, first_error="why")
    messages = [TaskMessage("q", "r", 7, summary), None, TaskMessage("q", "r", 7, summary)]
    writer = ArrowStreamWriter(options, None)  # type: ignore[arg-type]
    with pytest.raises(DeliveryError, match="4 of 10 rows of epoch 7"):
        writer.commit(messages, 7)
    writer.commit(messages[:2], 7)


def test_foreach_has_no_step_on_the_driver() -> None:
    options = SinkOptions.parse(nameServer="n:1", topic="t", maxEpochFailures=3)
    with pytest.raises(ConfigurationError, match="foreachBatch"):
        ForeachTask(options, None, 0, 0)
