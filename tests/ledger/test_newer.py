"""The reading of the ledger's log by tasks, compared with the view of the table."""

from rocket_sink.ledger.driver.ledger import Ledger
from rocket_sink.ledger.path import resolve_path
from rocket_sink.ledger.query.backfill_marks import settled_since
from rocket_sink.ledger.records import resolution_rows
from tests.ledger.views import view_rows

from .values import accounts, context, session, write_spool

SPARK = session()


def test_letters_that_were_settled_since(tmp_path):
    ledger, place, ctx = Ledger(tmp_path / "l l"), resolve_path(tmp_path / "l l"), context()

    def resolve(way: str, *letters: str) -> None:
        ledger.append(SPARK, resolution_rows({"letter_id": [*letters], "resolution": way}, ctx))

    ledger.create(SPARK)
    resolve("parked", "before")
    version = ledger.version(SPARK)
    assert settled_since(place, version) == set()
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
    assert settled_since(place, version) == expected
    rows = view_rows(ledger.path, "SELECT letter_id FROM settled")
    assert {row.letter_id for row in rows} == expected
    assert ledger.optimize(SPARK) == {"files_added": 1, "files_removed": 6}
    assert settled_since(place, version) == expected
    assert settled_since(place, ledger.version(SPARK)) == set()
