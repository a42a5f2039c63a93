"""`RocketSink`, one object for `foreach`, `foreachBatch` and batch writes.

    sink = RocketSink(nameServer="h1:9876", topic="flights", ledger="/data/ledger")
    sink.stream(df).start()                               # foreach, over Arrow batches
    df.writeStream.foreach(sink).start()                  # foreach, over single rows
    df.writeStream.foreachBatch(sink.write_batch).start() # Arrow; one job sends and appends
    print(sink.write(df))                                 # a batch

The constructor checks the options. The constructor and the pickling by `foreach()` check that
speculation is off. `stream`, `check`, `write` and `write_batch` check the columns on the driver.
`foreach(sink)` alone sees no schema: a classic session's listener checks the columns at the query's
start. Over Connect each task checks the columns before it sends its first rows.

Spark calls a foreach writer in this way (pyspark 4.2 `_construct_foreach_function`):

- if `open` returns None, Spark drops all rows silently; if `open` raises, `close` is never called;
- `close(None)` does not mean success: Spark also calls it after an upstream failure. So `close`
  waits for every answer and writes the counts of the rows so far. Only the driver knows whether the
  epoch is done;
- an error in `close` hides the error of `process`. So `close` raises nothing after an error.
"""

from __future__ import annotations

from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

from rocket_sink.errors import ConfigurationError, OptionError
from rocket_sink.ledger.token import LedgerToken
from rocket_sink.ledger.transport.accumulator import RowsByAccumulator, rows_by_accumulator
from rocket_sink.options import SinkOptions, check_topic_option, constructor_options
from rocket_sink.rows.contract import ColumnPlan
from rocket_sink.spark.checks.budget import refuse_budget
from rocket_sink.spark.checks.driver_options import on_driver, refuse_batch_id
from rocket_sink.spark.checks.queries import note_sink
from rocket_sink.spark.checks.reach import check_reachable, check_rights
from rocket_sink.spark.checks.session_settings import check_session, with_task_rate
from rocket_sink.spark.checks.tokens import spool_token, without_files
from rocket_sink.spark.foreach_batch import BatchWriter
from rocket_sink.spark.foreach_task import ForeachTask
from rocket_sink.spark.frames import plan_of, quoted, select_needed
from rocket_sink.spark.listener import install_fold, owner_of
from rocket_sink.spark.packs import PackTask, packed
from rocket_sink.task.totals import WriteSummary
from rocket_sink.task.transaction_marker import needs_append


class RocketSink:
    """A sink to Apache RocketMQ. It takes the options of `rocket_sink.options`, in any spelling.

    Raises:
        OptionError: unknown or illegal options, no name server.
        ConfigurationError: `spark.speculation` is on (see `allowSpeculation`).
    """

    _task: ForeachTask | PackTask | None = None

    def __init__(self, options: SinkOptions | None = None, **more: Any) -> None:
        if options is not None and more:
            raise OptionError("give either a SinkOptions or options by name, not both")
        options = on_driver(constructor_options(options, more))
        if options.topic:
            check_topic_option("topic", options.topic, options.namespace)
        self.__setstate__({"options": options, "plan": None, "token": None})
        check_session(options)
        install_fold(options)

    @property
    def options(self) -> SinkOptions:
        return self._options

    def check(self, df: DataFrame) -> ColumnPlan:
        """Check a frame's columns against the row contract, on the driver, and send nothing.

        Raises:
            ColumnError: the columns do not fit; the text names the column or option to change.
        """
        check_session(self._options, df.sparkSession)
        return plan_of(df, self._options)

    def stream(self, df: DataFrame) -> DataStreamWriter:
        """Return `df.writeStream.foreach(...)` after checking columns and ledger on the driver.

        Spark hands Python only the columns that the row contract needs, an Arrow batch as a row
        (`spark.packs`). So the rows of a batch are sent together, and
        `gatherMaxDelayMs` has no effect.

        Raises:
            ColumnError: the columns do not fit (see `check`).
            LedgerError: the driver cannot write files to the ledger's folder.
            NameServerUnavailableError: no name server answers.
        """
        refuse_budget(self._options)
        plan = self.check(df)
        if not df.isStreaming:
            raise ConfigurationError(
                "stream() is for a stream and this frame is a batch; use sink.write(df), or read "
                "it with spark.readStream"
            )
        options = self._task_options(df.sparkSession)
        check_reachable(options, df.sparkSession)
        token = spool_token(options, df.sparkSession)
        needed, plan = select_needed(df, plan)
        packs = packed(needed)
        bound = RocketSink.__new__(RocketSink)
        bound.__setstate__({
            "options": self._options, "plan": plan, "token": token,
            "takes_packs": packs is not None,
        })  # fmt: skip
        writer: DataStreamWriter = (needed if packs is None else packs).writeStream.foreach(bound)
        return writer

    def ordered(self, df: DataFrame, partitions: int | None = None) -> DataFrame:
        """Return the frame with all rows of a sharding key in one partition, to keep their order.

        Raises:
            ConfigurationError: the frame has no sharding key.
        """
        source = self.check(df).source("sharding_key")
        if source is None:
            raise ConfigurationError(
                "the frame has no sharding_key; name one with columns='sharding_key=<column>'"
            )
        key = df[quoted(source)]
        return df.repartition(partitions, key) if partitions else df.repartition(key)

    # foreach: called by Spark in the workers

    def open(self, partition_id: int, epoch_id: int) -> bool:
        """Return True: otherwise Spark would drop the rows without calling `process`."""
        place = (partition_id, epoch_id, self._token, self._handed)
        if self._takes_packs and self._plan is not None:
            self._task = PackTask(self._options, self._plan, *place)
        else:
            self._task = ForeachTask(self._options, self._plan, *place)
        # Spark looks up `process` for each row: let it find the task's method, which saves a call.
        self.__dict__["process"] = self._task.process
        return True

    def process(self, row: Any) -> None:
        if self._task is None:
            raise ConfigurationError("RocketSink.process before open; Spark calls both")
        self._task.process(row)

    def close(self, error: BaseException | None) -> None:
        self.__dict__.pop("process", None)
        task, self._task = self._task, None
        if task is not None:
            task.close(error)

    # foreachBatch and batch: called on the driver

    def write_batch(self, df: DataFrame, epoch_id: int | None = None) -> None:
        """Send an epoch of `writeStream.foreachBatch` and append its ledger rows, in one job."""
        if epoch_id is None:
            raise ConfigurationError(
                "write_batch is for foreachBatch(sink.write_batch), which gives it a frame and an "
                "epoch; for rows write foreach(sink), for a batch sink.write(df)"
            )
        refuse_batch_id(self._options)
        install_fold(self._options, owner_of(df))
        self._batches.write_epoch(df, epoch_id)

    def write(self, df: DataFrame, *epoch: int, batch_id: str = "") -> WriteSummary:
        """Send a batch with the guarantees of `write_batch`; return its counts.

        Args:
            batch_id: the option `batchId`, by which the write may be repeated: if an earlier write
                with this id was complete, nothing is sent, and the summary is the earlier one.

        Raises:
            CheckpointError: an earlier write with the `batch_id` had another frame.
            LedgerError: another process is writing the `batch_id`.
            OptionError: the sink has a `batch_id`, but no ledger.
        """
        if epoch:
            raise ConfigurationError(
                "write() takes a batch alone; for a stream write foreachBatch(sink.write_batch)"
            )
        install_fold(self._options, df.sparkSession)
        if batch_id:
            return BatchWriter(self._options.with_(batchId=batch_id)).write(df)
        return self._batches.write(df)

    def _task_options(self, session: SparkSession | None = None) -> SinkOptions:
        """Check on the driver that tasks of foreach may send; return their options."""
        refuse_batch_id(self._options)
        needs_append(self._options, "foreach, or a sink of Spark Connect,")
        check_session(self._options, session)
        install_fold(self._options, session)
        check_rights(self._options)
        return without_files(self._options)

    def __getstate__(self) -> dict[str, Any]:
        # `foreach()` pickles the sink on the driver, before any task runs. Check again here,
        # because the session may have started after the sink was made.
        options = self._task_options()
        token = self._token or spool_token(options)
        return {
            "options": with_task_rate(options), "plan": self._plan, "token": token,
            "handed": self._handed or rows_by_accumulator(options),
            "mark": note_sink(self._options, self._plan), "takes_packs": self._takes_packs,
        }  # fmt: skip

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._options: SinkOptions = state["options"]
        self._plan: ColumnPlan | None = state["plan"]
        self._token: LedgerToken | None = state["token"]
        self._handed: RowsByAccumulator | None = state.get("handed")
        self._takes_packs: bool = state.get("takes_packs", False)
        self._batches = BatchWriter(self._options)

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self._options.given().items())
        return f"RocketSink({options})"

    def _repr_html_(self) -> str:
        return self._options.to_html("RocketSink")
