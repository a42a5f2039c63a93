"""A report and how it is shown: as tables by rich for terminals and notebooks, as a page.

The verdict stands before all figures.
"""

from __future__ import annotations

import datetime as dt
import html
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from rocket_sink.errors import ConfigurationError
from rocket_sink.ledger.report import plots
from rocket_sink.ledger.report.page import QUERY_SHOWN, page_html
from rocket_sink.ledger.report.series import Series
from rocket_sink.ledger.report.values import (
    Absence,
    BrokerFigures,
    DeadLetterFigures,
    EpochFigures,
    ErrorFigures,
    Facts,
    Finding,
    IsolationFigures,
    IsolationSums,
    Successor,
    Totals,
    WaitFigures,
    plain,
)
from rocket_sink.ledger.report.verdict import LINES, verdict
from rocket_sink.ledger.sql import Scope
from rocket_sink.ledger.tune.values import Tuning
from rocket_sink.tables import html_grid, table
from rocket_sink.text import clean, counted

if TYPE_CHECKING:
    import altair
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.text import Text


@dataclass(frozen=True)
class Report:
    """The figures of a report; the lists of epochs and isolations hold the last ones.

    `unfolded_epochs` counts epochs with rows that are not in the figures yet, because a reader
    without Spark does not fold. Only `absences`, `isolated` and `last_at` (start of the last
    attempt) include them. `quarantined_files` are damaged, and their rows are in no figure.
    `series` (the page's charts) and `tuning` (sends under other settings) are set on request.

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
    absences: list[Absence] = field(default_factory=list)
    waiting: list[WaitFigures] = field(default_factory=list)
    successors: list[Successor] = field(default_factory=list)
    isolated: list[IsolationSums] = field(default_factory=list)
    last_at: dt.datetime | None = None
    series: Series | None = None
    tuning: Tuning | None = None

    @property
    def facts(self) -> Facts:
        """The facts that the verdict is based on."""
        scope = self.scope
        in_flight = sum(broker.outcomes.get("in_flight", 0) for broker in self.brokers)
        return Facts(
            self.ledger, self.totals, self.brokers, self.isolated, self.dead_letters,
            self.absences, self.waiting, self.successors, self.unfolded_epochs,
            self.quarantined_files, in_flight, self.last_at, scoped=scope != Scope(),
        )  # fmt: skip

    @property
    def verdict(self) -> list[Finding]:
        """The most important findings, the gravest first."""
        return verdict(self.facts)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values; times as ISO 8601 text in UTC."""
        values = asdict(replace(self, series=None, tuning=None))
        del values["series"], values["tuning"]
        figures: dict[str, Any] = plain(
            {"verdict": [asdict(finding) for finding in self.verdict], **values}
        )
        return figures

    def plot_rows(self) -> altair.Chart:
        """Draw messages over time by outcome, as a figure of altair like all `plot_` methods.

        Raises from all of them:
            ConfigurationError: altair is not installed, or the report was made without `charts`.
        """
        return plots.over_time(self._charted(), "cells", "messages", "outcome", "messages")

    def plot_latency(self) -> altair.Chart:
        """Draw p50, p95, p99 and p99.9 (ms) of the times to an answer, by broker and topic."""
        return plots.latency_by_broker(self._charted())

    def plot_heat(self) -> altair.LayerChart:
        """Draw p99 (ms) by broker and time, with the isolations."""
        return plots.latency_heat(self._charted())

    def plot_failures(self) -> altair.Chart:
        """Draw failed attempts by error."""
        return plots.failures_by_class(self.errors)

    def plot_dead_letters(self) -> altair.Chart:
        """Draw dead letters over time by reason."""
        title = "dead letters given up"
        return plots.over_time(self._charted(), "letters", "given", "reason", title)

    def _charted(self) -> Series:
        if self.series is None:
            raise ConfigurationError(
                "this report has no figures over time: make it by ledger.report(spark, charts=True)"
            )
        return self.series

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield render_report(self, narrow=options.max_width < _WIDE)

    def _repr_html_(self) -> str:
        findings = "".join(
            f"<li><b>{finding.level}</b>: {html.escape(clean(str(finding)))}</li>"
            for finding in self.verdict
        )
        tables = "".join(
            html_grid(each.title, each.columns, each.rows)
            if each.rows
            else f"<p>{html.escape(each.empty)}</p>"
            for each in _tables(self)
        )
        return f"<div><ul>{findings}</ul>{tables}<p>ledger {html.escape(self.ledger)}</p></div>"


_WIDE: Final = 110
"""Columns of a console from which on tables have all of their columns."""
_EXAMPLE_SHOWN: Final = 160
"""Number of characters shown of an example: the reason may follow a long first sentence."""


class _Table(NamedTuple):
    """A table of the report; `empty` stands in its place if it has no rows.

    `wide` names the columns that a narrow console leaves out.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    empty: str = ""
    wide: str = ""

    def shown(self, *, narrow: bool) -> RenderableType:
        from rich.text import Text

        if not self.rows:
            return Text(self.empty, style="dim")
        left_out = self.wide.split(", ") if narrow and self.wide else ()
        kept = [n for n, name in enumerate(self.columns) if name not in left_out]
        rows = [[row[n] for n in kept] for row in self.rows]
        return table(self.title, [self.columns[n] for n in kept], rows)


def _tables(report: Report) -> list[_Table]:
    return [
        _accounts(report),
        _brokers_table(report.brokers),
        _isolations_table(report.isolations, report.isolation_count),
        _dead_letters_table(report.dead_letters),
        _errors_table(report.errors),
        _epochs_table(report.epochs, report.totals.epochs),
    ]


def render_report(report: Report, *, narrow: bool = False) -> RenderableType:
    """Return the tables; a table without rows becomes a line that says so.

    Args:
        narrow: leave out columns, so that the tables fit 80 columns.
    """
    from rich.console import Group
    from rich.text import Text

    findings = report.verdict
    accounts, *tables = (each.shown(narrow=narrow) for each in _tables(report))
    more = "; --html FILE writes a page with all columns" if narrow else ""
    first, further = _lines(findings[:LINES]), _lines(findings[LINES:])
    if further:
        first[-1].append(f" (and {len(further)} more, below)", style="dim")
    return Group(
        *first,
        Text(""),
        accounts,
        *further,
        *tables,
        Text(f"ledger {report.ledger}{more}", style="dim"),
    )


def to_html(report: Report) -> str:
    """Return the report as one page in one file, with charts if it has the series."""
    return page_html(report.as_dict(), report.series, report.tuning)


_STYLES: Final = {"problem": "bold red", "warning": "bold yellow", "note": "", "well": "bold green"}


def _lines(findings: Sequence[Finding]) -> list[Text]:
    from rich.text import Text

    return [Text(str(finding), style=_STYLES[finding.level]) for finding in findings]


def _accounts(report: Report) -> _Table:
    totals = report.totals
    resolved = sum(d.resolved for d in report.dead_letters)
    settled = f"; {counted(resolved, 'letter', 'is', 'are')} resolved" if resolved else ""
    attempts = counted(
        totals.superseded_attempts, "attempt", "that does not count", "that do not count"
    )
    notes = {
        "rows_in": f"in {counted(totals.epochs, 'epoch')}",
        "acked": "stored",
        "degraded": "stored, but less durably than asked for",
        "dead": f"not stored; dead letters{settled}",
        "unknown": "perhaps stored; dead letters",
        "filtered": "needed no sending",
        "duplicates_possible": "stored, perhaps twice under one id",
        "superseded_rows": f"stored by {attempts}",
    }
    rows = [(n.replace("_", " "), getattr(totals, n), note) for n, note in notes.items()]
    return _Table("Accounts", ("", "rows", "note"), rows)


def _brokers_table(brokers: Sequence[BrokerFigures]) -> _Table:
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
    wide = "MB, degraded, p95 ms, p99 wait ms, last (UTC)"
    return _Table(title, names, rows, f"{title}: nothing.", wide)


def _isolations_table(events: Sequence[IsolationFigures], total: int) -> _Table:
    rows = [
        (_time(e.start), e.broker, e.topic or "", e.cause, e.latency_ms, e.length_ms / 1000,
         {True: "yes", False: "no", None: ""}[e.reachable])
        for e in events
    ]  # fmt: skip
    title = f"Isolations ({total:,}" + (f", last {len(rows):,})" if len(rows) < total else ")")
    names = ("from (UTC)", "broker", "topic", "cause", "latency ms", "length s", "reachable")
    return _Table(title, names, rows, "No broker was isolated.", "topic, latency ms")


def _dead_letters_table(letters: Sequence[DeadLetterFigures]) -> _Table:
    rows = [
        (d.reason, d.error_code, d.letters, d.pending, d.resolved,
         "" if d.oldest is None else _time(d.oldest), _short(d.example))
        for d in letters
    ]  # fmt: skip
    names = ("reason", "error", "letters", "pending", "resolved", "oldest (UTC)", "example")
    return _Table("Dead letters", names, rows, "No dead letters.", "oldest (UTC), example")


def _errors_table(errors: Sequence[ErrorFigures]) -> _Table:
    rows = [
        (e.error_code, "" if e.response_code is None else str(e.response_code), e.brokers,
         e.attempts, e.messages, _time(e.last_at), _short(e.example))
        for e in errors
    ]  # fmt: skip
    names = ("error", "code", "brokers", "attempts", "messages", "last (UTC)", "example")
    return _Table("Failed attempts", names, rows, "No attempt failed.", "code, example")


def _epochs_table(epochs: Sequence[EpochFigures], total: int) -> _Table:
    names = (
        "query", "epoch", "at (UTC)", "rows in", "acked", "degraded", "dead", "unknown",
        "filtered", "superseded", "adds up", "confirmed",
    )  # fmt: skip
    rows = [
        (e.query_id[:QUERY_SHOWN], e.epoch, _time(e.at), e.rows_in, e.acked, e.degraded, e.dead,
         e.unknown, e.filtered, e.superseded_rows, _yes(e.adds_up), _yes(e.confirmed))
        for e in epochs
    ]  # fmt: skip
    title = f"Epochs ({total:,}" + (f", last {len(rows):,})" if len(rows) < total else ")")
    wide = "degraded, filtered, superseded, confirmed"
    return _Table(title, names, rows, "No epochs.", wide)


def _time(at: dt.datetime) -> str:
    return at.strftime("%m-%d %H:%M:%S.") + f"{at.microsecond // 100_000}"


def _yes(flag: bool) -> str:
    return "yes" if flag else "NO"


def _short(text: str) -> str:
    return text if len(text) <= _EXAMPLE_SHOWN else text[: _EXAMPLE_SHOWN - 3] + "..."
