"""The views: which rows count, and the errors of a damaged or foreign ledger."""

import contextlib
import dataclasses
import datetime as dt
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest.mock import MagicMock

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from rocket_sink.errors import CheckpointError, LedgerError, Outcome
from rocket_sink.ledger.append import table
from rocket_sink.ledger.append.appender import begin_append
from rocket_sink.ledger.append.delta_rs import create_table
from rocket_sink.ledger.append.table import (
    VERSION_PROPERTY,
    check_not_ahead,
    last_txn_version,
    txn_app_id,
)
from rocket_sink.ledger.driver import ledger as ledger_module
from rocket_sink.ledger.driver.ledger import Ledger
from rocket_sink.ledger.path import resolve_path
from rocket_sink.ledger.records import RunContext, in_flight_rows, resolution_rows, send_rows
from rocket_sink.ledger.schema import COLUMNS, LEDGER_SCHEMA, ledger_ddl
from rocket_sink.ledger.sql import Scope
from tests.ledger.views import quick_ledger

from .night import at_second as at
from .values import accounts, attempt, confirmed, context, letter, sends, session, write_spool

SPARK = session()
"""A session whose appends delta-rs commits; DuckDB reads the views."""


@pytest.fixture(scope="module")
def ledger(tmp_path_factory):
    new_ledger = Ledger(tmp_path_factory.mktemp("views"))
    for is_there in (False, True):
        assert [new_ledger.exists(), new_ledger.exists(SPARK)] == [is_there] * 2
        new_ledger.create(SPARK)
    return new_ledger


def test_notebooks_show_what_needs_no_spark(ledger, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(ledger_module, "spooled_epochs", lambda _: range(1234))
        for aside in (0, 5678):
            patch.setattr(ledger_module, "quarantined", lambda _, aside=aside: range(aside))
            html = ledger._repr_html_()
            assert "1,234" in html and ("5,678" in html) == ("put aside" in html) == bool(aside)
    assert "epochs that are not folded yet" in ledger._repr_html_()
    assert "none yet" in Ledger(tmp_path / "<i>none</i>")._repr_html_()
    assert "<i>" not in Ledger(tmp_path / "<i>none</i>")._repr_html_()


def test_which_view_a_method_returns(ledger, monkeypatch):
    read: list[object] = []
    rows = SimpleNamespace(where=lambda condition: f"rows where {condition}")
    monkeypatch.setattr(ledger_module, "read_table", lambda *of: read.append(of[2]) or "rows")
    monkeypatch.setattr(ledger_module.views, "view", lambda rows, name: f"{rows}: {name}")
    past = ledger.at(7)
    assert past.path == ledger.path
    methods = ("sends", "resolutions", "settled", "backfills", "isolations", "epochs", "attempts")
    assert [getattr(past, name)(SPARK) for name in methods] == [f"rows: {n}" for n in methods]
    assert past.dead_letters(SPARK) == "rows: pending_letters"
    assert ledger.dead_letters(SPARK, pending=False) == "rows: letters"
    assert ledger.transactions(SPARK) == "rows: transactions"
    monkeypatch.setattr(ledger_module.views, "view", lambda *_: rows)
    assert ledger.transactions(SPARK, pending=True) == "rows where open"
    assert read == [7] * 8 + [None] * 3


def test_what_a_report_is_asked_for(tmp_path, monkeypatch, caplog):
    """A past version is read by Spark, and lacks no rows. Naive times are in UTC."""
    ledger, asked = Ledger(tmp_path), []
    with pytest.raises(LedgerError, match="there is no ledger at"):
        ledger.report(SPARK)
    ledger.append(SPARK, accounts(context(), acked=1))
    ctx = context(epoch=1)
    write_spool(ledger.path, ctx, letter(ctx), accounts(ctx, dead=1))
    monkeypatch.setattr("rocket_sink.ledger.report.figures", lambda *of, **more: (of, more))
    monkeypatch.setattr(ledger_module, "read_table", lambda *of: asked.append(of[2]))
    monkeypatch.setattr(ledger_module.views, "reader", lambda _: "by Spark")
    naive = dt.datetime(2026, 3, 1, 12)
    aware = dt.datetime(2026, 3, 1, 12, tzinfo=dt.timezone(dt.timedelta(hours=8)))
    options: Any = "options"
    wanted = {"group": "g", "options": options, "epochs": 3}
    of, more = ledger.at(0).report(
        SPARK, query="q", since=naive, until=aware, charts=True, **wanted
    )  # fmt: skip
    scope = Scope("q", naive.replace(tzinfo=dt.timezone.utc), aware)
    assert of == ("by Spark", ledger.path, scope) and asked == [0]
    nothing = dict.fromkeys(("unfolded_epochs", "unfolded_letters", "quarantined_files"), 0)
    assert more == {**wanted, **nothing, "series": True}

    def fail(*_: Any, **__: Any) -> NoReturn:
        raise LedgerError("no rights")

    plain = {"epochs": 20, "series": False, "group": "", "options": None}
    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "sync", fail)
        of, more = ledger.report(SPARK, until=naive)
        assert of[1:] == (ledger.path, Scope(None, None, naive.replace(tzinfo=dt.timezone.utc)))
        assert more == {**plain, **nothing, "unfolded_epochs": 1, "unfolded_letters": 1}
        assert "no rights. The report lacks the rows that are not folded yet" in caplog.text
    assert ledger.report(SPARK)[1] == {**plain, **nothing}


@pytest.mark.parametrize(
    ("metrics", "result"),
    [
        (None, {"files_added": 0, "files_removed": 0}),
        ({"numFilesAdded": 1, "numFilesRemoved": 2}, {"files_added": 1, "files_removed": 2}),
    ],
)
def test_an_optimize_by_sparks_delta(ledger, monkeypatch, metrics, result):
    table = MagicMock()
    row = metrics and {"metrics": metrics}
    table.optimize().executeCompaction().select("metrics").head.return_value = row
    monkeypatch.setattr(ledger_module, "open_for_commits", lambda *_: None)
    monkeypatch.setattr(Ledger, "_delta", lambda *_: table)
    assert ledger.optimize(SPARK) == result


def rows_by_duckdb(ledger: Ledger, view: str, where: str) -> list[dict]:
    """Return rows of a view by DuckDB, which is faster; `test_spark_says_the_same` compares."""
    quick = quick_ledger(ledger.path)
    return quick.query(f"SELECT * FROM {view} WHERE {where}").to_pylist()


def epoch_of(ledger: Ledger, query: str) -> dict:
    [row] = rows_by_duckdb(ledger, "epochs", f"query_id = '{query}'")
    return row


def pending(ledger: Ledger, query: str) -> list[bytes]:
    where = f"query_id = '{query}' ORDER BY partition, ordinal"
    return [row["body"] for row in rows_by_duckdb(ledger, "pending_letters", where)]


def second_attempt(ctx: RunContext) -> RunContext:
    return dataclasses.replace(ctx, task_attempt_id=20, attempt_number=1)


@pytest.mark.spark
def test_all_values_come_back_through_delta(spark, ledger):
    """Read all values in a time zone other than UTC, also from `mapInArrow` (foreachBatch)."""
    columns = {
        "body": pa.array([b"\x00\xff", None]), "keys": pa.array([["a", "b"], None]),
        "properties": pa.array([[("x", "1")], None], pa.map_(pa.string(), pa.string())),
        "event_time_ms": pa.array([1_700_000_000_123, None]), "flag": pa.array([-5, 2**40]),
    }  # fmt: skip
    from rocket_sink.ledger.records import dead_letter_rows

    batches = [
        *dead_letter_rows({**columns, "reason": "data"}, context(query_id="trip")),
        sends(context(query_id="trip"), 2),
    ]
    frame = spark.range(1).coalesce(1).mapInArrow(lambda _: iter(batches), ledger_ddl())
    frame.write.format("delta").mode("append").save(ledger.uri)
    ledger.append(spark, *batches)
    stored = ledger.rows(spark).where("query_id = 'trip'").toArrow()
    wanted = pa.Table.from_batches(batches * 2)
    assert stored.num_rows == wanted.num_rows

    def comparable(table: pa.Table) -> list[str]:
        names = [name for name in LEDGER_SCHEMA.names if name != "sequence"]
        rows = table.cast(LEDGER_SCHEMA).select(names).to_pylist()
        return sorted(repr([row[name] for name in names]) for row in rows)

    stored = stored.select(LEDGER_SCHEMA.names)
    assert comparable(stored) == comparable(wanted)
    numbers = sorted(number for number in stored["sequence"].to_pylist() if number is not None)
    assert len(set(numbers)) == len(numbers) == wanted.num_rows / 2, "those that we append"


@pytest.mark.spark
def test_a_session_without_delta_reads_the_same_rows(spark, tmp_path, monkeypatch):
    ledger = Ledger(tmp_path / "a b" / "ledger")
    with monkeypatch.context() as without:
        without.setattr(table, "has_delta", lambda spark: False)
        without.setattr(ledger_module, "has_delta", lambda spark: False)
        with pytest.raises(LedgerError, match="needs Spark's Delta"):
            Ledger("oss://bucket/ledger").create(spark)
        ledger.create(spark)
        assert ledger.rows(spark).count() == 0
        with pytest.raises(LedgerError, match="needs Spark's Delta"):
            ledger.vacuum(spark)
    first, second = context(epoch=1), context(epoch=2, task_attempt_id=12)
    ledger.append(spark, accounts(first, acked=5, dead=2), confirmed(first, 7))
    ledger.append(spark, accounts(second, acked=3))
    ledger.optimize(spark)
    by_delta = ledger.rows(spark).orderBy("epoch", "rows_in").toArrow()
    monkeypatch.setattr(table, "has_delta", lambda spark: False)
    monkeypatch.setattr(table, "reading", None)  # around each read by Spark's Delta
    rows = ledger.rows(spark)
    assert rows.count() == 3
    assert rows.orderBy("epoch", "rows_in").toArrow().equals(by_delta)
    assert [epoch.acked for epoch in ledger.epochs(spark).orderBy("epoch").collect()] == [5, 3]


@pytest.mark.spark
def test_the_table_is_plain_delta_with_comments(spark, ledger):
    plain = spark.read.format("delta").load(ledger.path)
    assert plain.columns == [column.name for column in COLUMNS]
    comments = {field.name: field.metadata.get("comment") for field in plain.schema}
    assert comments == {column.name: column.comment for column in COLUMNS}


def test_the_accounts_of_an_epoch(ledger):
    first = context(query_id="sum")
    second = dataclasses.replace(first, partition=1, task_attempt_id=11)
    ledger.append(
        SPARK, accounts(first, acked=5, degraded=1, dead=2), accounts(second, unknown=1, filtered=3)
    )
    sums = {"rows_in": 12, "acked": 5, "degraded": 1, "dead": 2, "unknown": 1, "filtered": 3,
            "partitions": 2, "adds_up": True, "superseded_attempts": 0}  # fmt: skip
    assert epoch_of(ledger, "sum").items() >= {**sums, "confirmed": False}.items()
    ledger.append(SPARK, confirmed(first, 12))
    assert epoch_of(ledger, "sum").items() >= {"confirmed": True, "num_input_rows": 12}.items()


def test_accounts_that_do_not_add_up_are_seen(ledger):
    """See a partition that does not add up even if another's error makes up for it."""
    first = context(query_id="short")
    second = dataclasses.replace(first, partition=1, task_attempt_id=11)
    ledger.append(SPARK, accounts(first, rows_in=5, acked=4), accounts(second, rows_in=5, acked=6))
    row = epoch_of(ledger, "short")
    assert (row["rows_in"], row["acked"], row["adds_up"]) == (10, 10, False)


def test_a_partition_without_a_complete_attempt_does_not_add_up(ledger):
    ledger.append(SPARK, accounts(context(query_id="half"), complete=False, acked=4))
    values = {"adds_up": False, "rows_in": 0, "superseded_attempts": 1, "superseded_rows": 4}
    assert epoch_of(ledger, "half").items() >= values.items()


@pytest.mark.parametrize("first_complete", [True, False])
def test_of_a_retried_partition_the_last_complete_attempt_counts(ledger, first_complete):
    """Count the last attempt: foreach may end a first one without an error (close(None))."""
    query = f"retry-{first_complete}"
    first = context(query_id=query)
    again = second_attempt(first)
    ledger.append(
        SPARK,
        at(accounts(first, complete=first_complete, acked=3, dead=1), 10),
        at(letter(first, b"first"), 10),
        # Clocks differ, so the later attempt's time is not later.
        at(accounts(again, acked=7, dead=1), 10),
        at(letter(again, b"again"), 10),
    )
    row = epoch_of(ledger, query)
    assert (row["rows_in"], row["acked"], row["dead"], row["partitions"]) == (8, 7, 1, 1)
    assert (row["superseded_attempts"], row["superseded_rows"], row["adds_up"]) == (1, 3, True)
    assert pending(ledger, query) == [b"again"]
    assert len(rows_by_duckdb(ledger, "letters", f"query_id = '{query}'")) == 2


def test_an_attempt_that_failed_after_a_complete_one_changes_nothing(ledger):
    first = context(query_id="late")
    ledger.append(
        SPARK,
        accounts(first, acked=3, dead=1),
        letter(first, b"first"),
        accounts(second_attempt(first), complete=False, acked=1),
    )
    assert epoch_of(ledger, "late")["rows_in"] == 4
    assert pending(ledger, "late") == [b"first"]


def test_a_replayed_epoch_with_other_partitions(ledger):
    """Replay an epoch: run 1 died before Spark noted it, and run 2 uses fewer partitions."""
    old = context(query_id="replay", partition=4)
    new = context(query_id="replay", run_id="run-2", partition=0, task_attempt_id=1)
    ledger.append(
        SPARK,
        at(accounts(old, acked=2, dead=1), 1), at(letter(old, b"old"), 1),
        at(accounts(new, acked=2, dead=1), 2), at(letter(new, b"new"), 2),
    )  # fmt: skip
    # Both runs' letters stay visible until Spark confirms, because the second run could still die.
    assert pending(ledger, "replay") == [b"new", b"old"]
    ledger.append(SPARK, at(confirmed(new, 3), 3))
    assert pending(ledger, "replay") == [b"new"]
    values = {"rows_in": 3, "adds_up": True, "run_id": "run-2", "superseded_attempts": 1}
    assert epoch_of(ledger, "replay").items() >= values.items()


def test_an_epoch_that_delta_skipped_keeps_its_first_accounts(ledger):
    old = context(query_id="skip")
    ledger.append(SPARK, accounts(old, acked=2, dead=1), letter(old, b"old"))
    ledger.append(SPARK, confirmed(dataclasses.replace(old, run_id="run-2"), 3))
    assert pending(ledger, "skip") == [b"old"]
    row = epoch_of(ledger, "skip")
    assert (row["rows_in"], row["adds_up"], row["confirmed"]) == (3, True, True)


def test_letters_of_no_task_are_pending_and_those_of_a_killed_attempt_are_not(ledger):
    by_hand = context(query_id="export", partition=None, task_attempt_id=None, lane="export")
    ledger.append(SPARK, letter(by_hand, b"x"), letter(context(query_id="killed"), b"x"))
    assert (pending(ledger, "export"), pending(ledger, "killed")) == ([b"x"], [])


def test_an_unparked_letter_is_pending_until_it_is_parked_again(ledger):
    ctx = context(query_id="unparked")
    plain, sent = letter(ctx, b"one"), letter(ctx, b"sent")

    def resolve(which, way, second):
        columns = {"letter_id": which.column("letter_id"), "resolution": way}
        return at(resolution_rows(columns, context(query_id="by hand")), second)

    ledger.append(
        SPARK, plain, sent, accounts(ctx, dead=2), resolve(plain, "parked", 1),
        resolve(plain, "unparked", 2), resolve(sent, "resent", 1), resolve(sent, "unparked", 2),
    )  # fmt: skip
    assert pending(ledger, "unparked") == [b"one"], "what is stored stays settled"
    ledger.append(SPARK, resolve(plain, "dropped", 3))
    assert pending(ledger, "unparked") == []


@pytest.mark.parametrize("way", ["resent", "parked", "dropped"])
def test_resolved_letters_are_not_pending(ledger, way):
    ctx = context(query_id=f"resolved-{way}")
    first, second = letter(ctx, b"one"), letter(ctx, b"two", letter_id=f"stays-{way}")
    ledger.append(SPARK, first, second, accounts(ctx, dead=2))
    assert len(pending(ledger, ctx.query_id)) == 2
    settled = {"letter_id": first.column("letter_id"), "resolution": way}
    ledger.append(SPARK, resolution_rows(settled, context(query_id="backfill")))
    assert pending(ledger, ctx.query_id) == [b"two"]
    number = first.column("letter_id")[0].as_py()
    [row] = rows_by_duckdb(ledger, "resolutions", f"letter_id = '{number}'")
    assert row["resolution"] == way


@pytest.mark.spark
def test_spark_says_the_same(spark, tmp_path):
    """Compare Spark's views with DuckDB's over the rows of tests above."""
    ledger = Ledger(tmp_path)
    for fill in (
        test_the_accounts_of_an_epoch, test_accounts_that_do_not_add_up_are_seen,
        test_a_replayed_epoch_with_other_partitions,
        test_letters_of_no_task_are_pending_and_those_of_a_killed_attempt_are_not,
        test_an_unparked_letter_is_pending_until_it_is_parked_again,
    ):  # fmt: skip
        fill(ledger)
    epochs = {row["query_id"]: row.asDict() for row in ledger.epochs(spark).collect()}
    for row in rows_by_duckdb(ledger, "epochs", "true"):
        names = ("rows_in", "acked", "dead", "adds_up", "confirmed", "superseded_rows", "run_id")
        assert [epochs[row["query_id"]][name] for name in names] == [row[name] for name in names]
    letters = ledger.dead_letters(spark).select("query_id", "body").collect()
    expected = rows_by_duckdb(ledger, "pending_letters", "true")
    assert len(letters) > 1
    assert sorted((row["query_id"], bytes(row["body"])) for row in letters) == sorted(
        (row["query_id"], row["body"]) for row in expected
    )
    assert ledger.dead_letters(spark, pending=False).count() == len(
        rows_by_duckdb(ledger, "letters", "true")
    )


def test_sends_in_flight_show_up_only_without_an_answer(ledger):
    ctx = context(query_id="flight")
    dead = second_attempt(ctx)  # Equal numbers of another attempt are other requests.
    ledger.append(
        SPARK,
        in_flight_rows([1, 2], ctx, topic="t", message_count=[3, 4], body_bytes=[1, 1]),
        send_rows([attempt(), attempt(attempt=2)], ctx, requests=[1, 1]),
        in_flight_rows([1], dead, topic="t", message_count=[9], body_bytes=[1]),
    )
    rows = rows_by_duckdb(ledger, "sends", "query_id = 'flight'")
    flights = sorted((r["task_attempt_id"], r["request"], r["outcome"]) for r in rows)
    assert flights == [
        (10, 1, "acked"), (10, 1, "acked"), (10, 2, "in_flight"), (20, 1, "in_flight"),
    ]  # fmt: skip
    where = "query_id = 'flight' AND task_attempt_id = 20"
    [row] = rows_by_duckdb(ledger, "attempts", where)
    assert (row["in_flight"], row["rows_in"], row["counts"]) == (9, None, False)


def test_isolations_have_a_length(ledger):
    from rocket_sink.ledger.records import isolation_rows
    from rocket_sink.routing.fault import Isolation

    isolation = Isolation("b", "latency", 600.0, 1.0, 3.5)
    ledger.append(SPARK, isolation_rows([isolation], context(query_id="iso")))
    [row] = rows_by_duckdb(ledger, "isolations", "query_id = 'iso'")
    assert row["isolated_ms"] == pytest.approx(2500.0)


def test_no_ledger_is_a_clear_error(tmp_path):
    nowhere = Ledger(tmp_path / "nothing")
    for read in (nowhere.sends, nowhere.epochs, nowhere.optimize, nowhere.vacuum):
        with pytest.raises(LedgerError, match="there is no ledger") as missing:
            read(SPARK)
        assert missing.value.path == nowhere.uri
    assert nowhere.sync(SPARK).folds == 0


@pytest.mark.spark
def test_a_foreign_table_is_no_ledger(spark, tmp_path):
    write_deltalake(tmp_path / "t", pa.table({"id": [0]}))
    for use in (Ledger.sends, Ledger.create):
        with pytest.raises(LedgerError, match="not a ledger"):
            use(Ledger(tmp_path / "t"), spark)


@pytest.mark.parametrize("version", ["99", "0"])
def test_another_schema_version_is_refused(tmp_path, version):
    ledger = Ledger(tmp_path)
    assert create_table(resolve_path(tmp_path), LEDGER_SCHEMA, {VERSION_PROPERTY: version})
    for use in (
        ledger.sends, ledger.create, lambda spark: ledger.append(spark, sends(context())),
        ledger.optimize, ledger.vacuum,
    ):  # fmt: skip
        with pytest.raises(LedgerError, match=f"schema version {version}.*install") as refused:
            use(SPARK)
        assert (refused.value.path, refused.value.version) == (ledger.uri, version)


@pytest.mark.parametrize(
    ("parallelism", "hours", "error", "asked"),
    [
        ("10000", None, "", [168.0]),
        ("8", 3.5, "", [3.5]),
        (None, 0, "RETENTION is too short\nat java", [0]),
        (None, None, "RETENTION", [168.0, None]),  # The table keeps its files for longer.
        (None, None, "other", [168.0]),
    ],
)
def test_how_spark_is_asked_to_vacuum(ledger, monkeypatch, parallelism, hours, error, asked):
    """Let a VACUUM list few folders in few tasks, keep to its hours, and commit nothing."""
    driver, calls = session(), []
    names = (ledger_module._LISTING, ledger_module._VACUUM_IGNORES, ledger_module._VACUUM_COMMITS)
    if parallelism:
        driver.conf.set(names[0], parallelism)

    def vacuum(kept_hours=None):
        calls.append(kept_hours)
        listing = "8" if parallelism == "8" else "32"
        assert [driver.conf.get(name) for name in names] == [listing, "false", "false"]
        if error and kept_hours is not None:
            raise RuntimeError(error)

    monkeypatch.setattr(Ledger, "_delta", lambda *_: SimpleNamespace(vacuum=vacuum))
    wanted = {0: (LedgerError, "short Readers.*retentionDurationCheck")}.get(
        hours, (RuntimeError, "other")
    )
    is_refused = hours == 0 or error == "other"
    raising = pytest.raises(wanted[0], match=wanted[1])
    with raising if is_refused else contextlib.nullcontext() as refused:
        ledger.vacuum(driver, hours)
    assert calls == asked and (hours != 0 or refused.value.path == ledger.uri)
    assert [driver.conf.get(name) for name in names] == [parallelism, None, None]


def test_a_ledger_ahead_of_its_checkpoint_is_refused(ledger):
    app_id, place = txn_app_id("ahead"), resolve_path(ledger.path)
    assert last_txn_version(SPARK, place, app_id) is None
    assert not check_not_ahead(SPARK, place, "ahead", 0)
    begin_append(SPARK, place, app_id, 5).save_rows([sends(context(query_id="ahead"))])
    assert last_txn_version(SPARK, place, app_id) == 5
    assert check_not_ahead(SPARK, place, "ahead", 5)  # The epoch was recorded before the crash.
    assert not check_not_ahead(SPARK, place, "ahead", 6)
    assert not check_not_ahead(SPARK, place, "another-query", 0)
    with pytest.raises(CheckpointError, match=r"epochs up to 5 .* starts at epoch 4") as ahead:
        check_not_ahead(SPARK, place, "ahead", 4)
    facts = ahead.value
    assert (facts.query_id, facts.ledger_epoch, facts.checkpoint_epoch) == ("ahead", 5, 4)


def test_no_secret_in_any_file_of_the_ledger(tmp_path):
    canary = "CANARY-0123456789"
    ctx = context(query_id="canary")
    remark = f"Check signature failed for accessKey={canary} {canary}"
    bad = attempt(outcome=Outcome.REJECTED, remark=remark)
    ledger = Ledger(tmp_path)
    ledger.append(
        SPARK,
        send_rows([bad], ctx, secrets=[canary]),
        letter(ctx, last_error=remark.replace(f" {canary}", ""), last_error_code="AUTH_FAILED"),
    )
    stored = rows_by_duckdb(ledger, "ledger_rows", "true")
    assert canary not in repr(stored)
    assert any("***" in (row["remark"] or "") for row in stored)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 3
    assert all(canary.encode() not in path.read_bytes() for path in files)
