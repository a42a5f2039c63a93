"""The claim of a backfill: a ledger has one at a time, and tasks stop when they lose it. What was
settled since is read from the log, and compared with the view of the table."""

import subprocess
import sys
from pathlib import Path

import pytest

from rocket_sink.errors import LedgerError
from rocket_sink.ledger.driver.ledger import Ledger
from rocket_sink.ledger.notes import NoteStore
from rocket_sink.ledger.path import resolve_path
from rocket_sink.ledger.query.backfill_marks import BackfillClaim, ClaimCheck, noted_since
from rocket_sink.ledger.records import resolution_rows
from rocket_sink.ledger.transport.files import sealed_files
from tests.ledger.views import view_rows

from .values import accounts, context, session, write_spool

SPARK = session()

_HOLD = """
import sys, time
from rocket_sink.ledger.query.backfill_marks import BackfillClaim
from rocket_sink.ledger.path import resolve_path
claim = BackfillClaim(resolve_path(sys.argv[1]))
claim.acquire(0.0)
print(claim.token, flush=True)
time.sleep(600)
"""


@pytest.fixture
def place(tmp_path):
    return resolve_path(tmp_path / "not there yet")


def test_of_two_processes_one_has_it_and_a_dead_ones_is_taken_over(place):
    with subprocess.Popen(
        [sys.executable, "-c", _HOLD, place.root], stdout=subprocess.PIPE, text=True
    ) as holder:
        check_of_holder = ClaimCheck(
            place, holder.stdout.readline().strip(), clock=iter(range(9)).__next__
        )
        check_of_holder()
        claim, waited = BackfillClaim(place), list[str]()
        text = rf"another backfill.*process {holder.pid}"
        with pytest.raises(LedgerError, match=text) as refused:
            claim.acquire(0.2, on_wait=waited.append)
        assert len(waited) == 1 and refused.value.path == place.uri
        check_of_holder()
        holder.kill()
    claim.acquire(60.0)
    ClaimCheck(place, claim.token)()
    with pytest.raises(LedgerError, match="sends nothing more"):
        check_of_holder()
    assert sealed_files(place, place.filesystem()) == []
    claim.release()


@pytest.mark.parametrize(
    ("error", "expected"),
    [(OSError("full"), LedgerError), (KeyboardInterrupt(), KeyboardInterrupt)],
)
def test_a_claim_whose_token_was_not_written_is_free_again(place, monkeypatch, error, expected):
    def write(self, *of):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(NoteStore, "write", write)
        with pytest.raises(expected):
            BackfillClaim(place).acquire(0.0)
    BackfillClaim(place).acquire(0.0)


def test_the_look_is_not_repeated_within_a_second(place):
    claim, times = BackfillClaim(place), iter([0.0, 0.999, 1.0, 2.0])
    claim.acquire(0.0)
    check = ClaimCheck(place, claim.token, clock=times.__next__)
    check()
    claim.release()
    BackfillClaim(place).acquire(0.0)
    check()
    note = Path(NoteStore(place, "backfill").where("token"))
    with pytest.raises(LedgerError, match="taken over") as lost:
        check()
    note.write_text("{")
    with pytest.raises(LedgerError, match=f"cannot read {note}: ") as unread:
        check()
    assert lost.value.path == unread.value.path == str(note)


def test_letters_that_were_settled_since(tmp_path):
    ledger, place, ctx = Ledger(tmp_path / "l l"), resolve_path(tmp_path / "l l"), context()

    def resolve(way, *letters):
        ledger.append(SPARK, resolution_rows({"letter_id": [*letters], "resolution": way}, ctx))

    ledger.create(SPARK)
    resolve("parked", "before")
    version = ledger.version(SPARK)
    assert noted_since(place, version)[0] == set()
    resolve("parked", "a", "b", "c")
    resolve("unparked", "b", "before")
    resolve("resent", "c", "d")
    resolve("unparked", "c")
    ledger.append(SPARK, accounts(ctx, acked=1))
    write_spool(
        ledger.path, ctx, resolution_rows({"letter_id": ["folded"], "resolution": "dropped"}, ctx)
    )
    ledger.sync(SPARK)
    expected = {"a", "c", "d", "folded"}
    assert noted_since(place, version)[0] == expected
    rows = view_rows(ledger.path, "SELECT letter_id FROM settled")
    assert {row.letter_id for row in rows} == expected
    assert ledger.optimize(SPARK) == {"files_added": 1, "files_removed": 6}
    assert noted_since(place, version)[0] == expected
    assert noted_since(place, ledger.version(SPARK))[0] == set()
