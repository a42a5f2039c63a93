"""A report of very many rows: sums are made where the data is, so memory and page stay bounded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from .many import many

MEMORY: int = 3 << 30
"""Peak of the whole process: DuckDB's 1 GB, Arrow's batches on their way, the chart library."""
PAGE = 2_000_000
REPORT = """
import resource, sys
from rocket_sink.cli import main
code = main(sys.argv[1:])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)
sys.exit(code)
"""


@pytest.mark.parametrize(
    ("rows", "per_file"),
    [(400_000, 200_000), pytest.param(100_000_000, 1_000_000, marks=pytest.mark.slow)],
)
def test_memory_and_page_stay_bounded(tmp_path: Path, rows: int, per_file: int) -> None:
    ledger, page = many(tmp_path / "ledger", rows=rows, per_file=per_file), tmp_path / "page.html"
    done = subprocess.run(
        [sys.executable, "-c", REPORT, "report", "--ledger", ledger, "--json", "--html", str(page)],
        cwd=tmp_path, capture_output=True, text=True, timeout=3600, check=True,
    )  # fmt: skip
    found = json.loads(done.stdout)
    assert sum(broker["requests"] for broker in found["brokers"]) == rows // 2
    assert "in_flight" not in {name for b in found["brokers"] for name in b["outcomes"]}
    assert found["verdict"][0]["level"] == "well"
    assert int(done.stderr.split()[-1]) * 1024 < MEMORY
    assert page.stat().st_size < PAGE
    assert {path.name for path in tmp_path.iterdir()} == {"ledger", "page.html"}
