"""A report's tables show every figure, and hostile text stays text."""

import datetime as dt
import html
import io
import json
import re
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.console import Console

from rocket_sink.ledger.query.consumption import Consumption, QueueConsumption
from rocket_sink.ledger.report import Report, Scope, page, to_html
from rocket_sink.ledger.report import tables as tables_module
from rocket_sink.ledger.report.series import COLUMNS, Series
from rocket_sink.ledger.report.tables import tables
from rocket_sink.ledger.report.values import (
    BrokerFigures,
    DeadLetterFigures,
    EpochFigures,
    ErrorFigures,
    IsolationFigures,
    Totals,
)
from rocket_sink.ledger.tune.suggest import Candidate, Suggestion, SuspicionFigures, Tuning
from rocket_sink.tables import table

NOW = dt.datetime(2024, 5, 6, 7, 8, 9, 250_000, dt.timezone.utc)

FULL = Report(
    "/data/ledger",
    Scope(since=NOW),
    Totals(
        epochs=3, rows_in=1234, acked=1200, dead=34, not_adding_up=1, unconfirmed=2,
        missing_rows=17,
    ),
    [BrokerFigures("broker-a", 77, 770, 5_000_000, 4, {"acked": 70, "unknown": 7},
                   1.0, 2.0, 333.0, 4444.0, 0.5, NOW),
     BrokerFigures("-", 1, 1, 0, 0, {"not_sent": 1}, None, None, None, None, None, NOW)],
    [EpochFigures("0123456789abcdef", 2, NOW, False, True, rows_in=10, acked=9, dead=1,
                  superseded_attempts=1, superseded_rows=5)],
    [IsolationFigures("broker-b", None, "REQUEST_TIMEOUT", 10_000.0, NOW, 30_000.0, False, 2)],
    99,
    [DeadLetterFigures("data", "NULL_BODY", 34, 30, "[red]no markup[/red] <b>nor html</b>")],
    [ErrorFigures("BROKER_BUSY", 2, 2, 55, 550, NOW, NOW, "x" * 500)],
)  # fmt: skip


def test_every_figure_is_str():
    text = str(FULL)
    parts = (
        "1,234", "broker-a", "4,444", "REQUEST_TIMEOUT", "30.00", "NULL_BODY", "BROKER_BUSY",
        "05-06 07:08:09.2", "01234567", "Isolations (99, last 1)",
        "/data/ledger", "17 rows that Spark handed to tasks", "[red]no markup[/red]",
    )  # fmt: skip
    for part in parts:
        assert part in text, part
    assert "None" not in text and text.endswith("\nledger /data/ledger")


def test_the_tables_columns():
    """A column shows its kind, an asterisk if it is wide, and its value."""
    queue = QueueConsumption("t", 100, 60, 1, NOW, "broker-a", 3, 142, 82)
    full = replace(FULL, consumption=Consumption("g", 7, [queue]))
    shown = {
        table.title: [
            f"{column.name} {column.kind}{'*' * column.is_wide}={column.of(table.rows[0])}"
            for column in table.columns
        ]
        for table in tables(full)[1:]
    }
    names = ["accounts", "brokers", "isolations", "dead_letters", "errors", "epochs"]
    assert [table.name for table in tables(full)] == [*names, "consumption"]
    at = "2024-05-06 07:08:09.250000+00:00"
    assert shown == {
        "Latency per broker (last byte to answer)": [
            "broker =broker-a", "attempts n=77", "stored n=770", "MB n*=5.0", "retries n=4",
            "degraded n*=0", "not acked n=7", "p50 ms n=1.0", "p95 ms n*=2.0", "p99 ms n=333.0",
            "p99.9 ms n*=None", "max ms n=4444.0", "wait p99 ms n*=0.5", f"last t*={at}",
        ],
        "Isolations (99, last 1)": [
            f"from t={at}", "broker =broker-b", "topic *=None", "cause =REQUEST_TIMEOUT",
            "latency ms n*=10000.0", "length s n=30.0", "reachable =False",
        ],
        "Dead letters": [
            "reason =data", "error =NULL_BODY", "letters n=34", "pending n=30", "resolved n=0",
            "oldest t*=None", "example x*=[red]no markup[/red] <b>nor html</b>",
        ],
        "Failed attempts": [
            "error =BROKER_BUSY", "code n*=2", "brokers n=2", "attempts n=55", "messages n=550",
            f"last t={at}", f"example x*={'x' * 500}",
        ],
        "Epochs (3, last 1)": [
            "query q=0123456789abcdef", "epoch n=2", f"at t={at}", "rows in n=10", "acked n=9",
            "degraded n*=0", "dead n=1", "unknown n=0", "filtered n*=0", "superseded n*=5",
            "adds up f=False", "confirmed f*=True",
        ],
        "Messages by queue and position of the group g (without 7 messages of transactions, or "
        "with a delay or a timer (offset unknown))": [
            "topic =t", "broker =broker-a", "queue n=3", "messages n*=100", "end n=142",
            "position n=82", "waiting n=60", "deleted unread n*=1", f"oldest waiting t={at}",
        ],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "value", "shown"),
    [
        ("x", "x" * 160, "x" * 160), ("x", "x" * 161, "x" * 157 + "..."), ("t", None, None),
        ("t", NOW, "05-06 07:08:09.2"), ("f", 0, "NO"), ("f", True, True), ("n", 0, 0),
    ],
)  # fmt: skip
def test_cells_of_a_console(kind, value, shown):
    assert tables_module._cell(kind, value) == shown


def text_of(page_html, section):
    """Return the text of a section of the page, without markup."""
    part = page_html.partition(section)[2].partition("</section>")[0].partition(">")[2]
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", part)).split())


WHAT_IF = "What if: other latency options"
TUNING = Tuning(
    "ledger", Scope(), 2345, NOW, NOW, True,
    [Candidate("5.x (default)", "", 2, 4.06, 4, 1.0, 2.0, 3.0, None),
     Candidate("from 100 ms", "100:2000", 3, 5.0, 6, 1.0, 2.0, 2.5, 4.0, suggested=True)],
    [SuspicionFigures(50, 0.0123, 7, 8.0)], [Suggestion("faultTable", "100:2000", "a reason")],
    ["suspectAfterMs: no trouble"], "p99.9 depends on few",
)  # fmt: skip


@pytest.mark.parametrize(
    ("tuning", "expected"),
    [
        (TUNING,
         WHAT_IF + " The newest 2,345 attempts from 2024-05-06 07:08:09 to "
         "2024-05-06 07:08:09 ( UTC ), of all brokers and topics, once more through the fault "
         "strategy with other settings. p99.9 depends on few. rocket-sink tune /data/ledger "
         "--since 2024-05-06T07:08:09.250000+00:00 says the same. Latency classes: what each table "
         "would have made of these sends table isolations isolated s messages moved p50 ms p99 ms "
         "p99.9 ms max ms 5.x (default) 2 4.10 4 1.00 2.00 3.00 - from 100 ms suggested 3 5.00 6 "
         "1.00 2.00 2.50 4.00 suspectAfterMs: false alarms, and trouble noticed before its end "
         "suspectAfterMs false alarms % troubles sooner s 50 1.23 7 8.00 Options to paste "
         "faultTable=100:2000 keep suspectAfterMs : no trouble set faultTable=100:2000 : a reason"),
        (Tuning("ledger", Scope(), 1, None, None, limited=False),
         WHAT_IF + " Nothing to compare: 1 attempt is recorded here, and with "
         "fewer than 1,000 there is no 99.9th percentile. rocket-sink tune /data/ledger --since "
         "2024-05-06T07:08:09.250000+00:00 compares what there is."),
    ],
)  # fmt: skip
def test_what_the_page_says_of_other_options(tuning, expected):
    assert text_of(to_html(replace(FULL, tuning=tuning)), 'id="what-if"') == expected


def test_what_the_page_says_if_no_option_is_better():
    tuning = replace(TUNING, limited=False, note="", suggestions=[], candidates=[], suspicion=[])
    text = text_of(to_html(replace(FULL, tuning=tuning)), 'id="what-if"')
    assert text.startswith(f"{WHAT_IF} 2,345 attempts from 2024-05-06 07:08:09 to ")
    assert text.endswith(
        "before its end suspectAfterMs false alarms % troubles sooner s "
        "Nothing to gain: the options fit these sends. keep suspectAfterMs : no trouble"
    )


def test_what_the_page_says(monkeypatch):
    """The page shows scope, tiles, findings and tables, with and without charts."""
    letters = [replace(FULL.dead_letters[0], letters=2000, resolved=1500, pending=500)] * 2
    report = replace(FULL, dead_letters=letters, scope=Scope("q", NOW, NOW))
    text = to_html(report)
    words = " ".join(html.unescape(re.sub(r"<[^>]+>", " ", text)).split())
    moment = NOW.isoformat()
    assert f"ledger /data/ledger, query q, since {moment}, until {moment}" in words
    assert (
        "rows in 1,234 3 epochs stored 1,200 degraded 0 stored, less durably dead 34 letters: "
        "3,000 resolved, 1,000 pending unknown 0 perhaps stored filtered 0 needed no sending "
        "duplicates possible 0 under one id superseded 0 by attempts run again"
    ) in words
    finding = page.finding_html({"level": "note", "text": "a<", "next": "run `b` or `c`"})
    assert finding == (
        '<li class="note"><b class="level">note</b> a&lt; <span class="next">Next: run '
        "<code>b</code> or <code>c</code></span></li>"
    )
    assert "Next" not in page.finding_html({"level": "note", "text": "a", "next": ""})
    assert '<td class="f">NO</td>' in text and '<th scope="col" class="n">attempts</th>' in text
    assert "rocket-sink verify --ledger /data/ledger -n HOST:9876" in words
    assert "<figure" not in text and 'id="broker"' not in text
    series = Series(1000, 5, 7, {
        name: [tuple(range(1, len(columns) + 1))] * 2 for name, columns in COLUMNS.items()
    })  # fmt: skip
    for library in ("", "a library"):
        monkeypatch.setattr(page, "chart_library", lambda library=library: library)
        text = to_html(replace(report, series=series))
        assert text.count("<figure") == 10 and 'id="broker"' in text and 'id="topic"' in text
        assert ("pip install vl-convert" in text) == ("<details open>" in text) == (not library)
        assert ("a library" in text) == bool(library)


def test_commands_on_the_page_have_the_name_servers_of_the_environment(monkeypatch):
    monkeypatch.setenv("NAMESRV_ADDR", "10.0.0.1:9876;10.0.0.2:9876")
    text = to_html(FULL)
    assert "create TOPIC -n '10.0.0.1:9876;10.0.0.2:9876'`" in html.unescape(text)
    assert "HOST:9876" not in text


def test_the_bundle_of_vega_is_handed_on_with_its_notice(monkeypatch):
    bundle = SimpleNamespace(javascript_bundle=lambda: "a</SCRIPT>\t</b>")
    with monkeypatch.context() as patch:
        patch.setattr(page.importlib.util, "find_spec", lambda _: True)
        patch.setitem(sys.modules, "vl_convert", bundle)
        assert page.chart_library.__wrapped__().endswith("*/\na<\\/SCRIPT>\\t</b>")
        patch.setattr(page.importlib.util, "find_spec", lambda _: None)
        assert page.chart_library.__wrapped__() == ""
    pytest.importorskip("vl_convert")
    notice = page.chart_library()[:2000]
    assert notice.startswith("/*\nVega 6 (Copyright")
    assert "Redistributions in binary form must reproduce" in notice and "*/" in notice


def test_an_empty_ledger_reads_well():
    text = str(Report("/data/ledger", Scope(), Totals()))
    facts = {"unfolded_epochs": 1, "quarantined_files": 1}
    grave = replace(FULL, totals=Totals(degraded=1, missing_rows=1, duplicates_possible=1), **facts)
    assert len(grave.verdict) == 6 and "(and 3 more, below)" in str(grave)
    for part in ("No broker was isolated", "No dead letters", "No attempt failed", "No epochs"):
        assert part in text


def test_json_and_notebooks():
    plain = json.loads(json.dumps(FULL.as_dict()))
    assert plain["epochs"][0]["at"] == "2024-05-06T07:08:09.250000+00:00"
    assert plain["scope"]["since"] == NOW.isoformat()
    shown_html = FULL._repr_html_()
    assert "<pre" not in shown_html and shown_html.count("<table>") == 6
    assert "<b>nor html</b>" not in shown_html
    for part in ("4,444", "&lt;b&gt;nor html&lt;/b&gt;", "superseded", "problem"):
        assert part in shown_html, part


def test_at_80_columns_tables_stay_tables():
    console = Console(file=io.StringIO(), width=80)
    console.print(FULL)
    lines = console.file.getvalue().splitlines()
    assert any(line.split()[:3] == ["rows", "in", "1,234"] for line in lines)
    heads = [line for line in lines if line.strip().startswith(("broker ", "query ", "error "))]
    assert [line.split()[:2] for line in heads] == [
        ["broker", "attempts"], ["error", "brokers"], ["query", "epoch"],
    ]  # fmt: skip
    assert "--html FILE" in lines[-1] and max(map(len, lines)) <= 80


WIDE = """Epochs

                                         rows   adds
 query      epoch   at (UTC)               in   up     first error
 ─────────────────────────────────────────────────────────────────────────────
 2df193cd      12   11-27 07:54:01.4   14,033   yes
 2df193cd      13   11-27 07:54:11.4        -   no     a broker took no
                                                       message for ten seconds

"""
NARROW = """Epochs
query 2df193cd   epoch 12
  at (UTC) 11-27 07:54:01.4
  rows in 14,033   adds up yes
query 2df193cd   epoch 13
  at (UTC) 11-27 07:54:11.4   rows in -
  adds up no
  first error a broker took no message
for ten seconds

"""


@pytest.mark.parametrize(("width", "expected"), [(80, WIDE), (40, NARROW)])
def test_times_stay_whole_and_headings_wrap(width, expected):
    heads = ("query", "epoch", "at (UTC)", "rows in", "adds up", "first error")
    rows = [
        ("2df193cd", 12, "11-27 07:54:01.4", 14_033, "yes", ""),
        ("2df193cd", 13, "11-27 07:54:11.4", None, "no",
         "a broker took no message for ten seconds"),
    ]  # fmt: skip
    console = Console(file=io.StringIO(), width=width)
    console.print(table("Epochs", heads, rows))
    # Versions of rich give the columns, and so the rule below the headings, another width.
    lines, wanted = console.file.getvalue().replace("─", ""), expected.replace("─", "")
    assert [line.split() for line in lines.splitlines()] == [w.split() for w in wanted.splitlines()]


@pytest.mark.parametrize(
    ("query_id", "shown"),
    [
        ("n" * 24, "n" * 24), ("n" * 25, "n" * 21 + "..."),
        ("5b2f11aa-0c4d-4f5e-9a6b-7c8d9e0f1a2b", "5b2f11aa"), ("orders_sql", "orders_sql"),
        ("orders-of-the-northern-warehouse", "orders-of-the-norther..."),
    ],
)  # fmt: skip
def test_a_name_is_not_cut_like_an_id(query_id, shown):
    assert page.short_query(query_id) == shown
