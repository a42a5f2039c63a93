"""The brokers' own count of messages: wait while it grows, believe it when it stands still."""

import itertools

import pytest

from benchmarks import stored
from rocket_sink.errors import RocketSinkError


@pytest.fixture
def count(monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr(stored.time, "monotonic", lambda: float(next(clock)))
    monkeypatch.setattr(stored.time, "sleep", lambda seconds: None)
    return stored.StoredCount("n:1", "t")


def test_brokers_that_catch_up_slowly_are_waited_for(count, monkeypatch):
    readings = itertools.count()
    monkeypatch.setattr(count, "_now", lambda: next(readings) // 20)
    assert count.check(100, "case") == 0


def test_a_count_that_stands_still_is_believed(count, monkeypatch):
    monkeypatch.setattr(count, "_now", lambda: 99)
    with pytest.raises(RocketSinkError, match="hold 99"):
        count.check(100, "case")
