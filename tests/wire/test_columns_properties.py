"""The property strings of a column equal those of single messages."""

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rocket_sink.message import Message
from rocket_sink.wire.columns.properties import (
    entries_of,
    map_sizes,
    property_pieces,
    property_strings,
)
from rocket_sink.wire.properties import properties_of

UNTIMED = settings(deadline=None)
WORDS = st.text("abé鍵-", min_size=1, max_size=8)
ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "message_id": WORDS,
            "tags": st.none() | WORDS,
            "keys": st.lists(WORDS, max_size=3),
            "sharding_key": st.none() | WORDS,
            "properties": st.dictionaries(WORDS, WORDS, max_size=3),
            "wait_store": st.booleans(),
            "delay": st.tuples(
                st.sampled_from(["delay_level", "delay_ms", "delivery_timestamp_ms", ""]),
                st.integers(1, 18),
            ),
        }
    ),
    max_size=8,
)
MAP = pa.map_(pa.string(), pa.string())


def columns_of(rows):
    def column(name, kind):
        return pa.array([row[name] for row in rows], kind)

    def delay(name):
        return pa.array(
            [r["delay"][1] if r["delay"][0] == name else None for r in rows], pa.int64()
        )

    return {
        "message_ids": column("message_id", pa.string()),
        "tags": column("tags", pa.string()),
        "keys": column("keys", pa.list_(pa.string())),
        "sharding_key": column("sharding_key", pa.string()),
        "properties": pa.array([list(row["properties"].items()) for row in rows], MAP),
        "wait_store": column("wait_store", pa.bool_()),
        "delay_level": delay("delay_level").fill_null(0),
        "delay_ms": delay("delay_ms"),
        "delivery_timestamp_ms": delay("delivery_timestamp_ms"),
    }


def strings_of(rows):
    texts = []
    for row in rows:
        values = {name: value for name, value in row.items() if name != "delay"}
        if row["delay"][0]:
            values[row["delay"][0]] = row["delay"][1]
        message = Message("t", b"x", **values)
        texts.append(properties_of(message, message_id="unused").encode())
    return texts


@UNTIMED
@given(ROWS, st.integers(0, 3))
def test_strings_are_those_of_the_one_message_encoder(rows, first):
    columns = {name: array[first:] for name, array in columns_of(rows).items()}
    pieces = property_pieces(len(rows[first:]), **columns)
    assert pieces.strings().to_pylist() == strings_of(rows[first:])
    assert pieces.sizes.tolist() == [len(text) for text in strings_of(rows[first:])]


@UNTIMED
@given(ROWS)
def test_a_map_is_measured_without_joining_it(rows):
    properties = columns_of(rows)["properties"]
    for part in (properties, properties[1:]):
        strings = property_strings(part).to_pylist()
        assert map_sizes(part).tolist() == [len(text) for text in strings]
        assert len(entries_of(part)[0]) == sum(len(pairs) for pairs in part.to_pylist())


WAIT = b"WAIT\x01true\x02"
EVENT = {"properties": pa.array([[("a", "b")], []], MAP), "event_time_ms": pa.array([12, None])}


@pytest.mark.parametrize(
    ("columns", "strings"),
    [
        ({}, [WAIT, WAIT]), ({}, []),
        ({"wait_store": pa.array([None, True])}, [WAIT, WAIT]),
        ({"wait_store": pa.array([None, None], pa.bool_())}, [WAIT, WAIT]),
        ({"wait_store": pa.array([None, False])}, [WAIT, b"WAIT\x01false\x02"]),
        ({"keys": pa.array(["k1", None])}, [b"KEYS\x01k1\x02" + WAIT, WAIT]),
        (EVENT, [WAIT + b"a\x01b\x02__event_time_ms\x0112\x02", WAIT]),
    ],
)  # fmt: skip
def test_nulls_and_columns_of_their_own_kind(columns, strings):
    assert property_pieces(len(strings), **columns).strings().to_pylist() == strings
