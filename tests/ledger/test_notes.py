"""Small files: a reader sees the complete text of one of several concurrent writers."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from deltalake import DeltaTable

from rocket_sink.ledger import notes as notes_module
from rocket_sink.ledger.notes import NoteStore
from rocket_sink.ledger.path import LedgerPath, resolve_path
from rocket_sink.plain_files import plain_files

WRITERS = 8
ROUNDS = 20


@pytest.mark.parametrize("replace", [True, False])
def test_writers_at_once_never_show_half_a_file(tmp_path, replace):
    start, files = threading.Barrier(WRITERS), plain_files(str(tmp_path))

    def write(writer):
        writes = []
        for number in range(ROUNDS):
            path = tmp_path / f"{number}.json"
            start.wait(timeout=60)
            has_written = files.handler.write_whole(
                str(path), bytes([65 + writer]) * 100_000, replace=replace
            )
            writes.append((has_written, path.read_bytes()))
        return writes

    with ThreadPoolExecutor(WRITERS) as threads:
        by_writer = list(threads.map(write, range(WRITERS)))
    for number in range(ROUNDS):
        results = [of_writer[number] for of_writer in by_writer]
        assert all(len(data) == 100_000 and len(set(data)) == 1 for _, data in results)
        assert sum(mine for mine, _ in results) == (WRITERS if replace else 1)
        if not replace:
            assert len({data for _, data in results}) == 1
    assert len(list(tmp_path.iterdir())) == ROUNDS


def test_writers_on_a_store_without_conditions_agree(tmp_path, monkeypatch):
    """Let two writers look before either writes; the second writes later."""
    place = LedgerPath(f"file:{tmp_path}", str(tmp_path), is_local=False)
    monkeypatch.setattr(notes_module, "_SETTLE_S", 4.0)
    both_have_looked, plain = threading.Barrier(2), NoteStore._put

    def put(store, path, data, **more):
        if "claims" in path:
            both_have_looked.wait(timeout=60)
            time.sleep(1.0 if b"late" in data else 0.0)
        return plain(store, path, data, **more)

    monkeypatch.setattr(NoteStore, "_put", put)

    def write(text):
        store = NoteStore(place, "queues")
        agreed, is_own = store.agree("t", text)
        assert store.read("t") == agreed
        return is_own, agreed

    with ThreadPoolExecutor(2) as threads:
        results = set(threads.map(write, ("early", "late")))
    assert results == {(False, "late"), (True, "late")}


def test_a_note_that_a_writer_meets_while_it_is_removed(tmp_path, monkeypatch):
    """A claim without its note would let the writer restore the removed note."""
    monkeypatch.setattr(notes_module, "_SETTLE_S", 0.0)
    store = NoteStore(LedgerPath(f"file:{tmp_path}", str(tmp_path), is_local=False), "queues")
    store.agree("t", "old")
    files = store._files

    class Stopping:
        def __getattr__(self, name):
            return getattr(files, name)

        def delete_file(self, path):
            files.delete_file(path)
            store._files = files
            assert store.agree("t", "new") == ("old", False)

    store._files = Stopping()
    store.remove("t")
    assert store.agree("t", "new") == ("new", True)


def test_on_a_store_an_empty_note_is_none_and_a_missing_one_can_be_removed(tmp_path, monkeypatch):
    """On Azure a note is empty until it is written; HDFS has an error of its own for no file."""
    pauses_s = []

    def sleep(pause_s):
        pauses_s.append(pause_s)
        if len(pauses_s) == 63:
            path.write_text('"at last"')

    clock = SimpleNamespace(monotonic=lambda: len(pauses_s) * 0.05, sleep=sleep)
    monkeypatch.setattr(notes_module, "time", clock)
    store = NoteStore(LedgerPath(f"file:{tmp_path}", str(tmp_path), is_local=False), "queues")
    path = Path(store.where("t"))
    path.parent.mkdir(parents=True)
    path.touch()
    assert store.read("t") is None and pauses_s == [0.05] * 61
    assert store.read("t") == "at last"
    assert store.agree("u", "text") == ("text", True) and pauses_s[63:] == [3.0]

    class Files:
        get_file_info = staticmethod(store._files.get_file_info)

        def delete_file(self, path):
            raise OSError("[Errno 5] HDFS delete failed")

    store._files = Files()
    with pytest.raises(OSError, match="HDFS"):
        store.remove("t")
    store.remove("none")


@pytest.mark.parametrize("is_there", [True, False])
def test_one_of_two_writes_of_an_agreed_note_may_fail(tmp_path, monkeypatch, is_there):
    """Azure and HDFS refuse the second write of a note at one moment."""
    place = LedgerPath(f"file:{tmp_path}", str(tmp_path), is_local=False)
    monkeypatch.setattr(notes_module, "_SETTLE_S", 0.0)
    plain = NoteStore._put

    def put(store, path, data, **more):
        if "claims" in path or is_there:
            plain(store, path, data, **more)
        if "claims" not in path:
            raise OSError("another writer is at work")

    monkeypatch.setattr(NoteStore, "_put", put)
    with nullcontext() if is_there else pytest.raises(OSError, match="another writer"):
        assert NoteStore(place, "queues").agree("t", "text") == ("text", True)


def test_the_first_commit_of_a_claim_keeps_its_text(tmp_path):
    place = resolve_path(tmp_path)
    assert notes_module.create_first_commit(place, "claim", "early") is None
    assert notes_module.create_first_commit(place, "claim", "late") is not None
    assert DeltaTable(tmp_path / "claim").metadata().description == "early"


def test_times_are_in_ms():
    assert notes_module.now_ms() == pytest.approx(time.time() * 1000, abs=60_000)
