"""Beside another fold, code that would decide on stale rows refuses; views report the fold."""

import os
from functools import partial
from typing import Any

import pytest

from rocket_sink.commands.common.ledger_input import fold_and_note
from rocket_sink.errors import LedgerError
from rocket_sink.ledger.driver import ledger as ledger_module
from rocket_sink.ledger.driver.ledger import Ledger
from rocket_sink.ledger.lock import ledger_lock
from rocket_sink.ledger.path import resolve_path
from rocket_sink.options import SinkOptions
from rocket_sink.spark.backfill.backfill import Backfill
from rocket_sink.spark.backfill.parking import erase, park, unpark
from tests.ledger.values import session


@pytest.fixture
def busy(tmp_path, monkeypatch):
    """Yield a ledger that another fold holds for the whole test."""
    monkeypatch.setattr(ledger_module, "FULL_SYNC_WAIT_S", 0.2)
    (tmp_path / "_spool").mkdir()  # Without a spool there is nothing to fold.
    with ledger_lock(resolve_path(tmp_path), 0) as lock:
        assert lock is not None
        yield Ledger(tmp_path)


def test_who_decides_refuses(busy):
    spark: Any = session()
    work = Backfill(spark, SinkOptions.parse(nameServer="127.0.0.1:1", ledger=busy.path))
    letters = {"letters": ["x"], "note": "n"}
    for decide in (
        work.plan, partial(work.run, 1), partial(park, spark, busy, **letters),
        partial(unpark, spark, busy, **letters), partial(erase, spark, busy, where="x", reason="r"),
    ):  # fmt: skip
        with pytest.raises(LedgerError, match=f"folded by process {os.getpid()} on"):
            decide()


def test_who_shows_says_so(busy, monkeypatch, capsys):
    monkeypatch.setattr(Ledger, "sync", lambda self, spark: sync(self, spark, wait_s=0.2))
    fold_and_note(busy, session())
    assert f"process {os.getpid()} on" in capsys.readouterr().err


sync = Ledger.sync
