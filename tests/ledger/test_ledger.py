"""The views: which rows count, and the errors of a damaged or foreign ledger."""

import contextlib
import datetime as dt
from types import SimpleNamespace
from unittest.mock import MagicMock

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from rocket_sink.errors import CheckpointError, LedgerError
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
from rocket_sink.ledger.schema import COLUMNS, LEDGER_SCHEMA, ledger_ddl
from rocket_sink.ledger.sql import Scope

from .values import (
    accounts,
    confirmed,
    context,
    letter,
    refusal,
    sends,
    session,
    write_spool,
)

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
    read = []
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
    options = "options"
    wanted = {"group": "g", "options": options, "epochs": 3}
    of, more = ledger.at(0).report(
        SPARK, query="q", since=naive, until=aware, charts=True, **wanted
    )  # fmt: skip
    scope = Scope("q", naive.replace(tzinfo=dt.timezone.utc), aware)
    assert of == ("by Spark", ledger.path, scope) and asked == [0]
    nothing = dict.fromkeys(("unfolded_epochs", "unfolded_letters", "quarantined_files"), 0)
    assert more == {**wanted, **nothing, "series": True}

    def fail(*_, **__):
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

    def comparable(table):
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


def test_the_table_is_plain_delta_with_comments(ledger):
    fields = DeltaTable(ledger.path).schema().fields
    comments = {field.name: field.metadata.get("comment") for field in fields}
    assert [*comments.items()] == [(column.name, column.comment) for column in COLUMNS]


def test_no_ledger_is_a_clear_error(tmp_path):
    nowhere = Ledger(tmp_path / "nothing")
    for read in (nowhere.sends, nowhere.epochs, nowhere.optimize, nowhere.vacuum):
        with refusal(nowhere.uri, "there is no ledger"):
            read(SPARK)
    assert nowhere.sync(SPARK).folds == 0


@pytest.mark.parametrize("version", ["99", "0"])
def test_another_schema_version_is_refused(tmp_path, version):
    ledger = Ledger(tmp_path)
    assert create_table(resolve_path(tmp_path), LEDGER_SCHEMA, {VERSION_PROPERTY: version})
    for use in (
        ledger.sends, ledger.create, lambda spark: ledger.append(spark, sends(context())),
        ledger.optimize, ledger.vacuum, ledger.report,
    ):  # fmt: skip
        with pytest.raises(LedgerError, match=f"schema version {version}.*install") as refused:
            use(SPARK)
        assert (refused.value.path, refused.value.version) == (ledger.uri, version)


@pytest.mark.parametrize(
    ("parallelism", "hours", "error", "asked", "raised"),
    [
        ("10000", None, "", [168.0], None),
        ("8", 3.5, "", [3.5], None),
        (None, 0, "RETENTION is too short\nat java", [0], LedgerError),
        (None, None, "RETENTION", [168.0, None], None),  # The table keeps its files for longer.
        (None, None, "other", [168.0], RuntimeError),
    ],
)
def test_how_spark_is_asked_to_vacuum(
    ledger, monkeypatch, parallelism, hours, error, asked, raised
):
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
    expected = {
        None: contextlib.nullcontext(), RuntimeError: pytest.raises(RuntimeError, match="other"),
        LedgerError: refusal(ledger.uri, "short Readers.*retentionDurationCheck"),
    }  # fmt: skip
    with expected[raised]:
        ledger.vacuum(driver, hours)
    assert calls == asked
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
