"""A report as one HTML file. The page loads nothing: its policy (CSP) forbids all network requests.

Vega-Lite draws the charts: its marks have labels for screen readers, and its expressions run
without `eval`. The package vl-convert-python has the bundle for browsers (0.9 MB of the page).
Without this package the page has all tables and no chart. The Python package of plotly contains
only the complete library, 4.8 MB, and no Python package contains a current ECharts. Texts from
brokers and rows reach `page.js` as JSON. The script inserts them as text, not as markup."""

from __future__ import annotations

import datetime as dt
import functools
import html
import importlib.util
import re
import shlex
from collections.abc import Iterable, Mapping
from importlib.resources import files
from string import Template
from typing import Any, Final

from rocket_sink import __version__
from rocket_sink.ledger.report.causes import CAUSES, name_servers, remedy_of
from rocket_sink.ledger.report.series import COLUMNS, Series
from rocket_sink.ledger.report.values import Column, Table
from rocket_sink.ledger.tune.suggest import FEWEST, NOTHING_TO_GAIN, Comparison, Tuning
from rocket_sink.tables import cell
from rocket_sink.text import UUID, clean, counted, json_text

# ruff: noqa: ISC004 (texts of several lines in tables)
_CHARTS: Final = (
    ("rows", "Rows over time", "By what became of them; dead letters when they were given up.", ""),
    ("bytes", "Bytes over time", "Of message bodies.", ""),
    ("heat", "Latency by broker and time",
     "The 99th percentile of the times from the last byte to the answer; red: isolated.", "wide"),
    ("shares", "Latency by broker and topic", "p50, p95, p99 and p99.9.", ""),
    ("spent", "Where the time goes",
     "Waiting for a place or a turn, connecting, waiting for the broker's answer, failed attempts "
     "and the time until the next, and waiting for the broker of a strict queue.", ""),
    ("errors", "Failures by class", "Attempts; the table has an example and the next step.", ""),
    ("retries", "Retries by broker", "Attempts after a request's first.", ""),
    ("letters", "Dead letters pending", "By reason.", ""),
    ("held", "Rows held per broker", "Pending letters with a sharding key: later rows wait, too.",
     ""),
    ("queues", "Skew", "Messages stored by queue.", "wide"),
)  # fmt: skip
_UNKNOWN: Final = "look at the example and at the broker's log of that time"
"""The next step beside an error whose code has no remedy."""


def page_html(
    figures: Mapping[str, Any], tables: Iterable[Table], series: Series | None,
    tuning: Tuning | None,
) -> str:  # fmt: skip
    """Return the page.

    Args:
        figures: `Report.as_dict()`.
        tables: the tables of the same report, without its accounts.
        series: the figures of the charts; None: the page has no charts.
        tuning: the suggestions for the report's scope; None: the page has none.
    """
    library = chart_library() if series is not None else ""
    servers, scope = name_servers(), figures["scope"]
    data = {
        "report": figures, "series": None if series is None else _plain_series(series),
        "columns": {name: list(names) for name, names in COLUMNS.items()},
        "coded": sorted(_TEXTS), "quoted": shlex.quote(figures["ledger"]),
        "advice": {code: remedy_of(code) for code in CAUSES} | {"": _UNKNOWN},
    }  # fmt: skip
    where = [f"ledger {figures['ledger']}"]
    where += [f"query {scope['query_id']}"] if scope["query_id"] else []
    where += [f"{name} {scope[name]}" for name in ("since", "until") if scope[name]]
    return Template(_asset("page.html")).substitute(
        ledger=_text(figures["ledger"]), style=_asset("page.css"), script=_asset("page.js"),
        where=_text(", ".join(where)), now=_at(dt.datetime.now(dt.timezone.utc)),
        filters="" if series is None else "".join(
            f'<span><label for="{name.lower()}">{name}</label> <select id="{name.lower()}">'
            "</select></span>" for name in ("Broker", "Topic")
        ),
        verdict="".join(map(finding_html, figures["verdict"])), tiles=_tiles(figures),
        charts="" if series is None else _charts(drawn=bool(library)),
        what_if="" if tuning is None else _what_if(tuning, scope, figures["ledger"]),
        verify=_text(f"rocket-sink verify --ledger {shlex.quote(figures['ledger'])} -n {servers}"),
        tables="".join(map(table_html, tables)), version=__version__,
        library=f'<script type="module">{library}</script>' if library else "", data=_json(data),
    )  # fmt: skip


@functools.cache
def chart_library() -> str:
    """Return the script of Vega, Vega-Lite and Vega-Embed, with their license; empty if
    vl-convert-python is not installed."""
    if importlib.util.find_spec("vl_convert") is None:
        return ""
    import vl_convert

    # Escape a tab in one of the script's strings, like a page's other unprintable characters.
    bundle: Any = vl_convert.javascript_bundle  # its stub asks for an argument that may be left out
    notice = f"/*\n{_asset('vega-license.txt')}*/\n"
    script: str = notice + bundle().replace("\t", "\\t")
    return re.sub(r"</(?=script)", r"<\\/", script, flags=re.IGNORECASE)


def _asset(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _json(data: Any) -> str:
    """Return JSON for a script element: no character of it can end the element."""
    text = json_text(data, default=dt.datetime.isoformat)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


_TEXTS: Final = frozenset({
    "broker", "topic", "query", "outcome", "reason", "cause", "error", "remark", "query_id"
})  # fmt: skip
"""Columns whose texts repeat: rows refer to them by their index in one list of texts."""


def _plain_series(series: Series) -> dict[str, Any]:
    texts: dict[str, int] = {}

    def code_of(name: str, value: Any) -> Any:
        is_text = name in _TEXTS and value is not None
        return texts.setdefault(value, len(texts)) if is_text else value

    rows = {
        name: [
            [code_of(*pair) for pair in zip(columns, row, strict=True)] for row in series.rows[name]
        ]
        for name, columns in COLUMNS.items()
    }
    steps = {name: getattr(series, name) for name in ("step_ms", "first_ms", "last_ms")}
    return {**steps, **rows, "texts": list(texts)}


def finding_html(finding: Mapping[str, str]) -> str:
    """Return a finding of `Report.as_dict()` as an item of a list."""
    # Commands stand in `backquotes`, so every second part is a command.
    parts = [_text(part) for part in finding["next"].split("`")]
    following = "".join(f"<code>{part}</code>" if n % 2 else part for n, part in enumerate(parts))
    return (
        f'<li class="{finding["level"]}"><b class="level">{finding["level"]}</b> '
        + _text(finding["text"])
        + (f' <span class="next">Next: {following}</span>' if following else "")
        + "</li>"
    )


def _tiles(figures: Mapping[str, Any]) -> str:
    totals, letters = figures["totals"], figures["dead_letters"]
    resolved, pending = (sum(row[name] for row in letters) for name in ("resolved", "pending"))
    tiles = (
        ("rows_in", "rows in", "rows_in", counted(totals["epochs"], "epoch")),
        ("acked", "stored", "acked", ""),
        ("degraded", "degraded", "degraded", "stored, less durably"),
        ("dead", "dead", "dead", f"letters: {resolved:,} resolved, {pending:,} pending"),
        ("unknown", "unknown", "unknown", "perhaps stored"),
        ("filtered", "filtered", "filtered", "needed no sending"),
        ("duplicates", "duplicates possible", "duplicates_possible", "under one id"),
        ("superseded", "superseded", "superseded_rows", "by attempts run again"),
    )
    return "".join(
        f'<div id="tile-{id_}"><dt>{label}</dt><dd>{totals[name]:,}</dd><small>{note}</small></div>'
        for id_, label, name, note in tiles
    )


def _charts(*, drawn: bool) -> str:
    missing = "" if drawn else (
        '<p class="card wide">Charts need one more package: '
        "<code>pip install vl-convert-python</code>. The tables have their figures.</p>"
    )  # fmt: skip
    return f'<section class="charts" aria-label="Charts">{missing}' + "".join(
        f'<figure id="{name}" class="{width}" aria-labelledby="{name}-title"><figcaption>'
        f'<h2 id="{name}-title">{title}</h2><p>{text}</p></figcaption>'
        f'<div class="chart" id="{name}-chart"></div>'
        f'<details{"" if drawn else " open"}><summary>{title} as a table</summary>'
        f'<div id="{name}-data"></div></details></figure>'
        for name, title, text, width in _CHARTS
    ) + "</section>"  # fmt: skip


def _what_if(tuning: Tuning, scope: Mapping[str, Any], ledger: str) -> str:
    """Return the tables of `rocket-sink tune`: the sends under other settings."""
    words = ["rocket-sink", "tune", ledger]
    for flag, value in zip(("--query", "--since", "--until"), scope.values(), strict=True):
        words += [flag, value] if value else []
    command = f"<code>{_text(shlex.join(words))}</code>"
    if tuning.first_at is None or tuning.last_at is None:
        body = (
            '<p class="none">Nothing to compare: '
            f"{counted(tuning.attempts, 'attempt', 'is', 'are')} recorded here, "
            f"and with fewer than {FEWEST:,} there is no 99.9th percentile. "
            f"{command} compares what there is.</p>"
        )
    else:
        body = (
            f"<p>{'The newest ' if tuning.limited else ''}{counted(tuning.attempts, 'attempt')} "
            f"from {_at(tuning.first_at)} to {_at(tuning.last_at)} (<span data-zone>UTC</span>), "
            "of all brokers and topics, once more through the fault strategy with other settings. "
            f"{_text(tuning.note)}"
            f"{'. ' if tuning.note else ''}{command} says the same.</p>"
        )
        body += "".join(map(_comparison, tuning.comparisons))
        lines = "\n".join(_text(f"{name}={value}") for name, value in tuning.options.items())
        body += (
            f'<h3 id="paste-title">Options to paste</h3>'
            f'<pre tabindex="0" aria-labelledby="paste-title">{lines}</pre>'
            if lines else f"<p>{NOTHING_TO_GAIN}</p>"
        )  # fmt: skip
        why = "".join(
            f"<li>{verb} <code>{_text(setting)}</code>: {_text(reason)}</li>"
            for verb, setting, reason in tuning.reasons
        )
        body += f'<ul class="why">{why}</ul>'
    return (
        '<section class="card" id="what-if" aria-labelledby="what-if-title">'
        f'<h2 id="what-if-title">What if: other latency options</h2>{body}</section>'
    )


def _comparison(comparison: Comparison) -> str:
    heads = [(name, "n" if n else "") for n, name in enumerate(comparison.columns[:-1])]
    mark = ' <b class="mark">suggested</b>'
    lines = [
        f'<tr class="{"suggested" if suggested else ""}"><th scope="row">{_text(cell(name))}'
        + (mark if suggested else "") + "</th>"
        + "".join(f'<td class="n">{cell(number)}</td>' for number in numbers) + "</tr>"
        for name, *numbers, suggested in comparison.rows
    ]  # fmt: skip
    return f"<h3>{comparison.title}</h3>{_grid(comparison.title, heads, lines)}"


def table_html(table: Table) -> str:
    """Return a table with its title as a section."""
    zone = " (<span data-zone>UTC</span>)"
    heads = [
        (column.name + (zone if column.kind == "t" else ""), "n" if column.kind == "n" else "")
        for column in table.columns
    ]
    lines = [
        "<tr>" + "".join(_cell(column, column.of(row)) for column in table.columns) + "</tr>"
        for row in table.rows
    ]
    body = _grid(table.title, heads, lines) if lines else f'<p class="none">{table.empty}</p>'
    return f'<section class="card" id="table-{table.name}"><h2>{table.title}</h2>{body}</section>'


def _grid(title: str, heads: Iterable[tuple[str, str]], lines: Iterable[str]) -> str:
    """Return a table that scrolls, from (heading, class) pairs and rows in HTML."""
    head = "".join(f'<th scope="col" class="{kind}">{name}</th>' for name, kind in heads)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{title}"><table><thead>'
        f"<tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


def _cell(column: Column, value: Any) -> str:
    if column.kind == "t" and value is not None:
        return f'<td class="t">{_at(value)}</td>'
    if column.kind == "q":
        return f'<td title="{_text(value)}">{_text(short_query(value))}</td>'
    text = "NO" if column.kind == "f" and not value else html.escape(cell(value))
    return f'<td class="{column.kind}">{text}</td>'


_SHOWN: Final = 8
"""Number of characters that are shown of a UUID; `--query` accepts an id of this length."""
_NAME_SHOWN: Final = 24


def short_query(query_id: str) -> str:
    """Return a query's id for a table: the start of a UUID, or an `appId` that is cut if long."""
    if re.fullmatch(UUID, query_id):
        return query_id[:_SHOWN]
    return query_id if len(query_id) <= _NAME_SHOWN else f"{query_id[: _NAME_SHOWN - 3]}..."


def _at(moment: dt.datetime) -> str:
    """Return a time element; `page.js` shows its time in the chosen zone."""
    utc = moment.astimezone(dt.timezone.utc)
    text = utc.isoformat()
    return f'<time datetime="{text}" data-at="{text}">{utc:%Y-%m-%d %H:%M:%S}</time>'


def _text(value: object) -> str:
    return html.escape(clean(value))
