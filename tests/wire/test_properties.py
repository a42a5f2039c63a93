"""Properties as text: Java's parser and our stricter writer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocket_sink.errors import LocalProtocolError, MessageError
from rocket_sink.message import Message
from rocket_sink.wire.properties import (
    ENCODED_LIMIT,
    decode_properties,
    encode_properties,
    least_version,
    properties_of,
)


def wire(text):
    """Write `|` for the byte between name and value, and `;` for the byte after a pair."""
    return text.replace("|", "\x01").replace(";", "\x02")


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("", 0), ("k|v;", 0), ("TIMER_DELAY_MS|1;k|v;", 413),
        ("TIMER_DELAY_MS|1;__LITE_TOPIC|a;", 513),
    ],
)  # fmt: skip
def test_the_newest_property_decides_on_the_oldest_broker(text, version):
    assert least_version(wire(text)) == version


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("k1|v1", {"k1": "v1"}), ("", {}), (" ", {}), ("aaa", {}), ("k1|", {}), ("|v1", {}),
        ("k1|v1;", {"k1": "v1"}), ("k1|v1;k2|v2", {"k1": "v1", "k2": "v2"}),
        ("k1|v1;|v2", {"k1": "v1"}), ("k1|;k2|v2", {"k2": "v2"}), ("1|1;2|2", {"1": "1", "2": "2"}),
        ("k|a|b;", {"k": "a\x01b"}), ("k|1;k|2;", {"k": "2"}),
    ],
)  # fmt: skip
def test_c24_reading(text, expected):
    assert decode_properties(wire(text)) == expected


def test_c25_a_property_without_a_value_is_left_out():
    assert encode_properties({"a": None, "b": "1"}) == wire("b|1;")


clean = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x01\x02"), min_size=1)


@given(st.dictionaries(clean, clean))
def test_what_is_written_is_read(properties):
    assert decode_properties(encode_properties(properties)) == properties


@pytest.mark.parametrize("name", ["a\x01b", "a\x02", "", "\x01", "\x02"])
def test_f67_separators_cannot_be_written(name):
    with pytest.raises(LocalProtocolError):
        encode_properties({name: "v"})
    if name:
        with pytest.raises(LocalProtocolError):
            encode_properties({"x": f"v{name}"})


@pytest.mark.parametrize(
    ("fields", "properties"),
    [
        ({}, {"UNIQ_KEY": "I", "WAIT": "true"}),
        ({"message_id": "OWN"}, {"UNIQ_KEY": "OWN", "WAIT": "true"}),
        ({"delay_ms": 0}, {"UNIQ_KEY": "I", "WAIT": "true", "TIMER_DELAY_MS": "0"}),
        ({"delay_s": 0}, {"UNIQ_KEY": "I", "WAIT": "true", "TIMER_DELAY_SEC": "0"}),
        ({"delivery_timestamp_ms": 0}, {"UNIQ_KEY": "I", "WAIT": "true", "TIMER_DELIVER_MS": "0"}),
        ({"tags": "tag", "keys": ("k1", "k2"), "sharding_key": "s", "properties": {"x": "1"},
          "delay_level": 3, "wait_store": False},
         {"KEYS": "k1 k2", "TAGS": "tag", "UNIQ_KEY": "I", "WAIT": "false", "DELAY": "3",
          "__SHARDINGKEY": "s", "x": "1"}),
    ],
)  # fmt: skip
def test_a_messages_fields_become_properties(fields, properties):
    text = properties_of(Message("t", b"b", **fields), message_id="I", extra={"PGROUP": "g"})
    assert [*decode_properties(text).items()] == [*properties.items(), ("PGROUP", "g")]


def test_f65_the_size_limit_counts_bytes():
    base = len(properties_of(Message("t", b"b", properties={"k": "v"}), message_id="I"))
    room = ENCODED_LIMIT - base + 1
    fits = Message("t", b"b", properties={"k": "文" * (room // 3)})
    assert len(properties_of(fits, message_id="I").encode()) <= ENCODED_LIMIT
    with pytest.raises(MessageError) as caught:
        properties_of(Message("t", b"b", properties={"k": "文" * (room // 3 + 1)}), message_id="I")
    assert caught.value.code == "PROPERTIES_TOO_LARGE"
    assert caught.value.facts["size"] > ENCODED_LIMIT


WORDS = st.text(st.characters(min_codepoint=33, max_codepoint=0x2FF), min_size=1, max_size=9)


@given(
    st.lists(WORDS.filter(lambda word: not any(c.isspace() or c == "\x7f" for c in word))),
    st.one_of(st.none(), st.sampled_from(["a", "täg", "a b"])),
    st.one_of(st.none(), st.sampled_from(["k", "k 1", "ключ"])),
    st.one_of(st.none(), st.just("MINE")),
    st.booleans(),
)
def test_the_fast_path_equals_the_general_path(keys, tags, sharding_key, message_id, wait):
    message = Message(
        "t", b"x", tags=tags, keys=keys, sharding_key=sharding_key, message_id=message_id,
        wait_store=wait,
    )  # fmt: skip
    usual = properties_of(message, message_id="MADE")
    assert properties_of(message, message_id="MADE", extra={"Z": "z"}) == usual + "Z\x01z\x02"
