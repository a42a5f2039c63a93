"""Reads a report's figures from a ledger: queries over its views (`ledger.views`).

Sums are made where the data is, by Spark or by DuckDB (`ledger.duckdb_reader`); what comes back is
as small as the report, however many rows there are. Percentiles come from histograms: counts of
rows per class of latency add up over any number of rows, and both engines make the same.
"""
# ruff: noqa: S608 (the texts are of our own names; what users give is checked or hexadecimal)

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from rocket_sink.ledger.report.series import read_series
from rocket_sink.ledger.report.tables import Report
from rocket_sink.ledger.report.values import (
    Absence,
    BrokerFigures,
    DeadLetterFigures,
    EpochFigures,
    ErrorFigures,
    IsolationFigures,
    IsolationSums,
    Totals,
    WaitFigures,
)
from rocket_sink.ledger.sql import (
    BROKER,
    REQUESTS,
    STORED,
    Query,
    Scope,
    Scoped,
    class_of,
    full_id,
    is_text,
    latencies,
    percentile,
    timestamp,
)
from rocket_sink.ledger.tune.suggest import tune
from rocket_sink.ledger.tune.values import FEWEST

_FAILED_SEND: Final = "coalesce(lane = 'table' AND superseded_attempts > 0, false)"
"""Condition of a failed epoch of a `TableProducer`, whose place no other epoch takes."""
_SUMS: Final = tuple(n for n in Totals.__dataclass_fields__ if n in EpochFigures.__annotations__)


def figures(
    query: Query, path: str, scope: Scope, *, epochs: int = 20, isolations: int = 50,
    errors: int = 10, unfolded_epochs: int = 0, quarantined_files: int = 0, series: bool = False,
) -> Report:  # fmt: skip
    """A report of whatever runs the queries; `epochs`, `isolations`, `errors`: the longest lists.

    Args:
        series: also what the page shows: the charts, and the sends under other settings.

    Raises:
        LedgerError: no query, or several, whose id begins as the scope says.
    """
    if scope.query_id is not None:
        scope = replace(scope, query_id=full_id(query, scope.query_id, path))
    read = Scoped(query, scope)
    totals, last_epochs = _epochs(read, epochs)
    count, events = _isolations(read, isolations)
    isolated = _isolation_sums(read) if count else []
    brokers, letters = _brokers(read), _dead_letters(read)
    pending = any(d.pending for d in letters)
    return Report(
        path, scope, totals, brokers, last_epochs, events, count, letters,
        _errors(read, errors), unfolded_epochs, quarantined_files,
        absences=_absences(read, brokers), waiting=_waiting(read) if pending else [],
        isolated=isolated, series=read_series(read, brokers) if series else None,
        tuning=tune(query, path, scope, fewest=FEWEST) if series else None,
    )  # fmt: skip


def _epochs(read: Scoped, limit: int) -> tuple[Totals, list[EpochFigures]]:
    """The sums are over all epochs of the scope, the list has the last ones."""
    sums = {
        "epochs": "count(*)",
        **{name: f"sum({name})" for name in _SUMS},
        "not_adding_up": "count(CASE WHEN NOT adds_up THEN 1 END)",
        "unconfirmed": f"count(CASE WHEN NOT confirmed AND NOT {_FAILED_SEND} THEN 1 END)",
        "failed_sends": f"count(CASE WHEN {_FAILED_SEND} THEN 1 END)",
    }
    totals = ", ".join(f"CAST({text} OVER () AS BIGINT) AS _{n}" for n, text in sums.items())
    names = list(EpochFigures.__dataclass_fields__)
    rows = read(
        f"SELECT {', '.join(names)}, {totals} FROM epochs WHERE {read.where} "
        # The sums come with the rows, so that it takes one.
        f"ORDER BY at DESC, epoch DESC LIMIT {max(limit, 1)}"
    )
    if not rows:
        return Totals(), []
    total = Totals(**{name: rows[0][f"_{name}"] for name in sums})
    last = reversed(rows[:limit])
    return total, [EpochFigures(**{name: row[name] for name in names}) for row in last]


def _brokers(read: Scoped) -> list[BrokerFigures]:
    counted = read(
        f"""SELECT {BROKER} AS broker, outcome, {REQUESTS} AS requests,
            CAST(coalesce(sum(message_count), 0) AS BIGINT) AS messages,
            CAST(coalesce(sum(body_bytes), 0) AS BIGINT) AS body_bytes,
            max(at) AS last_at, max(CASE WHEN response_code IS NOT NULL THEN rtt_ms END) AS max_ms,
            count(CASE WHEN attempt > 1 AND wire_bytes > 0 THEN 1 END) AS retries
        FROM sends WHERE {read.where} GROUP BY 1, 2"""
    )
    latency = _histogram(read, latencies(read.where, f"{BROKER} AS broker"))
    waits = _histogram(
        read,
        f"SELECT {BROKER} AS broker, queue_wait_ms AS ms, CAST(coalesce(frames, 1) AS DOUBLE) "
        f"AS weight FROM answered WHERE queue_wait_ms IS NOT NULL AND {read.where}",
    )
    found = []
    for name in sorted({row["broker"] for row in counted}):
        rows = {row["outcome"]: row for row in counted if row["broker"] == name}
        stored = [rows[outcome] for outcome in ("acked", "acked_degraded") if outcome in rows]
        longest = [row["max_ms"] for row in rows.values() if row["max_ms"] is not None]
        classes, most = latency.get(name, []), max(longest, default=None)
        p50, p95, p99, p999 = (percentile(classes, x, most) for x in (0.5, 0.95, 0.99, 0.999))
        found.append(
            BrokerFigures(
                name,
                sum(row["requests"] for row in rows.values()),
                sum(row["messages"] for row in stored),
                sum(row["body_bytes"] for row in stored),
                sum(row["retries"] for row in rows.values()),
                {outcome: row["requests"] for outcome, row in sorted(rows.items())},
                p50, p95, p99, most,
                percentile(waits.get(name, []), 0.99),
                max(row["last_at"] for row in rows.values()),
                max((row["last_at"] for row in stored), default=None),
                p999,
            )
        )  # fmt: skip
    return found


def _histogram(read: Scoped, rows: str) -> dict[str, list[tuple[int, float]]]:
    """{broker: its (class, weight), sorted}."""
    found: dict[str, list[tuple[int, float]]] = {}
    for row in read(
        f"SELECT broker, {class_of('ms')} AS class, sum(weight) AS weight FROM ({rows}) l "
        "GROUP BY 1, 2 ORDER BY 1, 2"
    ):
        found.setdefault(row["broker"], []).append((row["class"], row["weight"]))
    return found


_UNREACHABLE: Final = ("CONNECT", "CONNECTION_LOST", "UNKNOWN_HOST", "NO_ROUTE", "INVALID_QUEUE")
"""Errors of a broker that is not there."""
_SILENT: Final = (*_UNREACHABLE, "REQUEST_TIMEOUT", "UNWRITTEN")
"""Error codes of a broker that does not answer; it may only be slow."""
_OUT_OF_ROUTE: Final = ("NO_ROUTE", "INVALID_QUEUE")
_ABSENT: Final = 20
"""Limit of the brokers that are looked at."""
_FEW: Final = 20
"""Requests that others stored meanwhile: with fewer, a broker may only not have had its turn."""


def _absences(read: Scoped, brokers: Sequence[BrokerFigures]) -> list[Absence]:
    """Brokers that could not be reached, and whether they are back."""
    rows = read(
        f"""SELECT broker_name AS broker, error_code, count(*) AS attempts, min(at) AS first_at,
            max(at) AS last_at
        FROM answered
        WHERE NOT {STORED} AND error_code IN {_SILENT} AND broker_name <> '' AND {read.where}
        GROUP BY 1, 2"""
    )
    stored = {b.broker: b.last_stored_at for b in brokers}
    failed: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        failed.setdefault(row["broker"], []).append(row)
    candidates = sorted(failed, key=lambda name: -sum(r["attempts"] for r in failed[name]))
    if not candidates:
        return []
    found = []
    columns = []
    for n, name in enumerate(candidates[:_ABSENT]):
        of = is_text("broker_name", name)
        last = timestamp(max(row["last_at"] for row in failed[name]))
        columns.append(f"min(CASE WHEN {of} AND {STORED} AND at > {last} THEN at END) AS back{n}")
        at = stored.get(name)
        since = f" AND at > {timestamp(at)}" if at is not None else ""
        columns.append(
            f"min(CASE WHEN {of} AND NOT {STORED} AND error_code IN {_SILENT}{since} THEN at END) "
            f"AS since{n}"
        )
        columns.append(
            f"CAST(coalesce(sum(CASE WHEN NOT ({of}) AND {STORED}{since} "
            f"THEN coalesce(frames, 1) END), 0) AS BIGINT) AS others{n}"
        )
    (facts,) = read(f"SELECT {', '.join(columns)} FROM answered WHERE {read.where}")
    for n, name in enumerate(candidates[:_ABSENT]):
        absence = _absence(
            name, failed[name], stored.get(name), facts[f"since{n}"], facts[f"back{n}"],
            facts[f"others{n}"],
        )  # fmt: skip
        if absence is not None:
            found.append(absence)
    return found


def _absence(
    name: str, failed: Sequence[dict[str, Any]], stored: dt.datetime | None,
    since: dt.datetime | None, back: dt.datetime | None, others: int,
) -> Absence | None:  # fmt: skip
    """Return the absence of a broker; None if it was only slow, or failed only briefly."""
    gone = [row for row in failed if row["error_code"] in _UNREACHABLE]
    last = max(row["last_at"] for row in failed)
    is_back = back is not None or (stored is not None and stored > last)
    if is_back:
        if not gone:
            return None
        failed = gone
        last = max(row["last_at"] for row in failed)
        since = min(row["first_at"] for row in failed)
        back = back or stored
    elif not gone and others < _FEW:
        return None
    cause = max(failed, key=lambda row: (row["attempts"], row["error_code"]))["error_code"]
    left = not is_back and any(row["error_code"] in _OUT_OF_ROUTE for row in failed)
    # The broker died after its last stored request began, and before the next failure.
    began = since or stored or min(row["first_at"] for row in failed)
    return Absence(name, began, last, back if is_back else None, others, left, cause)


def _waiting(read: Scoped) -> list[WaitFigures]:
    """Return waits by the broker that keys' letters could not be sent to, also before the scope."""
    rows = read(
        f"""SELECT broker, CAST(sum(letters) AS BIGINT) AS letters, count(*) AS key_count,
            min(oldest) AS oldest, CAST(sum(forbidden) AS BIGINT) AS forbidden
        FROM (
            SELECT topic, sharding_key, count(CASE WHEN {read.where} THEN 1 END) AS letters,
                min(CASE WHEN {read.where} THEN at END) AS oldest,
                count(CASE WHEN reason = 'permission' AND {read.where} THEN 1 END) AS forbidden,
                max(coalesce(last_broker_name, broker_name)) AS broker
            FROM pending_letters WHERE sharding_key IS NOT NULL AND reason <> 'data'
            GROUP BY topic, sharding_key
        ) k WHERE letters > 0 GROUP BY broker ORDER BY letters DESC, broker"""
    )
    return [
        WaitFigures(
            row["broker"], row["letters"], row["key_count"], row["oldest"], row["forbidden"]
        )
        for row in rows
    ]  # fmt: skip


def _isolations(read: Scoped, limit: int) -> tuple[int, list[IsolationFigures]]:
    """Workers of an executor share their fault table, so that one event can be noted twice."""
    rows = read(
        f"""SELECT *, count(*) OVER () AS _total FROM (
            SELECT broker_name AS broker, topic, cause, max(latency_ms) AS latency_ms,
                isolated_from AS start, isolated_ms AS length_ms, reachable,
                count(DISTINCT worker) AS workers
            FROM isolations WHERE {read.where}
            GROUP BY broker_name, topic, cause, isolated_from, isolated_ms, reachable
        ) e ORDER BY start DESC LIMIT {max(limit, 1)}"""
    )
    names = IsolationFigures.__dataclass_fields__
    last = reversed(rows[:limit])
    events = [IsolationFigures(**{name: row[name] for name in names}) for row in last]
    return (rows[0]["_total"] if rows else 0), events


def _isolation_sums(read: Scoped) -> list[IsolationSums]:
    rows = read(
        f"""SELECT broker, count(*) AS times, sum(length_ms) AS length_ms,
            min(start) AS first_start, max(start) AS last_start, max(ends) AS last_end,
            max_by(cause, start) AS cause
        FROM (
            SELECT DISTINCT broker_name AS broker, topic, cause, isolated_from AS start,
                isolated_until AS ends, isolated_ms AS length_ms
            FROM isolations WHERE {read.where}
        ) e GROUP BY broker ORDER BY broker"""
    )
    return [IsolationSums(**row) for row in rows]


def _dead_letters(read: Scoped) -> list[DeadLetterFigures]:
    """Return the dead letters, also of attempts that do not count; each exported letter once."""
    rows = read(
        f"""SELECT reason, coalesce(last_error_code, first_error_code, '-') AS error_code,
            count(*) AS letters, count(p.pending_id) AS pending,
            coalesce(min(last_error), '') AS example,
            count(CASE WHEN p.pending_id IS NULL THEN s.settled_id END) AS resolved,
            min(CASE WHEN p.pending_id IS NOT NULL THEN at END) AS oldest
        FROM (
            SELECT * FROM letters WHERE partition IS NOT NULL
            UNION ALL
            SELECT * FROM counted_letters WHERE partition IS NULL
        ) l
        LEFT JOIN (SELECT DISTINCT letter_id AS pending_id FROM pending_letters) p
            ON l.letter_id = p.pending_id
        LEFT JOIN (SELECT letter_id AS settled_id FROM settled) s ON l.letter_id = s.settled_id
        WHERE {read.where}
        GROUP BY 1, 2 ORDER BY letters DESC, reason, error_code"""
    )
    return [DeadLetterFigures(**row) for row in rows]


def _errors(read: Scoped, limit: int) -> list[ErrorFigures]:
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
            FROM answered WHERE NOT {STORED} AND {read.where}
        ) s GROUP BY 1, 2 ORDER BY attempts DESC, error_code LIMIT {limit}"""
    )
    return [ErrorFigures(**row) for row in rows]
