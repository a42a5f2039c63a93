"""Rows, good and bad, as plain Python values and as record batches in any of Arrow's forms."""

from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st

from rocket_sink.errors import MessageError
from rocket_sink.message import Message
from rocket_sink.message_rules import check_no_system_topic, is_control_free
from rocket_sink.wire.properties import properties_of

MADE_ID = "0123456789ABCDEF0123456789ABCDEF"
EVENT_TIME = "__event_time_ms"

GOOD = [b"a", b"tag-1", b"user%7", b"order 1".replace(b" ", b"_"), "värde".encode(), "鍵".encode()]
ODD = [
    b"", b" ", b" a ", b"a b", b"a||b", b"\ta", b"a\x00", b"a\x02TAGS\x01x", b"\x7f",
    "\u3000".encode(), "\u3000k\u3000".encode(), "k\u2009k".encode(), "\x85".encode(),
    "\u00a0\u1680".encode(), "カナ".encode(), b"\xff", b" \xfe ", b"\xed\xa0\x80", b"TAGS",
    b"KEYS", b"UNIQ_KEY", EVENT_TIME.encode(), b"||\xff", b"\x1f \xff",
]  # fmt: skip


def _mostly_good(*, text_only=True):
    free = st.text(max_size=12).map(lambda text: text.encode())
    raw = free if text_only else st.binary(max_size=12)
    # The choices are weighted so that a batch has accepted rows too.
    return st.one_of(
        st.sampled_from(GOOD), st.sampled_from(GOOD), st.sampled_from(GOOD), free, raw,
        st.sampled_from(ODD),
    )  # fmt: skip


def _one_of(*values):
    return st.sampled_from(values)


def _rarely(rare, common):
    return st.integers(0, 15).flatmap(lambda n: st.sampled_from(rare) if n == 0 else common)


TEXTS = st.none() | _mostly_good()
TOPICS = _rarely(
    [None, b"x" * 128, b"", b" ", b"a b", b"a\n", b"t.x", b"SCHEDULE_TOPIC_XXXX", b"\xff",
     "töpic".encode()],
    _one_of(b"t", b"flights", b"T-1_%|x", b"x" * 127),
)  # fmt: skip
BODIES = _rarely([None, b"", b"x" * 31], st.binary(min_size=1, max_size=30))
TEXT_BODIES = _rarely([None, *ODD], st.sampled_from(GOOD))
ENTRIES = st.lists(st.tuples(_mostly_good(), st.none() | _mostly_good()), max_size=4)
NAMELESS = st.lists(st.tuples(st.none() | _mostly_good(), st.none() | _mostly_good()), max_size=4)
PARENTS = [b"00-%032x-%016x-%02x" % (n, n, n) for n in (1, 2)]
MILLIS = _rarely([-1, -5000], st.none() | st.integers(0, 4_000_000_000_000))


@dataclass(frozen=True)
class Frame:
    """Rows as dicts of raw values (text as bytes), and the same rows as a table."""

    rows: list[dict[str, Any]]
    table: pa.Table


def _binaries(values, form):
    kinds = {"large": pa.large_binary(), "view": pa.binary_view()}
    array = pa.array(values, kinds.get(form, pa.binary()))
    return array.dictionary_encode() if form == "dictionary" else array


def _texts(values, form):
    if form == "large":
        return _binaries(values, form).view(pa.large_string())
    plain = _binaries(values, "plain").view(pa.string())
    if form == "view":
        return plain.cast(pa.string_view())
    return plain.dictionary_encode() if form == "dictionary" else plain


def _list_parts(values):
    offsets, flat = [], []
    for value in values:
        offsets.append(None if value is None else len(flat))
        flat += value or []
    return pa.array([*offsets, len(flat)], pa.int32()), flat


def _lists(values, form):
    offsets, flat = _list_parts(values)
    array = pa.ListArray.from_arrays(offsets, _texts(flat, "plain"))
    if form == "large":
        return array.cast(pa.large_list(pa.large_string()))
    if form == "view":
        sizes = pa.array([len(value or []) for value in values], pa.int32())
        starts = offsets.fill_null(0)[: len(values)]
        mask = pa.array([value is None for value in values], pa.bool_())
        return pa.ListViewArray.from_arrays(starts, sizes, array.values, mask=mask)
    if form == "dictionary":
        return pa.ListArray.from_arrays(offsets, _texts(flat, "dictionary"))
    return array


def _maps(values, form):
    offsets, flat = _list_parts(values)
    names, items = _texts([n for n, _ in flat], form), _texts([v for _, v in flat], form)
    return pa.MapArray.from_arrays(offsets, names, items)


def _structs(values, form):
    """Return Kafka's headers as structs; the values are binary except in the plain form."""
    offsets, flat = _list_parts(values)
    names, items = ([pair[place] for pair in flat] for place in (0, 1))
    inner = (_texts if form == "plain" else _binaries)(items, form)
    struct = pa.StructArray.from_arrays([_texts(names, form), inner], ["key", "value"])
    return pa.ListArray.from_arrays(offsets, struct)


def _integers(values, form):
    small = all(value is None or -(2**31) <= value < 2**31 for value in values)
    return pa.array(values, pa.int32() if small and form == "plain" else pa.int64())


def _instants(values, form):
    unit = {"plain": "us", "large": "ns", "view": "ms", "dictionary": "us"}[form]
    scaled = pa.array(values, pa.int64()).cast(pa.timestamp("ms", "UTC"))
    return scaled if unit == "ms" else scaled.cast(pa.timestamp(unit, "UTC"))


COLUMNS = {
    "topic": (TOPICS, _texts),
    "tags": (TEXTS, _texts),
    "keys": (st.none() | st.lists(st.none() | _mostly_good(), max_size=3), _lists),
    "key": (TEXTS, _texts),
    "sharding_key": (TEXTS, _texts),
    "properties": (st.none() | ENTRIES, _maps),
    "headers": (st.none() | NAMELESS, _structs),
    "delay_level": (_rarely([19, -1], _one_of(None, 0, 0, 1, 18)), _integers),
    "delay_ms": (_rarely([-1], _one_of(None, None, 0, 5000)), _integers),
    "delivery_timestamp": (MILLIS, _instants),
    "flag": (_one_of(None, 0, 7, 7, 7, -1, 2**31 - 1, 2**31, -(2**31) - 1), _integers),
    "wait_store": (st.none() | st.booleans(), lambda values, _: pa.array(values, pa.bool_())),
    "message_id": (TEXTS, _texts),
    "queue_id": (_one_of(None, None, 0, 3, 3, 3, -1, 2**31), _integers),
    "broker_name": (TEXTS, _texts),
    "event_time": (MILLIS, _instants),
    "priority": (_one_of(None, None, 0, 7, -1, 2**31 - 1, 2**31), _integers),
    "lite_topic": (st.none() | _one_of(b"s-1_X", b"x" * 64, b"x" * 65) | TEXTS, _texts),
    "traceparent": (_rarely(["värde".encode(), b"00-1"], _one_of(None, *PARENTS)), _texts),
    "tracestate": (_rarely(["värde".encode()], _one_of(None, b"", b"a=1", b"b@c=2")), _texts),
}
FORMS = ("plain", "large", "view", "dictionary")


@st.composite
def frames(draw):
    """Draw a table of random columns and forms, chunked and sliced from a longer one."""
    names = set(draw(st.sets(st.sampled_from(sorted(COLUMNS)), max_size=5)))
    if {"queue_id", "broker_name"} & names:
        names |= {"queue_id", "broker_name"}
    if {"keys", "key"} <= names:
        names.remove("key")
    if {"properties", "headers"} <= names:
        names.remove("headers")
    is_text = draw(st.booleans())
    fields = {"body": (TEXT_BODIES if is_text else BODIES, _texts if is_text else _binaries)}
    fields |= {name: COLUMNS[name] for name in sorted(names)}
    rows = draw(
        st.lists(st.fixed_dictionaries({n: values for n, (values, _) in fields.items()}),
                 min_size=draw(_one_of(0, 6)), max_size=14)
    )  # fmt: skip
    arrays = {
        name: maker([row[name] for row in rows], draw(st.sampled_from(FORMS)))
        for name, (_, maker) in fields.items()
    }
    return _cut(draw, rows, pa.table(arrays), is_text=is_text)


def _cut(draw, rows, table, *, is_text):
    last = len(rows) - draw(st.integers(0, min(2, len(rows))))
    first = draw(st.integers(0, min(2, last)))
    middle = draw(st.integers(first, last))
    chunked = pa.concat_tables([table[first:middle], table[middle:last]])
    plain = [{**row, "body_is_text": is_text} for row in rows[first:last]]
    return Frame(plain, chunked if draw(st.booleans()) else table[first:last])


def text_of(value):
    return None if value is None else value.decode(errors="surrogateescape")


def message_of(row, options):
    """Return the Message of a row, made by the words of the row contract."""
    keys = row.get("keys") or ([row["key"]] if row.get("key") is not None else [])
    pairs = row.get("properties") or row.get("headers") or []
    properties = {text_of(n) or "": text_of(v) or "" for n, v in pairs if v is not None}
    context = {name: text_of(row.get(name)) for name in ("traceparent", "tracestate")}
    properties |= {name: value for name, value in context.items() if value}
    if row.get("event_time") is not None:
        if EVENT_TIME in properties:
            # A row has one refusal code even if several apply: this one comes first.
            raise MessageError("the name is the column's", code="RESERVED_PROPERTY")
        properties[EVENT_TIME] = str(row["event_time"])
    return Message(
        options.topic or text_of(row.get("topic")), row["body"], tags=text_of(row.get("tags")),
        keys=tuple(text_of(key) for key in keys if key is not None),
        sharding_key=text_of(row.get("sharding_key")), properties=properties,
        delay_level=row.get("delay_level") or 0, delay_ms=row.get("delay_ms"),
        delivery_timestamp_ms=row.get("delivery_timestamp"), flag=row.get("flag") or 0,
        wait_store=row.get("wait_store") is not False, message_id=text_of(row.get("message_id")),
        priority=row.get("priority"), lite_topic=text_of(row.get("lite_topic")),
    )  # fmt: skip


def code_of(row, options):
    """Return the code by which a row is refused, judged without Arrow; None if it is accepted."""
    try:
        message = message_of(row, options)
        if not options.topic and not options.allow_system_topics:
            check_no_system_topic(message.topic)
        if len(message.body) > options.max_message_size_bytes:
            return "BODY_TOO_LARGE"
        if row["body_is_text"]:
            try:
                message.body.decode()
            except UnicodeDecodeError:
                return "INVALID_TEXT"
        if not has_legal_context(row):
            return "INVALID_PROPERTY"
        properties_of(message, message_id=MADE_ID)
    except MessageError as error:
        return error.code
    return _queue_code(row, options)


def has_legal_context(row):
    parent, state = (row.get(name) or b"" for name in ("traceparent", "tracestate"))
    return (not parent or parent in PARENTS) and (not state or (b"=" in state and parent != b""))


def _queue_code(row, options):
    queue, broker, key, priority = (
        row.get(name) for name in ("queue_id", "broker_name", "sharding_key", "priority")
    )
    key = row.get("lite_topic") if key is None else key
    if (queue is None) != (broker is None):
        return "INVALID_QUEUE"
    if broker is not None:
        if key is not None or priority is not None or not 0 <= queue < 2**31:
            return "INVALID_QUEUE"
        try:
            Message("t", b"x", sharding_key=text_of(broker))
        except MessageError:
            return "INVALID_QUEUE"
        if not is_control_free(text_of(broker) or ""):
            return "INVALID_QUEUE"
    if options.ordering == "strict" and key is None and queue is None:
        return "MISSING_SHARDING_KEY"
    return None
