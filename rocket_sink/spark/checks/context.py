"""The context of a task, the streaming query of a frame, and stages that ran again, as Spark tells
its workers and its driver."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final, NamedTuple

from py4j.protocol import Py4JError
from pyspark import SparkContext, TaskContext
from pyspark.sql import DataFrame, SparkSession

from rocket_sink.ledger.epoch_starts import IdFacts
from rocket_sink.ledger.records import RunContext
from rocket_sink.ledger.storage import is_classic
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
        task.taskAttemptId(),
        task.attemptNumber(),
        lane=lane,
    )


class StreamRun(NamedTuple):
    """A run of a streaming query. A start, also after a failure, is a new run.

    Attributes:
        query_id, run_id: Spark's ids; both are empty outside of a query, and over Spark Connect.
        is_unclear: queries run in this application, and nothing tells whether one of them has made
            the frame, or called this thread.
        name: the `queryName`, if Spark tells it.
        execution: the running query in the JVM; None if Spark hides it.
    """

    query_id: str = ""
    run_id: str = ""
    is_unclear: bool = False
    name: str = ""
    execution: Any = None


def run_of(df: DataFrame) -> StreamRun:
    """Return the run of the streaming query that made a foreachBatch function's frame.

    Each run makes its frames in a session of its own, a clone of the user's session, so the session
    of a frame tells the run. Spark's local properties tell it only in the thread that Spark calls:
    other threads do not have them, or have those of an earlier run. So ask them only about frames
    of other sessions."""
    if not is_classic(df.sparkSession):
        return StreamRun()
    session, local = df._jdf.sparkSession(), df.sparkSession.sparkContext.getLocalProperty
    executions: list[Any] = []
    # The method is internal to Spark, and a version may lack it.
    with contextlib.suppress(Py4JError, TypeError):
        executions = list(session.sharedState().activeStreamingQueries().values())
    own, called = None, streaming_run(local)
    for execution in executions:
        batch = execution.lastExecution()
        if batch is not None and batch.sparkSession().equals(session):
            own = execution
            break
        if execution.runId().toString() == called:
            own = execution
    if own is not None:
        ids = own.id().toString(), own.runId().toString()
        return StreamRun(*ids, name=own.name() or "", execution=own)
    if query := local(QUERY_ID) or "":
        return StreamRun(query, called)
    return StreamRun(is_unclear=bool(executions))


@contextlib.contextmanager
def watched_stages(session: SparkSession) -> Iterator[Callable[[], bool]]:
    """Yield a function to be called after the block. It returns whether Spark has run, or may have
    run, a stage of the block's jobs again, as after the loss of an executor.

    No Python task knows the attempt of its stage, and its first attempt in a later attempt of the
    stage has the number 0. The status tracker of the driver knows the attempt. It learns of a job's
    end a moment after the job's caller. A client of Spark Connect cannot ask it."""
    if not is_classic(session):
        yield lambda: True
        return
    context, tag = session.sparkContext, f"rocket-sink-{uuid.uuid4()}"
    context.addJobTag(tag)
    try:
        yield partial(_has_run_again, context, tag)
    finally:
        context.removeJobTag(tag)


def _has_run_again(context: SparkContext, tag: str) -> bool:
    tracker, began_s = context.statusTracker(), time.monotonic()
    while (waited_s := time.monotonic() - began_s) < _LATE_END_S:
        numbers = context._jsc.sc().statusTracker().getJobIdsForTag(tag)
        jobs = [job for job in map(tracker.getJobInfo, numbers) if job is not None]
        if not jobs and waited_s > _LATE_BEGIN_S:
            break
        if jobs and all(job.status != "RUNNING" for job in jobs):
            stages = {
                number: tracker.getStageInfo(number) for job in jobs for number in job.stageIds
            }
            # Spark forgets old stages; the last one is that of the tasks that send.
            is_forgotten = not stages or stages[max(stages)] is None
            attempts = (stage.currentAttemptId for stage in stages.values() if stage is not None)
            return is_forgotten or any(attempts)
        time.sleep(_LOOK_S)
    return True


_LATE_BEGIN_S: Final = 1.0
_LATE_END_S: Final = 10.0
"""Longest waits for the status tracker to learn of a job's begin and end."""
_LOOK_S: Final = 0.005


def epoch_ran_again(session: SparkSession, run: str, began_ms: float, ended_ms: float) -> bool:
    """Return whether Spark has run, or may have run, a stage of an epoch again. The epoch is over;
    it lasted from `began_ms` to `ended_ms` (ms since 1970). The tracker knows the jobs of a run, in
    which epochs follow one another, and the last begin of each stage."""
    is_known, tracker = False, session.sparkContext._jsc.statusTracker()
    for number in sorted(tracker.getJobIdsForGroup(run), reverse=True):
        job = tracker.getJobInfo(number)
        infos = map(tracker.getStageInfo, job.stageIds() if job is not None else ())
        stages = [stage for stage in infos if stage is not None]
        last_ms = max((stage.submissionTime() for stage in stages), default=0)
        if 0 < last_ms < began_ms:
            break
        if began_ms <= last_ms <= ended_ms:
            is_known = True
            if any(stage.currentAttemptId() for stage in stages):
                return True
    return not is_known


def streaming_query() -> str:
    """Return Spark's id of the running task's streaming query; empty without one."""
    return _local(TaskContext.get(), QUERY_ID)


PLAN: Final = "spark.rocketSink.queryPlan"
"""A setting of a query's own session, by which its tasks learn the digest of its plan."""
PENDING: Final = "spark.rocketSink.pendingEpoch"
"""A setting of a query's own session: the epoch that an earlier run has begun and not ended."""
UNRECORDED: Final = "spark.rocketSink.unrecordedEpoch"
"""A setting of a query's own session: that epoch, if the ledger has no record of the earlier run
(`epoch_starts.unrecorded_epoch`)."""
_PLANNING: Final = (
    PLAN,
    "spark.master",
    "spark.default.parallelism",
    "spark.cores.max",
    "spark.executor.instances",
    "spark.executor.cores",
    "spark.sql.files.maxPartitionBytes",
    "spark.sql.files.openCostInBytes",
    "spark.sql.files.minPartitionNum",
    "spark.sql.files.maxPartitionNum",
    "spark.sql.leafNodeDefaultParallelism",
    "spark.sql.shuffle.partitions",
    "spark.sql.adaptive.enabled",
    "spark.sql.adaptive.coalescePartitions.enabled",
    "spark.sql.adaptive.advisoryPartitionSizeInBytes",
)
_WRITING: Final = ("spark.sql.session.timeZone", "spark.sql.legacy.timeParserPolicy")


def id_settings(planned: Mapping[str, str] = {}) -> IdFacts:
    """Return the settings on which the ids of effectively once depend, as the running task has
    them: Spark sends the session's settings with each job, as local properties. `planned` is
    what the driver knows of the frame (`plans.planned_facts`)."""
    task = TaskContext.get()
    planned_by = {**{name: _local(task, name) for name in _PLANNING}, **planned}
    if not planned_by["spark.master"].startswith("local"):
        # Only a local master names cores; a cluster's address may change.
        planned_by["spark.master"] = ""
    return IdFacts(
        planned_by, {name: _local(task, name) for name in _WRITING},
        pending_epoch=_local(task, PENDING), unrecorded_epoch=_local(task, UNRECORDED),
    )  # fmt: skip


def streaming_run(local: Callable[[str], str | None]) -> str:
    """Return a streaming query's run id from local properties; empty outside of a query."""
    if not local(QUERY_ID):
        return ""
    return local(RUN_ID) or local(JOB_GROUP) or ""


def _local(task: TaskContext | None, name: str) -> str:
    return task.getLocalProperty(name) or "" if task is not None else ""
