"""Sources of a backfill: dead letters of a ledger, or rows of any table.

Both give a frame of pending rows with the columns `SENT_COLUMNS`, `letter_id`, `reason`, and

    tries       number of earlier backfills that failed to send the row
    open        an earlier send or backfill may have stored the row: ask brokers before sending
    was_stored  a consumer had the message, or the row was read from a topic; then not `open`
    unknown_at  the broker that did not answer the send (dead letters)
    query_id    the query whose queues the row uses (`.home_queues`); a digest of a table's name
    _place      the sort key for the rows of a sharding key

The `letter_id` of a table's row is the same in each backfill: a digest of the table's name, the
topic option with its namespace and the exact values of all columns, with a number for equal rows.
By this id the ledger records sent rows, so repeated backfills send a row once. A row without a
message id gets one from its `letter_id`.
With another path or topic, all rows are new. The digest also depends on the columns' types, which
Spark infers from all files, and on settings by which Spark reads times. One new file could change
the types, and all old rows would be sent again. So the first backfill notes the digest, the types
and the settings, and later backfills refuse others."""

from __future__ import annotations

import datetime as dt
import hashlib
import re
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import Any, Final, TypeAlias

from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812 (Spark's own habit)
from pyspark.sql.types import (
    ArrayType,
    DataType,
    DateType,
    DoubleType,
    FloatType,
    MapType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from rocket_sink.errors import ColumnError, LedgerError, OptionError
from rocket_sink.ledger.driver.ledger import Ledger
from rocket_sink.ledger.notes import NoteStore
from rocket_sink.ledger.path import failing, first_line, resolve_path
from rocket_sink.ledger.schema import REASONS
from rocket_sink.options import SinkOptions
from rocket_sink.rows.contract import CONTRACT
from rocket_sink.spark.checks.session_settings import session_setting
from rocket_sink.spark.frames import json_body, plan_of, quoted

SENT_COLUMNS: Final = tuple(column.name for column in CONTRACT if column.name != "order_by")
"""The row contract's columns that tasks send: `order_by` only sorts a table's rows before. Dead
letters have the trace context in their properties."""
_SOURCES: Final = "sources"
"""Kind of the notes that hold the column types of a table."""
_ALWAYS: Final = ("topic", "sharding_key", "message_id")
_DIGEST: Final = "exact values"
"""The name of the digest of a row. Another digest needs another name: it makes other ids."""
_ZONE: Final = "spark.sql.session.timeZone"
_CONVERTS: Final = "spark.sql.parquet.int96TimestampConversion"
_OF_TIMES: Final = (
    _CONVERTS,
    "spark.sql.parquet.int96RebaseModeInRead",
    "spark.sql.parquet.datetimeRebaseModeInRead",
    "spark.sql.legacy.timeParserPolicy",
)
"""Settings that change the moments that Spark reads from the same files."""


@dataclass(frozen=True)
class Selection:
    """The selection of pending dead letters.

    Attributes:
        reasons: reasons of the dead letters. Empty: all but `data`, because brokers would refuse
            such rows again.
        topic: only letters of this topic.
        where: a SQL condition on the source's columns.
        since, until: the time range (`until` exclusive), by the dead letters' `at` or a table's
            `event_time`.
        limit: select at most this number of letters, the oldest that meet the other conditions.
        max_tries: leave alone dead letters that failed in this many backfills.
        again: ignore `max_tries`.
    """

    reasons: tuple[str, ...] = ()
    topic: str | None = None
    where: str | None = None
    since: dt.datetime | None = None
    until: dt.datetime | None = None
    limit: int | None = None
    max_tries: int = 3
    again: bool = False

    @property
    def classes(self) -> tuple[str, ...]:
        """The reasons that are selected."""
        return self.reasons or tuple(reason for reason in REASONS if reason != "data")


class DeadLetters:
    """The pending dead letters of the ledger. A sharding key's letters are sent in the order of
    their epochs and, within a task, of their ordinals. If several queries have letters of a key,
    the query whose first pending letter came to the table first is sent first."""

    noun = "dead letters"
    """Name of the source's rows for texts, in the plural."""
    pins_new = False
    """Whether the first backfill notes the queues to which it sends the rows."""

    def pending(
        self, spark: SparkSession, ledger: Ledger, selection: Selection
    ) -> DataFrame | None:
        """Return all pending dead letters; None if there is no ledger yet."""
        if not ledger.exists(spark):
            return None
        letters = ledger.dead_letters(spark, pending=True)
        # Order by sequence and epoch, not by time: clocks differ and are set back. Only exported
        # dead letters go by their brokers' times, because they have no epoch and no partition. Join
        # the sequences: a window over each query would bring all bodies of a query to one task.
        queries = letters.groupBy(F.col("query_id").alias("_query")).agg(
            F.min("sequence").alias("_query_order")
        )
        is_of_query = F.col("query_id").eqNullSafe(F.col("_query"))
        letters = letters.join(F.broadcast(queries), is_of_query).drop("_query")
        exported_at = F.when(F.col("partition").isNull(), F.col("at"))
        place = F.struct("_query_order", "query_id", "epoch", "partition", exported_at, "ordinal")
        # A row refused before it got a message id gets the same id in each backfill.
        number = F.coalesce(F.col("message_id"), F.upper(F.md5("letter_id")))
        was_stored = F.col("reason").eqNullSafe("consumer")
        placed = letters.withColumns(
            {"_place": place, "message_id": number, "was_stored": was_stored}
        )
        tried = with_tries(placed, ledger.backfills(spark))
        # Ask brokers about sends without an answer: a second send would double a stored message.
        unknown = F.col("reason") == "unknown"
        return tried.withColumns(
            {
                "open": F.col("open") | unknown,
                "unknown_at": F.when(unknown, F.col("last_broker_name")),
            }
        )

    def begin(self, spark: SparkSession, ledger: Ledger) -> None:
        """Note the state that later backfills must find unchanged. Dead letters have none."""

    def wanted(self, pending: DataFrame, selection: Selection) -> Column:
        """Return the condition of the selection, without its `max_tries` and `limit`."""
        filtered(pending, selection.where, of="the dead letters' columns")
        conditions = [F.col("reason").isin(*selection.classes), F.col("body").isNotNull()]
        if selection.where:
            conditions.append(F.expr(selection.where))
        return _met(selection, F.col("at"), *conditions)


@dataclass(frozen=True)
class Table:
    """A table, a path, or any frame that fits the row contract (see the option `columns`). A key's
    rows are sorted by `orderBy`, then `event_time`, then their order in the files. `pending` raises
    a ColumnError if the frame does not fit the row contract, or is read otherwise than by the first
    backfill.

    Args:
        frame: its rows, with all columns.
        name: the path or the table's name, which identifies the table in the ledger.
        options: options of the write; `columns`, `bodyFormat`, `orderBy` and `topic` define the
            messages.
        is_text: the files are texts (csv, json), with timestamps in the session's time zone.
    """

    frame: DataFrame
    name: str
    options: SinkOptions
    is_text: bool = False
    noun = "rows"
    pins_new = True

    def pending(
        self, spark: SparkSession, ledger: Ledger, selection: Selection
    ) -> DataFrame | None:
        """Return the rows that were not sent yet and meet the selection's `where`."""
        self._check_reading(spark, ledger)
        plan = plan_of(self.frame, self.options)
        # Filter first, while all columns are there. Equal rows pass or fail together, so the filter
        # does not change the numbers in their ids.
        numbered = self._numbered(filtered(self.frame, selection.where, of="the table's columns"))
        columns = self._columns(dict(plan.sources))
        if plan.needs_to_json:
            columns["body"] = json_body(self.frame, plan)
        order = [columns.get("order_by"), columns.get("event_time"), F.col("_row")]
        place = F.struct(*(column for column in order if column is not None))
        kept = [name for name in SENT_COLUMNS if name in columns]
        # Rows that were read from a topic (`dlq export`): messages with their ids exist.
        was_stored = "offset_message_id" in self.frame.columns
        query_id = f"table-{hashlib.md5(self.name.encode(), usedforsecurity=False).hexdigest()}"
        letters = numbered.select(
            "letter_id", place.alias("_place"), *(columns[name].alias(name) for name in kept),
            F.lit(None).cast("string").alias("reason"), F.lit(query_id).alias("query_id"),
            F.lit(was_stored).alias("was_stored"),
        )  # fmt: skip
        if not ledger.exists(spark):
            return letters.withColumns({"tries": F.lit(0), "open": F.lit(False)})
        done = ledger.settled(spark)
        return with_tries(letters.join(done, "letter_id", "left_anti"), ledger.backfills(spark))

    def begin(self, spark: SparkSession, ledger: Ledger) -> None:
        """Note all that the rows' ids depend on besides the rows."""
        NoteStore(resolve_path(ledger.path), _SOURCES).agree(self._note, self._reading(spark))

    def _check_reading(self, spark: SparkSession, ledger: Ledger) -> None:
        """Raise an error if the rows' ids would differ from those of the first backfill, by its
        note: a LedgerError for another digest, a ColumnError for other types or settings."""
        store = NoteStore(resolve_path(ledger.path), _SOURCES)
        where = store.where(self._note)
        with failing(f"the note {where} cannot be read", where, kinds=(OSError, ValueError)):
            before = store.read(self._note)
        now = self._reading(spark)
        if before is None or before == now:
            return
        if before.get("digest") != _DIGEST:
            raise LedgerError(
                f"another version of rocket-sink has sent rows of {self.name} ({where}). It knew a "
                "row by another digest, so all of its rows would be sent again. Go on with that "
                "version; or name another ledger, which sends all rows again",
                path=where,
            )
        types, settings = before["types"], before["settings"]
        old, new = {**types, **settings}, {**now["types"], **now["settings"]}
        changed = [name for name in {**old, **new} if old.get(name) != new.get(name)]
        differences = ", ".join(
            f"{name} was {old.get(name, 'not there')}, is {new.get(name, 'not there')}"
            for name in changed
        )
        ddl = ", ".join(f"{quoted(name)} {kind}" for name, kind in types.items())
        as_before = "".join(f" --spark-conf {name}={value}" for name, value in settings.items())
        raise ColumnError(
            f"{self.name} is read otherwise than when its rows were sent first ({differences}), so "
            "all of them would be sent again. Send what is new from a --path of its own "
            "(--source-option basePath=... keeps partition columns). Or read all as before: "
            f"--schema {ddl!r}{as_before}. To send all again, name another ledger.",
            column=changed[0],
        )

    def _reading(self, spark: SparkSession) -> dict[str, Any]:
        """Return what the rows' ids depend on: the digest's version, the columns' types, and the
        session's settings by which Spark reads their times."""
        types = {field.name: field.dataType.simpleString() for field in self.frame.schema}
        timed = [name for name, kind in types.items() if re.search(r"\btimestamp\b", kind)]
        names = list(_OF_TIMES) if timed else []
        if timed:
            file = "" if self.is_text else next(iter(self.frame.inputFiles()), "")
            converts = session_setting(spark, _CONVERTS).lower() == "true"
            if self.is_text or converts or any(f"/{name}=" in file for name in timed):
                names.append(_ZONE)
        settings = {name: session_setting(spark, name) for name in names}
        return {"digest": _DIGEST, "types": dict(sorted(types.items())), "settings": settings}

    @property
    def _place(self) -> str:
        """The table's name, and the topic with its namespace or the namespace of rows' topics."""
        options = self.options
        place = options.full_topic or f"{options.namespace or options.namespace_v2}%"
        return f"{self.name}\n{place}"

    @property
    def _note(self) -> str:
        return hashlib.md5(self._place.encode(), usedforsecurity=False).hexdigest()

    def wanted(self, pending: DataFrame, selection: Selection) -> Column:
        timed = selection.since or selection.until
        if timed and "event_time" not in pending.columns:
            raise ColumnError(
                "since and until go by the column event_time, which the table does not have; name "
                "one with the option columns='event_time=<column>', or filter with where",
                column="event_time",
            )
        return _met(selection, F.col("event_time"))

    def _numbered(self, frame: DataFrame) -> DataFrame:
        """Add the columns `letter_id` and `_row`, the row's number in this read."""
        # Sort the columns by name: their order depends on the file that Spark reads first.
        columns = sorted(frame.schema, key=lambda field: field.name)
        fields = [exact(F.col(quoted(f.name)), f.dataType).alias(f.name) for f in columns]
        content = F.to_json(F.struct(*fields), {"ignoreNullFields": "false"})
        digest = F.md5(F.concat_ws("\n", F.lit(self._place), content))
        counted = frame.withColumns({"_row": F.monotonically_increasing_id(), "_digest": digest})
        ordinal = F.row_number().over(Window.partitionBy("_digest").orderBy("_row"))
        return counted.withColumn("letter_id", F.concat_ws("-", F.lit("row"), "_digest", ordinal))

    def _columns(self, sources: dict[str, str]) -> dict[str, Column]:
        """Return the row contract's columns that the table has, and `_ALWAYS`, null if missing."""
        columns = {
            name: F.col(quoted(source)) for name, source in sources.items() if name != "body"
        }
        if not self.options.packs_json:
            columns["body"] = F.col(quoted(sources["body"]))
        for name in _ALWAYS:
            # Without ANSI, `cast` writes a decimal 0 as 0E-10. `try_cast` writes plain digits
            # always, as tasks do: the text of a sharding key chooses the queue.
            columns[name] = columns.get(name, F.lit(None)).try_cast("string")
        if self.options.topic:
            columns["topic"] = F.lit(self.options.topic)
        columns["message_id"] = F.coalesce(columns["message_id"], F.upper(F.md5("letter_id")))
        return columns


def exact(value: Column, kind: DataType) -> Column:
    """Return an expression whose JSON is the same for equal values only, with each Java and in each
    session. Java 19 and later write doubles otherwise, and JSON cuts times to milliseconds."""
    if isinstance(kind, (FloatType, DoubleType)):
        form = F.format_string("%a", value)
    elif isinstance(kind, TimestampType):
        form = F.unix_micros(value)
    elif isinstance(kind, TimestampNTZType):
        form = value.cast("string")
    elif isinstance(kind, DateType):
        form = F.unix_date(value)
    elif isinstance(kind, StringType):
        # Bytes that are no UTF-8 would all become the same character.
        form = value.cast("binary")
    elif isinstance(kind, ArrayType):
        form = F.transform(value, lambda item: exact(item, kind.elementType))
    elif isinstance(kind, MapType):
        entry = StructType().add("key", kind.keyType).add("value", kind.valueType)
        form = exact(F.map_entries(value), ArrayType(entry))
    elif isinstance(kind, StructType):
        fields = [exact(value.getField(f.name), f.dataType).alias(f.name) for f in kind]
        form = F.struct(*fields)
    else:
        return value
    return F.when(value.isNotNull(), form)


_BEYOND_THE_ROW: Final = re.compile(
    r'"class":"[\w.$]*\.(CallMethodViaReflection|\w*Subquery\w*|Exists|ListQuery)"'
)
"""Spark's names of expressions that call Java methods, or read other tables."""

Source: TypeAlias = DeadLetters | Table


def filtered(frame: DataFrame, condition: str | None, *, of: str) -> DataFrame:
    """Return the rows that meet a SQL condition, and check the condition now. The condition may use
    only the row's columns: somebody else may have written it. Raise an OptionError if it does not
    parse, names a missing column, is no condition, calls Java, or reads other tables."""
    if not condition:
        return frame
    try:
        matches = frame.where(condition)
        _ = matches.schema
    except PySparkException as error:
        raise OptionError(
            f"the filter {condition!r} cannot be used: {first_line(error)} It is a condition as "
            f"after SQL's WHERE, on {of}: {', '.join(frame.columns)}",
            option="where",
        ) from None
    # Search the condition that Spark has resolved: in the text, a spelling could hide a function.
    plan = matches._jdf.queryExecution().analyzed()
    if plan.nodeName() != "Filter":
        raise OptionError(
            f"the filter {condition!r} uses more than columns; it may only use {of}: "
            f"{', '.join(frame.columns)}",
            option="where",
        )
    tree = str(plan.condition().toJSON())
    if _BEYOND_THE_ROW.search(tree):
        raise OptionError(
            f"the filter {condition!r} is refused: it calls Java (reflect, java_method, "
            f"try_reflect) or asks another table; it may only use {of}",
            option="where",
        )
    return matches


def marked(letters: DataFrame, wanted: Column, selection: Selection) -> DataFrame:
    """Add three flags to the dead letters; at most one is true for a letter. `_tired`: the letter
    failed too often, and is left alone. `_behind`: the letter waits behind a tired letter of its
    key, except one of reason `data`, which brokers never take. `_chosen`: the letter is to be sent.

    Args:
        letters: with `letter_id`, `topic`, `sharding_key`, `reason`, `tries` and `_place`.
        wanted: the condition of the selection, without its limit of tries.
    """
    often = F.col("tries") >= selection.max_tries
    tired = F.col("_wanted") & (F.lit(False) if selection.again else often)
    candidates = letters.withColumn("_wanted", wanted).withColumn("_tired", tired)
    behind: Column = F.lit(False)
    if not selection.again:
        # A letter without a key waits for no other letter, so it is a partition of its own.
        keyless = F.when(F.col("sharding_key").isNull(), F.col("letter_id"))
        earlier = Window.partitionBy("topic", "sharding_key", keyless).orderBy("_place")
        earlier = earlier.rowsBetween(Window.unboundedPreceding, -1)
        stops = F.col("_tired") & ~F.col("reason").eqNullSafe("data")
        behind = F.coalesce(F.max(stops).over(earlier), F.lit(False))
    going = F.col("_wanted") & ~F.col("_tired")
    candidates = candidates.withColumn("_behind", going & behind)
    return candidates.withColumn("_chosen", going & ~F.col("_behind")).drop("_wanted")


def with_tries(letters: DataFrame, tries: DataFrame) -> DataFrame:
    """Add the columns `tries` and `open`, as earlier backfills left them."""
    joined = letters.join(tries, "letter_id", "left")
    is_open = F.coalesce("open", F.lit(False)) & ~F.col("was_stored")
    return joined.withColumns({"tries": F.coalesce("tries", F.lit(0)), "open": is_open})


def _met(selection: Selection, when: Column, *conditions: Column) -> Column:
    """Return `conditions` and the selection's topic and times as a condition; null is false."""
    terms = list(conditions)
    if selection.topic:
        terms.append(F.col("topic") == selection.topic)
    if selection.since:
        terms.append(when >= F.lit(selection.since))
    if selection.until:
        terms.append(when < F.lit(selection.until))
    return F.coalesce(reduce(and_, terms, F.lit(True)), F.lit(False))
