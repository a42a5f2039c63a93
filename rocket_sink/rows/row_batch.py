"""Rows in the standard form that the sink uses after the row contract was applied. They may still
be illegal: `rocket_sink.rows.checks` refuses rows that cannot be messages."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rocket_sink.errors import MessageError
from rocket_sink.message import Message
from rocket_sink.wire.columns.buffers import ints_of, is_text, nulls_of
from rocket_sink.wire.columns.encode import EncodedBatch, encode_columns
from rocket_sink.wire.columns.properties import EVENT_TIME_PROPERTY, PropertyPieces, property_pieces


@dataclass(frozen=True, eq=False)
class RowBatch:
    """A batch of n rows as arrays of n values. A column is None if it is absent, or null in all
    rows (except `body` and `order_by`). Text is `string` (`large_string` beyond 2 GiB), perhaps
    with bytes that are not UTF-8, as in Spark. Integers are int64."""

    body: pa.Array
    """Binary or large binary. A null or empty body is illegal."""
    topic: str | pa.Array
    """The topic of all rows, or a string array."""
    body_is_text: bool = False
    """Whether the body was a text column, so that it must be UTF-8."""
    tags: pa.Array | None = None
    """Trimmed tags. An empty tag is null here; a blank tag is kept, and is illegal."""
    keys: pa.Array | None = None
    """A string array (one key per row), or list<string> without null elements."""
    sharding_key: pa.Array | None = None
    properties: pa.MapArray | None = None
    """map<string, string> without null maps and values; each row has a name at most once."""
    delay_level: pa.Array | None = None
    delay_ms: pa.Array | None = None
    delivery_timestamp_ms: pa.Array | None = None
    flag: pa.Array | None = None
    wait_store: pa.Array | None = None
    queue_id: pa.Array | None = None
    broker_name: pa.Array | None = None
    message_id: pa.Array | None = None
    event_time_ms: pa.Array | None = None
    priority: pa.Array | None = None
    lite_topic: pa.Array | None = None
    traceparent: pa.Array | None = None
    tracestate: pa.Array | None = None
    """`traceparent` and `tracestate` are for the checks; `properties` has their values, too."""
    order_by: pa.Array | None = None
    """Values of any type that Arrow can sort, as the user sent them."""

    def __len__(self) -> int:
        return len(self.body)

    def columns(self) -> dict[str, pa.Array]:
        """Return {name: array} of the columns that are not None; `topic` only if it is an array."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return {name: v for name, v in values.items() if isinstance(v, pa.Array)}

    def take(self, rows: npt.NDArray[np.integer[Any]]) -> RowBatch:
        """Return the rows with these indices, in the order of the indices."""
        wanted = pa.array(rows, pa.int64())
        return self.with_(**{name: array.take(wanted) for name, array in self.columns().items()})

    def slice(self, first: int, last: int) -> RowBatch:
        """Return the rows `first` to `last` (exclusive), without a copy."""
        return self.with_(
            **{name: array.slice(first, last - first) for name, array in self.columns().items()}
        )

    def with_(self, **changes: Any) -> RowBatch:
        return replace(self, **changes)

    def topic_of(self, row: int) -> str | None:
        return self.topic if isinstance(self.topic, str) else text_at(self.topic, row)

    def kinds(self) -> npt.NDArray[np.int8]:
        """Return the kind of each row, a number below KINDS: a message with a delay level (1), with
        a delay or delivery time (2), with a priority (3), with a lite topic (4), or any other (0).
        Only rows of kind 0 may be in a batch request."""
        kinds = np.zeros(len(self), np.int8)
        if self.delay_level is not None:
            kinds[ints_of(self.delay_level, 0) != 0] = 1
        columns = (
            (self.delay_ms, 2), (self.delivery_timestamp_ms, 2), (self.priority, 3),
            (self.lite_topic, 4),
        )  # fmt: skip
        for column, kind in columns:
            if column is not None:
                kinds[~nulls_of(column)] = kind
        return kinds

    @property
    def is_delayed(self) -> bool:
        """Whether the rows, which are of one kind, have a delay level, a delay or delivery time."""
        return len(self) > 0 and int(self.kinds()[0]) in DELAYED

    def order_keys(self) -> pa.Array | None:
        """Return the keys whose rows stay in order: the sharding key, else the lite topic. Delayed
        rows have no order, so callers leave them out (`is_delayed`)."""
        if self.sharding_key is None or self.lite_topic is None:
            return self.lite_topic if self.sharding_key is None else self.sharding_key
        return pc.coalesce(self.sharding_key, self.lite_topic.cast(self.sharding_key.type))

    def property_columns(self, message_ids: pa.Array | None = None) -> dict[str, Any]:
        """Return the arguments of `wire.columns.property_pieces` for these rows. `message_ids` has
        an id for each row, which is used if the row has no `message_id`."""
        columns = {name: getattr(self, name) for name in _PROPERTY_COLUMNS}
        ids = self.message_id
        if ids is not None and message_ids is not None:
            ids = pc.coalesce(ids, message_ids.cast(ids.type))
        return {"message_ids": message_ids if ids is None else ids, **columns}

    def encoded_batch(
        self, ids: pa.Array | None = None, properties: pa.Array | PropertyPieces | None = None
    ) -> EncodedBatch:
        """Return the rows, which have one topic, as encoded messages, in order. `ids` are as in
        `property_columns`; `properties` are the rows' property strings, if the caller has them."""
        assert isinstance(self.topic, str)
        if properties is None:
            properties = property_pieces(len(self), **self.property_columns(ids))
        flags = 0 if self.flag is None else self.flag
        return encode_columns(self.body, properties, flags)

    def message(self, row: int) -> Message:
        """Return a row as a `Message`; raise MessageError if it breaks a rule of `Message`."""
        level = self._value("delay_level", row)
        wait = self._value("wait_store", row)
        return Message(
            self.topic_of(row),  # type: ignore[arg-type]  # None is refused with its code
            self.body[row].as_py(),
            tags=text_at(self.tags, row),
            keys=self._keys(row),
            sharding_key=text_at(self.sharding_key, row),
            properties=self._properties(row),
            delay_level=level or 0,
            delay_ms=self._value("delay_ms", row),
            delivery_timestamp_ms=self._value("delivery_timestamp_ms", row),
            flag=self._value("flag", row) or 0,
            wait_store=True if wait is None else wait,
            message_id=text_at(self.message_id, row),
            priority=self._value("priority", row),
            lite_topic=text_at(self.lite_topic, row),
        )

    def has_event_time(self, row: int) -> bool:
        return self.event_time_ms is not None and bool(self.event_time_ms[row].is_valid)

    def _value(self, column: str, row: int) -> Any:
        array = getattr(self, column)
        return None if array is None else array[row].as_py()

    def _keys(self, row: int) -> tuple[str, ...]:
        if self.keys is None or is_text(self.keys.type):
            key = text_at(self.keys, row)
            return () if key is None else (key,)
        return tuple(_text_of(key) or "" for key in self.keys[row].values)

    def _properties(self, row: int) -> dict[str, str]:
        properties = {}
        if self.properties is not None:
            entries = self.properties[row].values
            names, values = (entries.field(i) for i in (0, 1))
            properties = {
                _text_of(name) or "": _text_of(value) or ""
                for name, value in zip(names, values, strict=True)
            }
        event_time = self._value("event_time_ms", row)
        if event_time is None:
            return properties
        if EVENT_TIME_PROPERTY in properties:
            raise MessageError(
                f"the property name {EVENT_TIME_PROPERTY!r} is taken by the column event_time",
                code="RESERVED_PROPERTY",
            )
        return {**properties, EVENT_TIME_PROPERTY: str(event_time)}


KINDS: Final = 5
DELAYED: Final = (1, 2)
"""The kinds of rows that the broker itself keeps until their time."""
_PROPERTY_COLUMNS: Final = (
    "properties", "tags", "keys", "sharding_key", "wait_store", "delay_level", "delay_ms",
    "delivery_timestamp_ms", "event_time_ms", "priority", "lite_topic",
)  # fmt: skip


def text_at(array: pa.Array | None, row: int) -> str | None:
    """Return a row's text. Invalid UTF-8 becomes lone surrogates, which `Message` refuses."""
    return None if array is None else _text_of(array[row])


def _text_of(value: pa.Scalar) -> str | None:
    buffer = value.as_buffer()
    return None if buffer is None else buffer.to_pybytes().decode(errors="surrogateescape")
