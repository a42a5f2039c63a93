"""Appends by delta-rs and by Spark's Delta to one table lose and double nothing.

Spark or delta-rs's own reader judges the contents of the table.
"""

import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections import Counter
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError, DeltaError

from rocket_sink import Ledger
from rocket_sink.errors import LedgerError
from rocket_sink.ledger import storage
from rocket_sink.ledger.append import appender, delta_rs
from rocket_sink.ledger.append import table as table_module
from rocket_sink.ledger.append.appender import begin_append
from rocket_sink.ledger.append.table import is_table, last_txn_version, rows_of_epoch
from rocket_sink.ledger.path import LedgerPath, resolve_path
from rocket_sink.ledger.records import replaced
from rocket_sink.ledger.schema import LEDGER_SCHEMA, STATS_COLUMNS
from rocket_sink.ledger.transport import data_files
from rocket_sink.ledger.transport.data_files import write_data_files
from rocket_sink.ledger.upkeep.growth import keep_small
from tests.ledger.views import quick_ledger

from .values import accounts, context, forge, letter, refusal, sends, session, write_spool

ROWS = 3
SPARK = session()
"""A session whose appends delta-rs commits; tests of Spark's Delta take `spark`."""


@pytest.fixture(scope="module")
def new(tmp_path_factory):
    """Return a new table; tests copy it."""
    folder = tmp_path_factory.mktemp("new") / "ledger"
    Ledger(folder).create(SPARK)
    return folder


@pytest.fixture
def place(new, tmp_path):
    shutil.copytree(new, tmp_path / "the ledger, ü")
    return resolve_path(tmp_path / "the ledger, ü")


def by_delta_rs(place, query, version, driver=SPARK):
    append = begin_append(driver, place, query, version)
    append.save_rows([sends(context(query_id=query, epoch=version), ROWS)])
    keep_small(append)


def by_spark(spark, place, query, version):
    rows = pa.Table.from_batches([sends(context(query_id=query, epoch=version), ROWS)])
    writer = spark.createDataFrame(rows).coalesce(1).write.format("delta").mode("append")
    writer = writer.option("txnAppId", query).option("txnVersion", version)
    writer.save(place.uri)


def rows_in(place, spark=None):
    """Count the rows by query and epoch, as Spark or delta-rs reads them."""
    if spark is None:
        rows = DeltaTable(place.root).to_pyarrow_table(columns=["query_id", "epoch"])
    else:
        rows = spark.read.format("delta").load(place.uri).select("query_id", "epoch").toArrow()
    return Counter(zip(*rows.to_pydict().values(), strict=True))


@pytest.mark.spark
def test_a_table_of_sparks_is_appended_to_by_both(spark, place):
    """Append past checkpoints of both, in a session that knows the log and in a new one."""
    wanted = {}
    for version in range(24):
        # Spark makes the first checkpoint and its checksum; delta-rs makes the next ones.
        write = partial(by_spark, spark) if version < 11 or version % 7 == 0 else by_delta_rs
        write(place, "both", version)
        wanted["both", version] = ROWS
        if version == 15:
            spark.sql(f"OPTIMIZE delta.`{place.uri}`")
    log = Path(place.root, "_delta_log")
    assert json.loads((log / "_last_checkpoint").read_text())["version"] > 11
    assert rows_in(place, spark) == wanted
    # A session that starts now remembers no log.
    spark._jvm.org.apache.spark.sql.delta.DeltaLog.clearCache()
    assert rows_in(place, spark) == wanted
    # A checkpoint with another's checksum would cost each new session seconds.
    assert not (log / "._last_checkpoint.crc").exists()
    assert last_txn_version(spark, place, "both") == 23
    snapshot = spark._jvm.org.apache.spark.sql.delta.DeltaLog.forTableWithSnapshot(
        spark._jsparkSession, place.uri
    )._2()
    assert snapshot.transactions().get("both").get() == 23
    by_spark(spark, place, "both", 23)  # Spark knows the commits of delta-rs.
    assert rows_in(place, spark) == wanted


@pytest.mark.spark
def test_optimize_and_vacuum(spark, place):
    ledger = Ledger(place.root)
    for version in range(4):
        (by_delta_rs if version % 2 else partial(by_spark, spark))(place, "q", version)
    wanted = {("q", version): ROWS for version in range(4)}
    begun = begin_append(spark, place, "begun", 0)  # The append begins before OPTIMIZE.
    assert ledger.optimize(spark)["files_removed"] == 4
    assert len(DeltaTable(place.root).file_uris()) == 1
    begun.save_rows([sends(context(query_id="begun"), ROWS)])
    unfolded = Path(write_spool(place, context(), sends(context())))
    name = "spark.databricks.delta.retentionDurationCheck.enabled"
    with pytest.raises(LedgerError, match="retentionDurationCheck"):
        ledger.vacuum(spark, 0)
    spark.conf.set(name, "false")
    version = ledger.version(spark)
    try:
        ledger.vacuum(spark, 0)
    finally:
        spark.conf.unset(name)
    assert unfolded.exists()
    # Spark's Delta makes commits by a rename, which may overwrite a commit of another driver.
    assert ledger.version(spark) == version
    by_delta_rs(place, "q", 4)
    wanted |= {("begun", 0): ROWS, ("q", 4): ROWS}
    assert rows_in(place, spark) == wanted
    quick = quick_ledger(place.root)
    counts = quick.query("SELECT query_id, epoch, count(*) AS n FROM sends GROUP BY ALL")
    assert {(r["query_id"], r["epoch"]): r["n"] for r in counts.to_pylist()} == wanted


def test_a_transaction_is_taken_once(place, caplog):
    """Two drivers append the same epoch; both have seen that the table lacks it."""
    first, second = (begin_append(SPARK, place, "twice", 0) for _ in range(2))
    first.save_rows([sends(context(query_id="twice"), ROWS)])
    with refusal(place.uri, "another process has committed twice 0"):
        second.save_rows([sends(context(query_id="twice"), ROWS)])
    assert rows_in(place) == {("twice", 0): ROWS}

    def never(batches):
        raise AssertionError("the plan of an epoch that the table holds is run")

    again = begin_append(SPARK, place, "twice", 0)
    caplog.set_level("INFO")
    again.save(again.made_by_tasks(SPARK.range(1), never))
    assert again.rows is None and f"{place} has twice 0 already" in caplog.text


@pytest.mark.parametrize(
    ("by_tasks", "later", "wanted", "result"),
    [
        (0, 0, None, 0), (0, 0, 0, 0), (0, 0, 3, "its log does not show the commit"),
        (3, 0, None, 3), (3, 0, 3, 3), (3, 2, None, 5),
        (3, 0, 4, "has added 3 rows, and 4 were handed over"),
    ],
)  # fmt: skip
def test_rows_of_tasks_are_counted(place, monkeypatch, by_tasks, later, wanted, result):
    """Executors prove the folder first. An epoch without rows makes no commit."""
    before, checks = DeltaTable(place.root).version(), []
    token = SimpleNamespace(check=lambda: checks.append(1))
    monkeypatch.setattr(
        appender, "executors_token", lambda *given: given == (SPARK, place) and token
    )

    def rows(count):
        return [sends(context(query_id="q", epoch=5), count)] if count else []

    append = begin_append(SPARK, place, "q", 5)
    frame = append.made_by_tasks(SPARK.range(10), lambda batches: iter(rows(by_tasks)))
    with refusal(place.uri, result) if isinstance(result, str) else nullcontext():
        append.save(frame, wanted, lambda: rows(later))
        assert append.rows == result
    assert checks == [1]
    assert DeltaTable(place.root).version() == before + (by_tasks > 0)
    assert rows_in(place).total() == by_tasks + later


def test_accounts_of_a_write_are_those_of_its_run(place, monkeypatch):
    """Before its commit delta-rs reads the tasks' files; Spark's Delta has committed them."""
    append, rows = begin_append(SPARK, place, "q", 4), []
    ctx, other = context(epoch=4), context(epoch=4, run_id="run-2")
    folder = Path(place.root, "kind=epoch")
    batches = [sends(ctx), accounts(ctx, acked=3), accounts(other, acked=5)]

    def read():
        rows.extend(append.accounts(["acked"], ctx))
        away = folder.rename(f"{folder}-away")
        with refusal(place.uri, "^All rows were sent, .* cannot be read now"):
            append.accounts(["acked"], ctx)
        away.rename(folder)
        return ()

    append.save(append.made_by_tasks(SPARK.range(1), lambda _: iter(batches)), later=read)
    assert rows == [{"acked": 3}, {"acked": 5}]
    append = appender._BySpark(SPARK, place, "q", 4, "", 0, is_held=False)
    assert append.accounts(["acked"], ctx) == [{"acked": 3, "run_id": "run-1"}]
    shutil.rmtree(folder)
    with pytest.raises(LedgerError, match=r"^All rows were sent, .* cannot be read"):
        append.accounts(["acked"], ctx)


@pytest.mark.parametrize(("last", "is_held"), [(None, False), (6, False), (7, True), (8, True)])
@pytest.mark.parametrize("token", [None, "token"])
def test_an_append_by_sparks_delta(place, monkeypatch, last, is_held, token):
    parts, frame = MagicMock(), MagicMock()
    answers = {
        "open_for_commits": None, "is_table": True, "last_txn_version": last, "table_version": 9,
        "warn_if_shared": None, "rows_of_commit": ROWS, "executors_token": token,
        "spark_frame": frame,
    }  # fmt: skip
    for name, answer in answers.items():
        getattr(parts, name).return_value = answer
        monkeypatch.setattr(appender, name, getattr(parts, name))
    assert not begin_append(SimpleNamespace(), place, "q", 7)._is_held
    assert not parts.warn_if_shared.called and not begin_append(SPARK, place)._is_held
    append = begin_append(SPARK, place, "q", 7, "mine")
    assert (append._is_held, append.sequence, append.merges) == (is_held, 10 << 32, False)
    parts.last_txn_version.assert_called_once_with(SPARK, place, "q")
    parts.warn_if_shared.assert_called_with(SPARK, place)
    append.save_rows([sends(context(), 2), sends(context(), 1)])
    assert append.rows == (None if is_held else ROWS)
    last_step = frame.coalesce.return_value.mapInArrow if token else frame.coalesce
    assert last_step.return_value.write.format.called != is_held
    if not is_held:
        assert parts.spark_frame.call_args.args[1].num_rows == ROWS
        frame.coalesce.assert_called_once_with(1)
        parts.rows_of_commit.assert_called_once_with(SPARK, place, "mine", 9)


@pytest.mark.spark
def test_a_change_of_the_table_meanwhile(spark, place):
    """Append although the table changes, as when another rocket-sink upgrades it."""
    append = begin_append(spark, place, "begun", 0)
    spark.sql(f"ALTER TABLE delta.`{place.uri}` SET TBLPROPERTIES ('some.property' = '1')")
    spark.sql(f"ALTER TABLE delta.`{place.uri}` ADD COLUMNS (later STRING)")
    append.save_rows([sends(context(query_id="begun"), ROWS)])
    assert rows_in(place, spark) == {("begun", 0): ROWS}


def test_files_that_are_gone_are_not_committed(place):
    """Refuse missing files, because the version could not be read: the folder was made anew."""
    files = write_data_files(place, [sends(context(), ROWS)])
    table = delta_rs.open_table(place)
    shutil.rmtree(Path(place.root, "kind=send"))
    with pytest.raises(LedgerError, match=r"cannot commit .* is gone"):
        delta_rs.commit(place, table, files, "q", 0)
    by_delta_rs(place, "other", 0)
    assert rows_in(place) == {("other", 0): ROWS}


WRITE_VERSION = delta_rs.write_version
CONFLICT = CommitFailedError("\x1b[31mcommit\x1b[0m:\n  a conflict\n   0: the stack")


@pytest.mark.parametrize(
    ("errors", "meanwhile", "tries", "says"),
    [
        ([CONFLICT] * 2, "", 3, ""), ([CONFLICT] * 99, "", 10, "commit: a conflict"),
        ([DeltaError("the disk")] * 99, "", 1, "the disk"), ([OSError()] * 99, "", 1, "OSError"),
        ([CONFLICT], "deleted", 1, "commit: a conflict"),
        ([CONFLICT], "damaged", 1, "commit: a conflict. The ledger .* whether the rows are in"),
        ([CONFLICT], "made anew", 1, "commit: a conflict"),
        ([DeltaError("the answer is lost")], "committed", 1, ""),
        ([CONFLICT], "another has committed", 1, "another process has committed q 8"),
        ([CONFLICT], "an earlier one", 2, ""),
    ],
)  # fmt: skip
def test_a_commit_that_fails_is_tried_again_if_that_helps(
    place, monkeypatch, errors, meanwhile, tries, says
):
    files = write_data_files(place, [sends(context(query_id="q"), ROWS)])
    table = delta_rs.open_table(place)

    def act():
        if meanwhile in ("deleted", "made anew"):
            shutil.rmtree(place.root)
        if meanwhile == "damaged":
            Path(place.root, "_delta_log", f"{1:020}.json").write_text("{")
        if meanwhile == "made anew":
            Ledger(place.root).create(SPARK)
        versions = {"committed": 7, "another has committed": 8, "an earlier one": 6}
        if version := versions.get(meanwhile):
            add = delta_rs.add_actions(files if version == 7 else [], has_new_rows=True)
            WRITE_VERSION(DeltaTable(place.root), add, "q", version)

    remaining, calls = [*errors], []

    def write_or_fail(*arguments):
        calls.append(arguments)
        if len(calls) == 1:
            act()
        if remaining:
            raise remaining.pop()
        WRITE_VERSION(*arguments)

    monkeypatch.setattr(delta_rs, "write_version", write_or_fail)
    with refusal(place.uri, f": {says}$") if says else nullcontext():
        delta_rs.commit(place, table, files, "q", 7)
    assert len(calls) == tries
    if not says:
        assert rows_in(place) == {("q", 0): ROWS}


def test_the_rows_of_an_epoch_are_read_without_spark(place):
    for epoch in range(2):
        by_delta_rs(place, "q", epoch)
        by_delta_rs(place, "other", epoch)
    # Rows are numbered by the version that their commit makes.
    assert begin_append(SPARK, place).sequence == (DeltaTable(place.root).version() + 1) << 32
    of_epoch = (["send"], "q", 1, ["query_id", "epoch"], "All rows were sent. ")
    rows = rows_of_epoch(SPARK, place, *of_epoch)
    assert rows.to_pylist() == [{"query_id": "q", "epoch": 1}] * ROWS
    assert not rows_of_epoch(SPARK, place, ["epoch"], *of_epoch[1:])
    for file in Path(place.root, "kind=send").iterdir():
        file.unlink()
    with pytest.raises(LedgerError, match=r"^All rows were sent\. the ledger .* cannot be read"):
        rows_of_epoch(SPARK, place, *of_epoch)


@pytest.mark.parametrize(
    ("uri", "takes"),
    [
        ("/l", True), ("/l%20", False), ("/l#1", False), ("/l?", False), ("s3a://b/l", True),
        ("s3a://b/l%20", False), ("s3a://b/l#1", False), ("oss://b/l", False),
    ],
)  # fmt: skip
def test_paths_that_delta_rs_takes(uri, takes):
    is_local = uri.startswith("/")
    assert bool(delta_rs._takes(LedgerPath(uri, uri, is_local=is_local))) is takes


@pytest.mark.parametrize("problem", ["no keys", ""])
def test_a_store_that_cannot_be_read_gets_no_commit(monkeypatch, problem):
    def fail(_):
        raise OSError("no keys")

    monkeypatch.setattr(LedgerPath, "filesystem", fail)
    place = LedgerPath("s3a://b/k", "b/k", is_local=False, problem=problem)
    assert delta_rs.open_table(place) is None
    with refusal(place.uri, r"cannot be read now: no keys\. Nothing was appended$"):
        delta_rs.open_table(place, must=True)


@pytest.mark.parametrize(("kind", "looks"), [("NotFound", 2), ("Directory", 1)])
def test_a_store_is_asked_for_the_log_of_a_table_once(monkeypatch, kind, looks):
    place, tables, info = LedgerPath("s3a://b/k", "b/k", is_local=False), MagicMock(), MagicMock()
    info.return_value.type.name = kind
    monkeypatch.setattr(delta_rs, "_seen", set())
    monkeypatch.setattr(LedgerPath, "filesystem", lambda _: SimpleNamespace(get_file_info=info))
    monkeypatch.setattr("deltalake.DeltaTable", tables)
    protocol = tables.return_value.protocol.return_value
    protocol.min_reader_version, protocol.min_writer_version = 1, 2
    for _ in range(2):
        assert (delta_rs.open_table(place) is not None) == (looks == 1)
    assert info.call_count == looks
    if looks == 1:
        tables.assert_called_with("s3://b/k", storage_options=delta_rs._where(place)[1])


@pytest.mark.parametrize(
    ("added", "says"),
    [
        (None, "its log does not show the commit token. Another process"),
        (FileNotFoundError("gone"), "was deleted while a query wrote to it; rows of this append"),
    ],
)
def test_an_append_that_the_log_does_not_show(place, monkeypatch, added, says):
    append = begin_append(SPARK, place, token="token")

    def rows_of_commit(*_):
        if isinstance(added, Exception):
            raise added
        return added

    monkeypatch.setattr("rocket_sink.ledger.append.appender.rows_of_commit", rows_of_commit)
    with refusal(place.uri, says):
        append.save_rows([sends(context(), ROWS)])
    assert append.rows is None
    shutil.rmtree(place.root)
    with refusal(place.uri, "was deleted .*; nothing is sent or appended"):
        begin_append(SPARK, place)


@pytest.mark.parametrize("commits", [True, False])
def test_without_sparks_delta_a_store_has_no_table_of_its_own(monkeypatch, commits):
    """If delta-rs commits there, there is no table yet; else nobody can tell."""
    driver, place = session(), LedgerPath("s3a://b/k", "b/k", is_local=False)
    driver.conf.unset("spark.sql.extensions")
    monkeypatch.setattr(table_module, "open_direct", lambda *_: None)
    monkeypatch.setattr(table_module, "_allowed", {("app", place): commits})
    with nullcontext() if commits else refusal(place.uri, "needs Spark's Delta"):
        assert not is_table(driver, place)


@pytest.mark.parametrize(
    ("uri", "file", "below"),
    [
        ("s3a://b/l", "s3a://b/l/kind=send/x%20", ("kind=send/x ", "send")),
        ("s3a://b/l", "s3a://c/l/kind=send/x", ("/l/kind=send/x", "")),
        ("hdfs:/l", "hdfs://node:1/l/kind=send/x", ("kind=send/x", "send")),
        ("s3a://b/l", "x", ("x", "x")),
    ],
)
def test_files_below_a_table(uri, file, below):
    assert table_module._below(uri, file) == below


def test_how_spark_is_asked_for_rows(new, tmp_path, monkeypatch):
    place = resolve_path(shutil.copytree(new, tmp_path / "ledger"))
    driver, ledger, checks = session(), Ledger(place.root), []
    monkeypatch.setattr(table_module, "check_encoding", lambda *given: checks.append(given))
    driver.read = read = MagicMock()
    with monkeypatch.context() as without_delta:
        without_delta.setattr(table_module, "has_delta", lambda _: False)
        driver.createDataFrame = MagicMock()
        assert ledger.rows(driver) is driver.createDataFrame.return_value
        assert driver.createDataFrame.call_args.args[0] == [] and not read.mock_calls
    assert checks == [(driver, place.root)]
    by_delta_rs(place, "q", 0)
    load = read.format.return_value.load
    assert ledger.rows(driver) is load.return_value
    past = read.format.return_value.option.return_value.load
    names = [f"file:{host}{place.root}/kind=send/x.parquet" for host in ("", "//host")]
    past.return_value.inputFiles.return_value = names
    assert ledger.at(1).rows(driver) is past.return_value
    read.format.return_value.option.assert_called_once_with("versionAsOf", 1)
    past.return_value.inputFiles.return_value = ["file:/etc/kind=send/x.parquet"]
    with pytest.raises(LedgerError, match="no rocket-sink wrote"):
        ledger.at(1).rows(driver)
    with monkeypatch.context() as by_spark_alone:
        for name in ("open_direct", "check_table"):
            by_spark_alone.setattr(table_module, name, lambda *_: None)
        load.return_value.inputFiles.return_value = ["file:/etc/kind=send/x.parquet"]
        with pytest.raises(LedgerError, match="no rocket-sink wrote"):
            ledger.rows(driver)
    # A session without Delta reads the files that delta-rs names, of the newest version only.
    driver.conf.unset("spark.sql.extensions")
    ledger.rows(driver)
    with_base = read.schema.return_value.option
    with_base.assert_called_once_with("basePath", place.uri)
    (file,) = DeltaTable(place.root).file_uris()
    with_base.return_value.parquet.assert_called_once_with(f"file:{file}")
    with_base.return_value.parquet.return_value.select.assert_called_once_with(*LEDGER_SCHEMA.names)
    with refusal(place.uri, "needs Spark's Delta"):
        ledger.at(1).rows(driver)
    driver.conf.set("spark.sql.extensions", "io.delta.sql.DeltaSparkSessionExtension")
    forge(place.root, "/etc/kind=send/x.parquet")
    with pytest.raises(LedgerError, match="no rocket-sink wrote"):
        ledger.rows(driver)


COMMIT = {"userMetadata": "token", "operationMetrics": {"numOutputRows": "7"}}


@pytest.mark.parametrize(
    ("newest", "history", "result"),
    [
        (3, [], "the log ends before the version 4"), (4, [], None), (6, [{}, COMMIT], 7),
        (6, [{}, {}], None), (6, [{}], "the log no longer has the version 5"),
        (6, [{}, {**COMMIT, "operationMetrics": {}}], "does not tell how many rows"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("is_classic", [True, False])
def test_the_rows_of_a_commit_are_in_deltas_history(
    monkeypatch, newest, history, result, is_classic
):
    """Ask Spark's Delta on Spark Connect, and if pyarrow does not reach the store."""
    place = LedgerPath("s3a://b/k", "b/k", is_local=False, problem="no keys" * is_classic)
    rows = [SimpleNamespace(**{"userMetadata": None, **commit}) for commit in history]
    delta, driver = MagicMock(), session() if is_classic else SimpleNamespace()
    delta.return_value.forPath.return_value.history.return_value.collect.return_value = rows
    monkeypatch.setattr(table_module, "_delta_table", delta)
    monkeypatch.setattr(table_module, "table_version", lambda *_: newest)
    monkeypatch.setattr(table_module, "reading", lambda _: nullcontext())
    monkeypatch.setattr(table_module, "added_rows", None)
    if isinstance(result, str):
        error = LedgerError if "rows" in result else FileNotFoundError
        with pytest.raises(error, match=result):
            table_module.rows_of_commit(driver, place, "token", 4)
    else:
        assert table_module.rows_of_commit(driver, place, "token", 4) == result
    if newest == 6:
        delta().forPath.assert_called_once_with(driver, place.uri)
        delta().forPath().history.assert_called_once_with(2)


@pytest.mark.parametrize(
    ("master", "has"),
    [("local", False), ("local[2]", False), ("local-cluster[2,1,1024]", True), ("yarn", True)],
)
def test_executors_prove_a_ledger_once(tmp_path, monkeypatch, master, has):
    jobs = []

    def parallelize(numbers, count):
        jobs.append((len(numbers), count))
        return SimpleNamespace(foreachPartition=lambda check: [check(n) for n in numbers])

    driver = session()
    driver.sparkContext.master, driver.sparkContext.parallelize = master, parallelize
    monkeypatch.setattr(table_module, "_proved", set())
    place = resolve_path(tmp_path / "ledger")
    assert table_module.has_executors(driver) == has
    for slots in (1, 1, 5):
        driver.sparkContext.defaultParallelism = slots
        driver.sparkContext.applicationId = f"app-{slots}"
        table_module.prove_executors(driver, place)
    assert jobs == ([(2, 2), (5, 5)] if has else [])
    shutil.rmtree(place.root, ignore_errors=True)  # A ledger that is made anew is another one.
    for _ in range(2):
        table_module.prove_executors(driver, place)
    assert jobs[2:] == ([(5, 5)] if has else [])


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (FileNotFoundError("x"), "are gone or damaged"), (pa.ArrowInvalid("x"), "gone or damaged"),
        (OSError("Object not found"), "gone or damaged"), (OSError("a disk"), "read now: a disk"),
    ],
)  # fmt: skip
def test_what_an_error_of_a_read_says(place, monkeypatch, error, says):
    table = delta_rs.open_table(place)

    def fail(*_):
        raise error

    monkeypatch.setattr(delta_rs, "as_dataset", fail)
    with refusal(table.table_uri, f"^All sent. the ledger .*{says}"):
        delta_rs.selected_rows(table, None, [], "All sent. ")
    stand_in = SimpleNamespace(transaction_version=fail)
    if isinstance(error, OSError):
        with refusal(place.uri, "cannot be read now"):
            delta_rs.last_version(place, stand_in, "q")
    error = OSError("y" * 999)
    with pytest.raises(LedgerError, match=r"read now: y{400}$"):
        delta_rs.last_version(place, stand_in, "q")
    error = KeyError("a defect")
    with pytest.raises(KeyError):
        delta_rs.selected_rows(table, None, [])


@pytest.mark.parametrize(
    ("stats", "rows"),
    [('{"numRecords": 5}', 5), ('{"numRecords": 0}', 0), ("{}", None), ("", None)],
)
def test_the_rows_that_a_commit_has_added(place, stats, rows):
    """The commits after a version are read, the newest first. Without the number of its rows a
    commit proves nothing."""
    log, actions = Path(place.root, "_delta_log"), [{"commitInfo": {"userMetadata": "token"}}]
    actions += [{"add": {"stats": stats}}, {"add": {"stats": '{"numRecords": 2}'}}, {"remove": {}}]
    (log / f"{5:020}.json").write_text("\n".join(map(json.dumps, actions)))
    (log / f"{6:020}.json").write_text(json.dumps({"commitInfo": {"userMetadata": "other"}}))
    if rows is None:
        with refusal(place.uri, r"stats\.collect .* at their default"):
            delta_rs.added_rows(place, "token", 4, 6)
    else:
        assert delta_rs.added_rows(place, "token", 4, 6) == rows + 2
    assert delta_rs.added_rows(place, "token", 5, 6) is None
    with pytest.raises(FileNotFoundError, match="no longer has the version 4"):
        delta_rs.added_rows(place, "none", 3, 6)
    (log / f"{6:020}.json").unlink()
    (log / f"{6:020}.json").mkdir()
    with pytest.raises(LedgerError, match="cannot be read now"):
        delta_rs.added_rows(place, "token", 4, 6)


def test_a_delta_rs_that_drops_transactions_commits_nothing(place, monkeypatch):
    import deltalake

    monkeypatch.setattr(deltalake, "__version__", "1.5.1")
    storage.keeps_transactions.cache_clear()
    try:
        assert delta_rs.open_table(place) is None
    finally:
        storage.keeps_transactions.cache_clear()


def test_the_files_of_a_failed_attempt_go(tmp_path):
    def rows():
        yield sends(context(), ROWS)
        assert list(tmp_path.rglob("*.parquet"))
        raise KeyError("the task failed")

    with pytest.raises(KeyError):
        write_data_files(resolve_path(tmp_path), rows())
    assert not list(tmp_path.rglob("*.parquet"))


def test_a_folder_that_cannot_be_written_is_one_clear_error(place):
    Path(place.root, "kind=send").write_text("in the folder's place")
    with pytest.raises(LedgerError, match="cannot write data files of the ledger"):
        by_delta_rs(place, "q", 0)
    rows = [sends(context(), ROWS)]
    append = begin_append(SPARK, place, "q", 0)
    with pytest.raises(LedgerError, match=r"^cannot write data files of the ledger") as caught:
        append.save(append.made_by_tasks(SPARK.range(1), lambda _: iter(rows)))
    assert "\n" not in str(caught.value)
    assert rows_in(place) == {}
    shutil.rmtree(place.root)
    with pytest.raises(LedgerError, match="cannot write data files of the ledger"):
        write_data_files(place, rows)
    assert not Path(place.root).exists(), "a ledger that was deleted does not come back"


def files_of(root, *batches):
    return {file.kind: file for file in write_data_files(resolve_path(root), batches)}


def test_statistics_are_those_of_all_rows(tmp_path, monkeypatch):
    file = files_of(tmp_path, *[letter(context(), bytes(40_000))] * 2)["dead_letter"]
    assert pq.ParquetFile(tmp_path / file.path).num_row_groups == 1
    assert pq.read_metadata(tmp_path / file.path).metadata is None, "no schema of Arrow's"
    monkeypatch.setattr(data_files, "_GROUP_BYTES", 1)  # A batch becomes a row group.
    at = pa.array([1_700_000_000_123_456] * 2, LEDGER_SCHEMA.field("at").type)
    batches = [
        replaced(sends(context(epoch=epoch, query_id=f"q{epoch}"), 2), {"at": at})
        for epoch in (5, 3, 9)
    ]
    mixed = pa.Table.from_batches([*batches, letter(context(), body=b"x")]).combine_chunks()
    files = files_of(tmp_path, *mixed.to_batches(), accounts(context(), acked=1))
    assert {kind: file.rows for kind, file in files.items()} == {
        "send": 6, "dead_letter": 1, "epoch": 1,
    }  # fmt: skip
    file = files_of(tmp_path, *batches)["send"]
    assert pq.ParquetFile(tmp_path / file.path).num_row_groups == len(batches)
    stats = json.loads(file.stats)
    assert stats["numRecords"] == 6
    assert (stats["minValues"]["epoch"], stats["maxValues"]["epoch"]) == (3, 9)
    assert (stats["minValues"]["query_id"], stats["maxValues"]["query_id"]) == ("q3", "q9")
    # Spark's own statistics are cut to milliseconds, so a reader would skip rows.
    assert stats["minValues"]["at"] == stats["maxValues"]["at"] == "2023-11-14T22:13:20.123456Z"
    assert stats["nullCount"] == {name: 6 * (name == "letter_id") for name in STATS_COLUMNS}
    assert "letter_id" not in stats["minValues"]
    # Parquet keeps no bounds of long texts, so a reader must not skip them.
    longest = letter(context(query_id="z" * 10_000))
    stats = json.loads(files_of(tmp_path, longest, letter(context()))["dead_letter"].stats)
    assert "query_id" not in stats["minValues"] and "query_id" not in stats["maxValues"]
    assert stats["minValues"]["epoch"] == 0


def test_a_commit_that_another_one_replaces_is_refused(place, tmp_path, monkeypatch):
    """Spark's Delta looks for the version's file, and then renames its own. Its rename comes in
    between the commit and the look for it, so the append may be made again."""
    other = resolve_path(shutil.copytree(place.root, tmp_path / "other"))
    by_delta_rs(other, "spark", 0)

    def write_and_lose(*arguments):
        WRITE_VERSION(*arguments)
        shutil.copytree(other.root, place.root, dirs_exist_ok=True)

    with monkeypatch.context() as patched:
        patched.setattr(delta_rs, "write_version", write_and_lose)
        with refusal(place.uri, "its log does not show the commit .*, or has overwritten this"):
            by_delta_rs(place, "q", 0)
    assert rows_in(place) == {("spark", 0): ROWS}
    by_delta_rs(place, "q", 0)
    assert rows_in(place) == {("spark", 0): ROWS, ("q", 0): ROWS}


WRITER = """
    import sys
    from tests.ledger.test_append import by_delta_rs
    from rocket_sink.ledger.path import resolve_path

    for version in range(30):
        by_delta_rs(resolve_path(sys.argv[1]), sys.argv[2], version)
"""


def test_processes_that_append_at_once_lose_nothing(place):
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(WRITER), place.root, name], env=environment
        )
        for name in ("w0", "w1")
    ]
    try:
        for version in range(6):
            by_delta_rs(place, "driver", version)
        assert [writer.wait(timeout=300) for writer in writers] == [0, 0]
    finally:
        for writer in writers:
            writer.kill()
    wanted = {("driver", version): ROWS for version in range(6)}
    wanted |= {(query, version): ROWS for query in ("w0", "w1") for version in range(30)}
    assert rows_in(place) == wanted
