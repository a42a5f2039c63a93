"""A report of very many rows: DuckDB makes the sums, so memory and page stay bounded."""

import dataclasses
import json
import os
from pathlib import Path

import pyarrow as pa
import pytest

from rocket_sink.ledger.append.delta_rs import commit, open_table
from rocket_sink.ledger.path import resolve_path
from rocket_sink.ledger.records import in_flight_rows, in_order, replaced, send_rows
from rocket_sink.ledger.transport.data_files import write_data_files
from tests.memory import PEAK_MB
from tests.python import run_python

from .night import at_second, store
from .values import accounts, attempt, confirmed, context, one_batch

MEMORY_MB = 3 << 10
"""The limit of the process's peak: DuckDB's 1 GB, Arrow's batches, and the chart library."""
PAGE = 2_000_000
REPORT = f"""{PEAK_MB}
import sys
from rocket_sink.cli import main
code = main(sys.argv[1:])
print(peak_mb(), file=sys.stderr)
sys.exit(code)
"""
REQUESTS = [*range(1, 101)]
"""The requests of a task attempt: each has a row before its answer, and the answer."""
DISTINCT = 20
"""The files with rows of their own; the next ones are the first file under other names."""


def rows_of(epoch, template):
    ctx = context(epoch=epoch, task_attempt_id=epoch)
    numbers = pa.array([epoch] * template.num_rows)
    sends = replaced(template, {"epoch": numbers, "task_attempt_id": numbers})
    rows = [sends, accounts(ctx, acked=700), confirmed(ctx, 700)]
    return [at_second(batch, 10 * epoch) for batch in rows]


def many(folder, rows, per_file):
    sizes = [7] * len(REQUESTS)
    waiting = in_flight_rows(REQUESTS, context(), topic="t", message_count=sizes, body_bytes=sizes)
    answers = send_rows([attempt(rtt_ms=n) for n in REQUESTS], context(), requests=REQUESTS)
    template = one_batch([waiting, answers])
    place, epochs = resolve_path(store(folder, [])), per_file // template.num_rows
    for number in range(rows // per_file):
        if number < DISTINCT:
            batches = [
                batch
                for epoch in range(number * epochs, (number + 1) * epochs)
                for batch in rows_of(epoch, template)
            ]
            files = write_data_files(place, in_order(batches, number + 1 << 32))
        else:
            [send] = [file for file in files if file.kind == "send"]
            files = [dataclasses.replace(send, path=f"kind=send/{number}.parquet")]
            os.link(Path(folder, send.path), Path(folder, files[0].path))
        commit(place, open_table(place), files, "", 0)


@pytest.mark.parametrize(
    ("rows", "per_file"),
    [(400_000, 200_000), pytest.param(100_000_000, 1_000_000, marks=pytest.mark.slow)],
)
def test_memory_and_page_stay_bounded(tmp_path, rows, per_file):
    ledger, page = tmp_path / "ledger", tmp_path / "page.html"
    many(ledger, rows, per_file)
    words = ("report", "--ledger", ledger, "--json", "--html", page)
    done = run_python("-c", REPORT, *words, timeout_s=3600, cwd=tmp_path)
    report = json.loads(done.stdout)
    assert sum(broker["requests"] for broker in report["brokers"]) == rows // 2
    assert "in_flight" not in {name for b in report["brokers"] for name in b["outcomes"]}
    assert report["verdict"][0]["level"] == "well"
    assert int(done.stderr.split()[-1]) < MEMORY_MB
    assert page.stat().st_size < PAGE
    assert {path.name for path in tmp_path.iterdir()} == {"ledger", "page.html"}
