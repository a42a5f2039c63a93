"""The quick reader, which expects the shape of the last answer, agrees with the general one."""

import struct
from itertools import zip_longest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocket_sink.errors import InvalidAnswerError
from rocket_sink.wire.answers import AnswerShape, AnswerShapes
from rocket_sink.wire.frame import FrameReader
from rocket_sink.wire.headers import Frame, decode_json_header, encode_json_header
from rocket_sink.wire.responses import SendAnswerFrame, decode_send_answer

HEX = st.text("0123456789ABCDEF", min_size=1, max_size=40)
NUMBERS = st.one_of(st.integers(-3, 2**63 + 9).map(str), st.sampled_from(["", "007", "x", "٣"]))
EXTRAS = st.dictionaries(
    st.sampled_from(["TRACE_ON", "MSG_REGION", "batchUniqId", "recallHandle", "new"]),
    st.sampled_from(["true", "false", "DefaultRegion", 'a"b', "a,b", "é", ".*", "x\\"]),
)


@st.composite
def answers(draw, extras=None):
    fields = {"msgId": draw(HEX), "queueId": draw(NUMBERS), "queueOffset": draw(NUMBERS)}
    if draw(st.booleans()):
        fields["transactionId"] = draw(HEX)
    fields |= draw(EXTRAS) if extras is None else extras
    names = draw(st.permutations(sorted(fields))) if draw(st.booleans()) else sorted(fields)
    return Frame(
        draw(st.sampled_from([0, 0, 0, 10, 11])),
        {name: fields[name] for name in names},
        opaque=draw(st.integers(0, 2**31 - 1)),
        flag=draw(st.sampled_from([1, 1, 3])),
        remark=draw(st.sampled_from([None, None, "note"])),
        version=draw(st.sampled_from([485, 493])),
    )


def framed(header, body=b""):
    return struct.pack(">II", len(header) + 4 + len(body), len(header)) + header + body


def read_all(headers, bodies=()):
    reader, frames = FrameReader(shapes=AnswerShapes()), []
    for header, body in zip_longest(headers, bodies, fillvalue=b""):
        reader.receive_data(framed(header, body))
        frames.append(reader.next_frame())
    return frames


def test_an_answer_without_a_body_does_not_get_the_body_of_the_first():
    headers = [encode_json_header(Frame(0, None, opaque=opaque, flag=1)) for opaque in range(2)]
    frames = read_all(headers, [b"a route"])
    assert [(frame.opaque, frame.body) for frame in frames] == [(0, b"a route"), (1, None)]


def meaning(frame):
    plain = Frame(*(getattr(frame, name) for name in Frame.__slots__))
    if frame.code not in (0, 10, 11):
        return plain
    try:
        return plain, decode_send_answer(frame), list((frame.ext or {}).items())
    except InvalidAnswerError as error:
        return plain, str(error)


@given(st.lists(answers(), max_size=6), st.lists(answers(extras={"TRACE_ON": "true"}), max_size=6))
def test_both_ways_agree(first, second):
    headers = [encode_json_header(frame) for frame in (*first, *second)]
    general = [decode_json_header(header) for header in headers]
    assert [meaning(frame) for frame in read_all(headers)] == [meaning(f) for f in general]


def answer(number, **changes):
    ext = {"msgId": f"7F{number:030X}", "queueId": "3", "queueOffset": str(number)}
    ext |= {"TRACE_ON": "true", **changes}
    return encode_json_header(Frame(0, ext, opaque=number, flag=1, version=485))


@pytest.mark.parametrize(
    "more",
    [{}, {"recallHandle": "h", "MSG_REGION": "r"}, {"transactionId": "7F", "MSG_REGION": "r"}],
)
def test_the_second_answer_is_read_by_the_shape_of_the_first(more):
    other = {name: text if name == "MSG_REGION" else text.swapcase() for name, text in more.items()}
    headers = [answer(1, **more), answer(2, **other), answer(3, TRACE_ON="false", **more)]
    frames = read_all(headers)
    assert [type(frame) for frame in frames] == [Frame, SendAnswerFrame, Frame]
    general = [decode_json_header(header) for header in headers]
    assert [meaning(frame) for frame in frames] == [meaning(frame) for frame in general]


def test_a_stream_that_changes_its_ways_is_not_learned_for_ever():
    frames = read_all([answer(n, TRACE_ON=f"t{n}") for n in range(50)] + [answer(1)] * 2)
    assert not any(type(frame) is SendAnswerFrame for frame in frames)


@pytest.mark.parametrize("changes", [{"queueOffset": "-1"}, {"msgId": ""}])
def test_an_invalid_answer_gives_no_shape(changes):
    header = answer(1, **changes)
    assert AnswerShape.of(decode_json_header(header), header) is None


def stream_of(frames):
    return b"".join(framed(encode_json_header(frame)) for frame in frames)


def read_at_once(stream):
    """Return all frames, and the number of those that were read as columns."""
    reader, frames, many = FrameReader(shapes=AnswerShapes()), [], 0
    reader.receive_data(stream)
    while True:
        if several := reader.next_answers():
            for answers in several:
                frames += [answers.take([i]).frame(0) for i in range(len(answers))]
                many += len(answers)
            continue
        frame = reader.next_frame()
        if frame is None:
            return frames, many
        frames.append(frame)


def usual(n, **other):
    fields = {
        "msgId": f"{n * 2**40:032X}", "queueId": str(n % 10), "queueOffset": str(n),
        "transactionId": f"{n:032X}", "TRACE_ON": "true", **other,
    }  # fmt: skip
    return Frame(0, fields, opaque=n, flag=1, version=493)


@given(
    st.lists(
        st.one_of(st.integers(0, 2**31 - 1).map(usual), answers({"TRACE_ON": "true"})),
        min_size=9, max_size=40,
    )
)  # fmt: skip
def test_many_at_once_mean_the_same(frames):
    headers = [encode_json_header(frame) for frame in frames]
    decoded, _ = read_at_once(stream_of(frames))
    wanted = [repr(meaning(frame)) for frame in read_all(headers)]
    assert sorted(repr(meaning(frame)) for frame in decoded) == sorted(wanted)


@pytest.mark.parametrize("other", [{}, {"recallHandle": "djEgdG9waWMg_-A="}])
def test_many_at_once_are_read_so(other):
    frames = [usual(n, **other) for n in range(90, 400)]
    decoded, many = read_at_once(stream_of(frames))
    assert many > 250
    assert [meaning(frame) for frame in decoded] == [meaning(frame) for frame in frames]


PLAIN = st.integers(0, 2**31 - 1).map(
    lambda n: Frame(0, None, opaque=n, flag=1, version=493, language=0)
)


@given(st.lists(st.one_of(PLAIN, PLAIN, PLAIN, answers()), min_size=20, max_size=60))
def test_plain_answers_mean_the_same(frames):
    headers = [encode_json_header(frame) for frame in frames]
    decoded, _ = read_at_once(stream_of(frames))
    wanted = [decode_json_header(header) for header in headers]
    meant = sorted(repr(meaning(frame)) for frame in decoded)
    assert meant == sorted(repr(meaning(frame)) for frame in wanted)


@pytest.mark.parametrize("odd", [{"code": 1}, {"flag": 3}, {"remark": "no"}, {"version": 485}])
def test_plain_answers_are_read_at_once(odd):
    frames = [Frame(0, opaque=n, flag=1, version=493) for n in range(1000, 1400)]
    for name, value in odd.items():
        setattr(frames[200], name, value)
    decoded, many = read_at_once(stream_of(frames))
    assert many >= 380 and type(decoded[1]) is Frame
    assert [meaning(frame) for frame in decoded] == [meaning(frame) for frame in frames]


def test_plain_answers_with_an_empty_object_of_fields():
    headers = [
        encode_json_header(Frame(0, opaque=n, flag=1)).replace(b'"flag"', b'"extFields":{},"flag"')
        for n in range(1000, 1100)
    ]
    decoded, many = read_at_once(b"".join(map(framed, headers)))
    assert many == 99
    assert decoded == [decode_json_header(header) for header in headers]


@pytest.mark.parametrize(
    "changes",
    [
        {"queueOffset": "x77"}, {"queueOffset": "077"}, {"msgId": "7F 00" + "0" * 27},
        {"TRACE_ON": "ture"}, {"code": 1}, {"flag": 3}, {"version": 485},
    ],
)  # fmt: skip
def test_one_of_another_kind_among_many_is_read_by_itself(changes):
    """The odd frame has the same number of bytes as the others."""
    frames = [usual(n) for n in range(100, 140)]
    odd = frames[20]
    for name, value in changes.items():
        if isinstance(value, str):
            odd.ext = {**odd.ext, name: value}
        else:
            setattr(odd, name, value)
    assert len({len(encode_json_header(frame)) for frame in frames}) == 1
    decoded, many = read_at_once(stream_of(frames))
    assert many >= 37, "the first teaches the shape, and the odd one may teach another"
    assert [meaning(frame) for frame in decoded] == [meaning(frame) for frame in frames]


def test_offsets_of_several_lengths_are_read_at_once():
    """Priorities choose the queue of each message, and queues are not equally full."""
    frames = [usual(n + 500, queueOffset=str((7, 99, 5000)[n % 3] + n)) for n in range(300)]
    frames[200].code = 1
    decoded, many = read_at_once(stream_of(frames))
    assert many > 290
    wanted = {frame.opaque: meaning(frame) for frame in frames}
    assert {frame.opaque: meaning(frame) for frame in decoded} == wanted
