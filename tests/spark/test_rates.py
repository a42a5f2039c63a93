"""The division of a write's limits, without Spark: the session is a stand-in."""

from types import SimpleNamespace
from typing import Any

import pytest

from rocket_sink.errors import OptionError
from rocket_sink.options import SinkOptions
from rocket_sink.producer.engine.limits import per_task_rate, rate_limited_options
from rocket_sink.spark import session_checks as host
from rocket_sink.spark.session_checks import with_task_rate


class Session:
    """A classic session of an application with so many slots; None if Spark reports none."""

    _jsparkSession = object()

    def __init__(self, slots: int | None, parallelism: int = 6) -> None:
        profiles = SimpleNamespace(defaultResourceProfile=lambda: "default")
        scala: Any = SimpleNamespace(resourceProfileManager=lambda: profiles)
        if slots is not None:
            scala.maxNumConcurrentTasks = lambda profile: slots
        self.context = SimpleNamespace(
            _jsc=SimpleNamespace(sc=lambda: scala), defaultParallelism=parallelism
        )

    @property
    def sparkContext(self) -> Any:
        return self.context


LIMIT = SinkOptions.parse(maxMessagesPerSecond=1000)


def test_the_limit_is_divided_over_the_task_slots() -> None:
    options = with_task_rate(LIMIT, Session(8))
    assert options.rate_tasks == 8
    assert per_task_rate(options.max_messages_per_second, options) == 125


def test_a_write_of_few_tasks_is_divided_over_these() -> None:
    assert with_task_rate(LIMIT, Session(8), tasks=3).rate_tasks == 3
    assert with_task_rate(LIMIT, Session(8), tasks=300).rate_tasks == 8


@pytest.mark.parametrize("slots", [None, 0])
def test_where_spark_does_not_tell_its_parallelism_stands_in(slots: int | None) -> None:
    assert with_task_rate(LIMIT, Session(slots)).rate_tasks == 6


def test_what_the_user_says_wins() -> None:
    assert with_task_rate(LIMIT.with_(rateTasks=2), Session(8)).rate_tasks == 2


def test_without_a_limit_nobody_is_asked() -> None:
    options = SinkOptions()
    assert with_task_rate(options, None) is options


@pytest.mark.parametrize("slots", [0, None])
def test_no_slots_to_be_seen_is_an_error_that_names_the_option(
    slots: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "active_session", lambda: None)
    with pytest.raises(OptionError, match="rateTasks"):
        with_task_rate(LIMIT, slots=slots)


def test_a_request_holds_no_more_than_a_second() -> None:
    options = rate_limited_options(
        SinkOptions.parse(maxMessagesPerSecond=100, maxBytesPerSecond="1MiB", rateTasks=4)
    )
    assert (options.request_max_messages, options.request_max_bytes) == (25, 2**18)
    tiny = rate_limited_options(
        SinkOptions.parse(maxMessagesPerSecond=1, maxBytesPerSecond=1, rateTasks=4)
    )
    assert (tiny.request_max_messages, tiny.request_max_bytes) == (1, 1024)
    wide = rate_limited_options(SinkOptions.parse(maxMessagesPerSecond=10**9))
    assert wide.request_max_messages == SinkOptions().request_max_messages
