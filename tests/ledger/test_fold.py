"""Folds: killed at each step and repeated, two at once, torn files: each row exactly once."""

import contextlib
import itertools
import json
import os
import shutil
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from rocket_sink.errors import LedgerError
from rocket_sink.ledger.append import appender
from rocket_sink.ledger.append.table import ensure_table
from rocket_sink.ledger.driver import fold as fold_module
from rocket_sink.ledger.driver import ledger as ledger_module
from rocket_sink.ledger.driver.fold import FoldSummary, fold
from rocket_sink.ledger.driver.ledger import Ledger
from rocket_sink.ledger.path import resolve_path
from rocket_sink.ledger.query import duckdb_reader
from rocket_sink.ledger.query.duckdb_reader import reader_of
from rocket_sink.ledger.records import in_flight_rows
from rocket_sink.ledger.transport.data_files import write_data_files
from rocket_sink.ledger.transport.spool import SpoolWriter
from rocket_sink.plain_files import PlainFiles
from tests.killed import FOLD_STEPS, Killed, kill_at

from .values import (
    accounts,
    context,
    forge,
    leave_to_spark,
    letter,
    refusal,
    sends,
    session,
    write_manifest,
    write_spool,
)

SPARK = session()
"""A session whose folds delta-rs commits; tests of Spark's Delta and tasks take `spark`."""


@pytest.fixture
def driver(request):
    """Return the session that a parameter names."""
    return request.getfixturevalue("spark") if request.param == "spark" else SPARK


def spool(place, partition, rows=2):
    return write_spool(
        place, context(partition=partition), sends(context(partition=partition), rows)
    )


def partitions(root, driver=SPARK):
    """Count the rows of the table by partition."""
    if driver is SPARK:
        rows = DeltaTable(root).to_pyarrow_dataset().to_table(columns=["partition"])
    else:
        rows = driver.read.format("delta").load(f"file:{root}").select("partition").toArrow()
    return Counter(rows["partition"].to_pylist())


def left(root):
    """Return the names of all files in the spool except the locks."""
    return [p.name for p in (root / "_spool").rglob("*") if p.is_file() and "lock" not in p.name]


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """Return a table for all tests that only count their own partitions."""
    folder = tmp_path_factory.mktemp("ledger")
    spool(str(folder), 9001)
    fold(SPARK, str(folder))
    return folder


def test_without_a_spool_there_is_nothing_to_do(tmp_path):
    assert fold(SPARK, str(tmp_path)).folds == 0
    assert not (tmp_path / "_delta_log").exists()
    with pytest.raises(LedgerError, match="Connect session cannot fold the spool: run `rocket-s"):
        fold(SimpleNamespace(), str(tmp_path))


@pytest.mark.parametrize(
    ("sizes", "shares"),
    [
        ([], []), ([3, 3], [[3, 3]]), ([3, 4], [[3], [4]]), ([9, 1, 1], [[9], [1, 1]]),
        ([1, 1, 1, 1], [[1, 1, 1], [1]]), ([None, 6, None], [[None, 6, None]]),
    ],
)  # fmt: skip
def test_an_append_has_limits(monkeypatch, sizes, shares):
    """Three files and six bytes; a larger file is alone."""
    monkeypatch.setattr(fold_module, "FOLD_FILES", 3)
    files = [SimpleNamespace(size=size) for size in sizes]
    sizes_of_shares = [[file.size for file in share] for share in fold_module._shares(files, 6)]
    assert sizes_of_shares == shares


def test_a_fold_waits_for_the_ends_of_queries(tmp_path):
    spark, waits = session(), list[float]()

    def gone(_):
        raise RuntimeError("its session is gone")

    folders = [SimpleNamespace(await_ended=gone), SimpleNamespace(await_ended=waits.append)]
    setattr(spark.sparkContext, fold_module.FOLDERS, folders)
    assert Ledger(tmp_path).sync(spark) == FoldSummary()
    assert waits == [5.0]
    fold_module.await_ended_queries(SimpleNamespace())  # of Spark Connect


def test_a_fold_makes_the_table_and_empties_the_spool(tmp_path, monkeypatch):
    spool(str(tmp_path), 0)
    spool(str(tmp_path), 1, rows=3)
    size = sum(path.stat().st_size for path in tmp_path.rglob("*.arrow"))
    with monkeypatch.context() as patch:
        patch.setattr(fold_module, "time", SimpleNamespace(monotonic=iter([1.0, 3.5]).__next__))
        summary = fold(SPARK, str(tmp_path))
    assert summary == FoldSummary(folds=1, files=2, rows=5, bytes=size, duration_ms=2500.0)
    assert partitions(tmp_path) == {0: 2, 1: 3}
    assert left(tmp_path) == [] and not [*tmp_path.glob("_spool/q-*")]
    assert fold(SPARK, str(tmp_path)).folds == 0
    assert partitions(tmp_path) == {0: 2, 1: 3}


@pytest.mark.parametrize(
    "driver", ["delta_rs", pytest.param("spark", marks=pytest.mark.spark)], indirect=True
)
def test_killed_at_each_step_and_repeated_each_row_is_there_once(driver, tables, tmp_path):
    root, steps = tables, FOLD_STEPS
    if driver is not SPARK:
        root, steps = tmp_path, [("append", 1), ("appended", 1), ("delete", 2)]
        leave_to_spark(driver, root)
    expected = Counter()
    for number, (step, times) in enumerate(steps):
        first, second, late = 100 * number, 100 * number + 1, 100 * number + 2
        spool(str(root), first)
        spool(str(root), second, rows=3)
        with pytest.raises(Killed):
            fold(driver, str(root), on_step=kill_at(step, times))
        spool(str(root), late, rows=1)  # The query goes on meanwhile.
        fold(driver, str(root))
        expected += Counter({first: 2, second: 3, late: 1})
        rows = partitions(root, driver)
        assert {n: rows[n] for n in rows if n < 9000} == expected, (step, times)
        assert left(root) == [], (step, times)


def test_a_fold_takes_the_files_of_an_epoch_in_the_order_of_their_begin(tmp_path):
    """The times of files come from clocks, which may be set back. A later fold's rows are last."""
    for epochs in ((11, 9), (1,)):
        for epoch, turn in itertools.product(epochs, range(3)):
            ctx = context(epoch=epoch, run_id=f"run-{turn}")
            path = write_spool(str(tmp_path), ctx, accounts(ctx, acked=1))
            os.utime(path, (100 - turn, 100 - turn))
        fold(SPARK, str(tmp_path))
    table = DeltaTable(tmp_path).to_pyarrow_table(columns=["epoch", "run_id", "sequence"])
    rows = [(row["epoch"], row["run_id"]) for row in table.sort_by("sequence").to_pylist()]
    assert rows == [(epoch, f"run-{turn}") for epoch in (9, 11, 1) for turn in range(3)]


@pytest.mark.spark
@pytest.mark.parametrize("driver_bytes", [fold_module.DRIVER_BYTES, 0])
def test_a_fold_by_sparks_delta_has_all_rows(spark, tmp_path, monkeypatch, driver_bytes):
    """Fold a file whose second batch has no rows: the attempt has awaited its answers."""
    monkeypatch.setattr(fold_module, "DRIVER_BYTES", driver_bytes)
    leave_to_spark(spark, tmp_path)
    ctx = context()
    writer = SpoolWriter(str(tmp_path), ctx)
    waiting = in_flight_rows([1], ctx, topic="t", message_count=[1], body_bytes=[1])
    writer.append(letter(ctx), waiting, sends(ctx, 2), accounts(ctx, acked=2, dead=1))
    writer.seal()
    assert fold(spark, str(tmp_path)).rows == 4
    assert partitions(tmp_path, spark) == {0: 4}
    assert left(tmp_path) == []
    report = Ledger(tmp_path).report(spark)
    assert (report.totals.rows_in, report.totals.dead) == (3, 1)
    # DuckDB and Spark read the same rows.
    select = "SELECT epoch, rows_in, acked, dead, adds_up FROM epochs"
    rows = [reader_of(spark, resolve_path(tmp_path))(select).to_pylist()]
    monkeypatch.setattr(duckdb_reader, "_DRIVER_BYTES", -1)
    rows += [reader_of(spark, resolve_path(tmp_path))(select).to_pylist()]
    assert rows[0] == rows[1] != []


def test_a_live_writers_file_waits(tables):
    writer = SpoolWriter(str(tables), context(partition=9200))
    writer.append(sends(writer._ctx, 2))
    assert fold(SPARK, str(tables)).files == 0
    assert Ledger(tables).report(SPARK).unfolded_epochs == 0, "a fold has taken what was finished"
    writer.append(sends(writer._ctx, 1))
    writer.seal()
    fold(SPARK, str(tables))
    assert partitions(tables)[9200] == 3


@pytest.mark.parametrize(
    "driver", ["delta_rs", pytest.param("spark", marks=pytest.mark.spark)], indirect=True
)
def test_big_spools_are_read_by_tasks_and_cut_into_several_folds(driver, tables, monkeypatch):
    monkeypatch.setattr(fold_module, "DRIVER_BYTES", 0)
    monkeypatch.setattr(fold_module, "TASK_BYTES", 20_000)
    monkeypatch.setattr(fold_module, "FOLD_FILES", 4)
    numbers = range(9300, 9306) if driver is SPARK else range(9306, 9312)
    for number in numbers:
        spool(str(tables), number, rows=4)
    summary = fold(driver, str(tables))
    assert (summary.folds, summary.files, summary.rows) == (2, 6, 24)
    rows_of = partitions(tables)
    assert [rows_of[number] for number in numbers] == [4] * 6


def test_the_driver_reads_big_spools_that_executors_do_not_see(tmp_path, monkeypatch, caplog):
    """Ask the executors once: each failed job takes slots of the query for seconds."""
    asked = []

    def refuse(*places):
        asked.append(places)
        raise LedgerError("the ledger is not the one that the driver sees")

    monkeypatch.setattr(fold_module, "prove_executors", refuse)
    monkeypatch.setattr(fold_module._Folder, "_tasks", None)
    spool(str(tmp_path), 0)
    assert fold(SPARK, str(tmp_path)).rows == 2
    assert not asked
    monkeypatch.setattr(fold_module, "DRIVER_BYTES", 0)
    for number in (1, 2):
        spool(str(tmp_path), number)
        assert fold(SPARK, str(tmp_path)).rows == 2
    assert len(asked) == 1
    assert caplog.text.count("the driver reads all files of each fold itself") == 1
    assert partitions(tmp_path) == {0: 2, 1: 2, 2: 2}
    assert left(tmp_path) == []


@contextlib.contextmanager
def a_fold_that_waits(root):
    """Run a fold in a thread; it waits before its append until the block ends."""
    entered, go_on, summaries = threading.Event(), threading.Event(), []

    def wait_inside(step):
        if step == "append":
            entered.set()
            assert go_on.wait(120)

    first = threading.Thread(
        target=lambda: summaries.append(fold(SPARK, str(root), on_step=wait_inside))
    )
    first.start()
    try:
        assert entered.wait(60)
        yield summaries
    finally:
        go_on.set()
        first.join(120)


def test_of_two_folds_at_once_one_waits_or_is_told_who_folds(tables, monkeypatch):
    ledger = Ledger(tables)
    spool(str(tables), 9400)
    write_spool(str(tables), context(partition=9400), letter(context(partition=9400)))
    second = []
    waiting = threading.Thread(target=lambda: second.append(ledger.sync_fully(SPARK)))
    with a_fold_that_waits(tables) as summaries:
        assert fold(SPARK, str(tables), wait_s=0).busy
        text = rf"folded by process {os.getpid()} on .* for more than 0\.2 s"
        with refusal(tables, text):
            ledger.sync_fully(SPARK, wait_s=0.2)
        summary = ledger.sync(SPARK, wait_s=0)
        assert summary.busy and summary.holder.startswith(f"process {os.getpid()} on ")
        with monkeypatch.context() as busy:
            busy.setattr(ledger, "sync", lambda spark: summary)
            report = ledger.report(SPARK)
            busy.setattr(ledger, "sync", None)
            with pytest.raises(TypeError):
                ledger.report(SPARK)
        assert (report.unfolded_epochs, report.unfolded_letters) == (1, 1)
        waiting.start()
    waiting.join(120)
    assert summaries[0].rows == 3
    assert len(second) == 1
    assert partitions(tables)[9400] == 3


def test_a_number_that_another_fold_has_taken_deletes_no_file(tmp_path, monkeypatch):
    """Keep the files of a fold that takes an old table for the newest one, and fold them anew."""
    spool(str(tmp_path), 0)
    fold(SPARK, str(tmp_path))
    spool(str(tmp_path), 1, rows=3)
    with monkeypatch.context() as stale:
        stale.setattr(fold_module, "last_txn_version", lambda *_: None)
        text = "another fold has taken the number 0.* stay in its _spool until"
        with refusal(f"file:{tmp_path}", text):
            fold(SPARK, str(tmp_path))
    assert partitions(tmp_path) == {0: 2}
    assert len(left(tmp_path)) == 1
    assert fold(SPARK, str(tmp_path)).rows == 3
    assert partitions(tmp_path) == {0: 2, 1: 3}
    assert left(tmp_path) == [] and not list((tmp_path / "_notes" / "folds").iterdir())


@pytest.mark.parametrize("step", ["listed", "manifest", "append", "appended", "delete", "deleted"])
@pytest.mark.parametrize("moment", [step for step, times in FOLD_STEPS if times == 1])
def test_two_folds_without_a_common_lock(tmp_path, monkeypatch, step, moment):
    """Run a whole fold while another one pauses at a step; hosts may not share locks (NFS). The
    second fold itself may be killed at a moment, so that the first one goes on beside it."""
    root = str(tmp_path)
    ensure_table(SPARK, resolve_path(root))
    monkeypatch.setattr(fold_module, "ledger_lock", lambda *_: contextlib.nullcontext(True))
    monkeypatch.setattr(fold_module, "release", lambda *_: None)
    spool(root, 0)
    spool(root, 1, rows=3)
    paused = []

    def pause(at):
        if at == step and not paused:
            paused.append(at)
            with contextlib.suppress(Killed):
                fold(SPARK, root, on_step=kill_at(moment))

    fold(SPARK, root, on_step=pause)
    assert paused
    assert partitions(root) == {0: 2, 1: 3}
    fold(SPARK, root)
    assert partitions(root) == {0: 2, 1: 3}
    assert left(tmp_path) == [] and not list((tmp_path / "_notes" / "folds").iterdir())


def test_a_fold_that_another_process_completes_between_the_look_and_the_log(tmp_path, monkeypatch):
    place = str(tmp_path)
    path = spool(place, 0)
    with pytest.raises(Killed):
        fold(SPARK, place, on_step=kill_at("append"))

    def before_another_fold(read):
        def read_first(*of):
            result = read(*of)
            if not isinstance(of[0], PlainFiles) or of[1] == [path]:
                passes.undo()
                assert fold(SPARK, place).recovered == 1
            return result

        return read_first

    monkeypatch.setattr(fold_module, "ledger_lock", lambda *_: contextlib.nullcontext(True))
    with monkeypatch.context() as passes:
        for owner, name in ((PlainFiles, "get_file_info"), (fold_module, "last_txn_version")):
            passes.setattr(owner, name, before_another_fold(getattr(owner, name)))
        fold(SPARK, place)
    assert partitions(place) == {0: 2}


@pytest.mark.parametrize("rows", [2, 4])
def test_a_commit_with_other_rows_than_the_files_deletes_no_file(tmp_path, monkeypatch, rows):
    """Take a commit for done only if the log shows as many rows as the spool had."""
    path = spool(str(tmp_path), 0, rows=3)
    ensure_table(SPARK, resolve_path(tmp_path))
    write = appender.write_data_files

    def write_others(place, batches):
        table = pa.Table.from_batches(batches)
        return write(place, pa.concat_tables([table, table])[:rows].to_batches())

    monkeypatch.setattr(appender, "write_data_files", write_others)
    for _ in range(2):  # The second fold finds the first one's commit.
        with pytest.raises(LedgerError, match=f"has added {rows} rows, and 3 were handed"):
            fold(SPARK, str(tmp_path))
        assert Path(path).exists()


def test_lost_files_of_a_begun_fold_are_an_error(tables):
    path = spool(str(tables), 9600)
    with pytest.raises(Killed):
        fold(SPARK, str(tables), on_step=kill_at("append"))
    data = Path(path).read_bytes()
    Path(path).unlink()
    with pytest.raises(LedgerError, match="gone"):
        fold(SPARK, str(tables))
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_bytes(data)
    fold(SPARK, str(tables))
    assert partitions(tables)[9600] == 2


def test_a_manifest_of_another_table_holds_nothing_back(tables):
    """A fold into the other table deleted the second of its files, and was killed then."""
    paths = [spool(str(tables), partition) for partition in (9700, 9701)]
    Path(paths[1]).unlink()
    names = [path.removeprefix(f"{tables}/_spool/") for path in paths]
    write_manifest(tables, names, rows=4)
    assert fold(SPARK, str(tables)).rows == 2
    assert partitions(tables)[9700] == 2
    assert left(tables) == []


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (None, "Expecting"), ({}, "'files'"), ({"more": 1}, "unexpected keyword argument 'more'"),
        ({"token": "other"}, "it belongs in '7-other'"),
        ({"files": ["q-x/0/x.open"]}, "'q-x/0/x.open' is no spool file"),
    ],
)  # fmt: skip
def test_a_manifest_that_cannot_be_read_is_named(tables, values, reason):
    broken = write_manifest(tables, ["q-x/0/x.arrow"])
    note = json.loads(broken.read_text())
    broken.write_text("{" if values is None else json.dumps(values and {**note, **values}))
    text = f"fold manifest {broken} cannot be read: .*{reason}.* else delete the manifest only"
    with refusal(broken, text):
        fold(SPARK, str(tables))
    broken.unlink()


def stranger_behind(root, link, folder):
    """Make a foreign folder behind a link in the ledger, and return it with its files' bytes."""
    victim = Path(spool(str(folder), 9700))
    target = victim.parents[1] if "spool" in link else victim.parent
    (root / link).symlink_to(target)
    return root / link, {victim: victim.read_bytes()}


def test_a_manifest_deletes_nothing_behind_a_link(tables, tmp_path):
    """Keep a fold from appending and deleting files outside the spool, such as any `*.arrow`."""
    before = partitions(tables)
    link, files = stranger_behind(tables, "_spool/q-x", tmp_path)
    (victim,) = files
    ledger_id = ensure_table(SPARK, resolve_path(tables))
    name = f"q-x/{victim.parent.name}/{victim.name}"
    manifest = write_manifest(tables, [name], number=999, ledger_id=ledger_id)
    with pytest.raises(LedgerError, match=r"is a link.*q-x"):
        fold(SPARK, str(tables))
    assert {path: path.read_bytes() for path in files} == files
    manifest.unlink()
    link.unlink()
    assert partitions(tables) == before


def test_a_damaged_file_is_not_put_aside_elsewhere(tables, tmp_path):
    damaged = Path(spool(str(tables), 9701))
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 0xFF
    damaged.write_bytes(data)
    quarantine = tables / "_spool" / "_quarantine"
    quarantine.mkdir(exist_ok=True)
    quarantine.rename(tmp_path / "aside")
    quarantine.symlink_to(tmp_path / "aside")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(LedgerError, match="is a link"):
        fold(SPARK, str(tables))
    assert sorted(tmp_path.rglob("*")) == before
    quarantine.unlink()
    assert len(fold(SPARK, str(tables)).damaged) == 1
    shutil.rmtree(quarantine)


def test_vacuum_deletes_nothing_behind_a_link(tables, tmp_path):
    link, files = stranger_behind(tables, "kind=zzz", tmp_path)
    for clean_up in (Ledger(tables).vacuum, Ledger(tables).optimize):
        with pytest.raises(LedgerError, match=r"kind=zzz"):
            clean_up(SPARK)
    assert {path: path.read_bytes() for path in files} == files
    link.unlink()


@pytest.mark.parametrize(
    "driver", ["delta_rs", pytest.param("spark", marks=pytest.mark.spark)], indirect=True
)
def test_a_forged_log_ends_a_vacuum_with_an_error_of_ours(driver, tmp_path, monkeypatch):
    """Spark's Delta cannot make a path of backslashes, and raised a Py4JJavaError."""
    ensure_table(driver, resolve_path(tmp_path))
    if driver is SPARK:
        monkeypatch.setattr(Ledger, "_delta", lambda *_: None)
    else:
        monkeypatch.setattr(ledger_module, "open_direct", lambda spark, place: None)
    forge(tmp_path, r"kind=send\..\..")
    wanted = "no rocket-sink wrote" if driver is SPARK else "cannot read the ledger"
    with pytest.raises(LedgerError, match=wanted):
        Ledger(tmp_path).vacuum(driver)


@pytest.mark.spark
@pytest.mark.parametrize(("kept", "days"), [("6 hours", 7), ("9 days", 9)])
def test_vacuum_keeps_the_files_of_a_long_write(spark, tmp_path, kept, days, place):
    """Files of a running write are in no version of the table before its end."""
    ensure_table(spark, place)
    name = "'delta.deletedFileRetentionDuration'"
    spark.sql(f"ALTER TABLE delta.`{tmp_path}` SET TBLPROPERTIES ({name} = 'interval {kept}')")
    young, old = (
        Path(place.root, write_data_files(place, [sends(context())])[0].path) for _ in range(2)
    )
    for path, age_days in ((young, days - 0.5), (old, days + 0.5)):
        moment = time.time() - age_days * 86_400
        os.utime(path, (moment, moment))
    Ledger(tmp_path).vacuum(spark)
    assert young.exists() and not old.exists()


def damage(path):
    """Change a byte of the file's values and return the original bytes."""
    data = Path(path).read_bytes()
    at = data.index(b"broker-a")
    Path(path).write_bytes(data[:at] + b"c" + data[at + 1 :])
    return data


@pytest.mark.parametrize("driver_bytes", [fold_module.DRIVER_BYTES, 0])
def test_a_damaged_file_is_put_aside_and_the_others_go_in(
    tmp_path, monkeypatch, caplog, driver_bytes
):
    monkeypatch.setattr(fold_module, "DRIVER_BYTES", driver_bytes)
    spool(str(tmp_path), 0)
    broken = spool(str(tmp_path), 1)
    spool(str(tmp_path), 2, rows=3)
    data = damage(broken)
    summary = fold(SPARK, str(tmp_path))
    assert (summary.files, summary.rows) == (2, 5)
    assert partitions(tmp_path) == {0: 2, 2: 3}
    [aside] = summary.damaged
    assert aside == broken.replace("/_spool/", "/_spool/_quarantine/")
    assert Path(aside).read_bytes() == data.replace(b"broker-a", b"croker-a", 1)
    assert f"it is put aside as {aside}; the table lacks its rows" in caplog.text
    ledger = Ledger(tmp_path)
    assert ledger.quarantined() == [aside]
    assert ledger.report(SPARK).quarantined_files == 1
    assert fold(SPARK, str(tmp_path)).damaged == ()
    # The fold takes the file after it was mended and moved back.
    Path(aside).unlink()
    Path(broken).parent.mkdir(parents=True, exist_ok=True)
    Path(broken).write_bytes(data)
    assert fold(SPARK, str(tmp_path)).rows == 2
    assert partitions(tmp_path) == {0: 2, 1: 2, 2: 3}
    assert ledger.quarantined() == []


def test_files_that_are_all_damaged_make_no_commit(tables):
    before = DeltaTable(tables).version()
    damage(spool(str(tables), 9900))
    summary = fold(SPARK, str(tables))
    assert (summary.folds, summary.rows, len(summary.damaged)) == (0, 0, 1)
    assert DeltaTable(tables).version() == before
    shutil.rmtree(tables / "_spool" / "_quarantine")
    assert left(tables) == []


@pytest.mark.parametrize("step", ["append", "deleted"])
def test_a_file_that_is_damaged_in_an_unfinished_fold_is_put_aside_unless_it_is_in(tables, step):
    number = {"append": 9910, "deleted": 9920}[step]
    spool(str(tables), number)
    path = spool(str(tables), number + 1)
    with pytest.raises(Killed):
        fold(SPARK, str(tables), on_step=kill_at(step))
    if step == "append":
        damage(path)
    summary = fold(SPARK, str(tables))
    rows_of = partitions(tables)
    assert (rows_of[number], rows_of[number + 1]) == ((2, 0) if step == "append" else (2, 2))
    assert len(summary.damaged) == (step == "append")
    shutil.rmtree(tables / "_spool" / "_quarantine", ignore_errors=True)
    assert left(tables) == []
