"""An executor of two workers: what one worker learns of a broker, its executor knows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rocket_sink.testing import Delay, FakeCluster

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]

SCRIPT = Path(__file__).with_name("executors.py")
SLOW = "broker-b"


@pytest.fixture(scope="module")
def writes(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What the workers sent: by one of them, by all, and by new ones after these were killed."""
    ledger = tmp_path_factory.mktemp("executors") / "ledger"
    with FakeCluster(brokers=2) as cluster:
        cluster.create_topic("t")
        cluster.broker(SLOW).on_send(Delay(4000), times=None)
        arguments = [sys.executable, str(SCRIPT), cluster.name_server, str(ledger), "t"]
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_a_slow_broker_is_avoided_by_all_workers_of_the_executor(writes: list[Any]) -> None:
    ((first, brokers),) = writes[0].items()
    assert brokers.get(SLOW), "the first worker never met the slow broker"
    assert set(writes[1]) - {first}, "no other worker had a task"
    assert all(SLOW not in brokers for brokers in writes[1].values())


def test_new_workers_start_warm(writes: list[Any]) -> None:
    after = writes[2]
    assert after
    assert not {*writes[0], *writes[1]} & set(after)
    assert all(SLOW not in brokers for brokers in after.values())
