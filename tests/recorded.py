"""Tasks whose ledger rows are folded without Spark, and what `rocket-sink verify` says of them."""

import contextlib

import pyarrow as pa

from rocket_sink.ledger.records import in_order
from rocket_sink.options import SinkOptions
from rocket_sink.producer.engine.engine import SendEngine
from rocket_sink.producer.pool import ProducerPool
from rocket_sink.rows.contract import resolve_columns
from rocket_sink.task.runner import TaskRunner
from tests.ledger.night import store
from tests.ledger.values import confirmed
from tests.run_command import run_command

ROWS = 300


def run(name_server, folder, ctx, nth=1, *, timed=False, options=None, **more):
    """Run a task with `ROWS` rows, and fold its ledger rows."""
    own = options or {}
    parsed = SinkOptions.parse(nameServer=name_server, topic="t", requestMaxMessages=20, **own)
    rows = []
    columns = {"body": [f"{ctx.epoch}-{n}" for n in range(ROWS)],
               "keys": [[f"key-{n}"] for n in range(ROWS)], **more}  # fmt: skip
    batch = pa.RecordBatch.from_pydict(columns)
    pool = ProducerPool(make=lambda own: SendEngine(own, shared=None))
    runner = TaskRunner(
        parsed, ctx, emit=rows.append, pool=pool, keeps_dead_letters=True, timed=timed
    )
    with contextlib.closing(pool), runner:
        runner.feed(batch, resolve_columns(batch.schema, parsed))
        runner.finish()
    rows.append(confirmed(ctx, ROWS, rows_in=ROWS))
    store(folder, in_order(rows, nth << 32))


def verified(name_server, *arguments, code=0):
    done = run_command("verify", "-n", name_server, "-t", "t", "--json", *arguments)
    assert done.code == code, (done.out, done.err)
    [result] = done.json()
    assert result["adds_up"] is (code == 0)
    return {name: value for name, value in result.items() if value and name != "examples"}
