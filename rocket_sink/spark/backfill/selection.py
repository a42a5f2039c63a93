"""Which dead letters a backfill sends: by class, topic, time, a filter of the user's, number."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from rocket_sink.errors import OptionError
from rocket_sink.ledger.schema import REASONS
from rocket_sink.ledger.table import first_line

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

MAX_TRIES: Final = 3


@dataclass(frozen=True)
class Selection:
    """Which pending dead letters are sent.

    Attributes:
        reasons: classes of dead letters; empty: all but `data`, since rows that no broker takes
            would be refused again.
        topic: only of this topic.
        where: a SQL condition on the source's columns.
        since, until: from the first on, before the second; by the dead letters' `at`, or by a
            table's `event_time`.
        limit: the oldest so many of what is selected otherwise.
        max_tries: a dead letter that so many backfills have failed with is left alone.
        again: also those.
    """

    reasons: tuple[str, ...] = ()
    topic: str | None = None
    where: str | None = None
    since: dt.datetime | None = None
    until: dt.datetime | None = None
    limit: int | None = None
    max_tries: int = MAX_TRIES
    again: bool = False

    @property
    def classes(self) -> tuple[str, ...]:
        """The classes that are selected."""
        return self.reasons or tuple(reason for reason in REASONS if reason != "data")


def filtered(frame: DataFrame, condition: str | None, *, of: str) -> DataFrame:
    """The rows for which a user's SQL condition is true; its columns and types are checked now.

    Raises:
        OptionError: it does not parse, names a column that is not there, or is no condition.
    """
    if not condition:
        return frame
    from pyspark.errors import PySparkException

    try:
        found = frame.where(condition)
        _ = found.schema
    except PySparkException as error:
        raise OptionError(
            f"the filter {condition!r} cannot be used: {first_line(error)} It is a condition as "
            f"after SQL's WHERE, on {of}: {', '.join(frame.columns)}",
            option="where",
        ) from None
    return found


def marked(letters: DataFrame, wanted: Column, selection: Selection) -> DataFrame:
    """The dead letters with three flags more, of which at most one is true.

    `_tired`: wanted, but left alone, for it has failed so often. `_behind`: wanted, but behind a
    tired dead letter of its key, which it would overtake; rows that no broker takes (reason `data`)
    stop nobody. `_chosen`: to be sent.

    Args:
        dead letters: with `letter_id`, `topic`, `sharding_key`, `reason`, `tries` and `_place`.
        wanted: true of those that are selected, tries left aside.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as F  # noqa: N812 (Spark's own habit)

    often = F.col("tries") >= selection.max_tries
    tired = F.col("_wanted") & (F.lit(False) if selection.again else often)
    found = letters.withColumn("_wanted", wanted).withColumn("_tired", tired)
    behind: Column = F.lit(False)
    if not selection.again:
        # A dead letter without a key waits behind no other.
        alone = F.when(F.col("sharding_key").isNull(), F.col("letter_id"))
        earlier = Window.partitionBy("topic", "sharding_key", alone).orderBy("_place")
        earlier = earlier.rowsBetween(Window.unboundedPreceding, -1)
        stops = F.col("_tired") & ~F.col("reason").eqNullSafe("data")
        behind = F.coalesce(F.max(stops).over(earlier), F.lit(False))
    going = F.col("_wanted") & ~F.col("_tired")
    found = found.withColumn("_behind", going & behind)
    return found.withColumn("_chosen", going & ~F.col("_behind")).drop("_wanted")
