"""Parking, dropping, unparking and erasing of dead letters."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from rocket_sink.ledger.driver.ledger import Ledger
from rocket_sink.ledger.path import resolve_path
from rocket_sink.ledger.query.pending_keys import forget
from rocket_sink.ledger.records import RunContext, resolution_rows
from rocket_sink.ledger.schema import UNPARKED
from rocket_sink.ledger.upkeep.erase import Erased, erase_letters
from rocket_sink.ledger.upkeep.rewrite import open_for_rewrites
from rocket_sink.ledger.views import view
from rocket_sink.spark.backfill.sources import filtered

_NAMED: Final = ("letter_id", "topic", "message_id")


@dataclass(frozen=True)
class Parked:
    """The result of parking or unparking. `count` dead letters were changed. `left_out` has the ids
    that the caller named, but that were not pending (for unparking: not parked)."""

    count: int
    left_out: tuple[str, ...] = ()


def park(
    spark: SparkSession,
    ledger: Ledger,
    *,
    letters: Sequence[str] = (),
    where: str | None = None,
    note: str,
    resolution: str = "parked",
) -> Parked:
    """Park the pending dead letters that `letters` names, and those that meet `where`. The
    `resolution` is `parked` (kept aside) or `dropped` (not wanted).

    Raises:
        OptionError: the filter cannot be used.
        LedgerError: there is no ledger, or it has another version.
    """
    ledger.sync_fully(spark)
    pending = ledger.dead_letters(spark, pending=True)
    return _resolve(spark, ledger, pending, letters, where, note, resolution)


def unpark(
    spark: SparkSession,
    ledger: Ledger,
    *,
    letters: Sequence[str] = (),
    where: str | None = None,
    note: str,
) -> Parked:
    """Make parked or dropped dead letters pending again: those that `letters` names, and those that
    meet `where`. They have their old place in the order. Their keys are not held again
    (`onPendingKey`), because later messages have passed them. The errors are those of `park`."""
    ledger.sync_fully(spark)
    every = ledger.dead_letters(spark, pending=False).dropDuplicates(["letter_id"])
    parked = every.join(view(ledger.rows(spark), "parked"), "letter_id", "left_semi")
    return _resolve(spark, ledger, parked, letters, where, note, UNPARKED)


def erase(spark: SparkSession, ledger: Ledger, *, where: str, reason: str) -> Erased:
    """Erase bodies, keys, tags, properties and error texts of dead letters, pending or settled.
    Pending letters are first noted as dropped, because they cannot be sent any more. If an erasure
    is killed, the next one finishes it, whatever the condition.

    Raises:
        OptionError: the condition cannot be used.
        LedgerError: there is no ledger, or Spark's Delta commits to it.
    """
    ledger.sync_fully(spark)
    every = ledger.dead_letters(spark, pending=False)
    place = resolve_path(ledger.uri)
    open_for_rewrites(spark, place)  # Check this before a letter is dropped.
    matches = filtered(every, where, of="the dead letters' columns")
    rows = matches.select("letter_id", "topic", "sharding_key").distinct().collect()
    dropped = park(spark, ledger, where=where, note=reason, resolution="dropped").count
    erased = erase_letters(spark, place, {row.letter_id for row in rows}, reason)
    erased_keys = {(row.topic, row.sharding_key) for row in rows}
    pending = ledger.dead_letters(spark).select("topic", "sharding_key").collect()
    forget(place, erased_keys - {tuple(row) for row in pending})
    return replace(erased, dropped=dropped, quarantined=tuple(ledger.quarantined()))


def _resolve(
    spark: SparkSession, ledger: Ledger, candidates: DataFrame, letters: Sequence[str],
    where: str | None, note: str, resolution: str,
) -> Parked:  # fmt: skip
    chosen = candidates.where(candidates["letter_id"].isin(*letters)).select(*_NAMED)
    if where:
        matching = filtered(candidates, where, of="the dead letters' columns").select(*_NAMED)
        chosen = chosen.unionByName(matching).dropDuplicates(["letter_id"])
    rows = chosen.collect()
    if rows:
        run_id = f"{resolution}-{uuid.uuid4()}"
        values: dict[str, Any] = {n: pa.array([r[n] for r in rows], pa.string()) for n in _NAMED}
        values |= {"resolution": resolution, "note": note}
        ledger.append(spark, resolution_rows(values, RunContext(run_id, run_id, 0)))
    resolved_ids = {row.letter_id for row in rows}
    return Parked(len(rows), tuple(letter for letter in letters if letter not in resolved_ids))
