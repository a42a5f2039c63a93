"""`rocket-sink report` and `ledger show` of a local ledger, without Spark and Java."""

import shlex
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from rocket_sink.commands import ledger as ledger_command
from rocket_sink.commands import report as report_command
from rocket_sink.commands.common import ledger_input
from rocket_sink.errors import LedgerError
from rocket_sink.ledger.records import in_order, resolution_rows
from tests.ledger.night import store
from tests.ledger.values import accounts, confirmed, context, letter, sends, session, write_spool
from tests.run_command import run_command


class SparkWanted(Exception):
    """The error of a command that starts a JVM."""


@pytest.fixture(autouse=True)
def no_spark(monkeypatch):
    def refuse(*_, **__):
        raise SparkWanted

    monkeypatch.delenv("PYSPARK_GATEWAY_PORT", raising=False)
    monkeypatch.setattr(ledger_input, "spark_session", refuse)


@pytest.fixture
def path(tmp_path):
    ctx = context()
    first, second = letter(ctx, last_error_code="CONNECT"), letter(ctx, last_error_code="CONNECT")
    parked = {"letter_id": second.column("letter_id"), "resolution": "parked", "at": 1_000_000}
    rows = [
        sends(ctx, 3), first, second, accounts(ctx, acked=21, dead=2), confirmed(ctx, 23),
        resolution_rows(parked, context(query_id="by hand")),
    ]  # fmt: skip
    return store(tmp_path / "ledger", in_order(rows, 1))


def run(*arguments):
    done = run_command(*arguments)
    assert done.code == 0, done.err
    return done


def test_unfolded_epochs_are_noted(path):
    for epoch in (1, 2):
        write_spool(path, context(epoch=epoch), accounts(context(epoch=epoch), acked=1))
    done = run("report", "--ledger", path)
    assert "rows of 2 epochs are not folded yet and not shown; --fold" in done.err
    assert "rows of 2 epochs are not folded yet and in no table below;" in done.out
    write_spool(path, context(epoch=3), letter(context(epoch=3)), letter(context(epoch=3)))
    done = run("report", "--ledger", path)
    assert "rows of 3 epochs are not folded yet and not shown, 2 dead letters among" in done.err
    assert "in no table below; 2 dead letters wait to be folded" in done.out
    assert list(Path(path, "_spool").rglob("*.arrow")), "reading folds nothing"


def test_quarantined_files_are_noted(path):
    aside = Path(path, "_spool", "_quarantine", "q-query", "0", "0-1-x~y.arrow")
    aside.parent.mkdir(parents=True)
    aside.touch()
    done = run("report", "--ledger", path)
    shown = run("ledger", "show", "sends", "--ledger", path)
    for text in (done.out, done.err, shown.err):
        assert "1 damaged spool file is put aside" in text
    document = run("report", "--ledger", path, "--json").json()
    assert (document["quarantined_files"], document["unfolded_epochs"]) == (1, 0)


HEADS = (
    "epochs at query id epoch rows in acked degraded dead unknown duplicates possible adds up",
    "sends at broker name queue id message count attempt outcome rtt ms error code",
    "dead-letters at topic sharding key keys reason last error code last error",
    "resolutions at topic letter id message id resolution",
    "attempts at query id epoch partition task attempt id rows in acked complete counts",
)


def test_views(path):
    def show(view, *more):
        return run("ledger", "show", view, "--ledger", path, *more)

    for head in HEADS:
        assert f"{head} " in " ".join(show(head.partition(" ")[0]).out.split())
    (letter_row,), (resolution,) = (
        show(view, "--json").lines() for view in ("dead-letters", "resolutions")
    )
    assert (letter_row["body"], resolution["at"]) == ("body", "1970-01-01T00:00:01+00:00")
    letters = show("dead-letters", "--all-letters")
    assert letters.out.count("CONNECT") == 2 and not letters.err
    newest = show("sends", "--limit", "3").err
    assert newest == "the newest 3; --limit shows more, --json all columns\n"
    assert len(show("sends", "--limit", "1", "--json").lines()) == 1
    conditions = {"outcome = 'acked' -- all": 3, "NOT (topic = 't') and epoch > 0": 0}
    for condition, count in conditions.items():
        assert len(show("sends", "--where", condition, "--json").lines()) == count


def test_only_an_error_of_the_users_condition_is_left_to_spark():
    quick = MagicMock(**{"query.side_effect": LedgerError("no file")})
    assert ledger_command._quick_rows(quick, "sends", "a = 1", 3) is None
    with pytest.raises(LedgerError, match="no file"):
        ledger_command._quick_rows(quick, "sends", None, 3)


@pytest.mark.parametrize(
    "words",
    ["show_view epochs --where 'epoch ^ 1 = 0'", "show_view epochs --where \"epoch = 'x'\"",
     "show_view epochs --fold", "show_view epochs --master local[1]",
     "report, without the extra", "report, under spark-submit"],
)  # fmt: skip
def test_spark_is_started_where_it_is_needed(words, path, monkeypatch):
    """Under spark-submit the JVM runs already."""
    if words.endswith("extra"):
        monkeypatch.setattr("rocket_sink.ledger.query.duckdb_reader.find_spec", lambda name: None)
    elif words.endswith("submit"):
        monkeypatch.setenv("PYSPARK_GATEWAY_PORT", "1")
    command, *more = shlex.split(words.partition(",")[0])
    chosen = report_command.report if command == "report" else ledger_command.show_view
    with pytest.raises(SparkWanted):
        chosen.main([*more, "--ledger", path], standalone_mode=False)


def test_options_are_suggested_by_a_ledger(path):
    done = run("tune", path)
    assert "attempts" in done.out and done.err.startswith("replaying ...")
    assert run("tune", path, "--json").json()


def test_a_view_without_rows_says_so(tmp_path):
    ledger = store(tmp_path / "ledger", in_order([sends(context())], 1))
    show = ("ledger", "show", "dead-letters", "--ledger", ledger)
    assert run(*show).out == "dead-letters: none\n" and not run(*show, "--json").out


def test_a_store_that_pyarrow_does_not_know_is_left_to_spark(tmp_path):
    for path in ("wasb://container/ledger", "s3a://bucket/ledger", "catalog.schema.ledger"):
        ledger_input.check_exists(path)
    ledger_input.check_exists("wasb://container/ledger", session())
    for text in ("there is no ledger in", "no task has written"):
        with pytest.raises(LedgerError, match=text) as caught:
            ledger_input.check_exists(str(tmp_path), session())
        assert caught.value.facts["path"] == str(tmp_path)
        (tmp_path / "_notes").mkdir(exist_ok=True)
