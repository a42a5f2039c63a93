"""The data source `format("rocketmq")`: batch writes and streams. `spark.reading` has the reads.

    register(spark)                       # once per session
    df.write.format("rocketmq").mode("append").option("nameServer", ...).option(...).save()
    df.writeStream.format("rocketmq").option("checkpointLocation", c)....start()

Spark creates the writer in a Python process without a session. The writer checks options and
columns there, before any task runs. After the tasks, Spark calls commit or abort in a second such
process, which sees the messages of successful tasks only. The ledger rows of failed attempts are in
the spool. Each process serves one call, so a stream starts two per epoch. To start faster, this
module imports in functions what only tasks, reads or the session need. Batch writes get Arrow
record batches. Streams get them from Spark 4.1 on, and rows before."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Final

from pyspark.errors import AnalysisException
from pyspark.sql import datasource as spark_datasource
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceStreamWriter,
    WriterCommitMessage,
)

from rocket_sink.errors import ColumnError, ConfigurationError, SendError
from rocket_sink.ledger.append.named import know_locations, located
from rocket_sink.ledger.append.table import has_executors
from rocket_sink.ledger.epoch_starts import (
    ROWS_FACT,
    NamedBatch,
    begin_batch,
    begin_named_write,
    end_named_write,
)
from rocket_sink.ledger.path import LedgerPath, resolve_path
from rocket_sink.ledger.records import RunContext, confirmed_row
from rocket_sink.ledger.storage import Properties, all_properties, is_classic, remember
from rocket_sink.ledger.token import LedgerToken
from rocket_sink.net import log
from rocket_sink.options import SinkOptions
from rocket_sink.rows.contract import ColumnPlan, resolve_columns
from rocket_sink.spark import lineage
from rocket_sink.spark.checks.budget import check_budget
from rocket_sink.spark.checks.context import id_settings, run_context, streaming_query
from rocket_sink.spark.checks.driver_options import own_options, read_options, refuse_batch_id
from rocket_sink.spark.checks.queries import CONTINUOUS, FORMAT
from rocket_sink.spark.checks.reach import check_rights, name_server_answer
from rocket_sink.spark.checks.session_settings import (
    pushes_filters,
    refuse_speculation,
    speculates,
    task_slots,
    warn_of_settings,
    with_task_rate,
)
from rocket_sink.spark.checks.tokens import spool_token, without_files
from rocket_sink.spark.console import say_end, say_repeated, warn_of_delays, warn_of_losses
from rocket_sink.task.totals import TaskSummary, sums_of, uncounted_duplicates
from rocket_sink.task.transaction_marker import needs_append
from rocket_sink.task.worker_heap import freeze_once

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType

    from rocket_sink.ledger.transport.handed import HandedRows
    from rocket_sink.spark.reading.batch import MessageReader
    from rocket_sink.spark.reading.stream import TopicStream

_LOG: Final = log.logger(__name__)
_StreamArrowWriter: Final[Any] = getattr(spark_datasource, "DataSourceStreamArrowWriter", None)
"""The base class of Arrow stream writers; None before Spark 4.1."""


def register(spark: SparkSession, *, ledger: str = "") -> None:
    """Make `format("rocketmq")` known to the session.

    Args:
        ledger: a ledger to fold while queries of the session run: a path, or the name
            `catalog.schema.table` of a table, which queries may then use. A fold moves the rows
            that tasks have spooled into the table. A writer has no session and cannot fold; it logs
            a warning if nothing folds the ledger of its stream.
    """
    warn_of_settings(spark)
    # The writer's process has no session, so class attributes bring this session's facts there.
    # Spark pickles the class with them, by value, because no module contains the class.
    attributes: dict[str, Any] = {"task_slots": task_slots(spark), "speculates": speculates(spark)}
    attributes["pushes_filters"] = pushes_filters(spark)
    if is_classic(spark):
        attributes["is_local"] = not has_executors(spark)
        attributes["storage"] = all_properties(spark)
    from rocket_sink.spark.listener import install_fold

    location = located(ledger, spark, makes=True)
    if location != ledger:
        attributes["locations"] = {ledger: location}
    thread = install_fold(SinkOptions.parse({"ledger": location}), spark)
    attributes["folded"] = thread.ledgers if thread is not None else frozenset()
    source = type(RocketMQDataSource.__name__, (RocketMQDataSource,), attributes)
    try:
        spark.dataSource.register(source)
    except AnalysisException as error:
        # Spark 4.0 does not replace a source that it has found by itself
        # (DataSourceManager.registerDataSource); later versions do.
        if error.getCondition() != "DATA_SOURCE_ALREADY_EXISTS":
            raise
        _LOG.warning(
            "Spark has found the source rocketmq by itself and does not replace it, so the source "
            "does not know this session's settings. With a rate limit, set rateTasks. With a "
            "ledger in an object store, give driver and executors its address and keys in their "
            "environment%s",
            ". The ledger is folded, even if a query warns that it is not" if ledger else "",
        )


class RocketMQDataSource(DataSource):
    """The source `rocketmq`: writes messages (`rocket_sink.options`), reads topics (`.reader`)."""

    task_slots = 0
    """Task slots of the session that called `register`; 0 if they are unknown."""
    speculates = False
    """Whether the session runs second copies of slow tasks."""
    pushes_filters = False
    """Whether Spark passes filters to readers; it refuses such readers otherwise."""
    is_local = False
    """Whether the session's tasks run on the driver's host."""
    storage: ClassVar[Properties] = {}
    """The session's settings for object stores."""
    folded: ClassVar[frozenset[str]] = frozenset()
    """The ledgers that the session folds while queries run."""
    locations: ClassVar[Mapping[str, str]] = {}
    """The location of the ledger that `register` got by its name."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> str:
        from rocket_sink.rows.stored_rows import STORED_DDL

        return STORED_DDL

    def reader(self, schema: StructType) -> MessageReader:
        from rocket_sink.spark.reading.batch import FilteringReader, MessageReader, check_schema
        from rocket_sink.spark.reading.options import ReadOptions

        check_schema(schema)
        kind = FilteringReader if self.pushes_filters else MessageReader
        return kind(*ReadOptions.parse(own_options(self.options)))

    def streamReader(self, schema: StructType) -> TopicStream:  # noqa: N802
        from rocket_sink.spark.reading.batch import check_schema
        from rocket_sink.spark.reading.options import ReadOptions
        from rocket_sink.spark.reading.stream import TopicStream

        check_schema(schema)
        return TopicStream(*ReadOptions.parse(own_options(self.options), is_stream=True))

    def writer(self, schema: StructType, overwrite: bool) -> BatchWriter:
        if overwrite:
            raise ConfigurationError('a topic cannot be overwritten; use mode("append")')
        options, plan = self._check_options(schema)
        if self.is_local and isinstance(error := name_server_answer(options), SendError):
            raise error
        # Spark creates writers on the driver's host, even for Connect clients.
        run, token, batch = str(uuid.uuid4()), spool_token(options), None
        if options.batch_id:
            facts = {"columns": schema.simpleString(), "call": f'format("{FORMAT}")'}
            batch = begin_batch(options, run, facts)
            query, again = batch.query_id, not batch.is_new
        else:
            query, again = begin_named_write(options, run)
        writer = BatchWriter(options, plan, run, query, token=token, batch=batch, again=again)
        writer.lineage_run = lineage.start(options, run, "write", schema, is_stream=False)
        lineage.flush(writer.lineage_run)
        return writer

    def streamWriter(self, schema: StructType, overwrite: bool) -> Any:  # noqa: N802
        # Spark sets `overwrite` for outputMode("complete"), which sends the whole result.
        options, plan = self._check_options(schema)
        kind = RowStreamWriter if _StreamArrowWriter is None else ArrowStreamWriter
        refuse_batch_id(options)
        freeze_once()
        folded = not options.ledger or options.ledger in self.folded
        return kind(options, plan, token=spool_token(options), folded=folded)

    def _check_options(self, schema: StructType) -> tuple[SinkOptions, ColumnPlan]:
        if self.storage:
            remember(self.storage)
        know_locations(self.locations)
        options = read_options(self.options)
        refuse_speculation(options, is_on=self.speculates)
        needs_append(options, 'format("rocketmq")')
        check_rights(options)
        options = with_task_rate(without_files(options), slots=self.task_slots)
        plan = resolve_columns(schema, options)
        warn_of_delays(options, plan)
        if plan.needs_to_json:
            raise ColumnError(
                'bodyFormat=json is not possible in format("rocketmq"): a data source sees no '
                "DataFrame to pack. Select to_json(struct('*'), formats).alias('body') yourself, "
                "with the formats of docs/guides/data-source.md, which keep all digits of times; "
                "or use RocketSink.write or .stream"
            )
        return options, plan


@dataclass
class TaskMessage(WriterCommitMessage):
    """The report of a successful task to the process that commits."""

    query_id: str
    run_id: str
    summary: TaskSummary
    handed: HandedRows | None = None


@dataclass(eq=False)
class _Writer:
    """The base of the batch and stream writers; Spark pickles it to the tasks."""

    lane: ClassVar = "datasource"
    epoch: ClassVar[int | None] = None
    """The epoch; None if tasks read it from Spark's local properties."""

    options: SinkOptions
    plan: ColumnPlan
    run_id: str = ""
    query_id: str = ""
    _: KW_ONLY
    token: LedgerToken | None = None
    folded: bool = True
    batch: NamedBatch | None = None
    """The batch write with a `batchId`."""
    again: bool = False
    """Whether an earlier write under this name did not succeed."""
    place: LedgerPath = field(init=False)
    """The ledger, if there is one, with the store's address: processes that commit lack it."""

    def __post_init__(self) -> None:
        if self.options.ledger:
            self.place = resolve_path(self.options.ledger)

    def _send(self, batches: Iterable[pa.RecordBatch]) -> TaskMessage:
        from rocket_sink.task.runner import TaskRunner

        ctx = run_context(
            self.options, self.lane, epoch=self.epoch, query_id=self.query_id, run_id=self.run_id
        )
        with TaskRunner(
            self.options, ctx, token=self.token, streaming_query=streaming_query(),
            hands_over=True, settings=id_settings(), again=self.again,
        ) as run:  # fmt: skip
            for batch in batches:
                run.feed(batch, self.plan)
            summary = run.finish()
        return TaskMessage(ctx.query_id, ctx.run_id, summary, run.handed)

    def _confirm(self, messages: Sequence[Any], epoch: int | None = None) -> dict[str, Any]:
        """Note in the ledger that the epoch (None: the batch write) is done; return the sums over
        its tasks. Raise an error if a task sent no message, or if too many rows failed."""
        done = [message for message in messages if isinstance(message, TaskMessage)]
        if silent := len(messages) - len(done):
            raise ConfigurationError(
                f"Spark reports this write as done, but {silent} of its {len(messages)} tasks "
                f"returned no counts of what they sent: it is not committed. {CONTINUOUS}"
            )
        sums = sums_of([vars(message.summary) for message in done])
        # Check before `_keep_handed`: after an error Spark calls `abort`, which keeps the rows.
        check_budget(self.options, sums, epoch)
        self._keep_handed(done)
        if (sums["dead"] or sums["unknown"]) and (epoch is None or not self.folded):
            name = f"the write {done[0].query_id}" if epoch is None else f"epoch {epoch}"
            warn_of_losses(name, sums, self.options.ledger)
        rows = sums["rows_in"]
        if not self.options.ledger or not rows:
            return sums
        # Failed tasks whose rows are handed over leave no record. Of a stream the session's driver
        # knows whether a stage ran again; nobody tells a batch, so it may have.
        is_unknown = epoch is None and any(message.handed for message in done)
        uncounted = uncounted_duplicates(sums) if is_unknown else None
        ctx = RunContext(done[0].query_id, done[0].run_id, epoch or 0, lane=self.lane)
        from rocket_sink.ledger.transport.spool import SpoolWriter

        try:
            spool = SpoolWriter(self._ledger().spools[0], ctx)
            row = confirmed_row(
                ctx, num_input_rows=rows, rows_in=rows, duplicates_possible=uncounted
            )
            spool.append(row)
            spool.seal()
        except Exception as error:
            # Do not raise: the rows are sent, and a failed commit would send them again.
            _LOG.warning(
                "cannot note in the ledger %s that epoch %d is done: %s",
                self.options.ledger, ctx.epoch, error,
            )  # fmt: skip
        return sums

    def _ledger(self) -> LedgerPath:
        remember(self.place.storage, self.place.uri)
        return self.place

    def _keep_handed(self, messages: Sequence[Any]) -> None:
        """Write the ledger rows that came in the messages to the spool."""
        handed = [m.handed for m in messages if isinstance(m, TaskMessage) and m.handed]
        if handed:
            from rocket_sink.ledger.transport.handed import spool_handed

            spool_handed(self._ledger(), handed)


class BatchWriter(_Writer, DataSourceArrowWriter):
    """A batch write; its epoch is 0, even in a stream's foreachBatch function."""

    lane = "batch"
    epoch = 0
    lineage_run: lineage.Run | None = None
    """The OpenLineage run; None if no events are sent."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> TaskMessage:
        if self.batch is not None and self.batch.summary:
            rows = sum(batch.num_rows for batch in iterator)
            return TaskMessage(self.query_id, self.run_id, TaskSummary(rows_in=rows))
        return self._send(iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        if self.batch is not None and self.batch.summary:
            done = [message for message in messages if isinstance(message, TaskMessage)]
            self.batch.check({ROWS_FACT: sum(message.summary.rows_in for message in done)})
            say_repeated(self.options)
            lineage.end_elsewhere(self.run_id, self.lineage_run, {})
            return
        from rocket_sink.task.queue_snapshot import forget_queues

        counts = self._confirm(messages)
        say_end(f"the write {self.query_id}", counts, self.options.ledger)
        self._end(counts)
        forget_queues(self.options, self.query_id, counts)
        lineage.end_elsewhere(self.run_id, self.lineage_run, counts)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Keep the ledger rows of the tasks; messages that were sent cannot be undone."""
        try:
            self._keep_handed(messages)
            self._end()
        finally:
            error = "the write failed: see the error of its save()"
            lineage.end_elsewhere(self.run_id, self.lineage_run, {}, error)

    def _end(self, counts: Mapping[str, Any] | None = None) -> None:
        """Remove the notes that tasks wrote beside the ledger. If a named write failed (`counts` is
        None), keep them: the next write of the `appId` or `batchId` needs them."""
        if self.batch is not None and counts is not None:
            self.batch.end({**counts, "duration_s": 0.0})
        if self.options.ledger:
            end_named_write(
                self._ledger(), self.options, self.query_id, self.run_id, is_done=counts is not None
            )


class _Stream(_Writer):
    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        self._confirm(messages, batchId)
        # Warn in epoch 0 only: each epoch has a new process, which knows of no earlier warning.
        if batchId == 0 and not self.folded:
            _LOG.warning(
                "nothing folds the ledger %s while this query runs, so its rows pile up in _spool: "
                "call register(spark, ledger=...), or over Spark Connect run `rocket-sink ledger "
                "fold` from time to time",
                self.options.ledger,
            )

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        self._keep_handed(messages)


class RowStreamWriter(_Stream, DataSourceStreamWriter):
    def write(self, iterator: Iterator[Any]) -> TaskMessage:
        from rocket_sink.rows.row_batcher import RowBatcher, RowBuffer

        buffer = RowBuffer(
            RowBatcher(self.options, self.plan), 2 * self.options.request_max_messages
        )

        def batches() -> Iterator[pa.RecordBatch]:
            for row in iterator:
                buffer.rows.append(row)
                if len(buffer.rows) >= buffer.look_at and buffer.is_full():
                    yield buffer.take()
            if (remainder := buffer.take()) is not None:
                yield remainder

        return self._send(batches())


if _StreamArrowWriter is not None:

    class ArrowStreamWriter(_Stream, _StreamArrowWriter):  # type: ignore[misc]
        def write(self, iterator: Iterator[pa.RecordBatch]) -> TaskMessage:
            return self._send(iterator)
