"""Spool files: readers of a torn file read exactly its complete batches; names tell owners."""

import errno
import os
import shutil
import sys
import textwrap
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import fs

from rocket_sink.errors import LedgerError
from rocket_sink.ledger.driver.fold import unfinished
from rocket_sink.ledger.notes import NoteStore
from rocket_sink.ledger.path import LedgerPath, resolve_path
from rocket_sink.ledger.schema import LEDGER_SCHEMA
from rocket_sink.ledger.transport import files as spool_files
from rocket_sink.ledger.transport import stream
from rocket_sink.ledger.transport.files import has_earlier_attempt, new_name, sealed_files
from rocket_sink.ledger.transport.spool import SpoolWriter
from rocket_sink.ledger.transport.stream import read_batches
from rocket_sink.owner import this_process
from tests.python import run_python

from .values import accounts, context, sends, write_manifest, write_spool

LOCAL = fs.LocalFileSystem()


def files(root: Path, suffix: str) -> list[Path]:
    return sorted((root / "_spool").rglob(f"*{suffix}"))


def offsets(path: str) -> list[int]:
    return [o for b in read_batches(path, LOCAL) for o in b.column("queue_offset").to_pylist()]


def taken(root: Path) -> list[str]:
    place = resolve_path(root)
    return [info.path for info in sealed_files(place, place.filesystem())]


@pytest.fixture
def writer(tmp_path):
    return SpoolWriter(str(tmp_path), context())


def test_rows_go_through_a_sealed_file(tmp_path, writer):
    writer.append(sends(context(), 3), accounts(context(), acked=3))
    [open_file] = files(tmp_path, ".open")
    assert taken(tmp_path) == []  # The owner lives.
    sealed = writer.seal()
    assert not open_file.exists()
    assert taken(tmp_path) == [sealed] and Path(sealed).stem == open_file.stem
    assert pa.Table.from_batches(list(read_batches(sealed, LOCAL))).num_rows == 4
    assert writer.seal() is None
    assert "/q-query/0/0-10-" in sealed


def test_each_seal_makes_a_file_of_the_rows_since_the_last_one(tmp_path, writer):
    for count in (0, 1, 1):
        writer.append(sends(context(), count))
        assert (writer.seal() is None) == (count == 0)
        assert (tmp_path / "_spool").exists() == (count > 0)
    assert len(taken(tmp_path)) == 2


def test_a_folder_that_another_task_makes_meanwhile_fails_none(tmp_path):
    """Arrow does not list the folder, but finds it when it looks again."""

    class Meanwhile:
        def get_file_info(self, selector):
            if not files(tmp_path, ".open"):
                SpoolWriter(str(tmp_path), context()).append(sends(context(), 1))
                raise FileNotFoundError(selector.base_dir)
            return LOCAL.get_file_info(selector)

    assert spool_files.next_number(context(), resolve_path(tmp_path), Meanwhile()) == 2


def test_an_aborted_attempts_rows_are_kept(tmp_path, writer):
    writer.append(sends(context(), 2))
    writer.abort()
    writer.abort()
    [path] = taken(tmp_path)
    assert offsets(path) == [0, 1]


def test_cut_at_every_byte_all_whole_batches_are_read(tmp_path, writer):
    """Read a batch as soon as a byte follows it: the next batch overwrites the seal behind it."""
    ends = []
    for index in range(3):
        writer.append(sends(context(), index + 1))
        [path] = files(tmp_path, ".open")
        ends.append(path.stat().st_size - stream._SEAL_SIZE)
    data = Path(writer.seal()).read_bytes()
    cut = tmp_path / "cut.arrow"
    steps = sorted({*range(0, len(data), 7), *(e + d for e in ends for d in range(-1, 15))})
    for size in steps:
        cut.write_bytes(data[:size])
        complete = sum(end < size for end in ends)
        assert offsets(str(cut)) == [i for n in range(complete) for i in range(n + 1)], size


def test_blocks_that_were_never_written_are_not_rows(tmp_path, writer):
    """Reject blocks of zeros: a file may have its full length after a power cut."""
    writer.append(sends(context(), 2))
    [path] = files(tmp_path, ".open")
    first = path.stat().st_size
    writer.append(sends(context(), 2))
    data = path.read_bytes()
    seal = len(data) - stream._SEAL_SIZE
    for start in (first, first + 200, data.rindex(b"sendsend"), *range(seal - 3000, seal, 97)):
        path.write_bytes(data[:start] + b"\0" * (len(data) - start))
        assert offsets(str(path)) == [0, 1], start
    path.write_bytes(data + bytes(3000))
    assert offsets(str(path)) == [0, 1, 0, 1]


def test_a_live_task_whose_file_was_taken_fails(tmp_path, writer):
    writer.append(sends(context(), 1))
    [path] = files(tmp_path, ".open")
    path.rename(path.with_suffix(".arrow"))
    writer.append(sends(context(), 1))
    with pytest.raises(LedgerError, match="must run again"):
        writer.seal()


def run_script(text, **values):
    """Run a script with the tests' modules in a process of its own."""
    path = [str(Path(__file__).parents[1]), *sys.path]
    code = f"import sys; sys.path[:0] = {path!r}\n" + textwrap.dedent(text).format(**values)
    return run_python("-X", "dev", "-c", code, timeout_s=120, may_fail=True)


KILLED = """
    import os, signal
    from ledger.values import context, sends
    from rocket_sink.ledger.transport.spool import SpoolWriter
    writer = SpoolWriter({root!r}, context())
    writer.append(sends(context(), 2))
    writer.append(sends(context(), 3))
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_workers_rows_are_taken(tmp_path):
    run_script(KILLED, root=str(tmp_path))
    assert len(files(tmp_path, ".open")) == 1
    [sealed] = taken(tmp_path)
    assert offsets(sealed) == [0, 1, 0, 1, 2]
    assert taken(tmp_path) == [sealed]


@pytest.mark.parametrize(
    ("sealed", "owner", "is_taken"),
    [
        ("0-2-2-abc", "elsewhere~12~34", True),
        ("driver--2-abc", "elsewhere~12~34", True),  # The epoch is done.
        ("1-2-2-abc", "elsewhere~12~34", False),  # This is another partition.
        ("0-0-0-abc", "elsewhere~12~34", False),  # This is an earlier attempt.
        ("0-2-2-abc", "", False),  # A second copy of the task lives.
    ],
)
def test_another_hosts_file_is_taken_when_its_attempt_does_not_count(
    tmp_path, sealed, owner, is_taken
):
    """Take such files before the hour is over: the epoch's accounts need their doubled rows."""
    folder = tmp_path / "_spool" / "q-x" / "0"
    folder.mkdir(parents=True)
    path = folder / f"0-1-1-abc~{owner or this_process()}.open"
    again = folder / f"{sealed}~elsewhere~1~2.arrow"
    path.touch()
    again.touch()
    assert (str(path.with_suffix(".arrow")) in taken(tmp_path)) == is_taken
    assert str(again) in taken(tmp_path)
    if owner and not is_taken:  # Take each file that nobody has written to for long.
        old = path.stat().st_mtime - spool_files.STALE_AFTER_S - 60
        os.utime(path, (old, old))
        assert str(path.with_suffix(".arrow")) in taken(tmp_path)


@pytest.mark.parametrize("query_id", ["../../etc", "_hidden", "", "a/b", "q" * 500, "ü\n"])
def test_a_query_id_is_only_ever_one_folder(query_id):
    folder, epoch, file = new_name(context(query_id=query_id)).split("/")
    assert epoch == "0"
    assert folder.startswith("q-")
    assert len(file) < 250
    assert (folder + file).isascii()


def test_a_file_shows_an_earlier_attempt_at_its_partition(tmp_path):
    place = resolve_path(tmp_path)
    writer = SpoolWriter(place, context(partition=1))
    writer.append(sends(context(), 1))
    earlier = [
        has_earlier_attempt(context(**change), place)
        for change in (
            {"partition": 1, "task_attempt_id": 11}, {"partition": 11}, {"partition": 0},
            {"partition": 1, "epoch": 1}, {"partition": 1, "query_id": "quer"},
        )
    ]  # fmt: skip
    assert earlier == [True, False, False, False, False]
    writer.seal()
    assert has_earlier_attempt(context(partition=1), place)


@pytest.mark.parametrize(
    ("columns", "value"),
    [
        ([*LEDGER_SCHEMA][:-1], 1), ([*LEDGER_SCHEMA, pa.field("new", pa.string())], 1),
        ([f for f in LEDGER_SCHEMA if f.name != "message_count"], None),
        ([*LEDGER_SCHEMA][::-1], 1),
    ],
)  # fmt: skip
def test_a_file_of_another_version_is_read(tmp_path, monkeypatch, columns, value):
    """Set columns that the file lacks to null, and leave out columns that the ledger lacks."""
    rows = sends(context(), 2, message_count=1)
    with monkeypatch.context() as other_version:
        other_version.setattr(stream, "LEDGER_SCHEMA", pa.schema(columns))
        arrays = [rows[f.name] if f in LEDGER_SCHEMA else pa.array(["x", "y"]) for f in columns]
        batch = pa.RecordBatch.from_arrays(arrays, schema=pa.schema(columns))
        path = write_spool(str(tmp_path), context(), batch)
    [batch] = read_batches(path, LOCAL)
    assert batch.schema == LEDGER_SCHEMA
    assert batch["message_count"].to_pylist() == [value, value]
    assert batch["queue_offset"].equals(rows["queue_offset"])


def test_a_folder_that_cannot_be_written_is_a_clear_error(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    with pytest.raises(LedgerError, match="need to write"):
        SpoolWriter(str(blocked), context()).append(sends(context(), 1))


def test_the_oldest_query_is_folded_first_and_the_newest_rows_are_shown(tmp_path, monkeypatch):
    """Only the newest rows are shown if the spool is large."""
    sealed = {}
    for written_s, query in ((200, "a"), (300, "b"), (100, "b")):
        ctx = context(query_id=query, epoch=written_s)
        sealed[written_s] = write_spool(str(tmp_path), ctx, sends(ctx, 1))
        os.utime(sealed[written_s], (written_s, written_s))
    assert taken(tmp_path) == [sealed[100], sealed[300], sealed[200]]
    sizes = [Path(sealed[written_s]).stat().st_size for written_s in (200, 300)]
    for size, shown in ((sum(sizes), [300, 200]), (sum(sizes) - 1, [300]), (sizes[1] - 1, [])):
        monkeypatch.setattr(spool_files, "_MOST_UNFOLDED_BYTES", size)
        rows = spool_files.spooled_rows([resolve_path(tmp_path)])
        assert rows["epoch"].to_pylist() == shown


def test_what_a_failed_write_leaves_is_for_the_next_fold(tmp_path, monkeypatch, writer):
    """Leave the remains of a failed write to the next fold: the process may live for days."""

    def fsync(handle):
        raise OSError(errno.EIO, "Input/output error")

    writer.append(sends(context(), 2))
    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(LedgerError, match="cannot write the spool"):
        writer.sync()
    writer.abort()
    [sealed] = taken(tmp_path)
    assert offsets(sealed) == [0, 1]


def test_a_seal_is_durable_before_it_is_seen(monkeypatch, writer):
    """Sync the file's bytes before its new name, and the name before `seal` returns."""
    calls = []
    real_fsync, real_rename = os.fsync, os.rename

    def fsync(handle):
        real_fsync(handle)
        calls.append(("fsync", os.readlink(f"/proc/self/fd/{handle}")))

    def rename(name, target, **folders):
        path = Path(os.readlink(f"/proc/self/fd/{folders['src_dir_fd']}"), name)
        calls.append(("rename", str(path), path.stat().st_size))
        return real_rename(name, target, **folders)

    writer.append(sends(context(), 3))
    open_file = writer._path
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    writer.sync()
    assert calls == [("fsync", open_file), ("fsync", str(Path(open_file).parent))]
    calls.clear()
    sealed = Path(writer.seal())
    assert calls == [
        ("fsync", open_file),
        ("rename", open_file, sealed.stat().st_size),  # The buffer is empty.
        ("fsync", str(sealed.parent)),
    ]


def test_a_small_file_is_durable_before_it_is_seen(tmp_path, monkeypatch):
    calls, real_fsync = [], os.fsync

    def fsync(handle):
        real_fsync(handle)
        name = Path(os.readlink(f"/proc/self/fd/{handle}"))
        calls.append((name.suffix, sorted(p.suffix for p in tmp_path.iterdir())))

    monkeypatch.setattr(os, "fsync", fsync)
    files = resolve_path(tmp_path).filesystem()
    assert files.handler.write_whole(f"{tmp_path}/a.json", b"{}", replace=True)
    assert calls == [(".part", [".part"]), ("", [".json"])]


def test_a_fold_that_is_faster_than_the_end_of_a_seal_fails_no_task(monkeypatch, writer):
    writer.append(sends(context(), 3))
    real_rename = os.rename

    def rename_and_fold(name, target, **folders):
        folder = os.readlink(f"/proc/self/fd/{folders['src_dir_fd']}")
        real_rename(name, target, **folders)
        Path(folder, target).unlink()
        Path(folder).rmdir()

    monkeypatch.setattr(os, "rename", rename_and_fold)
    assert writer.seal() is not None


FULL = """
    import resource, sys
    # A module that is compiled below the limit would be kept without its end, for all processes.
    sys.dont_write_bytecode = True
    from ledger.values import context, letter, sends
    from rocket_sink.errors import LedgerError
    from rocket_sink.ledger.path import LedgerPath
    from rocket_sink.ledger.transport.spool import SpoolWriter
    resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
    place = LedgerPath("file:" + {root!r}, {root!r}, is_local={is_local})
    for size in {sizes}:
        writer = SpoolWriter(place, context())
        try:
            for _ in range(100):
                writer.append(letter(context(), b"x" * size))
            writer.seal()
        except LedgerError as error:
            assert "cannot write the spool" in str(error), error
            assert {root!r} in str(error), error
        else:
            raise SystemExit("nothing was raised for %d bytes" % size)
        writer.abort()
        del writer
    print("done")
"""


@pytest.mark.parametrize("is_local", [True, False])
@pytest.mark.parametrize("sizes", [[1_000], [100_000], [10_000_000], [1_000, 100_000, 3_000_000]])
def test_a_full_disk_is_a_ledger_error_whatever_the_task_writes(tmp_path, is_local, sizes):
    done = run_script(FULL, root=str(tmp_path), limit=300_000, sizes=sizes, is_local=is_local)
    assert done.stdout == "done\n", done.stderr
    assert "OSError" not in done.stderr


@pytest.mark.parametrize("act", ["seal", "sync"])
def test_a_deleted_file_is_not_blamed_on_a_fold_alone(tmp_path, writer, act):
    writer.append(sends(context(), 1))
    Path(writer._path).unlink()
    if act == "seal":
        with pytest.raises(LedgerError, match="it was deleted, or a fold took it"):
            writer.seal()
    writer.append(sends(context(), 1))
    shutil.rmtree(tmp_path / "_spool")
    with pytest.raises(LedgerError, match="was deleted while tasks wrote") as caught:
        getattr(writer, act)()
    assert "a fold took it" not in str(caught.value)


def test_what_a_link_shows_is_no_spool_file(tmp_path):
    """Ignore links: a fold deletes the files that it has taken, also in a linked folder."""
    elsewhere = Path(write_spool(str(tmp_path / "other"), context(), sends(context(), 1)))
    sealed = write_spool(str(tmp_path / "ledger"), context(), sends(context(), 1))
    spool = tmp_path / "ledger" / "_spool"
    (spool / "q-linked").symlink_to(elsewhere.parents[1])
    (spool / "q-query" / "7").symlink_to(elsewhere.parent)
    (spool / "q-query" / "0" / "0-1-x~y.arrow").symlink_to(elsewhere)
    (spool / "q-query" / "0" / "0-1-x~y.open").symlink_to(elsewhere)
    assert taken(tmp_path / "ledger") == [sealed]
    # The user's own path to the ledger has a link.
    (tmp_path / "link").symlink_to(tmp_path / "ledger")
    assert len(taken(tmp_path / "link")) == 1


def test_an_object_store_gets_one_file_with_the_seal_and_no_folder(tmp_path):
    place = LedgerPath(f"file:{tmp_path}", str(tmp_path), is_local=False)
    spool = tmp_path / "_spool"
    for epoch in (3, 12):
        writer = SpoolWriter(place, context(epoch=epoch))
        writer.append(sends(context(epoch=epoch), 2))
        writer.append(sends(context(epoch=epoch), 1))
        assert not list(spool.glob(f"q-query_{epoch}_*"))
        assert offsets(writer.seal()) == [0, 1, 0]
    names = sorted(path.name.split("_")[:2] for path in spool.glob("*.arrow"))
    assert names == [["q-query", "12"], ["q-query", "3"]]
    assert all(path.is_file() for path in spool.iterdir())
    assert len(spool_files.spooled_epochs(place)) == 2
    # On Azure a file that is being written is empty, so a fold may not take and delete it.
    next(iter(spool.glob("*.arrow"))).write_bytes(b"")
    assert len(spool_files.sealed_files(place, place.filesystem())) == 1


def test_what_is_put_aside_is_found_and_not_folded(tmp_path):
    sealed = Path(write_spool(str(tmp_path), context(), sends(context(), 1)))
    place = resolve_path(tmp_path)
    moved = Path(spool_files.put_aside(place, LOCAL, str(sealed)))
    assert moved.name == sealed.name
    assert moved.relative_to(place.quarantine) == sealed.relative_to(place.spool)
    assert taken(tmp_path) == []
    assert spool_files.quarantined(place) == [str(moved)]
    assert not spool_files.spooled_epochs(place)


@pytest.mark.parametrize("is_local", [True, False])
def test_a_query_that_writes_here_is_known_by_its_files(tmp_path, is_local):
    place = LedgerPath(f"file:{tmp_path}", str(tmp_path), is_local=is_local)
    write_spool(place, context(query_id="a_b", epoch=-1), sends(context(), 1))
    queries = [name for name in ("a_b", "a", "b") if spool_files.has_files(place, LOCAL, name)]
    assert queries == ["a_b"]


@pytest.mark.parametrize(
    "name",
    ["../../../home/user/x.arrow", "q-x/../../x.arrow", "/etc/passwd", "q-x/0/x.txt", "x.arrow",
     "q-x_0_/../x.arrow", "q-x/0/1/x.arrow"],
)  # fmt: skip
def test_a_manifest_that_lists_other_files_is_refused(tmp_path, name):
    place = resolve_path(tmp_path)
    write_manifest(tmp_path, [name])
    with pytest.raises(LedgerError, match="is no spool file"):
        unfinished(NoteStore(place, "folds"))


def test_folds_that_died_are_completed_in_their_order(tmp_path):
    """The names of their notes have another order."""
    for number in (10, 9, 11):
        write_manifest(tmp_path, ["q-x/0/x.arrow"], number=number)
    manifests = unfinished(NoteStore(resolve_path(tmp_path), "folds"))
    assert [manifest.number for manifest in manifests] == [9, 10, 11]
    write_manifest(tmp_path, ["q-x/0/x.arrow"], number=12).rename(
        tmp_path / "_notes" / "folds" / "13-t.json"
    )
    with pytest.raises(LedgerError, match=r"13-t\.json cannot be read: it belongs in '12-t'"):
        unfinished(NoteStore(resolve_path(tmp_path), "folds"))
