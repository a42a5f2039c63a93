"""Reads a report's figures from a ledger: queries over its views (`ledger.views`). Spark or DuckDB
(`ledger.query.duckdb_reader`) computes the sums, so the results are small even if the ledger is
large. Percentiles come from histograms, so they are the same with both engines."""
# ruff: noqa: S608 (the SQL has our own names; texts of users are checked or hexadecimal)

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from rocket_sink.ledger.query.consumption import consumption
from rocket_sink.ledger.report.series import read_series
from rocket_sink.ledger.report.tables import Report
from rocket_sink.ledger.report.values import (
    Absence,
    BrokerFigures,
    Cause,
    DeadLetterFigures,
    EpochFigures,
    ErrorFigures,
    IsolationFigures,
    IsolationSums,
    ResentFigures,
    RowSums,
    Successor,
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
    is_text,
    latencies,
    percentile,
    timestamp,
    with_full_id,
)
from rocket_sink.ledger.tune.suggest import FEWEST, tune
from rocket_sink.options import SinkOptions

_FAILED_SEND: Final = "coalesce(lane = 'table' AND superseded_attempts > 0, false)"
"""SQL condition of a failed send of a `TableProducer`: its only attempt does not count."""
_ISOLATIONS: Final = 50
_ERRORS: Final = 10
_CAUSES: Final = 1000
"""Number of groups (topic, broker, error) in which causes are searched: the largest ones."""


def figures(
    query: Query, path: str, scope: Scope, *, epochs: int = 20, unfolded_epochs: int = 0,
    unfolded_letters: int = 0, quarantined_files: int = 0, series: bool = False, group: str = "",
    options: SinkOptions | None = None,
) -> Report:  # fmt: skip
    """Make a report with any reader of the views. Raise LedgerError if no query, or several
    queries, have an id that begins with the scope's `query_id`.

    Args:
        epochs: the largest number of epochs to list.
        series: include the figures of the page: charts, and sends under other settings.
        group: compare the offsets of the messages with the positions of this consumer group.
        options: name servers and credentials for the group; without them those of NAMESRV_ADDR.
    """
    scope = with_full_id(scope, query, path)
    read = Scoped(query, scope)
    totals, last_epochs = _epochs(read, epochs)
    count, events = _isolations(read)
    brokers, letters = _brokers(read), _dead_letters(read)
    pending, resolved = any(d.pending for d in letters), any(d.resolved for d in letters)
    (last,) = read(
        f"SELECT max(at) AS at FROM latest_answers WHERE broker_name <> '' AND {read.where}"
    )
    return Report(
        path, scope, totals, brokers, last_epochs, events, count, letters,
        _errors(read), unfolded_epochs, unfolded_letters, quarantined_files,
        causes=_causes(read), absences=_absences(read), waiting=_waiting(read) if pending else [],
        resent=_resent(read) if resolved else ResentFigures(), successors=successors(read),
        isolated=_isolation_sums(read), last_at=last["at"],
        series=read_series(read) if series else None,
        tuning=tune(query, path, scope, fewest=FEWEST) if series else None,
        consumption=consumption(read, group, options) if group else None,
    )  # fmt: skip


def _epochs(read: Scoped, limit: int) -> tuple[Totals, list[EpochFigures]]:
    sums = {
        "epochs": "count(*)",
        **{name: f"sum({name})" for name in RowSums.__dataclass_fields__},
        "not_adding_up": "count(CASE WHEN NOT adds_up THEN 1 END)",
        "unconfirmed": f"count(CASE WHEN NOT confirmed AND NOT {_FAILED_SEND} THEN 1 END)",
        "unfinished": "count(CASE WHEN NOT adds_up AND NOT confirmed AND missing_rows = 0 "
        "THEN 1 END)",
        "failed_sends": f"count(CASE WHEN {_FAILED_SEND} THEN 1 END)",
    }
    totals = ", ".join(f"CAST({text} OVER () AS BIGINT) AS _{n}" for n, text in sums.items())
    names = EpochFigures.__dataclass_fields__
    rows = read(
        f"SELECT {', '.join(names)}, {totals} FROM epochs "
        # Window functions repeat the sums in each row, so one query is enough.
        f"WHERE {read.where} ORDER BY at DESC, epoch DESC LIMIT {max(limit, 1)}"
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
    brokers = []
    for name in sorted({row["broker"] for row in counted}):
        rows = {row["outcome"]: row for row in counted if row["broker"] == name}
        stored = [rows[outcome] for outcome in ("acked", "acked_degraded") if outcome in rows]
        longest = [row["max_ms"] for row in rows.values() if row["max_ms"] is not None]
        classes, most = latency.get(name, []), max(longest, default=None)
        p50, p95, p99, p999 = (percentile(classes, x, most) for x in (0.5, 0.95, 0.99, 0.999))
        brokers.append(
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
    return brokers


def _causes(read: Scoped) -> list[Cause]:
    """Return the failures that no stored message followed, the most frequent first. A message to
    any broker ends the failures of a topic that reached no broker."""
    rows = read(
        f"""SELECT coalesce(topic, '') AS topic, coalesce(broker_name, '') AS broker,
            CASE WHEN outcome <> 'acked' THEN coalesce(error_code, upper(outcome)) END
                AS error_code,
            count(*) AS attempts, max(at) AS last_at, coalesce(max_by(remark, at), '') AS remark
        FROM latest_answers WHERE {read.where}
        GROUP BY 1, 2, 3 ORDER BY attempts DESC, 1, 2, 3 LIMIT {_CAUSES}"""
    )
    stored = [row for row in rows if row["error_code"] in (None, "ACKED_DEGRADED")]
    return [
        Cause(**row)
        for row in rows
        if row["error_code"] is not None
        and not any(
            success["topic"] == row["topic"]
            and row["broker"] in ("", success["broker"])
            and success["last_at"] > row["last_at"]
            for success in stored
        )
    ]


def _histogram(read: Scoped, rows: str) -> dict[str, list[tuple[int, float]]]:
    """Return {broker: sorted pairs (latency class, weight)}."""
    histograms: dict[str, list[tuple[int, float]]] = {}
    for row in read(
        f"SELECT broker, {class_of('ms')} AS class, sum(weight) AS weight FROM ({rows}) l "
        "GROUP BY 1, 2 ORDER BY 1, 2"
    ):
        histograms.setdefault(row["broker"], []).append((row["class"], row["weight"]))
    return histograms


_UNREACHABLE: Final = ("CONNECT", "CONNECTION_LOST", "UNKNOWN_HOST", "NO_ROUTE", "INVALID_QUEUE")
"""Error codes of a broker that cannot be reached."""
_SILENT: Final = (*_UNREACHABLE, "REQUEST_TIMEOUT", "UNWRITTEN")
"""Error codes of a broker that does not answer; it may only be slow."""
_NO_ANSWER: Final = f"NOT {STORED} AND response_code IS NULL AND error_code IN {_SILENT}"
"""SQL condition of an attempt that the broker gave no answer to."""
_OUT_OF_ROUTE: Final = ("NO_ROUTE", "INVALID_QUEUE")
_ABSENT: Final = 20
"""Number of brokers that are searched for outages: those with the most failed attempts."""
_OUTAGES: Final = 50
"""Number of outages that the report shows, the latest ones."""
_FEW: Final = 20
"""Least number of requests that other brokers must have stored since a broker fell silent, so that
the broker counts as away. With fewer requests, perhaps none was meant for the broker."""
_ONE_OUTAGE_US: Final = 10_000_000
"""Failures less than this apart belong to one outage, even with stored messages in between."""


def _absences(read: Scoped) -> list[Absence]:
    brokers = read(
        f"""SELECT broker_name AS broker, count(*) AS attempts FROM latest_answers
        WHERE {_NO_ANSWER} AND broker_name <> '' AND {read.where}
        GROUP BY 1 ORDER BY 2 DESC, 1 LIMIT {_ABSENT}"""
    )
    if not brokers:
        return []
    of_them = " OR ".join(is_text("broker_name", row["broker"]) for row in brokers)
    before, after = (
        f"CASE WHEN {STORED} THEN at END) OVER (PARTITION BY broker_name ORDER BY at "
        f"ROWS BETWEEN {rows})"
        for rows in ("UNBOUNDED PRECEDING AND CURRENT ROW", "CURRENT ROW AND UNBOUNDED FOLLOWING")
    )
    rows = read(
        f"""SELECT broker, outage, error_code, count(*) AS attempts, min(at) AS first_at,
            max(at) AS last_at, max_by(back_at, at) AS back_at
        FROM (
            SELECT *, sum(CASE WHEN stored_at > failed_at
                    AND unix_micros(at) - unix_micros(failed_at) > {_ONE_OUTAGE_US} THEN 1 ELSE 0
                END) OVER (PARTITION BY broker ORDER BY at) AS outage
            FROM (
                SELECT *, lag(at) OVER (PARTITION BY broker ORDER BY at) AS failed_at
                FROM (
                    SELECT broker_name AS broker, error_code, at, {STORED} AS is_stored,
                        max({before} AS stored_at, min({after} AS back_at
                    FROM latest_answers
                    WHERE ({of_them}) AND ({STORED} OR {_NO_ANSWER}) AND {read.where}
                ) a WHERE NOT is_stored
            ) f
        ) o GROUP BY broker, outage, error_code"""
    )
    outages: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in rows:
        outages.setdefault((row["broker"], row["outage"]), []).append(row)
    absences = filter(None, map(_absence, outages.values()))
    candidates = sorted(absences, key=lambda absence: absence.since)[-_OUTAGES:]
    if not candidates:
        return []
    terms = (f"{_stored_elsewhere(absence)} AS _{n}" for n, absence in enumerate(candidates))
    (stored,) = read(
        f"SELECT {', '.join(terms)} FROM latest_answers WHERE {STORED} AND {read.where}"
    )
    return [
        replace(absence, stored_elsewhere=requests)
        for absence, requests in zip(candidates, stored.values(), strict=True)
        if absence.back_at or absence.cause in _UNREACHABLE or requests >= _FEW
    ]


def _absence(failed: Sequence[dict[str, Any]]) -> Absence | None:
    """Return the figures of one outage; None if the broker was only slow for a while."""
    newest = max(failed, key=lambda row: row["last_at"])
    unreachable = [row for row in failed if row["error_code"] in _UNREACHABLE]
    if newest["back_at"] is not None:
        failed = unreachable
    if not failed:
        return None
    is_out_of_route = any(row["error_code"] in _OUT_OF_ROUTE for row in failed)
    return Absence(
        newest["broker"], min(row["first_at"] for row in failed),
        max(row["last_at"] for row in failed), newest["back_at"], 0,
        is_out_of_route and newest["back_at"] is None,
        max(unreachable or failed, key=lambda r: (r["attempts"], r["error_code"]))["error_code"],
    )  # fmt: skip


def _stored_elsewhere(absence: Absence) -> str:
    """Return the term that counts the requests that other brokers stored during an outage."""
    end_sql = "" if absence.back_at is None else f" AND at < {timestamp(absence.back_at)}"
    return (
        f"CAST(coalesce(sum(CASE WHEN NOT ({is_text('broker_name', absence.broker)}) "
        f"AND at > {timestamp(absence.since)}{end_sql} THEN coalesce(frames, 1) END), 0) AS BIGINT)"
    )


def successors(read: Scoped) -> list[Successor]:
    """Return streaming queries that may continue an earlier one whose checkpoint was deleted. A
    query without `appId` has Spark's id. A new checkpoint gives it a new id."""
    rows = read(
        f"""SELECT b.query_id, max_by(a.query_id, a.last_at) AS earlier, b.topic,
            b.first_at AS began
        FROM (SELECT * FROM query_topics WHERE first_epoch = 0 AND {read.where}) b
        JOIN query_topics a ON a.topic = b.topic AND a.last_at < b.first_at
        GROUP BY b.query_id, b.topic, b.first_at ORDER BY began, b.topic"""
    )
    return [Successor(**row) for row in rows]


def _waiting(read: Scoped) -> list[WaitFigures]:
    """Return the pending dead letters with keys, by the broker that they wait for. The broker of a
    key is found from all its pending letters, even those outside of the scope."""
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
    return [WaitFigures(*row.values()) for row in rows]


def _resent(read: Scoped) -> ResentFigures:
    """Return how many dead letters a backfill has stored, and how many of them came late."""
    is_late = "sharding_key IS NOT NULL AND later_at < resent_at"
    (row,) = read(
        f"""SELECT count(*) AS rows, count(CASE WHEN {is_late} THEN 1 END) AS late_rows,
            count(DISTINCT CASE WHEN {is_late} THEN concat(topic, chr(1), sharding_key) END)
                AS late_keys
        FROM (SELECT * FROM counted_letters WHERE reason <> 'consumer' AND {read.where}) l
        JOIN (
            SELECT letter_id, max(at) AS resent_at FROM resolutions
            WHERE resolution = 'resent' GROUP BY letter_id
        ) r USING (letter_id)
        LEFT JOIN (
            SELECT query_id, epoch, min(CASE WHEN acked + degraded > 0 THEN at END) OVER (
                PARTITION BY query_id ORDER BY epoch
                ROWS BETWEEN 1 FOLLOWING AND UNBOUNDED FOLLOWING
            ) AS later_at FROM epochs
        ) e ON l.query_id = e.query_id AND l.epoch = e.epoch"""
    )
    return ResentFigures(**row)


def _isolations(read: Scoped) -> tuple[int, list[IsolationFigures]]:
    """Return the number of isolations and the last ones. Workers of an executor share the brokers'
    state, so an isolation that several of them noted counts once."""
    rows = read(
        f"""SELECT *, count(*) OVER () AS _total FROM (
            SELECT broker_name AS broker, topic, cause, max(latency_ms) AS latency_ms,
                isolated_from AS start, isolated_ms AS length_ms, reachable,
                count(DISTINCT worker) AS workers
            FROM isolations WHERE {read.where}
            GROUP BY broker_name, topic, cause, isolated_from, isolated_ms, reachable
        ) e ORDER BY start DESC LIMIT {_ISOLATIONS}"""
    )
    names = IsolationFigures.__dataclass_fields__
    last = [IsolationFigures(**{name: row[name] for name in names}) for row in reversed(rows)]
    return (rows[0]["_total"] if rows else 0), last


def _isolation_sums(read: Scoped) -> list[IsolationSums]:
    """Return the time that each broker was isolated; isolations that overlap count as one."""
    rows = read(
        f"""SELECT broker, count(CASE WHEN earlier_us < start_us THEN 1 END) AS times,
            sum(greatest(ends_us - greatest(start_us, earlier_us), 0)) / 1000 AS length_ms,
            min(start) AS first_start, max(CASE WHEN earlier_us < start_us THEN start END)
                AS last_start, max(ends) AS last_end, max_by(cause, start) AS cause
        FROM (
            SELECT *, coalesce(max(ends_us) OVER (
                PARTITION BY broker ORDER BY start_us, ends_us
                ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
            ), 0) AS earlier_us
            FROM (
                SELECT DISTINCT broker_name AS broker, cause, isolated_from AS start,
                    isolated_until AS ends, unix_micros(isolated_from) AS start_us,
                    unix_micros(isolated_until) AS ends_us
                FROM latest_isolations WHERE {read.where}
            ) d
        ) e GROUP BY broker ORDER BY broker"""
    )
    return [IsolationSums(**row) for row in rows]


def _dead_letters(read: Scoped) -> list[DeadLetterFigures]:
    """Return the dead letters by reason and error, also those of attempts that do not count. A
    letter that was exported several times counts once: exported letters have no partition, and
    the view `counted_letters` has each of them once."""
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


def _errors(read: Scoped) -> list[ErrorFigures]:
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
        ) s GROUP BY 1, 2 ORDER BY attempts DESC, error_code LIMIT {_ERRORS}"""
    )
    return [ErrorFigures(**row) for row in rows]
