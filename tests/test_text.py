"""Text from the network is hostile until it is cut, printable and without credentials."""

import json
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocket_sink import text as words
from rocket_sink.text import TEXT_MAX_BYTES, clean, clean_lines, json_text, storable

ANY_TEXT = st.text(st.characters(codec=None), max_size=400)


@given(ANY_TEXT, st.integers(8, 300))
def test_whatever_comes_in_printable_short_utf8_comes_out(text, max_bytes):
    with mock.patch("rocket_sink.text.TEXT_MAX_BYTES", max_bytes):
        clean = storable(text)
    assert clean.isprintable() and len(clean.encode()) <= max_bytes
    assert storable(storable(text)) == storable(text)


@given(ANY_TEXT, st.integers(8, 300))
def test_any_text_becomes_one_printable_line(text, limit):
    assert clean(text).isprintable()
    assert len(clean(text, limit)) <= limit and clean(text, limit).isprintable()
    assert clean(clean(text)) == clean(text)
    if text.isprintable():
        assert clean(text) == text


def test_what_a_terminal_would_obey_is_shown_by_its_number():
    assert clean("\x1b]52;c;cm0=\x07") == "\\x1b]52;c;cm0=\\x07"
    assert clean("\x9b2J \u202eabc \U000e0001 \ud800") == ("\\x9b2J \\u202eabc \\U000e0001 \\ud800")
    assert clean("a\r\nb\tc\u2028d\x85e\xa0f\u3000g") == "a  b c d e f g"
    assert clean("Zürich 東京 😀") == "Zürich 東京 😀"
    assert clean(ValueError("a\nb")) == "a b"
    assert clean_lines("one\x1b\ntwo\r") == "one\\x1b\ntwo "


JSON_VALUES = st.recursive(
    ANY_TEXT | st.integers() | st.none() | st.booleans(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(ANY_TEXT, inner, max_size=4),
    max_leaves=8,
)


@given(JSON_VALUES, st.sampled_from([None, 2]))
def test_json_holds_the_same_and_no_character_that_a_terminal_obeys(value, indent):
    text = json_text(value, indent=indent)
    assert json.loads(text) == value
    assert all(line.isprintable() for line in text.split("\n"))
    assert indent or "\n" not in text


def test_json_shows_letters_of_all_scripts():
    assert json_text({"city": "東京 \x9b"}) == '{"city": "東京 \\u009b"}'


BUSY = "[TIMEOUT_CLEAN_QUEUE]broker busy, start flow control for a while, period in queue: 0ms"


@pytest.mark.parametrize(
    ("text", "secrets", "stored"),
    [
        (BUSY, ["a", ""], BUSY), (None, [], None), ("", [], ""),
        ("xxCANARYyy at CANARY", ["CANARY"], "xx***yy at ***"),
        ("é" * 2048, [], "é" * ((TEXT_MAX_BYTES - 4) // 2) + "..."),
    ],
)  # fmt: skip
def test_a_text_in_the_ledger(text, secrets, stored):
    """A text that is cut keeps whole characters; secrets of one letter would mask everything."""
    assert storable(text, secrets=secrets) == stored


@pytest.mark.parametrize(
    "text",
    [
        "Check signature failed for accessKey=CANARY-1",
        "No acl config for access-key: CANARY-1 from 10.0.0.1", "secretKey = CANARY-1, topic=t",
        "{'Signature': 'CANARY-1', 'code': 1}",
        'password="CANARY-1"',
        "security_token:CANARY-1;",
    ],
)  # fmt: skip
def test_what_looks_like_a_credential_is_masked(text):
    clean = storable(text)
    assert "CANARY" not in clean
    assert "***" in clean


@pytest.mark.parametrize(
    "distance", [0, *range(TEXT_MAX_BYTES - 40, TEXT_MAX_BYTES + 1), 3 * TEXT_MAX_BYTES]
)
def test_a_secret_at_the_cut_leaves_no_half(distance):
    text = "x" * distance + " accessKey=CANARYCANARYCANARY"
    assert "CANARY" not in storable(text)
    assert "CANARY" not in storable("x" * distance + "CANARYCANARY", secrets=["CANARYCANARY"])


def test_a_trace_is_indented_to_its_last_line():
    assert words.clean_trace("\none\n  two\x1b\n\n") == "  \n  one\n    two\\x1b"


def test_counts_agree_with_their_nouns_and_verbs():
    assert [words.counted(n, "row", "is", "are") for n in (0, 1, 2000)] == [
        "0 rows are", "1 row is", "2,000 rows are"
    ]  # fmt: skip
    assert words.counted(1, "row") == "1 row"
    assert words.counted(1, "row", "is", "are", of=2) == "1 row are"
    assert words.counted(2, "row", "is", "are", of=1) == "2 rows is"


KNOWN = ["name-server", "name", "topic", "since", "sort", "sortable"]


@pytest.mark.parametrize(
    ("name", "near"),
    [("nmae", "name"), ("topics", "topic"), ("top", "topic"), ("to", None), ("sor", "sort"),
     ("name-ser", "name-server"), ("jsn", None), ("sinec", "since"), ("", None)],
)  # fmt: skip
def test_a_mistyped_name_has_at_most_one_near_name(name, near):
    assert words.nearest(name, KNOWN) == near
    # However many other names there are, those that share most letters are compared.
    assert words.nearest(name, [f"zz{n}" for n in range(300)] + KNOWN) == near


@pytest.mark.parametrize(
    ("name", "word", "is_meant"),
    [("shardKey", "sharding_key", True), ("shardingKey", "sharding_key", True),
     ("Sharding_Key", "sharding_key", False), ("order_id", "order_by", False),
     ("message", "message_id", False), ("tag", "tags", True), ("tgas", "tags", False),
     ("propertis", "properties", True), ("tag1", "tags", False), ("keys", "keys", False),
     ("mkeys", "keys", False), ("delay_mx", "delay_ms", False)],
)  # fmt: skip
def test_which_names_are_misspelled(name, word, is_meant):
    assert words.is_misspelled(name, word) is is_meant
