"""Ledger rows that travel to the driver with a task's result (`ledgerVia`)."""

import contextlib
import errno
import logging
import os
import pickle
import socket
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest
from pyarrow import fs
from pyspark.accumulators import Accumulator, _accumulatorRegistry

from rocket_sink.errors import ConfigurationError, DamagedSpoolError, LedgerError, OptionError
from rocket_sink.ledger import storage
from rocket_sink.ledger.driver.fold import spools_in_use
from rocket_sink.ledger.path import LedgerPath, resolve_path
from rocket_sink.ledger.storage import remember
from rocket_sink.ledger.token import LedgerToken, may_hand_over
from rocket_sink.ledger.transport import accumulator, handed
from rocket_sink.ledger.transport.files import sealed_files
from rocket_sink.ledger.transport.handed import HandedRows, RowsInMemory, spool_handed
from rocket_sink.ledger.transport.spool import SpoolWriter
from rocket_sink.ledger.transport.stream import BatchWriter
from rocket_sink.ledger.transport.transport import RowsForCaller, transport_of
from rocket_sink.option_spec import Secret
from rocket_sink.options import SinkOptions
from rocket_sink.rows.contract import ColumnPlan, resolve_columns
from rocket_sink.spark import datasource
from rocket_sink.task.runner import TaskRunner
from rocket_sink.testing import FakeCluster

from .values import accounts, context, letter, sends, session, spool_rows


def kept(place):
    files = sealed_files(place, place.filesystem())
    return spool_rows(*(Path(file.path) for file in files))


def rows_of(*batches):
    memory = RowsInMemory(context())
    for batch in batches:
        memory.append(batch)
    return pickle.loads(pickle.dumps(memory.finish()))


def test_they_come_to_the_spool_as_a_task_would_have_written_them(tmp_path, place):
    ctx = context()
    batches = [sends(ctx, 3), letter(ctx), accounts(ctx, acked=3, dead=1)]
    spool_handed(place, [rows_of(*batches)])
    assert kept(place) == [row for batch in batches for row in batch.to_pylist()]
    [file] = sealed_files(place, place.filesystem())
    assert file.path.startswith(f"{tmp_path}/_spool/q-query/0/0-10-1-")


def test_a_task_without_rows_hands_nothing_over():
    memory = RowsInMemory(context())
    memory.append(sends(context()).slice(0, 0))
    assert memory.finish() is None


def test_too_many_fail_the_task_with_what_to_do(monkeypatch):
    monkeypatch.setattr(handed, "_MOST_BYTES", 1 << 20)
    memory = RowsInMemory(context())
    memory.append(letter(context(), bytes(1 << 19)))
    with pytest.raises(LedgerError, match=r"more than 1 MiB.*set ledgerRetention=body=0"):
        memory.append(letter(context(), bytes(1 << 19)))


def test_changed_bytes_are_refused(place):
    rows = rows_of(letter(context(), b"x" * 1000))
    at = rows.stream.index(b"x" * 1000)
    changed = rows.stream[:at] + b"y" + rows.stream[at + 1 :]
    with pytest.raises(DamagedSpoolError):
        spool_handed(place, [rows, HandedRows(rows.ctx, changed)])
    assert kept(place) == []


@pytest.mark.parametrize("step", ["write", "seal"])
def test_rows_that_cannot_all_be_written_are_written_once(tmp_path, monkeypatch, step, place):
    """Let the disk be full at the second task's rows, or at the end; then Spark aborts."""
    handed = [rows_of(accounts(context(partition=n), acked=5)) for n in range(3)]
    copied = list[bytes]()
    copy = BatchWriter.copy

    def copy_until_full(self, content):
        copied.append(content)
        if step == "write" and len(copied) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        copy(self, content)

    def sync_nothing(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(BatchWriter, "copy", copy_until_full)
        if step == "seal":
            full.setattr(os, "fsync", sync_nothing)
        with pytest.raises(LedgerError, match="No space left"):
            spool_handed(place, handed)
    assert kept(place) == [] and not [*tmp_path.rglob("*.open")]
    spool_handed(place, handed)
    assert sorted(row["partition"] for row in kept(place)) == [0, 1, 2]


@pytest.fixture
def absent_store(monkeypatch, tmp_path):
    """Yield a ledger in a store at whose address nothing listens."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    # A session of other tests in this process would give its own properties.
    monkeypatch.setattr(storage, "active_session", lambda: None)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
    uri = "s3a://bucket/ledger"
    keys = {"endpoint": address, "access.key": "a", "secret.key": "b", "endpoint.region": "r"}
    remember({f"fs.s3a.{name}": Secret(value) for name, value in keys.items()}, uri)
    yield uri
    remember({}, uri)


def test_where_the_store_fails_they_wait_on_the_drivers_host(absent_store, tmp_path, caplog):
    place = resolve_path(absent_store)
    with caplog.at_level(logging.WARNING):
        spool_handed(place, [rows_of(sends(context()))])
    assert len(kept(place.driver_folder)) == 1
    # The first 16 digits of the SHA-256 of s3://bucket/ledger: the next version looks there, too.
    folder = f"{tmp_path}/state/rocket-sink/ledgers/572315ef2572e772/q-127.0.0.1=3A"
    assert place.driver_folder.root.startswith(folder)
    assert f"The rows wait in {place.driver_folder.spool}" in caplog.text
    assert place.driver_folder.uri == absent_store


def test_stores_with_ledgers_of_one_uri_have_a_folder_each(absent_store, monkeypatch, caplog):
    """A process that commits for `format("rocketmq")` has no session, and unpickles the writer."""
    options = SinkOptions.parse(nameServer="-:1", ledger=absent_store)
    writer, own = pickle.dumps(datasource.BatchWriter(options, ColumnPlan(()))), options.ledger
    folder = resolve_path(own).driver_folder
    monkeypatch.setattr(storage, "_remembered", {})
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://staging:9000")
    other = replace(resolve_path(own.replace("s3a", "s3")), problem="only Spark reaches it")
    spool_handed(pickle.loads(writer)._ledger(), [rows_of(sends(context()))], in_store=False)
    assert len(kept(folder)) == 1 and spools_in_use(other) == []
    assert f"wait in {folder.spool}, written by a process that" in caplog.text


def test_foreach_rows_wait_for_no_store(absent_store, caplog):
    """Do not wait for the store: the thread that takes the rows ends the tasks of all jobs."""
    place = resolve_path(absent_store)
    assert len(place.spools) == 2
    rows = [rows_of(sends(context())), rows_of(letter(context()))]
    assert accumulator._RowsOnDriver(place).addInPlace([], rows) == []
    assert [row["kind"] for row in kept(place.driver_folder)] == ["send", "dead_letter"]
    assert caplog.records == [], "the store was not asked"


@pytest.mark.parametrize("failures", [0, 1, 2])
def test_rows_of_foreach_that_no_spool_takes_wait_for_the_next_task(
    tmp_path, monkeypatch, caplog, failures
):
    errors = [LedgerError("full")] * failures

    def spool(*args, **more):
        if errors:
            raise errors.pop()
        spool_handed(*args, **more)

    monkeypatch.setattr(accumulator, "spool_handed", spool)
    place, rows = resolve_path(tmp_path), list[HandedRows]()
    driver = accumulator._RowsOnDriver(place)
    for task in range(2):
        new = rows_of(accounts(context(partition=task), acked=5))
        rows = driver.addInPlace(rows, [new])
        assert rows == ([new] if (failures, task) == (2, 0) else [])
    assert sorted(row["partition"] for row in kept(place)) == [0, 1]
    says = ["full. The rows go to the ledger's store, ", f"the ledger {place} lacks the rows of 1 "]
    for record, text in zip(caplog.records, says[:failures], strict=True):
        assert record.getMessage().startswith(text)


class NoAnswer:
    """An object store on a disk that loses answers to uploads; `stored` tells what it has then."""

    type_name = "s3"

    def __init__(self, stored):
        self._stored = stored
        self._files = fs.LocalFileSystem()

    def __getattr__(self, name):
        return getattr(self._files, name)

    @contextlib.contextmanager
    def open_output_stream(self, path):
        with self._files.open_output_stream(path) as out:
            yield out
        if self._stored == "nothing":
            self._files.delete_file(path)
        if self._stored == "an empty file":
            Path(path).write_bytes(b"")
        raise OSError("the answer is lost")


@pytest.mark.parametrize("stored", ["all rows", "an empty file", "nothing"])
def test_rows_whose_upload_has_no_answer_are_in_one_spool(tmp_path, monkeypatch, stored):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    place = LedgerPath("s3a://bucket/ledger", str(tmp_path / "store"), is_local=False)
    real, store = LedgerPath.filesystem, NoAnswer(stored)
    monkeypatch.setattr(LedgerPath, "filesystem", lambda p: real(p) if p.is_local else store)
    Path(place.spool).mkdir(parents=True)
    spool_handed(place, [rows_of(sends(context(), 2))])
    expected = [2, 0] if stored == "all rows" else [0, 2]
    assert [len(kept(spool)) for spool in place.spools] == expected


@pytest.mark.parametrize(
    ("options", "may"),
    [
        ({}, False), ({"ledger": "/l"}, False), ({"ledger": "/l", "ledgerVia": "spark"}, True),
        ({"ledger": "s3://b/l"}, True), ({"ledger": "s3://b/l", "ordering": "strict"}, False),
        ({"ledger": "s3://b/l", "ledgerVia": "spool"}, False),
    ],
)  # fmt: skip
def test_tasks_hand_over_if_they_must_or_reach_no_store(options, may):
    assert may_hand_over(SinkOptions.parse(options)) == may


def test_a_task_that_does_not_reach_the_store_sends_and_hands_over(absent_store, caplog):
    batch = pa.RecordBatch.from_pydict({"body": [str(n) for n in range(20)]})
    with FakeCluster(brokers=1) as cluster:
        cluster.create_topic("t")
        options = SinkOptions.parse(nameServer=cluster.name_server, topic="t", ledger=absent_store)
        token = LedgerToken(absent_store, "token", spools=True)

        def run(given, **more):
            runner = TaskRunner(given, context(), token=token, **more)
            runner.feed(batch, resolve_columns(batch.schema, given))
            runner.finish()
            return runner

        with caplog.at_level(logging.WARNING):
            rows = run(options, hands_over=True).handed
        assert rows is not None and len(cluster.messages("t")) == 20
        assert caplog.text.count("is on no record") == 1
        assert "cannot read and write" not in caplog.text, "the cause says enough"
        for refused, more in [
            (options, {}),
            (options.with_(ledgerVia="spool"), {"hands_over": True}),
            (options.with_(ordering="strict", columns="sharding_key=body"), {"hands_over": True}),
        ]:
            with pytest.raises(LedgerError, match="cannot read and write the ledger"):
                run(refused, **more)
        assert len(cluster.messages("t")) == 20
        with caplog.at_level(logging.WARNING):
            run(options.with_(ledgerVia="spark"), hands_over=True)
        assert caplog.text.count("is on no record") == 1, "another reason is no other warning"
    place = resolve_path(absent_store)
    spool_handed(place, [rows])
    [account] = [row for row in kept(place.driver_folder) if row["kind"] == "epoch"]
    assert account["rows_in"] == account["acked"] == 20 and account["complete"]


def test_where_an_attempts_rows_go(tmp_path, monkeypatch):
    ctx, rows = context(), list[pa.RecordBatch]()
    parse, folder = SinkOptions.parse, {"nameServer": "-:1", "ledger": str(tmp_path)}
    checked = SimpleNamespace(check=lambda: None)
    by_store = LedgerPath("s3a://b/k", str(tmp_path), is_local=True)
    monkeypatch.setattr("rocket_sink.ledger.transport.spool.resolve_path", lambda _: by_store)
    for options, emit, token, kind in (
        (parse(folder), rows.append, checked, RowsForCaller),
        (parse({"nameServer": "-:1"}), None, None, RowsForCaller),
        (parse(folder), None, checked, SpoolWriter),
        (parse({**folder, "ledger": by_store.uri}), None, checked, SpoolWriter),
        (parse({**folder, "ledgerVia": "spark"}), None, checked, RowsInMemory),
    ):
        ways = transport_of(options, ctx, emit=emit, token=token, hands_over=True)
        ways.append(sends(ctx))
        assert type(ways) is kind and (ways.finish() is not None) == (kind is RowsInMemory)
        assert ways.keeps_failed == (kind is SpoolWriter)
        ways.abort()
    failed = SpoolWriter(str(tmp_path), ctx)
    failed.append(sends(ctx))
    failed.abort()
    assert (len(rows), len(kept(resolve_path(tmp_path)))) == (1, 3)


@pytest.mark.parametrize("via", ["auto", "spark", "spool"])
def test_an_application_has_an_accumulator_per_ledger(monkeypatch, tmp_path, via):
    """Rows that tasks add come to the spool of the ledger's driver."""
    monkeypatch.setattr(storage, "active_session", lambda: None)
    ids = iter(range(10**6, 10**6 + 9))
    spark = session()
    spark.sparkContext.accumulator = lambda value, param: Accumulator(next(ids), value, param)
    names = ("s3://b/a", "s3://b/a", "s3://b/c") if via == "auto" else (str(tmp_path),) * 2
    options = [SinkOptions.parse({"ledger": name, "ledgerVia": via}) for name in names]
    monkeypatch.setattr(accumulator, "active_session", lambda: spark)
    ways = [accumulator.rows_by_accumulator(each) for each in options]
    assert len({id(way) for way in ways}) == (2 if via == "auto" else 1)
    assert (ways[0] is None) == (via == "spool")
    if via == "spark":
        on_driver = _accumulatorRegistry.pop(10**6)
        ways[0].add(rows_of(sends(context())))  # as in a task, which has another registry
        (added,) = _accumulatorRegistry[10**6]._value
        on_driver.add([added])
        assert on_driver.value == [] and len(kept(resolve_path(tmp_path))) == 1
    monkeypatch.setattr(accumulator, "active_session", lambda: None)
    with pytest.raises(ConfigurationError) if via == "spark" else contextlib.nullcontext():
        assert accumulator.rows_by_accumulator(options[0]) is None


def test_a_local_folder_that_is_another_one_is_never_gone_around(tmp_path):
    options = SinkOptions.parse(nameServer="127.0.0.1:1", topic="t", ledger=str(tmp_path))
    token = LedgerToken(resolve_path(tmp_path).uri, "absent", spools=True)
    runner = TaskRunner(options, context(), token=token, hands_over=True)
    batch = pa.RecordBatch.from_pydict({"body": ["1"]})
    with pytest.raises(LedgerError, match="not the one that the driver sees"):
        runner.feed(batch, resolve_columns(batch.schema, options))
    runner.abort()


def test_what_keeps_notes_in_the_folder_excludes_it():
    for more in (
        {"ordering": "strict"}, {"delivery": "effectively_once"}, {"appId": "a"},
        {"ordering": "best_effort", "onPendingKey": "hold"},
    ):  # fmt: skip
        with pytest.raises(OptionError, match="ledgerVia=spark lets tasks do without"):
            SinkOptions.parse(ledger="/l", ledgerVia="spark", **more)
