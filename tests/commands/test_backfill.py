"""`rocket-sink backfill`: the work that it asks for, and its words."""

import contextlib
import datetime as dt
import os
from collections import Counter
from pathlib import Path
from unittest.mock import MagicMock, call

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql.catalog import Table as CatalogTable

from rocket_sink.commands import backfill as command
from rocket_sink.spark.backfill import backfill
from rocket_sink.spark.backfill.backfill import Plan
from rocket_sink.spark.backfill.resend import Resent
from rocket_sink.spark.backfill.sources import Selection, Table
from tests.run_command import run_command

FAILURES = [
    {"message_id": "7F01", "topic": "orders", "code": "NO_ROUTE", "error": "no writable queue"},
    {"message_id": "7F02", "topic": "flights", "code": "MESSAGE_ILLEGAL", "error": "too long"},
]


class Planned(contextlib.nullcontext):
    """Stands for `Backfill`: a plan, and a run that ends as `done` says."""

    noun, done = "dead letters", Resent()

    def __init__(self):
        super().__init__(self)
        self.the_plan, self.away = Plan(pending=7, selected=3), {}
        self.check_exists, self.check_name_server = MagicMock(), MagicMock()

    def __call__(self, *arguments, **more):
        self.arguments, self.more = arguments, more
        return self

    def plan(self, *, sample):
        self.sample = sample
        return self.the_plan

    def waiting(self):
        return self.away

    def run(self, selected, progress=None):
        assert bool(selected) is bool(progress)
        if progress:
            progress(2 * selected)
        return self.done


@pytest.fixture
def planned(monkeypatch, tmp_path):
    work = Planned()
    for name in ("check_exists", "check_name_server"):
        monkeypatch.setattr(command, name, getattr(work, name))
    monkeypatch.setattr(command, "spark_session", lambda *a, **b: contextlib.nullcontext(SESSION))
    monkeypatch.setattr(backfill, "Backfill", work)
    monkeypatch.chdir(tmp_path)
    return work


def catalog_table(name):
    if "`" in name:
        raise AnalysisException(name)
    return CatalogTable(name, "cat", ["DB"], None, "MANAGED", isTemporary=False)


SESSION = MagicMock()
SESSION.catalog.getTable = catalog_table
WORDS = ("backfill", "-l", "my ledger", "-n", "127.0.0.1:9876")


@pytest.mark.parametrize(
    ("done", "parts", "pending", "code"),
    [
        (Resent(resent=8), ["8 dead letters: 8 stored; 4 pending"], 4, 0),
        (Resent(resent=2), ["2 dead letters: 2 stored; 4 pending"], 4, 0),
        (
            Resent(resent=1000, degraded=3, found=1, left_out=1, failed=2, held_back=1, moved=4,
                   failures=FAILURES, codes=Counter(NO_ROUTE=2), first_error="no writable queue"),
            ["1,005 dead letters: 1,000 stored, 3 of these without the durability", "1 found",
             "2 failed, 1 held back", "1 left out", "4 of the stored ones moved", "; 7 pending",
             "  NO_ROUTE: 2", "  first error: no writable queue"], 7, 1,
        ),
        (
            Resent(not_tried=2, waiting=Counter({"broker-b": 1, "broker-a": 3})),
            ["6 dead letters: 0 stored, 2 not tried", "4 left to wait",
             "  3 wait for broker-a, which no", "(--move-keys", "  1 wait for broker-b"], 10, 1,
        ),
    ],
)  # fmt: skip
def test_it_counts_what_was_done_when_others_change_the_ledger_after_the_plan(
    planned, done, parts, pending, code
):
    """The plan counts three of seven letters; then others add letters or park one."""
    planned.done = done
    shown = run_command(*WORDS)
    text, at = shown.err, 0
    assert shown.code == code and text.startswith("reading the dead letters ...\nbackfill of 3 ...")
    assert "backfill of 3: 3 in " in text and planned.sample == 0
    for part in parts:
        at = text.index(part, at)
    printed = run_command(*WORDS, "--json").json()
    assert printed["pending"] == pending and printed["selected"] == 3
    assert printed["failures"] == (FAILURES if done.failed else [])


@pytest.mark.parametrize(
    ("more", "selection", "wanted"),
    [
        ((), Selection(), {"move_keys": False, "wait_s": None}),
        (
            ("--reason", "transport", "--reason", "data", "--only-topic", "t", "--where", "a=b",
             "--since", "2026-01-31T12:00", "--until", "2026-02-01T12:00+08:00", "--limit", "7",
             "--max-tries", "9", "--again", "--move-keys", "--no-wait", "--to-topic", "other",
             "--rate", "500"),
            Selection(
                ("transport", "data"), "t", "a=b",
                dt.datetime(2026, 1, 31, 12, tzinfo=dt.timezone.utc),
                dt.datetime(2026, 2, 1, 4, tzinfo=dt.timezone.utc), 7, 9, True,
            ),
            {"move_keys": True, "wait_s": 0.0},
        ),
    ],
)  # fmt: skip
def test_the_flags_are_the_selection(planned, more, selection, wanted, capsys):
    """A topic of a configuration file changes no dead letter's topic."""
    Path("conf").write_text("topic = of the file\n")
    assert run_command(*WORDS, "--conf", "conf", *more).code == 0
    session, options, asked, source = planned.arguments
    assert session is SESSION and (asked, source) == (selection, None)
    assert options.ledger == str(Path("my ledger").absolute())
    assert planned.check_exists.mock_calls == [call(options.ledger), call(options.ledger, SESSION)]
    assert planned.check_name_server.mock_calls == [call(options)]
    has_topic = "--to-topic" in more
    assert options.topic == ("other" if has_topic else "")
    assert options.max_messages_per_second == (500 if has_topic else 0)
    assert wanted.items() <= planned.more.items()
    planned.more["on_wait"]("host:7")
    assert "another backfill of the ledger (host:7); --no-wait" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "name", "is_text"),
    [(("--table", "T"), "cat.db.t", False), (("--path", "in"), "in", False),
     (("--table", "csv.`/T`"), "csv.`/T`", False),
     (("--path", "file:///a/../b"), "/b", False),
     (("--path", "s3a://b/../in"), "s3a://b/../in", False),
     (("--path", "in", "--format", "csv", "--source-option", "sep==", "--schema", "a INT"), "in",
      True)],
)  # fmt: skip
def test_rows_of_a_table(planned, more, name, is_text):
    assert run_command(*WORDS, *more).code == 0
    (source,) = planned.arguments[3:]
    place = name if "." in name else os.path.realpath(name)
    assert isinstance(source, Table) and (source.name, source.is_text) == (place, is_text)
    assert not planned.check_exists.called
    if is_text:
        assert SESSION.read.format.call_args == call("csv")
        assert SESSION.read.format.return_value.options.call_args == call(sep="=")
    assert run_command(*WORDS, *more, "--reason", "data").code == 2
    assert run_command(*WORDS, "--path", "a", "--table", "b").code == 2


SAMPLE = [{"topic": "orders", "keys": ["a"], "tries": 2, "body_bytes": 1000, "other": "x"}]


@pytest.mark.parametrize(
    ("plan", "away", "parts"),
    [
        (Plan(), {}, ["0 pending dead letters, 0 of them selected (0 bytes); nothing sent",
                      "  nothing to send: no dead letters are pending"]),
        (
            Plan(4000, 2000, 9000, 1, 2, 3, 4, 5, {"transport": 4000}, {"orders": 4000}, SAMPLE),
            {"broker-b": 7},
            ["4,000 pending dead letters, 2,000 of them selected (9,000 bytes)",
             "  3 are left alone", "(--again", "  4 wait behind", "  5 may be stored",
             "  1 have no body", "  2 have no topic: --to-topic", "  7 wait for broker-b"],
        ),
        (Plan(2, 2), None, ["2 of them selected", "  which of them wait for a broker is not"]),
        (Plan(2), None, ["2 pending dead letters, 0 of them selected"]),
    ],
)  # fmt: skip
def test_a_dry_run_prints_the_plan(planned, plan, away, parts):
    planned.the_plan, planned.away, at = plan, away, 0
    done = run_command(*WORDS, "--dry-run")
    assert done.code == 0 and planned.sample == 5 and not planned.check_name_server.called
    for part in parts:
        at = done.err.index(part, at)
    assert ("is not known" in done.err) is (plan.selected > 0 and away is None)
    shown = " ".join(done.out.split())
    if plan.sample:
        assert "by reason" in shown and "by topic" in shown and "orders 4,000" in shown
        assert "the first 1" in shown and "body bytes" in shown and "other" not in shown
    printed = run_command(*WORDS, "--dry-run", "--json").json()
    assert printed["pending"] == plan.pending
    assert printed["waiting"] == (away if plan.selected else None)


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (Plan(), "nothing to send: no dead letters are pending"),
        (Plan(pending=3, left_alone=1, behind=2), "--again sends them"),
        (Plan(pending=3, by_reason={"data": 3}), "--reason data tries"),
        (Plan(pending=3, by_reason={"transport": 3}), "none of the 3 pending dead letters"),
        (Plan(pending=3, by_reason={"data": 2}), "none of the 3 pending dead letters"),
        (Plan(pending=3, without_topic=3), "3 have no topic: --to-topic names one"),
    ],
)
def test_a_backfill_of_nothing_prints_that(planned, plan, text):
    planned.the_plan = plan
    done = run_command(*WORDS)
    assert done.code == 0 and text in done.err and "pending; " not in done.err
