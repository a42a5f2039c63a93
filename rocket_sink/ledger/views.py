"""The views behind `Ledger`, as SQL over all its rows. They select the rows that count.

A task attempt counts if it is complete and is the last attempt at its partition. Within a run the
last attempt is the one that Spark started last; among several runs it is the last in the table.
Once Spark has confirmed an epoch, only attempts of the confirming run count, because an earlier run
may have divided the rows into other partitions. If that run has no attempts (Delta skips an epoch
that it knows), earlier runs count.

The column `sequence` tells which row is the last one. Clocks do not, because they may be set back.

Rows of the kind `epoch` are either accounts of a task attempt, with a value of `complete`, or
confirmations by Spark, without one. Accounts without a partition belong to a `TableProducer`, whose
send is one task.

Spark and DuckDB (`ledger.query.duckdb_reader`) both know this SQL, so each view is defined once."""
# ruff: noqa: S608 (the SQL has our own names only)

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from rocket_sink.ledger.schema import (
    BACKFILL,
    DEAD_LETTER,
    EPOCH,
    IN_FLIGHT,
    ISOLATION,
    MOMENTS_US,
    NO_WAY,
    RESOLUTION,
    SEND,
    TRANSACTION,
    UNFOLDED,
    UNPARKED,
    columns_of,
)
from rocket_sink.ledger.storage import spark_frame

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

ATTEMPT: Final = ("query_id", "run_id", "epoch", "partition", "task_attempt_id")
"""Columns that identify a task attempt."""
_EPOCH: Final = ("query_id", "epoch")
OUTCOMES: Final = ("acked", "degraded", "dead", "unknown", "filtered")
"""Columns of `epoch` rows that count a task's rows by their outcome."""
_COUNTS: Final = (
    "rows_in", *OUTCOMES, "invalid", "held_back", "duplicates_possible", "found_stored",
    "requests", "attempts", "body_bytes", "moved_keys",
)  # fmt: skip
_TASK: Final = ("stage_id", "attempt_number", "worker")
_START: Final = dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc)
_ENDED: Final = ("committed", "refused", "found_stored")
_ACCOUNTS: Final = (
    *ATTEMPT, "at", "lane", *_TASK, *_COUNTS, "complete", "duration_ms", "first_error",
)  # fmt: skip


def _each(form: str, names: Iterable[str]) -> str:
    return ", ".join(form.format(name) for name in names)


def _same(left: str, right: str, names: Iterable[str]) -> str:
    """Return the condition of a join on columns; null is equal to null."""
    return " AND ".join(f"{left}.{name} IS NOT DISTINCT FROM {right}.{name}" for name in names)


def _rows(kind: str, **instead: str) -> str:
    """Return the query for a kind's columns and rows; the terms in `instead` replace columns."""
    names = columns_of(kind)
    terms = (f"{instead[name]} AS {name}" if name in instead else name for name in names)
    return f"SELECT {', '.join(terms)} FROM ledger_rows WHERE kind = '{kind}'"


_EVENT_TIME: Final = f"""CASE WHEN unix_micros(event_time)
    BETWEEN {MOMENTS_US[0]} AND {MOMENTS_US[1]} THEN event_time END"""
"""Term that makes times outside Python's range null, because rows with them cannot be collected."""
_REPEATED: Final = f"SEMI JOIN repeated_epochs r ON {_same('e', 'r', _EPOCH)}"
_OF_A_TASK: Final = "(partition IS NOT NULL OR coalesce(lane, '') = 'table')"
_PERHAPS_STORED: Final = "outcome IN ('acked', 'acked_degraded', 'unknown')"
REQUESTS: Final = (
    "CAST(sum(CASE WHEN wire_bytes = 0 THEN 0 ELSE coalesce(frames, 1) END) AS BIGINT)"
)
"""Term for the number of attempts. A row with `wire_bytes` 0 is about a wait and not an attempt."""
_EPOCH_COUNTS: Final = _each("coalesce(e.{0}, 0) AS {0}", (*_COUNTS, "partitions")).replace(
    "coalesce(e.duplicates_possible, 0)",
    "coalesce(e.duplicates_possible, 0) + coalesce(c.uncounted_duplicates, 0)",
)
_MISSING: Final = "coalesce(greatest(c.rows_handed - coalesce(e.rows_in, 0), 0), 0)"


def _newest_rows(kind: str) -> str:
    """Return the query for the rows of a kind, including rows that are not folded yet."""
    return f"{_rows(kind)} OR kind = '{UNFOLDED[kind]}'"


VIEWS: Final = {
    "send_rows": _rows(SEND),
    "answered": f"SELECT * FROM send_rows WHERE outcome <> '{IN_FLIGHT}'",
    "latest_answers": f"SELECT * FROM ({_newest_rows(SEND)}) s WHERE outcome <> '{IN_FLIGHT}'",
    "latest_isolations": _newest_rows(ISOLATION),
    # In-flight rows of attempts that died: a complete attempt has awaited all its answers. The view
    # `sends` looks for answers to these rows only, because a join of all requests would be large.
    "died_in_flight": f"""
        SELECT w.* FROM (SELECT * FROM send_rows WHERE outcome = '{IN_FLIGHT}') w
        ANTI JOIN (SELECT * FROM ledger_rows WHERE kind = '{EPOCH}' AND complete) c
            ON {_same("w", "c", ATTEMPT)}""",
    "sends": f"""
        SELECT * FROM answered
        UNION ALL
        SELECT w.* FROM died_in_flight w
        ANTI JOIN (
            SELECT a.* FROM answered a
            SEMI JOIN (SELECT DISTINCT {", ".join(ATTEMPT)} FROM died_in_flight) d
                ON {_same("a", "d", ATTEMPT)}
        ) a ON {_same("w", "a", (*ATTEMPT, "request"))}""",
    "query_topics": f"""
        SELECT query_id, topic, min(epoch) AS first_epoch, min(at) AS first_at, max(at) AS last_at,
            max(at) AS at
        FROM answered
        WHERE lane IN ('foreach', 'datasource', 'foreach_batch') AND request > 0
            AND query_id LIKE '{"-".join("_" * n for n in (8, 4, 4, 4, 12))}'
        GROUP BY query_id, topic""",
    "resolutions": _rows(RESOLUTION),
    "settled": f"""
        SELECT letter_id FROM resolutions GROUP BY letter_id
        HAVING bool_or(resolution = 'resent') OR max_by(resolution, sequence) <> '{UNPARKED}'""",
    # A backfill that was killed, or got no valid answer, may have stored the dead letter.
    "backfills": f"""
        SELECT letter_id, CAST(sum(CASE WHEN is_blamed THEN 1 ELSE 0 END) AS BIGINT) AS tries,
            bool_or(is_unknown OR NOT has_ended) AS open
        FROM (
            SELECT letter_id, bool_or(outcome <> '{IN_FLIGHT}') AS has_ended,
                bool_or(outcome <> '{IN_FLIGHT}' AND error_code NOT IN {NO_WAY}) AS is_blamed,
                bool_or(outcome = 'unknown') AS is_unknown
            FROM ({_rows(BACKFILL)}) b GROUP BY letter_id, query_id
        ) r GROUP BY letter_id""",
    "parked": f"""
        SELECT letter_id FROM resolutions GROUP BY letter_id
        HAVING NOT bool_or(resolution = 'resent')
            AND max_by(resolution, sequence) <> '{UNPARKED}'""",
    "isolations": f"""
        SELECT *, (unix_micros(isolated_until) - unix_micros(isolated_from)) / 1000 AS isolated_ms
        FROM ({_rows(ISOLATION)}) i""",
    "epoch_rows": _rows(EPOCH),
    "confirmations": """
        SELECT query_id, epoch, max_by(run_id, sequence) AS confirmed_run_id,
            max_by(num_input_rows, sequence) AS num_input_rows,
            max_by(rows_in, sequence) AS rows_handed,
            max_by(duration_ms, sequence) AS batch_duration_ms, max(at) AS confirmed_at,
            CAST(sum(duplicates_possible) AS BIGINT) AS uncounted_duplicates
        FROM epoch_rows WHERE complete IS NULL GROUP BY query_id, epoch""",
    # An epoch with one account per partition, all of one run, is not repeated: all of its accounts
    # are current. Only the accounts of repeated epochs have to be grouped and compared.
    "repeated_epochs": """
        SELECT query_id, epoch FROM epoch_rows WHERE complete IS NOT NULL GROUP BY query_id, epoch
        HAVING count(*) > count(DISTINCT coalesce(partition, -1)) OR min(run_id) < max(run_id)""",
    "task_sums": f"""
        SELECT {", ".join(ATTEMPT)}, max(at) AS at, max(sequence) AS _order,
            max(lane) AS lane, {_each("min({0}) AS {0}", _TASK)},
            {_each("CAST(sum({0}) AS BIGINT) AS {0}", _COUNTS)},
            bool_and(complete) AS complete, max(duration_ms) AS duration_ms,
            min(first_error) AS first_error
        FROM (SELECT * FROM epoch_rows WHERE complete IS NOT NULL) e
        {_REPEATED}
        GROUP BY {", ".join(ATTEMPT)}""",
    # `_current` is false if another run of the epoch was confirmed. The view `task_runs` joins the
    # few runs, because a window over all task attempts would have to sort them.
    "runs": """
        SELECT r.*, c.epoch IS NOT NULL OR NOT bool_or(_has_complete AND c.epoch IS NOT NULL)
            OVER (PARTITION BY r.query_id, r.epoch) AS _current
        FROM (
            SELECT query_id, epoch, run_id, max(_order) AS _run_order, max(at) AS _run_at,
                bool_or(complete) AS _has_complete
            FROM task_sums GROUP BY query_id, epoch, run_id
        ) r LEFT JOIN confirmations c ON r.query_id = c.query_id AND r.epoch = c.epoch
            AND r.run_id = c.confirmed_run_id""",
    "task_runs": """
        SELECT t.*, r._run_order, r._run_at, r._current
        FROM task_sums t JOIN runs r USING (query_id, epoch, run_id)""",
    # `_has_partition` is true for exactly one current attempt of each partition.
    "repeated_accounts": f"""
        SELECT {", ".join(_ACCOUNTS)}, _order, _current AND _nth = 1 AS _has_partition,
            complete AND _current AND _nth = 1 AS counts
        FROM (
            SELECT *, row_number() OVER (
                PARTITION BY query_id, epoch, partition
                ORDER BY (complete AND _current) DESC, _current DESC, _run_order DESC,
                    _run_at DESC, task_attempt_id DESC NULLS LAST, _order DESC, at DESC
            ) AS _nth FROM task_runs
        ) t""",
    "accounts": f"""
        SELECT {", ".join(_ACCOUNTS)}, sequence AS _order, true AS _has_partition,
            complete AS counts
        FROM (SELECT * FROM epoch_rows WHERE complete IS NOT NULL) e
        ANTI JOIN repeated_epochs r ON {_same("e", "r", _EPOCH)}
        UNION ALL SELECT * FROM repeated_accounts""",
    "letters": _rows(DEAD_LETTER, event_time=_EVENT_TIME),
    # A dead letter without a partition does not come from a task, so no attempt supersedes it. If
    # an export runs twice, the first of its equal letters counts. Letters of a `TableProducer` have
    # no partition either, but count like those of a task: only if the send succeeded.
    "counted_letters": f"""
        SELECT {", ".join(columns_of(DEAD_LETTER))} FROM (
            SELECT *, row_number() OVER (PARTITION BY letter_id ORDER BY sequence, at) AS _nth
            FROM letters WHERE NOT {_OF_A_TASK}
        ) d WHERE _nth = 1
        UNION ALL
        SELECT t.* FROM (SELECT * FROM letters WHERE {_OF_A_TASK}) t
        SEMI JOIN (SELECT * FROM accounts WHERE counts) a ON {_same("t", "a", ATTEMPT)}""",
    "pending_letters": """
        SELECT l.* FROM counted_letters l ANTI JOIN settled s ON l.letter_id = s.letter_id""",
    "epoch_sums": f"""
        SELECT query_id, epoch, max_by(run_id, _order) AS run_id, max(lane) AS lane,
            coalesce(max(CASE WHEN counts THEN at END), max(at)) AS at,
            count(CASE WHEN _has_partition THEN 1 END) AS partitions,
            {_each("CAST(sum(CASE WHEN counts THEN {0} ELSE 0 END) AS BIGINT) AS {0}", _COUNTS)},
            max(CASE WHEN counts THEN duration_ms END) AS duration_ms,
            min(CASE WHEN counts THEN first_error END) AS first_error,
            bool_and(CASE WHEN counts THEN coalesce(
                rows_in = {" + ".join(f"coalesce({n}, 0)" for n in OUTCOMES)}, false
            ) END) AS _balanced,
            count(CASE WHEN counts THEN 1 END) AS _counted
        FROM accounts GROUP BY query_id, epoch""",
    # A killed attempt has no accounts, but a row for each request that it handed to the engine.
    "killed_requests": f"""
        SELECT w.* FROM died_in_flight w
        ANTI JOIN (SELECT * FROM epoch_rows WHERE complete IS NOT NULL) c
            ON {_same("w", "c", ATTEMPT)}
        WHERE partition IS NOT NULL""",
    "killed_attempts": f"""
        SELECT {", ".join(ATTEMPT)}, CAST(sum(messages) AS BIGINT) AS perhaps_stored FROM (
            SELECT {", ".join(ATTEMPT)}, request, max(message_count) AS messages FROM (
                SELECT * FROM killed_requests
                UNION ALL
                SELECT a.* FROM answered a
                SEMI JOIN killed_requests k ON {_same("a", "k", (*ATTEMPT, "request"))}
            ) s
            GROUP BY {", ".join(ATTEMPT)}, request
            HAVING bool_or({_PERHAPS_STORED}) OR bool_and(outcome = '{IN_FLIGHT}')
        ) r GROUP BY {", ".join(ATTEMPT)}""",
    # The view sums rows that brokers may have stored for attempts that do not count. A killed
    # attempt may still run, so the view leaves it out until another attempt counts in its place.
    "superseded": f"""
        SELECT query_id, epoch, count(*) AS superseded_attempts,
            CAST(sum(perhaps_stored) AS BIGINT) AS superseded_rows
        FROM (
            SELECT query_id, epoch,
                coalesce(acked, 0) + coalesce(degraded, 0) + coalesce(unknown, 0) AS perhaps_stored
            FROM accounts WHERE NOT counts
            UNION ALL
            SELECT k.query_id, k.epoch, k.perhaps_stored FROM killed_attempts k
            SEMI JOIN (SELECT * FROM accounts WHERE counts) a
                ON {_same("k", "a", ("query_id", "epoch"))}
                    AND (k.partition = a.partition OR k.run_id <> a.run_id)
        ) s GROUP BY query_id, epoch""",
    # An epoch with only the driver's row had no rows to send, because tasks without rows write
    # nothing. In the foreachBatch lane the commit of an epoch's rows confirms the epoch. A failed
    # send of `TableProducer` counts as no rows: its caller gets the error, and no attempt follows.
    "epochs": f"""
        SELECT query_id, epoch, coalesce(c.confirmed_run_id, e.run_id) AS run_id, e.lane AS lane,
            coalesce(e.at, c.confirmed_at) AS at,
            (coalesce(e._balanced AND e._counted = e.partitions, e.partitions IS NULL, false)
                OR coalesce(e.lane = 'table' AND e._counted = 0, false))
                AND {_MISSING} = 0 AS adds_up, {_MISSING} AS missing_rows,
            coalesce(c.confirmed_run_id IS NOT NULL OR e.lane = 'foreach_batch', false)
                AS confirmed, c.num_input_rows AS num_input_rows,
            {_EPOCH_COUNTS},
            {_each("coalesce(s.{0}, 0) AS {0}", ("superseded_attempts", "superseded_rows"))},
            e.duration_ms AS duration_ms, c.batch_duration_ms AS batch_duration_ms,
            e.first_error AS first_error
        FROM epoch_sums e FULL OUTER JOIN confirmations c USING (query_id, epoch)
        LEFT JOIN superseded s USING (query_id, epoch)""",
    "task_sends": f"""
        SELECT {", ".join(ATTEMPT)}, min(at) AS first_send_at, max(lane) AS lane,
            max(worker) AS worker, {REQUESTS} AS send_attempts,
            CAST(sum(CASE WHEN outcome = '{IN_FLIGHT}' THEN message_count ELSE 0 END) AS BIGINT)
                AS in_flight
        FROM sends GROUP BY {", ".join(ATTEMPT)}""",
    "attempts": f"""
        SELECT {_each("coalesce(a.{0}, s.{0}) AS {0}", ATTEMPT)},
            coalesce(a.at, s.first_send_at) AS at,
            {_each("coalesce(a.{0}, s.{0}) AS {0}", ("lane", "worker"))},
            {_each("a.{0} AS {0}", _TASK[:-1])}, {_each("a.{0} AS {0}", _COUNTS)},
            a.complete AS complete, a.duration_ms AS duration_ms, a.first_error AS first_error,
            coalesce(a.counts, false) AS counts, s.first_send_at AS first_send_at,
            s.send_attempts AS send_attempts, s.in_flight AS in_flight
        FROM accounts a FULL OUTER JOIN task_sends s ON {_same("a", "s", ATTEMPT)}""",
    # Half messages that the table records as stored are to be committed. Only the foreachBatch lane
    # and batch writes send half messages. An epoch's append has no rows of failed task attempts, so
    # this view need not leave out attempts that do not count.
    "decided_halves": f"""
        SELECT * FROM ledger_rows
        WHERE kind = '{SEND}' AND half AND outcome IN ('acked', 'acked_degraded')""",
    "epoch_ends": f"SELECT * FROM ledger_rows WHERE kind = '{TRANSACTION}' AND message_id IS NULL",
    "transactions": f"""
        SELECT h.*, e.ended_at, {_each("e.{0}", _ENDED)}, e.ended_at IS NULL AS open
        FROM (
            SELECT query_id, epoch, max(run_id) AS run_id, max(lane) AS lane, max(at) AS at,
                CAST(sum(coalesce(frames, 1)) AS BIGINT) AS halves,
                sort_array(collect_set(topic)) AS topics,
                sort_array(collect_set(broker_name)) AS brokers
            FROM decided_halves GROUP BY query_id, epoch
        ) h
        LEFT JOIN (
            SELECT query_id, epoch, max(at) AS ended_at,
                {_each("max_by({0}, sequence) AS {0}", _ENDED)}
            FROM epoch_ends GROUP BY query_id, epoch
        ) e USING (query_id, epoch)""",
}
"""{name: query over `ledger_rows` (the whole table) and earlier views}."""


SPARK_VIEWS: Final = VIEWS | {
    "task_sums": VIEWS["task_sums"].replace(_REPEATED, ""),
    "accounts": "SELECT * FROM repeated_accounts",
}
"""`VIEWS` for Spark. `VIEWS` looks for repeated epochs first, and ranks only their accounts. In
Spark this search would read the table once more, so these views rank the accounts of all epochs."""


def views_of(select: str, views: dict[str, str] = VIEWS) -> list[str]:
    """Return the names of the views that a query needs, each after the views that it uses."""
    names: list[str] = []
    words = set(re.findall(r"\w+", select))
    for name in reversed(views):
        if name in words:
            names.insert(0, name)
            words |= set(re.findall(r"\w+", views[name]))
    return names


def queried(rows: DataFrame, select: str) -> DataFrame:
    """Return the result of a query, which may use the views."""
    names = views_of(select, SPARK_VIEWS)
    views = [f"{name} AS ({SPARK_VIEWS[name]})" for name in names]
    definitions = ", ".join(["ledger_rows AS (SELECT * FROM {rows})", *views])
    return rows.sparkSession.sql(f"WITH {definitions} {select}", rows=rows)


def reader(rows: DataFrame, unfolded: pa.Table | None = None) -> Callable[[str], pa.Table]:
    """Return a function that runs queries over the views by Spark; `unfolded`: further rows."""
    if unfolded:
        more = spark_frame(rows.sparkSession, unfolded)
        rows = rows.unionByName(more, allowMissingColumns=True)
    return lambda select: queried(rows, select).toArrow()


def view(rows: DataFrame, name: str) -> DataFrame:
    """Return a view of a ledger's rows."""
    return queried(rows, f"SELECT * FROM {name}")


def rows_of(table: pa.Table) -> list[dict[str, Any]]:
    """Return rows as Python values: times in UTC, maps as dicts."""
    columns = {}
    values: list[Any]
    for name, column in zip(table.column_names, table.columns, strict=True):
        if pa.types.is_timestamp(column.type):
            # To make a Python value of a timestamp, Arrow imports pandas, which takes 0.3 s.
            times = column.cast(pa.timestamp("us", tz="UTC")).cast(pa.int64()).to_pylist()
            values = [us if us is None else _START + dt.timedelta(microseconds=us) for us in times]
        elif pa.types.is_map(column.type):
            values = [value if value is None else dict(value) for value in column.to_pylist()]
        else:
            values = column.to_pylist()
        columns[name] = values
    return [
        dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)
    ]
