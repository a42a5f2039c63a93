"""The frames of a group equal those of single messages, byte by byte."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocket_sink.errors import LocalProtocolError
from rocket_sink.wire import headers
from rocket_sink.wire.acl import Credentials
from rocket_sink.wire.columns.single_frames import SingleMessages, fill_frames
from rocket_sink.wire.headers import Frame
from rocket_sink.wire.send_header import SendTemplate

from .feeding import whole

TEXTS = st.one_of(
    st.text(st.characters(blacklist_categories=["Cs"]), max_size=30),
    st.text('"\\\x01\x02n', max_size=9),
)


def template(**other):
    return SendTemplate(producer_group="g", topic="topic", **other)


def by_heads(messages, send_template, first):
    """Return the same frames, written by `SendTemplate.head`."""
    parts = []
    for n, body in enumerate(messages.body.to_pylist()):
        text = (messages.properties[n].as_py() + messages.suffix).decode()
        flags = [v if isinstance(v, int) else int(v[n]) for v in (messages.sys_flag, messages.flag)]
        parts += [
            send_template.head(first + n, 3, 1234567, text, len(body), "b-1", *flags, body),
            body,
        ]
    return b"".join(parts)


def frames(messages, made, first):
    buffer = messages.frames(
        made, first_opaque=first, queue_id=3, born_ms=1234567, broker_name="b-1"
    )
    return buffer.to_pybytes()


KINDS = {"json": {}, "signed": {"signer": Credentials("key", "secret").signer()}}


@pytest.mark.parametrize("kind", KINDS)
@given(
    st.lists(st.tuples(st.binary(max_size=40), TEXTS, st.integers(-9, 9)), min_size=1, max_size=8),
    st.sampled_from([0, 7, 95, 9_997, 2**31 - 9]), TEXTS, st.booleans(),
)  # fmt: skip
def test_frames_are_the_heads_and_bodies(kind, rows, first, suffix, flags):
    bodies, texts, numbers = zip(*rows, strict=True)
    column: Any = np.array(numbers, np.int64) if flags else 5
    messages = SingleMessages(
        pa.array(bodies, pa.large_binary() if flags else pa.binary()),
        pa.array([text.encode() for text in texts], pa.binary()), column, column,
        suffix=suffix.encode(),
    )  # fmt: skip
    if kind == "json" and not any(text + suffix for text in texts):
        return  # A head leaves empty properties out.
    written, wanted = (
        make(messages, template(**KINDS[kind]), first) for make in (frames, by_heads)
    )
    if kind == "json" and not all(text + suffix for text in texts):
        assert [f.ext.get("i", "") for f in whole(written)] == [
            f.ext.get("i", "") for f in whole(wanted)
        ]
    else:
        assert written == wanted


def test_slices_of_columns():
    bodies, texts = pa.array([b"a", b"bb", b"ccc"]), pa.array([b"x\x01y\x02"] * 3)
    messages = SingleMessages(bodies.slice(1), texts.slice(1), 0, 0)
    assert frames(messages, template(), 5) == by_heads(messages, template(), 5)


def test_too_long_a_frame_is_refused():
    messages = SingleMessages(pa.array([b"", bytes(17 << 20)]), pa.array([b"", b""]))
    with pytest.raises(LocalProtocolError, match="send fewer or smaller"):
        frames(messages, template(), 0)


def test_digits_in_a_shared_field_are_no_hole():
    shared = f'orders-{headers._HOLE},"opaque":{headers._HOLE}'
    model = Frame(37, {"topic": shared, "one": ""}, flag=0)
    decoded = whole(fill_frames(model, {"one": pa.array(["a", "b"])}, 7).to_pybytes())
    assert [(frame.opaque, frame.ext["topic"]) for frame in decoded] == [(7, shared), (8, shared)]


@given(st.lists(st.tuples(TEXTS, st.integers(0, 2**63 - 1)), min_size=1, max_size=8), TEXTS)
def test_frames_with_filled_fields(rows, shared):
    texts, numbers = [text for text, _ in rows], [str(number) for _, number in rows]
    model = Frame(37, {"one": "x", "shared": shared, "two": ""}, flag=0)
    columns = {"one": pa.array(texts), "two": pa.array(numbers)}
    decoded = whole(fill_frames(model, columns, 98).to_pybytes())
    assert [frame.opaque for frame in decoded] == list(range(98, 98 + len(rows)))
    for frame, text, number in zip(decoded, texts, numbers, strict=True):
        assert (frame.code, frame.ext) == (37, {"one": text, "shared": shared, "two": number})
