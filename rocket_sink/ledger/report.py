"""A ledger's figures as plain values; `rocket_sink.ledger.render` shows them.

Each figure is one Spark job over the rows of its kind. Percentiles are Spark's `percentile_approx`
(relative error of ranks 1/10,000).
"""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import functions as f

from rocket_sink.ledger import views
from rocket_sink.ledger.figures import (
    BrokerFigures,
    DeadLetterFigures,
    EpochFigures,
    ErrorFigures,
    IsolationFigures,
    Report,
    Scope,
    Totals,
)
from rocket_sink.ledger.schema import IN_FLIGHT

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from rocket_sink.ledger.ledger import Ledger

__all__ = ["Report", "Scope", "build_report"]

_PERCENTILES: Final = (0.5, 0.95, 0.99)


def build_report(
    spark: SparkSession,
    ledger: Ledger,
    scope: Scope | None = None,
    *,
    epochs: int = 20,
    isolations: int = 50,
    errors: int = 10,
) -> Report:
    """Read the figures; the numbers are the longest lists wanted.

    Raises:
        LedgerError: no ledger there, or one of another version.
    """
    scope = scope or Scope()
    rows = ledger.rows(spark)
    sends = _within(views.sends(rows), scope)
    accounts = _within(views.epochs(rows), scope).cache()
    try:
        totals, last_epochs = _totals(accounts), _epochs(accounts, epochs)
    finally:
        accounts.unpersist()
    count, events = _isolations(_within(views.isolations(rows), scope), isolations)
    return Report(
        ledger.path, scope, totals, _brokers(sends), last_epochs, events, count,
        _dead_letters(rows, scope), _errors(sends, errors),
    )  # fmt: skip


def _within(rows: DataFrame, scope: Scope) -> DataFrame:
    if scope.query_id is not None:
        rows = rows.where(f.col("query_id") == scope.query_id)
    if scope.since is not None:
        rows = rows.where(f.col("at") >= f.lit(scope.since))
    if scope.until is not None:
        rows = rows.where(f.col("at") < f.lit(scope.until))
    return rows


def _totals(accounts: DataFrame) -> Totals:
    names = [name for name in Totals.__dataclass_fields__ if name in accounts.columns]
    row = accounts.agg(
        f.count("*").alias("epochs"), *(_sum(f.col(name)).alias(name) for name in names),
        _sum(~f.col("adds_up")).alias("not_adding_up"),
        _sum(~f.col("confirmed")).alias("unconfirmed"),
    ).collect()[0]  # fmt: skip
    return Totals(**row.asDict())


def _epochs(accounts: DataFrame, limit: int) -> list[EpochFigures]:
    names = list(EpochFigures.__dataclass_fields__)
    last = accounts.orderBy(f.col("at").desc(), f.col("epoch").desc()).limit(limit)
    rows = [row.asDict() for row in _in_utc(last.select(*names), "at").collect()]
    return [EpochFigures(**{**row, "at": _utc(row["at"])}) for row in reversed(rows)]


def _brokers(sends: DataFrame) -> list[BrokerFigures]:
    answered = f.col("response_code").isNotNull()
    rtt = f.when(answered, f.col("rtt_ms"))
    outcomes = f.col("outcome")
    by_outcome = sends.groupBy(f.coalesce("broker_name", f.lit("-")).alias("broker"), "outcome")
    counts = {(r["broker"], r["outcome"]): int(r["count"]) for r in by_outcome.count().collect()}
    # in_flight rows name no broker as a rule and are attempts of which nothing more is known.
    figures = sends.groupBy(f.coalesce("broker_name", f.lit("-")).alias("broker")).agg(
        f.count("*").alias("requests"), _sum(f.col("message_count")).alias("messages"),
        _sum(f.col("body_bytes")).alias("body_bytes"),
        _sum((f.col("attempt") > 1) & (outcomes != IN_FLIGHT)).alias("retries"),
        f.percentile_approx(rtt, list(_PERCENTILES)).alias("p"), f.max(rtt).alias("max_ms"),
        f.percentile_approx("queue_wait_ms", 0.99).alias("wait_p99_ms"),
    )  # fmt: skip
    return [
        BrokerFigures(
            row["broker"], row["requests"], row["messages"], row["body_bytes"], row["retries"],
            {o: n for (b, o), n in sorted(counts.items()) if b == row["broker"]},
            p50, p95, p99, row["max_ms"], row["wait_p99_ms"],
        )
        for row in figures.orderBy("broker").collect()
        for p50, p95, p99 in [row["p"] or (None, None, None)]
    ]  # fmt: skip


def _isolations(events: DataFrame, limit: int) -> tuple[int, list[IsolationFigures]]:
    """Workers of an executor share their fault table, so that one event can be noted twice."""
    grouped = events.groupBy(
        "broker_name", "topic", "cause", "isolated_from", "isolated_ms", "reachable"
    ).agg(f.max("latency_ms").alias("latency_ms"), f.count_distinct("worker").alias("workers"))
    last = grouped.withColumn("_total", f.count("*").over(_everything()))
    rows = _in_utc(last.orderBy(f.col("isolated_from").desc()).limit(limit), "isolated_from")
    found = rows.collect()
    figures = [
        IsolationFigures(
            r["broker_name"], r["topic"], r["cause"], r["latency_ms"], _utc(r["isolated_from"]),
            r["isolated_ms"], r["reachable"], r["workers"],
        )
        for r in reversed(found)
    ]  # fmt: skip
    return (found[0]["_total"] if found else 0), figures


def _dead_letters(rows: DataFrame, scope: Scope) -> list[DeadLetterFigures]:
    letters = _within(views.dead_letters(rows, pending=False), scope)
    pending = views.dead_letters(rows, pending=True).select("letter_id", f.lit(1).alias("_pending"))
    joined = letters.join(pending, "letter_id", "left")
    code = f.coalesce("last_error_code", "first_error_code", f.lit("-"))
    grouped = joined.groupBy("reason", code.alias("error_code")).agg(
        f.count("*").alias("letters"), f.count("_pending").alias("pending"),
        f.coalesce(f.min("last_error"), f.lit("")).alias("example"),
    )  # fmt: skip
    ordered = grouped.orderBy(f.col("letters").desc(), "reason", "error_code").collect()
    return [DeadLetterFigures(**row.asDict()) for row in ordered]


def _errors(sends: DataFrame, limit: int) -> list[ErrorFigures]:
    failed = sends.where(~f.col("outcome").isin("acked", IN_FLIGHT))
    code = f.coalesce("error_code", f.upper("outcome"))
    grouped = failed.groupBy(code.alias("error_code"), "response_code").agg(
        f.count_distinct("broker_name").alias("brokers"), f.count("*").alias("attempts"),
        _sum(f.col("message_count")).alias("messages"), f.min("at").alias("first_at"),
        f.max("at").alias("last_at"), f.coalesce(f.min("remark"), f.lit("")).alias("example"),
    )  # fmt: skip
    ordered = grouped.orderBy(f.col("attempts").desc(), "error_code").limit(limit)
    rows = [row.asDict() for row in _in_utc(ordered, "first_at", "last_at").collect()]
    return [
        ErrorFigures(**{**r, "first_at": _utc(r["first_at"]), "last_at": _utc(r["last_at"])})
        for r in rows
    ]


def _everything() -> Any:
    from pyspark.sql.window import Window

    return Window.partitionBy(f.lit(0))


def _sum(value: Column) -> Column:
    return f.coalesce(f.sum(value.cast("bigint")), f.lit(0))


def _in_utc(frame: DataFrame, *names: str) -> DataFrame:
    """Times as microseconds: collected as they are, they would be in this machine's time zone."""
    return frame.withColumns({name: f.unix_micros(name) for name in names})


def _utc(micros: int) -> dt.datetime:
    return dt.datetime.fromtimestamp(0, dt.timezone.utc) + dt.timedelta(microseconds=micros)
