"""A report of very many rows: DuckDB makes the sums, so memory and page stay bounded."""

import json

import pytest

from tests.memory import PEAK_MB
from tests.python import run_python

from .many import many

MEMORY_MB: int = 3 << 10
"""The limit of the process's peak: DuckDB's 1 GB, Arrow's batches, and the chart library."""
PAGE = 2_000_000
REPORT = f"""{PEAK_MB}
import sys
from rocket_sink.cli import main
code = main(sys.argv[1:])
print(peak_mb(), file=sys.stderr)
sys.exit(code)
"""


@pytest.mark.parametrize(
    ("rows", "per_file"),
    [(400_000, 200_000), pytest.param(100_000_000, 1_000_000, marks=pytest.mark.slow)],
)
def test_memory_and_page_stay_bounded(tmp_path, rows, per_file):
    ledger, page = many(tmp_path / "ledger", rows=rows, per_file=per_file), tmp_path / "page.html"
    words = ("report", "--ledger", ledger, "--json", "--html", page)
    done = run_python("-c", REPORT, *words, timeout_s=3600, cwd=tmp_path)
    report = json.loads(done.stdout)
    assert sum(broker["requests"] for broker in report["brokers"]) == rows // 2
    assert "in_flight" not in {name for b in report["brokers"] for name in b["outcomes"]}
    assert report["verdict"][0]["level"] == "well"
    assert int(done.stderr.split()[-1]) < MEMORY_MB
    assert page.stat().st_size < PAGE
    assert {path.name for path in tmp_path.iterdir()} == {"ledger", "page.html"}
