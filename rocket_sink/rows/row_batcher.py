"""Spark's Python rows gathered into Arrow batches, for sinks to which Spark passes single rows.

Spark does not tell a foreach writer the schema. The batcher uses the frame's schema if
`RocketSink.stream(df)` or `sink.check(df)` was called on the driver. Otherwise it infers a schema
from the rows' names and the type of each column's first value, and the row contract checks it. A
column that is all null is checked in the first batch in which it has a value."""

from __future__ import annotations

import calendar
import datetime as dt
import decimal
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Any, Final

import numpy as np
import pyarrow as pa

from rocket_sink.errors import ColumnError
from rocket_sink.options import SinkOptions
from rocket_sink.rows.contract import ColumnPlan, resolve_columns

_INSTANT: Final = pa.timestamp("us", tz="UTC")
_TEXT_MAP: Final = pa.map_(pa.string(), pa.string())
_SCALARS: Final = (str, bytes, bytearray, bool, int, float, dt.date, dt.time, dt.timedelta)
_BELOW: Final = 1 << 62
"""A number that is added to times to make them positive, so that their bytes sort like numbers."""
_BODY_NAMES: Final = ("__rmq_body", "body", "value")
GATHER_BYTES: Final = 16 << 20
"""Limit of the gathered bodies in bytes. Without it 8,000 rows of 16 KiB would take 130 MB, and the
Arrow batch as much again."""
_LOOK_ROWS: Final = 100


class RowBatcher:
    """Turns lists of rows into record batches for a `TaskSender`. If `plan` is None, the driver saw
    no schema, and the first rows give the plan."""

    def __init__(self, options: SinkOptions, plan: ColumnPlan | None = None) -> None:
        self._options = options
        self._plan = plan
        self._checked: set[tuple[pa.DataType, ...]] = set()
        self._body_name = dict(options.columns).get("body", "").lower()

    @property
    def plan(self) -> ColumnPlan:
        """The column plan; known at the latest after the first batch."""
        assert self._plan is not None
        return self._plan

    def batch(self, rows: Sequence[Any]) -> pa.RecordBatch:
        """Return the needed columns as one batch. Raise ColumnError if rows break the contract."""
        names = _names(rows[0])
        columns = list(zip(*rows, strict=True))
        if self._plan is None:
            if self._options.packs_json:
                raise ColumnError(
                    f"bodyFormat={self._options.body_format} needs the DataFrame on the driver: "
                    "start the query with sink.stream(df) instead of df.writeStream.foreach(sink)"
                )
            types = [self._type(name, values) for name, values in zip(names, columns, strict=True)]
            self._plan = resolve_columns(pa.schema(zip(names, types, strict=True)), self._options)
        needed = [(name, columns[names.index(name)]) for name in self._plan.needed_columns]
        types = [self._type(name, values) for name, values in needed]
        self._check_types(types)
        arrays = [to_array(values, kind) for (_, values), kind in zip(needed, types, strict=True)]
        order_by = self._plan.source("order_by")
        if order_by is not None and [s for _, s in self._plan.sources].count(order_by) == 1:
            # In Python rows TIMESTAMP and TIMESTAMP_NTZ values look the same. A column that is used
            # only as `order_by` may have either type, so make keys that sort correctly for both.
            index = self._plan.needed_columns.index(order_by)
            if types[index] == _INSTANT:
                arrays[index] = _sort_keys(needed[index][1])
        return pa.RecordBatch.from_arrays(arrays, names=list(self._plan.needed_columns))

    def body_index(self, row: Any) -> int | None:
        """Return the index of the body column in such rows; None if they have no body."""
        if self._plan is not None:
            wanted = [self._plan.source("body")]
        else:
            wanted = [self._body_name, *_BODY_NAMES]
        names = [name.lower() for name in _names(row)]
        return next((names.index(w.lower()) for w in wanted if w and w.lower() in names), None)

    def _check_types(self, types: list[pa.DataType]) -> None:
        signature = tuple(types)
        if signature in self._checked:
            return
        kinds = dict(zip(self.plan.needed_columns, types, strict=True))
        schema = pa.schema([(column, kinds[source]) for column, source in self.plan.sources])
        # The schema has the contract's names already, so leave out the options that map names.
        plain = self._options.with_(
            columns=(), orderBy="", strictColumns=False, bodyFormat="column"
        )
        resolve_columns(schema, plain)
        self._checked.add(signature)

    def _type(self, name: str, values: Sequence[Any]) -> pa.DataType:
        first = next((value for value in values if value is not None), None)
        if isinstance(first, list):
            return _list_type(values)
        if first is not None:
            return type_of(first)
        # Let the checks refuse each row without a body: a body of type null would fail the task.
        is_body = name.lower() in (self._body_name, *_BODY_NAMES)
        return pa.binary() if is_body else pa.null()


class RowBuffer:
    """Gathers rows until they make a batch: `limit` rows, or `GATHER_BYTES` of bodies. The owner
    appends to `rows`, and calls `is_full` at `look_at` rows. Thus the sizes of small rows are
    summed every hundred rows, those of large rows at each row. Another thread may call `take` while
    the owner appends, if both threads hold a lock around `take` and `is_full`."""

    __slots__ = ("_body", "_gatherer", "_largest", "_limit", "_seen", "_size", "look_at", "rows")

    def __init__(self, gatherer: RowBatcher, limit: int) -> None:
        self.rows: list[Any] = []
        self._gatherer = gatherer
        self._limit = limit
        self._body: int | None = None
        self._largest = 1
        self._begin()

    def _begin(self) -> None:
        self._seen = self._size = 0
        self._look_in(1)  # The owner then notes the time of the oldest row.

    def _look_in(self, rows: int) -> None:
        """Let the next call of `is_full` come after `rows` more rows, or earlier: after as many
        rows of the largest size so far as fill a quarter of the remaining bytes."""
        room = (GATHER_BYTES - self._size) // (4 * self._largest)
        self.look_at = min(self._limit, self._seen + max(1, min(rows, room)))

    def is_full(self) -> bool:
        """Return whether it is time to `take`. Otherwise set `look_at` for the next call."""
        rows = self.rows
        if not self._seen:
            self._body = self._gatherer.body_index(rows[0])
        if self._body is not None:
            sizes = _lengths(rows[self._seen :], self._body)
            self._size += sum(sizes)
            self._largest = max(self._largest, max(sizes, default=0))
        self._seen = len(rows)
        self._look_in(_LOOK_ROWS)
        return self._seen >= self._limit or self._size >= GATHER_BYTES

    def take(self) -> pa.RecordBatch | None:
        """Remove the rows; return their batch, or None without rows. Errors as in `batch`."""
        if not self.rows:
            return None
        rows = self.rows[:]
        batch = self._gatherer.batch(rows)
        del self.rows[: len(rows)]
        self._begin()
        return batch


def _lengths(rows: Sequence[Any], column: int) -> list[int]:
    """Return the lengths of the bodies, in bytes or characters of text. Leave out other values."""
    # Avoid `Row.__getitem__`, which is slow Python code.
    bodies = list(map(tuple.__getitem__, rows, repeat(column)))
    try:
        return list(map(len, bodies))
    except TypeError:
        return [len(body) for body in bodies if isinstance(body, (str, bytes, bytearray))]


def type_of(value: Any) -> pa.DataType:
    if isinstance(value, dt.datetime):
        return _INSTANT
    if isinstance(value, _SCALARS):
        return pa.infer_type([value])
    if isinstance(value, decimal.Decimal):
        return pa.decimal128(38, max(0, -int(value.as_tuple().exponent)))
    if isinstance(value, dict):
        texts = [*value, *(text for text in value.values() if text is not None)]
        is_text = all(isinstance(text, str) for text in texts)
        return _TEXT_MAP if is_text else pa.map_(pa.string(), pa.null())
    if isinstance(value, list):
        return _list_type([value])
    return pa.struct([("unknown", pa.null())])


def to_array(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Return Python values as an array of this type; raise ColumnError if one does not fit."""
    if pa.types.is_null(kind):
        return pa.nulls(len(values))
    try:
        if kind == _INSTANT:
            return pa.array([_micros(value) for value in values], pa.int64()).cast(_INSTANT)
        return pa.array(values, kind)
    except UnicodeEncodeError:
        # Keep a lone surrogate as invalid UTF-8, so that the checks refuse only this row.
        raw = [None if v is None else str(v).encode("utf-8", "surrogatepass") for v in values]
        return pa.array(raw, pa.binary()).view(pa.string())
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise ColumnError(
            f"a column of type {kind} has a value that does not fit: {error}"
        ) from None


def _list_type(lists: Sequence[list[Any] | None]) -> pa.DataType:
    """Return the type of the lists, from the first element; from each field's first value if the
    elements are structs. Return null if all lists are empty."""

    def elements() -> Iterator[Any]:
        return (element for values in lists for element in values or () if element is not None)

    first = next(elements(), None)
    if first is None:
        return pa.null()
    names = getattr(first, "__fields__", None)
    if not names:
        return pa.list_(type_of(first))
    parts = [
        next((element[place] for element in elements() if element[place] is not None), "")
        for place in range(len(names))
    ]
    return pa.list_(pa.struct(list(zip(names, map(type_of, parts), strict=True))))


class FarTime(dt.datetime):
    """A moment that a `datetime` in the worker's zone cannot show, such as the start of year 1 in
    UTC if the worker is in New York. Only `micros` is right: the microseconds since 1970."""

    micros: int


def _micros(value: dt.datetime | None) -> int | None:
    """Return microseconds since 1970. Spark passes local times without a zone
    (TimestampType.fromInternal)."""
    if value is None:
        return None
    if isinstance(value, FarTime):
        return value.micros
    try:
        seconds = value.replace(microsecond=0).timestamp()
    except (OverflowError, ValueError):
        # `datetime.timestamp` fails near the years 1 and 9999. `mktime` works there; Spark uses it,
        # too. If an hour comes twice, `mktime` takes the first.
        seconds = time.mktime(value.timetuple())
    return int(seconds) * 1_000_000 + value.microsecond


def _sort_keys(times: Sequence[dt.datetime | None]) -> pa.Array:
    """Return binary keys that sort like the times. Spark passes both TIMESTAMP and TIMESTAMP_NTZ as
    times without a zone. A key is the moment in the worker's zone, then the time as written. If the
    clock skips an hour, a TIMESTAMP_NTZ in this hour has the moment of the skip."""
    keys = np.zeros((len(times), 2), ">i8")
    for number, value in enumerate(times):
        if value is None:
            continue
        moment = _micros(value) or 0
        if isinstance(value, FarTime):
            keys[number] = moment + _BELOW
            continue
        written = calendar.timegm(value.timetuple())
        seconds = moment // 1_000_000
        if (skipped := _local(seconds) - written) > 0:
            before, offset = seconds - skipped, _local(seconds) - seconds
            seconds = before + bisect_left(
                range(before, seconds), True, key=lambda at: _local(at) - at == offset
            )
            moment = seconds * 1_000_000
        keys[number] = moment + _BELOW, written * 1_000_000 + value.microsecond + _BELOW
    nulls = np.array([value is None for value in times])
    return pa.array([bytes(key) for key in keys], pa.binary(16), mask=nulls)


def _local(seconds: int) -> int:
    """Return the worker's local time at this moment, as if it were UTC, in seconds since 1970."""
    return calendar.timegm(time.localtime(seconds))


def _names(row: Any) -> list[str]:
    names = getattr(row, "__fields__", None)
    if names is None:
        raise ColumnError(
            f"the sink got {type(row).__name__}, not a Row with named columns; use it with "
            "writeStream.foreach on a DataFrame"
        )
    return list(names)
