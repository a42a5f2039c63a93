"""Two backfills of one ledger at once: real processes, and what a scripted cluster has stored."""

from __future__ import annotations

import json
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from rocket_sink.testing import FakeCluster

from .test_backfill_kill import TOPIC, command

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]

ROWS = 300


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster(brokers=2) as fake:
        fake.create_topic(TOPIC, 4)
        yield fake


def start(cluster: FakeCluster, folder: Path, *more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(cluster, folder, *more), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_each_row_is_sent_once(cluster: FakeCluster, tmp_path: Path) -> None:
    """Two start together on a ledger that is not there; a third will not wait for them."""
    (tmp_path / "in").mkdir()
    rows = [{"text": f"row {n}", "k": f"k{n % 5}", "n": n} for n in range(ROWS)]
    (tmp_path / "in" / "rows.json").write_text("\n".join(map(json.dumps, rows)))
    both = [start(cluster, tmp_path, "--rate", "20") for _ in range(2)]
    while not cluster.messages(TOPIC) and all(one.poll() is None for one in both):
        time.sleep(0.05)
    third = start(cluster, tmp_path, "--no-wait")
    ended = [(one, *one.communicate(timeout=600)) for one in (*both, third)]
    reports = []
    for one, out, said in ended[:2]:
        assert one.returncode == 0, said
        reports.append(json.loads(out))
    assert sorted(report["resent"] for report in reports) == [0, ROWS]
    assert sum("waits for another backfill" in said for _, _, said in ended[:2]) == 1
    process, _, said = ended[2]
    if "at work" in said:  # else the two were done before it looked
        assert process.returncode == 1
        assert any(f"process {one.pid}" in said for one in both)
    stored = Counter(message.body.decode() for message in cluster.messages(TOPIC))
    assert stored == {row["text"]: 1 for row in rows}
