"""Which of the ledger's rows count: the views behind `Ledger`, as plans over all its rows.

A task attempt counts when it is complete and the last of its partition: within a run the one that
Spark started last, over runs the one that ended last. Once Spark has confirmed an epoch, only
attempts of the confirming run count, for a run that went before may have cut the rows into other
partitions; unless that run has none, as when Delta skipped an epoch that was recorded already.
"""

from __future__ import annotations

from functools import reduce
from operator import add, and_
from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as f
from pyspark.sql.window import Window

from rocket_sink.ledger.schema import (
    DEAD_LETTER,
    EPOCH,
    IN_FLIGHT,
    ISOLATION,
    RESOLUTION,
    SEND,
    TRANSACTION,
    columns_of,
)

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_ATTEMPT: Final = ("query_id", "run_id", "epoch", "partition", "task_attempt_id")
"""What names a task attempt."""
_EPOCH_KEY: Final = ("query_id", "epoch")
_OUTCOMES: Final = ("acked", "degraded", "dead", "unknown", "filtered")
_COUNTS: Final = (
    "rows_in", *_OUTCOMES, "invalid", "held_back", "duplicates_possible", "found_stored",
    "requests", "attempts", "body_bytes", "moved_keys",
)  # fmt: skip


def of_kind(rows: DataFrame, kind: str) -> DataFrame:
    """The rows of one kind in the columns that it uses."""
    return rows.where(f.col("kind") == kind).select(*columns_of(kind))


def sends(rows: DataFrame) -> DataFrame:
    everything = of_kind(rows, SEND)
    in_flight = f.col("outcome") == IN_FLIGHT
    answered = everything.where(~in_flight)
    left = _without(everything.where(in_flight), answered, (*_ATTEMPT, "request"))
    return answered.unionByName(left)


def dead_letters(rows: DataFrame, *, pending: bool) -> DataFrame:
    letters = of_kind(rows, DEAD_LETTER)
    if not pending:
        return letters
    counting = attempt_accounts(rows).where("counts")
    # A letter without a partition comes from no task: nothing can supersede it.
    of_driver = letters.where(f.col("partition").isNull())
    # An export that runs twice gives the same letters again.
    of_driver = of_driver.dropDuplicates(["letter_id"])
    of_tasks = _joined(letters.where(f.col("partition").isNotNull()), counting, _ATTEMPT, "semi")
    settled = resolutions(rows).select("letter_id").distinct()
    return of_driver.unionByName(of_tasks).join(settled, "letter_id", "left_anti")


def resolutions(rows: DataFrame) -> DataFrame:
    return of_kind(rows, RESOLUTION)


def isolations(rows: DataFrame) -> DataFrame:
    length_us = f.unix_micros("isolated_until") - f.unix_micros("isolated_from")
    return of_kind(rows, ISOLATION).withColumn("isolated_ms", length_us / 1000)


def attempt_accounts(rows: DataFrame) -> DataFrame:
    """One row per task attempt that wrote its accounts, with `counts` and `confirmed_run_id`.

    `_current` is false where another run of the epoch was confirmed.
    """
    tasks = of_kind(rows, EPOCH).where(f.col("partition").isNotNull())
    sums = [f.sum(name).alias(name) for name in _COUNTS]
    firsts = [f.min(n).alias(n) for n in ("stage_id", "stage_attempt", "attempt_number", "worker")]
    grouped = tasks.groupBy(*_ATTEMPT).agg(
        f.max("at").alias("at"), f.max("lane").alias("lane"), *firsts, *sums,
        f.bool_and("complete").alias("complete"), f.max("duration_ms").alias("duration_ms"),
        f.min("first_error").alias("first_error"),
    )  # fmt: skip
    confirmed = _confirmations(rows).select(*_EPOCH_KEY, "confirmed_run_id")
    return _with_counts(grouped.join(confirmed, list(_EPOCH_KEY), "left"))


def _with_counts(attempts: DataFrame) -> DataFrame:
    complete = f.coalesce("complete", f.lit(False))
    by_epoch = Window.partitionBy(*_EPOCH_KEY)
    by_run = Window.partitionBy(*_EPOCH_KEY, "run_id")
    confirmed = f.coalesce(f.col("run_id") == f.col("confirmed_run_id"), f.lit(False))
    marked = attempts.withColumns(
        {
            "_current": confirmed | ~f.max(complete & confirmed).over(by_epoch),
            "_run_at": f.max("at").over(by_run),
        }
    ).withColumn("_eligible", complete & f.col("_current"))
    best_first = Window.partitionBy(*_EPOCH_KEY, "partition").orderBy(
        f.col("_eligible").desc(), f.col("_run_at").desc(),
        f.col("task_attempt_id").desc_nulls_last(), f.col("at").desc(),
    )  # fmt: skip
    counts = f.col("_eligible") & (f.row_number().over(best_first) == 1)
    return marked.withColumn("counts", counts).drop("_run_at", "_eligible")


def _confirmations(rows: DataFrame) -> DataFrame:
    driver = of_kind(rows, EPOCH).where(f.col("partition").isNull())
    return driver.groupBy(*_EPOCH_KEY).agg(
        f.max_by("run_id", "at").alias("confirmed_run_id"),
        f.max_by("num_input_rows", "at").alias("num_input_rows"),
        f.max_by("duration_ms", "at").alias("batch_duration_ms"),
        f.max("at").alias("confirmed_at"),
    )


def epochs(rows: DataFrame) -> DataFrame:
    accounts = attempt_accounts(rows).drop("confirmed_run_id")
    counts = f.col("counts")
    balanced = f.col("rows_in") == reduce(add, (_zero(name) for name in _OUTCOMES))
    counted = [f.sum(f.when(counts, f.col(n)).otherwise(0)).alias(n) for n in _COUNTS]
    stored = _zero("acked") + _zero("degraded")
    grouped = accounts.groupBy(*_EPOCH_KEY).agg(
        f.max_by("run_id", "at").alias("run_id"), f.max("lane").alias("lane"),
        f.max("at").alias("at"),
        f.count_distinct(f.when(f.col("_current"), f.col("partition"))).alias("partitions"),
        *counted,
        f.max(f.when(counts, f.col("duration_ms"))).alias("duration_ms"),
        f.min(f.when(counts, f.col("first_error"))).alias("first_error"),
        f.bool_and(f.when(counts, f.coalesce(balanced, f.lit(False)))).alias("_balanced"),
        f.sum(counts.cast("int")).alias("_counted"),
        f.sum((~counts).cast("int")).alias("superseded_attempts"),
        f.sum(f.when(~counts, stored).otherwise(0)).alias("superseded_rows"),
    )  # fmt: skip
    return _with_confirmations(grouped, rows)


def _with_confirmations(grouped: DataFrame, rows: DataFrame) -> DataFrame:
    """An epoch that only the driver knows had no rows to send: then tasks are silent."""
    whole = f.col("_balanced") & (f.col("_counted") == f.col("partitions"))
    nothing = f.col("partitions").isNull()
    joined = grouped.join(_confirmations(rows), list(_EPOCH_KEY), "full_outer")
    numbers = (*_COUNTS, "partitions", "superseded_attempts", "superseded_rows")
    shown = joined.withColumns(
        {
            "adds_up": f.coalesce(whole, nothing, f.lit(False)),
            "confirmed": f.col("confirmed_run_id").isNotNull(),
            "run_id": f.coalesce("confirmed_run_id", "run_id"),
            "at": f.greatest("at", "confirmed_at"),
        }
    )
    return shown.select(
        *_EPOCH_KEY, "run_id", "lane", "at", "adds_up", "confirmed", "num_input_rows",
        *(_zero(name).alias(name) for name in numbers), "duration_ms", "batch_duration_ms",
        "first_error",
    )  # fmt: skip


def attempts(rows: DataFrame) -> DataFrame:
    written = sends(rows).where(f.col("partition").isNotNull())
    outcome = f.col("outcome")
    by_attempt = written.groupBy(*_ATTEMPT).agg(
        f.min("at").alias("first_send_at"), f.max("lane").alias("_lane"),
        f.max("worker").alias("_worker"), f.count("*").alias("send_attempts"),
        f.sum(f.when(outcome == IN_FLIGHT, f.col("message_count")).otherwise(0)).alias("in_flight"),
    )  # fmt: skip
    accounts = attempt_accounts(rows).drop("confirmed_run_id", "_current")
    joined = _joined(accounts, by_attempt, _ATTEMPT, "outer")
    return joined.withColumns(
        {
            "counts": f.coalesce("counts", f.lit(False)),
            "at": f.coalesce("at", "first_send_at"),
            "lane": f.coalesce("lane", "_lane"),
            "worker": f.coalesce("worker", "_worker"),
        }
    ).drop("_lane", "_worker")


def is_decided_half() -> Column:
    """The half messages that the ledger has decided to commit: all that are in it and stored.

    Only the foreachBatch lane and batch writes have any. Their rows are in the table when, and
    only when, the epoch's append is; those of failed attempts are in no append.
    """
    stored = f.col("outcome").isin("acked", "acked_degraded")
    return (f.col("kind") == SEND) & f.coalesce("half", f.lit(False)) & stored


def is_epoch_end() -> Column:
    """The row that says that an epoch's half messages are committed."""
    return (f.col("kind") == TRANSACTION) & f.col("message_id").isNull()


def transactions(rows: DataFrame) -> DataFrame:
    by_epoch = rows.where(is_decided_half()).groupBy(*_EPOCH_KEY).agg(
        f.max("run_id").alias("run_id"), f.max("lane").alias("lane"), f.max("at").alias("at"),
        f.count("*").alias("halves"), f.sort_array(f.collect_set("topic")).alias("topics"),
        f.sort_array(f.collect_set("broker_name")).alias("brokers"),
    )  # fmt: skip
    counts = ("committed", "refused", "found_stored")
    ends = rows.where(is_epoch_end()).groupBy(*_EPOCH_KEY).agg(
        f.max("at").alias("ended_at"), *(f.max_by(n, "at").alias(n) for n in counts),
    )  # fmt: skip
    joined = by_epoch.join(ends, list(_EPOCH_KEY), "left")
    return joined.withColumn("open", f.col("ended_at").isNull())


def _zero(name: str) -> Column:
    return f.coalesce(name, f.lit(0))


def _without(left: DataFrame, right: DataFrame, keys: tuple[str, ...]) -> DataFrame:
    return _joined(left, right, keys, "anti")


def _joined(left: DataFrame, right: DataFrame, keys: tuple[str, ...], how: str) -> DataFrame:
    """Join on keys that may be null, null being equal to null; keys appear once."""
    renamed = right.withColumnsRenamed({key: f"_right_{key}" for key in keys})
    same = reduce(and_, (f.col(key).eqNullSafe(f.col(f"_right_{key}")) for key in keys))
    if how in ("semi", "anti"):
        return left.join(renamed, same, f"left_{how}")
    joined = left.join(renamed, same, "full_outer")
    merged = {key: f.coalesce(f.col(key), f.col(f"_right_{key}")) for key in keys}
    return joined.withColumns(merged).drop(*(f"_right_{key}" for key in keys))
