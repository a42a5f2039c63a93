"""Parking, dropping, unparking and erasing of dead letters."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.functions import lit

from rocket_sink.ledger.driver.ledger import Ledger
from rocket_sink.ledger.path import resolve_path
from rocket_sink.ledger.query.pending_keys import Keys, release
from rocket_sink.ledger.records import RunContext, resolution_rows
from rocket_sink.ledger.schema import UNPARKED
from rocket_sink.ledger.transport.files import spooled_epochs
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
    spark: SparkSession, ledger: Ledger, *, letters: Sequence[str] = (), where: str | None = None,
    note: str, resolution: str = "parked",
) -> Parked:  # fmt: skip
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
    spark: SparkSession, ledger: Ledger, *, letters: Sequence[str] = (), where: str | None = None,
    note: str,
) -> Parked:  # fmt: skip
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
    place = resolve_path(ledger.uri)
    spooled = spooled_epochs(place)
    rows = ledger.rows(spark)
    open_for_rewrites(spark, place)  # Check this before a letter is dropped.
    matches = filtered(view(rows, "letters"), where, of="the dead letters' columns")
    pending = view(rows, "pending_letters").select("letter_id").withColumn("is_pending", lit(True))
    names = matches.select(*_NAMED, "sharding_key").distinct()
    letters = names.join(pending, "letter_id", "left").collect()
    dropped = [letter for letter in letters if letter.is_pending]
    _note_resolution(spark, ledger, dropped, "dropped", reason)
    erased = erase_letters(spark, place, {letter.letter_id for letter in letters}, reason)
    keys = Keys()
    for letter in letters:
        keys.setdefault(letter.topic, set()).add(letter.sharding_key)
    release(spark, place, erased=keys)
    return replace(
        erased, dropped=len(dropped), quarantined=tuple(ledger.quarantined()),
        unfolded=tuple(sorted("/".join(epoch) for epoch in spooled)),
    )  # fmt: skip


def _resolve(
    spark: SparkSession, ledger: Ledger, candidates: DataFrame, letters: Sequence[str],
    where: str | None, note: str, resolution: str,
) -> Parked:  # fmt: skip
    chosen = candidates.where(candidates["letter_id"].isin(*letters)).select(*_NAMED)
    if where:
        matching = filtered(candidates, where, of="the dead letters' columns").select(*_NAMED)
        chosen = chosen.unionByName(matching).dropDuplicates(["letter_id"])
    rows = chosen.collect()
    _note_resolution(spark, ledger, rows, resolution, note)
    resolved_ids = {row.letter_id for row in rows}
    return Parked(len(rows), tuple(letter for letter in letters if letter not in resolved_ids))


def _note_resolution(
    spark: SparkSession, ledger: Ledger, letters: Sequence[Row], resolution: str, note: str
) -> None:
    if letters:
        run_id = f"{resolution}-{uuid.uuid4()}"
        values: dict[str, Any] = {n: pa.array([r[n] for r in letters], pa.string()) for n in _NAMED}
        values |= {"resolution": resolution, "note": note}
        ledger.append(spark, resolution_rows(values, RunContext(run_id, run_id, 0)))
