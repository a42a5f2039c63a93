"""Runs one task attempt over one batch, with a pool and routes of its own.

Routes that workers share may be some milliseconds old: the task would not see a change that the
test has just made.
"""

import contextlib

import pyarrow as pa

from rocket_sink.ledger.records import RunContext
from rocket_sink.producer.engine.engine import SendEngine
from rocket_sink.producer.pool import ProducerPool
from rocket_sink.rows.contract import resolve_columns
from rocket_sink.task.runner import TaskRunner

CTX = RunContext("q", "r", 3, 0, 1, 7, 0, worker="w:1", lane="foreach")


def run_task(options, ctx, columns, **more):
    """Run the task and return its summary; an error of the task is raised here."""
    batch = pa.RecordBatch.from_pydict(columns)
    with contextlib.closing(ProducerPool(make=lambda own: SendEngine(own, shared=None))) as pool:
        run = TaskRunner(options, ctx, pool=pool, **more)
        run.feed(batch, resolve_columns(batch.schema, options))
        return run.finish()
