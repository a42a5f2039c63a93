"""Erases the contents of all dead letters that meet a condition."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from pyspark.sql import SparkSession

from rocket_sink.ledger.driver.ledger import Ledger
from rocket_sink.ledger.path import resolve_path
from rocket_sink.ledger.query.pending_keys import forget
from rocket_sink.ledger.upkeep.erase import Erased, erase_letters
from rocket_sink.spark.backfill.parking import park
from rocket_sink.spark.backfill.sources import filtered

_KEY: Final = ("topic", "sharding_key")


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
    matches = filtered(every, where, of="the dead letters' columns")
    rows = matches.select("letter_id", *_KEY).distinct().collect()
    dropped = park(spark, ledger, where=where, note=reason, resolution="dropped").count
    place = resolve_path(ledger.uri)
    erased = erase_letters(place, {row.letter_id for row in rows}, reason)
    keys = {(row.topic, row.sharding_key) for row in rows}
    forget(place, keys - {tuple(row) for row in ledger.dead_letters(spark).select(*_KEY).collect()})
    return replace(erased, dropped=dropped, quarantined=tuple(ledger.quarantined()))
