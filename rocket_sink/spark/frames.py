"""The frame that tasks get, with only the columns that the row contract needs."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 (Spark's own habit)

from rocket_sink.ledger.storage import is_classic
from rocket_sink.net import log
from rocket_sink.options import SinkOptions
from rocket_sink.rows.contract import ColumnPlan, resolve_columns
from rocket_sink.spark.checks.own_input import refuse_own_input
from rocket_sink.spark.checks.queries import refuse_chance
from rocket_sink.spark.checks.session_settings import session_setting
from rocket_sink.spark.console import warn_of_delays

_LOG: Final = log.logger(__name__)
_TIME: Final = "yyyy-MM-dd'T'HH:mm:ss.SSSSSS"
_CASE: Final = "spark.sql.caseSensitive"
_PARSER: Final = "spark.sql.legacy.timeParserPolicy"


def plan_of(df: DataFrame, options: SinkOptions) -> ColumnPlan:
    """Return the plan, which maps the row contract's columns to the frame's. Raise a ColumnError if
    the columns do not fit, a ConfigurationError if the frame reads a folder with the ledger, or if
    ids of effectively once would depend on chance."""
    refuse_own_input(df, options.ledger)
    is_case_sensitive = session_setting(df.sparkSession, _CASE).lower() == "true"
    plan = resolve_columns(df.schema, options, case_sensitive=is_case_sensitive)
    if is_classic(df.sparkSession):
        refuse_chance(options, plan, df._jdf.queryExecution().analyzed())
    if plan.source("keys") == "key" and plan.source("body") == "value":
        _warn_of_key(plan.source("sharding_key"))
    warn_of_delays(options, plan)
    return plan


@functools.cache
def _warn_of_key(sharding_key: str | None) -> None:
    if sharding_key is None:
        _LOG.warning(
            "the column 'key' becomes index keys of the messages. Kafka's key also chooses the "
            "partition and keeps order: for that, name it sharding_key"
        )


def select_needed(df: DataFrame, plan: ColumnPlan) -> tuple[DataFrame, ColumnPlan]:
    """Return a frame of the needed columns, and its plan. If the plan says so, pack columns into
    JSON. Replace names that are no identifiers: Arrow functions take `a.b` for a field of `a`."""
    columns = {
        name: json_body(df, plan) if plan.needs_to_json and name == "body" else df[quoted(name)]
        for name in plan.needed_columns
    }
    aliases = {
        name: name if name.isidentifier() else f"_column_{number}"
        for number, name in enumerate(plan.needed_columns)
    }
    needed = df.select(*(columns[name].alias(alias) for name, alias in aliases.items()))
    sources = tuple((column, aliases[source]) for column, source in plan.sources)
    return needed, replace(plan, sources=sources)


def json_body(df: DataFrame, plan: ColumnPlan) -> Column:
    """Return the column `body`: the frame's `json_columns` as JSON, by Spark's own to_json. Its
    default formats would cut times to milliseconds, and offsets to minutes."""
    fields = F.struct(*(F.col(quoted(name)) for name in plan.json_columns))
    # The legacy formatter refuses XXXXX, the offset with seconds.
    is_legacy = session_setting(df.sparkSession, _PARSER).upper() == "LEGACY"
    options = {
        "ignoreNullFields": str(not plan.keeps_nulls),
        "timestampFormat": _TIME + ("XXX" if is_legacy else "XXXXX"),
        "timestampNTZFormat": _TIME,
    }
    return F.to_json(fields, options).alias("body")


def quoted(name: str) -> str:
    """Return a column's name in the form of Spark's expressions."""
    return "`" + name.replace("`", "``") + "`"
