"""Text from the network is hostile until it is cut, printable and without credentials."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocket_sink.ledger.sanitise import TEXT_MAX_BYTES, sanitise

ANY_TEXT = st.text(st.characters(codec=None), max_size=400)


@given(ANY_TEXT, st.integers(8, 300))
def test_whatever_comes_in_printable_short_utf8_comes_out(text, max_bytes):
    clean = sanitise(text, max_bytes=max_bytes)
    assert clean.isprintable()
    assert len(clean.encode()) <= max_bytes


@given(st.binary(max_size=300))
def test_bytes_are_read_as_utf8_with_replacement(data):
    assert sanitise(data).isprintable()


@given(ANY_TEXT)
def test_clean_text_stays_as_it_is(text):
    once = sanitise(text)
    assert sanitise(once) == once


def test_plain_remarks_are_kept_word_for_word():
    remark = (
        "[TIMEOUT_CLEAN_QUEUE]broker busy, start flow control for a while, period in queue: 0ms"
    )
    assert sanitise(remark) == remark
    assert sanitise(None) is None
    assert sanitise("") == ""


def test_lines_become_one_and_escapes_cannot_reach_a_terminal():
    assert sanitise("a\r\n\tb") == "a   b"
    assert "\x1b" not in sanitise("\x1b[2J gone")
    assert "\u202e" not in sanitise("abc\u202edcba")


def test_a_cut_text_says_so_and_never_cuts_a_character():
    text = "é" * TEXT_MAX_BYTES
    clean = sanitise(text)
    assert clean.endswith("...")
    assert len(clean.encode()) <= TEXT_MAX_BYTES
    assert set(clean[:-3]) == {"é"}


@pytest.mark.parametrize(
    "text",
    [
        "Check signature failed for accessKey=CANARY-1",
        "No acl config for access-key: CANARY-1 from 10.0.0.1",
        "secretKey = CANARY-1, topic=t",
        "{'Signature': 'CANARY-1', 'code': 1}",
        'password="CANARY-1"',
        "security_token:CANARY-1;",
    ],
)
def test_what_looks_like_a_credential_is_masked(text):
    clean = sanitise(text)
    assert "CANARY" not in clean
    assert "***" in clean


def test_given_secrets_are_masked_wherever_they_stand():
    assert sanitise("xxCANARYyy at CANARY", secrets=["CANARY"]) == "xx***yy at ***"


@given(st.integers(0, 3 * TEXT_MAX_BYTES))
def test_a_secret_at_the_cut_leaves_no_half(distance):
    text = "x" * distance + " accessKey=CANARYCANARYCANARY"
    assert "CANARY" not in sanitise(text)
    assert "CANARY" not in sanitise("x" * distance + "CANARYCANARY", secrets=["CANARYCANARY"])


def test_a_very_short_secret_does_not_mask_everything():
    assert sanitise("a busy broker", secrets=["a", ""]) == "a busy broker"
