"""A report as one page: everything in one file, nothing loaded from anywhere.

Charts are drawn by Vega-Lite, whose marks have labels for screen readers and whose expressions run
without `eval`; its bundle for browsers comes with the package vl-convert-python (0.9 MB of the
page). plotly's package has only the whole library, 4.8 MB, and no package keeps up with ECharts.
Without that package the page has all tables and no chart. The page's policy (CSP) forbids every
request. Texts of the network are data: JSON here, set as text by `page.js`.
"""

from __future__ import annotations

import datetime as dt
import functools
import html
import importlib.util
import re
import shlex
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any, Final

from rocket_sink import __version__
from rocket_sink.ledger.report.series import COLUMNS, Series
from rocket_sink.ledger.report.values import plain
from rocket_sink.ledger.report.verdict import name_servers
from rocket_sink.ledger.tune.values import DEFAULTS_FIT, FEWEST, Comparison, Tuning
from rocket_sink.tables import cell
from rocket_sink.text import clean, counted, json_text

CHARTS_PACKAGE: Final = "vl-convert-python"
# ruff: noqa: ISC004 (texts of several lines in tables)
_POLICY: Final = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; "
    "base-uri 'none'; form-action 'none'"
)
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
_CHECK: Final = "`rocket-sink check -n {servers} -t TOPIC` tells what is wrong on the way"
_ROUTES: Final = "`rocket-sink routes -n {servers} -t TOPIC`"
_ADVICE: Final = {
    "CONNECT": f"start the broker, or open the way to it; {_CHECK}",
    "CONNECTION_LOST": "look at the broker's log: it was stopped, killed, or a proxy cut the way",
    "UNKNOWN": "the task or the producer ended before the answer: look why it did",
    "UNKNOWN_HOST": "mend the DNS entry, or brokerIP1 of the broker",
    "TLS": "compare the certificates of both sides (tlsCa, tlsCert)",
    "TLS_REFUSED": "the broker expects TLS, or does not: set tlsMode as the broker has it",
    "NAME_SERVER_UNAVAILABLE": f"start a name server; {_CHECK}",
    "NO_ROUTE": f"create the topic, or start the broker that has it: {_ROUTES}",
    "QUEUE_MOVED": "set sendMsgTimeout longer than a remapping of the static topic takes",
    "INVALID_QUEUE": f"start the queue's broker: {_ROUTES} shows who is there",
    "REQUEST_TIMEOUT": "look at the broker's disk and page cache; then raise sendMsgTimeout",
    "UNWRITTEN": "the broker took no bytes: look at its CPU and network",
    "BROKER_BUSY": "the broker's send queue is full: fewer rows at once (maxMessagesPerSecond)",
    "SERVICE_NOT_AVAILABLE": "the broker is starting, stopping, or its disk is full",
    "GO_AWAY": "nothing: the broker was being restarted in good order",
    "TOPIC_NOT_FOUND": "create the topic on the broker: autoCreateTopicEnable is off",
    "MESSAGE_ILLEGAL": "compare maxMessageSize here and on the broker; look at the dead letters",
    "NO_PERMISSION": "the topic is not writable there: its perm has no W",
    "AUTH_FAILED": "compare accessKey and secretKey with the broker's ACL",
    "BROKER_TOO_OLD": "timed messages need a broker from 5.0 on",
    "ACKED_DEGRADED": "look at the disk flush and the replicas of the broker",
    "": "look at the example and at the broker's log of that time",
}
"""{error code: the next step, beside each on the page}; the last is for unknown codes."""


def page_html(
    figures: Mapping[str, Any], series: Series | None, tuning: Tuning | None = None
) -> str:
    """Return the page.

    Args:
        figures: `Report.as_dict()`.
        tuning: the suggestions for the same rows.
    """
    bundle = chart_library() if series is not None else ""
    columns = {name: list(names) for name, names in COLUMNS.items()}
    servers = name_servers()
    advice = {code: text.format(servers=servers) for code, text in _ADVICE.items()}
    data = {
        "report": figures, "series": _plain_series(series), "columns": columns,
        "coded": sorted(_TEXTS), "advice": advice, "quoted": shlex.quote(figures["ledger"]),
    }  # fmt: skip
    title = f"rocket-sink report: {clean(figures['ledger'])}"
    body = [
        _header(figures, charts=series is not None),
        '<main id="main">',
        _verdict(figures["verdict"]),
        _tiles(figures),
        '<section id="behind" class="card" aria-live="polite" hidden></section>',
        _charts(drawn=bool(bundle)) if series is not None else "",
        _what_if(tuning, figures) if tuning is not None else "",
        _tables(figures),
        "</main>",
        f"<footer>Made by rocket-sink {__version__}; nothing on this page was loaded from "
        "elsewhere. docs/operate/report.md explains the figures.</footer>",
    ]
    scripts = [f'<script type="module">{bundle}</script>'] if bundle else []
    scripts += [
        f'<script type="application/json" id="data">{_json(data)}</script>',
        f'<script type="module">{_asset("page.js")}</script>',
    ]
    return "\n".join((
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<link rel="icon" href="data:,">',
        f"<title>{html.escape(title)}</title>\n<style>{_asset('page.css')}</style>\n</head>\n<body>",
        *body, *scripts, "</body>\n</html>\n",
    ))  # fmt: skip


@functools.cache
def chart_library() -> str:
    """Return Vega, Vega-Lite and Vega-Embed for a script element, with their notice of copyright;
    empty if the package is not there."""
    if importlib.util.find_spec("vl_convert") is None:
        return ""
    import vl_convert

    # Escape a tab in a script's string, like all characters that are not printable.
    bundle: Any = vl_convert.javascript_bundle  # its stub asks for an argument that may be left out
    notice = f"/*\n{_asset('vega-license.txt')}*/\n"
    script: str = notice + bundle().replace("\t", "\\t")
    return re.sub(r"</(?=script)", r"<\\/", script, flags=re.IGNORECASE)


def _asset(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _json(data: Any) -> str:
    """Return JSON for a script element: no character of it can end the element."""
    text = json_text(data)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


_TEXTS: Final = frozenset({
    "broker", "topic", "query", "outcome", "reason", "cause", "error", "remark", "query_id"
})  # fmt: skip
"""Columns whose texts repeat: rows have their places in a common list of texts."""


def _plain_series(series: Series | None) -> dict[str, Any] | None:
    if series is None:
        return None
    plain_values: dict[str, Any] = {
        name: getattr(series, name) for name in ("step_ms", "first_ms", "last_ms")
    }
    texts: dict[str, int] = {}
    for name, columns in COLUMNS.items():
        coded = [column in _TEXTS for column in columns]
        plain_values[name] = [
            [
                texts.setdefault(value, len(texts)) if is_text and value is not None else value
                for value, is_text in zip(plain(list(row)), coded, strict=True)
            ]
            for row in getattr(series, name)
        ]
    return {**plain_values, "texts": list(texts)}


def _header(figures: Mapping[str, Any], *, charts: bool) -> str:
    scope = figures["scope"]
    parts = [f"ledger {figures['ledger']}"]
    parts += [f"query {scope['query_id']}"] if scope["query_id"] else []
    parts += [f"{name} {scope[name]}" for name in ("since", "until") if scope[name]]
    now = dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds")
    choices = [
        ("zone", "Times", (("local", "local zone"), ("utc", "UTC"))),
        ("theme", "Colours", (("auto", "as the system"), ("light", "light"), ("dark", "dark"))),
        *([("broker", "Broker", ()), ("topic", "Topic", ())] if charts else []),
    ]
    controls = "".join(
        f'<span><label for="{name}">{label}</label> '
        f'<select id="{name}">'
        + "".join(f'<option value="{value}">{text}</option>' for value, text in values)
        + "</select></span>"
        for name, label, values in choices
    )
    return (
        '<a class="skip" href="#main">To the report</a>\n<header>\n<h1>rocket-sink report</h1>\n'
        f'<p class="where">{_text(", ".join(parts))}; made {_at(now)} (<span data-zone>UTC</span>)'
        f'</p>\n</header>\n<div class="controls" role="group" aria-label="What is shown">'
        f"{controls}</div>"
    )


def _verdict(findings: Sequence[Mapping[str, str]]) -> str:
    items = []
    for finding in findings:
        following = (
            f'<span class="next">Next: {_commands(finding["next"])}</span>'
            if finding["next"]
            else ""
        )
        items.append(
            f'<li class="{finding["level"]}"><span class="level">{finding["level"]}</span>'
            f"{_text(finding['text'])}{following}</li>"
        )
    return f'<h2>Verdict</h2>\n<ul class="verdict" id="verdict">{"".join(items)}</ul>'


def _commands(text: str) -> str:
    """Return the text in HTML, with code for what stands in `backquotes`."""
    parts = text.split("`")
    return "".join(
        f"<code>{_text(part)}</code>" if n % 2 else _text(part) for n, part in enumerate(parts)
    )


def _tiles(figures: Mapping[str, Any]) -> str:
    totals, letters = figures["totals"], figures["dead_letters"]
    resolved = sum(row["resolved"] for row in letters)
    pending = sum(row["pending"] for row in letters)
    tiles = (
        ("rows_in", "rows in", totals["rows_in"], f"{counted(totals['epochs'], 'epoch')}"),
        ("acked", "stored", totals["acked"], ""),
        ("degraded", "degraded", totals["degraded"], "stored, less durably"),
        ("dead", "dead", totals["dead"], f"letters: {resolved:,} resolved, {pending:,} pending"),
        ("unknown", "unknown", totals["unknown"], "perhaps stored"),
        ("filtered", "filtered", totals["filtered"], "needed no sending"),
        ("duplicates", "duplicates possible", totals["duplicates_possible"], "under one id"),
        ("superseded", "superseded", totals["superseded_rows"], "by attempts run again"),
    )
    return (
        '<dl class="tiles">'
        + "".join(
            f'<div id="tile-{name}"><dt>{label}</dt><dd>{value:,}</dd><small>{note}</small></div>'
            for name, label, value, note in tiles
        )
        + "</dl>"
    )


def _charts(*, drawn: bool) -> str:
    missing = (
        ""
        if drawn
        else '<p class="card wide">Charts need one more package: '
        f"<code>pip install {CHARTS_PACKAGE}</code>. The tables have their figures.</p>"
    )
    return f'<section class="charts" aria-label="Charts">{missing}' + "".join(
        f'<figure id="{name}" class="{width}" aria-labelledby="{name}-title"><figcaption>'
        f'<h2 id="{name}-title">{title}</h2><p>{text}</p></figcaption>'
        f'<div class="chart" id="{name}-chart"></div>'
        f'<details{"" if drawn else " open"}><summary>{title} as a table</summary>'
        f'<div id="{name}-data"></div></details></figure>'
        for name, title, text, width in _CHARTS
    ) + "</section>"  # fmt: skip


def _what_if(tuning: Tuning, figures: Mapping[str, Any]) -> str:
    """Return the tables of `rocket-sink tune`: the sends under other settings."""
    command = f"<code>{_text(_tune_command(figures))}</code>"
    if not tuning.candidates:
        return _what_if_section(
            '<p class="none">Nothing to compare: '
            f"{counted(tuning.attempts, 'attempt', 'is', 'are')} recorded here, "
            f"and with fewer than {FEWEST:,} there is no 99.9th percentile. {command} compares "
            "what there is.</p>"
        )
    assert tuning.first_at is not None
    assert tuning.last_at is not None
    span = f"{_at(tuning.first_at.isoformat())} to {_at(tuning.last_at.isoformat())}"
    parts = [
        f"<p>{'The newest ' if tuning.limited else ''}{counted(tuning.attempts, 'attempt')} from "
        f"{span} (<span data-zone>UTC</span>), of all brokers and topics, once more through the "
        f"fault strategy with other settings. {_text(tuning.note)}{'. ' if tuning.note else ''}"
        f"{command} says the same.</p>"
    ]
    parts += [_comparison(comparison) for comparison in tuning.comparisons]
    parts.append(_options_to_paste(tuning))
    why = "".join(
        f"<li>{verb} <code>{_text(setting)}</code>: {_text(reason)}</li>"
        for verb, setting, reason in tuning.reasons
    )
    return _what_if_section("".join(parts) + f'<ul class="why">{why}</ul>')


def _what_if_section(body: str) -> str:
    return (
        '<section class="card" id="what-if" aria-labelledby="what-if-title">'
        f'<h2 id="what-if-title">What if: other latency options</h2>{body}</section>'
    )


def _tune_command(figures: Mapping[str, Any]) -> str:
    scope = figures["scope"]
    words = ["rocket-sink", "tune", figures["ledger"]]
    flags = {"--query": scope["query_id"], "--since": scope["since"], "--until": scope["until"]}
    for flag, value in flags.items():
        words += [flag, value] if value else []
    return shlex.join(words)


def _comparison(one: Comparison) -> str:
    *columns, _ = one.columns
    head = "".join(
        f'<th scope="col" class="{"n" if n else ""}">{name}</th>' for n, name in enumerate(columns)
    )
    body = []
    for *values, mark in one.rows:
        name, *numbers = values
        suggested = ' <b class="mark">suggested</b>' if mark else ""
        body.append(
            f'<tr class="{"suggested" if mark else ""}"><th scope="row">{_text(cell(name))}'
            f"{suggested}</th>"
            + "".join(f'<td class="n">{cell(number)}</td>' for number in numbers)
            + "</tr>"
        )
    return (
        f'<h3>{one.title}</h3><div class="scroll" tabindex="0" role="region" '
        f'aria-label="{one.title}"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def _options_to_paste(tuning: Tuning) -> str:
    if not tuning.options:
        return f"<p>{DEFAULTS_FIT}</p>"
    lines = "\n".join(_text(f"{name}={value}") for name, value in tuning.options.items())
    return (
        '<h3 id="paste-title">Options to paste</h3>'
        f'<pre tabindex="0" aria-labelledby="paste-title">{lines}</pre>'
    )


_TABLES: Final = (
    ("brokers", "Brokers", (
        ("broker", "broker", ""), ("requests", "attempts", "n"), ("messages", "messages", "n"),
        ("body_bytes", "bytes", "n"), ("retries", "retries", "n"), ("degraded", "degraded", "n"),
        ("not_acked", "not acked", "n"), ("p50_ms", "p50 ms", "n"), ("p95_ms", "p95 ms", "n"),
        ("p99_ms", "p99 ms", "n"), ("p999_ms", "p99.9 ms", "n"), ("max_ms", "max ms", "n"),
        ("wait_p99_ms", "p99 wait ms", "n"), ("last_at", "last", "t"),
    )),
    ("isolations", "Isolations", (
        ("start", "from", "t"), ("broker", "broker", ""), ("topic", "topic", ""),
        ("cause", "cause", ""), ("latency_ms", "latency ms", "n"), ("length_ms", "length ms", "n"),
        ("reachable", "reachable", ""),
    )),
    ("dead_letters", "Dead letters", (
        ("reason", "reason", ""), ("error_code", "error", ""), ("letters", "letters", "n"),
        ("pending", "pending", "n"), ("resolved", "resolved", "n"), ("oldest", "oldest", "t"),
        ("example", "example", "x"),
    )),
    ("errors", "Failed attempts", (
        ("error_code", "error", ""), ("response_code", "code", "n"), ("brokers", "brokers", "n"),
        ("attempts", "attempts", "n"), ("messages", "messages", "n"), ("last_at", "last", "t"),
        ("example", "example", "x"),
    )),
    ("epochs", "Epochs", (
        ("query_id", "query", ""), ("epoch", "epoch", "n"), ("at", "at", "t"),
        ("rows_in", "rows in", "n"), ("acked", "acked", "n"), ("degraded", "degraded", "n"),
        ("dead", "dead", "n"), ("unknown", "unknown", "n"), ("filtered", "filtered", "n"),
        ("superseded_rows", "superseded", "n"), ("adds_up", "adds up", ""),
        ("confirmed", "confirmed", ""),
    )),
)  # fmt: skip


QUERY_SHOWN: Final = 8
"""Number of characters of a query's id that are shown; `--query` takes them."""


def _tables(figures: Mapping[str, Any]) -> str:
    sections = []
    for name, title, columns in _TABLES:
        rows = figures[name]
        head = "".join(
            f'<th scope="col" class="{"n" if kind == "n" else ""}">{label}</th>'
            for _, label, kind in columns
        )
        body = "".join(
            "<tr>" + "".join(_cell(row, key, kind) for key, _, kind in columns) + "</tr>"
            for row in rows
        )
        shown = (
            f'<div class="scroll" tabindex="0" role="region" aria-label="{title}"><table>'
            f"<caption>{_caption(name, figures)}</caption><thead><tr>{head}</tr></thead>"
            f"<tbody>{body}</tbody></table></div>"
            if rows
            else '<p class="none">Nothing.</p>'
        )
        sections.append(
            f'<section class="card" id="table-{name}"><h2>{title}</h2>{shown}</section>'
        )
    return f'<div class="tables">{"".join(sections)}</div>'


def _caption(name: str, figures: Mapping[str, Any]) -> str:
    count = len(figures[name])
    total = {"isolations": figures["isolation_count"], "epochs": figures["totals"]["epochs"]}
    return f"the last {count:,} of {total[name]:,}" if total.get(name, count) > count else ""


def _cell(row: Mapping[str, Any], key: str, kind: str) -> str:
    if key in ("degraded", "not_acked") and key not in row:
        outcomes = row["outcomes"]
        degraded = outcomes.get("acked_degraded", 0)
        value: Any = (
            degraded if key == "degraded" else row["requests"] - outcomes.get("acked", 0) - degraded
        )
    else:
        value = row[key]
    if kind == "t" and value is not None:
        text = _at(value)
    elif value is False:
        text = "NO"
    else:
        text = html.escape(cell(value))
    if key == "query_id":
        return f'<td title="{text}">{_text(value[:QUERY_SHOWN])}</td>'
    return f'<td class="{kind}">{text}</td>'


def _at(moment: str) -> str:
    """Return a time that the page shows in the chosen zone."""
    utc = dt.datetime.fromisoformat(moment).astimezone(dt.timezone.utc)
    shown = utc.strftime("%Y-%m-%d %H:%M:%S")
    return f'<time datetime="{utc.isoformat()}" data-at="{utc.isoformat()}">{shown}</time>'


def _text(value: object) -> str:
    return html.escape(clean(value))
