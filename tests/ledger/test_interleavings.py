"""One process stops between two steps whose order matters, and another process passes it."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from deltalake import DeltaTable

from rocket_sink.ledger import notes as notes_module
from rocket_sink.ledger.driver import fold as fold_module
from rocket_sink.ledger.driver.fold import fold
from rocket_sink.ledger.driver.ledger import Ledger
from rocket_sink.ledger.notes import NoteStore
from rocket_sink.ledger.path import LedgerPath
from rocket_sink.ledger.transport.spool import SpoolWriter
from rocket_sink.plain_files import PlainFiles

from .values import context, sends, session


def test_a_fold_that_another_process_completes_between_the_look_and_the_log(tmp_path, monkeypatch):
    ledger, place, spark = Ledger(tmp_path), str(tmp_path), session()
    ledger.create(spark)
    writer = SpoolWriter(place, context())
    writer.append(sends(context(), 2))
    path = writer.seal()

    def stop(step: str) -> None:
        if step == "append":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fold(spark, place, on_step=stop)

    def before_another_fold(read: Callable[..., Any]) -> Callable[..., Any]:
        def read_first(*of: Any) -> Any:
            result = read(*of)
            if not isinstance(of[0], PlainFiles) or of[1] == [path]:
                passes.undo()
                assert fold(spark, place).recovered == 1
            return result

        return read_first

    monkeypatch.setattr(fold_module, "ledger_lock", lambda *_: contextlib.nullcontext(True))
    with monkeypatch.context() as passes:
        for owner, name in ((PlainFiles, "get_file_info"), (fold_module, "last_txn_version")):
            passes.setattr(owner, name, before_another_fold(getattr(owner, name)))
        fold(spark, place)
    assert DeltaTable(place).to_pyarrow_dataset().count_rows() == 2


def test_a_note_that_a_writer_meets_while_it_is_removed(tmp_path, monkeypatch):
    """A claim without its note would let the writer restore the removed note."""
    monkeypatch.setattr(notes_module, "_SETTLE_S", 0.0)
    store = NoteStore(LedgerPath(f"file:{tmp_path}", str(tmp_path), is_local=False), "queues")
    store.agree("t", "old")
    files = store._files

    class Stopping:
        def __getattr__(self, name: str) -> Any:
            return getattr(files, name)

        def delete_file(self, path: str) -> None:
            files.delete_file(path)
            store._files = files
            assert store.agree("t", "new") == ("old", False)

    store._files = Stopping()
    store.remove("t")
    assert store.agree("t", "new") == ("new", True)
