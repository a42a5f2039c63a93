"""A ledger's figures as plain values; `rocket_sink.ledger.figures` shows them.

Each figure is one query over the ledger's views. Percentiles are Spark's `percentile_approx`
(relative error of ranks 1/10,000), and exact where DuckDB reads (`rocket_sink.ledger.quick`).
"""
# ruff: noqa: S608 (the texts are of our own names; what users give is checked or hexadecimal)

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from rocket_sink.errors import LedgerError
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
from rocket_sink.text import clean

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from rocket_sink.ledger.ledger import Ledger

__all__ = ["Report", "Scope", "build_report", "figures"]

Query = Callable[[str], pa.Table]
"""Runs a query over the views of one ledger."""

_STORED: Final = "outcome IN ('acked', 'acked_degraded')"
_IDS_SHOWN: Final = 5
_SUMS: Final = tuple(n for n in Totals.__dataclass_fields__ if n in EpochFigures.__annotations__)


def build_report(
    spark: SparkSession,
    ledger: Ledger,
    scope: Scope | None = None,
    *,
    epochs: int = 20,
    isolations: int = 50,
    errors: int = 10,
    unfolded_epochs: int = 0,
) -> Report:
    """Read the figures with Spark; the numbers are the longest lists wanted.

    Raises:
        LedgerError: no ledger there, or one of another version; or no query, or several, whose id
            begins as the scope says.
    """
    rows = ledger.rows(spark)

    def query(select: str) -> pa.Table:
        return views.queried(rows, select).toArrow()

    return figures(
        query, ledger.path, scope or Scope(), epochs=epochs, isolations=isolations, errors=errors,
        unfolded_epochs=unfolded_epochs, quarantined_files=len(ledger.quarantined()),
    )  # fmt: skip


def figures(
    query: Query, path: str, scope: Scope, *, epochs: int = 20, isolations: int = 50,
    errors: int = 10, unfolded_epochs: int = 0, quarantined_files: int = 0,
) -> Report:  # fmt: skip
    """The same of whatever runs the queries."""
    if scope.query_id is not None:
        scope = replace(scope, query_id=_full_id(query, scope.query_id, path))
    read = _Scoped(query, scope)
    totals, last_epochs = _epochs(read, epochs)
    count, events = _isolations(read, isolations)
    return Report(
        path, scope, totals, _brokers(read), last_epochs, events, count, _dead_letters(read),
        _errors(read, errors), unfolded_epochs, quarantined_files,
    )  # fmt: skip


class _Scoped:
    """Queries whose WHERE ends with the scope's conditions."""

    def __init__(self, query: Query, scope: Scope) -> None:
        self._query = query
        conditions = ["true"]
        if scope.query_id is not None:
            conditions.append(_is("query_id", scope.query_id))
        if scope.since is not None:
            conditions.append(f"at >= {_moment(scope.since)}")
        if scope.until is not None:
            conditions.append(f"at < {_moment(scope.until)}")
        self.where = " AND ".join(conditions)

    def __call__(self, select: str) -> list[dict[str, Any]]:
        return views.rows_of(self._query(select))


def _full_id(query: Query, given: str, path: str) -> str:
    """The id of the query that is meant; reports show its first characters only."""
    begins = _is("query_id", given, f"substr({{}}, 1, {len(given)})")
    found = query(f"SELECT DISTINCT query_id FROM ledger_rows WHERE {begins}")
    ids = sorted(found.column("query_id").to_pylist())
    if given in ids or len(ids) == 1:
        return given if given in ids else str(ids[0])
    if ids:
        shown = ", ".join(clean(one, 60) for one in ids[:_IDS_SHOWN])
        raise LedgerError(
            f"{len(ids)} queries of the ledger have ids that begin with {given!r}: {shown}"
            f"{', ...' if len(ids) > _IDS_SHOWN else ''}; give more of the id",
            path=path,
        )
    raise LedgerError(
        f"the ledger {path} has no rows of a query {given!r}; `rocket-sink ledger show epochs "
        "--json` lists whole ids",
        path=path,
    )


def _is(column: str, text: str, form: str = "{}") -> str:
    """A condition; what is quoted otherwise in Spark and in DuckDB goes as hexadecimal digits."""
    column = form.format(column)
    if re.fullmatch(r"[\w.-]+", text, re.ASCII):
        return f"{column} = '{text}'"
    return f"hex({column}) = '{text.encode().hex().upper()}'"


def _moment(moment: dt.datetime) -> str:
    micros = (moment - dt.datetime.fromtimestamp(0, dt.timezone.utc)) // dt.timedelta(
        microseconds=1
    )
    return f"timestamp_micros({micros})"


def _epochs(read: _Scoped, limit: int) -> tuple[Totals, list[EpochFigures]]:
    """The sums are over all epochs of the scope, the list has the last ones."""
    sums = {
        "epochs": "count(*)",
        **{name: f"sum({name})" for name in _SUMS},
        "not_adding_up": "count(CASE WHEN NOT adds_up THEN 1 END)",
        "unconfirmed": "count(CASE WHEN NOT confirmed THEN 1 END)",
    }
    totals = ", ".join(f"CAST({text} OVER () AS BIGINT) AS _{n}" for n, text in sums.items())
    names = list(EpochFigures.__dataclass_fields__)
    rows = read(
        f"SELECT {', '.join(names)}, {totals} FROM epochs WHERE {read.where} "
        f"ORDER BY at DESC, epoch DESC LIMIT {limit}"
    )
    if not rows:
        return Totals(), []
    total = Totals(**{name: rows[0][f"_{name}"] for name in sums})
    return total, [EpochFigures(**{name: row[name] for name in names}) for row in reversed(rows)]


def _brokers(read: _Scoped) -> list[BrokerFigures]:
    broker = "coalesce(broker_name, '-') AS broker"
    counted = read(
        f"SELECT {broker}, outcome, count(*) AS requests FROM sends WHERE {read.where} "
        "GROUP BY 1, 2"
    )
    counts = {(row["broker"], row["outcome"]): row["requests"] for row in counted}
    rtt = "CASE WHEN response_code IS NOT NULL THEN rtt_ms END"
    # in_flight rows name no broker as a rule and are attempts of which nothing more is known.
    rows = read(
        f"""SELECT {broker}, count(*) AS requests,
            CAST(coalesce(sum(CASE WHEN {_STORED} THEN message_count END), 0) AS BIGINT)
                AS messages,
            CAST(coalesce(sum(CASE WHEN {_STORED} THEN body_bytes END), 0) AS BIGINT)
                AS body_bytes,
            max(at) AS last_at,
            count(CASE WHEN attempt > 1 AND outcome <> '{IN_FLIGHT}' THEN 1 END) AS retries,
            percentile_approx({rtt}, 0.5) AS p50_ms, percentile_approx({rtt}, 0.95) AS p95_ms,
            percentile_approx({rtt}, 0.99) AS p99_ms, max({rtt}) AS max_ms,
            percentile_approx(queue_wait_ms, 0.99) AS wait_p99_ms
        FROM sends WHERE {read.where} GROUP BY 1 ORDER BY 1"""
    )
    return [
        BrokerFigures(
            **row, outcomes={o: n for (b, o), n in sorted(counts.items()) if b == row["broker"]}
        )
        for row in rows
    ]


def _isolations(read: _Scoped, limit: int) -> tuple[int, list[IsolationFigures]]:
    """Workers of an executor share their fault table, so that one event can be noted twice."""
    rows = read(
        f"""SELECT *, count(*) OVER () AS _total FROM (
            SELECT broker_name AS broker, topic, cause, max(latency_ms) AS latency_ms,
                isolated_from AS start, isolated_ms AS length_ms, reachable,
                count(DISTINCT worker) AS workers
            FROM isolations WHERE {read.where}
            GROUP BY broker_name, topic, cause, isolated_from, isolated_ms, reachable
        ) e ORDER BY start DESC LIMIT {limit}"""
    )
    names = IsolationFigures.__dataclass_fields__
    events = [IsolationFigures(**{name: row[name] for name in names}) for row in reversed(rows)]
    return (rows[0]["_total"] if rows else 0), events


def _dead_letters(read: _Scoped) -> list[DeadLetterFigures]:
    rows = read(
        f"""SELECT reason, coalesce(last_error_code, first_error_code, '-') AS error_code,
            count(*) AS letters, count(p.pending_id) AS pending,
            coalesce(min(last_error), '') AS example
        FROM letters l LEFT JOIN (SELECT letter_id AS pending_id FROM pending_letters) p
        ON l.letter_id = p.pending_id WHERE {read.where}
        GROUP BY 1, 2 ORDER BY letters DESC, reason, error_code"""
    )
    return [DeadLetterFigures(**row) for row in rows]


def _errors(read: _Scoped, limit: int) -> list[ErrorFigures]:
    rows = read(
        f"""SELECT coalesce(error_code, upper(outcome)) AS error_code, response_code,
            count(DISTINCT broker_name) AS brokers, count(*) AS attempts,
            CAST(coalesce(sum(
                CASE WHEN _nth = 1 OR request IS NULL THEN message_count END
            ), 0) AS BIGINT) AS messages,
            min(at) AS first_at, max(at) AS last_at, coalesce(min(remark), '') AS example
        FROM (
            SELECT *, row_number() OVER (
                PARTITION BY error_code, outcome, response_code, query_id, run_id, epoch,
                    partition, task_attempt_id, request ORDER BY attempt
            ) AS _nth
            FROM sends WHERE NOT {_STORED} AND outcome <> '{IN_FLIGHT}' AND {read.where}
        ) s GROUP BY 1, 2 ORDER BY attempts DESC, error_code LIMIT {limit}"""
    )
    return [ErrorFigures(**row) for row in rows]
