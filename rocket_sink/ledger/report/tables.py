"""A report as tables in terminals (by rich), or as a page in a file or in a notebook. Its verdict
comes first."""

from __future__ import annotations

import html
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from rocket_sink.ledger.query.consumption import Consumption
from rocket_sink.ledger.report.page import finding_html, page_html, short_query, table_html
from rocket_sink.ledger.report.values import Column, Figures, Finding, Table, plain
from rocket_sink.ledger.report.verdict import LINES, verdict
from rocket_sink.tables import table as grid
from rocket_sink.text import clean, counted

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult


@dataclass(frozen=True)
class Report(Figures):
    """A report: its figures, and how they are shown."""

    @property
    def verdict(self) -> list[Finding]:
        """The most important findings, the gravest first."""
        return verdict(self)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values; times as ISO 8601 text in UTC."""
        values = asdict(replace(self, series=None, tuning=None))
        del values["series"], values["tuning"]
        figures: dict[str, Any] = plain(
            {"verdict": [asdict(finding) for finding in self.verdict], **values}
        )
        return figures

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        narrow = options.max_width < _WIDE
        accounts, *others = (console_table(each, narrow=narrow) for each in tables(self))
        lines = [Text(str(each), style=_STYLES[each.level]) for each in self.verdict]
        first, further = lines[:LINES], lines[LINES:]
        if further:
            first[-1].append(f" (and {len(further)} more, below)", style="dim")
        more = "; --html FILE writes a page with all columns" if narrow else ""
        yield from (*first, Text(""), accounts, *further, *others)
        yield Text(f"ledger {self.ledger}{more}", style="dim")

    def __str__(self) -> str:
        """Return the text that `rocket-sink report` prints, without colours."""
        from rich.console import Console

        # The width is that of a command whose output is no terminal.
        console = Console(color_system=None, width=140, highlight=False, emoji=False)
        with console.capture() as text:
            console.print(self)
        return text.get().rstrip()

    def _repr_html_(self) -> str:
        """Return the page with charts in a frame, which keeps its styles and scripts from the
        notebook, or without charts the findings and the tables."""
        if self.series is not None:
            frame = 'sandbox="allow-scripts" style="width: 100%; height: 640px; border: 0"'
            return f'<iframe {frame} srcdoc="{html.escape(to_html(self))}"></iframe>'
        findings = "".join(map(finding_html, self.as_dict()["verdict"]))
        grids = "".join(map(table_html, tables(self)))
        return f"<div><ul>{findings}</ul>{grids}<p>ledger {html.escape(self.ledger)}</p></div>"


_WIDE: Final = 110
"""Width in characters from which on a console shows all columns of a table."""
_EXAMPLE_SHOWN: Final = 160
"""Number of characters shown of an example: the reason may follow a long first sentence."""


_BROKERS: Final = (
    Column("broker", "broker"), Column("attempts", "requests", "n"),
    Column("stored", "messages", "n"),
    Column("MB", lambda b: round(b.body_bytes / 1e6, 1), "n", is_wide=True),
    Column("retries", "retries", "n"), Column("degraded", "degraded", "n", is_wide=True),
    Column("not acked", "not_acked", "n"), Column("p50 ms", "p50_ms", "n"),
    Column("p95 ms", "p95_ms", "n", is_wide=True), Column("p99 ms", "p99_ms", "n"),
    Column("p99.9 ms", "p999_ms", "n", is_wide=True), Column("max ms", "max_ms", "n"),
    Column("wait p99 ms", "wait_p99_ms", "n", is_wide=True),
    Column("last", "last_at", "t", is_wide=True),
)  # fmt: skip
_ISOLATIONS: Final = (
    Column("from", "start", "t"), Column("broker", "broker"),
    Column("topic", "topic", is_wide=True), Column("cause", "cause"),
    Column("latency ms", "latency_ms", "n", is_wide=True),
    Column("length s", lambda isolation: isolation.length_ms / 1000, "n"),
    Column("reachable", "reachable"),
)  # fmt: skip
_DEAD_LETTERS: Final = (
    Column("reason", "reason"), Column("error", "error_code"), Column("letters", "letters", "n"),
    Column("pending", "pending", "n"), Column("resolved", "resolved", "n"),
    Column("oldest", "oldest", "t", is_wide=True), Column("example", "example", "x", is_wide=True),
)  # fmt: skip
_ERRORS: Final = (
    Column("error", "error_code"), Column("code", "response_code", "n", is_wide=True),
    Column("brokers", "brokers", "n"), Column("attempts", "attempts", "n"),
    Column("messages", "messages", "n"), Column("last", "last_at", "t"),
    Column("example", "example", "x", is_wide=True),
)  # fmt: skip
_EPOCHS: Final = (
    Column("query", "query_id", "q"), Column("epoch", "epoch", "n"), Column("at", "at", "t"),
    Column("rows in", "rows_in", "n"), Column("acked", "acked", "n"),
    Column("degraded", "degraded", "n", is_wide=True), Column("dead", "dead", "n"),
    Column("unknown", "unknown", "n"), Column("filtered", "filtered", "n", is_wide=True),
    Column("superseded", "superseded_rows", "n", is_wide=True), Column("adds up", "adds_up", "f"),
    Column("confirmed", "confirmed", "f", is_wide=True),
)  # fmt: skip

_QUEUES: Final = (
    Column("topic", "topic"), Column("broker", "broker"), Column("queue", "queue_id", "n"),
    Column("messages", "messages", "n", is_wide=True), Column("end", "end_offset", "n"),
    Column("position", "position", "n"), Column("waiting", "waiting", "n"),
    Column("deleted unread", "deleted", "n", is_wide=True), Column("oldest waiting", "oldest", "t"),
)  # fmt: skip


def tables(report: Report) -> list[Table]:
    """Return the tables of a report; the first one has its accounts."""
    latency = "Latency per broker (last byte to answer)"
    isolations = _last("Isolations", len(report.isolations), report.isolation_count)
    epochs = _last("Epochs", len(report.epochs), report.totals.epochs)
    return [
        _accounts(report),
        Table("brokers", latency, _BROKERS, report.brokers, f"{latency}: nothing."),
        Table("isolations", isolations, _ISOLATIONS, report.isolations, "No broker was isolated."),
        Table("dead_letters", "Dead letters", _DEAD_LETTERS, report.dead_letters,
              "No dead letters."),
        Table("errors", "Failed attempts", _ERRORS, report.errors, "No attempt failed."),
        Table("epochs", epochs, _EPOCHS, report.epochs, "No epochs."),
        *([] if report.consumption is None else _consumption(report.consumption)),
    ]  # fmt: skip


def _consumption(figures: Consumption) -> list[Table]:
    title = f"Messages by queue and position of the group {clean(figures.group, max_chars=80)}"
    if figures.uncounted:
        title += f" (without {'; '.join(figures.uncounted)})"
    return [Table("consumption", title, _QUEUES, figures.queues, f"{title}: none.")]


def _last(title: str, count: int, total: int) -> str:
    return f"{title} ({total:,}, last {count:,})" if count < total else f"{title} ({total:,})"


def _accounts(report: Report) -> Table:
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
    columns = (
        Column("", lambda row: row[0].replace("_", " ")),
        Column("rows", lambda row: getattr(totals, row[0])), Column("note", lambda row: row[1]),
    )  # fmt: skip
    return Table("accounts", "Accounts", columns, list(notes.items()))


def console_table(table: Table, *, narrow: bool) -> RenderableType:
    """Return a table for a console; if it has no rows, its sentence instead."""
    from rich.text import Text

    if not table.rows:
        return Text(table.empty, style="dim")
    columns = [column for column in table.columns if not (narrow and column.is_wide)]
    names = [f"{column.name} (UTC)" if column.kind == "t" else column.name for column in columns]
    rows = [[_cell(column.kind, column.of(row)) for column in columns] for row in table.rows]
    return grid(table.title, names, rows)


def _cell(kind: str, value: Any) -> Any:
    if kind == "t" and value is not None:
        return value.strftime("%m-%d %H:%M:%S.") + f"{value.microsecond // 100_000}"
    if kind == "x" and len(value) > _EXAMPLE_SHOWN:
        return value[: _EXAMPLE_SHOWN - 3] + "..."
    if kind == "q":
        return short_query(value)
    return "NO" if kind == "f" and not value else value


def to_html(report: Report) -> str:
    """Return the report as one page in one file, with charts if it has the series."""
    return page_html(report.as_dict(), tables(report)[1:], report.series, report.tuning)


_STYLES: Final = {"problem": "bold red", "warning": "bold yellow", "note": "", "well": "bold green"}
