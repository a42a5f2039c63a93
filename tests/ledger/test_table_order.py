"""The last row is the last by the table's order, and never by clocks, which may be set back."""

import os

import pyarrow as pa

from rocket_sink.ledger.driver.ledger import Ledger
from rocket_sink.ledger.path import resolve_path
from rocket_sink.ledger.records import resolution_rows
from rocket_sink.ledger.transport.files import sealed_files
from tests.ledger.views import view_rows

from .night import at_second as at
from .values import accounts, confirmed, context, letter, session, write_spool

SPARK = session()


def pending(ledger: Ledger) -> list[bytes]:
    return sorted(row.body for row in view_rows(ledger.path, "SELECT body FROM pending_letters"))


def test_a_clock_that_is_set_back(tmp_path):
    ledger = Ledger(tmp_path)
    by_hand = context(query_id="export", partition=None)
    ledger.append(SPARK, letter(by_hand, b"parked", letter_id=pa.array(["l"])))
    for turn, way in enumerate(("parked", "unparked", "parked", "unparked")):
        # The clock of each resolution is behind the one before.
        columns = {"letter_id": ["l"], "resolution": way}
        ledger.append(SPARK, at(resolution_rows(columns, by_hand), 100 - turn))
        assert pending(ledger) == ([b"parked"] if way == "unparked" else [])
    ledger.append(SPARK, resolution_rows({"letter_id": ["l"], "resolution": "dropped"}, by_hand))

    # The run that ended last counts if both are unconfirmed.
    old, new = context(), context(run_id="run-2", task_attempt_id=1)
    ledger.append(SPARK, at(letter(old, b"old"), 50), at(accounts(old, dead=1), 50))
    ledger.append(SPARK, at(letter(new, b"new"), 10), at(accounts(new, dead=1), 10))
    assert pending(ledger) == [b"new"]
    # The second run is confirmed last, by a clock that is behind.
    ledger.append(SPARK, at(confirmed(old, 1), 60))
    assert pending(ledger) == [b"old"]
    ledger.append(SPARK, at(confirmed(new, 1), 20))
    assert pending(ledger) == [b"new"]


def test_two_runs_in_one_fold(tmp_path):
    """Ignore the times of files, because they come from a clock, too."""
    ledger = Ledger(tmp_path)
    old, new = context(), context(run_id="run-2", task_attempt_id=1)
    write_spool(ledger.path, old, at(letter(old, b"old"), 50), at(accounts(old, dead=1), 50))
    late = write_spool(ledger.path, new, at(letter(new, b"new"), 10), at(accounts(new, dead=1), 10))
    os.utime(late, (1, 1))
    ledger.sync(SPARK)
    assert pending(ledger) == [b"new"]
    ledger.append(SPARK, accounts(context(epoch=1), acked=1))
    select = "SELECT epoch, run_id, max(sequence) AS last FROM ledger_rows GROUP BY ALL"
    last = {(row.epoch, row.run_id): row.last for row in view_rows(ledger.path, select)}
    assert last[0, "run-1"] < last[0, "run-2"] < last[1, "run-1"]


def test_a_fold_takes_the_files_of_an_epoch_in_the_order_of_their_begin(tmp_path):
    ledger = Ledger(tmp_path)
    paths = []
    for epoch in (11, 9):
        for turn in range(3):
            ctx = context(epoch=epoch, run_id=f"run-{turn}")
            path = write_spool(ledger.path, ctx, accounts(ctx, acked=1))
            os.utime(path, (100 - turn, 100 - turn))
            paths.append(path)
    place = resolve_path(tmp_path)
    listed = [info.path for info in sealed_files(place, place.filesystem())]
    assert listed == [*paths[3:], *paths[:3]], "by epoch, and within it as they were made"
