"""Heads from a template equal those of the general encoder."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocket_sink.errors import LocalProtocolError
from rocket_sink.wire.acl import Credentials, canonical_fields
from rocket_sink.wire.frame import encode_head
from rocket_sink.wire.requests import send_message_v2
from rocket_sink.wire.send_header import SendTemplate

from .feeding import whole

text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
numbers = st.integers(0, 2**31 - 1)


@pytest.mark.parametrize("batch", [False, True], ids=["single", "batch"])
@given(
    names=st.tuples(text, text, text),
    opaque=numbers,
    queue_id=numbers,
    born_ms=st.integers(0, 2**63 - 1),
    flag=st.integers(-(2**31), 2**31 - 1),
    properties=st.text(st.characters(exclude_categories=["Cs"]), max_size=60),
    body=st.binary(max_size=20),
)
def test_a_template_equals_the_general_way(
    batch, names, opaque, queue_id, born_ms, flag, properties, body
):
    group, topic, broker = names
    template = SendTemplate(producer_group=group, topic=topic, batch=batch)
    fields = {
        "producer_group": group, "topic": topic, "queue_id": queue_id, "born_ms": born_ms,
        "properties": properties, "broker_name": broker,
    }  # fmt: skip
    flags = {} if batch else {"sys_flag": 9, "flag": flag}
    head = template.head(opaque, queue_id, born_ms, properties, len(body), broker, **flags)
    frame = send_message_v2(**fields, batch=batch, **flags)
    frame.opaque = opaque
    (decoded,) = whole(head + body)
    assert [decoded] == whole(encode_head(frame, len(body)) + body)


@pytest.mark.parametrize("token", [None, "tok"])
@given(properties=st.text(st.characters(exclude_categories=["Cs"]), max_size=30), body=st.binary())
def test_template_heads_are_signed_as_any_request(token, properties, body):
    signer = Credentials("RocketMQ", "12345678", token).signer()
    template = SendTemplate(producer_group="PG", topic="TopicTest", signer=signer)
    parts = [memoryview(body)[: len(body) // 2], memoryview(body)[len(body) // 2 :]]
    head = template.head(5, 3, 1_700_000_000_000, properties, len(body), "broker-a", body=parts)
    (frame,) = whole(head + body)
    assert frame.ext["Signature"] == signer.signature(canonical_fields(frame.ext), body)
    assert ("SecurityToken" in frame.ext) == (token is not None)


def test_lone_surrogates_and_long_frames_are_refused():
    template = SendTemplate(producer_group="g", topic="t")
    with pytest.raises(LocalProtocolError, match="Unicode"):
        template.head(1, 1, 1, "k\x01\ud800\x02", 1, "b")
    with pytest.raises(LocalProtocolError, match="limits"):
        template.head(1, 1, 1, "", 16 * 1024 * 1024, "b")
    with pytest.raises(LocalProtocolError, match="limits"):
        template.head(1, 1, 1, "x" * 1024 * 1024, 1, "b")
