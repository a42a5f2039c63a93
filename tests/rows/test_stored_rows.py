"""Answers to pulls as rows: the columns give what decoding one by one gives, errors included."""

from unittest import mock

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rocket_sink.errors import RemoteProtocolError
from rocket_sink.rows import stored_rows
from rocket_sink.rows.stored_rows import STORED_SCHEMA, stored_batch, stored_batches
from rocket_sink.wire.batch import encode_inner
from rocket_sink.wire.codes import SysFlag
from rocket_sink.wire.columns.stored import StoredColumns
from rocket_sink.wire.compress import CompressionType, compress
from rocket_sink.wire.headers import Limits
from rocket_sink.wire.stored import StoredMessage, encode_stored, iter_stored
from tests.wire.test_stored import messages, words

_NAMES = st.sampled_from(
    [b"TAGS", b"KEYS", b"UNIQ_KEY", b"WAIT", b"__event_time_ms", b"mine", b"mine", b"", b"x"]
)
_VALUES = st.one_of(
    st.sampled_from(
        [b"", b"a", b"a b", b" a  b ", b"1500", b"-7", b"+5", b"1_0", b"9" * 15, b"9" * 18, b"\x01",
         "\u0664".encode(), b"\xff", b"007", b"-0", b"-62135596800001", b"v\x00"]
    ),
    words.map(str.encode),
)  # fmt: skip
_PAIR_END = st.sampled_from([b"\x02", b"\x02", b"\x02", b"", b"\x02\x02"])
_PAIRS = st.tuples(_NAMES, st.sampled_from([b"\x01", b"\x01", b""]), _VALUES, _PAIR_END)
_TEXTS = st.tuples(
    st.lists(_PAIRS.map(b"".join), max_size=5).map(b"".join),
    st.sampled_from([b"", b"", b"\x00\x00"]),  # of a torn message
).map(b"".join)


@st.composite
def encoded(draw):
    """Draw a stored message: plain, compressed, an inner batch, or with any text of properties."""
    message = draw(messages)
    body = message.body
    kind = draw(st.sampled_from([None, None, *CompressionType]))
    if draw(st.integers(0, 5)) == 5:
        message.__dict__["sys_flag"] |= SysFlag.INNER_BATCH | SysFlag.NEED_UNWRAP
        message.__dict__["queue_offset"] >>= 1  # Each message in the batch adds one.
        body = b"".join(encode_inner(b"i", text) for text in draw(st.lists(words, max_size=3)))
    if kind is not None and body:
        message.__dict__["sys_flag"] |= kind.sys_flag
        body = compress(body, kind)
    if draw(st.integers(0, 5)):
        message.__dict__["born_host"] = message.__dict__["store_host"] = ("10.0.0.1", 10911)
    if draw(st.integers(0, 5)) == 5:
        message.__dict__["topic"] = "t" * 200
    text = draw(_TEXTS)
    if not text:
        return encode_stored(message, stored_body=body)
    message.__dict__["properties"] = {}
    data = encode_stored(message, stored_body=body)[:-2] + len(text).to_bytes(2, "big") + text
    return len(data).to_bytes(4, "big") + data[4:]


def rows_one_by_one(data):
    return stored_batch([("b", each) for each in iter_stored(data)]).to_pylist()


def rows_by_columns(data, few=0):
    """Return the rows; `few`=0: no number of irregular messages turns columns off."""
    with mock.patch.object(stored_rows, "_FEW", few):
        batches = list(
            stored_batches([data], "b", lambda offset, _: offset == offset, lambda _: None)
        )
    for batch in batches:
        batch.validate(full=True)
        assert batch.schema.equals(STORED_SCHEMA)
    return pa.Table.from_batches(batches, STORED_SCHEMA).to_pylist()


@settings(max_examples=400)
@given(st.lists(encoded(), max_size=6), st.sampled_from([0, 0, 0, 64]))
def test_columns_have_what_messages_have_one_by_one(stored, few):
    data = b"".join(stored)
    assert rows_by_columns(data, few) == rows_one_by_one(data)


@given(st.lists(encoded(), min_size=1, max_size=3), st.data())
def test_columns_refuse_what_is_refused_one_by_one(stored, draws):
    data = bytearray(b"".join(stored))
    for _ in range(draws.draw(st.integers(1, 3))):
        data[draws.draw(st.integers(0, len(data) - 1))] = draws.draw(st.integers(0, 255))
    damaged = bytes(data[: draws.draw(st.sampled_from([len(data), len(data), len(data) // 2]))])
    try:
        expected = rows_one_by_one(damaged)
    except RemoteProtocolError as error:
        with pytest.raises(RemoteProtocolError) as caught:
            rows_by_columns(damaged)
        assert str(caught.value).partition(",")[0] == str(error).partition(",")[0]
    else:
        assert rows_by_columns(damaged) == expected


def plain(count, **fields):
    return b"".join(
        encode_stored(StoredMessage("t", b"x", queue_offset=offset, store_ms=offset, **fields))
        for offset in range(count)
    )


def test_which_messages_have_columns():
    """Columns would be of no use if the messages of usual clients were decoded one by one."""
    usual = {"TAGS": "t", "KEYS": "a b", "UNIQ_KEY": "I", "WAIT": "true", "mine": "1"}
    odd_keys = {**usual, "KEYS": " a  b "}
    for properties in ({}, usual, odd_keys, {**usual, "__event_time_ms": "1500"}):
        assert StoredColumns.of(plain(3, properties=properties)).regular.all()
        singles = []
        data = plain(300, properties=properties)
        (batch,) = stored_batches(
            [data], "b", lambda offset, ms: (offset >= 5) & (ms < 9), singles.append
        )
        assert batch.to_pylist() == rows_one_by_one(data)[5:9] and not singles


@pytest.mark.parametrize("length", [5, 8, 300])
def test_properties_that_pass_the_messages_end_are_refused(length):
    data = encode_stored(StoredMessage("topic", b"body", properties={"k": "v"}))
    lying = data[:-6] + length.to_bytes(2, "big") + data[-4:]
    assert StoredColumns.of(lying + 9 * data).regular.tolist() == [False, *[True] * 9]
    with pytest.raises(RemoteProtocolError, match="passes a stored message's end"):
        rows_by_columns(lying + 9 * data)


def test_a_torn_answer_does_not_take_the_next_one_for_its_end():
    whole = plain(1)
    torn = encode_stored(StoredMessage("t", bytes(200), store_ms=1))[: -len(whole)]
    with pytest.raises(RemoteProtocolError, match="292 bytes, 199 are left"):
        list(stored_batches([whole + torn, whole], "b", lambda o, _: o >= 0, lambda _: None))


def test_a_few_irregular_messages_leave_the_others_in_columns():
    odd = encode_stored(StoredMessage("t", b"x", queue_offset=9, store_host=("::1", 1)))
    singles = []
    batches = list(
        stored_batches([plain(200), odd, plain(200)], "b", lambda o, _: o >= 0, singles.append)
    )
    assert [batch.num_rows for batch in batches] == [200, 1, 200] and len(singles) == 1
    (batch,) = stored_batches([plain(20) + odd], "b", lambda o, _: o >= 0, singles.append)
    assert batch.num_rows == 21 and len(singles) == 22


def test_bodies_that_inflate_make_small_batches():
    packed = compress(bytes(5 << 20), CompressionType.ZLIB)
    data = b"".join(
        encode_stored(StoredMessage("t", b"", queue_offset=offset, sys_flag=flag), stored_body=body)
        for offset, (flag, body) in enumerate([(0x301, packed), (0, b"x")] * 7)
    )
    batches = list(stored_batches([data], "b", lambda offset, _: offset >= 0, lambda _: None))
    assert all(batch["body"].nbytes <= Limits.POLL_BYTES for batch in batches) and len(batches) > 2
    lengths = [len(body) for batch in batches for body in batch["body"].to_pylist()]
    assert lengths == [5 << 20, 1] * 7
