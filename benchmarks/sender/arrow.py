"""Sending columns: the lanes' task code without Spark, and `TableProducer`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from tempfile import TemporaryDirectory
from typing import Final

import pyarrow as pa

from benchmarks.rows import numbered_table, record_batch
from benchmarks.sender.modes import Job, Numbers, Send
from rocket_sink.errors import DeliveryError
from rocket_sink.ledger.records import RunContext
from rocket_sink.options import SinkOptions
from rocket_sink.producer.engine.engine import SendEngine
from rocket_sink.producer.pool import ProducerPool
from rocket_sink.rows.contract import ColumnPlan
from rocket_sink.task.runner import TaskRunner
from rocket_sink.task.table_producer import TableProducer

BATCH_ROWS: Final = 20_000
"""Rows of a record batch, unless the job says another number."""


@contextmanager
def send_arrow(job: Job) -> Iterator[Send]:
    """Sends the same record batch repeatedly."""
    with ExitStack() as stack:
        more = {}
        if job.ledger:
            more["ledger"] = stack.enter_context(TemporaryDirectory(prefix="rocket-sink-"))
        yield from _sending(job, more)


def _sending(job: Job, more: dict[str, str]) -> Iterator[Send]:
    values = {**job.options, "topic": job.topic, "ordering": job.ordering, **more}
    options = SinkOptions.parse(values)
    rows = job.rows or BATCH_ROWS
    batch = record_batch(rows, job.size, job.keys)
    if job.delay:
        levels = pa.array([job.delay] * rows, pa.int32())
        batch = batch.append_column("delay_level", levels)
    plan = ColumnPlan(tuple((name, name) for name in batch.schema.names), job.topic)
    pool = ProducerPool(make=SendEngine)

    def send(numbers: range, until_s: float | None) -> None:
        began_s, remaining = time.monotonic(), len(numbers)
        run = TaskRunner(options, RunContext("benchmark", "benchmark", 0), pool=pool)
        try:
            while remaining > 0 and (until_s is None or time.monotonic() < until_s):
                run.feed(batch.slice(0, min(remaining, rows)), plan)
                remaining -= rows
            summary = run.finish()
        except BaseException:
            run.abort()
            raise
        job.tally.succeeded(began_s, time.monotonic(), range(summary.acked))

    try:
        yield send
    finally:
        engine = pool.acquire(options)
        engine.close()
        pool.release(engine)


@contextmanager
def send_tables(job: Job) -> Iterator[Send]:
    """Makes a new Arrow table for each send; one send at a time."""
    with TableProducer(**job.options, topic=job.topic, ordering=job.ordering) as producer:

        def send(numbers: range, until_s: float | None) -> None:
            parts = Numbers(numbers, until_s)
            while part := parts.take(job.batch):
                began_s = time.monotonic()
                summary = producer.send(numbered_table(part, job.size)).summary
                ended_s, doubtful = time.monotonic(), summary.duplicates_possible > 0
                acked = part[: summary.acked]
                job.tally.succeeded(began_s, ended_s, acked, maybe_duplicate=doubtful)
                if unacked := part[summary.acked :]:
                    error = DeliveryError(summary.first_error)
                    unknown = summary.unknown > 0
                    job.tally.failed_with(began_s, ended_s, error, unacked, unknown=unknown)

        yield send
