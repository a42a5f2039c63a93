"""A backfill that is killed in the middle and run again: real processes, a scripted cluster."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from rocket_sink.testing import FakeCluster

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]

ROWS = 300
RATE = 60
TOPIC = "old"


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster(brokers=2) as fake:
        fake.create_topic(TOPIC, 4)
        yield fake


def command(cluster: FakeCluster, folder: Path, *more: str) -> list[str]:
    return [
        sys.executable, "-m", "rocket_sink.cli", "backfill", "--format", "json",
        "--path", str(folder / "in"), "--ledger", str(folder / "ledger"),
        "-n", cluster.name_server, "--columns", "body=text, sharding_key=k", "-O", "orderBy=n",
        "-O", "sendMsgTimeout=60s", "-O", "connectTimeoutMs=20s", "--to-topic", TOPIC,
        "--master", "local[2]", "--json", *more,
    ]  # fmt: skip


def test_what_was_acknowledged_is_not_sent_twice(cluster: FakeCluster, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    rows = [{"text": f"row {n}", "k": f"k{n % 5}", "n": n} for n in range(ROWS)]
    (tmp_path / "in" / "rows.json").write_text("\n".join(map(json.dumps, rows)))
    # At this rate a chunk is a second's 60 rows: the kill comes in the middle of the third.
    with subprocess.Popen(
        command(cluster, tmp_path, "--rate", str(RATE)), stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, start_new_session=True,
    ) as first:  # fmt: skip
        while len(cluster.messages(TOPIC)) < 2 * RATE + 5 and first.poll() is None:
            time.sleep(0.02)
        assert first.poll() is None, first.stderr.read().decode() if first.stderr else ""
        os.killpg(first.pid, signal.SIGKILL)
    done = subprocess.run(
        command(cluster, tmp_path), capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    stored = [message.body.decode() for message in cluster.messages(TOPIC)]
    assert Counter(stored) == {row["text"]: 1 for row in rows}
    before = ROWS - report["pending_before"]
    assert before >= 2 * RATE, "the first run's acknowledged chunks are in the ledger"
    assert report["found"] > 0, "the kill hit no chunk on its way: the brokers were not asked"
    assert report["resent"] + report["found"] + before == ROWS
    by_key: dict[str, list[int]] = {}
    for broker in cluster.brokers:
        for message in broker.store.messages(TOPIC):
            key = message.properties["__SHARDINGKEY"]
            by_key.setdefault(key, []).append(int(message.body.split()[1]))
    assert all(numbers == sorted(numbers) for numbers in by_key.values())
