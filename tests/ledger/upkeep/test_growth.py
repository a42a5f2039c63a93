"""The upkeep of a ledger: merged files, checkpoints, a short log; appends must not notice."""

import contextlib
import dataclasses
import datetime as dt
import json
import os
import shutil
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError, DeltaError

from rocket_sink.errors import LedgerError
from rocket_sink.ledger.append.delta_rs import (
    StoredFile,
    as_dataset,
    commit,
    open_table,
    stored_files,
)
from rocket_sink.ledger.append.follower import LedgerFollower
from rocket_sink.ledger.path import LedgerPath
from rocket_sink.ledger.query.backfill_marks import noted_since
from rocket_sink.ledger.query.duckdb_reader import open_quick
from rocket_sink.ledger.transport.data_files import write_data_files
from rocket_sink.ledger.upkeep import growth as growth_module
from rocket_sink.ledger.upkeep import rewrite as rewrite_module
from rocket_sink.ledger.upkeep.growth import clean_up, keep_small, merge
from rocket_sink.ledger.upkeep.rewrite import rewrite
from tests.growth import TASKS, Growth
from tests.ledger.views import quick_ledger

from ..values import context, letter, refusal, sends

EPOCHS = 60
KEPT_S = 600.0


def by_delta_rs(folder):
    """Count accounts of tasks by epoch, read by delta-rs."""
    rows = DeltaTable(folder).to_pyarrow_table(columns=["kind", "epoch", "partition"])
    epochs = rows.filter((pc.field("kind") == "epoch") & pc.field("partition").is_valid())
    counts = epochs.group_by("epoch").aggregate([([], "count_all")]).to_pylist()
    return {row["epoch"]: row["count_all"] for row in counts}


@pytest.fixture
def growth(tmp_path):
    return Growth(str(tmp_path / "ledger"), KEPT_S)


def test_files_and_log_stay_few(tmp_path, monkeypatch):
    """Merge at each tenth commit; remove commits after their time, and the files they replaced."""
    monkeypatch.setattr(growth_module, "_CLEAN_UP_COMMITS", 10)
    growth = Growth(str(tmp_path / "ledger"), 0.001)
    growth.grow()
    stale = tmp_path / "ledger" / "_delta_log" / "._last_checkpoint.crc"
    stale.touch()  # Spark's Delta would take delta-rs's checkpoint for damaged.
    pinned = DeltaTable(growth.place.root).to_pyarrow_dataset().count_rows()
    growth.grow_by(2 * EPOCHS)
    folder = tmp_path / "ledger"
    assert pinned == len(growth.template) and not stale.exists()
    assert len(DeltaTable(folder).file_uris()) < 40
    assert len(list(folder.glob("kind=*/*"))) < 120
    assert len(list((folder / "_delta_log").glob("*.json"))) < EPOCHS
    assert by_delta_rs(folder) == dict.fromkeys(range(2 * EPOCHS + 1), TASKS)
    quick = quick_ledger(folder)
    assert quick.query("SELECT count(*) AS n, bool_and(adds_up) AS ok FROM epochs").to_pylist() == [
        {"n": 2 * EPOCHS + 1, "ok": True}
    ]


def test_a_stream_that_stopped_finds_each_commit_and_its_files(tmp_path, monkeypatch):
    """Keep replaced files as long as the log, although checkpoints name them no longer."""
    monkeypatch.setattr(growth_module, "_CLEAN_UP_COMMITS", 30)
    growth = Growth(str(tmp_path / "ledger"), KEPT_S, named_s=0.001)
    follower = LedgerFollower(growth.place, {"epoch": ("epoch",)})
    growth.grow_by(2 * EPOCHS)
    read = [n for _, rows in follower.new_rows() for n in set(rows["epoch"].to_pylist())]
    assert read == list(range(2 * EPOCHS))
    checkpoints = sorted(Path(growth.place.root, "_delta_log").glob("*.checkpoint.parquet"))
    assert len(pq.read_table(checkpoints[-1])["remove"].drop_null()) < EPOCHS / 2
    versions = [int(path.name[:20]) for path in checkpoints]
    assert [version // 30 for version in versions[:-5]] == [0, 1, 2]
    assert {later - earlier for earlier, later in pairwise(versions[-5:])} == {10}
    assert DeltaTable(growth.place.root, version=55).version() == 55


@pytest.mark.parametrize(("actions", "version"), [(499, 18), (550, 19), (10**6, 58)])
def test_checkpoints_of_many_files_are_seldom(growth, monkeypatch, actions, version):
    """Clean up whenever a number of versions has passed, here 15, and not at each checkpoint."""
    clean_ups = []
    for name, value in (("_PASS_COMMITS", 1), ("_CLEAN_UP_COMMITS", 15), ("merge", lambda *_: 0)):
        monkeypatch.setattr(growth_module, name, value)
    monkeypatch.setattr(growth_module, "clean_up", lambda _, table: clean_ups.append(table))
    log = Path(growth.place.root, "_delta_log")
    for checkpoints in (["9"], ["9", str(version)]):
        while len(names := sorted(log.glob("*.checkpoint.parquet"))) < len(checkpoints):
            growth.grow()
        assert [name.name[:20].lstrip("0") for name in names] == checkpoints
        note = json.loads((log / "_last_checkpoint").read_bytes())
        (log / "_last_checkpoint").write_text(json.dumps({**note, "size": actions}))
    assert len(clean_ups) == 1


KIB, MIB = 1024, 1024 * 1024


@pytest.mark.parametrize(
    ("sizes", "everything", "merged"),
    [
        ([1] * 7, False, 0), ([1] * 8, False, 8), ([1] * 8 + [32 * KIB], False, 8),
        ([1] * 7 + [(1, 511)], False, 8), ([1] * 7 + [(1, 512)], False, 0),
        ([1] * 7 + [32 * KIB - 1], False, 8), ([1] * 7 + [32 * KIB], False, 0),
        ([1] * 7 + [32 * KIB] * 8, False, 15), ([16 * MIB - 1] * 8, False, 8),
        ([16 * MIB] * 8, False, 0), ([16 * MIB] * 8, True, 0), ([1, 16 * MIB], True, 0),
        ([1, 16 * MIB - 1], True, 2),
    ],
)  # fmt: skip
def test_small_files_are_merged_by_tiers(monkeypatch, sizes, everything, merged):
    """Judge a file by its bytes, or by 64 bytes for each of its rows if these are more."""
    place, groups = LedgerPath("file:/ledger", "/ledger", is_local=True), []
    ages = [dt.datetime(2026, 3, 1 + n % 9) if n % 4 else None for n in range(len(sizes))]
    files = [
        StoredFile(f"{kind}{n}", kind, *(size if isinstance(size, tuple) else (size, 0)), ages[n])
        for kind in ("send", "epoch")
        for n, size in enumerate(sizes)
    ]
    monkeypatch.setattr(growth_module, "stored_files", lambda *_: files)
    monkeypatch.setattr(growth_module, "rewrite", lambda *parts: groups.extend(parts[2]) or True)
    expected = (2 * merged, 2) if merged else (0, 0)
    assert merge(place, None, everything=everything) == expected
    for group in groups:
        assert len({file.kind for file in group}) == 1 and len(group) == merged
        oldest = [file.oldest or dt.datetime.min for file in group]
        assert oldest == sorted(oldest)
    monkeypatch.setattr(growth_module, "rewrite", lambda *_: False)
    assert merge(place, None, everything=everything) == (0, 0)


def test_each_tenth_commit_merges_files(monkeypatch, caplog):
    place, opened = LedgerPath("file:/ledger", "/ledger", is_local=True), []
    monkeypatch.setattr(growth_module, "open_table", opened.append)
    for version, merges, rows, is_due in (
        (12, True, 1, True), (21, True, 1, False), (22, False, 1, False), (22, True, None, False),
        (22, True, 0, True), (31, True, 1, False), (5, True, 1, True), (14, True, 1, False),
        (15, True, 1, True),
    ):  # fmt: skip
        sequence = (version << 32) + 7
        append = SimpleNamespace(place=place, merges=merges, rows=rows, sequence=sequence)
        keep_small(append)
        assert opened == [place] * is_due
        opened.clear()

    def fail(_):
        raise ValueError("no table")

    monkeypatch.setattr(growth_module, "open_table", fail)
    append.sequence = 25 << 32
    keep_small(append)
    assert caplog.messages == ["the ledger /ledger is not kept small now: no table"]


RETENTION = "delta.logRetentionDuration"


@pytest.mark.parametrize(
    ("settings", "age_s", "goes"),
    [
        ({RETENTION: "interval 2 days"}, 2 * 86_400 - 59, True),
        ({RETENTION: "interval 2 days"}, 2 * 86_400 - 60, False),
        ({RETENTION: "interval 1 hour"}, 3541, True), ({RETENTION: "interval 1 hour"}, 3539, False),
        ({RETENTION: "interval 1 hour", "delta.enableExpiredLogCleanup": "true"}, 9999, True),
        ({RETENTION: "interval 1 hour", "delta.enableExpiredLogCleanup": "false"}, 9999, None),
        ({RETENTION: "interval 1 month"}, 10**8, None), ({}, 10**8, None),
    ],
)  # fmt: skip
def test_replaced_files_go_with_their_commits(growth, monkeypatch, settings, age_s, goes):
    """Let the clock of the clean-up stand still; delta-rs deletes commits by its own clock."""
    growth.grow_by(2)
    merge(growth.place, open_table(growth.place), everything=True)
    newest = open_table(growth.place)
    named = {file.path for file in stored_files(growth.place, newest)}
    metadata, deleted = SimpleNamespace(configuration=settings), []
    stand_in = SimpleNamespace(
        metadata=lambda: metadata, version=newest.version,
        get_add_actions=newest.get_add_actions, cleanup_metadata=lambda: deleted.append("log"),
    )  # fmt: skip
    monkeypatch.setattr(growth_module, "time", SimpleNamespace(time=lambda: 1e9))
    root = Path(growth.place.root)
    for path in root.glob("_delta_log/*.json"):
        os.utime(path, (1e9 - age_s,) * 2)
    before = {str(path.relative_to(root)) for path in root.glob("kind=*/*")}
    clean_up(growth.place, stand_in)
    after = {str(path.relative_to(root)) for path in root.glob("kind=*/*")}
    assert after == (named if goes else before) != (before if goes else named)
    assert bool(deleted) == (goes is not None)


@pytest.mark.parametrize("name", ["kind=send/../../../outside.parquet", "_spool/q-x/0/x.arrow"])
def test_a_forged_commit_deletes_no_other_file(growth, tmp_path, name):
    growth.grow()
    other = Path(growth.place.root, name)
    other.parent.mkdir(parents=True, exist_ok=True)
    other.write_text("a file of somebody else")
    forged = {"remove": {"path": name, "partitionValues": {"kind": "send"}, "dataChange": False}}
    commit_file = Path(growth.place.root, "_delta_log", f"{2:020}.json")
    commit_file.write_text(json.dumps(forged))
    os.utime(commit_file, (1, 1))
    with contextlib.suppress(LedgerError):
        clean_up(growth.place, open_table(growth.place))
    assert other.exists()


def test_an_open_reader_and_an_old_version_live_on(growth):
    growth.grow_by(5)
    reader, version = open_quick(growth.place.root), DeltaTable(growth.place.root).version()
    growth.grow_by(EPOCHS)
    assert reader.query("SELECT count(*) AS n FROM epochs").to_pylist() == [{"n": 5}]
    old = DeltaTable(growth.place.root, version=version)
    assert len(set(old.to_pyarrow_table(columns=["epoch"])["epoch"].to_pylist())) == 5


@pytest.mark.parametrize("is_same", [True, False])
def test_of_two_rewrites_of_the_same_files_one_is_refused(growth, is_same):
    """Refuse one of two compactions of the same files: delta-rs would accept both, and double each
    row. Rewrites of other files go in both: an expiry of a large ledger takes longer than it takes
    until folds are merged again."""
    growth.grow_by(4)
    first, second = (open_table(growth.place) for _ in range(2))
    files = stored_files(growth.place, first)
    assert rewrite(growth.place, first, [files if is_same else files[:4]])
    assert rewrite(growth.place, second, [files if is_same else files[4:]]) != is_same
    assert by_delta_rs(growth.place.root) == dict.fromkeys(range(4), TASKS)
    table = DeltaTable(growth.place.root)
    assert len(table.file_uris()) == (2 if is_same else 4)
    number = table.transaction_version(f"rocket-sink/rewrites/{table.metadata().id}")
    assert number == (1 if is_same else 2)


@pytest.mark.parametrize(
    ("errors", "is_committed", "result"),
    [
        ([CommitFailedError("conflict")] * 9, False, True),
        ([CommitFailedError("conflict")] * 10, False, False),
        ([DeltaError("the answer is lost")], True, True),
        ([DeltaError("the disk")], False, (LedgerError, r"cannot rewrite .* ledger .*: the disk")),
        ([CommitFailedError("no log")], None, (LedgerError, "cannot rewrite .* ledger .*: no log")),
        ([ValueError("a defect")], False, (ValueError, "a defect")),
    ],
)
def test_a_rewrite_that_fails_is_tried_again_if_that_helps(
    growth, monkeypatch, errors, is_committed, result
):
    growth.grow()
    table = open_table(growth.place)
    files, write = stored_files(growth.place, table), rewrite_module.write_version

    def write_or_fail(*arguments):
        if is_committed is None:
            shutil.rmtree(Path(growth.place.root, "_delta_log"))
        if is_committed or not errors:
            write(*arguments)
        if errors:
            raise errors.pop()

    monkeypatch.setattr(rewrite_module, "write_version", write_or_fail)
    if isinstance(result, tuple):
        with pytest.raises(result[0], match=result[1]) as failed:
            rewrite(growth.place, table, [files])
        assert getattr(failed.value, "path", growth.place.uri) == growth.place.uri
    else:
        assert rewrite(growth.place, table, [files]) == result
    assert is_committed is None or by_delta_rs(growth.place.root) == {0: TASKS}


def test_an_append_that_began_before_a_rewrite_goes_in(growth):
    """Append by a second driver, whose epoch took longer than the log reaches back."""
    growth.grow_by(5)
    older = open_table(growth.place)
    merge(growth.place, open_table(growth.place), everything=True)
    DeltaTable(growth.place.root).create_checkpoint()
    Path(growth.place.root, "_delta_log", f"{older.version():020}.json").unlink()
    files = write_data_files(growth.place, [sends(context(query_id="begun"))])
    commit(growth.place, older, files, "begun", 0)
    assert by_delta_rs(growth.place.root) == dict.fromkeys(range(5), TASKS)
    rows = DeltaTable(growth.place.root).to_pyarrow_table(columns=["query_id"])
    assert rows["query_id"].to_pylist().count("begun") == 1


def test_the_table_is_append_only_for_others(growth):
    growth.grow_by(12)
    with pytest.raises(CommitFailedError, match="append-only"):
        DeltaTable(growth.place.root).delete("epoch = 3")


@pytest.mark.parametrize("name", ["ledger", "ledger[1]"])
def test_times_that_spark_wrote_do_not_wrap(tmp_path, name):
    """Read INT96 of Spark's OPTIMIZE: nanoseconds cannot express the years 1, 2300 and 9999.

    DuckDB reads a folder whose name is a pattern through Arrow.
    """
    place = Growth(str(tmp_path / name), KEPT_S).place
    zone = dt.timezone.utc
    moments = [dt.datetime(year, 6, 1, tzinfo=zone) for year in (1, 2300, 9999)]
    times = pa.array(moments, pa.timestamp("us", "UTC"))
    batches = [letter(context(), event_time=times[n : n + 1]) for n in range(len(moments))]
    [file] = write_data_files(place, batches)
    path = Path(place.root, file.path)
    rows = pq.read_table(path, partitioning=None)
    pq.write_table(rows, path, use_deprecated_int96_timestamps=True)
    table = open_table(place)
    commit(place, table, [dataclasses.replace(file, size=path.stat().st_size)], "", 0)
    for _ in range(2):
        quick, table = quick_ledger(place.root), open_table(place)
        by_duckdb = quick.query("SELECT event_time FROM letters ORDER BY event_time")
        assert [row["event_time"] for row in by_duckdb.to_pylist()] == moments
        by_arrow = as_dataset(table).to_table(columns=["event_time"])
        assert sorted(row["event_time"] for row in by_arrow.to_pylist()) == moments
        assert rewrite(place, table, [stored_files(place, table)])


def test_a_backfill_whose_plan_is_older_than_the_log_is_told(growth):
    """Refuse the backfill: it would send letters that were parked by commits that are gone."""
    growth.grow()
    version = DeltaTable(growth.place.root).version()
    growth.grow()
    assert noted_since(growth.place, version)[0] == set()
    log = Path(growth.place.root, "_delta_log")
    add = {"path": "kind=resolution/x.parquet", "partitionValues": {"kind": "resolution"}}
    file = Path(growth.place.root, add["path"])
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(b"no rows")
    for line in ("{", json.dumps({"add": add}), json.dumps({"add": {**add, "dataChange": True}})):
        (log / f"{version + 1:020}.json").write_text(line)
        text = f"cannot read what was settled .* version {version}: "
        with refusal(growth.place.uri, text):
            noted_since(growth.place, version)
    (log / f"{version:020}.json").unlink()
    with pytest.raises(LedgerError, match="no longer reaches back"):
        noted_since(growth.place, version)
