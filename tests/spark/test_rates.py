"""The division of a write's limits, without Spark: the session is a stand-in."""

from types import SimpleNamespace
from typing import Any

import pytest

from rocket_sink.errors import OptionError
from rocket_sink.options import SinkOptions
from rocket_sink.producer.engine.limits import per_task_rate
from rocket_sink.spark import session_checks as host
from rocket_sink.spark.session_checks import with_task_rate


def session(slots):
    """Return a session of an application with so many slots; None if Spark reports none."""
    profiles = SimpleNamespace(defaultResourceProfile=lambda: "default")
    scala: Any = SimpleNamespace(resourceProfileManager=lambda: profiles)
    if slots is not None:
        scala.maxNumConcurrentTasks = lambda profile: slots
    context = SimpleNamespace(_jsc=SimpleNamespace(sc=lambda: scala), defaultParallelism=6)
    return SimpleNamespace(_jsparkSession=object(), sparkContext=context)


LIMIT = SinkOptions.parse(maxMessagesPerSecond=1000)


@pytest.mark.parametrize(
    ("own", "slots", "write", "tasks"),
    [
        # The limit is divided over the task slots, or over the tasks of a write that has few.
        ("", 8, {}, 8), ("", 8, {"tasks": 3}, 3), ("", 8, {"tasks": 300}, 8),
        # If Spark does not tell its slots, its parallelism stands in.
        ("", None, {}, 6), ("", 0, {}, 6),
        # The user's number wins.
        ("2", 8, {}, 2),
    ],
)  # fmt: skip
def test_a_limit_is_divided(own, slots, write, tasks):
    given = LIMIT.with_(rateTasks=own) if own else LIMIT
    options = with_task_rate(given, session(slots), **write)
    assert options.rate_tasks == tasks
    assert per_task_rate(options.max_messages_per_second, options) == 1000 / tasks


def test_without_a_limit_nobody_is_asked():
    options = SinkOptions()
    assert with_task_rate(options, None) is options


@pytest.mark.parametrize("slots", [0, None])
def test_no_slots_to_be_seen_is_an_error_that_names_the_option(slots, monkeypatch):
    monkeypatch.setattr(host, "active_session", lambda: None)
    with pytest.raises(OptionError, match="rateTasks"):
        with_task_rate(LIMIT, slots=slots)
