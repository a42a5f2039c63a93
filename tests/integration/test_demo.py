"""`rocket-sink demo` with fewer rows passes under a freeze and under a kill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.run_command import Done, run_command

pytestmark = [pytest.mark.cluster, pytest.mark.spark, pytest.mark.timeout(1800)]

ROWS = 20_000
"""The rows of four micro-batches; two come after the fault."""


def demo(spark: Any, *arguments: str) -> Done:
    return run_command("demo", "--rows", str(ROWS), "--json", *arguments, spark=spark)


@pytest.mark.parametrize("fault", ["freeze", pytest.param("kill", marks=pytest.mark.slow)])
def test_a_strict_run_passes_with_a_broken_broker(spark: Any, fault: str, tmp_path: Path) -> None:
    out = tmp_path / "demo"
    done = demo(spark, "--fault", fault, "--out", str(out))
    assert done.code == 0, f"{done.out}\n{done.err}"
    result = done.json()
    assert result["passed"] and result["failures"] == []
    totals, stored = result["ledger"]["totals"], result["stored"]
    outcomes = ("acked", "degraded", "dead", "unknown", "filtered")
    assert totals["rows_in"] == ROWS == sum(totals[outcome] for outcome in outcomes)
    assert stored["lost"] == stored["foreign"] == stored["disordered_keys"] == 0
    assert stored["stored"] - stored["duplicates"] == stored["distinct"]
    assert "broker-b" in done.err
    assert (out / "ledger" / "_delta_log").is_dir()
    assert not (out / "flights").exists()


def test_a_folder_with_other_files_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    done = run_command("demo", "--out", str(tmp_path), "--json")
    assert (done.code, done.out) == (1, "")
    assert "mine.txt" in done.err
    assert (tmp_path / "mine.txt").exists()
