"""The column checks accept a row exactly if its Message can be made."""

from unittest import mock

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from rocket_sink.errors import MessageError, OptionError
from rocket_sink.message_rules import (
    JAVA_BLANKS,
    SYSTEM_TOPICS,
    check_property,
    is_carried,
    is_control_free,
)
from rocket_sink.options import SinkOptions
from rocket_sink.rows import checks
from rocket_sink.rows.checks import validate
from rocket_sink.rows.contract import resolve_columns
from rocket_sink.rows.normalise import normalise
from rocket_sink.rows.row_batch import RowBatch
from rocket_sink.wire.columns.encode import encode_columns
from rocket_sink.wire.columns.properties import property_pieces
from rocket_sink.wire.properties import properties_of
from tests.decoding import batch_body, encode_message
from tests.rows.row_strategies import (
    EVENT_TIME,
    MADE_ID,
    code_of,
    frames,
    has_legal_context,
    message_of,
)

TOPIC = SinkOptions.parse(topic="t")
TEXTS = pa.map_(pa.string(), pa.string())
THOROUGH = settings(max_examples=200)


def check(table, options=TOPIC):
    return validate(normalise(table, resolve_columns(table.schema, options)), options)


def options_for(frame, **more):
    """Return options with the topic `t`, unless the frame has topics."""
    return SinkOptions.parse(topic="" if "topic" in frame.table.schema.names else "t", **more)


def one_row(**columns):
    return pa.record_batch(
        {n: v if isinstance(v, pa.Array) else pa.array([v]) for n, v in columns.items()}
    )


def code(**columns):
    refused = check(one_row(**{"body": b"x", **columns})).refused
    return refused[0].code if refused else None


@THOROUGH
@given(frames(), st.booleans())
def test_a_row_is_refused_with_the_code_that_its_message_is_refused_with(frame, strict):
    names = frame.table.schema.names
    is_ordered = strict and {"sharding_key", "queue_id"} & set(names)
    ordering = "strict" if is_ordered else "none"
    options = options_for(frame, ordering=ordering, maxMessageSize=30)
    checked = check(frame.table, options)
    expected = {i: c for i, row in enumerate(frame.rows) if (c := code_of(row, options))}
    assert {item.row: item.code for item in checked.refused} == expected
    assert checked.accepted.tolist() == [i for i in range(len(frame.rows)) if i not in expected]
    assert len(checked.rows) == len(checked.accepted)


@THOROUGH
@given(frames())
def test_accepted_rows_have_the_bytes_of_the_one_message_encoder(frame):
    options = options_for(frame)
    checked = check(frame.table, options)
    rows = checked.rows
    ids = pa.array([f"{i:032X}" for i in range(len(rows))], pa.string())
    pieces = property_pieces(len(rows), **rows.property_columns(ids))
    encoded = encode_columns(rows.body, pieces, 0 if rows.flag is None else rows.flag)
    expected = [
        encode_message(m, properties_of(m, message_id=f"{i:032X}"))
        for i, m in enumerate(message_of(frame.rows[r], options) for r in checked.accepted)
    ]
    assert [batch_body(encoded, i, i + 1) for i in range(len(rows))] == expected
    assert batch_body(encoded, 0, len(rows)) == b"".join(expected)


@THOROUGH
@given(frames())
def test_a_row_as_a_message_is_the_message_that_the_row_stands_for(frame):
    options = options_for(frame)
    checked = check(frame.table, options)
    for place, row in enumerate(checked.accepted.tolist()):
        assert checked.rows.message(place) == message_of(frame.rows[row], options)
    single = [checked.rows.message(i).is_single for i in range(len(checked.rows))]
    assert (checked.rows.kinds() != 0).tolist() == single


@THOROUGH
@given(frames())
def test_dropping_illegal_properties_checks_the_row_without_them(frame):
    options = options_for(frame, propertyPolicy="drop")
    checked = check(frame.table, options)
    rows = [_without_illegal(row) for row in frame.rows]
    expected = {i: c for i, row in enumerate(rows) if (c := code_of(row, options))}
    assert {item.row: item.code for item in checked.refused} == expected
    for place, row in enumerate(checked.accepted.tolist()):
        assert checked.rows.message(place) == message_of(rows[row], options)


def _without_illegal(row):
    pairs = row.get("properties") or row.get("headers") or []
    last = {name: value for name, value in pairs if value is not None}
    legal = [(n, v) for n, v in last.items() if n is not None and _is_legal(row, n, v)]
    context = {name: row.get(name) for name in ("traceparent", "tracestate")}
    names = {name.encode() for name, value in context.items() if value}
    if not has_legal_context({**context, "tracestate": None}):
        context["traceparent"] = None
    if not has_legal_context(context):
        context["tracestate"] = None
    gone = {name for name in names if not context[name.decode()]}
    legal = [(n, v) for n, v in legal if n not in gone]
    return {**row, "properties": legal, "headers": None, **context}


def _is_legal(row, name, value):
    if name == EVENT_TIME.encode() and row.get("event_time") is not None:
        return False
    try:
        check_property(*(part.decode(errors="surrogateescape") for part in (name, value)))
    except MessageError:
        return False
    return True


BROKER = {"queue_id": 1, "broker_name": "b"}


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"body": pa.array([None], pa.binary())}, "NULL_BODY"), ({"body": b""}, "EMPTY_BODY"),
        ({"body": pa.array([b"\xff"]).view(pa.string())}, "INVALID_TEXT"),
        ({"body": b"\xff"}, None),
        ({"tags": "a||b"}, "INVALID_TAGS"), ({"tags": " "}, "INVALID_TAGS"), ({"tags": ""}, None),
        ({"keys": "a b"}, "INVALID_KEYS"), ({"keys": pa.array([["a", "b c"]])}, "INVALID_KEYS"),
        ({"keys": pa.array([["a", None, "b"]])}, None),
        ({"sharding_key": "a\x02TAGS\x01x"}, "INVALID_TEXT"),
        ({"queue_id": 1, "broker_name": pa.array([None], pa.string())}, "INVALID_QUEUE"),
        ({**BROKER, "sharding_key": "k"}, "INVALID_QUEUE"), (BROKER, None),
        ({"delay_level": 19}, "INVALID_DELAY"),
        ({"delay_level": 1, "delay_ms": 1}, "INVALID_DELAY"),
        ({"delay_ms": 2**63 - 1}, "INVALID_DELAY"),
        ({"delay_ms": 2**63 - 4 * 10**12}, "INVALID_DELAY"),
        ({"delay_ms": 10 * 366 * 86_400_000}, None), ({"flag": 2**31}, "INVALID_FLAG"),
        ({"priority": 0}, None), ({"priority": -1}, "INVALID_PRIORITY"),
        ({"priority": 1, "delay_level": 1}, "INVALID_PRIORITY"),
        ({"priority": 1, "delay_ms": 1}, "INVALID_PRIORITY"),
        ({"priority": 1, "sharding_key": "k"}, "INVALID_PRIORITY"),
        ({"priority": 1, "lite_topic": "s"}, "INVALID_PRIORITY"),
        ({"priority": 1, **BROKER}, "INVALID_QUEUE"), ({"lite_topic": "a$b"}, "INVALID_LITE_TOPIC"),
        ({"lite_topic": "x" * 64}, None),
        ({"lite_topic": "s", "delivery_timestamp": 1}, "INVALID_LITE_TOPIC"),
        ({"lite_topic": "s", **BROKER}, "INVALID_QUEUE"),
        ({"properties": pa.array([[("DELAY", "1")]], TEXTS)}, "RESERVED_PROPERTY"),
        ({"properties": pa.array([[("a", " ")]], TEXTS)}, "INVALID_PROPERTY"),
        # The limit of the properties counts each column, and the blanks between keys.
        *(({column: "x" * size}, "PROPERTIES_TOO_LARGE" if size > 32_500 else None)
          for column in ("tags", "sharding_key", "message_id") for size in (32_000, 33_000)),
        ({"keys": pa.array([["key"] * 8000])}, None),
        ({"keys": pa.array([["key"] * 8250])}, "PROPERTIES_TOO_LARGE"),
    ],
)  # fmt: skip
def test_each_rule_has_its_code(columns, expected):
    assert code(**columns) == expected


@pytest.mark.parametrize(
    "topic",
    ["t", "%RETRY%g", "a|b-c_1", "x" * 127, "x" * 128, "", " ", "a b", "a\n", "a.b", "töpic", None,
     *sorted(SYSTEM_TOPICS), "rmq_sys_wheel_timer", "RMQ_SYS_own", "%DLQ%g", "%LMQ%a%b"],
)  # fmt: skip
@pytest.mark.parametrize("allowed", [False, True])
def test_a_topic_column_has_the_rules_of_message(topic, allowed):
    options = SinkOptions.parse(allowSystemTopics=allowed)
    table = pa.table({"body": ["x", "x"], "topic": pa.array(["good", topic])})
    row = {"body": b"x", "body_is_text": True, "topic": None if topic is None else topic.encode()}
    expected = code_of(row, options)
    refused = [(item.row, item.code) for item in check(table, options).refused]
    assert refused == ([] if expected is None else [(1, expected)])


@pytest.mark.parametrize("size", [10, 11])
def test_the_body_limit_is_exact_and_in_bytes(size):
    options = SinkOptions.parse(topic="t", maxMessageSize=10)
    table = one_row(body="é" * (size // 2) + "x" * (size % 2))
    assert [r.code for r in check(table, options).refused] == ["BODY_TOO_LARGE"] * (size - 10)


@pytest.mark.parametrize("extra", [0, 1])
@pytest.mark.parametrize("letter", ["x", "é"])
@pytest.mark.parametrize("own_id", [True, False])
def test_the_property_limit_is_the_one_message_encoders(extra, letter, own_id):
    row = {"body": b"x", "body_is_text": False, "key": b"k1", "tags": b"t", "event_time": 5}
    row["message_id"] = b"i" * 7 if own_id else None
    options = SinkOptions.parse(topic="t")
    probe = {**row, "properties": [(b"p", b"x")]}
    room = 32_511 - len(properties_of(message_of(probe, options), message_id=MADE_ID)) + 1 + extra
    value = letter * (room // len(letter.encode())) + "x" * (room % len(letter.encode()))
    full = {**row, "properties": [(b"p", value.encode())]}
    table = one_row(
        body=b"x", key="k1", tags="t", properties=pa.array([[("p", value)]], TEXTS),
        event_time=pa.array([5], pa.timestamp("ms", "UTC")),
        message_id="i" * 7 if own_id else pa.array([None], pa.string()),
    )  # fmt: skip
    expected = ["PROPERTIES_TOO_LARGE"] * extra
    assert [r.code for r in check(table, options).refused] == expected
    assert ([code_of(full, options)] if extra else []) == expected


@pytest.mark.parametrize(
    ("delivery", "limit"),
    [("at_least_once", "32511 (32767 less what brokers add)"),
     ("transactional", "31487 (32767 less what brokers and delivery=transactional add)")],
)  # fmt: skip
def test_half_messages_have_room_for_their_own_properties(delivery, limit):
    options = TOPIC.with_(delivery=delivery, ledger="/l", ordering="none")
    (refused,) = check(one_row(body=b"x", tags="x" * 33_000), options).refused
    assert f"the limit is {limit}" in refused.text
    size = int(limit[:5]) - len(
        properties_of(message_of({"body": b"x"}, TOPIC), message_id=MADE_ID)
    )
    assert not check(one_row(body=b"x", tags="x" * (size - len("TAGS") - 2)), options).refused


@pytest.mark.parametrize(
    ("column", "kind"),
    [("tags", 0), ("delay_level", 1), ("delay_ms", 2), ("delivery_timestamp", 2), ("priority", 3),
     ("lite_topic", 4)],
)  # fmt: skip
def test_each_kind_of_rows_has_its_number(column, kind):
    value = "text" if column in ("tags", "lite_topic") else 1
    rows = check(pa.table({"body": ["x", "x"], column: [value, None]})).rows
    assert rows.kinds().tolist() == [kind, 0] and rows.is_delayed is (kind in (1, 2))


@pytest.mark.parametrize(("policy", "codes"), [("error", ["RESERVED_PROPERTY"]), ("drop", [])])
def test_a_row_with_an_event_time_may_not_bring_its_property_too(policy, codes):
    properties = pa.array([[(EVENT_TIME, "1")]] * 2, TEXTS)
    times = pa.array([5, None], pa.timestamp("ms", "UTC"))
    table = pa.table({"body": ["x", "y"], "properties": properties, "event_time": times})
    checked = check(table, SinkOptions.parse(topic="t", propertyPolicy=policy))
    assert [item.code for item in checked.refused] == codes
    shown = [checked.rows.message(i).properties[EVENT_TIME] for i in range(len(checked.rows))]
    assert shown == ["5", "1"][len(codes) :]


PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize(
    ("parent", "state"),
    [
        (PARENT, None), (PARENT, "a=1"), (PARENT, "a=1,\t b@c= 2 ,,"), (PARENT, "a"),
        (PARENT, "A=1"),
        (PARENT, "a=1,"), (PARENT, "a=b=c"), (PARENT, ",".join(f"k{n}=1" for n in range(32))),
        (PARENT, ",".join(f"k{n}=1" for n in range(33))), (PARENT.upper(), None),
        (PARENT + "-x", None), ("01" + PARENT[2:] + "-x", None), ("ff" + PARENT[2:], None),
        ("fe" + PARENT[2:], None), (PARENT[:-1], None),
        (PARENT.replace("b7ad6b7169203331", "0" * 16), None),
        ("00-" + "0" * 32 + PARENT[35:], None),
    ],
)  # fmt: skip
def test_the_form_of_a_trace_context_is_that_of_opentelemetrys_reader(parent, state):
    columns = {"traceparent": parent} | ({"tracestate": state} if state else {})
    context = trace.get_current_span(
        TraceContextTextMapPropagator().extract(columns)
    ).get_span_context()
    members = [part for part in (state or "").split(",") if part.strip()]
    legal = context.is_valid and len(context.trace_state) == len(members)
    refused = check(one_row(body="x", **columns)).refused
    assert [item.code for item in refused] == ["INVALID_PROPERTY"] * (not legal)


def test_an_empty_batch_has_no_refusals():
    checked = check(pa.table({"body": pa.array([], pa.string()), "tags": pa.array([], pa.null())}))
    assert (len(checked.rows), list(checked.refused), checked.accepted.tolist()) == (0, [], [])


def test_only_refused_rows_are_looked_at_one_by_one():
    words = [" värde", "a b", "ok", "カナ", "日本"]
    table = pa.table({
        "body": ["värde", "b", "", "カナ", "x"], "tags": words, "sharding_key": words,
        "keys": pa.array([["カナ"], ["é", "k"], [], None, ["日本"]]),
        "properties": pa.array([[("ключ", w), ("b", "カ ナ")] for w in words], TEXTS),
    })  # fmt: skip
    one_by_one = mock.patch.object(RowBatch, "message", autospec=True, side_effect=RowBatch.message)
    with one_by_one as message:
        assert [r.row for r in check(table).refused] == [2]
    assert [call.args[1] for call in message.call_args_list] == [2]


SHORT = st.text(st.sampled_from("\x00\x01\x02\x03\t a|\x7f\x85\u00a0\u3000\U0001f600"), max_size=4)


@given(st.lists(st.none() | SHORT, max_size=40), st.integers(0, 5))
def test_screens_pass_nothing_that_a_message_refuses(values, first):
    array = pa.array(values, pa.string())[first:]
    texts = values[first:]
    blank = [text is not None and not text.strip(JAVA_BLANKS) for text in texts]
    assert checks.all_blank(array).tolist() == blank
    for screen, rule in (
        (checks.with_separator, is_carried),
        (checks.with_blank, lambda text: " " not in text),
        (checks.with_control, is_control_free),
    ):
        bad = np.array([text is not None and not rule(text) for text in texts], np.bool_)
        assert not (bad & ~screen(array)).any()
        printable = [text is not None and text.isprintable() and " " not in text for text in texts]
        assert not (np.array(printable, np.bool_) & screen(array)).any()


@given(st.lists(st.none() | st.binary(max_size=6), max_size=80), st.integers(0, 5))
def test_invalid_utf8_is_found_wherever_it_is(values, first):
    array = pa.array(values, pa.binary()).view(pa.string())[first:]
    assert checks.invalid_utf8(array).tolist() == [
        value is not None and value.decode(errors="ignore").encode() != value
        for value in values[first:]
    ]


def test_bytes_under_a_null_are_ignored():
    buffers = pa.array(["a", "\x01", "c"]).buffers()
    validity = pa.py_buffer(np.packbits([1, 0, 1], bitorder="little"))
    tags = pa.Array.from_buffers(pa.string(), 3, [validity, *buffers[1:]])
    assert not checks.with_separator(tags).any()
    assert not checks.all_blank(tags).any()
    assert check(pa.table({"body": ["x"] * 3, "tags": tags})).refused == ()


def test_a_topics_namespace_counts_for_its_length():
    options = SinkOptions.parse(namespace="ns", allowSystemTopics=True)
    topics = ["t" * 124, "t" * 125, "ns%" + "t" * 124, "%RETRY%" + "t" * 117, "%RETRY%" + "t" * 118]
    verdict = check(pa.table({"topic": topics, "body": ["x"] * 5}), options)
    assert [refusal.row for refusal in verdict.refused] == [1, 4]
    assert {refusal.code for refusal in verdict.refused} == {"INVALID_TOPIC"}
    with pytest.raises(OptionError, match="128 characters"):
        check(pa.table({"body": ["x"]}), options.with_(topic="t" * 125))
