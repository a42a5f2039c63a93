"""A report's tables show every figure, and hostile text stays text."""

import datetime as dt
import io
import json

import pytest
from rich.console import Console

from rocket_sink.ledger.report import Report, Scope, page, to_html
from rocket_sink.ledger.report.values import (
    BrokerFigures,
    DeadLetterFigures,
    EpochFigures,
    ErrorFigures,
    IsolationFigures,
    Totals,
)
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
        "/data/ledger", "17 rows that Spark handed to tasks",
    )  # fmt: skip
    for part in parts:
        assert part in text, part
    assert "None" not in text and text.endswith("\nledger /data/ledger")


def test_text_of_the_network_is_no_markup():
    assert "[red]no markup[/red]" in str(FULL)
    assert "<b>nor html</b>" not in to_html(FULL)
    assert "&lt;b&gt;nor" in to_html(FULL)


def test_commands_on_the_page_have_the_name_servers_of_the_environment(monkeypatch):
    monkeypatch.setenv("NAMESRV_ADDR", "10.0.0.1:9876")
    text = to_html(FULL)
    assert "`rocket-sink topic create TOPIC -n 10.0.0.1:9876`" in text
    assert "HOST:9876" not in text


def test_the_bundle_of_vega_is_handed_on_with_its_notice():
    pytest.importorskip("vl_convert")
    notice = page.chart_library()[:2000]
    assert notice.startswith("/*\nVega 6 (Copyright")
    assert "Redistributions in binary form must reproduce" in notice and "*/" in notice


def test_an_empty_ledger_reads_well():
    text = str(Report("/data/ledger", Scope(), Totals()))
    for part in ("No broker was isolated", "No dead letters", "No attempt failed", "No epochs"):
        assert part in text


def test_json_and_notebooks():
    plain = json.loads(json.dumps(FULL.as_dict()))
    assert plain["epochs"][0]["at"] == "2024-05-06T07:08:09.250000+00:00"
    assert plain["scope"]["since"] == NOW.isoformat()
    shown_html = FULL._repr_html_()
    assert "<pre" not in shown_html and shown_html.count("<table>") == 6
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
    assert [line.rstrip() for line in console.file.getvalue().splitlines()] == expected.splitlines()


@pytest.mark.parametrize(
    ("query_id", "shown"),
    [
        ("5b2f11aa-0c4d-4f5e-9a6b-7c8d9e0f1a2b", "5b2f11aa"),
        ("orders_sql", "orders_sql"),
        ("orders-of-the-northern-warehouse", "orders-of-the-norther..."),
    ],
)
def test_a_name_is_not_cut_like_an_id(query_id, shown):
    assert page.short_query(query_id) == shown
