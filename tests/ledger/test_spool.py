"""Spool files: readers of a torn file read exactly its complete batches; names tell owners.

No mutant of thousands gives a row that was not written: reading it returns rows of the original
table, or raises a typed error.
"""

import contextlib
import errno
import os
import random
import shutil
import sys
import textwrap
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pyarrow as pa
import pytest
from pyarrow import fs

from rocket_sink.errors import DamagedSpoolError, LedgerError
from rocket_sink.ledger.driver.fold import unfinished
from rocket_sink.ledger.notes import NoteStore
from rocket_sink.ledger.path import LedgerPath, resolve_path
from rocket_sink.ledger.records import in_flight_rows, replaced
from rocket_sink.ledger.schema import LEDGER_SCHEMA
from rocket_sink.ledger.transport import files as spool_files
from rocket_sink.ledger.transport import spool, stream
from rocket_sink.ledger.transport.files import has_earlier_attempt, new_name, sealed_files
from rocket_sink.ledger.transport.spool import SpoolWriter
from rocket_sink.ledger.transport.stream import _SEAL_SIZE, _state, read_batches
from rocket_sink.owner import this_process
from tests.python import run_python

from .values import accounts, context, letter, one_batch, sends, write_manifest, write_spool

LOCAL = fs.LocalFileSystem()


def files(root, suffix):
    return sorted((root / "_spool").rglob(f"*{suffix}"))


def offsets(path):
    return [o for b in read_batches(path, LOCAL) for o in b.column("queue_offset").to_pylist()]


def taken(root):
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


def test_a_file_shows_an_earlier_attempt_at_its_partition(place):
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
    for _ in range(2):
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
@pytest.mark.parametrize("sizes", [[10_000_000], [1_000, 100_000, 3_000_000]])
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


def test_what_is_put_aside_is_found_and_not_folded(tmp_path, place):
    sealed = Path(write_spool(str(tmp_path), context(), sends(context(), 1)))
    moved = Path(spool_files.put_aside(place, LOCAL, str(sealed)))
    assert moved.name == sealed.name
    assert moved.relative_to(place.quarantine) == sealed.relative_to(place.spool)
    assert taken(tmp_path) == []
    assert spool_files.quarantined(place) == [str(moved)]
    assert not spool_files.spooled_epochs(place)


@pytest.mark.parametrize(
    "name",
    ["../../../home/user/x.arrow", "q-x/../../x.arrow", "/etc/passwd", "q-x/0/x.txt", "x.arrow",
     "q-x_0_/../x.arrow", "q-x/0/1/x.arrow"],
)  # fmt: skip
def test_a_manifest_that_lists_other_files_is_refused(tmp_path, name, place):
    write_manifest(tmp_path, [name])
    with pytest.raises(LedgerError, match="is no spool file"):
        unfinished(NoteStore(place, "folds"))


def test_folds_that_died_are_completed_in_their_order(tmp_path):
    """The names of their notes have another order."""
    for number in (10, 9, 11):
        write_manifest(tmp_path, ["q-x/0/x.arrow"], number=number)
    manifests = unfinished(NoteStore(resolve_path(tmp_path), "folds"))
    assert [manifest.number for manifest in manifests] == [9, 10, 11]


MUTANTS = 1500


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    root = tmp_path_factory.mktemp("original")
    writer = SpoolWriter(str(root), context())
    writer.append(sends(context(), 3), letter(context(), tags="a", keys=[["k1", "k2"]]))
    writer.append(letter(context(), properties=[[("a", "1")]]), accounts(context(), acked=3))
    sealed = writer.seal()
    return Path(sealed).read_bytes()


def read(path):
    return list(read_batches(str(path), LOCAL))


def mutated(data, rng):
    """Return a mutant of the data; sometimes it is equal to the original."""
    at, other = rng.randrange(len(data)), rng.randrange(len(data))
    length = rng.choice((1, 2, 4, 8, 64, 512))
    old = data[at : at + length]
    new = rng.choice([
        bytes([old[0] ^ 1 << rng.randrange(8)]) + old[1:],
        bytes([rng.choice((0, 1, 0x7F, 0x80, 0xFF))]) + old[1:],
        rng.randbytes(len(old)), bytes(len(old)), b"", rng.randbytes(length) + old,
        data[other : other + length],
    ])  # fmt: skip
    return data[:at] + new + data[at + length :]


def test_of_many_mutants_none_gives_other_rows(original, tmp_path):
    path = tmp_path / "mutant.arrow"
    path.write_bytes(original)
    written = read(path)
    ends = Counter()
    for seed in range(MUTANTS):
        rng = random.Random(seed)
        data = mutated(original, rng)
        path.write_bytes(data)
        is_sealed = bool(_state(pa.BufferReader(data)))
        try:
            batches = read(path)
        except LedgerError as error:
            assert str(path) in str(error)
            ends[type(error).__name__] += 1
            continue
        pa.Table.from_batches(batches, LEDGER_SCHEMA).to_pylist()
        if is_sealed:
            assert [b.to_pylist() for b in batches] == [b.to_pylist() for b in written], seed
            ends["equal"] += 1
        else:  # A mutant with a damaged end counts as cut.
            assert all(a.equals(b) for a, b in zip(batches, written, strict=False)), seed
            ends["cut"] += 1
    # A change of bytes that no reader looks at, such as padding, raises no error.
    assert ends["DamagedSpoolError"] > 0.6 * MUTANTS, ends
    assert ends["LedgerError"] == 0, ends


def test_damage_before_the_last_batch_of_a_cut_file_is_no_cut(original, tmp_path):
    *before, last, _ = batches_cut(original)
    path = tmp_path / "killed.arrow"
    path.write_bytes(original)
    written = pa.Table.from_batches(read(path))
    cut = b"".join(before) + last + b"\xff"
    lost = 0
    # A power cut may leave the last batch's blocks unwritten.
    places = range(0, len(cut) - len(last), 61)
    for at in places:
        path.write_bytes(cut[:at] + bytes([cut[at] ^ 0x10]) + cut[at + 1 :])
        try:
            batches = read(path)
        except DamagedSpoolError:
            lost += 1
        else:
            assert pa.Table.from_batches(batches).equals(written), at
    assert lost > 0.5 * len(places)


def test_the_last_whole_batch_of_a_cut_file_has_the_bytes_that_the_cut_one_names(
    original, tmp_path
):
    """A power cut may write the blocks of a file in any order."""
    *before, last, _ = batches_cut(original)
    path = tmp_path / "killed.arrow"
    full = b"".join(before)
    cut = full + last[: len(last) - 100]
    path.write_bytes(cut)
    written = read(path)
    header = 8 + int.from_bytes(before[-1][4:8], "little")
    for at in range(len(full) - len(before[-1]) + header, len(full), 7):
        path.write_bytes(cut[:at] + bytes([cut[at] ^ 0x10]) + cut[at + 1 :])
        with pytest.raises(DamagedSpoolError):
            read(path)
    assert len(written) == len(before) - 1


def test_marks_in_a_body_cost_a_cut_file_one_reading(tmp_path, monkeypatch):
    writer = SpoolWriter(str(tmp_path), context())
    writer.append(sends(context(), 2), letter(context(), b"\xff\xff\xff\xffRS1" * (1 << 16)))
    [path] = (tmp_path / "_spool").rglob("*.open")
    size = path.stat().st_size - 100
    os.truncate(path, size)
    sizes, read_summed = [], stream._Summed.read
    monkeypatch.setattr(
        stream._Summed, "read", lambda self, n: (sizes.append(n), read_summed(self, n))[1]
    )
    assert [batch.num_rows for batch in read(path)] == [2]
    assert sum(sizes) < 1.1 * size


def test_lack_of_memory_is_no_damage(original, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise MemoryError

    path = tmp_path / "file.arrow"
    path.write_bytes(original)
    for lacking in ("_ledger_rows", "_Summed.read"):
        with monkeypatch.context() as full:
            full.setattr(f"rocket_sink.ledger.transport.stream.{lacking}", fail)
            with pytest.raises(LedgerError, match="cannot be read: MemoryError") as caught:
                read(path)
        assert not isinstance(caught.value, DamagedSpoolError)


NO_TEXT = pa.Array.from_buffers(
    pa.string(), 1, [None, pa.array([0, 2], pa.int32()).buffers()[1], pa.py_buffer(b"\xff\xff")]
)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [("kind", pa.array(["sent"]), "kind"), ("kind", pa.array([None], pa.string()), "kind"),
     ("topic", NO_TEXT, "UTF8")],
)  # fmt: skip
def test_values_that_no_task_writes(tmp_path, name, value, says):
    """The checksums are right, because the writer itself had no valid value."""
    path = write_spool(str(tmp_path), context(), replaced(sends(context()), {name: value}))
    with pytest.raises(DamagedSpoolError, match=says):
        read(Path(path))


def batches_cut(data):
    """Cut the file into its parts: the schema, the batches, the seal."""
    file = pa.BufferReader(data)
    parts, start = [], 0
    while start < len(data) - _SEAL_SIZE:
        pa.ipc.read_message(file)
        parts.append(data[start : file.tell()])
        start = file.tell()
    return [*parts, data[start:]]


@pytest.mark.parametrize(
    "order",
    [[0, 2, 3, 4, 5], [0, 1, 3, 2, 4, 5], [0, 1, 1, 2, 3, 4, 5], [0, 1, 2, 3, 5],
     [0, 1, 2, 3, 4, 5, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5, 5]],
)  # fmt: skip
def test_batches_that_are_missing_doubled_or_out_of_place(original, tmp_path, order):
    parts = batches_cut(original)
    assert b"".join(parts) == original
    path = tmp_path / "mixed.arrow"
    path.write_bytes(b"".join(parts[index] for index in order))
    with pytest.raises(DamagedSpoolError, match=str(path)):
        read(path)


def test_slices_are_read_as_they_were_written(tmp_path):
    writer = SpoolWriter(str(tmp_path), context())
    rows = sends(context(), 20)
    letters = one_batch([letter(context(), keys=[["k"] * n]) for n in range(20)])
    for start in range(0, 20, 7):
        writer.append(rows.slice(start, 5), letters.slice(start, 5))
    batches = read(Path(writer.seal()))
    expected = [b.slice(s, 5) for s in range(0, 20, 7) for b in (rows, letters)]
    assert [b.to_pylist() for b in batches] == [b.to_pylist() for b in expected]


@pytest.mark.parametrize("type_name", ["s3", "local"])
def test_a_storage_that_cannot_be_read_is_no_damage(type_name):
    def fail(*_):
        raise OSError("connection reset")

    file = SimpleNamespace(size=lambda: 1000, read=fail, read_at=fail)
    opened = contextlib.nullcontext(file)
    store = SimpleNamespace(type_name=type_name, open_input_file=lambda name: opened)
    with pytest.raises(LedgerError, match="connection reset") as caught:
        list(read_batches("bucket/file.arrow", store))
    assert not isinstance(caught.value, DamagedSpoolError)


def test_a_spool_file_in_a_dead_letters_body_is_no_part_of_the_file(original, tmp_path):
    """The batches behind a cut in such a body are whole, and the rows before it must go in."""
    writer = SpoolWriter(str(tmp_path), context())
    writer.append(sends(context(), 2), letter(context(), original * 2))
    [path] = (tmp_path / "_spool").rglob("*.open")
    data = path.read_bytes()
    path.write_bytes(data[: data.rindex(original) + len(original) // 2])
    assert [batch.num_rows for batch in read(path)] == [2]


def test_requests_in_flight_of_a_complete_attempt_are_not_taken_in(tmp_path):
    """Only an attempt that died leaves requests without an answer."""
    ctx = context()
    flight = in_flight_rows([1, 2], ctx, topic="t", message_count=[3, 4], body_bytes=[1, 1])
    for complete, expected in ((True, ["acked"]), (False, ["in_flight", "in_flight", "acked"])):
        account = accounts(ctx, complete=complete, acked=7)
        batches = read(Path(write_spool(str(tmp_path), ctx, flight, sends(ctx, 1), account)))
        outcomes = [value for batch in batches for value in batch["outcome"].to_pylist()]
        assert outcomes == [*expected, None]


@pytest.mark.parametrize(("failures", "succeeds"), [(0, True), (19, True), (20, False)])
def test_a_folder_that_folds_remove_is_made_again(monkeypatch, failures, succeeds):
    monkeypatch.setattr(spool, "make_folder_of", lambda *_: None)
    opened = MagicMock(side_effect=[FileNotFoundError] * failures + ["file"])
    files = SimpleNamespace(handler=SimpleNamespace(open=opened))
    refused = pytest.raises(OSError, match="of path is removed again and again")
    with contextlib.nullcontext() if succeeds else refused:
        assert spool._create(files, "path") == "file"
    opened.assert_called_with("path", "xb")
