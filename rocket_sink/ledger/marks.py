"""Marks of a backfill: which letters it was about to send, and which of them were not stored.

Written around each chunk of letters, before and after; a letter that was stored has a resolution
instead of the second one. So what a killed backfill may have sent is known to the next one, which
asks the brokers about just these, and a letter that fails again and again can be left alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from rocket_sink.ledger.records import RunContext, build_rows
from rocket_sink.ledger.schema import BACKFILL, IN_FLIGHT

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

NO_WAY: Final = frozenset(
    {
        "CONNECT", "CONNECTION_LOST", "HELD_BACK", "LOCAL_RESOURCES", "NAME_SERVER_UNAVAILABLE",
        "NO_ROUTE", "REQUEST_TIMEOUT", "TLS", "TLS_REFUSED", "UNKNOWN_HOST", "UNWRITTEN",
    }
)  # fmt: skip
"""Error codes that tell of the way to the brokers and nothing of the letter."""


def about_to_send(letters: Mapping[str, Any], ctx: RunContext) -> pa.RecordBatch:
    """One row per letter; `letters` has `letter_id`, `topic` and `message_id` arrays."""
    return _rows({**letters, "outcome": IN_FLIGHT}, ctx)


def not_stored(
    letters: Mapping[str, Any], ctx: RunContext, *, outcome: list[str], error_code: list[str]
) -> pa.RecordBatch:
    """One row per letter; outcomes rejected, not_sent or unknown."""
    return _rows({**letters, "outcome": outcome, "error_code": error_code}, ctx)


def _rows(values: dict[str, Any], ctx: RunContext) -> pa.RecordBatch:
    return build_rows(BACKFILL, len(values["letter_id"]), values, ctx)


def tries(rows: DataFrame) -> DataFrame:
    """`letter_id`, `tries`, `open` of every letter that a backfill was about to send.

    `tries` counts the backfills that failed for the letter's own sake; `open`: one of them may have
    stored it, since it was killed or got no valid answer.

    Args:
        rows: the ledger's, of all kinds.
    """
    from pyspark.sql import functions as f

    outcome, code = f.col("outcome"), f.col("error_code")
    ended = outcome != IN_FLIGHT
    blamed = ended & ~code.isin(*sorted(NO_WAY))
    marks = rows.where(f.col("kind") == BACKFILL)
    by_run = marks.groupBy("letter_id", "query_id").agg(
        f.max(ended).alias("ended"), f.max(blamed).alias("blamed"),
        f.max(outcome == "unknown").alias("unknown"),
    )  # fmt: skip
    unsure = ~f.col("ended") | f.col("unknown")
    return by_run.groupBy("letter_id").agg(
        f.sum(f.coalesce("blamed", f.lit(False)).cast("int")).alias("tries"),
        f.max(unsure).alias("open"),
    )
