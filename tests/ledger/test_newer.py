"""The reading of the ledger's log by tasks, compared with Spark's state of the table."""

from pathlib import Path
from typing import Any

import pytest

from rocket_sink.ledger.driver.ledger import Ledger
from rocket_sink.ledger.path import resolve_path
from rocket_sink.ledger.query.backfill_marks import settled_since
from rocket_sink.ledger.records import resolution_rows
from tests.ledger.values import write_spool

from .values import accounts, context

pytestmark = pytest.mark.spark


def test_letters_that_were_settled_since(spark: Any, tmp_path: Path) -> None:
    ledger, place, ctx = Ledger(tmp_path / "l l"), resolve_path(tmp_path / "l l"), context()

    def resolve(way: str, *letters: str) -> None:
        ledger.append(spark, resolution_rows({"letter_id": [*letters], "resolution": way}, ctx))

    ledger.create(spark)
    resolve("parked", "before")
    version = ledger.version(spark)
    assert settled_since(place, version) == set()
    resolve("parked", "a", "b", "c")
    resolve("unparked", "b", "before")
    resolve("resent", "c", "d")
    resolve("unparked", "c")
    ledger.append(spark, accounts(ctx, acked=1))
    write_spool(
        ledger.path, ctx, resolution_rows({"letter_id": ["folded"], "resolution": "dropped"}, ctx)
    )
    ledger.sync(spark)
    expected = {"a", "c", "d", "folded"}
    assert settled_since(place, version) == expected
    assert {row.letter_id for row in ledger.settled(spark).collect()} == expected
    ledger.optimize(spark)
    assert settled_since(place, version) == expected
    assert settled_since(place, ledger.version(spark)) == set()
