"""Key hashes against Java's own numbers, and the column forms against the scalar ones.

The golden lines were printed by the JDK's String.hashCode and Guava 32's Hashing.sipHash24() and
LongMath.mod.
"""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rocket_sink.routing import hashing

# text, String.hashCode, Math.abs(hash % 10), sipHash24().hashBytes(utf8).asLong(), LongMath.mod 10
GOLDEN = [
    ("", 0, 0, 8246050544436514353, 3),
    ("a", 97, 7, 3144613055062689994, 4),
    ("user-1", -836031825, 5, -6619476867734146451, 9),
    ("订单-1", 1085411543, 3, 7495393892332161409, 9),
    ("😀x", 54959989, 9, -1608679066627811545, 5),
    ("polygenelubricants", -2147483648, 8, -7656922757201233110, 0),
    ("0123456789abcdef", 285443752, 2, -1016181572602893123, 7),
    ("\0", 0, 0, 8428550223375919101, 1),
    ("Ω≈ç√∫˜µ≤≥÷ and a longer tail of text", -873227879, 9, 6382210829988091506, 6),
]
TYPES = [
    pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary(),
    pa.dictionary(pa.int8(), pa.string()), pa.dictionary(pa.int32(), pa.large_binary()),
]  # fmt: skip


def column(keys, kind):
    if pa.types.is_dictionary(kind):
        return column(keys, kind.value_type).dictionary_encode()
    if "binary" in str(kind):
        return pa.array([None if key is None else key.encode() for key in keys], kind)
    return pa.array(keys, kind)


@pytest.mark.parametrize(("text", "java", "java_10", "sip", "sip_10"), GOLDEN)
def test_golden_numbers_of_java(text, java, java_10, sip, sip_10):
    assert hashing.java_hash(text) == java
    assert hashing.java_index(java, 10) == java_10
    assert hashing.sip_hash24(text.encode()) == sip
    assert hashing.sip_index(sip, 10) == sip_10


@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_golden_numbers_of_java_in_a_column(kind):
    keys = column([line[0] for line in GOLDEN] + [None], kind)
    java, sip = hashing.java_hash_array(keys), hashing.siphash_array(keys)
    assert java.dtype == sip.dtype == np.int64
    assert java.tolist() == [line[1] for line in GOLDEN] + [0]
    assert sip.tolist() == [line[3] for line in GOLDEN] + [GOLDEN[0][3]]
    assert hashing.java_index(java, 10)[:-1].tolist() == [line[2] for line in GOLDEN]
    assert hashing.sip_index(sip, 10)[:-1].tolist() == [line[4] for line in GOLDEN]


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


@given(st.lists(st.none() | texts), st.sampled_from(TYPES), st.data())
def test_column_hash_is_the_scalar_hash(keys, kind, data):
    array = column(keys, kind)
    start = data.draw(st.integers(0, len(keys)))
    stop = data.draw(st.integers(start, len(keys)))
    for part in (slice(None), slice(start, stop)):
        texts = [key or "" for key in keys[part]]
        assert hashing.java_hash_array(array[part]).tolist() == [*map(hashing.java_hash, texts)]
        sip = hashing.siphash_array(array[part]).tolist()
        assert sip == [hashing.sip_hash24(text.encode()) for text in texts]


@given(st.lists(st.text("ab\u0080\u07ff\u0800\uffff\U00010000\U0010ffff", max_size=30)))
def test_all_lengths_of_utf8_and_surrogates(keys):
    expected = [hashing.java_hash(key) for key in keys]
    assert hashing.java_hash_array(pa.array(keys, pa.string())).tolist() == expected


@given(st.lists(st.binary(max_size=20)))
@example(["€".encode()[:1], "€".encode()[1:]])  # A character cut in two rows is none.
@example([b"\xff1", b"12", b"\xc3", b"-7"])
def test_bytes_that_are_not_text_hash_row_by_row(keys):
    texts, column = [key.decode("utf-8", "replace") for key in keys], pa.array(keys, pa.binary())
    assert hashing.java_hash_array(column).tolist() == [*map(hashing.java_hash, texts)]
    assert hashing.java_long_hash_array(column).tolist() == [*map(hashing.java_long_hash, texts)]


@given(st.lists(texts, max_size=30), st.integers(1, 60))
def test_blocks_change_nothing(keys, block):
    array = pa.array(keys, pa.string())
    expected = hashing.java_hash_array(array).tolist(), hashing.siphash_array(array).tolist()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hashing, "BLOCK_BYTES", block)
        # The tables of powers hold one block, so the test shortens them to its block.
        patch.setattr(hashing, "_POWERS", hashing._POWERS[: block + 1])
        patch.setattr(hashing, "_INVERSES", hashing._INVERSES[: block + 1])
        parts = hashing.java_hash_array(array).tolist(), hashing.siphash_array(array).tolist()
    assert parts == expected


def test_a_nulls_slot_is_not_read():
    buffers = pa.array(["abc", "xyz"]).buffers()
    validity = pa.py_buffer(b"\x01")
    array = pa.Array.from_buffers(pa.string(), 2, [validity, buffers[1], buffers[2]])
    assert array.to_pylist() == ["abc", None]
    assert hashing.java_hash_array(array).tolist() == [hashing.java_hash("abc"), 0]


@given(st.integers(-(2**31), 2**31 - 1), st.integers(1, 5000))
def test_java_index_is_javas_remainder_and_absolute_value(value, count):
    remainder = int(np.fmod(np.int64(value), np.int64(count)))
    assert hashing.java_index(value, count) == abs(remainder)
    assert hashing.java_index(np.array([value]), count)[0] == abs(remainder)


# Texts of Java longs with Long.hashCode; then texts that are no longs with String.hashCode.
LONGS = [
    ("0", 0), ("7", 7), ("-1", 0), ("-2", 1), ("2147483647", 2147483647),
    ("2147483648", -2147483648), ("4294967296", 1), ("-4294967296", -1), ("1099511627776", 256),
    ("9223372036854775807", -2147483648), ("-9223372036854775808", -2147483648),
    ("1234567890123", 1912276436),
]  # fmt: skip
NO_LONGS = [
    "", "-", "-0", "00", "01", "-01", "+1", " 1", "1 ", "1\n", "1.0", "0x1", "1e3", "--1", "1-",
    "9223372036854775808", "-9223372036854775809", "9999999999999999999", "99999999999999999999",
    "18446744073709551616", "184467440737095516170", "１", "1é", "é1", "abc", "user-1",
]  # fmt: skip


def test_numbers_hash_as_longs_and_other_texts_as_strings():
    assert [hashing.java_long_hash(text) for text, _ in LONGS] == [value for _, value in LONGS]
    for text in NO_LONGS:
        assert hashing.java_long_hash(text) == hashing.java_hash(text), text
    texts = [*dict(LONGS), *NO_LONGS]
    hashes = hashing.java_long_hash_array(pa.array(texts)).tolist()
    assert hashes == [hashing.java_long_hash(text) for text in texts]


@pytest.mark.parametrize("kind", TYPES, ids=str)
@given(
    st.lists(
        st.none()
        | st.sampled_from([text for text, _ in LONGS] + NO_LONGS)
        | st.integers(-(2**64), 2**64).map(str)
        | st.integers(-200, 200).map(str)
        | st.text("-0123456789a", max_size=22),
        max_size=50,
    ),
    st.integers(0, 3),
)
def test_a_column_of_numbers_hashes_as_each_one_does(kind, keys, first):
    hashes = hashing.java_long_hash_array(column(keys, kind)[first:])
    assert hashes.dtype == np.int64
    assert hashes.tolist() == [hashing.java_long_hash(key or "") for key in keys[first:]]
