"""A report of very many rows: DuckDB makes the sums, so memory and page stay bounded."""

import json
from pathlib import Path

import pytest
from deltalake import DeltaTable

from rocket_sink.ledger.records import in_order
from tests.ledger.views import quick_ledger
from tests.memory import PEAK_MB
from tests.python import run_python

from .many import many
from .night import store
from .values import accounts, confirmed, context, letter, sends

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


def folds(folder: Path, count: int) -> str:
    """Make a ledger with this number of folds, each with files of its own."""
    path = store(folder, in_order([confirmed(context(epoch=0), 0)], 1 << 32))
    for epoch in range(1, count):
        ctx = context(epoch=epoch, task_attempt_id=epoch)
        rows = [sends(ctx, 3), accounts(ctx, acked=20, dead=1), confirmed(ctx, 21), letter(ctx)]
        store(folder, in_order(rows, (epoch + 1) << 32))
    return path


def test_the_files_of_many_folds_are_opened_once(tmp_path):
    """Open each file once: if each query opened all, 3,000 folds would take 230 s and 10 GB."""
    count = 40
    path = folds(tmp_path, count)
    quick = quick_ledger(path)
    kinds = DeltaTable(path).to_pyarrow_table(columns=["kind"]).column("kind").to_pylist()
    expected = {kind: kinds.count(kind) for kind in set(kinds)}
    select = "SELECT kind, count(*) AS n, count(DISTINCT epoch) AS e FROM ledger_rows GROUP BY 1"
    first = sorted(quick.query(select).to_pylist(), key=str)
    assert {row["kind"]: row["n"] for row in first} == expected
    assert sorted(quick.query(select).to_pylist(), key=str) == first
    for file in tmp_path.glob("kind=*/*.parquet"):
        file.unlink()
    assert sorted(quick.query(select).to_pylist(), key=str) == first
    (sums,) = quick.query(
        "SELECT sum(acked) AS acked, bool_and(adds_up) AS ok FROM epochs"
    ).to_pylist()
    assert sums == {"acked": 20 * (count - 1), "ok": True}
    (pending,) = quick.query("SELECT count(*) AS n FROM pending_letters").to_pylist()
    assert pending["n"] == count - 1
