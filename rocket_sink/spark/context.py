"""The context of a task: query, run, epoch, partition, attempt, as Spark tells its workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from pyspark import TaskContext

from rocket_sink.ledger.records import RunContext
from rocket_sink.options import SinkOptions

QUERY_ID: Final = "sql.streaming.queryId"
RUN_ID: Final = "sql.streaming.runId"
BATCH_ID: Final = "streaming.sql.batchId"
JOB_GROUP: Final = "spark.jobGroup.id"
"""The run's id (StreamExecution.runStream calls `setJobGroup`), for tasks without `RUN_ID`."""


def run_context(
    options: SinkOptions,
    lane: str,
    *,
    epoch: int | None = None,
    query_id: str = "",
    run_id: str = "",
    partition: int | None = None,
) -> RunContext:
    """Return the context of the running task, or of the driver if no task runs.

    Args:
        epoch: the epoch; None: read it from Spark's local properties.
        query_id, run_id: ids from the driver; a batch has no query, so it passes its own id.
    """
    task = TaskContext.get()
    query_id = query_id or options.app_id or _local(task, QUERY_ID) or run_id
    run = run_id or streaming_run(lambda name: _local(task, name)) or query_id
    if epoch is None:
        epoch = int(_local(task, BATCH_ID) or 0)
    if task is None:
        return RunContext(query_id or "local", run or "local", epoch, partition, lane=lane)
    return RunContext(
        query_id or "unknown",
        run or "unknown",
        epoch,
        task.partitionId(),
        task.stageId(),
        # pyspark < 4.2 has no stageAttemptNumber on the Python side.
        getattr(task, "stageAttemptNumber", lambda: None)(),
        task.taskAttemptId(),
        task.attemptNumber(),
        lane=lane,
    )


def streaming_query() -> str:
    """Return Spark's id of the running task's streaming query; empty without one."""
    return _local(TaskContext.get(), QUERY_ID)


def streaming_run(local: Callable[[str], str | None]) -> str:
    """Return a streaming query's run id from local properties; empty outside of a query."""
    if not local(QUERY_ID):
        return ""
    return local(RUN_ID) or local(JOB_GROUP) or ""


def _local(task: TaskContext | None, name: str) -> str:
    return task.getLocalProperty(name) or "" if task is not None else ""
