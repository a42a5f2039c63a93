"""Executors with disks of their own: they prove that the ledger is shared, or send nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rocket_sink.ledger.quick import open_quick
from rocket_sink.testing import FakeCluster

pytestmark = [
    pytest.mark.spark,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        not shutil.which("unshare") or os.geteuid() != 0, reason="mount namespaces need root"
    ),
]

REPOSITORY = Path(__file__).parents[2]
EVERY = ("foreach", "foreach_batch", "write", "source_stream", "source_batch", "backfill")
ROWS = 400


def play(cluster: FakeCluster, folder: Path, state: str, *lanes: str) -> dict[str, dict[str, Any]]:
    """What became of each lane; see `own_disks.py`."""
    (folder / "disk").mkdir()
    for lane in lanes:
        cluster.create_topic(lane)
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.own_disks", cluster.name_server, str(folder),
         state, *lanes],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=1500,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found = (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    return {one["lane"]: one for one in found}


def epochs(folder: Path) -> list[dict[str, Any]]:
    """As delta-rs and DuckDB read them."""
    quick = open_quick(folder / "disk" / "ledger")
    assert quick is not None
    return quick.query("SELECT * FROM epochs").to_pylist()


def test_nothing_is_sent_by_tasks_that_see_another_folder(tmp_path: Path) -> None:
    with FakeCluster(brokers=1) as cluster:
        found = play(cluster, tmp_path, "own", *EVERY, "fold")
        assert list(found) == [*EVERY, "fold"]
        for lane, one in found.items():
            assert "not the one that the driver sees" in one["error"], (lane, one)
            assert "mount storage" in one["error"], lane
            assert not cluster.messages(lane), lane
    assert len(list((tmp_path / "disk" / "ledger" / "_spool").rglob("*.arrow"))) == 1


def test_nothing_is_sent_by_tasks_that_cannot_write(tmp_path: Path) -> None:
    with FakeCluster(brokers=1) as cluster:
        found = play(cluster, tmp_path, "readonly", *EVERY)
        assert list(found) == list(EVERY)
        for lane, one in found.items():
            assert "Read-only file system" in one["error"], (lane, one)
            assert "let the users of driver and executors write" in one["error"], lane
            assert not cluster.messages(lane), lane


def test_executors_that_share_the_disk_pass(tmp_path: Path) -> None:
    with FakeCluster(brokers=1) as cluster:
        found = play(cluster, tmp_path, "shared", "foreach", "source_batch")
        assert not any(one["error"] or one["log"] for one in found.values()), found
        for lane in found:
            assert len(cluster.messages(lane)) == ROWS // 2
    sums = [(e["rows_in"], e["acked"], e["dead"], e["missing_rows"]) for e in epochs(tmp_path)]
    assert sums == [(ROWS, ROWS // 2, ROWS // 2, 0)] * 2


def test_rows_that_went_to_another_spool_are_an_error(tmp_path: Path) -> None:
    """The token is there; what Spark handed over is not in the accounts."""
    with FakeCluster(brokers=1) as cluster:
        found = play(cluster, tmp_path, "spool", "foreach", "source_batch")
        assert not any(one["error"] for one in found.values()), found
    said = [line for line in found["foreach"]["log"] if line.startswith("ERROR")]
    assert len(said) == 1 and "lacks" in said[0] and f"of the {ROWS} rows" in said[0], found
    wrong = epochs(tmp_path)
    assert len(wrong) == 2
    for epoch in wrong:
        assert 0 < epoch["missing_rows"] == ROWS - epoch["rows_in"], epoch
        assert not epoch["adds_up"] and epoch["confirmed"]
