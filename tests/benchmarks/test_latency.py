"""Latencies of single rows, without Spark: shares, the ledger's commits, tables."""

import json

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.latency import commits_of, shares
from benchmarks.readme_tables import markdown
from benchmarks.results import Results, read_results

RECORD = {
    "lane": "foreach", "pace": "1,000 rows/s", "rows": 1000,
    "stored_ms": {"p50": 1.4, "p95": 2.0, "p99": 3.0},
    "ledger_ms": {"p50": 4000.0, "p95": 5000.0, "p99": 6000.0},
}  # fmt: skip
MACHINE = dict.fromkeys(("cores", "processor", "memory_gb", "python", "java", "pyspark",
                         "rocketmq", "at"), "?")  # fmt: skip


def test_shares_are_values_that_were_measured():
    assert shares([float(n) for n in range(100, 0, -1)]) == {"p50": 50, "p95": 95, "p99": 99}
    assert shares([7.0]) == {"p50": 7, "p95": 7, "p99": 7}


def test_a_row_is_in_the_ledger_with_the_commit_that_brings_its_epoch(tmp_path):
    log = tmp_path / "_delta_log"
    log.mkdir()

    def commit(number, *files, is_new=True):
        actions = [{"commitInfo": {"timestamp": 100 + number}}]
        for path, acked in files:
            (tmp_path / path).parent.mkdir(exist_ok=True)
            pq.write_table(pa.table({"acked": pa.array(acked, pa.int64())}), tmp_path / path)
            actions.append({"add": {"path": path, "dataChange": is_new}})
        text = "\n".join(map(json.dumps, actions))
        (log / f"{number:020}.json").write_text(text, encoding="utf-8")

    commit(0)
    commit(1, ("kind=epoch/a.parquet", [2, None]), ("kind=send/a.parquet", [9]))
    commit(2, ("kind=send/b.parquet", [9]))
    commit(3, ("kind=epoch/b.parquet", [1]), ("kind=epoch/c.parquet", [4]))
    commit(4, ("kind=epoch/merged.parquet", [2, None, 1, 4]), is_new=False)
    assert list(commits_of(tmp_path)) == [(101, 2), (103, 5)]


def test_they_are_in_file_and_tables(tmp_path):
    results = Results(MACHINE, {}, latency=[RECORD])
    results.write(tmp_path / "results.json")
    again = read_results(tmp_path / "results.json")
    assert again.latency == [RECORD] and not again.is_empty
    assert "| 1,000 rows/s | foreach | 1 / 2 / 3 | 4,000 / 5,000 / 6,000 |" in markdown(again)
