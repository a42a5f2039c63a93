"""Groups for which a broker has room in part: the part is sent before others can take the room."""

import time
from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest

from rocket_sink.errors import (
    ConnectError,
    ConnectionLostError,
    RequestTimeoutError,
    UnwrittenError,
)
from rocket_sink.message import MessageQueue
from rocket_sink.producer.engine.attempt import AttemptHistory, SendAttempt, SendRequest, Wait
from rocket_sink.producer.engine.brokers import Broker, SendTarget
from rocket_sink.producer.engine.frame_group import GroupAttempt
from rocket_sink.producer.engine.request_flow import RequestFlow
from rocket_sink.producer.engine.waiting import WaitingRequests
from rocket_sink.wire.answers import PlainAnswers, SendAnswers
from rocket_sink.wire.headers import Frame
from rocket_sink.wire.responses import SendAnswer, SendAnswerFrame
from tests.producer.engine.test_steps import NOW_S, RECORD, World

ROOM = 8


@dataclass
class Group:
    """A group of messages of ten bytes."""

    name: str
    size: int
    in_parts = True

    @property
    def body_bytes(self):
        return 10 * self.size

    def bytes_of(self, indices):
        return 10 * len(indices)

    def __len__(self):
        return self.size

    def leave(self, first, last):
        return request(self.name, last - first)


def request(name, count):
    group = Group(name, count) if count > 1 else None
    return SendRequest("t", bytes(10), message_count=count, token=name, group=group)


class Dispatcher:
    """Sends to one broker with `ROOM` places; counts attempts that were dispatched in vain."""

    def __init__(self):
        self.broker = Broker("b")
        self.broker.window = SimpleNamespace(
            room_for=lambda requests, in_flight: max(0, min(requests, ROOM - in_flight))
        )
        self.sent = []
        self.in_vain = 0

    def send(self, attempt, now_s):
        attempt.target = SendTarget(MessageQueue("t", "b", 0), "b", "b:1", self.broker)
        room = attempt.room_at(self.broker)
        if room < attempt.requests:
            self.in_vain += not room
            attempt.target = attempt.target if room else None
            return Wait.BROKER
        self.broker.in_flight += attempt.requests
        self.sent.append((attempt.request.token, attempt.requests))
        return None

    def room_deadline_s(self, attempt, now_s):
        return 99.0


def flow_with(dispatcher):
    anything = SimpleNamespace(
        stopping=False, give_back=lambda *_: None, get=lambda *_: True, ranks={},
        open_to=lambda *_: [dispatcher.broker],
    )  # fmt: skip
    waiting = WaitingRequests(set(), anything, anything)
    return RequestFlow(
        time.monotonic, anything, anything, dispatcher, anything, anything, waiting, anything
    )


def test_requests_behind_a_cut_group_keep_their_order():
    dispatcher = Dispatcher()
    flow = flow_with(dispatcher)
    dispatcher.broker.in_flight = ROOM
    for name, count in (("g", 20), *((f"s{n}", 1) for n in range(ROOM)), ("h", 8)):
        kind = GroupAttempt if count > 1 else SendAttempt
        flow.send(kind(flow.ends, request(name, count), (), 0, False, 0.0, 99.0), 0.0)
    steps = []
    dispatcher.in_vain = 0
    for step in range(5):
        dispatcher.broker.in_flight -= ROOM
        dispatcher.sent.clear()
        flow.settle(float(step))
        steps.append(list(dispatcher.sent))
    assert steps == [
        [("g", 8)], [(f"s{n}", 1) for n in range(ROOM)], [("h", 8)], [("g", 8)], [("g", 4)],
    ]  # fmt: skip
    assert dispatcher.in_vain <= len(steps), "only the other part of a group, once a step"


def test_a_defect_in_a_part_leaves_the_other_part_to_be_sent():
    """The connection has the part already, and ends it."""

    class Defect(Dispatcher):
        def send(self, attempt, now_s):
            if attempt.requests == ROOM:
                attempt.channel = SimpleNamespace()
                raise RuntimeError("a defect")
            return super().send(attempt, now_s)

    flow = flow_with(Defect())
    flow.send(GroupAttempt(flow.ends, request("g", ROOM + 2), (), 0, False, 0.0, 99.0), 0.0)
    assert flow._dispatcher.sent == [("g", 2)]


def test_groups_that_are_released_at_once_are_not_cut_for_the_same_room():
    dispatcher = Dispatcher()
    flow = flow_with(dispatcher)
    dispatcher.broker.in_flight = ROOM
    for name in ("g", "h", "i"):
        attempt = GroupAttempt(flow.ends, request(name, 20), (), 0, False, 0.0, 99.0)
        flow.send(attempt, 0.0)
    while flow.waiting.size:
        dispatcher.broker.in_flight -= ROOM
        flow.waiting._brokers.ranks = dict(flow.waiting._brokers.ranks)
        flow.settle(1.0)
    assert sorted(size for _, size in dispatcher.sent) == [4, 4, 4, 8, 8, 8, 8, 8, 8]


# --- the answers to a group --------------------------------------------------------------------

ANSWER = SendAnswer(0, "SEND_OK", "M1", 0, 10, "T1", "r", None, True)


def answers(*indices):
    """Return the answers to these messages of a group whose first opaque id is 100, as columns."""
    ids, transactions = (np.array([b"%c%d" % (c, n) for n in indices]) for c in b"MT")
    texts = {"msgId": ids, "transactionId": transactions, "recallHandle": ids}
    numbers = np.array(indices)
    return SendAnswers(ANSWER, Frame(0), numbers + 100, 0 * numbers, 10 * numbers, texts)


def sent_group(world, size):
    """Return a group that was written after half a second, with an answer half a second later."""
    attempt = GroupAttempt(deque(), request("g", size), (), 10 * size, False, NOW_S, NOW_S + 3.0)
    like = world.attempt()
    for name in ("target", "broker", "channel", "handed_s", "sent_s", "ended_s", "wall_ms"):
        setattr(attempt, name, getattr(like, name))
    attempt.first_opaque, attempt.wire_bytes, attempt.number, attempt.counted = 100, 40 * size, 3, 2
    attempt.broker.in_flight = size
    return attempt


def test_stored_messages_complete_together_and_all_others_leave_the_group():
    world = World()
    attempt = sent_group(world, 9)
    broker, end = attempt.broker, world.handler.group_ended
    broker.busy(0.0, 0.0)
    limit = broker.window.limit
    assert world.handler.part_ended(attempt).result is None
    assert end(attempt, answers(0, 2)) == end(attempt, SendAnswerFrame(101, ANSWER, Frame(0))) == []
    assert attempt.requests == broker.in_flight == 6 and attempt.window_requests == 9
    assert broker.stored_sent_s == NOW_S + 0.5 and broker.window.limit > limit
    completion = world.handler.part_ended(attempt)
    stored = completion.stored
    columns = stored.indices, stored.queue_offsets, stored.offset_message_ids, stored.rtt_ms
    assert [column.tolist() for column in columns] == [
        [0, 2, 1], [0, 20, 10], [b"M0", b"M2", b"M1"], [500.0] * 3,
    ]  # fmt: skip
    assert stored.transaction_ids.tolist() == [b"T0", b"T2", b"T1"]
    assert stored.recall_handles is None, "an answer lacks one"
    assert (completion.result.latency_ms, completion.result.offset_message_id) == (0.0, "M1")
    assert completion.attempts[-1].message_count == 3
    assert attempt.give_back(stored) == (30, 3) and attempt.window_requests == 6
    attempt.history = AttemptHistory([RECORD], RECORD, [ConnectError], "b")
    singles = end(attempt, Frame(2, opaque=104))
    singles += end(attempt, PlainAnswers(Frame(0), np.array([105, 107])))
    assert [frame.opaque for _, frame in singles] == [104, 105, 107]
    singles += end(attempt, lost := ConnectionLostError("cut"))
    assert [type(error) for _, error in singles[3:]] == [ConnectionLostError] * 3
    assert len({id(lost), *(id(error) for _, error in singles[3:])}) == 4
    names = ("ends", "ready_s", "deadline_s", "number", "counted", "target", "broker", "channel",
             "handed_s", "sent_s", "ended_s", "wall_ms", "strict")  # fmt: skip
    for single, _ in singles:
        assert type(single) is SendAttempt and (single.wire_bytes, single.body_bytes) == (40, 10)
        assert [getattr(single, n) for n in names] == [getattr(attempt, n) for n in names]
        history = single.history
        assert (history.records, history.waited, history.last_broker) == ([], None, "b")
        assert history.earlier == [ConnectError] and history.earlier is not attempt.history.earlier
    assert attempt.requests == attempt.body_bytes == attempt.window_requests == 0


@pytest.mark.parametrize("is_answered", [False, True])
@pytest.mark.parametrize("error", [UnwrittenError("full"), RequestTimeoutError("late")])
def test_a_group_of_which_nothing_was_sent_stays_whole(error, is_answered):
    world = World(records=False)
    attempt = sent_group(world, 2)
    if is_answered:
        world.handler.group_ended(attempt, answers(0))
        completion = world.handler.part_ended(attempt)
        assert completion.attempts == [] and completion.stored.recall_handles.tolist() == [b"M0"]
        assert completion.stored.rtt_ms.tolist() == [500.0] and attempt.first_answer() is None
    ends = world.handler.group_ended(attempt, error)
    is_whole = not is_answered and isinstance(error, UnwrittenError)
    assert (ends == [(attempt, error)]) is is_whole
    assert len(ends) == (1 if is_answered or is_whole else 2)
