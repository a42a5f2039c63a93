"""The types of the row contract, in one vocabulary for Spark's and Arrow's schemas.

Spark's own names (`simpleString`) are the vocabulary, with all whole numbers as `integer`, all
strings as `string` and decimals without their precision. Works by shape, without pyspark.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

HALF_BYTES: Final = 1024
"""Room in a message's properties for what makes it a half message."""
_LEAVES: Final[tuple[tuple[Callable[[pa.DataType], bool], str], ...]] = (
    (pa.types.is_string, "string"),
    (pa.types.is_large_string, "string"),
    (pa.types.is_string_view, "string"),
    (pa.types.is_binary, "binary"),
    (pa.types.is_large_binary, "binary"),
    (pa.types.is_binary_view, "binary"),
    (pa.types.is_fixed_size_binary, "binary"),
    (pa.types.is_boolean, "boolean"),
    (pa.types.is_uint64, "uint64"),
    (pa.types.is_integer, "integer"),
    (pa.types.is_decimal, "decimal"),
    (pa.types.is_null, "void"),
    (pa.types.is_float64, "double"),
    (pa.types.is_float32, "float"),
    (pa.types.is_date, "date"),
)
_LISTS: Final = (
    pa.types.is_list,
    pa.types.is_large_list,
    pa.types.is_fixed_size_list,
    pa.types.is_list_view,
    pa.types.is_large_list_view,
)
_SPARK_LEAVES: Final = {
    "tinyint": "integer", "smallint": "integer", "int": "integer", "bigint": "integer",
    "char": "string", "varchar": "string",
}  # fmt: skip


def fields_of(schema: Any) -> list[tuple[str, Any]]:
    """(name, type) of each column of a `pa.Schema` or a pyspark `StructType`."""
    if isinstance(schema, pa.Schema):
        return [(field.name, field.type) for field in schema]
    return [(field.name, field.dataType) for field in schema.fields]


def kind_of(kind: Any) -> str:
    """A type's name in the vocabulary, for instance `array<struct<key:string,value:binary>>`."""
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
    if any(is_list(kind) for is_list in _LISTS):
        return f"array<{_arrow_kind(kind.value_type)}>"
    if pa.types.is_struct(kind):
        inner = (f"{field.name}:{_arrow_kind(field.type)}" for field in kind)
        return f"struct<{','.join(inner)}>"
    return next((name for test, name in _LEAVES if test(kind)), str(kind))


def _spark_kind(kind: Any) -> str:
    if hasattr(kind, "elementType"):
        return f"array<{_spark_kind(kind.elementType)}>"
    if hasattr(kind, "keyType"):
        return f"map<{_spark_kind(kind.keyType)},{_spark_kind(kind.valueType)}>"
    if hasattr(kind, "fields"):
        inner = (f"{field.name}:{_spark_kind(field.dataType)}" for field in kind.fields)
        return f"struct<{','.join(inner)}>"
    text = str(kind.simpleString())
    # "decimal(10,2)", "varchar(20)", "string collate UTF8_LCASE"
    name = text.partition("(")[0].split()[0]
    return _SPARK_LEAVES.get(name, name)


@dataclass(frozen=True)
class ContractColumn:
    """One column of the contract. No `kinds`: whatever can be sorted."""

    name: str
    kinds: tuple[str, ...]
    alias: str = ""

    def accepts(self, kind: str) -> bool:
        """Whether a column of that kind will do; `void` (all null) will, but as a body."""
        if not self.kinds:
            return not kind.startswith(("array", "map", "struct", "variant"))
        return kind in self.kinds or (kind == "void" and self.name != "body")

    @property
    def wanted(self) -> str:
        """The kinds as words for an error."""
        return " or ".join(self.kinds).replace("integer", "a whole number (int, bigint)")


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
    ContractColumn("order_by", ()),
)
