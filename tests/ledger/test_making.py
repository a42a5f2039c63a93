"""The making of the table by several queries at once, and its newest version, which a process keeps
and brings up to date while a second writer commits, deletes or remakes the table.
"""

import json
import os
import shutil
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock, call

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from rocket_sink.errors import LedgerError
from rocket_sink.ledger.append import delta_rs
from rocket_sink.ledger.append import table as table_module
from rocket_sink.ledger.append.delta_rs import commit, create_table, last_version
from rocket_sink.ledger.append.delta_rs import newest_for_readers as newest
from rocket_sink.ledger.append.table import PROPERTIES, is_table
from rocket_sink.ledger.driver.ledger import Ledger
from rocket_sink.ledger.path import LedgerPath, resolve_path
from rocket_sink.ledger.query.duckdb_reader import open_quick
from rocket_sink.ledger.schema import COLUMNS, LEDGER_SCHEMA, SCHEMA_VERSION, VERSION_PROPERTY
from rocket_sink.ledger.transport.data_files import write_data_files

from .values import context, refusal, sends, session

SPARK = session()
"""A session whose tables delta-rs makes."""
FIRST = f"{0:020}.json"
ROUNDS = 3
WRITERS = 4


def check_made(path, rows):
    table = DeltaTable(path)
    assert table.metadata().configuration[VERSION_PROPERTY] == str(SCHEMA_VERSION)
    assert table.to_pyarrow_dataset().count_rows() == rows


def at_once(count, work):
    """Run `work` in threads that start together. Raise the error of a thread that failed."""
    start = threading.Barrier(count)

    def run(_):
        start.wait(60)
        work()

    with ThreadPoolExecutor(count) as threads:
        list(threads.map(run, range(count)))


@pytest.fixture
def by_spark(monkeypatch):
    """Let Spark make tables, as on a store to which delta-rs does not commit."""
    monkeypatch.setattr(table_module, "create_table", lambda *given: False)


@pytest.mark.parametrize(
    "maker",
    ["delta-rs", "without a lock", pytest.param("Spark's Delta", marks=pytest.mark.spark)],
)
def test_queries_that_start_at_once_on_a_new_ledger_all_write(
    tmp_path, request, monkeypatch, maker
):
    """Where no lock can be had, the table is read again."""
    by_spark, driver = maker == "Spark's Delta", SPARK
    if by_spark:
        request.getfixturevalue("by_spark")
        driver = request.getfixturevalue("spark")
    if maker == "without a lock":
        monkeypatch.setattr(table_module, "ledger_lock", lambda *_, **__: nullcontext())
    for number in range(ROUNDS):
        path, ids = tmp_path / str(number), set[str]()

        def work(path=path, ids=ids):
            ledger = Ledger(path)
            ids.add(ledger.create(driver))
            ledger.append(driver, sends(context(), 2))

        at_once(WRITERS, work)
        assert len(ids) == 1
        check_made(path, 2 * WRITERS)
        # The version is set once: another change would fail an append that is under way.
        changes = [entry for entry in DeltaTable(path).history() if "SET" in entry["operation"]]
        assert len(changes) == by_spark


def test_of_tables_that_are_made_at_once_one_is_made(tmp_path):
    """Make one table without a lock: its holder may be on a host whose locks are not seen here."""
    schema = pa.schema([("kind", pa.string()), ("epoch", pa.int64())])
    for number in range(10 * ROUNDS):
        path, results = tmp_path / str(number), list[bool]()
        place = resolve_path(path)
        at_once(
            WRITERS, lambda place=place, made=results: made.append(create_table(place, schema, {}))
        )
        assert sorted(results) == [False] * (WRITERS - 1) + [True]
        assert DeltaTable(path).version() == 0


@pytest.mark.parametrize(
    ("error", "name", "says"),
    [(None, FIRST, ""), (OSError("no"), FIRST, ""), (OSError("no"), "x", "commit to it: no")],
)
def test_a_try_of_a_commit_leaves_nothing(tmp_path, monkeypatch, error, name, says):
    """If the answer to a commit is lost, its repetition is refused, and the log is there."""
    place = resolve_path(tmp_path)

    def create(place, folder):
        (tmp_path / folder / "_delta_log").mkdir(parents=True)
        (tmp_path / folder / "_delta_log" / name).touch()
        return error

    monkeypatch.setattr(delta_rs, "create_first_commit", create)
    with refusal(place.uri, says) if says else nullcontext():
        delta_rs.try_commit(place)
        assert not list(tmp_path.glob("_tries/*"))


@pytest.mark.spark
def test_delta_rs_makes_the_table_that_sparks_delta_would_make(spark, tmp_path, monkeypatch):
    for name in ("rust", "spark"):
        Ledger(tmp_path / name).create(spark)
        monkeypatch.setattr(table_module, "create_table", lambda *given: False)
    rust, other = DeltaTable(tmp_path / "rust"), DeltaTable(tmp_path / "spark")
    assert (rust.version(), other.version()) == (0, 1)
    assert rust.schema() == other.schema() and rust.protocol() == other.protocol()
    for part in ("configuration", "partition_columns"):
        assert getattr(rust.metadata(), part) == getattr(other.metadata(), part)
    frames = [spark.read.format("delta").load(str(tmp_path / name)) for name in ("rust", "spark")]
    assert frames[0].schema == frames[1].schema
    assert [f.metadata for f in frames[0].schema] == [f.metadata for f in frames[1].schema]


CONFLICT = RuntimeError("io.delta.exceptions.ConcurrentWriteException")
OTHER = RuntimeError("the disk\n\tat java.Stack")


@pytest.mark.parametrize(
    ("error", "is_made", "refusals", "tries", "says"),
    [
        (None, True, [], 1, ""), (CONFLICT, True, [], 1, ""), (OTHER, True, [], 1, ""),
        (CONFLICT, False, [], 0, "there is no ledger"),
        (OTHER, False, [], 0, "cannot make the ledger table at .*: the disk. The session needs"),
        (None, True, [CONFLICT] * 9, 10, ""), (None, True, [CONFLICT] * 10, 10, "ConcurrentWrite"),
        (None, True, [OTHER], 1, "the disk"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("by_spark")
def test_how_sparks_delta_makes_a_table(
    tmp_path, monkeypatch, error, is_made, refusals, tries, says
):
    """Spark's Delta sets the version by a second commit, which may conflict with others."""
    place, pauses_s = resolve_path(tmp_path / "a`b"), []
    monkeypatch.setattr("tenacity.nap.time", SimpleNamespace(sleep=pauses_s.append))
    driver = session()
    driver.createDataFrame, driver.read, driver.sql = MagicMock(), MagicMock(), MagicMock()
    driver.read.format.return_value.load.return_value.columns = LEDGER_SCHEMA.names

    def save(uri):
        assert uri == place.uri
        if is_made:
            create_table(place, LEDGER_SCHEMA, PROPERTIES)
        if error:
            raise error

    writer = driver.createDataFrame.return_value.write.format("delta").mode("append")
    writer.options(**PROPERTIES).partitionBy("kind").save = save
    driver.sql.side_effect = [*refusals, None]
    with pytest.raises((LedgerError, RuntimeError), match=says) if says else nullcontext():
        assert Ledger(place.root).create(driver) == str(DeltaTable(place.root).metadata().id)
    writer.options.return_value.partitionBy.assert_called_with("kind")
    setting = f"SET TBLPROPERTIES ('{VERSION_PROPERTY}' = '{SCHEMA_VERSION}')"
    uri = place.uri.replace("a`b", "a``b")
    assert driver.sql.call_args_list == [call(f"ALTER TABLE delta.`{uri}` {setting}")] * tries
    assert len(pauses_s) == max(tries - 1, 0) and all(0 <= pause_s <= 0.5 for pause_s in pauses_s)
    rows, schema = driver.createDataFrame.call_args.args
    fields = [(field.name, field.metadata["comment"]) for field in schema]
    assert rows == [] and fields == [(column.name, column.comment) for column in COLUMNS]


@pytest.mark.parametrize("version", [str(SCHEMA_VERSION), None])
def test_what_sparks_delta_says_of_a_table(tmp_path, monkeypatch, version):
    """The driver asks Delta's log; a client of Spark Connect has Delta's public functions only."""
    with monkeypatch.context() as missing:
        missing.setitem(sys.modules, "delta.tables", None)
        with pytest.raises(LedgerError, match="delta-spark is missing"):
            table_module._delta_table()
    place = resolve_path(tmp_path)
    make(place, 0)
    for access in (table_module.open_direct, table_module.open_for_commits):
        assert access(SPARK, place) and access(SimpleNamespace(), place) is None
    driver, client, delta = session(), SimpleNamespace(), MagicMock()
    properties = {VERSION_PROPERTY: version} if version else {}

    def option(values):
        return lambda name: SimpleNamespace(
            isDefined=lambda: name in values, get=lambda: values[name]
        )

    driver._jvm, driver.read, client.read = MagicMock(), MagicMock(), MagicMock()
    snapshots = driver._jvm.org.apache.spark.sql.delta.DeltaLog.forTableWithSnapshot
    snapshot = snapshots.return_value._2.return_value
    snapshot.version.return_value = 4
    snapshot.transactions.return_value.get = option({"q": 7})
    snapshot.metadata.return_value.id.return_value = "id"
    snapshot.metadata.return_value.configuration.return_value.get = option(properties)
    delta.forPath.return_value.history.return_value.head.return_value = {"version": 4}
    detail = delta.forPath.return_value.detail.return_value.select.return_value.head
    detail.return_value = {"id": "id", "properties": properties}
    monkeypatch.setattr(table_module, "open_direct", lambda *_: None)
    monkeypatch.setattr(table_module, "_delta_table", lambda: delta)
    for each in (driver, client):
        each.read.format.return_value.load.return_value.columns = LEDGER_SCHEMA.names
        assert table_module.table_version(each, place) == 4
        assert table_module.check_table(each, place) == "id"
        each.read.format.return_value.load.return_value.columns = ["price"]
        with nullcontext() if version else refusal(place.uri, "is not a ledger of rocket-sink"):
            table_module.check_table(each, place)
    versions = [table_module.last_txn_version(driver, place, name) for name in ("q", "other")]
    assert versions == [7, None]
    snapshots.assert_called_with(driver._jsparkSession, place.uri)
    delta.forPath.assert_called_with(client, place.uri)
    delta.forPath.return_value.history.assert_called_once_with(1)
    delta.isDeltaTable.assert_called_with(client, place.uri)
    with pytest.raises(LedgerError, match="a Spark Connect session cannot ask Delta"):
        table_module.last_txn_version(client, place, "q")
    assert is_table(driver, LedgerPath("s3a://b/k", "b/k", is_local=False))
    delta.isDeltaTable.return_value = False
    assert table_module.last_txn_version(client, place, "q") is None
    with refusal(place.uri, "there is no ledger"):
        table_module.check_table(client, place)


CLASSIC = SimpleNamespace(_jsparkSession=1)
"""A session of which nothing may be asked."""


def make(place, commits):
    assert create_table(place, LEDGER_SCHEMA, PROPERTIES)
    for number in range(commits):
        append(place, number)


def append(place, number):
    table = delta_rs.open_table(place)
    commit(place, table, write_data_files(place, [sends(context())]), "fold", number)


@pytest.fixture
def place(tmp_path):
    place = resolve_path(tmp_path / "ledger")
    make(place, 3)
    return place


def number_of(place):
    table = newest(place)
    assert newest(place) is table, "the process keeps the table"
    return last_version(place, table, "fold")


@pytest.mark.parametrize(
    ("error", "caught"), [(DeltaError("x"), True), (OSError(), True), (KeyError(), False)]
)
def test_a_table_that_cannot_be_updated_is_opened_again(place, error, caught):
    def fail():
        raise error

    kept = SimpleNamespace(version=lambda: 3, update_incremental=fail)
    delta_rs._opened[os.getpid(), place] = delta_rs._last_commit(place, kept), kept
    with nullcontext() if caught else pytest.raises(KeyError):
        assert newest(place).version() == 3


@pytest.mark.parametrize("moment", ["opened", "updated"])
def test_a_commit_while_the_table_is_opened_is_not_missed(place, monkeypatch, moment):
    """Let another writer commit just before the last commit of the table is looked up."""
    look = delta_rs._last_commit
    if moment == "updated":
        assert number_of(place) == 2

    def look_late(*arguments):
        monkeypatch.setattr(delta_rs, "_last_commit", look)
        append(place, 3)
        return look(*arguments)

    monkeypatch.setattr(delta_rs, "_last_commit", look_late)
    newest(place)
    for number in range(3, 6):
        assert number_of(place) == number
        append(place, number + 1)


@pytest.mark.parametrize("commits", [0, 3, 9])
def test_a_table_that_was_made_anew_is_another_one(place, commits):
    """The new log may be shorter than the old one, as long, or longer."""
    assert number_of(place) == 2
    shutil.rmtree(place.root)
    assert newest(place) is None
    make(place, commits)
    table = newest(place)
    assert table is not None and table.version() == commits
    assert table.metadata().id == DeltaTable(place.root).metadata().id
    shutil.rmtree(place.root)
    make(place, 12)
    assert number_of(place) == 11


def test_a_table_that_only_sparks_delta_may_use_any_more_is_not_read(place):
    from deltalake import TableFeatures

    assert newest(place) is not None
    table = DeltaTable(place.root)
    table.alter.add_feature(TableFeatures.ChangeDataFeed, allow_protocol_versions_increase=True)
    assert newest(place) is None and delta_rs.open_table(place) is None
    assert is_table(CLASSIC, place), "its log says so, without a question to Spark's Delta"


@pytest.mark.parametrize(
    ("reader", "writer", "is_plain"), [(1, 1, True), (1, 2, True), (1, 3, False), (2, 2, False)]
)
def test_other_versions_of_deltas_protocol_are_sparks(place, reader, writer, is_plain):
    """From version 3 on, writers check constraints; from a reader's 2 on, columns are renamed."""
    log = Path(place.root, "_delta_log", f"{4:020}.json")
    protocol = {"minReaderVersion": reader, "minWriterVersion": writer}
    log.write_text(json.dumps({"protocol": protocol}))
    assert (delta_rs.open_table(place) is not None) == is_plain


def test_a_table_that_is_being_made_is_no_damaged_one(tmp_path):
    """A reader may come between the folder of the log and its first commit."""
    place = resolve_path(tmp_path / "ledger")
    (tmp_path / "ledger" / "_delta_log").mkdir(parents=True)
    assert newest(place) is None and not is_table(CLASSIC, place)
    assert open_quick(place.root) is None
    (tmp_path / "ledger" / "kind=send").mkdir()
    with pytest.raises(LedgerError, match="no commit"):
        open_quick(place.root)
