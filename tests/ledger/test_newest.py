"""The newest version of the table, which a process keeps and brings up to date.

A second writer commits, deletes or remakes the table at chosen moments.
"""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from rocket_sink.errors import LedgerError
from rocket_sink.ledger.append import delta_rs
from rocket_sink.ledger.append.delta_rs import commit, create_table, last_version
from rocket_sink.ledger.append.delta_rs import newest_for_readers as newest
from rocket_sink.ledger.append.table import PROPERTIES, is_table
from rocket_sink.ledger.path import LedgerPath, resolve_path
from rocket_sink.ledger.query.duckdb_reader import open_quick
from rocket_sink.ledger.schema import COLUMNS
from rocket_sink.ledger.transport.data_files import write_data_files

from .values import context, sends

CLASSIC: Any = SimpleNamespace(_jsparkSession=1)
"""A session of which nothing may be asked."""


def make(place: LedgerPath, commits: int) -> None:
    schema = pa.schema([pa.field(c.name, c.arrow_type) for c in COLUMNS])
    assert create_table(place, schema, PROPERTIES)
    for number in range(commits):
        append(place, number)


def append(place: LedgerPath, number: int) -> None:
    table = delta_rs.open_table(place)
    assert table is not None
    commit(place, table, write_data_files(place, [sends(context())]), "fold", number)


@pytest.fixture
def place(tmp_path):
    place = resolve_path(tmp_path / "ledger")
    make(place, 3)
    return place


def number_of(place: LedgerPath) -> int | None:
    table = newest(place)
    assert table is not None
    return last_version(place, table, "fold")


@pytest.mark.parametrize("moment", ["opened", "updated"])
def test_a_commit_while_the_table_is_opened_is_not_missed(place, monkeypatch, moment):
    """Let another writer commit just before the last commit of the table is looked up."""
    look = delta_rs._last_commit
    if moment == "updated":
        assert number_of(place) == 2

    def look_late(*arguments: object) -> object:
        monkeypatch.setattr(delta_rs, "_last_commit", look)
        append(place, 3)
        return look(*arguments)  # type: ignore[arg-type]

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
