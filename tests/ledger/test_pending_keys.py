"""When held keys are let go: not before the ledger knows that none of their letters is pending."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rocket_sink.ledger.ledger import Ledger
from rocket_sink.ledger.pending_keys import PendingKeys, release
from rocket_sink.ledger.place import locate
from rocket_sink.ledger.records import resolution_rows

from .values import accounts, context, letter

pytestmark = pytest.mark.spark


def test_keys_are_held_until_their_last_letter_is_resolved(spark: Any, tmp_path: Path) -> None:
    ledger, place = Ledger(tmp_path), locate(tmp_path)
    keys, later = PendingKeys(place), context(epoch=9)
    ledger.create(spark)
    assert release(spark, place) == 0

    ctx = context(epoch=2)
    keys.note(ctx, {"t": {"a", "b"}})
    assert release(spark, place) == 0, "its letters are still on their way"

    letters = [letter(ctx, sharding_key=key) for key in "ab"]
    ledger.append(spark, *letters, accounts(ctx, dead=2))
    assert release(spark, place) == 0
    ids = [one["letter_id"][0].as_py() for one in letters]
    ledger.append(spark, resolution_rows({"letter_id": ids[:1], "resolution": "resent"}, ctx))
    assert release(spark, place) == 0, "b is pending"
    assert keys.held_for(later) == {"t": {"a", "b"}}

    superseded = context(epoch=2, partition=1, task_attempt_id=11)
    keys.note(superseded, {"t": {"c"}})
    ledger.append(spark, resolution_rows({"letter_id": ids[1:], "resolution": "parked"}, ctx))
    assert release(spark, place) == 1
    assert keys.held_for(later) == {"t": {"c"}}, "its attempt is not known yet"

    ledger.append(spark, accounts(context(epoch=3), acked=1))
    ledger.sync(spark)
    assert release(spark, place) == 1, "a later epoch: the attempt never counted"
    assert keys.held_for(later) == {}
