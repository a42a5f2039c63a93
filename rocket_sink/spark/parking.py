"""Parking: dead letters put aside by hand, as resolutions in the ledger."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from rocket_sink.ledger.ledger import Ledger
from rocket_sink.ledger.records import RunContext, resolution_rows
from rocket_sink.spark.selection import filtered

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True)
class Parked:
    """How many letters were parked, and which of those named are not pending."""

    count: int
    not_pending: tuple[str, ...] = ()


def park(
    spark: SparkSession,
    ledger: Ledger,
    *,
    letters: Sequence[str] = (),
    where: str | None = None,
    note: str,
    resolution: str = "parked",
) -> Parked:
    """Write a resolution for the pending letters named, and for those that `where` is true of.

    Args:
        resolution: parked (kept aside) or dropped (not wanted).

    Raises:
        OptionError: the filter cannot be used.
        LedgerError: no ledger there, or of another version.
    """
    ledger.sync(spark)
    pending = ledger.dead_letters(spark, pending=True)
    columns = ("letter_id", "topic", "message_id")
    chosen = pending.where(pending["letter_id"].isin(*letters)).select(*columns)
    if where:
        matching = filtered(pending, where, of="the dead letters' columns").select(*columns)
        chosen = chosen.unionByName(matching).dropDuplicates(["letter_id"])
    rows = chosen.collect()
    found = {row.letter_id for row in rows}
    if rows:
        run_id = f"park-{uuid.uuid4()}"
        values = {n: pa.array([row[n] for row in rows], pa.string()) for n in columns}
        ctx = RunContext(run_id, run_id, 0)
        ledger.append(
            spark, resolution_rows({**values, "resolution": resolution, "note": note}, ctx)
        )
    return Parked(len(rows), tuple(letter for letter in letters if letter not in found))
