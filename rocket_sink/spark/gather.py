"""Spark's Python rows gathered into Arrow batches, for the lanes where Spark hands out rows.

A foreach writer is not told the schema. Where `RocketSink.stream(df)` or `sink.check(df)` gave it
on the driver, it is used; else the names come from the rows and each type from the column's first
value, which the row contract then judges as it judges a schema. A column without any value yet
has no type; it is judged when its first value comes.
"""

from __future__ import annotations

import datetime as dt
import decimal
from collections.abc import Sequence
from typing import Any, Final

import pyarrow as pa

from rocket_sink.errors import ColumnError
from rocket_sink.options import SinkOptions
from rocket_sink.spark.contract import ColumnPlan, resolve_columns

_INSTANT: Final = pa.timestamp("us", tz="UTC")
_TEXT_MAP: Final = pa.map_(pa.string(), pa.string())
_SCALARS: Final[tuple[tuple[type, pa.DataType], ...]] = (
    (str, pa.string()),
    ((bytearray), pa.binary()),
    (bytes, pa.binary()),
    (bool, pa.bool_()),
    (int, pa.int64()),
    (float, pa.float64()),
    (dt.datetime, _INSTANT),
    (dt.date, pa.date32()),
)
_BODY_NAMES: Final = ("__rmq_body", "body", "value")


class Gatherer:
    """Turns lists of rows into record batches that a `TaskBody` takes.

    Args:
        plan: the driver's, if it saw the schema; else made from the first rows.
    """

    def __init__(self, options: SinkOptions, plan: ColumnPlan | None = None) -> None:
        self._options = options
        self._plan = plan
        self._checked: set[tuple[pa.DataType, ...]] = set()
        self._body_name = dict(options.columns).get("body", "").lower()

    @property
    def plan(self) -> ColumnPlan:
        """What the columns mean; known after the first batch."""
        assert self._plan is not None
        return self._plan

    def batch(self, rows: Sequence[Any]) -> pa.RecordBatch:
        """The rows' columns that are needed, as one batch.

        Raises:
            ColumnError: the rows do not fit the row contract.
        """
        names = _names(rows[0])
        columns = list(zip(*rows, strict=True))
        if self._plan is None:
            self._check_json()
            types = [self._type(name, values) for name, values in zip(names, columns, strict=True)]
            self._plan = resolve_columns(pa.schema(zip(names, types, strict=True)), self._options)
        needed = [(name, columns[names.index(name)]) for name in self._plan.needed]
        types = [self._type(name, values) for name, values in needed]
        self._check_types(types)
        arrays = [to_array(values, kind) for (_, values), kind in zip(needed, types, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, names=list(self._plan.needed))

    def _check_types(self, types: list[pa.DataType]) -> None:
        seen = tuple(types)
        if seen in self._checked:
            return
        kinds = dict(zip(self.plan.needed, types, strict=True))
        schema = pa.schema([(column, kinds[source]) for column, source in self.plan.sources])
        # By the contract's own names: where the columns came from is settled already.
        plain = self._options.with_(
            columns=(), orderBy="", strictColumns=False, bodyFormat="column"
        )
        resolve_columns(schema, plain)
        self._checked.add(seen)

    def _type(self, name: str, values: Sequence[Any]) -> pa.DataType:
        first = next((value for value in values if value is not None), None)
        if first is not None:
            return type_of(first)
        # A body that is null so far is a data error of its rows, not of the frame.
        is_body = name.lower() in (self._body_name, *_BODY_NAMES)
        return pa.binary() if is_body else pa.null()

    def _check_json(self) -> None:
        if self._options.body_format == "json":
            raise ColumnError(
                "bodyFormat=json needs the DataFrame on the driver: start the query with "
                "sink.stream(df) instead of df.writeStream.foreach(sink)"
            )


def type_of(value: Any) -> pa.DataType:
    """The Arrow type of a column by one of its values, as Spark's types come out in Python."""
    for kind, type_ in _SCALARS:
        if isinstance(value, kind):
            return type_
    if isinstance(value, decimal.Decimal):
        return pa.decimal128(38, max(0, -int(value.as_tuple().exponent)))
    if isinstance(value, dict):
        return _TEXT_MAP if _is_text_map(value) else pa.map_(pa.string(), pa.null())
    if isinstance(value, list):
        return pa.list_(_element_type(value))
    return pa.struct([("unknown", pa.null())])


def to_array(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """A column of Python values as an array of that type.

    Raises:
        ColumnError: a value of another type.
    """
    try:
        if kind == _INSTANT:
            return pa.array([_micros(value) for value in values], pa.int64()).cast(_INSTANT)
        return pa.array(values, kind)
    except UnicodeEncodeError:
        # A lone surrogate: kept as bytes that are not UTF-8, which the row checks refuse by row.
        raw = [None if v is None else str(v).encode("utf-8", "surrogatepass") for v in values]
        return pa.array(raw, pa.binary()).view(pa.string())
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise ColumnError(
            f"a column of type {kind} has a value that does not fit: {error}"
        ) from None


def _element_type(values: list[Any]) -> pa.DataType:
    first = next((value for value in values if value is not None), "")
    names = getattr(first, "__fields__", None)
    if not names:
        return type_of(first)
    parts: Sequence[Any] = tuple(first)
    types: list[pa.DataType] = [pa.string() if part is None else type_of(part) for part in parts]
    return pa.struct(list(zip(names, types, strict=True)))


def _is_text_map(value: dict[Any, Any]) -> bool:
    return all(
        isinstance(name, str) and (text is None or isinstance(text, str))
        for name, text in value.items()
    )


def _micros(value: dt.datetime | None) -> int | None:
    """Spark hands out times without a zone, in the worker's own (TimestampType.fromInternal)."""
    if value is None:
        return None
    instant = value.astimezone(dt.timezone.utc)
    return round((instant - _EPOCH) / dt.timedelta(microseconds=1))


_EPOCH: Final = dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc)


def _names(row: Any) -> list[str]:
    names = getattr(row, "__fields__", None)
    if names is None:
        raise ColumnError(
            f"the sink got {type(row).__name__}, not a Row with named columns; use it with "
            "writeStream.foreach on a DataFrame"
        )
    return list(names)
