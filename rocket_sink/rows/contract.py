"""The row contract: the columns that the sink reads, and their types, checked on the driver.

docs/reference/columns.md describes the columns, and their aliases `__rmq_<name>` for frames in
which a data column has the plain name. The option `columns` maps a column of another name. All
other columns are ignored, refused (`strictColumns`) or packed into the body (`bodyFormat=json`).

Types of Spark and of Arrow have the names of Spark's `simpleString` here, but simplified: all whole
numbers are `integer`, all strings are `string`, and a decimal is `decimal`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from rocket_sink.errors import ColumnError
from rocket_sink.options import SinkOptions, check_topic_option
from rocket_sink.text import is_misspelled, nearest


@dataclass(frozen=True)
class ColumnPlan:
    """The result of `resolve_columns`: which column of the frame is which column of the contract.

    Attributes:
        sources: pairs (contract column, name in the frame).
        topic: the option `topic`; empty if the rows have a topic column.
        json_columns: the columns that `bodyFormat=json` packs.
        keeps_nulls: the JSON shows null fields (`bodyFormat=json_nulls`).
        context: properties for rows without a `traceparent` of their own, as (name, value).
    """

    sources: tuple[tuple[str, str], ...]
    topic: str = ""
    json_columns: tuple[str, ...] = ()
    keeps_nulls: bool = False
    context: tuple[tuple[str, str], ...] = ()

    @property
    def needs_to_json(self) -> bool:
        """Whether the driver must pack the `json_columns` into `body`."""
        return bool(self.json_columns)

    @property
    def needed_columns(self) -> tuple[str, ...]:
        """The frame's columns that tasks read, each once; `body` may be packed by the driver."""
        return tuple(dict.fromkeys(source for _, source in self.sources))

    def source(self, column: str) -> str | None:
        """Return the frame's column for a contract column, or None."""
        return dict(self.sources).get(column)


HALF_BYTES: Final = 1024
"""Bytes of a half message's properties that are reserved for its transaction properties."""
_LEAVES: Final = {
    **dict.fromkeys(("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32"), "integer"),
    **dict.fromkeys(("tinyint", "smallint", "int", "bigint"), "integer"),
    **dict.fromkeys(("large_string", "string_view", "char", "varchar"), "string"),
    **dict.fromkeys(("large_binary", "binary_view", "fixed_size_binary"), "binary"),
    **dict.fromkeys(("decimal32", "decimal64", "decimal128", "decimal256"), "decimal"),
    **dict.fromkeys(("date32", "date64"), "date"),
    "bool": "boolean",
    "null": "void",
}
"""{name in Arrow or Spark, without parameters: name here}; other types keep their names"""


def kind_of(kind: Any) -> str:
    """Return a type's name (see the module), e.g. `array<struct<key:string,value:binary>>`."""
    return _arrow_kind(kind) if isinstance(kind, pa.DataType) else _spark_kind(kind)


def _arrow_kind(kind: pa.DataType) -> str:
    if pa.types.is_dictionary(kind):
        return _arrow_kind(kind.value_type)
    if isinstance(kind, pa.BaseExtensionType):
        return _arrow_kind(kind.storage_type)
    if pa.types.is_timestamp(kind):
        return "timestamp_ntz" if kind.tz is None else "timestamp"
    if pa.types.is_map(kind):
        return f"map<{_arrow_kind(kind.key_type)},{_arrow_kind(kind.item_type)}>"
    if hasattr(kind, "value_field"):
        return f"array<{_arrow_kind(kind.value_type)}>"
    if pa.types.is_struct(kind):
        inner = (f"{field.name}:{_arrow_kind(field.type)}" for field in kind)
        return f"struct<{','.join(inner)}>"
    # Cut parameters: "decimal128(10, 2)", "fixed_size_binary[16]".
    return _LEAVES.get(re.split(r"[(\[]", str(kind))[0], str(kind))


def _spark_kind(kind: Any) -> str:
    if hasattr(kind, "elementType"):
        return f"array<{_spark_kind(kind.elementType)}>"
    if hasattr(kind, "keyType"):
        return f"map<{_spark_kind(kind.keyType)},{_spark_kind(kind.valueType)}>"
    if hasattr(kind, "fields"):
        inner = (f"{field.name}:{_spark_kind(field.dataType)}" for field in kind.fields)
        return f"struct<{','.join(inner)}>"
    text = str(kind.simpleString())
    # Cut parameters: "decimal(10,2)", "varchar(20)", "string collate UTF8_LCASE".
    name = text.partition("(")[0].split()[0]
    return _LEAVES.get(name, name)


@dataclass(frozen=True)
class ContractColumn:
    """A column of the contract and its legal types. Empty `kinds`: any type that can be sorted."""

    name: str
    kinds: tuple[str, ...]
    alias: str = ""

    def accepts(self, kind: str) -> bool:
        """Return whether the type is legal. `void` (all null) is legal except for the body."""
        if not self.kinds:
            return not kind.startswith(("array", "map", "struct", "variant"))
        return kind in self.kinds or (kind == "void" and self.name != "body")


CONTRACT: Final = (
    ContractColumn("body", ("binary", "string"), "value"),
    ContractColumn("topic", ("string",)),
    ContractColumn("tags", ("string",)),
    ContractColumn("keys", ("string", "array<string>"), "key"),
    ContractColumn("sharding_key", ("string", "integer", "decimal")),
    ContractColumn(
        "properties",
        (
            "map<string,string>",
            "array<struct<key:string,value:string>>",
            "array<struct<key:string,value:binary>>",
        ),
        "headers",
    ),
    ContractColumn("delay_level", ("integer",)),
    ContractColumn("delay_ms", ("integer",)),
    ContractColumn("delivery_timestamp", ("timestamp", "integer")),
    ContractColumn("queue_id", ("integer",)),
    ContractColumn("broker_name", ("string",)),
    ContractColumn("flag", ("integer",)),
    ContractColumn("wait_store", ("boolean",)),
    ContractColumn("message_id", ("string",)),
    ContractColumn("event_time", ("timestamp",)),
    ContractColumn("traceparent", ("string",)),
    ContractColumn("tracestate", ("string",)),
    ContractColumn("priority", ("integer",)),
    ContractColumn("lite_topic", ("string",)),
    ContractColumn("order_by", ()),
)


DELAY_COLUMNS: Final = ("delay_level", "delay_ms", "delivery_timestamp")
_NAMES: Final = {name: c.name for c in CONTRACT for name in (c.name, c.alias) if name}
"""{name or alias: the column's name}"""
_PREFIX: Final = "__rmq_"


def resolve_columns(
    schema: Any, options: SinkOptions, *, case_sensitive: bool = False
) -> ColumnPlan:
    """Find the contract's columns in a `StructType` or `pa.Schema`. Raise ColumnError for a
    missing, ambiguous, misspelt or mistyped column, and OptionError for an illegal option
    `topic`."""
    finder = _Finder(schema, case_sensitive)
    named = finder.columns_by_name(json=options.packs_json)
    mapped = finder.columns_by_options(options)
    sources, named_sources = {**named, **mapped}, set(named.values())
    if options.topic:
        check_topic_option("topic", options.topic, options.namespace)
        sources.pop("topic", None)
        # The option replaces the frame's topic column, so bodyFormat=json packs the column as data.
        named = {name: source for name, source in named.items() if name != "topic"}
    json_columns: tuple[str, ...] = ()
    if options.packs_json:
        json_columns = _json_columns(finder, named, mapped)
        sources = {"body": "body", **sources}
    finder.check_kinds(sources, json_columns)
    unknown = [n for n in finder.names if n not in {*named_sources, *mapped.values()}]
    if not json_columns:
        _check_spelling(unknown, sources, options)
    _check_combinations(sources, options, finder)
    if options.strict_columns and not json_columns and unknown:
        raise ColumnError(
            f"option strictColumns: the row contract does not know {', '.join(map(repr, unknown))};"
            " drop or rename them, or leave the option out",
            column=unknown[0],
        )
    keeps_nulls = options.body_format == "json_nulls"
    return ColumnPlan(tuple(sources.items()), options.topic, json_columns, keeps_nulls)


class _Finder:
    """Finds the frame's columns by name, by default regardless of case, as Spark does."""

    def __init__(self, schema: Any, case_sensitive: bool) -> None:
        attribute = "type" if isinstance(schema, pa.Schema) else "dataType"
        self.names = [field.name for field in schema]
        self._kinds = {field.name: kind_of(getattr(field, attribute)) for field in schema}
        self._fold = str if case_sensitive else str.lower
        self._by_name: dict[str, list[str]] = {}
        for name in self.names:
            self._by_name.setdefault(self._fold(name), []).append(name)

    def find(self, name: str) -> str | None:
        """Return the column's name as the frame spells it, or None."""
        matches = self._by_name.get(self._fold(name), [])
        if len(matches) > 1:
            raise ColumnError(
                f"column {name!r} is ambiguous: the frame has {', '.join(map(repr, matches))}; "
                "rename or drop all but one",
                column=name,
            )
        return matches[0] if matches else None

    def columns_by_name(self, *, json: bool) -> dict[str, str]:
        """Return {contract column: frame's column} where the frame uses the contract's names."""
        sources = {}
        for column in CONTRACT:
            # bodyFormat=json packs a column `value` like data.
            alias = "" if json and column.name == "body" else column.alias
            for name in (_PREFIX + column.name, column.name, alias):
                source = self.find(name) if name else None
                if source is not None:
                    sources[column.name] = source
                    break
        return sources

    def columns_by_options(self, options: SinkOptions) -> dict[str, str]:
        """Return {contract column: frame's column} by the options `columns` and `orderBy`."""
        sources = {}
        for wanted, source in options.columns:
            sources[_contract_column(wanted)] = self._existing(source, "columns")
        if options.order_by:
            sources["order_by"] = self._existing(options.order_by, "orderBy")
        return sources

    def _existing(self, source: str, option: str) -> str:
        name = self.find(source)
        if name is None:
            raise ColumnError(
                f"option {option} names the column {source!r}, which the frame does not have; "
                f"it has {self.column_list}",
                column=source,
            )
        return name

    def check_kinds(self, sources: Mapping[str, str], json_columns: Iterable[str]) -> None:
        for column in CONTRACT:
            source = sources.get(column.name)
            if source is None or (json_columns and column.name == "body"):
                continue
            kind = self._kinds[source]
            if not column.accepts(kind):
                raise ColumnError(_wrong_kind(column, source, kind), column=source)

    @property
    def column_list(self) -> str:
        return ", ".join(repr(name) for name in self.names) or "no columns"


def _wrong_kind(column: ContractColumn, source: str, kind: str) -> str:
    kinds = " or ".join(column.kinds) or "a type that can be sorted"
    wanted = kinds.replace("integer", "a whole number (int, bigint)")
    hint = f"cast it, or set option columns='{column.name}=<another column>'"
    if kind == "timestamp_ntz":
        hint = "a time without a zone is ambiguous: cast it to timestamp in the zone it is meant in"
    elif source.lower() == "key" and kind == "binary":
        hint = (
            "these are index keys; if the key of a Kafka topic is to choose the queue, select "
            "cast(key AS string) AS sharding_key"
        )
    elif column.name == "sharding_key":
        hint = "cast it to string in the one way that all producers of the topic use"
    shown = repr(source) if source == column.name else f"{source!r} (as {column.name})"
    return f"column {shown} has the type {kind}; {column.name} must be {wanted}: {hint}"


def _contract_column(wanted: str) -> str:
    folded = wanted.lower().removeprefix(_PREFIX)
    if folded in _NAMES:
        return _NAMES[folded]
    near = nearest(folded, _NAMES)
    hint = f"did you mean {near!r}?" if near else f"it has {', '.join(c.name for c in CONTRACT)}"
    raise ColumnError(
        f"option columns: the row contract has no column {wanted!r}; {hint}", column=wanted
    )


def _json_columns(
    finder: _Finder, named: Mapping[str, str], mapped: Mapping[str, str]
) -> tuple[str, ...]:
    """Return the columns to pack. A column that the option `columns` maps is packed, too."""
    body = {**named, **mapped}.get("body")
    if body is not None:
        raise ColumnError(
            f"option bodyFormat=json makes the body, but the column {body!r} is one already: "
            "rename or drop it, or leave the option out",
            column=body,
        )
    metadata = set(named.values())
    packed = tuple(name for name in finder.names if name not in metadata)
    if not packed:
        raise ColumnError(
            f"option bodyFormat=json has nothing to pack: all of {finder.column_list} are metadata"
        )
    return packed


def _check_combinations(sources: Mapping[str, str], options: SinkOptions, finder: _Finder) -> None:
    has = f"the frame has {finder.column_list}"
    if "body" not in sources:
        raise ColumnError(
            "no column 'body' (or 'value'): rename one, set option columns='body=<column>', or "
            f"bodyFormat=json to pack all columns; {has}",
            column="body",
        )
    if not options.topic and "topic" not in sources:
        raise ColumnError(
            f"no column 'topic': set option topic, or columns='topic=<column>'; {has}",
            column="topic",
        )
    if ("queue_id" in sources) != ("broker_name" in sources):
        there, missing = ("queue_id", "broker_name")[:: 1 if "queue_id" in sources else -1]
        raise ColumnError(
            f"column {there!r} needs the column {missing!r}: together they name a queue; {has}",
            column=missing,
        )
    places = {"sharding_key", "lite_topic", "queue_id"}
    if options.ordering == "strict" and not places & set(sources):
        raise ColumnError(
            "option ordering=strict needs the column 'sharding_key': rename one, or set option "
            f"columns='sharding_key=<column>'; {has}",
            column="sharding_key",
        )


_MEANT: Final = {
    **dict.fromkeys(("delay", "delays", "delayed", "delay_time", "delay_millis"), "delay_ms"),
    **dict.fromkeys(("delay_s", "delay_sec", "delay_seconds", "delaymillis"), "delay_ms"),
    **dict.fromkeys(("delay_lvl", "delaytimelevel"), "delay_level"),
    **dict.fromkeys(("deliver_at", "delivery_time", "deliver_time"), "delivery_timestamp"),
    **dict.fromkeys(("delivery_at", "delivery_ts"), "delivery_timestamp"),
    **dict.fromkeys(("shard", "sharding", "partition_key", "ordering_key"), "sharding_key"),
    **dict.fromkeys(("msg_id", "messageid", "uniq_key"), "message_id"),
    **dict.fromkeys(("props", "user_properties"), "properties"),
    **dict.fromkeys(("lite", "litetopic"), "lite_topic"),
    **dict.fromkeys(("event_ts", "event_timestamp"), "event_time"),
    **dict.fromkeys(("payload", "message_body"), "body"),
    "prio": "priority", "queue_no": "queue_id", "broker_id": "broker_name",
}  # fmt: skip
"""{name: contract column that is probably meant}: names that no comparison of letters finds."""


def _check_spelling(
    unknown: Iterable[str], sources: Mapping[str, str], options: SinkOptions
) -> None:
    """Refuse a column that looks like a misspelt contract column; it would be ignored silently."""
    absent = {name: column for name, column in _NAMES.items() if column not in sources}
    for source in unknown:
        for name, column in absent.items():
            is_near = is_misspelled(source, name) or _MEANT.get(source.lower()) == name
            if is_near and not (column == "topic" and options.topic):
                raise ColumnError(
                    f"the row contract has no column {source!r}; did you mean {name!r}? Rename it, "
                    f"or set option columns='{column}={source}'; drop it if it is not to be sent",
                    column=source,
                )
