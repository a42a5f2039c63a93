"""A report: its values, which `ledger.report` reads from a ledger, and how they are shown.

As tables for the terminal by rich, as HTML for notebooks and files.
"""

from __future__ import annotations

import datetime as dt
import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

from rocket_sink.tables import table

if TYPE_CHECKING:
    from rich.console import RenderableType


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
        from rocket_sink.ledger.figures import render_report

        return render_report(self)

    def _repr_html_(self) -> str:
        from rocket_sink.ledger.figures import to_html

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
        _brokers(report.brokers),
        _isolations(report.isolations, report.isolation_count),
        _dead_letters(report.dead_letters),
        _errors(report.errors),
        _epochs(report.epochs, report.totals.epochs),
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


def _brokers(brokers: Sequence[BrokerFigures]) -> RenderableType:
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


def _isolations(events: Sequence[IsolationFigures], total: int) -> RenderableType:
    rows = [
        (_time(e.start), e.broker, e.topic or "", e.cause, e.latency_ms, e.length_ms / 1000,
         {True: "yes", False: "no", None: ""}[e.reachable])
        for e in events
    ]  # fmt: skip
    title = f"Isolations ({total:,}" + (f", last {len(rows):,})" if len(rows) < total else ")")
    names = ("from (UTC)", "broker", "topic", "cause", "latency ms", "length s", "reachable")
    return _shown(title, names, rows, empty="No broker was isolated.")


def _dead_letters(letters: Sequence[DeadLetterFigures]) -> RenderableType:
    rows = [(d.reason, d.error_code, d.letters, d.pending, _short(d.example)) for d in letters]
    names = ("reason", "error", "letters", "pending", "example")
    return _shown("Dead letters", names, rows, empty="No dead letters.")


def _errors(errors: Sequence[ErrorFigures]) -> RenderableType:
    rows = [
        (e.error_code, "" if e.response_code is None else str(e.response_code), e.brokers,
         e.attempts, e.messages, _time(e.last_at), _short(e.example))
        for e in errors
    ]  # fmt: skip
    names = ("error", "code", "brokers", "attempts", "messages", "last (UTC)", "example")
    return _shown("Failed attempts", names, rows, empty="No attempt failed.")


def _epochs(epochs: Sequence[EpochFigures], total: int) -> RenderableType:
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
