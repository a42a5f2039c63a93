"""The making of the table by several queries at once, and with a damaged log.

delta-rs judges the contents of the table.
"""

import contextlib
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from rocket_sink.errors import LedgerError
from rocket_sink.ledger.append import table as table_module
from rocket_sink.ledger.append.delta_rs import create_table
from rocket_sink.ledger.append.table import check_not_ahead
from rocket_sink.ledger.driver.ledger import Ledger
from rocket_sink.ledger.path import resolve_path
from rocket_sink.ledger.schema import SCHEMA_VERSION, VERSION_PROPERTY

from .values import context, sends, session

SPARK = session()
"""A session whose tables delta-rs makes."""
ROUNDS = 3
WRITERS = 4


def check_made(path: Path, rows: int) -> None:
    table = DeltaTable(path)
    assert table.metadata().configuration[VERSION_PROPERTY] == str(SCHEMA_VERSION)
    assert table.to_pyarrow_dataset().count_rows() == rows


def at_once(count: int, work: Any) -> None:
    """Run `work` in threads that start together. Raise the error of a thread that failed."""
    start = threading.Barrier(count)

    def run(_: int) -> None:
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
        monkeypatch.setattr(table_module, "ledger_lock", lambda *_, **__: contextlib.nullcontext())
    for number in range(ROUNDS):
        path, ids = tmp_path / str(number), set[str]()

        def work(path: Path = path, ids: set[str] = ids) -> None:
            ledger = Ledger(path)
            ids.add(ledger.create(driver))
            ledger.append(driver, sends(context(), 2))

        at_once(WRITERS, work)
        assert len(ids) == 1
        check_made(path, 2 * WRITERS)
        # The version is set once: another change would fail an append that is under way.
        changes = [entry for entry in DeltaTable(path).history() if "SET" in entry["operation"]]
        assert len(changes) == by_spark


@pytest.mark.spark
@pytest.mark.usefixtures("by_spark")
def test_a_ledger_that_is_just_being_made_is_read(spark, tmp_path, monkeypatch):
    """Read a table between the two commits of its making by Spark's Delta."""
    ledger = Ledger(tmp_path)
    with monkeypatch.context() as stopped:
        stopped.setattr(table_module, "_set_version", lambda spark, place: None)
        ledger.create(spark)
    assert ledger.epochs(spark).count() == ledger.rows(spark).count() == 0
    assert VERSION_PROPERTY not in DeltaTable(tmp_path).metadata().configuration
    ledger.append(spark, sends(context(), 2))
    check_made(tmp_path, 2)


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


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return a ledger with more than two commits."""
    folder = tmp_path_factory.mktemp("whole")
    for _ in range(2):
        Ledger(folder).append(SPARK, sends(context(), 2))
    return folder


@pytest.mark.parametrize("damage", ["cut", "nonsense", "missing"])
def test_a_damaged_delta_log_is_one_clear_error(whole, tmp_path, damage):
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    ledger = Ledger(tmp_path)
    log = tmp_path / "_delta_log"
    newest, first = max(log.glob("*.json")), min(log.glob("*.json"))
    if damage == "missing":
        first.unlink()
    else:
        data = newest.read_bytes()
        newest.write_bytes(data[: len(data) // 2] if damage == "cut" else b"\0" * 99)
    for use in (
        lambda: ledger.create(SPARK),
        lambda: ledger.rows(SPARK),
        lambda: ledger.epochs(SPARK),
        lambda: ledger.optimize(SPARK),
        lambda: ledger.append(SPARK, sends(context(), 1)),
        lambda: check_not_ahead(SPARK, resolve_path(tmp_path), "query", 0),
    ):
        with pytest.raises(LedgerError, match="backup") as caught:
            use()
        assert caught.value.path == resolve_path(tmp_path).uri
