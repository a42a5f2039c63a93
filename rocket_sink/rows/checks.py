"""Validation of rows: the rules of `Message`, on whole columns.

Column kernels select suspect rows: all illegal rows, perhaps with legal ones. Each suspect row
becomes a `Message`, whose constructor raises the error if the row is illegal. This module adds
UTF-8 in text bodies, sizes of body and properties, named queues, and keys for strict order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rocket_sink.errors import MessageError
from rocket_sink.message_rules import (
    DELAY_LEVEL_MAX,
    DELAY_MAX_S,
    FORBIDDEN_TOPICS,
    LITE_TOPIC_PATTERN,
    PRIORITY_MAX,
    RESERVED_PREFIX,
    RESERVED_PROPERTIES,
    SYSTEM_TOPIC_PATTERN,
    SYSTEM_TOPICS,
    TOPIC_MAX_LENGTH,
    check_no_system_topic,
    check_property,
    check_topic,
    is_control_free,
    with_namespace,
)
from rocket_sink.options import SinkOptions
from rocket_sink.rows.contract import HALF_BYTES
from rocket_sink.rows.row_batch import RowBatch, text_at
from rocket_sink.wire.columns.buffers import (
    Int64s,
    Mask,
    as_binary,
    bytes_of,
    ints_of,
    is_text,
    lengths_of,
    nulls_of,
    offsets_of,
)
from rocket_sink.wire.columns.properties import (
    EVENT_TIME_PROPERTY,
    entries_of,
    map_sizes,
    property_pieces,
)
from rocket_sink.wire.headers import INT64_MAX
from rocket_sink.wire.properties import ENCODED_LIMIT, KEY_SEPARATOR, UNIQ_KEY

_ID_BYTES: Final = len(UNIQ_KEY) + 2 + 32
"""Bytes of the property UNIQ_KEY with a generated message id."""
_OTHERS_BYTES: Final = 400
"""Upper bound for the bytes of a row's property names, separators, numbers and WAIT."""

TRACE_CONTEXT: Final = ("traceparent", "tracestate")
"""Columns of the W3C recommendation Trace Context; they become properties of the same names."""
_IDS: Final = "[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}"
_TRACEPARENT: Final = f"^(00-{_IDS}|(0[1-9a-f]|[1-9a-e][0-9a-f]|f[0-9a-e])-{_IDS}(-.*)?)$"
_NO_ID: Final = "^..-(0{32}|.{32}-0{16})-"
_VALUE: Final = "[ -+--<>-~]*[!-+--<>-~]"
_MEMBER: Final = f"[ \\t]*([a-z0-9][a-z0-9_*/@-]*={_VALUE})?[ \\t]*"
_TRACESTATE: Final = f"^{_MEMBER}(,{_MEMBER}){{0,31}}$"


def _suspect_entries(batch: RowBatch, names: pa.Array, values: pa.Array) -> Mask:
    """Return a mask of all illegal entries of `batch.properties`, and perhaps of legal ones."""
    is_suspect = np.zeros(len(names), np.bool_)
    for part in (names, values):
        is_suspect |= with_separator(part) | invalid_utf8(part) | all_blank(part)
    reserved = [*sorted(RESERVED_PROPERTIES)]
    if batch.event_time_ms is not None:
        reserved.append(EVENT_TIME_PROPERTY)
    is_suspect |= _mask(pc.is_in(names, value_set=pa.array(reserved, names.type)))
    return is_suspect | _mask(pc.starts_with(names, RESERVED_PREFIX))


def drop_illegal(batch: RowBatch) -> RowBatch:
    """Return the batch without illegal user properties."""
    if batch.properties is None:
        return batch
    names, values, offsets = entries_of(batch.properties)
    row_of = np.repeat(np.arange(len(batch)), np.diff(offsets))
    keep = np.ones(len(names), np.bool_)
    for entry in np.flatnonzero(_suspect_entries(batch, names, values)).tolist():
        name = text_at(names, entry) or ""
        is_taken = name == EVENT_TIME_PROPERTY and batch.has_event_time(int(row_of[entry]))
        keep[entry] = not is_taken and not _is_illegal(name, text_at(values, entry) or "")
    for name, is_illegal in illegal_context(batch).items():
        keep &= ~(_mask(pc.equal(names, pa.scalar(name, names.type))) & is_illegal[row_of])
    if keep.all():
        return batch
    ends = np.concatenate(([0], np.cumsum(keep)))[offsets]
    kept = pa.array(keep)
    properties = pa.MapArray.from_arrays(
        pa.array(ends, pa.int32()), names.filter(kept), values.filter(kept)
    )
    return batch.with_(properties=properties, traceparent=None, tracestate=None)


def illegal_context(batch: RowBatch) -> dict[str, Mask]:
    """Return {column: mask of rows whose value is not in the W3C's form}. A `tracestate` without a
    legal `traceparent` is illegal, too."""
    masks = {}
    has_parent = np.zeros(len(batch), np.bool_)
    if (parent := batch.traceparent) is not None:
        has_parent = _matches(parent, _TRACEPARENT) & ~_matches(parent, _NO_ID)
        masks["traceparent"] = (lengths_of(parent) > 0) & ~has_parent
    if (state := batch.tracestate) is not None:
        masks["tracestate"] = (lengths_of(state) > 0) & ~(has_parent & _matches(state, _TRACESTATE))
    return masks


def _matches(text: pa.Array, pattern: str) -> Mask:
    return _mask(pc.match_substring_regex(as_binary(text), pattern))


def _check_context(batch: RowBatch, row: int) -> None:
    for name, is_illegal in illegal_context(batch.slice(row, row + 1)).items():
        if is_illegal[0]:
            raise MessageError(
                f"the column {name} has {text_at(getattr(batch, name), row)!r}, which is not of "
                "the form of https://www.w3.org/TR/trace-context (a tracestate needs a "
                "traceparent); set it to null, or option propertyPolicy=drop",
                code="INVALID_PROPERTY",
            )


def _is_illegal(name: str, value: str) -> bool:
    try:
        check_property(name, value)
    except MessageError:
        return True
    return False


def property_bytes_over(batch: RowBatch, limit: int) -> Int64s:
    """Return the size of each row's wire property string if it exceeds `limit`, else 0. The size
    includes the message id, also if the id is not generated yet."""
    longest = _OTHERS_BYTES
    if batch.properties is not None:
        longest += int(map_sizes(batch.properties).max())
    for text in (batch.tags, batch.sharding_key, batch.message_id, batch.lite_topic):
        longest += 0 if text is None else int(lengths_of(text).max())
    longest += 0 if batch.keys is None else _longest_keys(batch.keys)
    if longest <= limit:
        return np.zeros(len(batch), np.int64)
    sizes = property_pieces(len(batch), **batch.property_columns()).sizes
    lacks_id = batch.message_id is None or nulls_of(batch.message_id)
    sizes = sizes + np.where(lacks_id, _ID_BYTES, 0)
    over: Int64s = np.where(sizes > limit, sizes, 0)
    return over


def _longest_keys(keys: pa.Array) -> int:
    """Return an upper bound for the size of a KEYS value."""
    if is_text(keys.type):
        return int(lengths_of(keys).max())
    flat = pc.list_flatten(keys)
    each = int(lengths_of(flat).max(initial=0)) + 1
    return each * int(pc.max(pc.list_value_length(keys)).as_py() or 0)


_INT32: Final = 2**31


@dataclass(frozen=True)
class Refused:
    """An illegal row: its index in the batch, and the error's code and text.

    Codes: INVALID_TOPIC, NULL_BODY, EMPTY_BODY, BODY_TOO_LARGE, INVALID_TEXT, INVALID_TAGS,
    INVALID_KEYS, RESERVED_PROPERTY, INVALID_PROPERTY, PROPERTIES_TOO_LARGE, INVALID_DELAY,
    INVALID_FLAG, INVALID_QUEUE, INVALID_PRIORITY, INVALID_LITE_TOPIC, MISSING_SHARDING_KEY."""

    row: int
    code: str
    text: str


@dataclass(frozen=True, eq=False)
class Checked:
    """The result of `validate`: the accepted rows, their indices in the checked batch, and the
    refused rows in row order."""

    rows: RowBatch
    accepted: Int64s
    refused: Sequence[Refused]


def validate(batch: RowBatch, options: SinkOptions) -> Checked:
    """Split the rows into accepted and refused ones. With `propertyPolicy=drop`, remove illegal
    user properties instead of refusing their rows."""
    everything = np.arange(len(batch), dtype=np.int64)
    if not len(batch):
        return Checked(batch, everything, ())
    if options.property_policy == "drop":
        batch = drop_illegal(batch)
    suspects = np.zeros(len(batch), np.bool_)
    for mask in _screens(batch, options):
        suspects |= mask
    too_large = property_bytes_over(batch, _property_limit(options))
    refused = [
        Refused(row, error.code, error.text)
        for row in np.flatnonzero(suspects | (too_large > 0)).tolist()
        if (error := _error_of(batch, row, options, int(too_large[row]))) is not None
    ]
    batch = batch.with_(traceparent=None, tracestate=None)
    if not refused:
        return Checked(batch, everything, ())
    accepted = np.delete(everything, [item.row for item in refused])
    return Checked(batch.take(accepted), accepted, refused)


def _half(options: SinkOptions) -> bool:
    return options.delivery == "transactional"


def _property_limit(options: SinkOptions) -> int:
    return ENCODED_LIMIT - HALF_BYTES if _half(options) else ENCODED_LIMIT


def _screens(batch: RowBatch, options: SinkOptions) -> Iterator[Mask]:
    """Yield masks that cover all illegal rows, except rows with too many bytes of properties."""
    if isinstance(batch.topic, pa.Array):
        yield _suspect_topics(batch.topic, options)
    sizes = lengths_of(batch.body)
    yield (sizes == 0) | (sizes > options.max_message_size_bytes)
    if batch.body_is_text:
        yield invalid_utf8(batch.body)
    if batch.tags is not None:
        yield _suspect_texts(batch.tags) | all_blank(batch.tags)
        if bytes_of(batch.tags).max(initial=0) >= ord("|"):
            yield _mask(pc.match_substring(batch.tags, "||"))
    if batch.keys is not None:
        yield _suspect_keys(batch.keys)
    if batch.properties is not None:
        names, values, offsets = entries_of(batch.properties)
        yield _rows_with(offsets, _suspect_entries(batch, names, values))
    yield from illegal_context(batch).values()
    for text in (batch.sharding_key, batch.message_id):
        if text is not None:
            yield _suspect_texts(text)
    if _half(options):
        yield batch.kinds() != 0
    yield from _suspect_kinds(batch)
    if batch.flag is not None:
        flags = ints_of(batch.flag, 0)
        yield (flags < -_INT32) | (flags >= _INT32)
    yield from _suspect_queues(batch, options)


def _mask(flags: pa.Array) -> Mask:
    mask: Mask = flags.fill_null(False).to_numpy(zero_copy_only=False)
    return mask


def _suspect_texts(text: pa.Array) -> Mask:
    return empty(text) | with_separator(text) | invalid_utf8(text)


def _suspect_topics(topics: pa.Array, options: SinkOptions) -> Mask:
    words = topics.dictionary_encode()
    longest = TOPIC_MAX_LENGTH - len(with_namespace(options.namespace, "x")) + 1
    good = pc.match_substring_regex(words.dictionary, f"^[%|a-zA-Z0-9_-]{{1,{longest}}}$")
    refused = FORBIDDEN_TOPICS if options.allow_system_topics else SYSTEM_TOPICS
    is_refused = pc.is_in(
        words.dictionary, value_set=pa.array(sorted(refused), words.dictionary.type)
    )
    if not options.allow_system_topics:
        prefixed = pc.match_substring_regex(words.dictionary, SYSTEM_TOPIC_PATTERN)
        is_refused = pc.or_(is_refused, prefixed)
    good = pc.and_not(good, is_refused)
    return ~_mask(good.take(words.indices))


def _suspect_keys(keys: pa.Array) -> Mask:
    if is_text(keys.type):
        return _suspect_texts(keys) | with_blank(keys)
    flat = pc.list_flatten(keys)
    is_suspect = _suspect_texts(flat) | with_blank(flat)
    rows = np.zeros(len(keys), np.bool_)
    if is_suspect.any():
        rows[pc.list_parent_indices(keys).to_numpy()[is_suspect]] = True
    return rows


def _suspect_kinds(batch: RowBatch) -> Iterator[Mask]:
    """Yield masks of rows with an illegal delay, priority or lite topic, of rows with two of these,
    and of rows with a priority or lite topic that also name a queue or a sharding key."""
    kinds = np.zeros(len(batch), np.int64)
    if batch.delay_level is not None:
        levels = ints_of(batch.delay_level, 0)
        yield (levels < 0) | (levels > DELAY_LEVEL_MAX)
        kinds += levels != 0
    for column, most in (
        (batch.delay_ms, DELAY_MAX_S * 1000),
        (batch.delivery_timestamp_ms, INT64_MAX),
        (batch.priority, PRIORITY_MAX),
    ):
        if column is not None:
            values = ints_of(column, 0)
            yield (values < 0) | (values > most)
            kinds += ~nulls_of(column)
    if batch.lite_topic is not None:
        has_lite_topic = ~nulls_of(batch.lite_topic)
        yield has_lite_topic & ~_matches(batch.lite_topic, f"^{LITE_TOPIC_PATTERN}$")
        kinds += has_lite_topic
    yield kinds > 1
    for kind in (batch.priority, batch.lite_topic):
        for place in (batch.sharding_key, batch.queue_id):
            if kind is not None and place is not None:
                yield ~nulls_of(kind) & ~nulls_of(place)


def _suspect_queues(batch: RowBatch, options: SinkOptions) -> Iterator[Mask]:
    if batch.queue_id is None and batch.broker_name is None and options.ordering != "strict":
        return
    missing = np.ones(len(batch), np.bool_)
    no_queue = missing if batch.queue_id is None else nulls_of(batch.queue_id)
    no_broker = missing if batch.broker_name is None else nulls_of(batch.broker_name)
    keys = batch.order_keys()
    no_key = missing if keys is None else nulls_of(keys)
    yield no_queue != no_broker
    yield ~no_queue & ~no_key
    if batch.queue_id is not None:
        ids = ints_of(batch.queue_id, 0)
        yield (ids < 0) | (ids >= _INT32)
    if batch.broker_name is not None:
        yield _suspect_texts(batch.broker_name) | with_control(batch.broker_name)
    if options.ordering == "strict":
        yield no_queue & no_key


def _error_of(
    batch: RowBatch, row: int, options: SinkOptions, property_bytes: int
) -> MessageError | None:
    try:
        topic = with_namespace(options.namespace, batch.message(row).topic)
        check_topic(topic)
        if not isinstance(batch.topic, str) and not options.allow_system_topics:
            check_no_system_topic(topic)
        _check_body(batch, row, options)
        _check_context(batch, row)
        if property_bytes:
            raise MessageError(
                f"the properties take {property_bytes} bytes on the wire; the limit is "
                f"{_property_limit(options)} (32767 less what brokers"
                f"{' and delivery=transactional' if _half(options) else ''} add)",
                code="PROPERTIES_TOO_LARGE", size=property_bytes, limit=_property_limit(options),
            )  # fmt: skip
        if _half(options) and (kind := batch.kinds()[row]):
            raise MessageError(
                "a half message has no delay, priority or lite topic: brokers drop them "
                "(delivery=transactional)",
                code=("INVALID_DELAY", "INVALID_DELAY", "INVALID_PRIORITY", "INVALID_LITE_TOPIC")[
                    kind - 1
                ],
            )
        _check_queue(batch, row, options)
    except MessageError as error:
        return error
    return None


def _check_body(batch: RowBatch, row: int, options: SinkOptions) -> None:
    body = batch.body[row].as_py()
    if len(body) > options.max_message_size_bytes:
        raise MessageError(
            f"the body has {len(body)} bytes; option maxMessageSize is "
            f"{options.max_message_size_bytes}",
            code="BODY_TOO_LARGE", size=len(body), limit=options.max_message_size_bytes,
        )  # fmt: skip
    if batch.body_is_text:
        try:
            body.decode()
        except UnicodeDecodeError as error:
            raise MessageError(
                f"the text body is not valid UTF-8: {error}; a binary column is sent as it is",
                code="INVALID_TEXT",
            ) from None


def _check_queue(batch: RowBatch, row: int, options: SinkOptions) -> None:
    queue_id = None if batch.queue_id is None else batch.queue_id[row].as_py()
    broker = text_at(batch.broker_name, row)
    key = text_at(batch.order_keys(), row)
    wrong = ""
    if (queue_id is None) != (broker is None):
        wrong = "queue_id and broker_name only name a queue together"
    elif queue_id is not None and key is not None:
        wrong = "queue_id and sharding_key (or lite_topic) both choose the queue; set one to null"
    elif queue_id is not None and batch.priority is not None and batch.priority[row].is_valid:
        wrong = "queue_id and priority both choose the queue; set one to null"
    elif queue_id is not None and not 0 <= queue_id < _INT32:
        wrong = f"queue_id {queue_id} is not a queue's number"
    elif broker is not None and not _is_name(broker):
        wrong = f"broker_name {broker!r} is empty, not UTF-8, or has a control character"
    if wrong:
        raise MessageError(wrong, code="INVALID_QUEUE")
    if options.ordering == "strict" and key is None and queue_id is None:
        raise MessageError(
            "the sharding_key is null, and ordering=strict needs one in every row",
            code="MISSING_SHARDING_KEY",
        )


def _is_name(text: str) -> bool:
    return bool(text) and is_control_free(text) and not any("\ud800" <= c <= "\udfff" for c in text)


_SMALL: Final = 16
"""Limit of rows that `_mark_invalid` checks one by one; it bisects more rows."""


def only_printable_ascii(array: pa.Array) -> bool:
    """Return whether all bytes are printable ASCII, and none is a blank."""
    data = bytes_of(array)
    if not len(data):
        return True
    return int(data.min()) > 0x20 and int(data.max()) < 0x7F


def empty(array: pa.Array) -> Mask:
    """Return a mask of texts that are empty, but not null."""
    is_empty: Mask = lengths_of(array) == 0
    return is_empty & ~nulls_of(array) if array.null_count else is_empty


def with_control(array: pa.Array) -> Mask:
    """Return a mask of texts with a C0 control character or DEL."""
    data = bytes_of(array)
    return _texts_with(array, (data < 0x20) | (data == 0x7F))


def with_separator(array: pa.Array) -> Mask:
    """Return a mask of texts with 0x00, or with 0x01 or 0x02, which separate wire properties."""
    return _texts_with_up_to(array, 0x02)


def with_blank(array: pa.Array) -> Mask:
    """Return a mask of texts with a blank or a C0 control character."""
    return _texts_with_up_to(array, 0x20)


def all_blank(array: pa.Array) -> Mask:
    """Return a mask of non-null texts that are empty or have only `message_rules.JAVA_BLANKS`."""
    data = bytes_of(array)
    if not len(data) or int(data.min()) > 0x20:
        return empty(array)
    is_blank: Mask = ~_texts_with(array, data > 0x20)
    return is_blank & ~nulls_of(array) if array.null_count else is_blank


def lacks_keys(rows: RowBatch) -> Mask:
    """Return a mask of rows without keys, or with keys that are only whitespace."""
    keys = rows.keys
    if keys is None:
        return np.ones(len(rows), np.bool_)
    if not is_text(keys.type):
        keys = pc.binary_join(keys, KEY_SEPARATOR)
    mask = nulls_of(keys) | all_blank(keys)
    if int(bytes_of(keys).max(initial=0)) >= 0x80:
        mask |= _mask(pc.utf8_is_space(keys))
    return mask


def invalid_utf8(array: pa.Array) -> Mask:
    """Return a mask of texts that are not UTF-8."""
    is_invalid = np.zeros(len(array), np.bool_)
    data = bytes_of(array)
    if len(data) and int(data.max()) >= 0x80:
        _mark_invalid(as_binary(array), is_invalid)
    return is_invalid


def _mark_invalid(array: pa.Array, mask: Mask) -> None:
    """Set `mask` at the invalid rows. Bisect, because Arrow only tells whether there is one."""
    try:
        array.cast(pa.large_string() if pa.types.is_large_binary(array.type) else pa.string())
    except pa.ArrowInvalid:
        half = len(array) // 2
        if len(array) <= _SMALL:
            mask[:] = [_is_invalid(value) for value in array.to_pylist()]
        else:
            _mark_invalid(array[:half], mask[:half])
            _mark_invalid(array[half:], mask[half:])


def _is_invalid(value: bytes | None) -> bool:
    try:
        (value or b"").decode()
    except UnicodeDecodeError:
        return True
    return False


def _texts_with_up_to(array: pa.Array, greatest: int) -> Mask:
    data = bytes_of(array)
    if not len(data) or int(data.min()) > greatest:
        return np.zeros(len(array), np.bool_)
    return _texts_with(array, data <= greatest)


def _texts_with(array: pa.Array, wanted: Mask) -> Mask:
    """Return a mask of the texts with a wanted byte; `wanted` has a flag for each byte of data."""
    offsets = offsets_of(array)
    has_wanted = _rows_with(offsets - offsets[0], wanted)
    return has_wanted & ~nulls_of(array) if array.null_count else has_wanted


def _rows_with(offsets: np.ndarray[tuple[int], np.dtype[Any]], wanted: Mask) -> Mask:
    """Return a mask of rows with a wanted item. Row i has items offsets[i] to offsets[i + 1]."""
    has_wanted = np.zeros(len(offsets) - 1, np.bool_)
    has_wanted[np.searchsorted(offsets, np.flatnonzero(wanted), side="right") - 1] = True
    return has_wanted
