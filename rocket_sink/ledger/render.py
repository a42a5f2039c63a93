"""A report as tables: for the terminal by rich, as HTML for notebooks and files."""

from __future__ import annotations

import datetime as dt
import io
from collections.abc import Iterable, Sequence
from typing import Any, Final

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from rocket_sink.ledger.figures import (
    BrokerFigures,
    DeadLetterFigures,
    EpochFigures,
    ErrorFigures,
    IsolationFigures,
    Report,
)
from rocket_sink.text import clean

_HTML_WIDTH: Final = 150
_QUERY_SHOWN: Final = 8
"""Characters of a query id; the rest tells nobody anything."""
_EXAMPLE_SHOWN: Final = 60


def render_report(report: Report) -> RenderableType:
    """All tables; those without rows say so in one line."""
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
    console = Console(record=True, width=_HTML_WIDTH, file=io.StringIO(), force_jupyter=False)
    console.print(render_report(report))
    return console.export_html(inline_styles=True)


def _accounts(report: Report) -> RenderableType:
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
    table = _table("Accounts", ("", "rows", "note"), rows)
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
    return Group(table, *(Text(line, style="yellow") for line in wrong))


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
    return _table("Latency per broker (last byte to answer)", names, rows)


def _isolations(events: Sequence[IsolationFigures], total: int) -> RenderableType:
    rows = [
        (_time(e.start), e.broker, e.topic or "", e.cause, e.latency_ms, e.length_ms / 1000,
         {True: "yes", False: "no", None: ""}[e.reachable])
        for e in events
    ]  # fmt: skip
    title = f"Isolations ({total:,}" + (f", last {len(rows):,})" if len(rows) < total else ")")
    names = ("from (UTC)", "broker", "topic", "cause", "latency ms", "length s", "reachable")
    return _table(title, names, rows, empty="No broker was isolated.")


def _dead_letters(letters: Sequence[DeadLetterFigures]) -> RenderableType:
    rows = [(d.reason, d.error_code, d.letters, d.pending, _short(d.example)) for d in letters]
    names = ("reason", "error", "letters", "pending", "example")
    return _table("Dead letters", names, rows, empty="No dead letters.")


def _errors(errors: Sequence[ErrorFigures]) -> RenderableType:
    rows = [
        (e.error_code, "" if e.response_code is None else str(e.response_code), e.brokers,
         e.attempts, e.messages, _time(e.last_at), _short(e.example))
        for e in errors
    ]  # fmt: skip
    names = ("error", "code", "brokers", "attempts", "messages", "last (UTC)", "example")
    return _table("Failed attempts", names, rows, empty="No attempt failed.")


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
    return _table(title, names, rows, empty="No epochs.")


def _table(
    title: str, names: Sequence[str], rows: Iterable[Sequence[Any]], *, empty: str = ""
) -> RenderableType:
    rows = list(rows)
    if not rows:
        return Text(empty or f"{title}: nothing.", style="dim")
    table = Table(title=title, title_justify="left", title_style="bold", header_style="dim")
    for index, name in enumerate(names):
        numeric = all(isinstance(row[index], (int, float, type(None))) for row in rows)
        table.add_column(name, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        # Text, not str: a remark with [brackets] is no markup.
        table.add_row(*(Text(_cell(value)) for value in row))
    return table


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.1f}" if value >= 100 else f"{value:,.2f}"
    return f"{value:,}" if isinstance(value, int) else clean(value)


def _time(at: dt.datetime) -> str:
    return at.strftime("%m-%d %H:%M:%S.") + f"{at.microsecond // 100_000}"


def _yes(flag: bool) -> str:
    return "yes" if flag else "NO"


def _short(text: str) -> str:
    return text if len(text) <= _EXAMPLE_SHOWN else text[: _EXAMPLE_SHOWN - 3] + "..."
