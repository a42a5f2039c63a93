"""The benchmark as users run it: one small case with everything real."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.spark, pytest.mark.timeout(900)]


def test_a_lane_beside_its_twin(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    done = subprocess.run(
        [
            sys.executable, "-m", "rocket_sink.cli", "benchmark", "--rows", "2000", "--repeat", "1",
            "--lane", "source-batch", "--ordering", "strict", "--keys", "10", "--out", str(out),
        ],
        capture_output=True, text=True, timeout=800,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    middle = {one["case"]: one for one in found["medians"]}
    ours, twin = "source-batch strict 10 keys 256 B", "source-batch-nothing 10 keys 256 B"
    assert {ours, twin} <= set(middle)
    assert middle[ours]["messages"] == middle[twin]["messages"] == 2000
    assert middle[ours]["brokers"] > 0 and middle[ours]["jvm"] > 0 and middle[ours]["client"] > 0
    assert {(one["case"], one["against"], one["what"]) for one in found["ratios"]} >= {
        (ours, twin, "msg/s"), (ours, twin, "cpu")
    }  # fmt: skip
    assert ours in done.stdout
