"""The request table: every request leaves it exactly once, whatever the peer and the clock do."""

import pytest

from rocket_sink.errors import LocalProtocolError, RemoteProtocolError
from rocket_sink.wire.acl import Credentials
from rocket_sink.wire.answers import AnswerShape, AnswerShapes
from rocket_sink.wire.codes import RequestCode, ResponseCode
from rocket_sink.wire.connection import (
    OPAQUES,
    Answered,
    Connection,
    PeerRequest,
    UnexpectedAnswer,
    Violation,
    free_opaque,
)
from rocket_sink.wire.frame import encode_frame, encode_head
from rocket_sink.wire.headers import Frame, response_to

from .feeding import binary_frame, whole

REQUEST = Frame(RequestCode.SEND_MESSAGE_V2, {"b": "topic"}, b"body")


def sent(head, body=b"body"):
    """Return the request that a server reads."""
    (frame,) = whole(head + body)
    return frame


def ends(requests):
    """Return (token, written) of each request."""
    return [(request.token, request.written) for request in requests]


def answer_to(frame, code=0):
    return encode_frame(response_to(frame, code))


def test_c52_an_answer_finds_its_request_by_opaque_id():
    connection = Connection()
    first = sent(connection.send_request(REQUEST, deadline_s=3.0, token="first"))
    second = sent(connection.send_request(REQUEST, deadline_s=3.0, token="second"))
    connection.mark_written("first", 1.0)
    connection.mark_written("second", 1.5)
    # Java releases a permit twice for the last answer; our request left the table with the first.
    *events, late = connection.receive_data(answer_to(second, 2) + answer_to(first) * 2, 2.0)
    answers = [(event.token, event.answer.code, event.sent_s) for event in events]
    assert answers == [("second", 2, 1.5), ("first", 0, 1.0)]
    assert isinstance(late, UnexpectedAnswer)
    assert repr(connection) == "<Connection open, 0 in flight>"
    assert connection.last_heard_s == 2.0


def test_c52_an_expired_request_leaves_the_table():
    connection = Connection()
    frame = sent(connection.send_request(REQUEST, deadline_s=3.0, token="slow"))
    connection.send_request(REQUEST, deadline_s=5.0, token="patient")
    connection.mark_written("slow", 0.5)
    assert connection.expire(2.9) == []
    assert connection.next_deadline_s == 3.0
    assert ends(connection.expire(3.0)) == [("slow", True)]
    assert connection.expire(3.0) == []
    assert connection.next_deadline_s == 5.0
    assert isinstance(connection.receive_data(answer_to(frame), 3.1)[0], UnexpectedAnswer)
    assert ends(connection.expire(9.0)) == [("patient", False)]
    assert connection.next_deadline_s is None


@pytest.mark.parametrize(
    ("written_s", "heard_s", "latest_s", "stays", "ends_at"),
    [
        (0.1, 0.9, 3.0, [(0.9, 0.9), (1.0, 1.1), (1.35, 1.45)], (1.5, 1.5)),
        (0.1, 1.0, 1.2, [(1.1, 1.9)], (1.2, 1.9)),  # at the latest
        (None, 0.9, 3.0, [], (1.0, 1.1)),  # It is not written yet,
        (0.95, 0.9, 3.0, [], (1.0, 1.1)),  # or nothing was heard since,
        (0.1, None, 3.0, [], (1.0, 1.1)),  # or nothing was heard at all,
        (0.1, 0.9, 0.0, [], (1.0, 1.1)),  # or its deadline may not be extended.
    ],
)
def test_a_request_that_a_living_peer_holds_does_not_expire(
    written_s, heard_s, latest_s, stays, ends_at
):
    connection = Connection()
    other = sent(connection.send_request(REQUEST, deadline_s=9.0, token="other"))
    connection.mark_written("other", 0.0)
    connection.open_request(deadline_s=1.0, token="held", latest_s=latest_s)
    if written_s is not None:
        connection.mark_written("held", written_s)
    if heard_s is not None:
        connection.receive_data(answer_to(other), heard_s)
    for now_s, extended_s in stays:
        assert connection.expire(now_s, extended_s=extended_s) == []
    now_s, extended_s = ends_at
    assert ends(connection.expire(now_s, extended_s=extended_s)) == [("held", bool(written_s))]


def test_c53_requests_without_an_answer_come_back_once_when_the_connection_ends():
    connection = Connection()
    for token in ("written", "unwritten"):
        connection.send_request(REQUEST, deadline_s=3.0, token=token)
    connection.mark_written("written", 0.0)
    assert ends(connection.close()) == [("written", True), ("unwritten", False)]
    assert connection.close() == []
    assert isinstance(connection.error, LocalProtocolError)
    assert connection.expire(99.0) == []
    for call in (
        lambda: connection.send_request(REQUEST, deadline_s=1.0, token=1),
        lambda: connection.send_oneway(REQUEST),
        lambda: connection.open_request(deadline_s=1.0, token=1),
        lambda: connection.receive_data(b"", 0.0),
        lambda: connection.respond(REQUEST, 0),
    ):
        with pytest.raises(LocalProtocolError, match="closed"):
            call()


def test_answers_before_garbage_count():
    connection = Connection()
    frame = sent(connection.send_request(REQUEST, deadline_s=3.0, token="acked"))
    connection.send_request(REQUEST, deadline_s=3.0, token="unknown")
    connection.mark_written("unknown", 0.0)
    events = connection.receive_data(answer_to(frame) + b"\xff" * 20, 1.0)
    assert isinstance(events[0], Answered)
    assert isinstance(events[1], Violation)
    assert isinstance(connection.error, RemoteProtocolError)
    with pytest.raises(RemoteProtocolError):
        connection.receive_data(b"", 1.0)
    with pytest.raises(RemoteProtocolError):
        connection.send_request(REQUEST, deadline_s=3.0, token="more")
    assert ends(connection.close()) == [("unknown", True)]


def test_a_oneway_request_has_the_flag_and_no_entry():
    connection = Connection()
    frame = sent(connection.send_oneway(REQUEST))
    assert frame.is_oneway
    assert not REQUEST.is_oneway
    assert connection.in_flight == 0
    assert isinstance(connection.receive_data(answer_to(frame), 0.0)[0], UnexpectedAnswer)


def test_requests_of_the_broker_are_read_in_its_own_serialisation():
    """The opaque id may be that of a request to the broker."""
    connection = Connection(first_opaque=8)
    connection.send_request(REQUEST, deadline_s=3.0, token="mine")
    check = Frame(RequestCode.CHECK_TRANSACTION_STATE, None, None, opaque=8)
    (event,) = connection.receive_data(binary_frame(check), 0.0)
    assert isinstance(event, PeerRequest)
    code = ResponseCode.REQUEST_CODE_NOT_SUPPORTED
    (answer,) = whole(connection.respond(event.frame, code, remark="not served"))
    assert (answer.code, answer.opaque, answer.is_response) == (3, 8, True)
    check.flag = 2
    assert connection.respond(check, 0) == b"" and connection.in_flight == 1


def test_writing_a_request_means_that_all_before_it_are_written():
    connection = Connection()
    for token in ("a", "b", "c"):
        connection.open_request(deadline_s=3.0, token=token)
    connection.mark_written("b", 1.0)
    assert ends(connection.close()) == [("a", True), ("b", True), ("c", False)]


def test_marking_an_unknown_request_is_refused_and_errs_to_written():
    connection = Connection()
    connection.open_request(deadline_s=3.0, token="a")
    with pytest.raises(LocalProtocolError, match="not waiting"):
        connection.mark_written("stranger", 1.0)
    assert ends(connection.close()) == [("a", True)]


def test_the_token_of_an_expired_request_may_come_again():
    """A retry has the same token here; its write must not be booked to the old entry."""
    connection = Connection()
    connection.open_request(deadline_s=1.0, token="t")
    assert ends(connection.expire(1.0)) == [("t", False)]
    connection.open_request(deadline_s=5.0, token="t")
    connection.mark_written("t", 1.5)
    assert ends(connection.close()) == [("t", True)]


def test_the_oldest_unanswered_request_makes_a_broker_suspect():
    connection = Connection()
    assert connection.oldest is None
    frames = []
    for now_s in (1.0, 2.0):
        frames.append(sent(connection.send_request(REQUEST, deadline_s=9.0, token=now_s)))
        connection.mark_written(now_s, now_s)
    assert connection.oldest.sent_s == 1.0
    connection.receive_data(answer_to(frames[0]), 2.5)
    assert connection.oldest.sent_s == 2.0
    connection.receive_data(answer_to(frames[1]), 2.5)
    assert connection.oldest is None
    connection.send_request(REQUEST, deadline_s=9.0, token="unwritten")
    assert connection.oldest.sent_s is None


def test_an_id_in_flight_is_not_given_twice():
    """On a connection that lives for OPAQUES requests an id comes round that is still in use."""
    assert free_opaque(8, {8: None, 9: None}) == 10
    connection = Connection(first_opaque=7)
    assert connection.open_request(deadline_s=9.0, token=1) == 7
    connection._next_opaque = 7
    assert connection.open_request(deadline_s=9.0, token=2) == 8
    assert connection.in_flight == 2


def test_a_frame_that_cannot_be_encoded_leaves_no_trace():
    connection = Connection()
    with pytest.raises(LocalProtocolError):
        connection.send_request(Frame(1, {"k": "\ud800"}), deadline_s=1.0, token=1)
    assert connection.in_flight == 0
    assert connection.open_request(deadline_s=1.0, token=2) == 0


def test_requests_are_signed_when_there_are_credentials():
    signer = Credentials("RocketMQ", "12345678").signer()
    connection = Connection(sign=signer)
    frame = sent(connection.send_request(REQUEST, deadline_s=1.0, token=1))
    assert frame.ext == {**(REQUEST.ext or {}), **signer(REQUEST.ext or {}, b"body")}
    assert set(REQUEST.ext or {}) == {"b"}, "the caller's frame stays as it was"
    assert "Signature" in (sent(connection.send_oneway(REQUEST)).ext or {})


class TestGroups:
    """`open_group`: many requests share one token, and each leaves the table once."""

    @staticmethod
    def answers(opaques, **other):
        fields = {"msgId": "7F" * 16, "queueId": "3", "queueOffset": "77", **other}
        frames = (Frame(0, fields, opaque=opaque, flag=1) for opaque in opaques)
        return b"".join(map(encode_frame, frames))

    def test_answers_come_in_any_order_and_in_pieces(self):
        connection = Connection(shapes=AnswerShapes(), first_opaque=90)
        assert connection.open_group(30, deadline_s=3.0, token="a") == 90
        assert connection.open_group(20, deadline_s=3.0, token="b") == 120
        single = connection.open_request(deadline_s=3.0, token="c")
        for token in ("a", "b", "c"):
            connection.mark_written(token, 1.0)
        opaques = [*range(119, 89, -1), single, *range(120, 140)]
        # The first answer teaches the reader the shape.
        stream = self.answers(opaques)
        found, sizes = [], set()
        for start in range(0, len(stream), 5000):
            for event in connection.receive_data(stream[start : start + 5000], 2.0):
                if isinstance(event.answer, Frame):
                    found.append((event.token, event.answer.opaque))
                else:
                    found += [(event.token, opaque) for opaque in event.answer.opaques.tolist()]
                    sizes.add(len(event.answer))
                assert event.sent_s == 1.0
        names = ["a"] * 30 + ["c"] + ["b"] * 20
        assert found == list(zip(names, opaques, strict=True))
        assert connection.in_flight == 0 and connection.close() == []
        assert max(sizes) > 16, "many answers are read at once"

    def test_answers_twice_and_those_of_others_are_unexpected(self):
        connection = Connection(shapes=AnswerShapes())
        connection.open_group(10, deadline_s=3.0, token="a")
        connection.receive_data(self.answers([0]), 0.0)
        events = connection.receive_data(self.answers([*range(1, 10), *range(10), 77, 78]), 0.0)
        assert [type(event) for event in events].count(UnexpectedAnswer) == 12
        assert connection.in_flight == 0

    @pytest.mark.parametrize("written", [False, True])
    def test_what_is_left_comes_back_once(self, written):
        for end in ("expire", "close"):
            connection = Connection(shapes=AnswerShapes())
            connection.open_group(20, deadline_s=3.0, token="a")
            connection.open_request(deadline_s=9.0, token="b")
            if written:
                connection.mark_written("a", 1.0)
            connection.receive_data(self.answers(list(range(12))), 1.0)
            if end == "expire":
                assert ends(connection.expire(3.0)) == [("a", written)]
                assert connection.in_flight == 1 and connection.expire(4.0) == []
                late = connection.receive_data(self.answers([12, 19]), 4.0)
                assert [type(event) for event in late] == [UnexpectedAnswer] * 2
                connection.mark_written("b", 5.0)
            else:
                assert ends(connection.close()) == [("a", written), ("b", False)]

    def test_what_is_not_written_can_move_elsewhere(self):
        connection = Connection()
        for token in ("written", "partly", "single"):
            connection.open_request(deadline_s=3.0, token=token)
        connection.open_group(20, deadline_s=3.0, token="group")
        connection.mark_written("written", 0.5)
        assert connection.withdraw_unwritten(keep="partly") == ["single", "group"]
        assert connection.in_flight == 2
        connection.mark_written("partly", 0.6)
        assert connection.withdraw_unwritten() == []
        assert ends(connection.close()) == [("written", True), ("partly", True)]

    def test_ids_are_consecutive_and_not_in_flight(self):
        in_flight: dict[int, object] = {3: None}
        assert free_opaque(OPAQUES - 5, in_flight, 5) == OPAQUES - 5
        assert free_opaque(OPAQUES - 5, in_flight, 6) == 4
        assert free_opaque(0, in_flight, 3) == 0
        assert free_opaque(3, in_flight, 3) == 4
        connection = Connection(shapes=AnswerShapes(), first_opaque=OPAQUES - 5)
        assert connection.open_group(5, deadline_s=3.0, token="a") == OPAQUES - 5
        assert connection.open_group(3, deadline_s=3.0, token="b") == 0


def test_a_oneway_request_leaves_the_table_when_it_is_written():
    connection, tokens = Connection(), ["before", "oneway", "after"]
    for token in tokens:
        connection.open_request(deadline_s=9.0, token=token, oneway=token == "oneway")
    connection.mark_written(tokens[0], 1.0)
    assert connection.take_written_oneway() == []
    connection.mark_written(tokens[2], 2.0)
    assert connection.written_oneway and connection.take_written_oneway() == ["oneway"]
    assert not connection.written_oneway and connection.in_flight == 2
    assert [lost.token for lost in connection.close()] == ["before", "after"]


def test_ids_stay_short_enough_for_the_fast_path():
    """A connection lives for weeks; an answer that is not read by its shape costs five times."""
    answer = response_to(Frame(310, opaque=OPAQUES - 1), 0)
    answer.ext = {"msgId": "A", "queueId": "0", "queueOffset": "0"}
    header = encode_head(answer, 0)[8:]
    assert AnswerShape.of(answer, header) is not None
