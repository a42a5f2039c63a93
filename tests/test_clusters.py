"""The suite's own handling of real clusters."""

from pathlib import Path

pytest_plugins = "pytester"

_FAILS = """
import pathlib
import pytest
from rocket_sink.cluster import LocalCluster

@pytest.fixture
def running():
    return LocalCluster(home={home!r})

@pytest.fixture
def cluster(running, monkeypatch):
    monkeypatch.setattr(LocalCluster, "home", pathlib.Path({home!r}))

def test_it(cluster):
    assert False
"""


def test_a_failure_shows_and_keeps_the_logs_of_its_cluster(pytester):
    log = Path(pytester.mkdir("home"), "broker-a", "rocketmq.log")
    log.parent.mkdir()
    log.write_text("".join(f"line {number}\n" for number in range(60)))
    pytester.makepyfile(_FAILS.format(home=str(log.parents[1])))
    shown = pytester.runpytest_inprocess("-p", "tests.conftest").outlines
    assert "--- broker-a/rocketmq.log" in shown and "line 59" in shown
    assert "line 10" in shown and "line 9" not in shown
    (where,) = [line for line in shown if line.startswith("copied to ")]
    copy = Path(where.removeprefix("copied to "), "broker-a", "rocketmq.log")
    assert copy.read_text() == log.read_text()
