"""A ledger's figures as plain values; `rocket_sink.ledger.report` shows them.

Each figure is one query over the ledger's views. Percentiles are Spark's `percentile_approx`
(relative error of ranks 1/10,000), and exact where DuckDB reads (`ledger.duckdb_reader`).

A report: its values, which `ledger.report` reads from a ledger, and how they are shown.

As tables for the terminal by rich, as HTML for notebooks and files.
"""

from __future__ import annotations

import datetime as dt
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from rocket_sink.errors import LedgerError
from rocket_sink.ledger import views
from rocket_sink.ledger.schema import IN_FLIGHT
from rocket_sink.tables import table
from rocket_sink.text import clean

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from rich.console import RenderableType

    from rocket_sink.ledger.ledger import Ledger


@dataclass(frozen=True)
class Scope:
    """Which rows a report is of; None: all. `query_id` may be the beginning of an id, as reports
    show it. `since` is included, `until` is not."""

    query_id: str | None = None
    since: dt.datetime | None = None
    until: dt.datetime | None = None


@dataclass(frozen=True)
class BrokerFigures:
    """The send attempts to one broker. `messages` and `body_bytes` are what it stored (a failed
    attempt's messages are those of its retry, too). Latencies are from the last byte to the answer,
    in ms, of answered attempts; None when there were none. `last_at` is when the last attempt
    began: a broker that left the route gets none any more. `broker` is "-" for what reached no
    broker."""

    broker: str
    requests: int
    messages: int
    body_bytes: int
    retries: int
    outcomes: dict[str, int]
    p50_ms: float | None
    p95_ms: float | None
    p99_ms: float | None
    max_ms: float | None
    wait_p99_ms: float | None
    last_at: dt.datetime

    @property
    def degraded(self) -> int:
        """Attempts whose messages are stored, but less durably than asked for."""
        return self.outcomes.get("acked_degraded", 0)

    @property
    def not_acked(self) -> int:
        """Attempts without an acknowledgement, degraded or not."""
        return self.requests - self.outcomes.get("acked", 0) - self.degraded


@dataclass(frozen=True)
class EpochFigures:
    """One epoch of one query; see `Ledger.epochs`."""

    query_id: str
    epoch: int
    at: dt.datetime
    rows_in: int
    acked: int
    degraded: int
    dead: int
    unknown: int
    filtered: int
    duplicates_possible: int
    superseded_attempts: int
    superseded_rows: int
    adds_up: bool
    confirmed: bool
    missing_rows: int = 0


@dataclass(frozen=True)
class Totals:
    """Sums over all epochs within the scope."""

    epochs: int = 0
    rows_in: int = 0
    acked: int = 0
    degraded: int = 0
    dead: int = 0
    unknown: int = 0
    filtered: int = 0
    duplicates_possible: int = 0
    superseded_attempts: int = 0
    superseded_rows: int = 0
    missing_rows: int = 0
    not_adding_up: int = 0
    unconfirmed: int = 0


@dataclass(frozen=True)
class IsolationFigures:
    """One isolation; the same one noted by several workers is there once, with their number."""

    broker: str
    topic: str | None
    cause: str
    latency_ms: float
    start: dt.datetime
    length_ms: float
    reachable: bool | None
    workers: int


@dataclass(frozen=True)
class DeadLetterFigures:
    """The dead letters of one reason and error; `pending` of them wait to be sent again."""

    reason: str
    error_code: str
    letters: int
    pending: int
    example: str


@dataclass(frozen=True)
class ErrorFigures:
    """Attempts that failed alike; `messages` counts those of a request once, however often it
    was tried. `example` is one of the remarks."""

    error_code: str
    response_code: int | None
    brokers: int
    attempts: int
    messages: int
    first_at: dt.datetime
    last_at: dt.datetime
    example: str


@dataclass(frozen=True)
class Report:
    """All figures; the lists of epochs and isolations hold the last ones.

    `unfolded_epochs` have rows that are not in the figures yet (read without Spark nothing is
    folded). `quarantined_files` were damaged, and their rows are in no figure.

    `as_dict` is for JSON; rich consoles and notebooks show the tables below.
    """

    ledger: str
    scope: Scope
    totals: Totals
    brokers: list[BrokerFigures] = field(default_factory=list)
    epochs: list[EpochFigures] = field(default_factory=list)
    isolations: list[IsolationFigures] = field(default_factory=list)
    isolation_count: int = 0
    dead_letters: list[DeadLetterFigures] = field(default_factory=list)
    errors: list[ErrorFigures] = field(default_factory=list)
    unfolded_epochs: int = 0
    quarantined_files: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Plain values; times as ISO 8601 text in UTC."""
        plain: dict[str, Any] = _plain(asdict(self))
        return plain

    def __rich__(self) -> RenderableType:

        return render_report(self)

    def _repr_html_(self) -> str:

        return to_html(self)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value.isoformat() if isinstance(value, dt.datetime) else value


_HTML_WIDTH: Final = 150
_QUERY_SHOWN: Final = 8
"""Characters of a query id; the rest tells nobody anything."""
_EXAMPLE_SHOWN: Final = 60


def render_report(report: Report) -> RenderableType:
    """All tables; those without rows say so in one line."""
    from rich.console import Group
    from rich.text import Text

    return Group(
        _accounts(report),
        _brokers_table(report.brokers),
        _isolations_table(report.isolations, report.isolation_count),
        _dead_letters_table(report.dead_letters),
        _errors_table(report.errors),
        _epochs_table(report.epochs, report.totals.epochs),
        Text(f"ledger {report.ledger}", style="dim"),
    )


def to_html(report: Report) -> str:
    """The same as one HTML page, styles inside, nothing loaded from anywhere."""
    from rich.console import Console

    console = Console(record=True, width=_HTML_WIDTH, file=io.StringIO(), force_jupyter=False)
    console.print(render_report(report))
    return console.export_html(inline_styles=True)


def _accounts(report: Report) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    totals = report.totals
    notes = {
        "rows_in": f"in {totals.epochs:,} epochs",
        "acked": "stored",
        "degraded": "stored, but less durably than asked for",
        "dead": "not stored; dead letters",
        "unknown": "perhaps stored; dead letters",
        "filtered": "needed no sending",
        "duplicates_possible": "stored, perhaps twice under one id",
        "superseded_rows": f"stored by {totals.superseded_attempts:,} attempts that do not count",
    }
    rows = [(n.replace("_", " "), getattr(totals, n), note) for n, note in notes.items()]
    accounts = table("Accounts", ("", "rows", "note"), rows)
    wrong = []
    if report.unfolded_epochs:
        wrong.append(
            f"rows of {report.unfolded_epochs:,} epochs are not folded yet and not counted"
        )
    if report.quarantined_files:
        wrong.append(
            f"{report.quarantined_files:,} damaged spool files are put aside in "
            "_spool/_quarantine: their rows are not counted"
        )
    if totals.missing_rows:
        wrong.append(
            f"ERROR: {totals.missing_rows:,} rows that Spark handed to tasks are in no accounts: "
            "their workers wrote to another folder than this ledger's, or files are gone"
        )
    if totals.not_adding_up:
        wrong.append(f"{totals.not_adding_up:,} epochs do not add up")
    if totals.unconfirmed:
        wrong.append(f"{totals.unconfirmed:,} epochs are not confirmed by Spark (yet)")
    return Group(accounts, *(Text(line, style="yellow") for line in wrong))


def _brokers_table(brokers: Sequence[BrokerFigures]) -> RenderableType:
    names = (
        "broker", "attempts", "stored", "MB", "retries", "degraded", "not acked", "p50 ms",
        "p95 ms", "p99 ms", "max ms", "p99 wait ms", "last (UTC)",
    )  # fmt: skip
    rows = [
        (
            b.broker, b.requests, b.messages, round(b.body_bytes / 1e6, 1), b.retries,
            b.degraded, b.not_acked, b.p50_ms, b.p95_ms, b.p99_ms, b.max_ms, b.wait_p99_ms,
            _time(b.last_at),
        )
        for b in brokers
    ]  # fmt: skip
    title = "Latency per broker (last byte to answer)"
    return _shown(title, names, rows, empty=f"{title}: nothing.")


def _isolations_table(events: Sequence[IsolationFigures], total: int) -> RenderableType:
    rows = [
        (_time(e.start), e.broker, e.topic or "", e.cause, e.latency_ms, e.length_ms / 1000,
         {True: "yes", False: "no", None: ""}[e.reachable])
        for e in events
    ]  # fmt: skip
    title = f"Isolations ({total:,}" + (f", last {len(rows):,})" if len(rows) < total else ")")
    names = ("from (UTC)", "broker", "topic", "cause", "latency ms", "length s", "reachable")
    return _shown(title, names, rows, empty="No broker was isolated.")


def _dead_letters_table(letters: Sequence[DeadLetterFigures]) -> RenderableType:
    rows = [(d.reason, d.error_code, d.letters, d.pending, _short(d.example)) for d in letters]
    names = ("reason", "error", "letters", "pending", "example")
    return _shown("Dead letters", names, rows, empty="No dead letters.")


def _errors_table(errors: Sequence[ErrorFigures]) -> RenderableType:
    rows = [
        (e.error_code, "" if e.response_code is None else str(e.response_code), e.brokers,
         e.attempts, e.messages, _time(e.last_at), _short(e.example))
        for e in errors
    ]  # fmt: skip
    names = ("error", "code", "brokers", "attempts", "messages", "last (UTC)", "example")
    return _shown("Failed attempts", names, rows, empty="No attempt failed.")


def _epochs_table(epochs: Sequence[EpochFigures], total: int) -> RenderableType:
    names = (
        "query", "epoch", "at (UTC)", "rows in", "acked", "degraded", "dead", "unknown",
        "filtered", "superseded", "adds up", "confirmed",
    )  # fmt: skip
    rows = [
        (e.query_id[:_QUERY_SHOWN], e.epoch, _time(e.at), e.rows_in, e.acked, e.degraded, e.dead,
         e.unknown, e.filtered, e.superseded_rows, _yes(e.adds_up), _yes(e.confirmed))
        for e in epochs
    ]  # fmt: skip
    title = f"Epochs ({total:,}" + (f", last {len(rows):,})" if len(rows) < total else ")")
    return _shown(title, names, rows, empty="No epochs.")


def _shown(
    title: str, names: Sequence[str], rows: Sequence[Sequence[Any]], empty: str
) -> RenderableType:
    from rich.text import Text

    return table(title, names, rows) if rows else Text(empty, style="dim")


def _time(at: dt.datetime) -> str:
    return at.strftime("%m-%d %H:%M:%S.") + f"{at.microsecond // 100_000}"


def _yes(flag: bool) -> str:
    return "yes" if flag else "NO"


def _short(text: str) -> str:
    return text if len(text) <= _EXAMPLE_SHOWN else text[: _EXAMPLE_SHOWN - 3] + "..."


# ruff: noqa: S608 (the texts are of our own names; what users give is checked or hexadecimal)


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
    requests = "CAST(sum(coalesce(frames, 1)) AS BIGINT)"
    counted = read(
        f"SELECT {broker}, outcome, {requests} AS requests FROM sends WHERE {read.where} "
        "GROUP BY 1, 2"
    )
    counts = {(row["broker"], row["outcome"]): row["requests"] for row in counted}
    # A row of a group has its own percentiles.
    p50, p95, p99, rtt = (
        f"CASE WHEN response_code IS NOT NULL THEN {one} END"
        for one in (*(f"coalesce(rtt_p{p}_ms, rtt_ms)" for p in (50, 95, 99)), "rtt_ms")
    )
    # in_flight rows name no broker as a rule and are attempts of which nothing more is known.
    rows = read(
        f"""SELECT {broker}, {requests} AS requests,
            CAST(coalesce(sum(CASE WHEN {_STORED} THEN message_count END), 0) AS BIGINT)
                AS messages,
            CAST(coalesce(sum(CASE WHEN {_STORED} THEN body_bytes END), 0) AS BIGINT)
                AS body_bytes,
            max(at) AS last_at,
            count(CASE WHEN attempt > 1 AND outcome <> '{IN_FLIGHT}' THEN 1 END) AS retries,
            percentile_approx({p50}, 0.5) AS p50_ms, percentile_approx({p95}, 0.95) AS p95_ms,
            percentile_approx({p99}, 0.99) AS p99_ms, max({rtt}) AS max_ms,
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
