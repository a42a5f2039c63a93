"""Trace lines in the form that the dashboards read."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocket_sink.errors import LocalProtocolError
from rocket_sink.message import Message
from rocket_sink.wire.trace import EndTransactionTrace, MessageType, PubTrace, encode_traces
from tests.decoding import decode_trace

PUB = PubTrace(
    1_700_000_000_000, "DefaultRegion", "PID-test", "topic-test",
    "AC1415116D1418B4AAC217FE1B4E0000", "Tags", "Keys", "127.0.0.1:10911", 26, 245,
    MessageType.NORMAL, "0A9A002600002A9F0000000000002329", True,
)  # fmt: skip


def test_a_send_in_javas_form():
    [(text, keys)] = encode_traces([PUB])
    assert text == "\x01".join(
        ["Pub", "1700000000000", "DefaultRegion", "PID-test", "topic-test",
         "AC1415116D1418B4AAC217FE1B4E0000", "Tags", "Keys", "127.0.0.1:10911", "26", "245", "0",
         "0A9A002600002A9F0000000000002329", "true"]
    ) + "\x02"  # fmt: skip
    assert keys == {"AC1415116D1418B4AAC217FE1B4E0000", "Keys"}
    assert decode_trace(text) == [PUB]


words = st.text(st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp", "Cf"]), max_size=9)
number = st.integers(0, 2**31 - 1)
kind = st.sampled_from(MessageType)
traces = st.one_of(
    st.builds(
        PubTrace, number, words, words, words, words, words, words, words, number, number, kind,
        words, st.booleans(),
    ),
    st.builds(
        EndTransactionTrace, number, words, words, words, words, words, words, words, kind, words,
        words, st.booleans(),
    ),
)  # fmt: skip


@given(st.lists(traces, max_size=4))
def test_what_is_written_is_read(lines):
    [(text, keys)] = list(encode_traces(lines)) or [("", frozenset())]
    assert decode_trace(text) == lines
    words_written = " ".join(f"{line.message_id} {line.keys}" for line in lines)
    assert set(Message("traces", b"x", keys=keys).keys) == set(words_written.split(" ")) - {""}


@pytest.mark.parametrize("separator", ["\x01", "\x02"])
def test_separators_cannot_be_written(separator):
    with pytest.raises(LocalProtocolError, match="AC1415116D1418B4AAC217FE1B4E0000"):
        list(encode_traces([replace(PUB, topic=f"t{separator}")]))
