"""`rocket-sink demo`, smaller: it must pass under a freeze and under a kill."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.spark, pytest.mark.timeout(1800)]

ROWS = 30_000


def demo(*arguments: str) -> tuple[int, Any, str]:
    done = subprocess.run(
        [sys.executable, "-m", "rocket_sink.cli", "demo", "--rows", str(ROWS), "--json",
         *arguments],
        capture_output=True, text=True, timeout=1500,
    )  # fmt: skip
    return done.returncode, json.loads(done.stdout) if done.stdout else None, done.stderr


@pytest.mark.parametrize("fault", ["freeze", "kill"])
def test_a_strict_run_passes_with_a_broken_broker(fault: str, tmp_path: Path) -> None:
    out = tmp_path / "demo"
    code, found, err = demo("--fault", fault, "--out", str(out))
    assert code == 0, f"{found}\n{err}"
    assert found["passed"] and found["failures"] == []
    totals, stored = found["ledger"]["totals"], found["stored"]
    assert (
        totals["rows_in"]
        == ROWS
        == totals["acked"]
        + totals["degraded"]
        + totals["dead"]
        + (totals["unknown"] + totals["filtered"])
    )
    assert stored["lost"] == stored["altered"] == stored["disordered_keys"] == 0
    assert stored["stored"] - stored["duplicates"] == stored["distinct"]
    assert "broker-b" in err
    assert (out / "ledger" / "_delta_log").is_dir()
    assert not (out / "flights").exists()


@pytest.mark.slow
@pytest.mark.parametrize("ordering", ["none", "best_effort"])
@pytest.mark.parametrize("fault", ["freeze", "kill"])
def test_other_orderings_pass_as_well(ordering: str, fault: str, tmp_path: Path) -> None:
    code, found, err = demo(
        "--fault", fault, "--ordering", ordering, "--out", str(tmp_path / "demo")
    )
    assert code == 0, f"{found}\n{err}"


def test_a_folder_with_other_files_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    code, found, err = demo("--out", str(tmp_path))
    assert (code, found) == (1, None)
    assert "mine.txt" in err
    assert (tmp_path / "mine.txt").exists()
