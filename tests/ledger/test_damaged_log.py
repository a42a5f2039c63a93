"""A damaged checkpoint of the table's log: the error names the remedy, and nothing is sent."""

import json
import os
import re
import shutil
import threading
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from rocket_sink import RocketSink
from rocket_sink.errors import LedgerError
from rocket_sink.ledger.append import appender, delta_rs
from rocket_sink.ledger.append import table as table_module
from rocket_sink.ledger.append.table import check_not_ahead
from rocket_sink.ledger.driver.ledger import Ledger
from rocket_sink.ledger.path import LOG_FOLDER, LedgerPath, resolve_path
from rocket_sink.ledger.transport.data_files import write_data_files
from rocket_sink.testing import Delay
from tests.clusters import scripted_cluster

from . import values
from .night import store
from .values import context, sends

COMMITS = 12
CHECKPOINT = f"{10:020}.checkpoint.parquet"
HINT = "_last_checkpoint"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return a ledger whose log has a checkpoint and later commits."""
    folder = tmp_path_factory.mktemp("whole")
    for epoch in range(COMMITS):
        store(folder, [sends(context(epoch=epoch), 1)])
    DeltaTable(folder, version=10).create_checkpoint()
    assert (folder / LOG_FOLDER / CHECKPOINT).exists()
    return folder


def cut(log, size=200):
    os.truncate(log / CHECKPOINT, size)


def flip(log):
    data = bytearray((log / CHECKPOINT).read_bytes())
    middle = len(data) // 2
    data[middle : middle + 40] = bytes(byte ^ 0xFF for byte in data[middle : middle + 40])
    (log / CHECKPOINT).write_bytes(data)


def name_another(log):
    hint = json.loads((log / HINT).read_text())
    (log / HINT).write_text(json.dumps({**hint, "version": 11}))


@pytest.mark.parametrize("damage", [cut, partial(cut, size=0), flip, name_another])
def test_the_files_to_delete_are_named(whole, tmp_path, damage):
    ledger = shutil.copytree(whole, tmp_path / "ledger")
    damage(ledger / LOG_FOLDER)
    with pytest.raises(LedgerError, match="a copy of the log without that could be read") as caught:
        delta_rs.open_table(resolve_path(ledger))
    named = re.findall(rf"{ledger}/{LOG_FOLDER}/\S*?(?=:| and )", str(caught.value))
    assert 1 <= len(named) <= 2
    for path in named:
        Path(path).unlink()
    assert DeltaTable(ledger).to_pyarrow_table().num_rows == COMMITS


def test_a_checkpoint_whose_commits_are_gone_is_not_to_be_deleted(whole, tmp_path):
    ledger = shutil.copytree(whole, tmp_path / "ledger")
    cut(ledger / LOG_FOLDER)
    (ledger / LOG_FOLDER / f"{0:020}.json").unlink()
    with pytest.raises(LedgerError, match="from a backup") as caught:
        delta_rs.open_table(resolve_path(ledger))
    assert "Delete" not in str(caught.value)


def test_a_log_that_another_look_finds_sound_is_not_damaged(whole, monkeypatch):
    for must in (False, True):
        looks = MagicMock(side_effect=[DeltaError("a moment"), None])
        monkeypatch.setattr("deltalake.DeltaTable", looks)
        with values.refusal(f"file:{whole}", "read now: a moment") if must else nullcontext():
            assert delta_rs.open_table(resolve_path(whole), must=must) is None


@pytest.mark.parametrize("damage", ["cut", "nonsense", "missing"])
def test_a_damaged_delta_log_is_one_clear_error(whole, tmp_path, damage):
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    ledger, driver = Ledger(tmp_path), values.session()
    newest = max((tmp_path / LOG_FOLDER).glob("*.json"))
    if damage == "missing":
        (newest.parent / f"{COMMITS - 1:020}.json").unlink()
    else:
        data = newest.read_bytes()
        newest.write_bytes(data[: len(data) // 2] if damage == "cut" else b"\0" * 99)
    for use, *arguments in (
        (ledger.create,), (ledger.rows,), (ledger.epochs,), (ledger.optimize,),
        (ledger.append, sends(context(), 1)), (check_not_ahead, resolve_path(tmp_path), "query", 0),
    ):  # fmt: skip
        with values.refusal(ledger.uri, "backup"):
            use(driver, *arguments)


cluster = scripted_cluster(1, t=4)


@pytest.fixture
def options(cluster, tmp_path):
    """Return the options of a sink."""
    ledger = str(tmp_path / "ledger")
    return {"nameServer": cluster.name_server, "topic": "t", "ledger": ledger, "appId": "nightly"}


@pytest.fixture
def frame(spark):
    return spark.range(0, 10, 1, 1).selectExpr("CAST(id AS STRING) AS body")


@pytest.mark.spark
@pytest.mark.parametrize("reader", ["delta-rs", "Spark's Delta"])
def test_nothing_is_sent_with_a_damaged_log(
    whole, tmp_path, monkeypatch, cluster, options, frame, reader
):
    if reader != "delta-rs":  # as in stores that delta-rs does not know, and on Spark Connect
        monkeypatch.setattr(table_module, "open_table", lambda *_, **__: None)
    ledger = shutil.copytree(whole, tmp_path / "ledger")
    flip(ledger / LOG_FOLDER)
    sink = RocketSink(**{**options, "appId": ""})
    with pytest.raises(LedgerError, match="Delta cannot read the ledger"):
        sink.write(frame)
    with pytest.raises(LedgerError, match="Delta cannot read the ledger"):
        RocketSink(**options).write_batch(frame, 0)
    assert not cluster.messages("t")
    for name in (HINT, CHECKPOINT):
        (ledger / LOG_FOLDER / name).unlink()
    assert sink.write(frame).acked == len(cluster.messages("t")) == 10


@pytest.mark.parametrize("moment", ["cleaned up", "made anew", "deleted"])
def test_no_commit_begins_the_log_of_another_table(whole, tmp_path, moment):
    """Meanwhile another driver may have cleaned up old commits, or made a table; or a fold may have
    made the folder again, in which the log's other commits are gone."""
    ledger = shutil.copytree(whole, tmp_path / "ledger")
    log, place = ledger / LOG_FOLDER, resolve_path(ledger)
    table = delta_rs.open_table(place)
    if moment == "cleaned up":
        store(ledger, [sends(context(epoch=COMMITS), 1)])
        DeltaTable(ledger).create_checkpoint()
        for version in range(COMMITS + 1):
            (log / f"{version:020}.json").unlink()
    else:
        shutil.rmtree(ledger)
        if moment == "made anew":
            store(ledger, [sends(context(), 1)])
        log.mkdir(parents=True, exist_ok=True)
    before, files = {*log.iterdir()}, write_data_files(place, [sends(context(), 1)])
    refused = values.refusal(place.uri, "its log is gone; was the folder deleted")
    with nullcontext() if moment == "cleaned up" else refused:
        delta_rs.commit(place, table, files, "query", COMMITS)
        assert DeltaTable(ledger).to_pyarrow_table().num_rows == COMMITS + 2
    assert len({*log.iterdir()} - before) == (moment == "cleaned up")


@pytest.mark.spark
@pytest.mark.parametrize("store", ["folders", "objects"])
def test_a_ledger_that_was_deleted_while_sparks_delta_wrote_to_it(
    tmp_path, monkeypatch, cluster, options, frame, store
):
    """No commit stays that no reader could make a table of, and a new start makes a new ledger."""
    monkeypatch.setattr(table_module, "open_table", lambda *_, **__: None)
    ledger, sink = tmp_path / "ledger", RocketSink(**options)
    for epoch in range(2):
        sink.write_batch(frame, epoch)

    def delete():
        while not cluster.messages("t")[20:]:
            time.sleep(0.01)
        shutil.rmtree(ledger)
        if store == "objects":  # where no folder is needed for a file in it
            (ledger / LOG_FOLDER).mkdir(parents=True)

    # The answer comes when the ledger is gone.
    cluster.brokers[0].on_send(Delay(3_000))
    threading.Thread(target=delete, daemon=True).start()
    with pytest.raises(LedgerError, match="was deleted while a query wrote to it; rows"):
        sink.write_batch(frame, 2)
    assert not list(ledger.glob(f"{LOG_FOLDER}/*"))
    RocketSink(**options).write_batch(frame, 2)
    table = DeltaTable(ledger)
    assert table.metadata().partition_columns == ["kind"] and table.version() > 0


def test_a_client_that_does_not_see_the_log_does_not_judge_it(tmp_path, monkeypatch):
    """A client of Spark Connect appends by its server, whose folders it may not see."""
    monkeypatch.setattr(appender, "rows_of_commit", lambda *_: 1)
    place, session = resolve_path(tmp_path / "of_the_server"), SimpleNamespace()
    made = MagicMock()
    appender._BySpark(session, place, "", 0, "", 0, is_held=False).save(made)
    made.write.format.assert_called_once_with("delta")
    # The log cannot be read by pyarrow either.
    place = LedgerPath("oss://b/k", "b/k", is_local=False)
    appender._BySpark(values.session(), place, "", 0, "", 0, is_held=False).save(MagicMock())


@pytest.mark.parametrize(
    ("names", "is_late"),
    [
        ([f"{0:020}.json", f"{5:020}.json"], False),
        ([f"{7:020}.json", f".{8:020}.json.crc", "_last_vacuum"], True),
        ([f"{7:020}.json", f"{6:020}.checkpoint.parquet"], False), ([], True),
    ],
)  # fmt: skip
@pytest.mark.parametrize("error", [None, KeyError("a defect")])
def test_no_commit_of_sparks_delta_begins_a_log(tmp_path, monkeypatch, names, is_late, error):
    """In a store such a commit succeeds although the log was deleted, and nobody could read it."""
    monkeypatch.setattr(appender, "rows_of_commit", lambda *_: 1)
    for name in names:
        (tmp_path / LOG_FOLDER).mkdir(exist_ok=True)
        (tmp_path / LOG_FOLDER / name).touch()
    place, made = resolve_path(tmp_path), MagicMock()
    writer = made.write.format("delta").mode("append").option("txnAppId", "id")
    writer = writer.option("txnVersion", "7").option("userMetadata", "token")
    writer.save.side_effect = error
    append = appender._BySpark(values.session(), place, "id", 7, "token", 0, is_held=False)
    with (
        pytest.raises(LedgerError, match="deleted while")
        if is_late
        else (pytest.raises(KeyError) if error else nullcontext())
    ):
        append.save(made)
    stored = {path.name for path in tmp_path.glob(f"{LOG_FOLDER}/*")}
    assert stored == ({*names} & {"_last_vacuum"} if is_late else {*names})
    writer.save.assert_called_once_with(place.uri)
